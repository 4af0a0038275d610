"""What uvicorn leaves out at the level of connections: a bound on their number, time limits for headers, bodies, and
unread answers, a size limit for headers; and a shorter way for requests whose answers are at hand.

A connection is idle while no whole request of its waits for an answer: new ones, those between requests, and those
whose headers or body trickle in. When a connection comes that is one too many, the longest idle one makes room, so that
idle connections keep nobody out, however many there are.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.types import Message, Receive, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import Failure, RequestTimeout

_TIMEOUT = Failure(408, "invalid_request_error", "request_timeout", "The request's headers did not arrive in time.")
_TOO_LARGE = Failure(431, "invalid_request_error", "request_too_large", "The request's headers are too large.")
_INVALID = Failure(400, "invalid_request_error", "invalid_request", "This is not an HTTP request.")
_FULL = Failure(503, "server_error", "overloaded", "The gateway has too many connections.", retry_after_s=1)
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Unavailable"}

LINGER_S = 1.0
MOST_LOOK_S = 1.0  # between two looks for connections that were idle for too long
# How long a request may wait for its body before it goes the way of all others, and how much of it. Many clients, the
# OpenAI package's among them, send headers and body one right after the other.
HOLD_S = 0.02
HELD_BYTES = 65536

CHUNKED = (b"transfer-encoding", b"chunked")
CHUNK = b"%x\r\n%b\r\n"  # RFC 9112, section 7.1

Headers = list[tuple[bytes, bytes]]
# What RequestResponseCycle.send looks at.
POST: Any = {"type": "http", "method": "POST"}


class Answerer(Protocol):
    """Who answers POST requests that have come whole, without ASGI's part in it."""

    def answer_at_once(self, path: str, headers: Headers, body: bytes) -> tuple[Headers, bytes] | Any:
        """The answer's headers and body; what `begin` is to be given, since it takes time; None: it is for ASGI."""
        ...

    def begin(self, exchange: Any, body: bytes, receive: Receive, send: Send, line: "Line") -> None:
        """See to it that an answer is sent by `send` or `line`, later on or by a task of `line.spawn`."""
        ...


class Line:
    """The quick ways between one request and its caller."""

    __slots__ = ("_connection", "_cycle", "_is_gone", "_when_gone")

    def __init__(self, connection: "Connection", cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._is_gone = False
        self._when_gone: Callable[[], None] | None = None

    def is_instead_of(self, send: Callable[..., Any]) -> bool:
        """Whether nobody stands between who sends with this and the connection."""
        return bool(self._cycle.send == send)

    def answer(self, headers: Headers, body: bytes) -> bool:
        """Send a whole 200 answer, whose headers have to be well formed, in one step; False: not now."""
        return self._connection.answer(self._cycle, headers, body)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what ends with the request's answer."""
        self._connection.spawn(self._cycle, work)

    def begin(self, headers: Headers, data: bytes) -> bool:
        """Send the head of a 200 answer whose length is not told, and some of its body, in one step; False: not now."""
        return self._connection.begin_parts(self._cycle, headers, data)

    @property
    def write(self) -> Callable[[bytes], bool]:
        """Sends some more of an answer whose length is not told, in one step; False: not now."""
        return partial(self._connection.write_part, self._cycle)

    def when_gone(self, call: Callable[[], None] | None) -> None:
        """Call this as soon as the caller has left."""
        self._when_gone = call
        if self._is_gone and call is not None:
            call()

    def end(self) -> None:
        self._is_gone = True
        if self._when_gone is not None:
            self._when_gone()


@dataclass(frozen=True, slots=True)
class ConnectionStats:
    """`closed` counts connections closed by the gateway, by cause."""

    open: int
    idle: int
    closed: dict[str, int]


class Connections:
    """The connections of one server. Times in seconds, sizes in bytes."""

    def __init__(
        self,
        max_connections: int,
        max_header_bytes: int,
        header_timeout_s: float,
        body_timeout_s: float,
        send_timeout_s: float,
        keep_alive_s: float,
    ) -> None:
        self.max_header_bytes = max_header_bytes
        self.header_timeout_s = header_timeout_s
        self.body_timeout_s = body_timeout_s
        self.send_timeout_s = send_timeout_s
        self.keep_alive_s = keep_alive_s
        self.answerer: Answerer | None = None
        self._max_connections = max_connections
        # Mutable state, changed by the methods below only. The longest idle stands first, with the time since when.
        self._open: set[Connection] = set()
        self._idle: dict[Connection, float] = {}
        self._look: asyncio.TimerHandle | None = None
        self._closed = dict.fromkeys(
            ("made_room", "refused", "header_timeout", "headers_too_large", "invalid", "send_timeout"), 0
        )

    def stats(self) -> ConnectionStats:
        return ConnectionStats(len(self._open), len(self._idle), dict(self._closed))

    def admit(self, connection: "Connection") -> bool:
        """Count a new connection in, making room for it if need be; False when all others are busy."""
        if len(self._open) >= self._max_connections:
            if not self._idle:
                return False
            longest_idle = next(iter(self._idle))
            self.forget(longest_idle)
            longest_idle.drop("made_room")
        self._open.add(connection)
        self._idle[connection] = time.monotonic()
        if self._look is None:
            self._look_again()
        return True

    def note_busy(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)

    def note_idle(self, connection: "Connection") -> None:
        if connection in self._open:
            self._idle[connection] = time.monotonic()

    def forget(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _look_again(self) -> None:
        """One timer for all: one for each would be set and cancelled with each request."""
        self._look = asyncio.get_running_loop().call_later(min(self.keep_alive_s / 4, MOST_LOOK_S), self._close_idle)

    def _close_idle(self) -> None:
        oldest = time.monotonic() - self.keep_alive_s
        for connection, since in list(self._idle.items()):
            if since > oldest:
                break
            connection.close_if_silent()
        self._look = None
        if self._open:
            self._look_again()

    def count_closed(self, cause: str) -> None:
        self._closed[cause] += 1


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits. `connections` is the registry that all of a server's connections share."""

    # Python keeps objects of up to 30 attributes in a quicker form, and uvicorn has 28 already.
    __slots__ = (
        "_header_bytes",
        "_header_timer",
        "_held",
        "_hold_timer",
        "_in_headers",
        "_is_refused",
        "_line",
        "_registry",
        "_send_timer",
    )

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._registry = connections
        self._is_refused = False
        self._in_headers = True
        self._header_bytes = 0
        self._held: bytes | None = None  # the body so far of a request that is perhaps answered at once
        self._hold_timer: asyncio.TimerHandle | None = None
        self._line: Line | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._registry.admit(self):
            self._start_header_timer()
        else:
            self._refuse(_FULL, "refused")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._registry.forget(self)
        self._stop_header_timer()
        self._let_go()
        if self._line is not None:
            self._line.end()
            self._line = None
        if self._send_timer is not None:
            self._send_timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._held is None:
            self._bound_body()
        elif len(self._held) > HELD_BYTES or self._is_refused:
            self._release()
        elif self._hold_timer is None:
            self._hold_timer = self.loop.call_later(HOLD_S, self._release)
        if not self._in_headers or self._is_refused or self.transport.is_closing():
            return
        # The headers are not whole yet.
        if self._header_bytes > self._registry.max_header_bytes:
            self._refuse(_TOO_LARGE, "headers_too_large")
        elif self._header_timer is None and self._header_bytes:
            self._start_header_timer()

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        if not self._in_headers:
            # A request sent before the answer to the last one (pipelining).
            self._in_headers = True
            self._header_bytes = 0

    def on_headers_complete(self) -> None:
        # What arrived in one piece may hold a body too, so the sum is taken only where it can matter.
        if self._header_bytes > self._registry.max_header_bytes:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > self._registry.max_header_bytes:
                self._refuse(_TOO_LARGE, "headers_too_large")
                return
        self._in_headers = False
        self._stop_header_timer()
        if self._may_answer_at_once():
            self._held = b""
        else:
            self._go_by_asgi()

    def on_body(self, body: bytes) -> None:
        if self._held is None:
            super().on_body(body)
        else:
            self._held = self._held + body if self._held else body

    def on_message_complete(self) -> None:
        if self._held is not None:
            if self._answer_at_once(self._held):
                return
            self._release()
        self._registry.note_busy(self)
        super().on_message_complete()

    def _go_by_asgi(self) -> None:
        # uvicorn makes a scope at a request's first byte; here only those that need one have it.
        url, headers, expects_100 = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects_100
        self.headers = self.scope["headers"] = headers
        super().on_headers_complete()

    def _may_answer_at_once(self) -> bool:
        """Whether nothing but the request's body is needed before the answer could be sent."""
        return (
            self._registry.answerer is not None
            and (self.cycle is None or self.cycle.response_complete)
            and not self.expect_100_continue
            and not self.flow.write_paused
            and self.parser.get_method() == b"POST"
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
        )

    def _answer_at_once(self, body: bytes) -> bool:
        assert self._registry.answerer is not None
        answer = self._registry.answerer.answer_at_once(self.url.decode("latin-1"), self.headers, body)
        if answer is None:
            return False
        self._let_go()
        self._registry.note_busy(self)
        if isinstance(answer, tuple):
            self._write(*answer)
            self.on_response_complete()
        else:
            self._start(answer, body)
        return True

    def _start(self, exchange: Any, body: bytes) -> None:
        """Have a request answered without ASGI."""
        assert self._registry.answerer is not None
        cycle = self.cycle = RequestResponseCycle(
            scope=POST,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        cycle.more_body = False
        self._line = Line(self, cycle)
        self._registry.answerer.begin(exchange, body, cycle.receive, cycle.send, self._line)  # type: ignore[arg-type]

    def spawn(self, cycle: RequestResponseCycle, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(self._see_through(cycle, work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _see_through(self, cycle: RequestResponseCycle, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            cycle.on_response = _nothing
            if not cycle.response_complete and not cycle.disconnected:
                self.transport.close()

    def _write(self, headers: Headers, body: bytes) -> None:
        lines = b"\r\n".join(map(b": ".join, (*self.server_state.default_headers, *headers)))
        self.transport.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (lines, body))

    def begin_parts(self, cycle: RequestResponseCycle, headers: Headers, data: bytes) -> bool:
        """What the cycle's `send` does for the head of an answer, and the first part of its body; False: not now."""
        if cycle.disconnected or cycle.response_started or cycle.flow.write_paused or not cycle.keep_alive:
            return False
        cycle.response_started = cycle.chunked_encoding = True
        self._write([*headers, CHUNKED], CHUNK % (len(data), data))
        return True

    def answer(self, cycle: RequestResponseCycle, headers: Headers, body: bytes) -> bool:
        """What the cycle's `send` does for a whole answer, without a look at each header; False: not now."""
        if cycle.disconnected or cycle.response_started or cycle.flow.write_paused or not cycle.keep_alive:
            return False
        cycle.response_started = cycle.response_complete = True
        self._write(headers, body)
        cycle.message_event.set()
        cycle.on_response()
        cycle.on_response = _nothing
        return True

    def write_part(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """What the cycle's `send` does for a part of a body; the last part is for `send` itself."""
        if cycle.disconnected or not cycle.chunked_encoding or cycle.flow.write_paused or cycle.response_complete:
            return False
        self.transport.write(CHUNK % (len(data), data))
        return True

    def _let_go(self) -> bytes:
        held, self._held = self._held or b"", None
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        return held

    def _release(self) -> None:
        """Go the way of all requests, with what was held back."""
        body = self._let_go()
        if self._is_refused or self.transport.is_closing():
            return
        self._go_by_asgi()
        if body:
            super().on_body(body)
        self._bound_body()

    def _bound_body(self) -> None:
        """Limit the wait for what is still to come of a body; the request's task starts in the loop's next step."""
        if self.cycle is not None and self.cycle.more_body and "receive" not in vars(self.cycle):
            wait = partial(receive, self.cycle, self._registry.body_timeout_s)
            self.cycle.receive = wait  # type: ignore[method-assign,assignment]

    def on_response_complete(self) -> None:
        # uvicorn's, but for its timer.
        self.server_state.total_requests += 1
        self._line = None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        if self.cycle is None or self.cycle.response_complete:
            self._in_headers = True
            self._header_bytes = 0
            self._registry.note_idle(self)

    def send_400_response(self, msg: str) -> None:
        self._refuse(_INVALID, "invalid")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._registry.send_timeout_s, self.drop, "send_timeout")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def drop(self, cause: str) -> None:
        """Close at once, whatever is still unsent."""
        self._registry.count_closed(cause)
        self.transport.abort()

    def close_if_silent(self) -> None:
        """If nothing of a request has come: else the timer for headers goes on."""
        if not self._header_bytes and not self.transport.is_closing():
            self.transport.close()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self._registry.header_timeout_s, self._headers_are_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_are_late(self) -> None:
        if self._header_bytes:
            self._refuse(_TIMEOUT, "header_timeout")
        else:
            self.drop("header_timeout")

    def _refuse(self, failure: Failure, cause: str) -> None:
        """Answer where there is no request yet that could be answered."""
        if self._is_refused or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.drop(cause)  # the answer to an earlier request is under way, and nothing may be written into it
            return
        self._registry.count_closed(cause)
        body = failure.body(request_id="")
        head = [
            b"HTTP/1.1 %d %s" % (failure.status, _REASONS[failure.status]),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            *(name + b": " + value for name, value in failure.headers()),
        ]
        self.transport.write(b"\r\n".join([*head, b"", body]))
        self._is_refused = True
        self._registry.forget(self)
        self._stop_header_timer()
        if self.transport.can_write_eof():
            # What the client is still sending is read and forgotten, lest a reset overtake the answer.
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()


def _nothing() -> None:
    """What uvicorn leaves in place of a callback that would keep a connection."""


async def receive(cycle: RequestResponseCycle, body_timeout_s: float) -> Message:
    """uvicorn's, with a limit to the wait for more of the body. Raises: RequestTimeout."""
    if not cycle.more_body:
        return await RequestResponseCycle.receive(cycle)  # type: ignore[return-value]
    try:
        async with asyncio.timeout(body_timeout_s):
            return await RequestResponseCycle.receive(cycle)  # type: ignore[return-value]
    except TimeoutError:
        raise RequestTimeout from None
