"""One request and its answer: what is sent, and what will stand in the log."""

import asyncio
import contextlib
import gzip
import math
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from starlette.types import Message, Receive, Send

from auth.limits import Admission
from auth.plan import Standing
from auth.principal import Principal
from cache.store import Hit

from . import cache_headers
from .answers import OFF, Landed, Place, Wanted, new_id
from .cache_headers import CacheControl
from .connections import Headers, Line
from .logs import Access
from .operations import Operation

# W3C Trace Context, section 3.2
TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
REQUEST_ID = re.compile(rb"[A-Za-z0-9._~:/+=-]{1,128}")
JSON = (b"content-type", b"application/json")
STREAM = (  # as sse-starlette's
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
LIMIT_HEADERS = {
    kind: tuple(f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset"))
    for kind in ("requests", "tokens")
}
MIN_GZIP_BYTES = 1024
GZIP_LEVEL = 5
GZIP_IN_THREAD_BYTES = 65536  # above it, compressing takes longer than handing it to a thread
LINGER_S = 2.0
STORED = b"; stored"


# Who asked what, to the byte: the generation of the models, the operation, the tenant, the subject, the models that it
# may use, the session, a digest of the body.
Asked = tuple[int, str, str, str, tuple[str, ...] | None, bytes | None, bytes]


class Known(NamedTuple):
    """What was understood of a request that was answered whole from the cache."""

    key: bytes
    model: str
    variant: str | None


class Exchange:
    """One request and its answer: what has been sent, and what will stand in the log."""

    __slots__ = (
        "_send",
        "access",
        "admission",
        "age_s",
        "asked",
        "body",
        "cache_status",
        "headers",
        "hit",
        "known",
        "line",
        "operation",
        "principal",
        "wanted",
    )

    def __init__(self, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        given = headers.get(b"x-request-id", b"")
        request_id = (given if REQUEST_ID.fullmatch(given) else new_id()).decode()
        self.headers = headers
        self.operation: Operation | None = None
        self.body: bytes | None = None  # of a request that came whole
        self.access = Access(request_id, method, path[:200])
        if b"traceparent" in headers:
            self.access.trace_id = trace_id_of(headers[b"traceparent"])
        # What is known so far.
        self.principal: Principal | None = None
        self.admission: Admission | None = None
        self.asked: Asked | None = None
        self.known: Known | None = None
        self.wanted: Wanted | None = None
        self.hit: Hit | None = None
        self.cache_status: bytes = b""
        self.age_s: int | None = None
        self._send: Send | None = None
        self.line: Line | None = None

    def send_with(self, send: Send, line: Line | None) -> None:
        self._send = send
        self.line = line if line is not None and line.is_instead_of(send) else None

    def own_headers(self) -> Headers:
        """Those of every answer: the request's id, where it came from, how the caller's limits stand, and what took
        how long."""
        headers = [(b"x-request-id", self.access.request_id.encode())]
        if self.cache_status:
            headers.append((b"cache-status", self.cache_status))
        if self.access.variant is not None:
            headers.append((b"x-headrace-variant", self.access.variant.encode()))
        if self.age_s is not None:
            headers.append((b"age", b"%d" % self.age_s))
        if self.admission is not None:
            headers += limit_headers(self.admission.tightest())
        headers.append((b"server-timing", server_timing(self.access)))
        return headers

    def stream_headers(self) -> Headers:
        """All headers of an event stream."""
        return [*STREAM, *self.own_headers()]

    def begin_stream(self, frames: bytes) -> bool:
        """Send the head of an event stream, and its first frames, in one step; False: not now."""
        if self.line is None or not self.line.begin(self.stream_headers(), frames):
            return False
        self.access.status = 200
        return True

    def note_source(self, source: Hit | Place, obstacle: str | None, control: CacheControl) -> None:
        """What the answer's headers will say of where it came from."""
        if isinstance(source, Hit):
            now = time.time()
            self.age_s = max(0, int(now - source.entry.made_at))
            self.cache_status = cache_headers.hit(source.entry.expires_at - now, source.tier)
        elif obstacle is not None and (source.leads or obstacle != OFF):
            self.cache_status = cache_headers.bypass(obstacle)
        elif not source.leads:
            self.cache_status = cache_headers.COLLAPSED
        else:
            self.cache_status = cache_headers.REQUEST if control.no_cache else cache_headers.MISS

    def note_landing(self, landed: Landed, place: Place) -> None:
        if landed.is_stored and place.leads and not self.cache_status.endswith(STORED):
            self.cache_status += STORED

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.access.status = message["status"]
            if self.access.operation is None:
                # From FastAPI, which does not know of the id.
                message["headers"] = [*message["headers"], (b"x-request-id", self.access.request_id.encode())]
                if message["status"] >= 400:
                    self.access.outcome = "error" if message["status"] >= 500 else "refused"
        assert self._send is not None
        await self._send(message)

    def whole(self, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> tuple[Headers, bytes]:
        """All headers of a whole JSON answer, and its body as it is sent."""
        all_headers = self.own_headers()
        all_headers += headers
        all_headers.append(JSON)
        if len(body) > MIN_GZIP_BYTES:
            all_headers.append((b"vary", b"accept-encoding"))
            if self._accepts_gzip():
                all_headers.append((b"content-encoding", b"gzip"))
                body = gzip.compress(body, GZIP_LEVEL)
        all_headers.append((b"content-length", b"%d" % len(body)))
        return all_headers, body

    def takes_a_thread(self, body: bytes) -> bool:
        """Whether `whole` compresses so much that the event loop should not wait for it."""
        return len(body) > GZIP_IN_THREAD_BYTES and self._accepts_gzip()

    def _accepts_gzip(self) -> bool:
        return accepts_gzip(self.headers.get(b"accept-encoding", b""))

    async def reply(
        self,
        status: int,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        linger: Receive | None = None,
    ) -> None:
        """Send a whole JSON answer. With `linger`, read on for a moment before the end: a connection closed with unread
        bytes is reset, and the reset can overtake the answer (RFC 9112, section 9.6)."""
        if self.takes_a_thread(body):
            all_headers, body = await asyncio.to_thread(self.whole, body, headers)
        else:
            all_headers, body = self.whole(body, headers)
        if status == 200 and self.line is not None and self.line.answer(all_headers, body):
            self.access.status = 200
            return
        await self.send({"type": "http.response.start", "status": status, "headers": all_headers})
        if linger is not None:
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
            await read_on(linger)
            body = b""
        await self.send({"type": "http.response.body", "body": body})

    async def reply_stream(self, frames: list[bytes]) -> None:
        """Send a whole event stream: every event is there already."""
        await self.send({"type": "http.response.start", "status": 200, "headers": self.stream_headers()})
        await self.send({"type": "http.response.body", "body": b"".join(frames)})


async def read_on(receive: Receive) -> None:
    """Read and forget the rest of a body, for LINGER_S at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (message := await receive())["type"] != "http.disconnect" and message.get("more_body"):
                pass


def limit_headers(standings: Sequence[Standing]) -> Headers:
    """In OpenAI's form: what a minute allows, what is left of it, when it ends. Written out: it is for every answer."""
    headers: Headers = []
    now = time.monotonic()
    for standing in standings:
        window, used = standing.window, standing.used
        limit, remaining, reset = LIMIT_HEADERS[window.kind]
        headers += (
            (limit, b"%d" % window.limit),
            (remaining, b"%d" % (window.limit - used if used < window.limit else 0)),
            (reset, b"%ds" % max(0, math.ceil(standing.resets_at - now))),
        )
    return headers


def trace_id_of(traceparent: bytes) -> str | None:
    found = TRACEPARENT.fullmatch(traceparent)
    return None if found is None else found[1].decode()


def server_timing(access: Access) -> bytes:
    """The walk's steps so far, in milliseconds (W3C Server Timing). Written out: it is for every answer."""
    told, before = b"", access.started
    for step, ended in access.steps:
        told += b"%b;dur=%.3f, " % (step.encode(), (ended - before) * 1000)
        before = ended
    return told + b"total;dur=%.3f" % ((time.perf_counter() - access.started) * 1000)


def accepts_gzip(accept_encoding: bytes) -> bool:
    """RFC 9110, section 12.5.3, for the one coding offered."""
    if not accept_encoding:
        return False
    weights = {}
    for item in accept_encoding.lower().split(b","):
        coding, _, weight = item.partition(b";")
        weights[coding.strip()] = weight.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
    return weights.get(b"gzip", weights.get(b"*", False))
