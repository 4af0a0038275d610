"""The events of a server's stream, read for one call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from routing.engine import Call, Event, Take, Tally, Usage
from routing.errors import EngineError

from .event_parser import EventParser
from .remote_errors import refusal_in

HEAD = ("id", "object", "created", "model")
# In one stream: where so many were not enough, another one would not help either.
MOST_PATTERNS = 4
TEXTS = ("content", "refusal", "reasoning", "reasoning_content", "text")
EMPTY: Any = {}

# As Event itself, without a call into Python: there is one for each token of each stream.
_event: Callable[[tuple[bytes, None, None, None, str]], Event] = partial(tuple.__new__, Event)


class Pattern:
    """What an event has besides its text. Most events of a stream differ in nothing else from the one before, and need
    not be decoded whole.

    An event that begins with `head`, ends with `tail`, and is one JSON string between them can be read in no other way
    than as the event that the pattern was made of, with another text. `sent_head` is what the caller gets for `head`.
    """

    __slots__ = ("_head", "_head_bytes", "_sent_head", "_tail", "_tail_bytes")

    def __init__(self, head: bytes, sent_head: bytes, tail: bytes) -> None:
        self._head, self._sent_head, self._tail = head, sent_head, tail
        self._head_bytes, self._tail_bytes = len(head), len(tail)

    def match(self, data: bytes) -> Event | None:
        if not (data.startswith(self._head) and data.endswith(self._tail)):
            return None
        literal = data[self._head_bytes : len(data) - self._tail_bytes]
        try:
            text = orjson.loads(literal)
        except orjson.JSONDecodeError:
            return None
        if type(text) is not str:
            return None
        sent = data if self._sent_head == self._head else self._sent_head + literal + self._tail
        return _event((sent, None, None, None, text))


def pattern_of(data: bytes, document: dict[str, Any], name_there: Any) -> Pattern | None:
    """The pattern of an event with a text of one choice, and nothing else that adds to an answer. `document` is what
    `data` decodes to, but with the caller's name for the model in place of `name_there`."""
    name = name_of_text(document)
    if name is None or b"\n" in data:
        return None
    text = text_fields(document)[name]
    field, literal = b'"%b":' % name.encode(), orjson.dumps(text)
    head, found, tail = data.partition(field + literal)
    if not found:
        return None
    head += field
    model = b'"model":%b'
    there, here = model % orjson.dumps(name_there), model % orjson.dumps(document["model"])
    sent_head = head.replace(there, here, 1)
    # Whether that is the place of the text and of the model is not seen, but tried out.
    try:
        other = orjson.loads(sent_head + orjson.dumps(text + "?") + tail)
    except orjson.JSONDecodeError:
        return None
    text_fields(document)[name] = text + "?"
    is_right = other == document
    text_fields(document)[name] = text
    return Pattern(head, sent_head, tail) if is_right else None


def text_fields(document: dict[str, Any]) -> dict[str, Any]:
    """The part that the text is in: of a chat's chunk the delta."""
    choice = document["choices"][0]
    fields = choice.get("delta", choice)
    return fields if type(fields) is dict else EMPTY


def name_of_text(document: dict[str, Any]) -> str | None:
    """The name of the one text field, if there is one, and all else says nothing."""
    if len(document["choices"]) != 1:
        return None
    choice, fields = document["choices"][0], text_fields(document)
    said = {**choice, **fields}  # of a chunk without delta these are one
    names = [name for name, value in said.items() if value is not None and name not in ("index", "delta", "role")]
    return names[0] if len(names) == 1 and names[0] in TEXTS and type(fields.get(names[0])) is str else None


class Events:
    """Reads a stream's bytes for one call, and gives its events to `take`."""

    def __init__(self, call: Call, take: Take) -> None:
        self._call = call
        self._take = take
        self._parser = EventParser()
        self._pattern: Pattern | None = None  # of the last event that was decoded
        self._patterns = 0
        self._finished = 0  # choices, by their own word
        self._is_done = False
        self._head: dict[str, Any] = {}
        self._usage: Usage | None = None
        self._is_usage_told = False

    def read(self, part: bytes) -> bool:
        """Whether there is more to come. Raises: EngineError, and what the server tells in an error event."""
        events: list[Event] = []
        try:
            for data, name in self._parser.feed(part):
                if self._pattern is not None and name is None and (event := self._pattern.match(data)) is not None:
                    self._call.tally.completion_tokens += 1
                    events.append(event)
                elif data == b"[DONE]":
                    self._is_done = True
                    return False
                elif data:
                    events.append(self._event(data, name))
        finally:
            if events:
                self._take(events)
        return True

    def end(self) -> None:
        """Raises: EngineError, unless the answer is whole."""
        if not (self._is_done or self.is_finished):
            raise EngineError("The engine ended the stream early.")
        if (last := self._usage_event()) is not None:
            self._take([last])

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
        self._pattern = None
        original = data
        name_there, document["model"] = document.get("model"), self._call.model
        if name_there != self._call.model or b"\n" in data:  # an event that came on several lines leaves on one
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
            if self._patterns < MOST_PATTERNS and name is None and usage is None:
                self._patterns += 1
                self._pattern = pattern_of(original, document, name_there)
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
