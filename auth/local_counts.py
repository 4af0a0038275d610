"""What this process has let through, in fixed windows, each begun by the first that is counted in it."""

import time

from .plan import Plan, Standing, Verdict


class LocalCounts:
    """Nothing in here waits, so that nothing comes between a check and what it allows."""

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        # Mutable state, changed by `take`, `count`, and `settle`: what was counted, a window's end, slots in use.
        self._used: dict[str, int] = {}
        self._ends: dict[str, float] = {}
        self._running: dict[str, int] = {}
        self._next_sweep = 0.0

    def take(self, plan: Plan, is_over: bool = False) -> Verdict:
        """Count one more request, if there is room for it; one that is over already takes no slot."""
        now = time.monotonic()
        standings = []
        has_room, full = True, None
        for window in plan.windows:
            used, end = self._used.get(window.key, 0), self._ends.get(window.key, 0.0)
            if end <= now:
                used, end = 0, now + self._window_s
            if used >= window.limit:
                has_room = False
            standings.append(Standing(window, used, end))
        for slots in plan.slots:
            if self._running.get(slots.key, 0) >= slots.limit:
                full = slots
                break
        if full is not None or not has_room:
            return Verdict(False, standings, full)
        self._sweep(now)
        for standing in standings:
            if standing.window.kind == "requests":
                standing.used += 1
                self._used[standing.window.key], self._ends[standing.window.key] = standing.used, standing.resets_at
        if not is_over:
            self._take_slots(plan)
        return Verdict(True, standings, None)

    def count(self, plan: Plan, is_over: bool = False) -> None:
        """Count one more request, whether there is room for it or not."""
        self._charge(plan, "requests", 1)
        if not is_over:
            self._take_slots(plan)

    def settle(self, plan: Plan, tokens: int) -> None:
        for slots in plan.slots:
            running = self._running.pop(slots.key) - 1
            if running:
                self._running[slots.key] = running
        if tokens:
            self._charge(plan, "tokens", tokens)

    @property
    def running(self) -> int:
        return sum(self._running.values())

    @property
    def windows(self) -> int:
        """How many are kept; those that are over for one window's length at most."""
        return len(self._used)

    def _take_slots(self, plan: Plan) -> None:
        for slots in plan.slots:
            self._running[slots.key] = self._running.get(slots.key, 0) + 1

    def _charge(self, plan: Plan, kind: str, amount: int) -> None:
        now = time.monotonic()
        self._sweep(now)
        for key, window_kind, _, _ in plan.windows:
            if window_kind != kind:
                continue
            if self._ends.get(key, 0.0) > now:
                self._used[key] += amount
            else:
                self._used[key] = amount
                self._ends[key] = now + self._window_s

    def _sweep(self, now: float) -> None:
        """Forget what is over, once a window's length."""
        if now < self._next_sweep:
            return
        for key in [key for key, end in self._ends.items() if end <= now]:
            del self._ends[key], self._used[key]
        self._next_sweep = now + self._window_s
