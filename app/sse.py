"""Server-sent events, one engine event each, as soon as it comes; those that came together leave together.

sse-starlette's response, with three differences. Its loop puts a timeout scope around every send, which costs a third
of the throughput, so the loop is our own. Its tasks live in an anyio group, whose cancellation strikes again at each
await; an engine's abort awaits, so here a task is cancelled once, by asyncio. And it ends streams at the first sign of
a shutdown; here the gateway's life cycle says when.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from cache.flight import LogEvent

from .connections import Line
from .errors import ClientGone, ShuttingDown

# Importing sse_starlette puts its own handler into uvicorn.Server; app/server.py has another one, and this keeps the
# library from acting on uvicorn's flag.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]

logger = logging.getLogger("headrace")

SEPARATOR = "\n"
DONE = b"data: [DONE]\n\n"
CLOSE_TIMEOUT_S = 1.0


def encode(event: LogEvent) -> bytes:
    """Frame an event. Its payload must hold no line break, as JSON documents on one line do not."""
    if event.name is None:
        return b"id: %b\ndata: %b\n\n" % (event.id, event.data)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event.id, event.name.encode(), event.data)


def encode_error(body: bytes) -> bytes:
    return b"data: %b\n\n" % body


class EventStream(EventSourceResponse):
    """Sends `first` (pending or done), then the rest of `events`, then `[DONE]`.

    `end` is set when the gateway wants the stream to end at once. What went wrong is in `error` afterwards: ClientGone,
    ShuttingDown, or what the engine raised. All but the first are told to the caller, as `encode_error` says, and no
    `[DONE]` follows.
    """

    def __init__(
        self,
        first: "asyncio.Task[list[LogEvent]]",
        events: AsyncGenerator[list[LogEvent], None],
        end: "asyncio.Future[None]",
        encode_error: Callable[[BaseException], bytes],
        headers: dict[str, str],
        ping_s: float,
        line: Line | None,
    ) -> None:
        super().__init__(events, headers=headers, ping=ping_s, sep=SEPARATOR)
        del self.headers["connection"]  # that is the server's to say, and it may have to say "close"
        self._first = first
        self._events = events
        self._end = end
        self._encode_error = encode_error
        self._write = None if line is None else line.write
        self._is_over = False
        self._is_sending = False
        self._has_sent = False
        self.error: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            stream = group.create_task(self._stream_response(send))
            pings = group.create_task(self._ping(send))
            disconnect = group.create_task(self._listen_for_disconnect(receive))

            def interrupt(error: BaseException) -> None:
                if self.error is None and not self._is_over:
                    self.error = error
                    stream.cancel()

            disconnect.add_done_callback(lambda task: None if task.cancelled() else interrupt(ClientGone()))
            self._end.add_done_callback(lambda end: None if end.cancelled() else interrupt(ShuttingDown()))
            stream.add_done_callback(lambda _: (pings.cancel(), disconnect.cancel()))

    async def _stream_response(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_events(send)
        except asyncio.CancelledError:
            if self.error is None:
                raise
        except Exception as exc:
            self.error = exc
        finally:
            self._is_over = True
            await close(self._first, self._events)
        if not isinstance(self.error, ClientGone):
            last = DONE if self.error is None else self._encode_error(self.error)
            await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        try:
            events = await self._first
            while True:
                body = encode(events[0]) if len(events) == 1 else b"".join(map(encode, events))
                if self._write is None or not self._write(body):
                    self._is_sending = True
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    self._is_sending = False
                self._has_sent = True
                events = await anext(self._events)
        except StopAsyncIteration:
            return

    async def _ping(self, send: Send) -> None:
        """Send a comment after `ping_interval` seconds of silence; the clock is coarse, so it may take twice that."""
        ping = ServerSentEvent(comment="ping", sep=SEPARATOR).encode()
        if self._first.done():
            await asyncio.sleep(self.ping_interval)
        while not self._is_over:
            if not (self._has_sent or self._is_sending):
                await send({"type": "http.response.body", "body": ping, "more_body": True})
            self._has_sent = False
            await asyncio.sleep(self.ping_interval)


async def first_events(events: AsyncGenerator[list[LogEvent], None]) -> list[LogEvent]:
    """The first step of a stream, to be run as a task. Raises: StopAsyncIteration, and what the engine raises."""
    return await anext(events)


async def close(first: "asyncio.Task[list[LogEvent]]", events: AsyncGenerator[list[LogEvent], None]) -> None:
    """Close a stream whose first step may still be under way; it has a second for each."""
    if not first.done():
        first.cancel()
        await asyncio.wait([first], timeout=CLOSE_TIMEOUT_S)
    if first.done() and not first.cancelled():
        first.exception()  # seen, so that asyncio does not complain of it
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await events.aclose()
    except Exception as exc:
        logger.warning("a stream could not be closed: %s", type(exc).__qualname__)
