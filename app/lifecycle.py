"""What the process is doing, from its start to its end, and the requests that run meanwhile."""

import asyncio
import logging
import time
from collections.abc import Callable

from .errors import ShuttingDown

logger = logging.getLogger("headrace")


class Lifecycle:
    """Serving until `drain` is called; then, in this order: not ready but still accepting, refusing, ended.

    A request runs inside of `running`, which tells when the request has to end at once.
    """

    def __init__(self, settle_s: float, drain_s: float) -> None:
        self._settle_s = settle_s
        self._drain_s = drain_s
        self.started = time.time()
        # Mutable state: changed in `running` and `drain` only.
        self.is_draining = False
        self.is_refusing = False
        self._running: set[Running] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurry = asyncio.Event()

    @property
    def active_requests(self) -> int:
        return len(self._running)

    def running(self) -> "Running":
        """Counts a request while it runs. Raises: ShuttingDown."""
        if self.is_refusing:
            raise ShuttingDown
        return Running(self._running, self._idle)

    def snapshot(self) -> Callable[[], bool]:
        """Tells, whenever it is called, whether one of the requests that run now still does."""
        now = frozenset(self._running)
        return lambda: not now.isdisjoint(self._running)

    def hurry(self) -> None:
        """Cut short whatever `drain` waits for."""
        self._hurry.set()

    async def drain(self) -> None:
        """Return when no request runs any more."""
        self.is_draining = True
        logger.info("draining: not ready, still accepting for %g s", self._settle_s)
        await self._wait(self._hurry, self._settle_s)
        self.is_refusing = True
        logger.info("draining: refusing requests, %d running have %g s", len(self._running), self._drain_s)
        if not await self._wait(self._idle, self._drain_s):
            logger.warning("draining: ending %d requests that still run", len(self._running))
            for request in list(self._running):
                request.stop()
            await self._wait(self._idle, 2.0, may_hurry=False)

    async def _wait(self, event: asyncio.Event, seconds: float, may_hurry: bool = True) -> bool:
        """Wait for `event`, `seconds` at most, or until told to hurry; tell whether it came."""
        waits = [asyncio.ensure_future(event.wait())]
        if may_hurry:
            waits.append(asyncio.ensure_future(self._hurry.wait()))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return event.is_set()


class Running:
    """A context, for as long as one request runs."""

    __slots__ = ("_idle", "_is_stopped", "_running", "_when_stopped")

    def __init__(self, running: "set[Running]", idle: asyncio.Event) -> None:
        self._running = running
        self._idle = idle
        self._is_stopped = False
        self._when_stopped: Callable[[], None] | None = None

    def __enter__(self) -> "Running":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def begin(self) -> None:
        self._running.add(self)
        self._idle.clear()

    def finish(self) -> None:
        self._running.discard(self)
        if not self._running:
            self._idle.set()

    def when_stopped(self, call: Callable[[], None] | None) -> None:
        """Call this when the request has to end."""
        self._when_stopped = call
        if self._is_stopped and call is not None:
            call()

    def stop(self) -> None:
        self._is_stopped = True
        if self._when_stopped is not None:
            self._when_stopped()
