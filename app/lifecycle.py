"""What the process is doing, from its start to its end, and the requests that run meanwhile."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ShuttingDown

logger = logging.getLogger("headrace")


class Lifecycle:
    """Serving until `drain` is called; then, in this order: not ready but still accepting, refusing, ended.

    A running request holds a future from `running`; when it is set, the request has to end at once.
    """

    def __init__(self, settle_s: float, drain_s: float) -> None:
        self._settle_s = settle_s
        self._drain_s = drain_s
        self.started = time.time()
        # Mutable state: changed in `running` and `drain` only.
        self.is_draining = False
        self.is_refusing = False
        self._running: set[asyncio.Future[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurry = asyncio.Event()

    @property
    def active_requests(self) -> int:
        return len(self._running)

    @contextmanager
    def running(self) -> Iterator["asyncio.Future[None]"]:
        """Count a request while it runs. Raises: ShuttingDown."""
        if self.is_refusing:
            raise ShuttingDown
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(end)
        self._idle.clear()
        try:
            yield end
        finally:
            self._running.discard(end)
            end.cancel()
            if not self._running:
                self._idle.set()

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
            for end in list(self._running):
                if not end.done():
                    end.set_result(None)
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
