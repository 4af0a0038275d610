"""The outermost ASGI layer: every request gets its id, its limits, and its line in the log here.

Operations (app/operations.py) go from here to the pipeline; everything else goes on to FastAPI. See "The door" in
docs/architecture.md for what that is worth.
"""

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from auth.errors import LimitExceeded
from auth.plan import tightest
from cache.errors import NotInCache
from cache.store import Hit

from . import cache_headers
from .answers import Landed, Place, Wanted, whole_body
from .cache_headers import SILENT
from .connections import Headers, Line
from .errors import (
    ClientGone,
    Failure,
    InvalidRequest,
    MethodNotAllowed,
    RequestTooLarge,
    describe,
    is_known,
)
from .exchange import Exchange, limit_headers
from .interruption import Interruption
from .landing import Landing
from .lifecycle import Lifecycle, Running
from .logs import Access, AccessLog, log_failure
from .metrics import Counts
from .operations import OPERATIONS, Operation
from .pipeline import Caller, Pipeline
from .sse import DONE, EventStream, encode, encode_error

if TYPE_CHECKING:
    from .tracing import Tracing

JSON = b"application/json"
# Headers of requests that are not answered at once, since more comes of them.
UNUSUAL = frozenset(
    {
        b"cache-control",
        b"content-encoding",
        b"last-event-id",
        b"origin",
        b"transfer-encoding",
        b"x-headrace-variant",
    }
)

AtOnce = tuple[Headers, bytes] | Exchange | None


class Door:
    def __init__(
        self,
        app: ASGIApp,
        pipeline: Pipeline,
        lifecycle: Lifecycle,
        counts: Counts,
        access_log: AccessLog,
        max_body_bytes: int,
        ping_s: float,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._app = app
        self._pipeline = pipeline
        self._lifecycle = lifecycle
        self._counts = counts
        self._access_log = access_log
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope["method"], scope["path"], dict(scope["headers"]))
        exchange.send_with(send, None)
        operation = OPERATIONS.get(scope["path"])
        if operation is None:
            scope["state"]["access"] = exchange.access
            await self._see_through(exchange, receive, self._app(scope, receive, exchange.send))
        else:
            self._note_operation(operation, exchange)
            await self._see_through(exchange, receive, self._operate(operation, exchange, receive))

    def begin(self, exchange: Exchange, body: bytes, receive: Receive, send: Send, line: Line) -> None:
        """Answer what `answer_at_once` could not, by a task only if there is more to wait for than a flight."""
        exchange.send_with(send, line)
        exchange.body = body
        flying = self._pipeline.fly_at_once(exchange)
        if flying is not None:
            assert exchange.wanted is not None
            exchange.note_source(flying[1], exchange.wanted.obstacle, SILENT)
            Landing(self, exchange, *flying, self._lifecycle.running(), receive, line).wait()
        else:
            assert exchange.operation is not None
            line.spawn(self._see_through(exchange, receive, self._operate(exchange.operation, exchange, receive)))

    def land(self, exchange: Exchange, caller: Caller, place: Place, line: Line) -> bool:
        """Send the answer of a flight that is over, and account for it; False: that is for `see_landing`."""
        wanted, landed = exchange.wanted, place.flight.result
        assert wanted is not None
        assert landed is not None
        body = body_of(landed)
        if exchange.takes_a_thread(body):
            return False
        self._pipeline.land_at_once(wanted, caller, place)
        exchange.note_landing(landed, place)
        if not line.answer(*exchange.whole(body)):
            return False
        exchange.access.status = 200
        self._end(exchange.access)
        return True

    async def see_landing(
        self, exchange: Exchange, caller: Caller, place: Place, running: Running, receive: Receive
    ) -> None:
        """The same by a task, also of a flight that is not over, or has failed, or whose caller has left."""
        assert exchange.wanted is not None
        work = self._answer(exchange.wanted, caller, place, exchange, receive, running)
        await self._see_through(exchange, receive, work)

    async def _see_through(self, exchange: Exchange, receive: Receive, work: Awaitable[None]) -> None:
        try:
            await work
        except ClientGone:
            exchange.access.outcome = "disconnected"
        except Exception as exc:
            await self._refuse(exchange, exc, receive)
        finally:
            access = exchange.access
            if access.status is None:
                # The exchange ended without an answer: the caller left, or the server is cancelling everything.
                access.outcome = "disconnected"
            self._end(access)

    def answer_at_once(self, path: str, headers: Headers, body: bytes) -> AtOnce:
        """The same walk for a whole POST request that is answered from memory, in steps none of which waits, so that
        the connection can do without a task for it. An exchange: something has to be waited for, which `begin` sees to.
        None: it is for ASGI."""
        operation = OPERATIONS.get(path)
        if operation is None or self._lifecycle.is_refusing:
            return None
        named = dict(headers)
        if not UNUSUAL.isdisjoint(named):
            return None
        exchange = Exchange("POST", path, named)
        exchange.operation = operation
        self._note_operation(operation, exchange)
        access = exchange.access
        try:
            self._check_head(named)
            hit = self._pipeline.find_at_once(operation, exchange, body)
        except Exception:
            hit = None  # what is wrong is told on the way of `begin`
        if hit is None:
            return exchange
        exchange.note_source(hit, None, SILENT)
        access.status = 200
        answer = exchange.whole(whole_body(hit.entry))
        self._end(access)
        return answer

    def _note_operation(self, operation: Operation, exchange: Exchange) -> None:
        exchange.access.operation = operation.name
        if self._tracing is not None:
            self._tracing.begin(exchange.access, exchange.headers)

    def _end(self, access: Access) -> None:
        access.end()
        if access.trace is not None:
            access.trace.end(access)
        self._access_log.write(access)
        if access.operation is not None:
            self._counts.record(access)

    async def _operate(self, operation: Operation, exchange: Exchange, receive: Receive) -> None:
        access, headers = exchange.access, exchange.headers
        if access.method != "POST":
            raise MethodNotAllowed(access.method, "POST")
        with self._lifecycle.running() as running:
            # A request that came together is looked up first. Limits come first for all others, whose bodies may be
            # large.
            hit = await self._pipeline.look_up(exchange)
            caller = await self._pipeline.admit(operation, exchange, hit)
            try:
                if hit is not None:
                    self._pipeline.use(exchange, hit)
                    exchange.note_source(hit, None, SILENT)
                    await self._recall(caller, hit, exchange)
                    return
                wanted, control = exchange.wanted, SILENT
                if wanted is None:
                    control = cache_headers.read_cache_control(headers.get(b"cache-control"))
                    self._check_head(headers)
                    body = exchange.body
                    if body is None:
                        body = await self._read_body(receive, access)
                    wanted = self._pipeline.understand(operation, exchange, body, caller.principal, control)
                source = await self._pipeline.find(wanted)
                exchange.note_source(source, wanted.obstacle, control)
                if isinstance(source, Hit):
                    await self._recall(caller, source, exchange)
                elif wanted.stream:
                    await self._stream(wanted, caller, source, exchange, receive, running)
                else:
                    await self._answer(wanted, caller, source, exchange, receive, running)
            finally:
                await caller.admission.settle()

    async def _recall(self, caller: Caller, hit: Hit, exchange: Exchange) -> None:
        wanted = exchange.wanted
        if wanted is None or not wanted.stream:
            await caller.admission.settle()
            await exchange.reply(200, whole_body(hit.entry))
            return
        events = await self._pipeline.replay(wanted, caller, hit)
        await exchange.reply_stream([*map(encode, events), DONE])

    async def _answer(
        self,
        wanted: Wanted,
        caller: Caller,
        place: Place,
        exchange: Exchange,
        receive: Receive,
        running: Running,
    ) -> None:
        with Interruption(exchange.line, receive, running):
            landed = await self._pipeline.answer(wanted, caller, place)
        exchange.note_landing(landed, place)
        await exchange.reply(200, body_of(landed))

    def _check_head(self, headers: dict[bytes, bytes]) -> None:
        """What can be refused before a byte of the body is read."""
        if int(headers.get(b"content-length", b"0")) > self._max_body_bytes:
            raise RequestTooLarge(self._max_body_bytes)
        media_type = headers.get(b"content-type", JSON)
        if media_type != JSON and media_type.partition(b";")[0].strip().lower() != JSON:
            raise InvalidRequest("The content type must be application/json.")
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise InvalidRequest("A compressed body is not understood; send it as it is.")

    async def _read_body(self, receive: Receive, access: Access) -> bytes:
        """Raises: RequestTooLarge, RequestTimeout (from app/connections.py), ClientGone."""
        body = b""
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part: bytes = message.get("body", b"")
                if len(body) + len(part) > self._max_body_bytes:
                    raise RequestTooLarge(self._max_body_bytes)
                body = body + part if body else part
                if not message.get("more_body", False):
                    return body
        finally:
            access.received()

    async def _stream(
        self,
        wanted: Wanted,
        caller: Caller,
        place: Place,
        exchange: Exchange,
        receive: Receive,
        running: Running,
    ) -> None:
        stream = EventStream(exchange, self._ping_s)
        last = DONE
        try:
            with Interruption(exchange.line, receive, running):
                await self._pipeline.stream(wanted, caller, place, stream)
        except Exception as exc:
            if isinstance(exc, ClientGone) or not stream.has_begun:
                raise
            access = exchange.access
            last = encode_error(self._failure(exc, access).body(access.request_id))
        await stream.end(last)

    async def _refuse(self, exchange: Exchange, exc: Exception, receive: Receive) -> None:
        failure = self._failure(exc, exchange.access)
        if exchange.access.status is not None:
            return  # the answer has begun; uvicorn closes the connection of one that was not finished
        headers = failure.headers()
        if isinstance(exc, LimitExceeded):
            headers += limit_headers(tightest(exc.standings))
        if isinstance(exc, NotInCache):
            exchange.cache_status = cache_headers.NOT_IN_CACHE
        body = failure.body(exchange.access.request_id)
        is_still_sent = isinstance(exc, RequestTooLarge)
        await exchange.reply(failure.status, body, headers, linger=receive if is_still_sent else None)

    def _failure(self, exc: BaseException, access: Access) -> Failure:
        failure = describe(exc)
        access.error = failure.code
        access.reason = getattr(exc, "reason", None)
        access.outcome = "error" if failure.status >= 500 else "refused"
        if not is_known(exc):
            log_failure(access, exc)
        return failure


def body_of(landed: Landed) -> bytes:
    if landed.entry is not None:
        return whole_body(landed.entry)
    assert landed.body is not None
    return landed.body
