"""What an upstream answers: bodies, events, and heads as OpenAI's API has them, but for what is told otherwise."""

import itertools
import json
import re
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

WORD = re.compile(r"\s*\S+|\s+$")
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
MALFORMED_EVENT = '{"id": "chatcmpl-'
IN_BAND_ERROR = {"error": {"message": "The engine has died.", "type": "server_error", "param": None, "code": 500}}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How to answer one request; as it stands, well. Events count from 0, and a whole answer's body is one event."""

    # What is answered. From status 400 on, `error` holds what differs from the usual fields of an error in OpenAI's
    # form. A tuple as `text` is tokens as they are. `documents` are the events' payloads instead of those made of the
    # text; `body` is sent whole, to streams, too; `raw` replaces everything, the status line included.
    status: int = 200
    reason: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    text: str | tuple[str, ...] = "One two three four five."
    finish_reason: str = "stop"
    has_usage: bool = True
    cached_tokens: int | None = 0
    is_compact: bool = True
    error: dict[str, Any] | None = None
    documents: tuple[Any, ...] | None = None
    content_type: str | None = None
    body: bytes | None = None
    raw: bytes | None = None

    # When. `stalls_before_headers` and `stall_after_events` need one permit of the server's gate each; `is_gated` needs
    # one before each event. `drip_s` goes before each byte, `event_s` before each event.
    stalls_before_headers: bool = False
    stall_before_headers_s: float = 0.0
    stall_after_events: int | None = None
    is_gated: bool = False
    event_s: float = 0.0
    drip_s: float = 0.0

    # The connection. `cut_at_byte` counts from the status line on, and `resets` makes that cut an RST. An idle
    # connection is closed without a word after `close_idle_after_s`, where 0 is at once; `on_reuse` is what the next
    # request on the same connection meets instead of an answer.
    cut_at_byte: int | None = None
    resets: bool = False
    keeps_alive: bool = True
    close_idle_after_s: float | None = None
    on_reuse: Literal["close", "reset"] | None = None

    # HTTP. Without `framing`, streams are chunked, and other bodies have a length. `chunk_head` is what stands before a
    # chunk of `size` bytes. `also_content_length` stands beside any framing. `head_split` is in bytes per write.
    version: str = "HTTP/1.1"
    framing: Literal["content-length", "chunked", "until-close"] | None = None
    encoding: Literal["gzip", "deflate"] | None = None
    interim: tuple[int, ...] = ()
    chunk_head: str = "{size:x}"
    trailers: tuple[tuple[str, str], ...] = ()
    also_content_length: int | None = None
    has_odd_head: bool = False
    head_split: int = 0
    extra_bytes: bytes = b""

    # Server-sent events. `split` is in bytes per write and chunk. An in-band error ends the events before `[DONE]`.
    newline: Literal["\n", "\r\n", "\r"] = "\n"
    has_space_after_colon: bool = True
    has_comments: bool = False
    event_name: str | None = None
    has_ids: bool = False
    retry_ms: int | None = None
    is_multi_line: bool = False
    has_bom: bool = False
    split: int = 0
    events_per_write: int = 1
    has_final_blank_line: bool = True
    has_done: bool = True
    malformed_at: int | None = None
    error_at: int | None = None


GOOD = Behaviour()


@dataclass(frozen=True, slots=True)
class Request:
    """What came, as it came; connections count from 1."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    connection_number: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def asks_for_stream(self) -> bool:
        return self.body.startswith(b"{") and bool(self.json.get("stream"))


def phrase_of(status: int) -> str:
    return HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Unknown"


def header_lines(headers: Sequence[tuple[str, str]]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")


def head_of(behaviour: Behaviour, is_stream: bool, framing: str, length: int) -> bytes:
    content_type = "text/event-stream; charset=utf-8" if is_stream else "application/json"
    headers = [("content-type", behaviour.content_type or content_type), *behaviour.headers]
    if behaviour.encoding:
        headers.append(("content-encoding", behaviour.encoding))
    if framing == "content-length":
        headers.append(("content-length", str(length)))
    if behaviour.also_content_length is not None:
        headers.append(("content-length", str(behaviour.also_content_length)))
    if framing == "chunked":
        headers.append(("transfer-encoding", "chunked"))
    if not behaviour.keeps_alive:
        headers.append(("connection", "close"))
    if behaviour.has_odd_head:
        headers = [(odd_case(name), f"\t {value} \t") for name, value in headers]
    reason = phrase_of(behaviour.status) if behaviour.reason is None else behaviour.reason
    return f"{behaviour.version} {behaviour.status} {reason}\r\n".encode() + header_lines(headers) + b"\r\n"


def odd_case(name: str) -> str:
    return "".join(letter.upper() if number % 2 else letter for number, letter in enumerate(name))


def is_streamed(behaviour: Behaviour, request: Request) -> bool:
    return behaviour.status < 400 and behaviour.body is None and request.asks_for_stream()


def body_of(behaviour: Behaviour, request: Request) -> list[bytes]:
    """The pieces that are sent one by one."""
    if behaviour.body is not None:
        return [behaviour.body]
    if behaviour.status >= 400:
        return [json.dumps({"error": error_fields(behaviour.status, behaviour.error)}).encode()]
    completion = Completion(behaviour, request.json, is_chat=request.path.endswith("/chat/completions"))
    if not request.asks_for_stream():
        whole = behaviour.documents[0] if behaviour.documents else completion.whole()
        return [dumped(whole, behaviour.is_compact).encode()]
    documents = list(completion.chunks() if behaviour.documents is None else behaviour.documents)
    events = list(events_of(behaviour, payloads_of(behaviour, documents)))
    step = behaviour.events_per_write
    return [b"".join(events[start : start + step]) for start in range(0, len(events), step)]


def encoded(behaviour: Behaviour, pieces: list[bytes]) -> Iterator[bytes]:
    """Each piece compressed so that it can be read before the next one comes."""
    if behaviour.encoding is None:
        yield from pieces
        return
    # zlib: 31 is gzip, and 15 is zlib's own form, which HTTP calls deflate (RFC 9110, 8.4.1.2).
    compressor = zlib.compressobj(wbits=31 if behaviour.encoding == "gzip" else 15)
    for number, piece in enumerate(pieces, 1):
        mode = zlib.Z_FINISH if number == len(pieces) else zlib.Z_SYNC_FLUSH
        yield compressor.compress(piece) + compressor.flush(mode)


def error_fields(status: int, more: dict[str, Any] | None) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"message": "Told to fail.", "type": kind, "param": None, "code": None, **(more or {})}


def payloads_of(behaviour: Behaviour, documents: list[Any]) -> Iterator[str]:
    for number, document in enumerate(documents):
        if number == behaviour.error_at:
            yield dumped(IN_BAND_ERROR, behaviour.is_compact)
            break
        yield MALFORMED_EVENT if number == behaviour.malformed_at else dumped_event(document, behaviour)
    if behaviour.has_done:
        yield "[DONE]"


def events_of(behaviour: Behaviour, payloads: Iterator[str]) -> Iterator[bytes]:
    events = [event_of(behaviour, payload, number) for number, payload in enumerate(payloads)]
    if not behaviour.has_final_blank_line:
        events[-1] = events[-1][: -len(behaviour.newline)]
    if behaviour.has_bom:
        events[0] = "\ufeff" + events[0]
    return (event.encode() for event in events)


def event_of(behaviour: Behaviour, payload: str, number: int) -> str:
    fields = [("data", line) for line in payload.split("\n")]
    if behaviour.event_name is not None:
        fields.insert(0, ("event", behaviour.event_name))
    if behaviour.has_ids:
        fields.append(("id", str(number)))
    if behaviour.retry_ms is not None and number == 0:
        fields.insert(0, ("retry", str(behaviour.retry_ms)))
    colon = ": " if behaviour.has_space_after_colon else ":"
    lines = [*([": ping", ""] if behaviour.has_comments else []), *(name + colon + value for name, value in fields), ""]
    return "".join(line + behaviour.newline for line in lines)


def dumped(document: Any, is_compact: bool) -> str:
    return json.dumps(document, separators=(",", ":") if is_compact else None)


def dumped_event(document: Any, behaviour: Behaviour) -> str:
    return json.dumps(document, indent=1) if behaviour.is_multi_line else dumped(document, behaviour.is_compact)


class Completion:
    """The documents of an answer to one request, the same text for each of its choices."""

    def __init__(self, behaviour: Behaviour, body: dict[str, Any], is_chat: bool) -> None:
        self._behaviour = behaviour
        self._body = body
        self._is_chat = is_chat
        self._tokens = WORD.findall(behaviour.text) if isinstance(behaviour.text, str) else list(behaviour.text)
        self._choices = range(body.get("n") or 1)
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model"),
        }

    def whole(self) -> dict[str, Any]:
        text = "".join(self._tokens)
        message = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        end = {"logprobs": None, "finish_reason": self._behaviour.finish_reason}
        choices = [{"index": index, **message, **end} for index in self._choices]
        return {**self._head, "choices": choices, **({"usage": self._usage()} if self._behaviour.has_usage else {})}

    def chunks(self) -> Iterator[dict[str, Any]]:
        has_usage = self._behaviour.has_usage and bool((self._body.get("stream_options") or {}).get("include_usage"))
        start = [({"role": "assistant", "content": ""}, None)] if self._is_chat else []
        end = [({} if self._is_chat else "", self._behaviour.finish_reason)]
        tokens = [({"content": token} if self._is_chat else token, None) for token in self._tokens]
        head = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})
        for (piece, reason), index in itertools.product([*start, *tokens, *end], self._choices):
            choice = {"index": index, "delta" if self._is_chat else "text": piece, "logprobs": None}
            choices = [choice | {"finish_reason": reason}]
            yield {**head, "choices": choices, **({"usage": None} if has_usage else {})}
        if has_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        contents = [str(message.get("content")) for message in self._body.get("messages", [])]
        prompt = sum(len(WORD.findall(text)) for text in contents or [str(self._body.get("prompt"))])
        completion = len(self._tokens) * len(self._choices)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        cached = self._behaviour.cached_tokens
        return usage if cached is None else usage | {"prompt_tokens_details": {"cached_tokens": cached}}
