"""An engine elsewhere: one server that speaks OpenAI's API, such as `vllm serve`.

Nothing of the caller's headers goes on but the request id and the trace context, and nothing of the server's comes
back: what belongs to one connection (RFC 9110, section 7.6.1), or to the gateway alone, ends here. The answer's `model`
is the name that the caller asked for.
"""

import asyncio
import logging
import ssl
import time
from dataclasses import dataclass
from typing import Any

import orjson

from routing.engine import Answer, Call, Load, Take
from routing.errors import EngineError, EngineUnavailable, UnsupportedOperation

from .http_client import HttpClient, Timeouts
from .http_response import Response
from .remote_errors import refusal, refusal_in
from .remote_stream import Events, note_usage, usage_of

logger = logging.getLogger("headrace")

PATHS = {"chat.completions": b"/v1/chat/completions", "completions": b"/v1/completions"}
JSON, EVENTS = b"application/json", b"text/event-stream"
NO_HURRY = Timeouts()


@dataclass(frozen=True, slots=True)
class Upstream:
    """How servers of a pool are asked. `model` is their name for it; None: the one in the request."""

    api_key: str | None = None
    model: str | None = None
    timeouts: Timeouts = NO_HURRY
    tls: ssl.SSLContext | None = None
    probe_path: str = "/health"
    probe_every_s: float = 2.0
    probe_timeout_s: float = 2.0
    probe_failures: int = 2


class RemoteEngine:
    """`root` is the path before `/v1`, mostly empty. `run` has to run as a task for as long as the engine is wanted."""

    def __init__(
        self, name: str, host: str, port: int, upstream: Upstream, root: str = "", peer: str | None = None
    ) -> None:
        self.name = name
        self.host = host
        self.load = Load()
        self.is_ready = True  # until a probe says otherwise: a gateway that starts need not wait for the first
        self.last_error: str | None = None
        self.latency_ms: float | None = None
        self._upstream = upstream
        self._client = HttpClient(host, port, upstream.timeouts, upstream.tls, peer)
        limit_s = upstream.probe_timeout_s
        self._prober = HttpClient(host, port, Timeouts(limit_s, limit_s, limit_s, limit_s), upstream.tls, peer)
        self._failed_probes = 0
        who = peer or host
        is_default_port = port == (80 if upstream.tls is None else 443)
        authority = f"[{who}]" if ":" in who else who
        common = f"host: {authority if is_default_port else f'{authority}:{port}'}\r\nuser-agent: headrace\r\n"
        if upstream.api_key is not None:
            common += f"authorization: Bearer {upstream.api_key}\r\n"
        common += "accept-encoding: identity\r\n"
        self._probe = f"GET {root}{upstream.probe_path} HTTP/1.1\r\n{common}\r\n".encode()
        self._heads = {
            operation: b"POST %b%b HTTP/1.1\r\n%bcontent-type: application/json\r\n"
            % (root.encode(), path, common.encode())
            for operation, path in PATHS.items()
        }

    def unavailable(self) -> EngineUnavailable:
        upstream = self._upstream
        return EngineUnavailable("No engine behind this model can take requests now.", upstream.probe_every_s)

    async def answer(self, call: Call) -> Answer:
        request = self._request(call)
        self.load.running += 1
        try:
            response, body = await self._client.ask(request)
        finally:
            self.load.running -= 1
        if response.status != 200:
            raise refusal(response, body)
        document = read_document(response, body)
        usage = usage_of(document)
        if usage is not None:
            note_usage(call.tally, usage)
        if document.get("model") != call.model:
            document["model"] = call.model
            body = orjson.dumps(document)
        return Answer(body, usage, document)

    async def stream(self, call: Call, take: Take) -> None:
        self.load.running += 1
        reading = None
        try:
            reading = await self._client.open(self._request(call))
            response = reading.response
            if response.status != 200:
                raise refusal(response, await reading.rest())
            if media_type(response) != EVENTS:
                raise EngineError("The engine's answer is not the stream of events that was asked for.")
            events = Events(call, take)
            await reading.feed(events.read)
            events.end()
        finally:
            self.load.running -= 1
            if reading is not None:
                reading.close()

    async def run(self) -> None:
        """Probe the server, until cancelled."""
        try:
            while True:
                await self._probe_once()
                await asyncio.sleep(self._upstream.probe_every_s)
        finally:
            self._client.close()
            self._prober.close()

    async def _probe_once(self) -> None:
        began = time.perf_counter()
        try:
            response, _ = await self._prober.ask(self._probe)
            if response.status != 200:
                raise EngineError(f"The health probe was answered with status {response.status}.")
        except EngineUnavailable as exc:  # which is not the server's fault
            self.last_error = str(exc)
        except EngineError as exc:
            self._failed_probes += 1
            self.last_error = str(exc)
            if self.is_ready and self._failed_probes >= self._upstream.probe_failures:
                self.is_ready = False
                logger.warning("replica %s: down (%s)", self.name, self.last_error)
        else:
            self._failed_probes = 0
            self.latency_ms = round((time.perf_counter() - began) * 1000, 3)
            if not self.is_ready:
                self.is_ready = True
                logger.info("replica %s: up", self.name)

    def _request(self, call: Call) -> bytes:
        """Raises: UnsupportedOperation."""
        head = self._heads.get(call.operation)
        if head is None:
            raise UnsupportedOperation(f"This model has no operation {call.operation}.")
        data = orjson.dumps({**call.body, "model": self._upstream.model or call.body["model"]})
        lines = b"".join([b"%b: %b\r\n" % header for header in call.trace])
        return b"%bx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            head,
            call.request_id.encode(),
            lines,
            len(data),
            data,
        )


def read_document(response: Response, body: bytes) -> dict[str, Any]:
    """A whole answer, decoded. Raises: EngineError, and what the server tells in place of an answer."""
    if media_type(response) != JSON:
        raise EngineError("The engine's answer is not the JSON that was asked for.")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise EngineError("The engine's answer is not the JSON that it says it is.") from None
    if type(document) is not dict:
        raise EngineError("The engine's answer has an unknown form.")
    if document.get("error"):
        raise refusal_in(document["error"])
    if type(document.get("choices")) is not list:
        raise EngineError("The engine's answer has an unknown form.")
    return document


def media_type(response: Response) -> bytes:
    return response.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
