"""What was cleared, and when: an answer whose computing began before that is void, wherever it still lies."""

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .entry import TAG_BYTES, Selection

MAX_CUTS = 10_000


class Cuts:
    """For each selection, the time of its last clearing, in seconds since the epoch. Replicas' clocks are taken to
    agree (NTP)."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._cuts: OrderedDict[Selection, float] = OrderedDict()

    def add(self, selection: Selection, cut: float | None = None) -> float:
        """Void what began before `cut` (None: now); return it."""
        cut = self._clock() if cut is None else cut
        self._cuts[selection] = max(cut, self._cuts.get(selection, 0.0))
        self._cuts.move_to_end(selection)
        if len(self._cuts) > MAX_CUTS:
            self._cuts.popitem(last=False)
        return cut

    def is_void(self, key: bytes, made_at: float) -> bool:
        if not self._cuts:
            return False
        tenant, model = key[:TAG_BYTES], key[TAG_BYTES : 2 * TAG_BYTES]
        selections = (
            Selection(),
            Selection(tenant=tenant),
            Selection(model=model),
            Selection(tenant=tenant, model=model),
            Selection(key=key),
        )
        return any(made_at <= self._cuts.get(selection, 0.0) for selection in selections)


# KEYS: the log of clearings. ARGV: who clears, the cut, tenant, model, key (in hexadecimal, or empty), entries kept.
PUBLISH = """
return redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[6], '*',
  'by', ARGV[1], 'cut', ARGV[2], 'tenant', ARGV[3], 'model', ARGV[4], 'key', ARGV[5])
"""

# KEYS: the log. ARGV: the last entry that is known, the most to answer.
READ_ON = "return redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2])"

POLL_S = 0.4
READ_AT_ONCE = 200


class Redis(Protocol):
    """Runs scripts. None stands for an answer that cannot be had."""

    @property
    def is_up(self) -> bool: ...

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any], timeout_s: float) -> Any: ...


class Clearings:
    """Tells the other replicas what was cleared here, and clears here what was elsewhere: `run` is that.

    A clearing while Redis is away is told, and done there, when it is back. A replica that starts reads all that Redis
    remembers: answers on its disk may be older.
    """

    def __init__(self, store: "Store", redis: Redis | None, namespace: str, budget_s: float) -> None:
        self._store = store
        self._redis = redis
        self._log = f"{namespace}:cache:clearings"
        self._budget_s = budget_s
        self._name = secrets.token_hex(8)
        # Mutable state: what is still to be told, and how far the others' has been read.
        self._untold: deque[tuple[Selection, float]] = deque(maxlen=MAX_CUTS)
        self._last = "0-0"

    async def clear(self, selection: Selection) -> tuple[dict[str, int], bool]:
        """Clear; return how many entries each tier lost, and whether the other replicas have been told."""
        cut = self._store.cuts.add(selection)
        is_told = self._redis is None or await self._publish(selection, cut)
        removed = await self._store.clear(selection, cut)
        if not is_told:
            self._untold.append((selection, cut))
        return removed, is_told

    async def run(self) -> None:
        while self._redis is not None:
            await asyncio.sleep(POLL_S)
            if self._redis.is_up:
                await self._tell()
                await self._read_on(self._redis)

    async def _tell(self) -> None:
        while self._untold and await self._publish(*self._untold[0]):
            selection, cut = self._untold.popleft()
            await self._store.clear(selection, cut)

    async def _publish(self, selection: Selection, cut: float) -> bool:
        assert self._redis is not None
        parts = [part.hex() if part else "" for part in (selection.tenant, selection.model, selection.key)]
        arguments = (self._name, repr(cut), *parts, MAX_CUTS)
        return await self._redis.evaluate(PUBLISH, [self._log], arguments, self._budget_s) is not None

    async def _read_on(self, redis: Redis) -> None:
        while entries := await redis.evaluate(READ_ON, [self._log], (self._last, READ_AT_ONCE), self._budget_s):
            for id, pairs in entries:
                self._last = id.decode()
                told = dict(zip(pairs[::2], pairs[1::2], strict=True))
                if told[b"by"] != self._name.encode():
                    parts = (bytes.fromhex(told[name].decode()) or None for name in (b"tenant", b"model", b"key"))
                    await self._store.clear_here(Selection(*parts), float(told[b"cut"]))


class Store(Protocol):
    cuts: Cuts

    async def clear(self, selection: Selection, cut: float) -> dict[str, int]: ...

    async def clear_here(self, selection: Selection, cut: float) -> None:
        """Clear what is this replica's alone."""
        ...
