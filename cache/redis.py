"""The tier that replicas share: Redis."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from .entry import TAG_BYTES, Corrupt, Entry, Selection, decode
from .tier import TierStats


class Redis(Protocol):
    """Runs commands, in the order in which they come; the second argument of each is its key. None stands for nil, and
    for an answer that cannot be had."""

    @property
    def is_up(self) -> bool: ...

    def submit_command(self, *arguments: Any) -> "asyncio.Future[Any]": ...

    async def command(self, *arguments: Any, timeout_s: float) -> Any: ...

    async def delete_matching(self, pattern: str) -> int:
        """Delete all keys that match, on every node."""
        ...


class RedisTier:
    """Under `namespace`. A look loses `budget_s` at most; a store is not waited for."""

    name = "redis"
    is_shared = True

    def __init__(self, redis: Redis, namespace: str, budget_s: float, clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._namespace = namespace
        self._budget_s = budget_s
        self._clock = clock
        self._stats = TierStats()

    async def get(self, key: bytes) -> Entry | None:
        if not self._redis.is_up:
            self._stats.misses += 1
            return None
        name = self._name(key)
        entry = self._decoded(name, await self._redis.command("GET", name, timeout_s=self._budget_s))
        if entry is None or entry.expires_at <= self._clock():
            self._stats.misses += 1
            return None
        self._stats.hits += 1
        return entry

    def _decoded(self, name: str, value: Any) -> Entry | None:
        if value is None:
            return None
        try:
            return decode(value)
        except (Corrupt, TypeError):
            self._stats.failures += 1
            self._redis.submit_command("DEL", name)
            return None

    def put(self, key: bytes, entry: Entry) -> None:
        left_ms = int((entry.expires_at - self._clock()) * 1000)
        if left_ms <= 0 or not self._redis.is_up:
            return
        stored = self._redis.submit_command("SET", self._name(key), entry.encode(), "PX", left_ms)
        stored.add_done_callback(self._count)

    def _count(self, stored: "asyncio.Future[Any]") -> None:
        if stored.cancelled() or stored.result() is None:
            self._stats.failures += 1
        else:
            self._stats.stores += 1

    async def clear(self, selection: Selection) -> int:
        if selection.key is not None:
            # Not within a request's budget: whoever clears wants it done.
            removed = await self._redis.command("DEL", self._name(selection.key), timeout_s=1.0)
            return int(removed or 0)
        tags = [part.hex() if part is not None else "*" for part in (selection.tenant, selection.model)]
        return await self._redis.delete_matching(f"{self._namespace}:cache:{tags[0]}:{tags[1]}:*")

    def stats(self) -> TierStats:
        return self._stats

    def _name(self, key: bytes) -> str:
        tenant, model, digest = key[:TAG_BYTES], key[TAG_BYTES : 2 * TAG_BYTES], key[2 * TAG_BYTES :]
        return f"{self._namespace}:cache:{tenant.hex()}:{model.hex()}:{digest.hex()}"
