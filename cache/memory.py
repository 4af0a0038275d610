"""The tier in this process's memory."""

import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Literal

from cachetools import LFUCache, LRUCache

from .adaptive import AdaptiveCache
from .entry import Entry, Selection
from .tier import TierStats

# What an entry's objects take without the bytes of its answer.
_EMPTY = Entry(b"", b"", 1, 1, 1.0, 2.0)
OBJECTS_BYTES = sum(map(sys.getsizeof, (_EMPTY, *_EMPTY)))
Eviction = Literal["lru", "lfu", "adaptive"]

# Bytes that an entry costs besides its objects: places in the containers, with the room that these grow by, and what
# the allocator rounds up. Measured as what `python -m tests.bench.memory_tier` says of the process's resident memory.
OVERHEAD_BYTES: dict[Eviction, int] = {"lru": 220, "lfu": 260, "adaptive": 160}


class MemoryTier:
    """Bounded by entries and by bytes; an entry is charged what its objects take, and its share of the containers."""

    name = "memory"
    is_shared = False

    def __init__(
        self, capacity: int, max_memory_bytes: int, eviction: Eviction, clock: Callable[[], float] = time.time
    ) -> None:
        self._capacity = capacity
        self._max_bytes = max_memory_bytes
        self._overhead_bytes = OVERHEAD_BYTES[eviction]
        self._clock = clock
        # Mutable state, changed by `put`, `_drop`, and `_evict`.
        self._entries = container(eviction)
        self._size_bytes = 0
        self._stats = TierStats()

    def get_nowait(self, key: bytes) -> Entry | None:
        entry = self.find(key)
        if entry is None:
            self._stats.misses += 1
        return entry

    def find(self, key: bytes) -> Entry | None:
        """The same for somebody who will look again: nothing found is not counted as a miss."""
        if key not in self._entries:  # quicker than an exception, by much
            return None
        entry = self._entries[key]
        if entry.expires_at <= self._clock():
            self._drop(key, entry)
            return None
        self._stats.hits += 1
        return entry

    async def get(self, key: bytes) -> Entry | None:
        return self.get_nowait(key)

    def put(self, key: bytes, entry: Entry) -> None:
        size_bytes = self._size_of(entry)
        if key in self._entries:
            self._drop(key, self._entries[key])
        if size_bytes > self._max_bytes or entry.expires_at <= self._clock():
            return
        while len(self._entries) >= self._capacity or self._size_bytes + size_bytes > self._max_bytes:
            self._evict()
        self._entries[key] = entry
        self._size_bytes += size_bytes
        self._stats.stores += 1

    async def clear(self, selection: Selection) -> int:
        if selection.key is not None:
            selected = [selection.key] if selection.key in self._entries else []
        else:
            selected = [key for key in self._entries if key in selection]
        for key in selected:
            self._drop(key, self._entries[key])
        return len(selected)

    def stats(self) -> TierStats:
        self._stats.entries, self._stats.size_bytes = len(self._entries), self._size_bytes
        return self._stats

    def _drop(self, key: bytes, entry: Entry) -> None:
        del self._entries[key]
        self._size_bytes -= self._size_of(entry)

    def _evict(self) -> None:
        _, entry = self._entries.popitem()
        self._size_bytes -= self._size_of(entry)
        self._stats.evictions += 1

    def _size_of(self, entry: Entry) -> int:
        return len(entry.id_prefix) + len(entry.rest) + OBJECTS_BYTES + self._overhead_bytes


def container(eviction: Eviction) -> MutableMapping[bytes, Entry]:
    """A mapping whose `popitem` takes what has to go."""
    if eviction == "adaptive":
        return AdaptiveCache()
    unbounded = float("inf")
    cache: MutableMapping[bytes, Entry] = LRUCache(unbounded) if eviction == "lru" else LFUCache(unbounded)
    return cache
