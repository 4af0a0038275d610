"""An HTTP/1.1 client for one server: asyncio's transports and httptools' parser, and nothing between them.

aiohttp takes three times as much of the CPU for a request, httpx far more ("Remote engines" in docs/performance.md).
There is no bound on the number of connections: how much an engine is given is for the admission to say. An answer has
deadlines for its first byte, between its bytes, and for its end; one timer looks after those of all connections. When
that timer is late itself, so was everything in this process, and the deadlines are put off by as much.
"""

import asyncio
import errno
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import httptools

from routing.errors import EngineError, EngineTimeout, EngineUnavailable, EngineUnreachable

from .http_response import Response

LOOK_S = 0.1  # how often deadlines are looked at
LATE_S = 0.01  # more than this is a busy event loop, and not a timer's grain
IDLE_S = 30.0
SETTLE_S = 1.0  # for the end of an answer after its last word
MAX_HEAD_BYTES = 65536
# What connecting fails by when it is this host that has too much to do: no files, ports, or memory left.
LOCAL_OVERLOAD = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
FRAMING = frozenset({b"content-length", b"transfer-encoding"})  # without these an answer lasts until the close
KEPT = FRAMING | {b"content-type", b"content-encoding", b"retry-after"}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds: for a connection; for an answer's first byte beyond its headers; without a byte after it; for all of
    it."""

    connect_s: float = 5.0
    first_byte_s: float = 300.0
    between_chunks_s: float = 60.0
    total_s: float = 600.0


class Closed(Exception):
    """A connection that was kept turned out to be closed, before a byte of an answer: the request may be sent again."""


class Connection(asyncio.Protocol):
    """One connection, with at most one answer under way."""

    __slots__ = (
        "_client",
        "_head_bytes",
        "_in_head",
        "_is_whole",
        "_parser",
        "answers",
        "data_at",
        "ends_by",
        "has_data",
        "idle_since",
        "is_open",
        "response",
        "sent_at",
        "transport",
    )

    def __init__(self, client: "HttpClient") -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport
        self.is_open = False
        self.answers = 0
        self.idle_since = 0.0
        # Of the answer under way.
        self.response: Response | None = None
        self.sent_at = self.data_at = 0.0
        self.ends_by = inf
        self.has_data = False
        self._is_whole = False
        self._in_head = True
        self._head_bytes = 0

    def send(self, request: bytes, is_whole: bool) -> Response:
        """`is_whole`: the reader waits for the answer's end, and is not told of anything before."""
        response = self.response = Response()
        self.sent_at = self.data_at = time.monotonic()
        self.ends_by = inf
        self.has_data = False
        self._is_whole = is_whole
        self._in_head = True
        self._head_bytes = 0
        self.transport.write(request)
        return response

    def settle(self) -> None:
        """Nothing is read any more; what comes soon is the answer's end."""
        self._is_whole = True
        self.ends_by = time.monotonic() + SETTLE_S

    def put_off(self, seconds: float) -> None:
        """For time in which nothing could have been read."""
        self.sent_at += seconds
        self.data_at += seconds
        self.ends_by += seconds

    def abort(self) -> None:
        """Close at once: the server sees that nobody waits for its answer."""
        self.response = None
        if self.is_open:
            self.transport.abort()

    def fail(self, error: Exception) -> None:
        response, self.response = self.response, None
        if response is not None:
            response.end(error)
        if self.is_open:
            self.transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:
            self.transport.abort()  # nobody has asked for anything
            return
        self.data_at = time.monotonic()
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
                raise EngineError("The engine's answer has headers that are too large.")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, EngineError) as exc:
            self.fail(_error_of(exc))
        else:
            if not self._is_whole:
                response.deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._client.forget(self)
        response, self.response = self.response, None
        if response is None:
            return
        if self._head_bytes == 0 and self.answers:
            response.end(Closed())
        elif exc is None and not self._in_head and not response.headers.keys() & FRAMING:
            response.end(None)
        else:
            response.end(EngineError("The engine closed the connection before the end of its answer."))

    # httptools' side

    def on_message_begin(self) -> None:
        if self.response is None:
            self.transport.abort()  # bytes after the end of an answer

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in KEPT and self.response is not None and self._in_head:  # and not a trailer
            self.response.headers[name] = value

    def on_headers_complete(self) -> None:
        response = self.response
        if response is None:
            return
        response.status = self._parser.get_status_code()
        if response.status < 200:
            return  # informational; the answer is still to come (RFC 9110, section 15.2)
        self._in_head = False
        response.keep_alive = self._parser.should_keep_alive()
        if b"content-encoding" in response.headers:
            response.decode()
        transfer = response.headers.get(b"transfer-encoding")
        if transfer is not None and not transfer.rstrip(b" ").lower().endswith(b"chunked"):
            # The parser would read until the connection closes (RFC 9112, section 6.3), and so miss a cut.
            raise EngineError("The engine's answer has an unknown transfer coding.")

    def on_body(self, body: bytes) -> None:
        self.has_data = True
        if self.response is not None:
            self.response.add(body)

    def on_message_complete(self) -> None:
        response = self.response
        if response is None:
            return
        if self._in_head:
            response.headers.clear()
            return
        self.response = None
        self.answers += 1
        response.end(None)
        self._client.take_back(self, response.keep_alive)


class HttpClient:
    """Requests to one server. `peer` is who is asked for by name, where `host` is an address (for TLS)."""

    def __init__(
        self,
        host: str,
        port: int,
        timeouts: Timeouts,
        tls: ssl.SSLContext | None = None,
        peer: str | None = None,
    ) -> None:
        self.timeouts = timeouts
        self._host, self._port = host, port
        self._tls = tls
        self._peer = peer or host
        # Mutable state: connections that can be used, the last used at the end; those with an answer under way; the
        # deadlines of those that are being made; and when the next look at all deadlines is due.
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._connecting: set[asyncio.Timeout] = set()
        self._look: asyncio.TimerHandle | None = None
        self._look_due = 0.0
        self._is_closed = False

    @property
    def connections(self) -> int:
        return len(self._idle) + len(self._busy)

    async def ask(self, request: bytes) -> tuple[Response, bytes]:
        """A whole answer, with its body. Raises: EngineError."""
        response, connection = None, await self._connect(is_new=False)
        try:
            response = connection.send(request, is_whole=True)
            if not response.is_over:
                await response.wait()
            if isinstance(response.error, Closed):
                connection = await self._connect(is_new=True)
                response = connection.send(request, is_whole=True)
                await response.wait()
        finally:
            if response is None or not response.is_over:
                self._busy.discard(connection)
                connection.abort()
        if response.error is not None:
            raise response.error
        return response, response.take()

    async def open(self, request: bytes) -> "Reading":
        """An answer that is read as it comes, once its headers are there; to be closed. Raises: EngineError."""
        reading = Reading(self, await self._connect(is_new=False))
        try:
            await reading.begin(request)
            if isinstance(reading.response.error, Closed):
                reading = Reading(self, await self._connect(is_new=True))
                await reading.begin(request)
        except BaseException:
            reading.close()
            raise
        if reading.response.error is not None and not reading.response.status:
            raise reading.response.error
        return reading

    def close(self) -> None:
        """Close what is idle now and what will be; answers under way go on."""
        self._is_closed = True
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()

    async def _connect(self, is_new: bool) -> Connection:
        while self._idle and not is_new:
            connection = self._idle.pop()
            if connection.is_open and not connection.transport.is_closing():
                break
        else:
            connection = await self._open_connection()
        self._busy.add(connection)
        if self._look is None:
            self._look_later()
        return connection

    async def _open_connection(self) -> Connection:
        limit_s = self.timeouts.connect_s
        server_hostname = self._peer if self._tls is not None else None
        if self._look is None:
            self._look_later()
        try:
            async with asyncio.timeout(limit_s) as deadline:
                self._connecting.add(deadline)
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._tls, server_hostname=server_hostname
                )
        except TimeoutError:
            raise EngineTimeout("connect", limit_s) from None
        except ssl.SSLCertVerificationError as exc:
            raise EngineUnreachable(f"The engine's certificate is not good: {exc.verify_message}.") from exc
        except (OSError, UnicodeError) as exc:  # UnicodeError is of a name that is none
            if getattr(exc, "errno", None) in LOCAL_OVERLOAD:
                raise EngineUnavailable("The gateway has no room for another connection.", 1.0) from exc
            raise EngineUnreachable("The engine cannot be reached.") from exc
        finally:
            self._connecting.discard(deadline)
        return connection

    def take_back(self, connection: Connection, keep_alive: bool) -> None:
        self._busy.discard(connection)
        if keep_alive and not self._is_closed and connection.is_open:
            connection.idle_since = connection.data_at
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def forget(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def drop(self, connection: Connection) -> None:
        """Of an answer that nobody wants any more."""
        self._busy.discard(connection)
        connection.abort()

    def _look_later(self) -> None:
        self._look_due = time.monotonic() + LOOK_S
        self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        now = time.monotonic()
        if now - self._look_due > LATE_S:
            self._put_off(now - self._look_due)
        for connection in list(self._busy):
            late = self._lateness(connection, now)
            if late is not None:
                self._busy.discard(connection)
                connection.fail(late)
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.pop(0).transport.abort()
        if self._busy or self._idle or self._connecting:
            self._look_later()
        else:
            self._look = None

    def _put_off(self, seconds: float) -> None:
        for connection in self._busy:
            connection.put_off(seconds)
        for deadline in self._connecting:
            when = deadline.when()
            if when is not None and not deadline.expired():
                deadline.reschedule(when + seconds)

    def _lateness(self, connection: Connection, now: float) -> EngineTimeout | None:
        limits = self.timeouts
        if connection.response is None:
            return None
        if now - connection.sent_at > limits.total_s or now > connection.ends_by:
            return EngineTimeout("total", limits.total_s)
        if not connection.has_data:
            is_late = now - connection.sent_at > limits.first_byte_s
            return EngineTimeout("first_byte", limits.first_byte_s) if is_late else None
        is_late = now - connection.data_at > limits.between_chunks_s
        return EngineTimeout("between_chunks", limits.between_chunks_s) if is_late else None


class Reading:
    """An answer that is read as it comes."""

    __slots__ = ("_client", "_connection", "_is_settled", "response")

    def __init__(self, client: HttpClient, connection: Connection) -> None:
        self._client = client
        self._connection = connection
        self._is_settled = False
        self.response: Response

    async def begin(self, request: bytes) -> None:
        """Send the request, and wait for the answer's headers, or for what went wrong."""
        response = self.response = self._connection.send(request, is_whole=False)
        while response.status < 200 and not response.is_over:
            await response.wait()

    async def read(self) -> bytes:
        """As much of the body as there is, once there is some; nothing at its end. Raises: EngineError."""
        response = self.response
        while not (data := response.take()):
            if response.is_over:
                if response.error is not None:
                    raise response.error
                return b""
            await response.wait()
        return data

    async def feed(self, read: Callable[[bytes], bool]) -> None:
        """As Response.feed; the connection is kept for another request if the answer ends by now."""
        await self.response.feed(read)
        self._is_settled = True
        if not self.response.is_over:
            self._connection.settle()

    async def rest(self) -> bytes:
        """All of the body that has not been read. Raises: EngineError."""
        parts = []
        while data := await self.read():
            parts.append(data)
        return b"".join(parts)

    def close(self) -> None:
        """An answer that is not over is cut short."""
        if not (self.response.is_over or self._is_settled):
            self._client.drop(self._connection)


def _error_of(exc: Exception) -> EngineError:
    """What a callback of ours raised reaches us inside of the parser's error."""
    for error in (exc, exc.__context__ or exc.__cause__):
        if isinstance(error, EngineError):
            return error
    return EngineError("The engine's answer is not HTTP.")
