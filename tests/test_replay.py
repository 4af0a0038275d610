"""Chunks into a whole answer, a whole answer into chunks, and the rest of a stream that began before."""

from typing import Any

import orjson
import pytest

from cache.assembly import Assembly, is_whole
from cache.continuation import Continuation
from cache.errors import Diverged
from cache.replay import replay

HEAD = {"id": "chatcmpl-1", "created": 1, "model": "demo"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def chunk(*choices: dict[str, Any], **more: Any) -> bytes:
    return orjson.dumps({**HEAD, "object": "chat.completion.chunk", "choices": list(choices), **more})


def delta(index: int = 0, finish: str | None = None, logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish}


def call(index: int = 0, arguments: str = "", **more: Any) -> dict[str, Any]:
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"index": index, **more, "function": {**name, "arguments": arguments}}


def token(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}


USAGE_CHUNK = chunk(usage=USAGE)
STREAMS = {
    "text": [
        chunk(delta(role="assistant", content="")),
        *(chunk(delta(content=piece)) for piece in ("One", " two", "\n\n", " three ")),
        chunk(delta(finish="stop", content="")),
        USAGE_CHUNK,
    ],
    "several choices": [
        chunk(delta(0, role="assistant", content=""), delta(1, role="assistant", content="")),
        chunk(delta(1, content="Yes")),
        chunk(delta(0, content="No")),
        chunk(delta(1, content="!"), delta(0, finish="length", content=".")),
        chunk(delta(1, finish="stop", stop_reason="x")),
        USAGE_CHUNK,
    ],
    "tools": [
        chunk(delta(role="assistant", content="")),
        chunk(delta(tool_calls=[call(0, "", id="call_1", type="function", name="f")])),
        chunk(delta(tool_calls=[call(0, '{"a": ')])),
        chunk(delta(tool_calls=[call(0, '"b c"}'), call(1, "", id="call_2", type="function", name="g")])),
        chunk(delta(tool_calls=[call(1, "{}")])),
        chunk(delta(finish="tool_calls")),
        USAGE_CHUNK,
    ],
    "logprobs": [
        chunk(delta(role="assistant", content=""), prompt_token_ids=None),
        chunk(delta(content="One", logprobs={"content": [token("One")]})),
        chunk(delta(content=" two", logprobs={"content": [token(" two")]})),
        chunk(delta(finish="stop", content="", logprobs=None)),
        USAGE_CHUNK,
    ],
    "reasoning": [
        chunk(delta(role="assistant", content="")),
        chunk(delta(reasoning_content="Let me")),
        chunk(delta(reasoning_content=" think.")),
        chunk(delta(content="Yes.")),
        chunk(delta(finish="stop")),
        USAGE_CHUNK,
    ],
}
TEXT = [
    orjson.dumps({**HEAD, "object": "text_completion", "choices": [choice]})
    for choice in (
        {"index": 0, "text": "One", "logprobs": None, "finish_reason": None},
        {"index": 1, "text": "Two", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": " more", "logprobs": None, "finish_reason": "length", "stop_reason": None},
        {"index": 1, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None},
    )
] + [orjson.dumps({**HEAD, "object": "text_completion", "choices": [], "usage": USAGE})]
ALL = [*((stream, True) for stream in STREAMS.values()), (TEXT, False)]


def whole(payloads: list[bytes], is_chat: bool = True) -> dict[str, Any]:
    assembly = Assembly(is_chat)
    for payload in payloads:
        assembly.add(payload)
    return assembly.document()


def without_nulls(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in choice.items() if value is not None} for choice in choices]


def test_chunks_make_the_whole_answer() -> None:
    assert whole(STREAMS["text"]) == {
        **HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "One two\n\n three ", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }
    choices = whole(STREAMS["several choices"])["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["No.", "Yes!"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop"]
    message = whole(STREAMS["tools"])["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b c"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert whole(STREAMS["logprobs"])["choices"][0]["logprobs"] == {"content": [token("One"), token(" two")]}
    assert whole(STREAMS["reasoning"])["choices"][0]["message"]["reasoning_content"] == "Let me think."
    assert [choice["text"] for choice in whole(TEXT, False)["choices"]] == ["One more", "Two"]


@pytest.mark.parametrize(("stream", "is_chat"), ALL)
def test_replayed_answer_is_the_same_answer(stream: list[bytes], is_chat: bool) -> None:
    document = whole(stream, is_chat)
    payloads = replay(document, is_chat)
    assert whole(payloads, is_chat) == document
    assert payloads == replay(document, is_chat)
    assert orjson.loads(payloads[-1])["usage"] == USAGE
    chunks = [orjson.loads(payload) for payload in payloads]
    assert {part["object"] for part in chunks} == {"chat.completion.chunk" if is_chat else "text_completion"}
    assert all("usage" not in part for part in chunks[:-1])
    assert len(payloads) >= len(stream) - 1  # piece by piece


@pytest.mark.parametrize(("stream", "is_chat"), ALL)
def test_stream_goes_on_where_it_stopped(stream: list[bytes], is_chat: bool) -> None:
    document = whole(stream, is_chat)
    again = replay({**document, "id": "chatcmpl-2", "created": 2}, is_chat)  # cut into other chunks, with other ids
    for delivered in range(len(stream)):
        beyond = Continuation(stream[:delivered])
        rest = [payload for payload in map(beyond.next, again) if payload is not None]
        joined = whole([*stream[:delivered], *rest], is_chat)
        assert without_nulls(joined["choices"]) == without_nulls(document["choices"])
        assert joined["usage"] == USAGE
        assert delivered == 0 or {orjson.loads(payload)["id"] for payload in rest} <= {"chatcmpl-1"}


def test_other_answer_is_not_taken_for_the_same() -> None:
    beyond = Continuation(STREAMS["text"][:3])
    assert beyond.next(chunk(delta(role="assistant", content=""))) is None
    assert beyond.next(chunk(delta(content="One"))) is None
    with pytest.raises(Diverged):
        beyond.next(chunk(delta(content=" three")))


def test_what_is_no_chunk_is_refused() -> None:
    for rubbish in (b"{", b"[]", b'{"choices": [{}]}', b'{"choices": [{"index": "x", "delta": {}}]}', TEXT[0]):
        with pytest.raises(ValueError, match=r"chunk|JSON|index|unexpected|expected|EOF"):
            Assembly(is_chat=True).add(rubbish)


def answer(finish: str | None, completion_tokens: int = 5, **message: Any) -> dict[str, Any]:
    usage = {"completion_tokens": completion_tokens}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


def tool(arguments: str) -> list[dict[str, Any]]:
    return [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]


@pytest.mark.parametrize(
    ("document", "max_tokens", "expected"),
    [
        (answer("stop"), None, True),
        (answer("length"), 5, True),
        (answer("length"), None, False),  # the model's context ended it
        (answer("length"), 50, False),
        (answer("tool_calls", tool_calls=tool("{}")), None, True),
        (answer("tool_calls", tool_calls=tool('{"a": ')), None, False),
        (answer("tool_calls", tool_calls=tool("3")), None, False),
        (answer("stop", tool_calls=tool("")), None, False),
        (answer("tool_calls"), None, False),
        (answer("content_filter"), None, False),
        (answer("abort"), None, False),
        (answer(None), None, False),
        ({"choices": []}, None, False),
        ({}, None, False),
    ],
)
def test_only_whole_answers_are_worth_storing(document: dict[str, Any], max_tokens: int | None, expected: bool) -> None:
    assert is_whole(document, max_tokens) is expected
