"""How much of a raw ASGI app's throughput is left when an answer comes from the cache, and what a miss costs more.

    python -m tests.bench.cache_hits [--seconds 8] [--rounds 3]

Every feature is on: tokens are checked, limits counted, metrics kept, and the access log goes to a file. Each round
runs all servers one after the other, on one core, with wrk on another; the medians are told.
"""

import argparse
import contextlib
import json
import statistics
from collections import defaultdict
from pathlib import Path

from tests.redis_server import redis_server
from tests.tokens import token

from .http import BASE, BASE_WITHOUT_LIMITS, Load, gateway, raw_app, workspace

CONNECTIONS = 32
MANY_CONNECTIONS = 128
QUESTIONS = 1000
CACHE_OFF = "[cache]\nenabled = false"
BOTH_OFF = f"{CACHE_OFF}\n[singleflight]\nscope = 'off'"


def bodies(count: int, unique: bool = False) -> list[str]:
    return [
        json.dumps(
            {
                "model": "demo",
                "temperature": 0,
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": f"Question {'NUMBER' if unique else number}: where does water run to?"},
                ],
            }
        )
        for number in range(count)
    ]


def run(folder: Path, seconds: int, loads: dict[str, list[Load]]) -> None:
    secret = token(exp=4_000_000_000)
    asked = bodies(QUESTIONS)
    with raw_app(folder) as server:
        for connections in (CONNECTIONS, MANY_CONNECTIONS):
            loads[f"raw app, {connections} connections"].append(
                server.load(folder, asked, secret, connections, seconds)
            )
    with gateway(folder) as server:
        server.load(folder, asked, secret, CONNECTIONS, 3)
        for connections in (CONNECTIONS, MANY_CONNECTIONS):
            loads[f"memory hit, {connections} connections"].append(
                server.load(folder, asked, secret, connections, seconds)
            )
    # Where there is Redis, limits are counted in it, too.
    for name, base in (("Redis hit", BASE), ("Redis hit without limits", BASE_WITHOUT_LIMITS)):
        with contextlib.ExitStack() as stack:
            redis = stack.enter_context(redis_server())
            config = f"[cache.memory]\nenabled = false\n[cache.redis]\nurl = '{redis.url}'"
            server = stack.enter_context(gateway(folder, config, base))
            server.load(folder, asked, secret, CONNECTIONS, 3)
            for connections in (CONNECTIONS, MANY_CONNECTIONS):
                loads[f"{name}, {connections} connections"].append(
                    server.load(folder, asked, secret, connections, seconds)
                )
    unique = bodies(1, unique=True)
    for name, config in (("all miss", ""), ("cache off", CACHE_OFF), ("cache and singleflight off", BOTH_OFF)):
        with gateway(folder, config) as server:
            loads[f"{name}, {CONNECTIONS} connections"].append(
                server.load(folder, unique, secret, CONNECTIONS, seconds, unique=True)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    loads: defaultdict[str, list[Load]] = defaultdict(list)
    with workspace() as folder:
        for _ in range(arguments.rounds):
            run(folder, arguments.seconds, loads)
    raw = loads[f"raw app, {CONNECTIONS} connections"]
    print(f"{'':40} {'per CPU-second':>14} {'of raw':>7} {'p50 ms':>7} {'p99 ms':>7}")
    for name, rounds in loads.items():
        ratio = statistics.median(load.per_cpu_s / other.per_cpu_s for load, other in zip(rounds, raw, strict=True))
        per_cpu_s = statistics.median(load.per_cpu_s for load in rounds)
        p50, p99 = (statistics.median(getattr(load, f"p{q}_us") for load in rounds) / 1000 for q in (50, 99))
        print(f"{name:40} {per_cpu_s:14,.0f} {ratio:7.2f} {p50:7.2f} {p99:7.2f}")


if __name__ == "__main__":
    main()
