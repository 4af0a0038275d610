"""Deadlines of what another process is asked for, which a busy event loop does not cut short.

An answer may be there and still wait for this loop, which is not the other's fault. So a deadline has passed when its
time has, and the loop has made so many steps meanwhile, each a timer and a pass more; enough for a batch before it and
its own to be sent, read, and handed over.
"""

import asyncio
import time
from collections.abc import Callable
from heapq import heappop, heappush

STEP_S = 0.001  # at least
STEPS = 8
LAG = 0.15  # uvloop's timers have milliseconds and come late, so all times are shorter by this


class Deadlines:
    """All of one event loop's together: one timer at a time, however many wait."""

    def __init__(self) -> None:
        # Mutable state: when, the order of asking, the first step that will do, and what is to be called.
        self._waiting: list[tuple[float, int, int, Callable[[], None]]] = []
        self._asked = 0
        self.steps = 0
        self._timer: asyncio.Handle | None = None

    def after(self, timeout_s: float, late: Callable[[], None]) -> None:
        """Call `late` when so much time has passed. It is called whatever happens meanwhile."""
        self._asked += 1
        due = time.monotonic() + timeout_s * (1 - LAG)
        heappush(self._waiting, (due, self._asked, self.steps + STEPS, late))
        if self._waiting[0][1] == self._asked:
            self._start_timer()

    def _start_timer(self) -> None:
        """Until the next step: shorter and shorter ones, as the first deadline comes near."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._waiting:
            step_s = max(STEP_S, (self._waiting[0][0] - time.monotonic()) / STEPS)
            self._timer = asyncio.get_running_loop().call_later(step_s, self._one_pass_more)

    def _one_pass_more(self) -> None:
        self._timer = asyncio.get_running_loop().call_soon(self._next_step)

    def _next_step(self) -> None:
        self.steps += 1
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now and self._waiting[0][2] <= self.steps:
            heappop(self._waiting)[3]()
        self._start_timer()
