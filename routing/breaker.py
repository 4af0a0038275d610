"""A circuit breaker: what a replica's answers say about asking it again.

As Nygard describes it (Release It!, 2007): while closed it lets everything through and watches; while open, nothing;
while half open, one request, the probe, whose result decides. It is passive: it sends nothing itself.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

SLICES = 10  # of the window: a request is forgotten that many tenths of the window after it, give or take one

State = Literal["closed", "open", "half_open"]


class Breaker:
    """Opens after `failures` of them in a row, or when of at least `min_requests` in the window a share of `error_rate`
    failed. `open_s` doubles each time that a probe fails, up to `max_open_s`. `changes` counts the states entered, and
    `on_change` is told each."""

    __slots__ = (
        "_clock",
        "_error_rate",
        "_failures",
        "_failures_in_a_row",
        "_is_probing",
        "_max_open_s",
        "_min_requests",
        "_on_change",
        "_open_for_s",
        "_open_s",
        "_open_until",
        "_state",
        "_window",
        "changes",
    )

    def __init__(
        self,
        failures: int = 5,
        error_rate: float = 0.5,
        min_requests: int = 20,
        window_s: float = 30.0,
        open_s: float = 5.0,
        max_open_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[State], None] | None = None,
    ) -> None:
        self._failures = failures
        self._error_rate = error_rate
        self._min_requests = min_requests
        self._open_s = open_s
        self._max_open_s = max_open_s
        self._clock = clock
        self._on_change = on_change
        self.changes: Counter[State] = Counter()
        # Mutable state. "open" stays here until a probe begins, however long the breaker could have let one through.
        self._state: State = "closed"
        self._open_until = 0.0
        self._open_for_s = 0.0
        self._is_probing = False
        self._failures_in_a_row = 0
        self._window = _Window(window_s)

    @property
    def state(self) -> State:
        if self._state == "open" and self._clock() >= self._open_until:
            return "half_open"
        return self._state

    @property
    def allows(self) -> bool:
        """Whether a request would be let through now."""
        return self._state == "closed" or (not self._is_probing and self.state == "half_open")

    def begin(self) -> bool:
        """Take note of a request that is sent. True: it is the probe, the only one until its result is told."""
        if self._state == "closed" or not self.allows:
            return False
        if self._state == "open":
            self._change("half_open")
        self._is_probing = True
        return True

    def succeed(self, is_probe: bool) -> None:
        if is_probe:
            if self._is_probing:
                self._close()
        elif self._state == "closed":  # else it began before the breaker opened, and says nothing about now
            self._failures_in_a_row = 0
            self._window.add(self._clock(), has_failed=False)

    def fail(self, is_probe: bool) -> None:
        if is_probe:
            if self._is_probing:
                self._open()
        elif self._state == "closed":
            self._failures_in_a_row += 1
            self._window.add(self._clock(), has_failed=True)
            if self._has_failed_too_often():
                self._open()

    def ignore(self, is_probe: bool) -> None:
        """Take note of a result that says nothing about the replica, such as the caller's fault or a cancelled call."""
        if is_probe:
            self._is_probing = False

    def _has_failed_too_often(self) -> bool:
        window = self._window
        return self._failures_in_a_row >= self._failures or (
            window.requests >= self._min_requests and window.failures >= self._error_rate * window.requests
        )

    def _open(self) -> None:
        wanted_s = self._open_s if self._state == "closed" else 2 * self._open_for_s
        self._open_for_s = min(wanted_s, self._max_open_s)
        self._open_until = self._clock() + self._open_for_s
        self._change("open")

    def _close(self) -> None:
        self._change("closed")

    def _change(self, state: State) -> None:
        """Each state begins without a probe and without a memory of what went before it."""
        self._state = state
        self._is_probing = False
        self._failures_in_a_row = 0
        self._window.clear()
        self.changes[state] += 1
        if self._on_change is not None:
            self._on_change(state)


class _Window:
    """Counts of the last `window_s`, kept by slices of it: a busy window needs no more room than an idle one."""

    __slots__ = ("_slice_s", "_slices", "failures", "requests")

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / SLICES
        self._slices: deque[list[int]] = deque()  # of a number, requests, and failures
        self.requests = 0
        self.failures = 0

    def add(self, now: float, has_failed: bool) -> None:
        number = int(now / self._slice_s)
        self._forget_before(number - SLICES)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        latest = self._slices[-1]
        latest[1] += 1
        latest[2] += has_failed
        self.requests += 1
        self.failures += has_failed

    def clear(self) -> None:
        self._slices.clear()
        self.requests = self.failures = 0

    def _forget_before(self, number: int) -> None:
        while self._slices and self._slices[0][0] <= number:
            _, requests, failures = self._slices.popleft()
            self.requests -= requests
            self.failures -= failures
