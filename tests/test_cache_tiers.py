"""One contract for every medium, and what each has besides."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from app.redis_link import RedisLink
from app.settings import RedisSettings
from cache.disk import DiskTier
from cache.entry import FORMAT, Corrupt, Selection, decode, tag
from cache.memory import MemoryTier
from cache.redis import RedisTier
from cache.store import ResponseCache
from cache.tier import Tier

from .cache_helpers import entry_of, key_of
from .conftest import until
from .redis_server import RedisServer, redis_cluster

MB = 1024 * 1024


class Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with redis_cluster() as url:
        yield url


@asynccontextmanager
async def open_disk(path: Path, **options: object) -> AsyncIterator[DiskTier]:
    tier = DiskTier(path, **{"max_bytes": 64 * MB, "compression": "zstd", **options})
    task = asyncio.create_task(tier.run())
    try:
        await until(lambda: tier.last_error is None)
        yield tier
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def open_redis(url: str, clock: Callable[[], float] = time.time) -> AsyncIterator[tuple[RedisTier, RedisLink]]:
    link = RedisLink(RedisSettings(url=url), 1.0)
    task = asyncio.create_task(link.run())
    try:
        await until(lambda: link.is_up)
        yield RedisTier(link, f"test{random.randrange(10**9)}", 1.0, clock), link
    finally:
        task.cancel()
        await asyncio.wait([task])


MEDIA = ["lru", "lfu", "adaptive", "zstd", "none", "redis", pytest.param("cluster", marks=pytest.mark.slow)]
Opened = tuple[Tier, Clock, Callable[[], Awaitable[None]]]


@pytest.fixture(params=MEDIA)
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    """A tier, its clock, and what waits until all is stored."""
    clock = Clock()
    medium = request.param

    async def stored() -> None:
        await asyncio.sleep(0)

    async with AsyncExitStack() as stack:
        tier: Tier
        if medium in ("zstd", "none"):
            tier = await stack.enter_async_context(open_disk(tmp_path, compression=medium, clock=clock))
        elif medium in ("redis", "cluster"):
            server = request.getfixturevalue(medium)
            url = server if isinstance(server, str) else server.url
            tier, _ = await stack.enter_async_context(open_redis(url, clock))
        else:
            tier = MemoryTier(1000, 64 * MB, medium, clock)
        yield tier, clock, stored


async def test_what_was_stored_is_found_as_it_was(opened: Opened) -> None:
    tier, _, _ = opened
    entries = {key_of(n): entry_of(os.urandom(10 * n)) for n in range(50)}
    for key, entry in entries.items():
        tier.put(key, entry)
    for key, entry in entries.items():
        assert await tier.get(key) == entry
    assert await tier.get(key_of("other")) is None
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.failures) == (50, 1, 0)
    tier.put(key_of(1), entry_of(b"newer"))
    assert (await tier.get(key_of(1))).rest == entry_of(b"newer").rest
    await until(lambda: tier.stats().stores == 51)
    if tier.name != "redis":
        await until(lambda: tier.stats().entries == 50)
        assert tier.stats().size_bytes > 50 * 250


async def test_what_has_expired_is_not_found(opened: Opened) -> None:
    tier, clock, _ = opened
    tier.put(key_of(1), entry_of(ttl_s=0.2))
    tier.put(key_of(2), entry_of(ttl_s=60))
    assert await tier.get(key_of(1)) is not None
    await asyncio.sleep(0.25)
    assert await tier.get(key_of(1)) is None
    clock.ahead_s = 59
    assert await tier.get(key_of(2)) is not None
    clock.ahead_s = 61
    assert await tier.get(key_of(2)) is None
    tier.put(key_of(3), entry_of(made_at=time.time() - 100, ttl_s=60))
    assert await tier.get(key_of(3)) is None


async def test_clearing_takes_what_was_selected_and_nothing_else(opened: Opened) -> None:
    tier, _, _ = opened
    everything = {
        (tenant, model, n): key_of(n, tenant, model) for tenant in ("a", "b") for model in ("x", "y") for n in range(40)
    }

    async def left_after(selection: Selection) -> tuple[int, set[tuple[str, str, int]]]:
        for key in everything.values():
            tier.put(key, entry_of())
        removed = await tier.clear(selection)
        return removed, {name for name, key in everything.items() if await tier.get(key) is not None}

    names = set(everything)
    assert await left_after(Selection(tenant=tag("a"))) == (80, {name for name in names if name[0] != "a"})
    assert await left_after(Selection(model=tag("x"))) == (80, {name for name in names if name[1] != "x"})
    both = Selection(tenant=tag("a"), model=tag("x"))
    assert await left_after(both) == (40, {name for name in names if name[:2] != ("a", "x")})
    assert await left_after(Selection(key=everything["a", "x", 7])) == (1, names - {("a", "x", 7)})
    assert await left_after(Selection()) == (160, set())
    assert await tier.clear(Selection()) == 0
    assert await tier.clear(Selection(key=key_of("never"))) == 0


async def test_many_uses_at_once_do_not_disturb_each_other(opened: Opened) -> None:
    tier, _, _ = opened

    async def use(n: int) -> None:
        for step in range(5):
            entry = entry_of(b"%d.%d" % (n, step))
            tier.put(key_of(n), entry)
            assert await tier.get(key_of(n)) == entry

    await asyncio.gather(*(use(n) for n in range(100)))
    assert tier.stats().failures == 0


# Memory


@pytest.mark.parametrize("eviction", ["lru", "lfu", "adaptive"])
def test_memory_is_bounded_by_entries_and_by_bytes(eviction: str) -> None:
    tier = MemoryTier(100, 64 * MB, eviction)
    for n in range(1000):
        tier.put(key_of(n), entry_of())
    assert (tier.stats().entries, tier.stats().evictions) == (100, 900)
    tier = MemoryTier(10**6, 1 * MB, eviction)
    for n in range(3000):
        tier.put(key_of(n), entry_of(b"x" * random.randrange(2000)))
        assert tier.stats().size_bytes <= MB
    assert tier.stats().size_bytes > 0.9 * MB
    tier.put(key_of("huge"), entry_of(b"x" * 2 * MB))
    assert tier.get_nowait(key_of("huge")) is None
    assert tier.stats().entries > 100


def test_memory_keeps_what_its_eviction_says() -> None:
    def kept(eviction: str) -> set[int]:
        tier = MemoryTier(10, 64 * MB, eviction)
        for n in range(5):
            tier.put(key_of(n), entry_of())
        for _ in range(20):
            for n in range(5):
                tier.get_nowait(key_of(n))
        for n in range(100, 200):  # asked for once each
            tier.put(key_of(n), entry_of())
        return {n for n in (*range(5), *range(100, 200)) if tier.get_nowait(key_of(n)) is not None}

    assert kept("lru") == set(range(190, 200))
    assert kept("lfu") >= set(range(5))
    assert kept("adaptive") >= set(range(5))


# Entries


def test_entry_travels_as_bytes_and_damaged_bytes_are_told_apart() -> None:
    entry = entry_of("Grüße".encode())
    assert decode(entry.encode()) == entry
    for damaged in (b"", b"x", entry.encode()[:20], b"\x63" + entry.encode()[1:], bytes([FORMAT])):
        with pytest.raises(Corrupt):
            decode(damaged)


# Several tiers


async def test_hit_in_a_lower_tier_fills_those_above(tmp_path: Path, redis: RedisServer) -> None:
    async with open_disk(tmp_path) as disk, open_redis(redis.url) as (shared, _):
        memory = MemoryTier(10, MB, "lru")
        cache = ResponseCache(memory, [shared, disk], 1000)
        disk.put(key_of(1), entry_of())
        assert cache.recall(key_of(1)) is None
        assert (await cache.peek(key_of(1))).tier == "disk"
        assert memory.get_nowait(key_of(1)) is None  # looking fills nothing
        hit = await cache.look_below(key_of(1))
        assert (hit.tier, hit.entry) == ("disk", await disk.get(key_of(1)))
        assert cache.recall(key_of(1)).tier == "memory"
        await memory.clear(Selection())
        assert (await cache.look_below(key_of(1))).tier == "redis"
        assert cache.put(key_of(2), entry_of(b"x" * 2000)) is False
        assert await cache.peek(key_of(2)) is None


async def test_answer_begun_before_a_clearing_is_void_wherever_it_lies() -> None:
    memory = MemoryTier(10, MB, "lru")
    cache = ResponseCache(memory, [], 1000)
    old = entry_of(made_at=time.time() - 5)
    await cache.clear(Selection(model=tag("demo")), time.time())
    assert cache.put(key_of(1), old) is False
    memory.put(key_of(1), old)
    assert cache.recall(key_of(1)) is None
    assert cache.put(key_of(1, model="other"), old) is True
    assert cache.put(key_of(1), entry_of(made_at=time.time() + 0.01)) is True
    assert cache.recall(key_of(1)) is not None


# Redis


async def test_damaged_value_in_redis_is_a_miss_and_removed(redis: RedisServer) -> None:
    async with open_redis(redis.url) as (tier, link):
        tier.put(key_of(1), entry_of())
        name = tier._name(key_of(1))
        await link.command("SET", name, b"rubbish", timeout_s=1)
        assert await tier.get(key_of(1)) is None
        assert tier.stats().failures == 1
        assert await link.command("EXISTS", name, timeout_s=1) == 0
        await link.command("HSET", name, "a", "b", timeout_s=1)
        assert await tier.get(key_of(1)) is None


async def test_ttl_in_redis_is_that_of_the_entry(redis: RedisServer) -> None:
    async with open_redis(redis.url) as (tier, link):
        tier.put(key_of(1), entry_of(ttl_s=30))
        assert 29_000 < await link.command("PTTL", tier._name(key_of(1)), timeout_s=1) <= 30_000
