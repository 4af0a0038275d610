"""From the whole answer to chunks, for chats and completions."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

PIECE = re.compile(r"\s*\S+|\s+$")
# Of a choice: what goes piece by piece, or in its first chunk. The rest goes into its last.
IN_PIECES = frozenset({"index", "message", "text", "logprobs"})
TEXTS = ("reasoning", "reasoning_content", "content", "refusal")
COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def replay(document: Mapping[str, Any], is_chat: bool) -> list[bytes]:
    """The answer as a stream would have brought it, event by event; the same document gives the same events. The last
    one tells usage, if the document does."""
    head = {name: value for name, value in document.items() if name not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    payloads = []
    for choice in document["choices"]:
        for part in chat_parts(choice) if is_chat else completion_parts(choice):
            payloads.append(orjson.dumps({**head, "choices": [{"index": choice["index"], **part}]}))
    if document.get("usage") is not None:
        payloads.append(orjson.dumps({**head, "choices": [], "usage": document["usage"]}))
    return payloads


def chat_parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    message = choice["message"]
    others = {
        name: value for name, value in message.items() if name not in (*TEXTS, "tool_calls") and value is not None
    }
    logprobs = choice.get("logprobs")
    yield chat_part({**others, "content": ""})
    for name in TEXTS:
        text = message.get(name) or ""
        entries = (logprobs or {}).get(name) or []
        if entries and "".join(entry["token"] for entry in entries) == text:
            for entry in entries:
                yield chat_part({name: entry["token"]}, {name: [entry]})
            continue
        for number, piece in enumerate(PIECE.findall(text)):
            yield chat_part({name: piece}, {name: entries} if entries and number == 0 else None)
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield from tool_call_parts(index, call)
    yield {"delta": {}, **last(choice), "logprobs": None}


def chat_part(delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": None}


def tool_call_parts(index: int, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = next((name for name in ("function", "custom") if name in call), "function")
    content = "arguments" if kind == "function" else "input"
    body = call.get(kind) or {}
    begun = {**call, "index": index, kind: {**body, content: ""}}
    yield chat_part({"tool_calls": [begun]})
    for piece in PIECE.findall(body.get(content) or ""):
        yield chat_part({"tool_calls": [{"index": index, kind: {content: piece}}]})


def completion_parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text, logprobs = choice.get("text") or "", choice.get("logprobs")
    tokens = (logprobs or {}).get("tokens") or []
    if tokens and "".join(tokens) == text:
        for place, token in enumerate(tokens):
            yield {"text": token, "logprobs": entry_at(logprobs or {}, place), "finish_reason": None}
    else:
        for number, piece in enumerate(PIECE.findall(text)):
            yield {"text": piece, "logprobs": logprobs if number == 0 else None, "finish_reason": None}
    yield {"text": "", "logprobs": None, **last(choice)}


def entry_at(logprobs: Mapping[str, Any], place: int) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for name, values in logprobs.items():
        is_list = name in COMPLETION_LISTS and isinstance(values, list) and place < len(values)
        entry[name] = [values[place]] if is_list else values if place == 0 else None
    return entry


def last(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in choice.items() if name not in IN_PIECES}
