"""Server-sent events, one engine event each, as soon as it comes.

The frames are sse-starlette's. Its response is not used: it has three tasks for each stream, and a timeout scope around
each send. Here an event is written where it comes up, and one task waits for the end.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from sse_starlette import ServerSentEvent
from sse_starlette.sse import AppStatus

from cache.flight import LogEvent, Seat

from .exchange import Exchange

# Importing sse_starlette puts its own handler into uvicorn.Server; app/server.py has another one, and this keeps the
# library from acting on uvicorn's flag.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]

DONE = b"data: [DONE]\n\n"
PING = ServerSentEvent(comment="ping", sep="\n").encode()

ForCaller = Callable[[list[LogEvent]], list[LogEvent]]


def encode(event: LogEvent) -> bytes:
    """Frame an event. Its payload must hold no line break, as JSON documents on one line do not."""
    if event.name is None:
        return b"id: %b\ndata: %b\n\n" % (event.id, event.data)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event.id, event.name.encode(), event.data)


def encode_error(body: bytes) -> bytes:
    return b"data: %b\n\n" % body


class EventStream:
    """An answer sent event by event. The response begins with the first of them, or with the first ping, which is a
    comment after `ping_s` of silence; the clock is coarse, so it may take twice that. An error before is an HTTP error
    still."""

    def __init__(self, exchange: Exchange, ping_s: float) -> None:
        self.has_begun = False
        self._exchange = exchange
        self._write = _not_now if exchange.line is None else exchange.line.write
        self._ping_s = ping_s
        # Mutable state: what could not be written at once, and is for the task to send.
        self._unsent = b""
        self._is_sending = False
        self._is_silent = True
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, seat: Seat[Any], for_caller: ForCaller) -> None:
        """Send what comes up, until the flight is over. Raises what ended it."""

        def take(events: list[LogEvent]) -> bool:
            events = for_caller(events)
            if not events:
                return True
            self._is_silent = False
            frames = encode(events[0]) if len(events) == 1 else b"".join(map(encode, events))
            if self.has_begun:
                is_sent = self._write(frames)
            else:
                is_sent = self.has_begun = self._exchange.begin_stream(frames)
            if not is_sent:
                self._unsent = frames
            return is_sent

        self._ping_later(seat)
        try:
            while not await seat.feed(take):
                await self._send_unsent()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def end(self, last: bytes) -> None:
        """Send the last frame."""
        await self._begin()
        await self._exchange.send({"type": "http.response.body", "body": last})

    async def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = self._exchange.stream_headers()
            await self._exchange.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_unsent(self) -> None:
        frames, self._unsent = self._unsent, b""
        self._is_sending = True
        await self._begin()
        await self._exchange.send({"type": "http.response.body", "body": frames, "more_body": True})
        self._is_sending = False

    def _ping_later(self, seat: Seat[Any]) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._ping_s, self._ping, seat)

    def _ping(self, seat: Seat[Any]) -> None:
        if self._is_silent and not (self._is_sending or self._unsent):
            self._unsent = PING
            seat.wake()
        self._is_silent = True
        self._ping_later(seat)


def _not_now(frames: bytes) -> bool:
    """Writes for a caller without a line."""
    return False
