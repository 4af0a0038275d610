"""A provider's key set: kept, refreshed in the background, served stale while the provider is down."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .keys import VerificationKey

logger = logging.getLogger("headrace")

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
# Refreshes that tokens with an unknown key id may cause: enough for keys rotated in at once, too few for a storm.
BUDGET = 5
REFILL_S = 30.0


class KeyFetchError(Exception):
    """The provider's keys could not be had; the text says why, for people."""


@dataclass(frozen=True, slots=True)
class KeySetStatus:
    """`age_s` is the time since the last good fetch, `latency_ms` how long that took, both None when there was none;
    `last_error` None when the last one was good."""

    keys: int
    age_s: float | None
    latency_ms: float | None
    last_error: str | None
    refreshes: int
    failures: int


class Budget:
    """A token bucket: `capacity` at once, and one more every `refill_s`."""

    def __init__(self, capacity: int, refill_s: float, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._refill_s = refill_s
        self._clock = clock
        self._left = float(capacity)
        self._counted_at = clock()

    def take(self) -> bool:
        now = self._clock()
        self._left = min(self._capacity, self._left + (now - self._counted_at) / self._refill_s)
        self._counted_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class KeySet:
    """`fetch` gets the keys from the provider; `run` is what calls it, in a task of the gateway's own."""

    def __init__(
        self,
        fetch: Callable[[], Awaitable[list[VerificationKey]]],
        refresh_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._refresh_s = refresh_s
        self._clock = clock
        self._budget = Budget(BUDGET, REFILL_S, clock)
        # Mutable state, changed by `_refresh` only.
        self._keys: dict[tuple[str | None, str], VerificationKey] = {}
        self._fingerprint: frozenset[str] = frozenset()
        self.generation = 0
        self._fetched: float | None = None
        self._fetch_took_s: float | None = None
        self._error: str | None = None
        self._refreshes = 0
        self._failures = 0
        # The refresh that is under way or wanted; set when it is over. Changed by `seek` and `run`.
        self._is_running = False
        self._round: asyncio.Event | None = None
        self._wanted = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self._fetched is not None

    def status(self) -> KeySetStatus:
        age_s = None if self._fetched is None else round(self._clock() - self._fetched, 1)
        latency_ms = None if self._fetch_took_s is None else round(self._fetch_took_s * 1000, 3)
        return KeySetStatus(len(self._fingerprint), age_s, latency_ms, self._error, self._refreshes, self._failures)

    def find(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        return self._keys.get((kid, algorithm))

    async def seek(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        """Refresh for a key id that is not known, if the budget allows, and look again."""
        if kid is None and self.is_ready:
            return None
        for _ in range(2):
            is_joining = self._round is not None
            if self._round is None:
                if not self._is_running or not self._budget.take():
                    return None
                self._round = asyncio.Event()
                self._wanted.set()
            await self._round.wait()
            found = self.find(kid, algorithm)
            # A refresh that was under way already may have asked before the key was there: one more, then.
            if found is not None or not is_joining:
                return found
        return None

    async def run(self) -> None:
        """Refresh until cancelled."""
        retry_s = FIRST_RETRY_S
        self._is_running = True
        try:
            while True:
                self._wanted.clear()
                self._round = self._round or asyncio.Event()
                await self._refresh()
                self._end_round()
                if self._error is None:
                    retry_s = FIRST_RETRY_S
                    await self._until_wanted(self._refresh_s)
                else:
                    await self._until_wanted(min(retry_s, self._refresh_s))
                    retry_s = min(retry_s * 2, MAX_RETRY_S)
        finally:
            self._is_running = False
            self._end_round()

    async def _until_wanted(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wanted.wait()
        except TimeoutError:
            pass

    def _end_round(self) -> None:
        over, self._round = self._round, None
        if over is not None:
            over.set()

    async def _refresh(self) -> None:
        self._refreshes += 1
        began = self._clock()
        try:
            keys = await self._fetch()
        except KeyFetchError as exc:
            self._failures += 1
            if self._error is None:
                logger.warning("the keys for tokens cannot be fetched: %s", exc)
            self._error = str(exc)
            return
        if self._error is not None:
            logger.info("the keys for tokens are fetched again")
        self._error, self._fetched = None, self._clock()
        self._fetch_took_s = self._fetched - began
        fingerprint = frozenset(key.fingerprint for key in keys)
        if self._fingerprint - fingerprint:
            self.generation += 1
        self._fingerprint = fingerprint
        self._keys = index(keys)


def index(keys: list[VerificationKey]) -> dict[tuple[str | None, str], VerificationKey]:
    """Keys by id and algorithm. A token without an id gets a key if only one fits its algorithm."""
    found = {(key.kid, algorithm): key for key in keys for algorithm in key.algorithms}
    for algorithm in {algorithm for key in keys for algorithm in key.algorithms}:
        fitting = [key for key in keys if algorithm in key.algorithms]
        if len(fitting) == 1:
            found[None, algorithm] = fitting[0]
        else:
            found.pop((None, algorithm), None)
    return found
