"""An upstream that speaks OpenAI's API over HTTP/1.1, and misbehaves as it is told.

It stands on plain sockets, as an HTTP library would not let it break the rules.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import trustme

from app.engines.scripted import Gate

from .fault_answers import GOOD, Behaviour, Request, body_of, encoded, head_of, header_lines, is_streamed, phrase_of
from .redis_server import free_port

LONGEST_REQUEST = 64 << 20
STALL_S = 3600.0


class FaultServer:
    """`probes` are the requests for /health and /v1/models, which always are answered well, but for `health_status`
    and `health_stalls`; all others are in `requests`."""

    def __init__(
        self,
        behaviour: Behaviour = GOOD,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        self.host = host
        self.port = port or free_port()
        self.url = f"http{'s' if tls else ''}://{host}:{self.port}"
        self.gate = Gate()
        self.health_status = 200
        self.health_stalls = False
        self.models = ["demo"]
        self.connections = 0
        self.refused_reuses = 0
        self.requests: list[Request] = []
        self.probes: list[Request] = []
        self.aborted: list[Request] = []
        self._tls = tls
        self._default = behaviour
        self._script: list[Behaviour] = []
        self._open: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._has_arrived = asyncio.Event()
        self._server: asyncio.Server | None = None

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def behave(self, behaviour: Behaviour) -> None:
        """Answer so whenever the script is at its end."""
        self._default = behaviour

    def script(self, behaviours: Sequence[Behaviour]) -> None:
        """Answer the coming requests so, one each."""
        self._script = list(behaviours)

    async def arrived(self, count: int, timeout_s: float = 10) -> None:
        """Wait until so many requests in all have come."""
        async with asyncio.timeout(timeout_s):
            while len(self.requests) < count:
                self._has_arrived.clear()
                await self._has_arrived.wait()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.StreamReaderProtocol:
            reader = Reader(LONGEST_REQUEST)
            return asyncio.StreamReaderProtocol(reader, lambda _, writer: self._handle(reader, writer))

        self._server = await loop.create_server(protocol, self.host, self.port, ssl=self._tls, backlog=1000)

    async def stop(self) -> None:
        """Refuse connections, and drop those that are open."""
        if self._server is not None:
            self._server.close()
        for writer in self._open.values():
            writer.transport.abort()
        await asyncio.gather(*self._open)

    async def _handle(self, reader: "Reader", writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        self.connections += 1
        try:
            await self._serve(reader, writer, self.connections)
        except Hangup as hangup:
            if hangup.is_reset:
                await reset(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # The client has left.
        finally:
            del self._open[task]
            writer.close()

    async def _serve(self, reader: "Reader", writer: asyncio.StreamWriter, number: int) -> None:
        last = GOOD
        while last.keeps_alive:
            async with asyncio.timeout(last.close_idle_after_s):
                request = await read_request(reader, number)
            if last.on_reuse is not None:
                self.refused_reuses += 1
                raise Hangup(last.on_reuse == "reset")
            last = self._behaviour_for(request)
            await self._answer(request, last, reader, writer)
            if last.framing == "until-close":
                return

    def _behaviour_for(self, request: Request) -> Behaviour:
        """Write down the request, and look up how to answer it."""
        if request.method == "GET" and request.path.endswith(("/health", "/v1/models")):
            self.probes.append(request)
            if request.path.endswith("/health"):
                return Behaviour(
                    status=self.health_status, body=b"", stall_before_headers_s=STALL_S * self.health_stalls
                )
            models = [{"id": name, "object": "model", "created": 1, "owned_by": "vllm"} for name in self.models]
            return Behaviour(body=json.dumps({"object": "list", "data": models}).encode())
        self.requests.append(request)
        self._has_arrived.set()
        return self._script.pop(0) if self._script else self._default

    async def _answer(
        self, request: Request, behaviour: Behaviour, reader: "Reader", writer: asyncio.StreamWriter
    ) -> None:
        """Answer, and stop where the client leaves. Raises: Hangup, OSError."""
        try:
            # A time-out at once, of all that waits, is what the client's leaving is.
            async with asyncio.timeout(0 if reader.is_gone else None) as presence:
                reader.on_gone = lambda: presence.reschedule(0)
                await AnswerWriter(request, behaviour, self.gate, writer).run()
        except OSError:
            if request not in self.probes:
                self.aborted.append(request)
            raise
        finally:
            reader.on_gone = nothing


class Hangup(Exception):
    """The connection is to end here."""

    def __init__(self, is_reset: bool) -> None:
        super().__init__()
        self.is_reset = is_reset


def nothing() -> None:
    pass


class Reader(asyncio.StreamReader):
    """Tells that the client has left even while nobody reads."""

    is_gone = False
    on_gone: Callable[[], None] = staticmethod(nothing)

    def feed_eof(self) -> None:
        super().feed_eof()
        self._leave()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self._leave()

    def _leave(self) -> None:
        self.is_gone = True
        on_gone, self.on_gone = self.on_gone, nothing  # a broken connection is told of twice
        on_gone()


async def read_request(reader: asyncio.StreamReader, number: int) -> Request:
    """Raises: IncompleteReadError when there is none."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    pairs = [line.split(":", 1) for line in lines]
    request = Request(method, path, [(name, value.strip()) for name, value in pairs], b"", number)
    if request.header("transfer-encoding"):
        body = b"".join([chunk async for chunk in chunks_of(reader)])
    else:
        body = await reader.readexactly(int(request.header("content-length") or 0))
    return Request(method, path, request.headers, body, number)


async def chunks_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")


async def reset(writer: asyncio.StreamWriter) -> None:
    # What the client has not read when the RST comes may be lost to it.
    await asyncio.sleep(0.02)
    # What is set on the copy is set on the original, which the transport does not hand out.
    with (
        contextlib.suppress(OSError),
        socket.socket(fileno=socket.dup(writer.get_extra_info("socket").fileno())) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class AnswerWriter:
    def __init__(self, request: Request, behaviour: Behaviour, gate: Gate, writer: asyncio.StreamWriter) -> None:
        self._request = request
        self._behaviour = behaviour
        self._gate = gate
        self._writer = writer
        self._sent = 0

    async def run(self) -> None:
        """Raises: Hangup where the answer is to be cut."""
        behaviour = self._behaviour
        await asyncio.sleep(behaviour.stall_before_headers_s)
        if behaviour.stalls_before_headers:
            await self._gate.pass_through()
        if behaviour.raw is not None:
            return await self._write(behaviour.raw)
        for status in behaviour.interim:
            await self._write(f"HTTP/1.1 {status} {phrase_of(status)}\r\n\r\n".encode())
        pieces = list(encoded(behaviour, body_of(behaviour, self._request)))
        is_stream = is_streamed(behaviour, self._request)
        framing = behaviour.framing or ("chunked" if is_stream else "content-length")
        head = head_of(behaviour, is_stream, framing, sum(map(len, pieces)))
        await self._write(head, behaviour.head_split)
        await self._write_events(pieces, framing == "chunked")
        await self._write(behaviour.extra_bytes)

    async def _write_events(self, pieces: list[bytes], is_chunked: bool) -> None:
        behaviour = self._behaviour
        for number, piece in enumerate(pieces):
            await asyncio.sleep(behaviour.event_s)
            if behaviour.is_gated or number == behaviour.stall_after_events:
                await self._gate.pass_through()
            for part in split(piece, behaviour.split):
                await self._write(self._chunk(part) if is_chunked else part)
        if len(pieces) == behaviour.stall_after_events:
            await self._gate.pass_through()
        if is_chunked:
            await self._write(b"0\r\n" + header_lines(behaviour.trailers) + b"\r\n")

    def _chunk(self, data: bytes) -> bytes:
        return self._behaviour.chunk_head.format(size=len(data)).encode() + b"\r\n" + data + b"\r\n"

    async def _write(self, data: bytes, split_bytes: int = 0) -> None:
        limit, drip_s = self._behaviour.cut_at_byte, self._behaviour.drip_s
        room = None if limit is None else limit - self._sent
        for piece in split(data[:room], 1 if drip_s else split_bytes):
            # The pause goes first, so that each piece is on its way before anything waits for the next.
            await asyncio.sleep(drip_s)
            if self._writer.transport.is_closing():
                raise ConnectionAbortedError
            self._writer.write(piece)
            self._sent += len(piece)
            await self._writer.drain()
            await asyncio.sleep(0)
        if self._sent == limit:
            raise Hangup(self._behaviour.resets)


def split(data: bytes, size: int) -> Iterator[bytes]:
    """Pieces of so many bytes; 0 is all of it."""
    step = size or len(data) or 1
    return (data[start : start + step] for start in range(0, len(data), step))


class Authority:
    """Signs servers' certificates: `server("127.0.0.1")` is a good one, `server("other.example")` has a wrong name."""

    def __init__(self) -> None:
        self._authority = trustme.CA()

    def server(self, *names: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(*names).configure_cert(context)
        return context

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        return context

    def write(self, path: Path) -> Path:
        """Write what clients are to trust."""
        self._authority.cert_pem.write_to_path(path)
        return path


def http_date(in_s: float) -> str:
    """For Retry-After."""
    return formatdate(time.time() + in_s, usegmt=True)


@asynccontextmanager
async def fault_server(
    behaviour: Behaviour = GOOD,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
) -> AsyncIterator[FaultServer]:
    upstream = FaultServer(behaviour, tls, host, port)
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()
