"""Ends what a request waits for when nobody waits for the request any more."""

import asyncio
from types import TracebackType

from starlette.types import Receive

from .connections import Line
from .errors import ClientGone, ShuttingDown
from .lifecycle import Running


class Interruption:
    """A context in which the task is cancelled, once, when the caller leaves or the gateway ends the request; it raises
    ClientGone or ShuttingDown then. As asyncio.timeout, which is for the time.

    A connection tells of the caller's leaving by itself where the request has a line of its own; elsewhere a task waits
    for ASGI's `http.disconnect`, for which the body must have been read.
    """

    __slots__ = ("_cancelling", "_error", "_line", "_receive", "_running", "_task", "_watch")

    def __init__(self, line: Line | None, receive: Receive, running: Running) -> None:
        self._line = line
        self._receive = receive
        self._running = running
        self._error: Exception | None = None
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._running.when_stopped(self._stop)
        if self._line is not None:
            self._line.when_gone(self._leave)
        else:
            self._watch = asyncio.ensure_future(self._wait_for_disconnect())

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.when_stopped(None)
        if self._line is not None:
            self._line.when_gone(None)
        elif self._watch is not None:
            self._watch.cancel()
        error = self._error
        if error is not None and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise error from None

    def _leave(self) -> None:
        self._interrupt(ClientGone())

    def _stop(self) -> None:
        self._interrupt(ShuttingDown())

    def _interrupt(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()
