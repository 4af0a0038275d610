"""The link to Redis: batches, deadlines, and whose fault a delay is."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from app.deadlines import Deadlines
from app.redis_link import MAX_BATCH, RedisLink
from app.settings import RedisSettings

from .conftest import until
from .redis_server import RedisServer

ADD = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
FAIL = "return redis.error_reply('no')"


@asynccontextmanager
async def linked(url: str, budget_s: float = 0.05) -> AsyncIterator[RedisLink]:
    link = RedisLink(RedisSettings(url=url), budget_s)
    task = asyncio.create_task(link.run())
    try:
        await until(lambda: link.is_up)
        yield link
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_many_scripts_share_few_round_trips_and_keep_their_order(redis: RedisServer) -> None:
    async with linked(redis.url) as link, Redis.from_url(redis.url) as client:
        answers = await asyncio.gather(*(link.evaluate(ADD, ["many"], [1], 5) for _ in range(3 * MAX_BATCH)))
        assert answers == list(range(1, 3 * MAX_BATCH + 1))
        assert link.status().failures == 0
        assert int((await client.info("clients"))["connected_clients"]) <= 4


async def test_scripts_that_redis_forgot_are_sent_again(redis: RedisServer) -> None:
    async with linked(redis.url) as link, Redis.from_url(redis.url) as client:
        for number in (1, 2):
            await client.script_flush()
            assert await link.evaluate(ADD, ["forgot"], [1], 5) == number
        assert link.status().failures == 0


async def test_script_that_fails_takes_no_other_with_it(redis: RedisServer) -> None:
    async with linked(redis.url) as link:
        good, bad, also_good = await asyncio.gather(
            link.evaluate(ADD, ["one"], [1], 5),
            link.evaluate(FAIL, ["one"], [], 5),
            link.evaluate(ADD, ["one"], [1], 5),
        )
        assert (good, bad, also_good) == (1, None, 2)
        assert (link.status().failures, link.is_up) == (1, True)


async def test_delay_of_the_event_loop_is_not_taken_for_one_of_redis(redis: RedisServer) -> None:
    async with linked(redis.url, budget_s=0.01) as link:
        for number in range(1, 6):
            asked = asyncio.create_task(link.evaluate(ADD, ["busy"], [1], 0.01))
            await asyncio.sleep(0)
            time.sleep(0.05)  # noqa: ASYNC251 - somebody keeps the loop busy for longer than the budget
            assert await asked == number
        assert (link.status().failures, link.is_up) == (0, True)


async def test_far_deadline_keeps_no_loop_awake_and_a_near_one_beside_it_is_kept() -> None:
    deadlines = Deadlines()
    called: list[str] = []
    deadlines.after(60, lambda: called.append("far"))
    started = time.monotonic()
    deadlines.after(0.05, lambda: called.append("near"))
    await until(lambda: called == ["near"], timeout_s=1)
    assert time.monotonic() - started > 0.04
    steps = deadlines.steps
    await asyncio.sleep(0.2)
    assert deadlines.steps - steps <= 1


async def test_frozen_redis_costs_the_budget_until_the_breaker_opens_and_nothing_after(redis: RedisServer) -> None:
    async with linked(redis.url, budget_s=0.02) as link:
        redis.freeze()
        try:
            answers = [await link.evaluate(ADD, ["frozen"], [1], 0.02) for _ in range(3)]
            await until(lambda: not link.is_up)
            assert answers == [None] * 3
            assert await link.evaluate(ADD, ["frozen"], [1], 60) is None
        finally:
            redis.thaw()
        await until(lambda: link.is_up)
        assert await link.evaluate(ADD, ["thawed"], [1], 5) == 1


async def test_caller_who_leaves_is_not_waited_for(redis: RedisServer) -> None:
    async with linked(redis.url) as link:
        leaving = [asyncio.create_task(link.evaluate(ADD, ["left"], [1], 5)) for _ in range(10)]
        await asyncio.sleep(0)
        for task in leaving[:5]:
            task.cancel()
        await asyncio.wait(leaving)
        assert await link.evaluate(ADD, ["left"], [1], 5) >= 6


async def test_whoever_waits_is_let_go_at_the_end(redis: RedisServer) -> None:
    redis.freeze()
    try:
        link = RedisLink(RedisSettings(url=redis.url), 30)
        link.is_up = True
        task = asyncio.create_task(link.run())
        asked = [asyncio.create_task(link.evaluate(ADD, ["end"], [1], 60)) for _ in range(3)]
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(1):
            assert await asyncio.gather(*asked) == [None] * 3
    finally:
        redis.thaw()
