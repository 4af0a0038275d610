"""The tiers as one cache: looked up from the quickest to the slowest, filled from the slowest to the quickest."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .clearing import Cuts
from .entry import Entry, Selection
from .memory import MemoryTier
from .tier import Tier


class Hit(NamedTuple):
    entry: Entry
    tier: str


class ResponseCache:
    """`memory` is looked at without waiting; `lower` in their order. What is beyond `max_entry_bytes` is not stored."""

    def __init__(
        self,
        memory: MemoryTier | None,
        lower: Sequence[Tier],
        max_entry_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._memory = memory
        self._lower = list(lower)
        self._max_entry_bytes = max_entry_bytes
        self._clock = clock
        self.cuts = Cuts(clock)
        self.tiers: list[Tier] = [*([] if memory is None else [memory]), *lower]

    @property
    def has_lower(self) -> bool:
        return bool(self._lower)

    def recall(self, key: bytes, max_age_s: float | None = None, is_final: bool = True) -> Hit | None:
        """Look in memory; unless it is final, nothing found is not counted as a miss."""
        if self._memory is None:
            return None
        entry = self._memory.get_nowait(key) if is_final else self._memory.find(key)
        if entry is None or not self._is_good(key, entry, max_age_s):
            return None
        return Hit(entry, self._memory.name)

    async def look_below(self, key: bytes, max_age_s: float | None = None) -> Hit | None:
        """Look in the tiers below memory; what is found fills those above."""
        for depth, tier in enumerate(self._lower):
            entry = await tier.get(key)
            if entry is None or not self._is_good(key, entry, max_age_s):
                continue
            for above in (*self._lower[:depth], self._memory):
                if above is not None:
                    above.put(key, entry)
            return Hit(entry, tier.name)
        return None

    async def peek(self, key: bytes, max_age_s: float | None = None) -> Hit | None:
        """What a request would find; fills nothing."""
        for tier in self.tiers:
            entry = await tier.get(key)
            if entry is not None and self._is_good(key, entry, max_age_s):
                return Hit(entry, tier.name)
        return None

    def put(self, key: bytes, entry: Entry) -> bool:
        """Store in all tiers; tell whether it was."""
        is_too_large = len(entry.rest) + len(entry.id_prefix) > self._max_entry_bytes
        if is_too_large or not self.tiers or self.cuts.is_void(key, entry.made_at):
            return False
        for tier in self.tiers:
            tier.put(key, entry)
        return True

    async def clear(self, selection: Selection, cut: float) -> dict[str, int]:
        """Remove what is selected from every tier, and void what began before `cut`; return how many of each."""
        self.cuts.add(selection, cut)
        return {tier.name: await tier.clear(selection) for tier in self.tiers}

    async def clear_here(self, selection: Selection, cut: float) -> None:
        """The same for the tiers that are this replica's alone."""
        self.cuts.add(selection, cut)
        for tier in self.tiers:
            if not tier.is_shared:
                await tier.clear(selection)

    def _is_good(self, key: bytes, entry: Entry, max_age_s: float | None) -> bool:
        if max_age_s is not None and self._clock() - entry.made_at > max_age_s:
            return False
        return not self.cuts.is_void(key, entry.made_at)
