"""An engine elsewhere: one server that speaks OpenAI's API, such as `vllm serve`.

Nothing of the caller's headers goes on but the request id and the trace context, and nothing of the server's comes
back: what belongs to one connection (RFC 9110, section 7.6.1), or to the gateway alone, ends here. The answer's `model`
is the name that the caller asked for.
"""

import asyncio
import email.utils
import logging
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from routing.engine import Answer, Call, Event, Load, Take, Tally, Usage
from routing.errors import (
    ContextLengthExceeded,
    EngineError,
    EngineOverloaded,
    EngineRefused,
    EngineUnavailable,
    EngineUnreachable,
    RequestRejected,
    RoutingError,
    UnsupportedOperation,
)

from .event_parser import EventParser
from .http_client import HttpClient, Timeouts
from .http_response import Response

logger = logging.getLogger("headrace")

PATHS = {"chat.completions": b"/v1/chat/completions", "completions": b"/v1/completions"}
# Of an error's `param` (vLLM) and `code` (OpenAI) when the prompt is too long.
TOO_LONG = ("input_tokens", "input_text", "context_length_exceeded")
JSON, EVENTS = b"application/json", b"text/event-stream"
HEAD = ("id", "object", "created", "model")
MOST_MESSAGE_CHARS = 500
# Of a server that has too much to do: when it does not say when to come back, and the most that it is believed.
DEFAULT_RETRY_S, MOST_RETRY_S = 1.0, 3600.0


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


class Events:
    """Reads a stream's bytes for one call, and gives its events to `take`."""

    def __init__(self, call: Call, take: Take) -> None:
        self._call = call
        self._take = take
        self._parser = EventParser()
        self._finished = 0  # choices, by their own word
        self._is_done = False
        self._head: dict[str, Any] = {}
        self._usage: Usage | None = None
        self._is_usage_told = False

    def read(self, part: bytes) -> bool:
        """Whether there is more to come. Raises: EngineError, and what the server tells in an error event."""
        for parsed in self._parser.feed(part):
            if parsed.data == b"[DONE]":
                self._is_done = True
                return False
            if parsed.data:
                self._take(self._event(parsed.data, parsed.name))
        return True

    def end(self) -> None:
        """Raises: EngineError, unless the answer is whole."""
        if not (self._is_done or self.is_finished):
            raise EngineError("The engine ended the stream early.")
        if (last := self._usage_event()) is not None:
            self._take(last)

    @property
    def is_finished(self) -> bool:
        return self._finished >= choices_of(self._call)

    def _event(self, data: bytes, name: str | None) -> Event:
        """Raises: EngineError, and what the server tells in an error event."""
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise EngineError("The engine sent an event that is not JSON.") from None
        if type(document) is not dict:
            raise EngineError("The engine sent an event of an unknown form.")
        if (error := document.get("error")) is not None:
            raise refusal_in(error)
        if document.get("model") != self._call.model:
            document["model"] = self._call.model
            data = orjson.dumps(document)
        elif b"\n" in data:  # an event that came on several lines leaves on one
            data = orjson.dumps(document)
        if not self._head:
            self._head = {field: document[field] for field in HEAD if field in document}
        choices = document.get("choices")
        usage = usage_of(document) if document.get("usage") else None
        if usage is not None:
            self._usage = usage
            note_usage(self._call.tally, usage)
        elif choices:
            self._call.tally.completion_tokens += 1
        if type(choices) is not list or not all(type(choice) is dict for choice in choices):
            raise EngineError("The engine sent an event of an unknown form.")
        if choices:
            for choice in choices:
                if choice.get("finish_reason"):
                    self._finished += 1
            return Event(data, name, None, document)
        self._is_usage_told = self._is_usage_told or usage is not None
        return Event(data, name, usage, document)

    def _usage_event(self) -> Event | None:
        """The last event, of a server that told usage in another one."""
        if self._usage is None or self._is_usage_told:
            return None
        usage = self._usage
        told: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        document = {**self._head, "choices": [], "usage": told}
        return Event(orjson.dumps(document), None, usage, document)


def choices_of(call: Call) -> int:
    """How many are asked for."""
    prompt = call.body.get("prompt")
    n: int = call.body.get("n") or 1
    return n * len(prompt) if type(prompt) is list and type(prompt[0]) is not int else n


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


def usage_of(document: dict[str, Any]) -> Usage | None:
    told = document.get("usage")
    if type(told) is not dict or type(told.get("prompt_tokens")) is not int:
        return None
    completion, details = told.get("completion_tokens"), told.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if type(details) is dict else None
    return Usage(
        told["prompt_tokens"],
        completion if type(completion) is int else 0,
        cached if type(cached) is int else None,
    )


def note_usage(tally: Tally, usage: Usage) -> None:
    tally.prompt_tokens, tally.completion_tokens = usage.prompt_tokens, usage.completion_tokens


def refusal(response: Response, body: bytes) -> RoutingError:
    """What a status other than 200 means to the caller."""
    document: Any = None
    with suppress(orjson.JSONDecodeError):
        document = orjson.loads(body)
    error = document.get("error") if type(document) is dict else None
    if type(error) is str:  # as of Text Generation Inference, and of Ollama
        error = {"message": error}
    elif error is None and type(document) is dict and document.get("object") == "error":  # as of vLLM before 0.10
        error = document
    after_s = retry_after_s(response.headers.get(b"retry-after"))
    return meaning(response.status, error if type(error) is dict else {}, after_s)


def refusal_in(error: Any) -> RoutingError:
    """What an error object means that came with a status of 200."""
    if type(error) is not dict:
        return EngineError("The engine failed at this request.")
    code = error.get("code")
    return meaning(code if type(code) is int else 500, error, None)


def meaning(status: int, error: dict[str, Any], after_s: float | None) -> RoutingError:
    """The first case that fits counts."""
    param, code = error.get("param"), error.get("code")
    field = None if param is None else str(param)
    message = str(error.get("message") or "The engine refuses this request.")[:MOST_MESSAGE_CHARS]
    if status == 429 or (status == 503 and after_s is not None):
        return EngineOverloaded(DEFAULT_RETRY_S if after_s is None else after_s)
    if status == 503:
        return EngineUnreachable("The engine cannot take requests now.")
    if status == 504:
        return EngineError("The engine's server gave up waiting.")
    if status == 408:
        return EngineRefused("The engine's server gave up waiting.")
    if param in TOO_LONG or code in TOO_LONG:
        return ContextLengthExceeded(message, field)
    if status in (401, 403, 407):
        return EngineRefused("The engine does not accept the gateway's credentials.")
    if status in (404, 405, 501):
        if param == "model" or code == "model_not_found":
            return EngineRefused("The engine does not know the model that the gateway asks for.")
        return UnsupportedOperation("The engine behind this model has no such operation.")
    if 400 <= status < 500:
        return RequestRejected(message, field)
    return EngineError("The engine failed at this request.")


def retry_after_s(value: bytes | None) -> float | None:
    """Seconds from now (RFC 9110, section 10.2.3); None for what is not understood."""
    if value is None:
        return None
    value = value.strip()
    if value.isdigit():
        return min(float(value), MOST_RETRY_S)
    with suppress(ValueError, TypeError, OverflowError):
        in_s = email.utils.parsedate_to_datetime(value.decode("latin-1")).timestamp() - time.time()
        return min(max(0.0, in_s), MOST_RETRY_S)
    return None
