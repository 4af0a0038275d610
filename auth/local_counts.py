"""What this process has let through, in fixed windows, each begun by the first that is counted in it."""

import time
from collections import Counter

from .plan import Plan, Standing, Verdict, Window


class LocalCounts:
    """Nothing in here waits, so that nothing comes between a check and what it allows."""

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        # Mutable state, changed by `take` and `settle`: what was counted, when a window ends, and slots in use.
        self._used: dict[str, int] = {}
        self._ends: dict[str, float] = {}
        self._running: Counter[str] = Counter()
        self._next_sweep = 0.0

    def check(self, plan: Plan) -> Verdict:
        """How the plan stands for one more request, as if it were counted already when there is room for it."""
        now = time.monotonic()
        standings = [self._standing(window, now) for window in plan.windows]
        for slots in plan.slots:
            if self._running[slots.key] >= slots.limit:
                return Verdict(False, standings, slots)
        for standing in standings:
            if standing.is_used_up:
                return Verdict(False, standings, None)
        for standing in standings:
            if standing.window.kind == "requests":
                standing.used += 1
        return Verdict(True, standings, None)

    def take(self, plan: Plan) -> None:
        self._charge(plan, "requests", 1)
        for slots in plan.slots:
            self._running[slots.key] += 1

    def settle(self, plan: Plan, tokens: int) -> None:
        for slots in plan.slots:
            self._running[slots.key] -= 1
            if self._running[slots.key] == 0:
                del self._running[slots.key]
        if tokens:
            self._charge(plan, "tokens", tokens)

    @property
    def running(self) -> int:
        return self._running.total()

    @property
    def windows(self) -> int:
        """How many are kept; those that are over for one window's length at most."""
        return len(self._used)

    def _charge(self, plan: Plan, kind: str, amount: int) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._sweep(now)
        for window in plan.windows:
            if window.kind != kind:
                continue
            key = window.key
            if self._ends.get(key, 0.0) > now:
                self._used[key] += amount
            else:
                self._used[key] = amount
                self._ends[key] = now + self._window_s

    def _sweep(self, now: float) -> None:
        for key in [key for key, end in self._ends.items() if end <= now]:
            del self._ends[key], self._used[key]
        self._next_sweep = now + self._window_s

    def _standing(self, window: Window, now: float) -> Standing:
        end = self._ends.get(window.key, 0.0)
        if end > now:
            return Standing(window, self._used[window.key], end)
        return Standing(window, 0, now + self._window_s)
