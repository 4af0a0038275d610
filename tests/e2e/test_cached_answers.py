"""Cached, replayed, and collapsed answers of a real engine, through the official OpenAI package."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from .conftest import MODEL, Process

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]},
    },
}
CHOICE = {"type": "function", "function": {"name": "weather"}}


def ask_about(subject: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me about {subject}."}]


QUESTIONS: dict[str, dict[str, Any]] = {
    "text": {"messages": ask_about("rivers"), "temperature": 0, "max_tokens": 12},
    "logprobs": {
        "messages": ask_about("mills"),
        "temperature": 0,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "several choices": {"messages": ask_about("dams"), "temperature": 1, "seed": 5, "n": 2, "max_tokens": 8},
    "tools": {
        "messages": ask_about("Paris"),
        "temperature": 0,
        "tools": [TOOL],
        "tool_choice": CHOICE,
        "max_tokens": 60,
    },
}


def joined(chunks: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Of each choice: its text, its tool calls, its tokens' log probabilities, why it ended."""
    choices: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, calls, tokens, _ = choices.setdefault(choice.index, ["", {}, [], None])
            for call in choice.delta.tool_calls or ():
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = (name or call.function.name, arguments + (call.function.arguments or ""))
            tokens += [token.token for token in (choice.logprobs.content or ())] if choice.logprobs else []
            choices[choice.index] = [text + (choice.delta.content or ""), calls, tokens, choice.finish_reason]
    return [(text, list(calls.values()), tokens, end) for _, (text, calls, tokens, end) in sorted(choices.items())]


def whole(answer: Any) -> list[tuple[Any, ...]]:
    return [
        (
            choice.message.content or "",
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
            [token.token for token in choice.logprobs.content] if choice.logprobs else [],
            choice.finish_reason,
        )
        for choice in answer.choices
    ]


@pytest.mark.parametrize("streams_first", [False, True])
@pytest.mark.parametrize("name", QUESTIONS)
def test_what_the_engine_said_comes_back_whole_or_streamed(client: OpenAI, name: str, streams_first: bool) -> None:
    question = {"model": MODEL, **QUESTIONS[name], "user": "u", "stop": f"#{streams_first}"}  # two keys

    def as_whole() -> tuple[str, Any, Any]:
        response = client.chat.completions.with_raw_response.create(**question)
        answer = response.parse()
        return response.headers["cache-status"], whole(answer), answer.usage

    def as_stream() -> tuple[str, Any, Any]:
        response = client.chat.completions.with_raw_response.create(
            **question, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(response.parse())
        return response.headers["cache-status"], joined(chunks), chunks[-1].usage

    order: list[Callable[[], Any]] = [as_stream, as_whole] if streams_first else [as_whole, as_stream]
    first, second, third = order[0](), order[1](), order[0]()
    assert "fwd=miss" in first[0]
    assert "hit" in second[0]
    assert "hit" in third[0]
    assert first[1:] == second[1:] == third[1:]
    assert first[2].completion_tokens > 0


def test_identical_questions_at_once_are_one_engine_call(gateway: Process) -> None:
    body = {"model": MODEL, "messages": ask_about("turbines"), "temperature": 0, "max_tokens": 20}
    before = gateway.metric("headrace_flights_total")

    def ask(number: int) -> tuple[str, str]:
        with gateway.openai() as client:
            if number % 2:
                return client.chat.completions.create(**body).choices[0].message.content, "whole"
            stream = client.chat.completions.create(**body, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices), "stream"

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    assert len({text for text, _ in answers}) == 1
    assert gateway.metric("headrace_flights_total") - before == 1
    # Two engines start at once there, and vLLM's suppression of logging must not outlive that.
    assert "cache=miss" in gateway.log.read_text()


def test_hit_is_many_times_faster_than_a_miss(gateway: Process) -> None:
    body = {"model": MODEL, "messages": ask_about("water wheels"), "temperature": 0, "max_tokens": 30}
    started = time.monotonic()
    gateway.http.post("/v1/chat/completions", json=body)
    miss_s = time.monotonic() - started
    started = time.monotonic()
    assert "hit" in gateway.http.post("/v1/chat/completions", json=body).headers["cache-status"]
    assert time.monotonic() - started < miss_s  # by how much is in docs/performance.md


def test_settings_of_the_engine_are_part_of_the_key(gateway: Process) -> None:
    """The same weights with another context length: another revision."""
    body = {"messages": ask_about("sluices"), "temperature": 0, "max_tokens": 4}
    told = [
        gateway.http.post("/v1/chat/completions", json={**body, "model": model}).headers["cache-status"]
        for model in (MODEL, "second", "alias", MODEL, "second", "alias")
    ]
    assert ["hit" in status for status in told] == [False] * 3 + [True] * 3
