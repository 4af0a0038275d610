"""What callers may use, in this process alone and shared through Redis: one suite for both."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from limits.aio.storage import RedisStorage
from redis.asyncio import Redis

from app.redis_link import RedisLink
from app.settings import RedisSettings
from auth.errors import ConcurrencyLimitExceeded, LimitExceeded, RateLimitExceeded
from auth.limits import Admission, Limiter, Policy
from auth.principal import Principal, Quota
from auth.shared_counts import RedisCounts

from .conftest import until
from .redis_server import RedisServer

ANN = Principal("ann", "acme")
BOB = Principal("bob", "acme")
EVE = Principal("eve", "other")
WINDOW_S = 2


@asynccontextmanager
async def counting(redis: RedisServer, lease_s: float = 60) -> AsyncIterator[RedisCounts]:
    link = RedisLink(RedisSettings(url=redis.url), budget_s=5)
    counts = RedisCounts(link, "test", budget_s=5, window_s=WINDOW_S, lease_s=lease_s)
    async with running(link), running(counts):
        await until(lambda: link.is_up)
        yield counts


@asynccontextmanager
async def running(part: RedisCounts | RedisLink) -> AsyncIterator[None]:
    task = asyncio.create_task(part.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture(params=["local", "shared"])
async def limiter(request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[Callable[[Policy], Limiter]]:
    """Makes limiters; those of one test share their counts only if Redis does."""
    if request.param == "local":
        yield lambda policy: Limiter(policy, window_s=WINDOW_S)
        return
    redis.stop()
    redis.start()
    async with counting(redis) as counts:
        yield lambda policy: Limiter(policy, counts, window_s=WINDOW_S)


Make = Callable[[Policy], Limiter]


async def refusal(attempt: Awaitable[Any]) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as caught:
        await attempt
    return caught.value


@pytest.mark.slow
async def test_requests_of_a_window_are_limited_and_the_next_begins_when_told(limiter: Make) -> None:
    limits = limiter(Policy(tenant=Quota(requests_per_minute=3)))
    for left in (2, 1, 0):
        admission = await limits.admit(ANN)
        (standing,) = admission.tightest()
        assert (standing.window.limit, standing.remaining) == (3, left)
        await admission.settle(100)
    await asyncio.sleep(0.3)
    refused = await refusal(limits.admit(BOB))
    told = time.monotonic()
    assert isinstance(refused, RateLimitExceeded)
    assert (refused.kind, refused.retry_after_s) == ("requests", 2)
    (standing,) = refused.standings
    assert 0 < standing.reset_s <= WINDOW_S
    await limits.admit(EVE)
    # Right to the second: a second before it, still refused; when it is over, not.
    await asyncio.sleep(told + refused.retry_after_s - 1 - time.monotonic())
    await refusal(limits.admit(ANN))
    await asyncio.sleep(told + refused.retry_after_s - time.monotonic())
    await limits.admit(ANN)


@pytest.mark.slow
async def test_tokens_are_charged_when_known_and_count_until_the_window_ends(limiter: Make) -> None:
    limits = limiter(Policy(subject=Quota(tokens_per_minute=100)))
    first, second = await limits.admit(ANN), await limits.admit(ANN)
    await first.settle(60)
    await first.settle(60)  # only the first time counts
    third = await limits.admit(ANN)
    assert [standing.remaining for standing in third.tightest()] == [40]
    await second.settle(70)
    assert [standing.remaining for standing in second.tightest()] == [30]  # as it was, and what it used itself
    refused = await refusal(limits.admit(ANN))
    assert (refused.kind, refused.standings[0].used, refused.standings[0].remaining) == ("tokens", 130, 0)
    await limits.admit(BOB)
    await asyncio.sleep(refused.retry_after_s)
    await limits.admit(ANN)


async def test_as_many_run_at_once_as_may(limiter: Make) -> None:
    limits = limiter(Policy(tenant=Quota(concurrent=2)))
    running = [await limits.admit(ANN), await limits.admit(BOB)]
    refused = await refusal(limits.admit(ANN))
    assert isinstance(refused, ConcurrencyLimitExceeded)
    assert refused.retry_after_s == 1
    await limits.admit(EVE)
    for admission in running:
        await admission.settle()
        await admission.settle()
        await limits.admit(BOB)
    await refusal(limits.admit(BOB))


async def test_refused_request_takes_nothing(limiter: Make) -> None:
    limits = limiter(Policy(tenant=Quota(requests_per_minute=3), subject=Quota(requests_per_minute=1, concurrent=1)))
    await limits.admit(ANN)
    for _ in range(5):
        assert (await refusal(limits.admit(ANN))).kind == "requests"
    await limits.admit(BOB)
    admission = await limits.admit(Principal("cat", "acme"))
    assert [standing.window.whose for standing in admission.tightest()] == ["tenant"]
    assert "tenant" in str(await refusal(limits.admit(Principal("dan", "acme"))))


async def test_concurrency_refused_counts_no_request(limiter: Make) -> None:
    limits = limiter(Policy(subject=Quota(requests_per_minute=2, concurrent=1)))
    admission = await limits.admit(ANN)
    for _ in range(5):
        assert (await refusal(limits.admit(ANN))).kind == "concurrent"
    await admission.settle()
    await limits.admit(ANN)


async def test_of_many_at_once_as_many_get_in_as_may(limiter: Make) -> None:
    limits = limiter(Policy(tenant=Quota(requests_per_minute=50), subject=Quota(concurrent=10)))
    people = [Principal(f"p{number % 7}", "acme") for number in range(200)]
    answers = await asyncio.gather(*(limits.admit(person) for person in people), return_exceptions=True)
    assert {type(answer) for answer in answers} <= {Admission, RateLimitExceeded, ConcurrencyLimitExceeded}
    assert sum(isinstance(answer, Admission) for answer in answers) == 50


async def test_claims_go_before_the_tier_and_the_tier_before_the_defaults(limiter: Make) -> None:
    policy = Policy(
        tenant=Quota(concurrent=100),
        subject=Quota(requests_per_minute=1, tokens_per_minute=1000, concurrent=9),
        tiers={"gold": (Quota(), Quota(requests_per_minute=2, concurrent=0))},
    )
    plain = policy.plan(ANN)
    assert [(window.kind, window.limit) for window in plain.windows] == [("requests", 1), ("tokens", 1000)]
    gold = Principal("ann", "acme", tier="gold", quota=Quota(concurrent=3))
    assert [window.limit for window in policy.plan(gold).windows] == [2, 1000]
    assert [slots.limit for slots in policy.plan(gold).slots] == [100, 3]
    assert policy.plan(Principal("ann", "acme", tier="unheard-of")) == plain
    limits = limiter(policy)
    await limits.admit(ANN)
    await refusal(limits.admit(ANN))
    await limits.admit(gold)  # the same count under another limit
    await refusal(limits.admit(gold))


async def test_nothing_allowed_is_a_limit_too(limiter: Make) -> None:
    limits = limiter(Policy())
    for quota, kind in (
        (Quota(requests_per_minute=0), "requests"),
        (Quota(tokens_per_minute=0), "tokens"),
        (Quota(concurrent=0), "concurrent"),
    ):
        refused = await refusal(limits.admit(Principal("ann", "acme", quota=quota)))
        assert refused.kind == kind
        assert refused.retry_after_s >= 1
    await (await limits.admit(ANN)).settle(5)


async def test_odd_names_are_not_mixed_up(limiter: Make) -> None:
    limits = limiter(Policy(tenant=Quota(requests_per_minute=1), subject=Quota(requests_per_minute=1)))
    names = ["a", "a:b", "a/b", "{a}", "a}", "*", "ä ö", "a:requests", "tenant:{a}", "%7Ba%7D", "x" * 256]
    for tenant in names:
        await limits.admit(Principal("a", tenant))
    for subject in names[1:]:
        refused = await refusal(limits.admit(Principal(subject, "a")))
        assert "tenant" in str(refused)
    limits = limiter(Policy(subject=Quota(requests_per_minute=1)))
    for subject in names:
        await limits.admit(Principal(subject, "b"))


async def test_old_windows_are_forgotten() -> None:
    limits = Limiter(Policy(subject=Quota(requests_per_minute=5)), window_s=1)
    for number in range(1000):
        await limits.admit(Principal(f"s{number}", "t"))
    await asyncio.sleep(1.1)
    await limits.admit(ANN)
    assert limits._local.windows == 1


# Shared only


async def test_two_replicas_enforce_one_limit(redis: RedisServer) -> None:
    policy = Policy(tenant=Quota(requests_per_minute=10, tokens_per_minute=1000, concurrent=6))
    person = Principal("ann", "two-replicas")
    async with counting(redis) as one, counting(redis) as two:
        replicas = [Limiter(policy, one, WINDOW_S), Limiter(policy, two, WINDOW_S)]
        running = [await replicas[number % 2].admit(person) for number in range(6)]
        for replica in replicas:
            assert (await refusal(replica.admit(person))).kind == "concurrent"
        await running[0].settle(400)
        await running[1].settle(400)
        await (await replicas[0].admit(person)).settle(100)
        assert (await replicas[1].admit(person)).tightest()[1].remaining == 100
        for admission in running:
            await admission.settle()
        await replicas[0].admit(person)
        await replicas[1].admit(person)
        for replica in replicas:
            assert (await refusal(replica.admit(person))).kind == "requests"


async def test_counts_are_the_fixed_windows_of_limits(redis: RedisServer) -> None:
    async with counting(redis) as counts:
        limits = Limiter(Policy(tenant=Quota(requests_per_minute=5, tokens_per_minute=50)), counts, WINDOW_S)
        person = Principal("ann", "as-limits")
        for _ in range(3):
            await (await limits.admit(person)).settle(7)
        storage = RedisStorage(f"async+{redis.url}", implementation="redispy", key_prefix="test:limits")
        requests, tokens = (window.key for window in Policy(tenant=Quota(1, 1)).plan(person).windows)
        assert (await storage.get(requests), await storage.get(tokens)) == (3, 21)
        assert 0 < await storage.get_expiry(requests) - time.time() <= WINDOW_S + 0.5
        assert await storage.incr(requests, WINDOW_S, 2) == 5
        assert (await refusal(limits.admit(person))).kind == "requests"
        await storage.bridge.storage.aclose()


@pytest.mark.slow
async def test_slots_of_a_killed_replica_come_back_and_those_of_a_living_one_stay(redis: RedisServer) -> None:
    policy = Policy(tenant=Quota(concurrent=2))
    person = Principal("ann", "leases")
    async with counting(redis, lease_s=2) as alive:
        dead = RedisCounts(alive._redis, "test", budget_s=5, window_s=WINDOW_S, lease_s=2)
        await Limiter(policy, dead, WINDOW_S).admit(person)  # and nobody looks after its lease
        limits = Limiter(policy, alive, WINDOW_S)
        running = await limits.admit(person)
        await refusal(limits.admit(person))
        await asyncio.sleep(4)
        again = await limits.admit(person)
        await refusal(limits.admit(person))
        await running.settle()
        await again.settle()
        assert await members(redis, "leases") == 0


async def test_caller_who_leaves_while_redis_is_asked_keeps_no_slot(redis: RedisServer) -> None:
    async with counting(redis) as counts:
        limits = Limiter(Policy(tenant=Quota(concurrent=1)), counts, WINDOW_S)
        person = Principal("ann", "leaver")
        await (await limits.admit(person)).settle()
        redis.freeze()
        task = asyncio.create_task(limits.admit(person))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        redis.thaw()
        await until(lambda: not counts._owed)
        admission = await limits.admit(person)
        # Leaving while it is given back loses nothing either.
        redis.freeze()
        task = asyncio.create_task(admission.settle(3))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        redis.thaw()
        await until(lambda: not counts._owed)
        await limits.admit(person)
        assert limits.running == 1


@pytest.mark.slow
async def test_without_redis_each_replica_enforces_its_own_limit_with_what_it_knows(redis: RedisServer) -> None:
    async with counting(redis) as counts:
        link = counts._redis
        limits = Limiter(Policy(tenant=Quota(requests_per_minute=4, concurrent=3)), counts, 60)
        person = Principal("ann", "alone")
        kept = [await limits.admit(person) for _ in range(2)]
        redis.stop()
        await until(lambda: not link.is_up)
        kept.append(await limits.admit(person))
        assert (await refusal(limits.admit(person))).kind == "concurrent"
        await kept.pop().settle()
        kept.append(await limits.admit(person))
        assert (await refusal(limits.admit(person))).kind == "requests"
        assert limits.decisions["requests", "local"] == 1
        # Back, and empty: what runs is told to it again, and given back in the end.
        redis.start()
        await until(lambda: link.is_up)
        assert await counts._renew_all()
        assert await members(redis, "alone") == 3
        for admission in kept:
            await admission.settle()
        await until(lambda: not counts._owed)
        assert await members(redis, "alone") == 0


async def members(redis: RedisServer, tenant: str) -> int:
    """Leases of the tenant's slots, as Redis has them."""
    client = Redis.from_url(redis.url)
    try:
        return int(await client.zcard(f"test:limits:tenant:{{{tenant}}}:running"))
    finally:
        await client.aclose()
