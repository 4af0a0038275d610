"""What each tier of the cache can do."""

from dataclasses import dataclass
from typing import Protocol

from .entry import Entry, Selection


@dataclass(slots=True)
class TierStats:
    """Counts since the start, and what there is now. `entries` and `size_bytes` are None where they cannot be told;
    `evictions` counts entries that made room for others, `failures` uses that failed."""

    hits: int = 0
    misses: int = 0
    stores: int = 0
    evictions: int = 0
    failures: int = 0
    entries: int | None = None
    size_bytes: int | None = None


class Tier(Protocol):
    """A medium for entries. None of its methods raises: what fails is a miss, and counted.

    An entry whose `expires_at` has passed is not found. A `get` after a `put` or a `clear` sees it, also when that has
    not been waited for.
    """

    name: str
    is_shared: bool  # by all replicas

    async def get(self, key: bytes) -> Entry | None: ...

    def put(self, key: bytes, entry: Entry) -> None:
        """Store, now or soon."""
        ...

    async def clear(self, selection: Selection) -> int:
        """Remove the selected entries; return how many there were."""
        ...

    def stats(self) -> TierStats: ...
