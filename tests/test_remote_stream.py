"""Events that differ in their text alone are read without decoding them whole, and never otherwise than whole."""

import itertools
import json
from typing import Any

import orjson
import pytest

from app.engines.remote_stream import Events, Pattern, pattern_of
from cache.assembly import Assembly
from routing.engine import Call, Event, Tally

TEXTS = ["", " a", "?", '"', '\\"', "\\", "é", "\u2028", "😀", "\n\t\x00\x7f", '","role":"user', "data: [DONE]", "}]}"]
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "there"}


def chunk(delta: Any, **more: Any) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}]}


def text_chunk(text: Any, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return {**HEAD, "object": "text_completion", "choices": [{**choice, **more}]}


def pattern(document: dict[str, Any]) -> Pattern | None:
    named = json.loads(json.dumps(document))
    named["model"] = "here"
    return pattern_of(orjson.dumps(document), named, document["model"])


def read(documents: list[dict[str, Any]], is_chat: bool = True) -> tuple[list[Event], dict[str, Any]]:
    taken: list[Event] = []
    operation = "chat.completions" if is_chat else "completions"
    call = Call(operation, "here", {"model": "here"}, "1", Tally())
    events = Events(call, taken.extend)
    for document in documents:
        assert events.read(b"data: " + orjson.dumps(document) + b"\n\n")
    assembly = Assembly(is_chat)
    for event in taken:
        if event.text is None:
            assembly.add(event.data)
        else:
            assembly.add_text(event.text)
    return taken, assembly.document()


@pytest.mark.parametrize("key", ["content", "reasoning_content", "refusal"])
@pytest.mark.parametrize("role", [{}, {"role": "assistant"}, {"role": None, "tool_calls": None}])
def test_texts_are_read_by_the_pattern_of_the_first(key: str, role: dict[str, Any]) -> None:
    documents = [chunk({**role, key: text}, token_ids=None) for text in TEXTS]
    taken, document = read(documents)
    assert [event.text for event in taken] == [None, *TEXTS[1:]]
    assert [orjson.loads(event.data) for event in taken] == [{**sent, "model": "here"} for sent in documents]
    assert document["choices"][0]["message"][key] == "".join(TEXTS)
    assert document["model"] == "here"


def test_completions_are_read_likewise() -> None:
    documents = [text_chunk(text) for text in TEXTS]
    taken, document = read(documents, is_chat=False)
    assert [event.text for event in taken] == [None, *TEXTS[1:]]
    assert document["choices"][0]["text"] == "".join(TEXTS)


@pytest.mark.parametrize(
    "other",
    [
        chunk({"content": " b"}, finish_reason="stop"),
        chunk({"content": " b"}, logprobs={"content": [{"token": "b"}]}),
        chunk({"content": " b"}, token_ids=[1]),
        chunk({"content": " b", "role": "assistant"}),
        chunk({"content": " b", "reasoning_content": "c"}),
        chunk({"content": None}),
        chunk({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}]}),
        {**chunk({"content": " b"}), "created": 2},
        {**chunk({}), "choices": []},
        {**chunk({"content": " b"}), "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {**chunk({"content": " b"}), "choices": [{**chunk({"content": " b"})["choices"][0], "index": 1}]},
    ],
)
def test_what_is_different_is_decoded_and_says_the_same(other: dict[str, Any]) -> None:
    documents = [chunk({"content": " a"}), chunk({"content": " a"}), other, chunk({"content": " a"}), other]
    taken, document = read(documents)
    assert [event.text for event in taken][:3] == [None, " a", None]
    assembly = Assembly(is_chat=True)
    for sent in documents:
        assembly.add_chunk({**sent, "model": "here"})
    assert document == assembly.document()


@pytest.mark.parametrize(
    "document",
    [
        chunk({"content": 1}),
        chunk({"role": "assistant"}),
        chunk({"content": "a", "name": "b"}),
        {**HEAD, "choices": [{"index": 0, "text": "a", "delta": None}]},
        chunk({"content": "a"}, stop_reason="b"),
        chunk([]),
        {**chunk({"content": "a"}), "choices": [*chunk({"content": "a"})["choices"]] * 2},
        {**chunk({"content": "a"}), "choices": []},
        {key: value for key, value in chunk({"content": "a"}).items() if key != "model"} | {"model": None},
    ],
)
def test_what_says_more_has_no_pattern(document: dict[str, Any]) -> None:
    if document["model"] is not None:
        assert pattern(document) is None
    else:
        assert pattern_of(orjson.dumps(document | {"model": 1}), document | {"model": "here"}, None) is None


def test_place_of_the_text_is_the_right_one() -> None:
    decoy = {"content": "a", "model": "there"}
    for first, last in itertools.product([{}, {"x": decoy}], [{}, {"y": decoy}]):
        document = {**first, **chunk({"content": "a"}), **last}
        data = orjson.dumps({**document, "choices": [{**document["choices"][0], "delta": {"content": "b"}}]})
        made = pattern(document)
        event = None if made is None else made.match(data)
        if event is not None:
            assert orjson.loads(event.data) == {**orjson.loads(data), "model": "here"}
        assert (made is None) == bool(first)


@pytest.mark.parametrize("literal", [b"", b'"', b"1", b"null", b'"a","role":"b"', b'"\xff"', b'"\\ud800"', b'"a" "b"'])
def test_what_is_not_one_text_does_not_match(literal: bytes) -> None:
    made = pattern(chunk({"content": "a"}))
    assert made is not None
    data = orjson.dumps(chunk({"content": "TEXT"})).replace(b'"TEXT"', literal)
    assert made.match(data) is None
    assert made.match(b"") is None


def test_stream_of_many_patterns_is_decoded() -> None:
    documents = [{**chunk({"content": "a"}), "obfuscation": "x" * number} for number in range(20)]
    taken, document = read(documents)
    assert [event.text for event in taken] == [None] * 20
    assert document["choices"][0]["message"]["content"] == "a" * 20
