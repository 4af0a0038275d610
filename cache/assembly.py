"""A streamed answer put together: the document that the same request without `stream` would have got.

Two operations stream: chat completions, whose chunks carry deltas of a message, and completions, whose chunks carry
text. What is not known here is kept: text of a delta is concatenated, of anything else the last value counts.
"""

from typing import Any

import orjson

# Lists that come in parts, as each choice's field.
PARTIAL_LISTS = frozenset({"token_ids"})
# Said once and the same in each chunk that says it: the first counts.
_HEAD = ("id", "created", "model")
# Padding of OpenAI's that hides lengths, different in each chunk.
_NOT_KEPT = frozenset({*_HEAD, "object", "choices", "usage", "obfuscation"})
_NOT_TEXT = frozenset({"role", "tool_calls", "function_call"})
_TEXT = frozenset({"content", "refusal", "reasoning", "reasoning_content"})


class Call:
    """A tool call in the making; also the `function_call` of old, which is but a function.

    Id, type, and name come whole, and engines that repeat them mean the same call: the first counts.
    """

    __slots__ = ("arguments", "fields", "function")

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.function: dict[str, Any] = {}
        self.arguments: list[str] = []

    def add(self, delta: dict[str, Any]) -> None:
        for key, value in delta.items():
            if key == "function":
                self.add_function(value or {})
            elif key != "index" and not self.fields.get(key):
                self.fields[key] = value

    def add_function(self, delta: dict[str, Any]) -> None:
        for key, value in delta.items():
            if key != "arguments":
                if not self.function.get(key):
                    self.function[key] = value
            elif isinstance(value, str):
                self.arguments.append(value)
            elif value is not None:
                raise ValueError("arguments are not text")

    def document(self) -> dict[str, Any]:
        if not self.function and not self.arguments:
            return self.fields.copy()
        named = {"id": self.fields.get("id"), "type": self.fields.get("type") or "function"}
        return named | {"function": self.function_document()} | {k: v for k, v in self.fields.items() if k not in named}

    def function_document(self) -> dict[str, Any]:
        return self.function | {"arguments": "".join(self.arguments)}


class Choice:
    """One choice in the making. `texts` are the pieces of each text field: of the delta, or just `text`."""

    __slots__ = ("_keys", "calls", "fields", "function_call", "logprobs", "others", "role", "texts")

    def __init__(self) -> None:
        self._keys: set[str] = set()  # of the last choice that was not like the one before
        self.role: str | None = None
        self.texts: dict[str, list[str]] = {}
        self.others: dict[str, Any] = {}  # of the delta
        self.calls: dict[int, Call] = {}
        self.function_call: Call | None = None
        self.logprobs: dict[str, Any] | None = None
        self.fields: dict[str, Any] = {}  # of the choice, `finish_reason` among them

    def add(self, choice: dict[str, Any]) -> None:
        if not self._adds_content_only(choice):
            self._keys = set(choice)
            self._add_all(choice)

    def _adds_content_only(self, choice: dict[str, Any]) -> bool:
        """Most chunks are like the one before, with some more content, and nothing said otherwise."""
        delta = choice.get("delta")
        if type(delta) is not dict or len(delta) != 1 or choice.keys() != self._keys:
            return False
        content, pieces = delta.get("content"), self.texts.get("content")
        if type(content) is not str or pieces is None or list(choice.values()).count(None) != len(choice) - 2:
            return False
        pieces.append(content)
        return True

    def _add_all(self, choice: dict[str, Any]) -> None:
        for key, value in choice.items():
            if key == "delta":
                self._add_delta(value)
            elif value is None:
                if key not in self.fields:
                    self.fields[key] = None
            elif key == "text":
                self._add_text(key, value)
            elif key == "logprobs":
                self.logprobs = self.logprobs or {}
                for name, part in value.items():
                    add_part(self.logprobs, name, part)
            elif key in PARTIAL_LISTS:
                add_part(self.fields, key, value)
            else:
                self.fields[key] = value

    def _add_delta(self, delta: dict[str, Any]) -> None:
        for key, value in delta.items():
            if type(value) is str and key not in _NOT_TEXT:
                pieces = self.texts.get(key)
                if pieces is None:
                    self.texts[key] = [value]
                else:
                    pieces.append(value)
            elif value is None:
                self.others.setdefault(key)
            elif key == "role":
                self.role = self.role or value
            elif key == "tool_calls":
                for call in value:
                    self._call(call["index"]).add(call)
            elif key == "function_call":
                self.function_call = self.function_call or Call()
                self.function_call.add_function(value)
            elif key in _TEXT:
                raise ValueError(f"{key} is not text")
            else:
                self.others[key] = value

    def _add_text(self, key: str, value: Any) -> None:
        if not isinstance(value, str):
            raise ValueError(f"{key} is not text")
        self.texts.setdefault(key, []).append(value)

    def _call(self, index: int) -> Call:
        if index not in self.calls:
            self.calls[whole(index)] = Call()
        return self.calls[index]

    def document(self, is_chat: bool) -> dict[str, Any]:
        body = {"message": self._message()} if is_chat else {"text": "".join(self.texts.get("text", ()))}
        fields = {key: copied(value) for key, value in self.fields.items()}
        logprobs = self.logprobs and {key: copied(value) for key, value in self.logprobs.items()}
        return {"index": None} | body | {"logprobs": None, "finish_reason": None} | fields | {"logprobs": logprobs}

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role or "assistant", "content": None, "refusal": None}
        message |= self.others
        message |= {key: "".join(pieces) for key, pieces in self.texts.items()}
        if self.calls:
            message["tool_calls"] = [call.document() for _, call in sorted(self.calls.items())]
        if self.function_call is not None:
            message["function_call"] = self.function_call.function_document()
        if self.calls or self.function_call is not None:
            # A stream begins with an empty content before it is known whether there will be any.
            message["content"] = message["content"] or None
        return message


class Assembly:
    """The chunks of one answer, put together. After an error it is of no use any more."""

    def __init__(self, is_chat: bool) -> None:
        self.is_chat = is_chat
        self.usage: dict[str, Any] | None = None
        self.head: dict[str, Any] = {}
        self.extras: dict[str, Any] = {}  # of the top level
        self.choices: dict[int, Choice] = {}
        self._last: dict[str, Any] | None = None  # the last chunk
        self._pieces: list[str] | None = None  # of its text
        self._body = "delta" if is_chat else "text"

    def add(self, payload: bytes | dict[str, Any]) -> None:
        """Take the payload of one event, or what it decodes to. Raises: ValueError when it is not a chunk of this
        operation."""
        chunk = payload if isinstance(payload, dict) else orjson.loads(payload)
        try:
            self.add_chunk(chunk)
        except (AttributeError, KeyError, TypeError) as exc:
            raise ValueError("not a chunk of a streamed answer") from exc

    def add_text(self, text: str) -> None:
        """Take a chunk that is the one before it with another text. Raises: ValueError, if that had not one text."""
        if self._pieces is None:
            self._pieces = self._pieces_of(self._last)
        self._pieces.append(text)

    def _pieces_of(self, chunk: dict[str, Any] | None) -> list[str]:
        choices = [] if chunk is None else chunk["choices"]
        fields = [choice.get("delta", choice) for choice in choices]
        told = fields[0].items() if len(fields) == 1 else ()
        names = [name for name, value in told if type(value) is str and name not in _NOT_TEXT]
        if len(names) != 1:
            raise ValueError("not a chunk of one text")
        return self.choices[choices[0]["index"]].texts[names[0]]

    def add_chunk(self, chunk: dict[str, Any]) -> None:
        self._last, self._pieces = chunk, None
        for choice in chunk["choices"]:
            index = choice["index"]
            if index not in self.choices:
                self.choices[whole(index)] = Choice()
            choice[self._body]  # a chunk of another operation has none
            self.choices[index].add(choice)
        if not chunk.keys() <= _NOT_KEPT:
            for key, value in chunk.items():
                if key not in _NOT_KEPT and (value is not None or key not in self.extras):
                    self.extras[key] = value
        if chunk.get("usage") is not None:
            self.usage = chunk["usage"]
        if not self.head:
            self.head = {key: chunk.get(key) for key in _HEAD}

    def document(self) -> dict[str, Any]:
        """The whole answer as far as it has come. What it holds of lists is its own."""
        head = self.head or dict.fromkeys(_HEAD)
        return {
            "id": head["id"],
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": head["created"],
            "model": head["model"],
            "choices": [
                choice.document(self.is_chat) | {"index": index} for index, choice in sorted(self.choices.items())
            ],
            "usage": self.usage,
        } | self.extras


def is_whole(document: dict[str, Any], max_tokens: int | None) -> bool:
    """Whether each choice ended by itself, or where the caller's own `max_tokens` ended it (None: there was none).

    Whatever else ends an answer (the model's context, a filter, an abort) may end another one elsewhere.
    """
    choices = document.get("choices") or []
    return len(choices) > 0 and all(_has_ended(choice, document, max_tokens) for choice in choices)


def _has_ended(choice: dict[str, Any], document: dict[str, Any], max_tokens: int | None) -> bool:
    message = choice.get("message") or {}
    calls = message.get("tool_calls") or []
    match choice.get("finish_reason"):
        case "length" if max_tokens is not None:
            completion_tokens = (document.get("usage") or {}).get("completion_tokens")
            return len(document["choices"]) > 1 or (completion_tokens is not None and completion_tokens >= max_tokens)
        case "stop":
            return all(_is_valid(call.get("function")) for call in calls)
        case "tool_calls":
            return len(calls) > 0 and all(_is_valid(call.get("function")) for call in calls)
        case "function_call":
            return _is_valid(message.get("function_call"))
    return False


def _is_valid(function: dict[str, Any] | None) -> bool:
    if not function or not function.get("name"):
        return False
    try:
        return isinstance(orjson.loads(function.get("arguments") or ""), dict)
    except orjson.JSONDecodeError:
        return False


def add_part(fields: dict[str, Any], key: str, part: Any) -> None:
    """Lists come in parts; of anything else the last value counts."""
    if isinstance(part, list) and isinstance(fields.get(key), list):
        fields[key].extend(part)
    elif part is not None or key not in fields:
        fields[key] = copied(part)


def copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list) else value


def whole(index: Any) -> int:
    if type(index) is not int:
        raise ValueError("an index is not a whole number")
    return index
