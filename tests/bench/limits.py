"""What limits cost a request, and what it loses when Redis hangs.

    python -m tests.bench.limits [--requests 3000]

Needs redis-server. A tenant with limits on requests and on tokens is admitted and settled, one request after another:
without limits, counted here, counted in Redis by the gateway's scripts, and, for comparison, by the Redis storage of
the library limits (a hit, a count, and two expiries before, a hit after). Printed: microseconds of CPU a request in
this process, and of waiting. Then Redis is frozen, and the longest waits of the requests after it are printed.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

import uvloop
from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage

from app.redis_link import RedisLink
from app.settings import RedisSettings
from auth.limits import Limiter, Policy
from auth.principal import Principal, Quota
from auth.shared_counts import RedisCounts
from tests.redis_server import redis_server

CALLER = Principal("ann", "acme")
LOTS = 10**9
BUDGET_S = 0.01


async def measure(name: str, count: int, request: Callable[[], Awaitable[None]]) -> None:
    for _ in range(100):
        await request()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        await request()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{name:34} {cpu / count * 1e6:8.1f} {wall / count * 1e6:8.1f}")


def admitting(limiter: Limiter) -> Callable[[], Awaitable[None]]:
    async def request() -> None:
        admission = await limiter.admit(CALLER)
        await admission.settle(30)

    return request


async def run(count: int) -> None:
    policy = Policy(tenant=Quota(requests_per_minute=LOTS, tokens_per_minute=LOTS))
    with redis_server() as server:
        link = RedisLink(RedisSettings(url=server.url), BUDGET_S)
        counts = RedisCounts(link, "bench", BUDGET_S)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(link.run()), group.create_task(counts.run())]
            while not link.is_up:
                await asyncio.sleep(0.01)
            storage = RedisStorage(f"async+{server.url}", implementation="redispy")
            requests, tokens = (RateLimitItemPerMinute(LOTS).key_for("acme", kind) for kind in ("r", "t"))

            async def library() -> None:
                await storage.incr(requests, 60)
                await asyncio.gather(storage.get(tokens), storage.get_expiry(requests), storage.get_expiry(tokens))
                await storage.incr(tokens, 60, 30)

            print(f"{'[us a request]':34} {'CPU':>8} {'waiting':>8}")
            await measure("no limits", count, admitting(Limiter(Policy())))
            await measure("counted here", count, admitting(Limiter(policy)))
            shared = admitting(Limiter(policy, counts))
            await measure("counted in Redis", count, shared)
            await measure("counted in Redis by limits' storage", count, library)

            server.freeze()
            waits = []
            for _ in range(50):
                started = time.perf_counter()
                await shared()
                waits.append((time.perf_counter() - started) * 1000)
            print("Redis frozen, longest waits [ms]:", " ".join(f"{wait:.1f}" for wait in sorted(waits)[:-6:-1]))
            server.thaw()
            for task in tasks:
                task.cancel()
        await storage.bridge.storage.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    uvloop.run(run(parser.parse_args().requests))


if __name__ == "__main__":
    main()
