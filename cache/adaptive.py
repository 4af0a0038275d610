"""Which entries to keep, learnt from what was asked for: the Adaptive Replacement Cache.

N. Megiddo, D. S. Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache. FAST 2003, figure 4. Entries that were used
once (T1 there) and more often (T2) are kept apart, and so are the keys of those that had to go, as ghosts (B1, B2). A
ghost that is asked for says that its side was given too little room. A scan fills only the first side, and new
favourites push out old ones, however often those were used once.
"""

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class AdaptiveCache(MutableMapping[K, V]):
    """A mapping whose `popitem` takes what is best given up. Reading an entry or replacing it counts as its use.

    The capacity (c in the paper) is whatever number of entries the owner leaves in it, so that a bound by bytes works
    as well as one by number. There are never more ghosts than entries. The owner makes room before it adds an entry, so
    a ghost that is asked for takes effect from the next `popitem` on, one later than in the paper.
    """

    def __init__(self) -> None:
        # Mutable state. Each is in order of use; a key is in one of them.
        self._once: OrderedDict[K, V] = OrderedDict()
        self._often: OrderedDict[K, V] = OrderedDict()
        self._ghosts_of_once: OrderedDict[K, None] = OrderedDict()
        self._ghosts_of_often: OrderedDict[K, None] = OrderedDict()
        self._target = 0.0  # of the number of entries used once; p in the paper

    def __getitem__(self, key: K) -> V:
        often = self._often
        if key in often:
            often.move_to_end(key)
            return often[key]
        value = self._once.pop(key)
        often[key] = value
        return value

    def __setitem__(self, key: K, value: V) -> None:
        once_ghosts, often_ghosts = len(self._ghosts_of_once), len(self._ghosts_of_often)
        if key in self._often:
            self._often.move_to_end(key)
        elif key in self._once:
            del self._once[key]
        elif key in self._ghosts_of_once:
            del self._ghosts_of_once[key]
            self._target = min(self._target + max(1.0, often_ghosts / once_ghosts), len(self))
        elif key in self._ghosts_of_often:
            del self._ghosts_of_often[key]
            self._target = max(self._target - max(1.0, once_ghosts / often_ghosts), 0.0)
        else:
            self._once[key] = value
            return
        self._often[key] = value

    def __delitem__(self, key: K) -> None:
        del (self._often if key in self._often else self._once)[key]
        self._bound_ghosts()

    def __contains__(self, key: object) -> bool:
        return key in self._often or key in self._once

    def __iter__(self) -> Iterator[K]:
        yield from self._once
        yield from self._often

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def popitem(self) -> tuple[K, V]:
        """Remove the entry that is best given up (REPLACE in the paper), and remember its key. Raises: KeyError."""
        if self._once and (len(self._once) > self._target or not self._often):
            key, value = self._once.popitem(last=False)
            self._ghosts_of_once[key] = None
        else:
            key, value = self._often.popitem(last=False)
            self._ghosts_of_often[key] = None
        self._bound_ghosts()
        return key, value

    def clear(self) -> None:
        for part in (self._once, self._often, self._ghosts_of_once, self._ghosts_of_often):
            part.clear()
        self._target = 0.0

    @property
    def ghosts(self) -> int:
        return len(self._ghosts_of_once) + len(self._ghosts_of_often)

    def _bound_ghosts(self) -> None:
        """Keep |T1| + |B1| to the capacity, and everything together to twice that."""
        while len(self._ghosts_of_once) > len(self._often):
            self._ghosts_of_once.popitem(last=False)
        while self.ghosts > len(self):
            (self._ghosts_of_often or self._ghosts_of_once).popitem(last=False)
