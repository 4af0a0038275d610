"""What this process has let through."""

import time
from collections import Counter

from limits.aio.storage import MemoryStorage

from .plan import Plan, Standing, Verdict, Window


class LocalWindows(MemoryStorage):
    """limits' storage in memory, but for the look-out for expired windows: limits' own walks over all of them, in a
    task of nobody's, at every hit. This one does once a window."""

    def __init__(self) -> None:
        super().__init__()
        self._next_sweep = 0.0

    async def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        now = time.time()
        if now >= self._next_sweep:
            for old in [old for old, end in self.expirations.items() if end <= now]:
                self.expirations.pop(old)
                self.storage.pop(old, None)
            self._next_sweep = now + expiry
        count = await self.get(key) + amount
        self.storage[key] = count
        self.expirations.setdefault(key, now + expiry)
        return count


class LocalCounts:
    """Nothing in here waits, whatever `async` says, so that nothing comes between a check and what it allows."""

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        # Mutable state, changed by `take` and `settle`.
        self._windows = LocalWindows()
        self._running: Counter[str] = Counter()

    async def check(self, plan: Plan) -> Verdict:
        """How the plan stands for one more request, as if it were counted already when there is room for it."""
        standings = [await self._standing(window) for window in plan.windows]
        full = next((slots for slots in plan.slots if self._running[slots.key] >= slots.limit), None)
        if full is not None or any(standing.is_used_up for standing in standings):
            return Verdict(False, standings, full)
        for standing in standings:
            standing.used += standing.window.kind == "requests"
        return Verdict(True, standings, None)

    async def take(self, plan: Plan) -> None:
        await self._charge(plan, "requests", 1)
        for slots in plan.slots:
            self._running[slots.key] += 1

    async def settle(self, plan: Plan, tokens: int) -> None:
        for slots in plan.slots:
            self._running[slots.key] -= 1
            if self._running[slots.key] == 0:
                del self._running[slots.key]
        await self._charge(plan, "tokens", tokens)

    @property
    def running(self) -> int:
        return self._running.total()

    async def _charge(self, plan: Plan, kind: str, amount: int) -> None:
        for window in plan.windows:
            if window.kind == kind and amount:
                await self._windows.incr(window.key, self._window_s, amount)

    async def _standing(self, window: Window) -> Standing:
        used = await self._windows.get(window.key)
        reset_s = await self._windows.get_expiry(window.key) - time.time() if used else self._window_s
        return Standing(window, used, time.monotonic() + reset_s)
