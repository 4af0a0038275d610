"""The official OpenAI package against the gateway and a real engine."""

import contextlib
import itertools
import json
import select
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from ..tokens import bearer
from .conftest import MODEL, QUESTION, Process, wait_for

PARIS = "The capital of France is Paris."
LONG = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == 37
    assert answer.usage.completion_tokens == 8


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One, two, three,", "A, B, C,"], max_tokens=4, temperature=0
    )
    assert len(answer.choices) == 2
    assert "four" in answer.choices[0].text
    assert "D" in answer.choices[1].text


def test_streams_of_chat_and_completion_tell_the_same_as_the_whole(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    assert chunks[-1].usage.completion_tokens == 8
    assert len(chunks) >= 8
    stream = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=4, temperature=0, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert len(pieces) == 4
    assert "four" in "".join(pieces)


def test_frames_are_the_engines_own_one_event_each(gateway: Process) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "stream": True}
    text = gateway.http.post("/v1/chat/completions", json=body, headers={"cache-control": "no-store"}).text
    frames = text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    payloads = [frame.partition("\ndata: ")[2] for frame in frames[:-1]]
    # vLLM writes its chunks without spaces, and its first one with the prompt's fields.
    assert all(
        json.dumps(json.loads(payload), separators=(",", ":"), ensure_ascii=False) == payload for payload in payloads
    )
    assert "prompt_token_ids" in payloads[0]
    assert not any('"usage"' in payload for payload in payloads)


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3, max_tokens=3
    )
    tokens = answer.choices[0].logprobs.content
    assert [token.token for token in tokens] == ["The", " capital", " of"]
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)


def test_several_choices_stop_and_seed(client: OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, seed=7, temperature=1, stop=["."], max_tokens=30
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(first) == 3
    assert not any("." in text for text in first)
    assert ask() == first


def test_tool_call_guided_by_its_schema(client: OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
    choice = {"type": "function", "function": {"name": "get_weather"}}
    options = {"model": MODEL, "messages": QUESTION, "tools": [tool], "tool_choice": choice, "temperature": 0}
    call = client.chat.completions.create(**options, max_tokens=100).choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")
    deltas = [
        piece.function.arguments or ""
        for chunk in client.chat.completions.create(**options, max_tokens=100, stream=True)
        for piece in (chunk.choices[0].delta.tool_calls or [])
    ]
    assert json.loads("".join(deltas)) == arguments


def test_answer_in_a_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
        "required": ["capital", "population"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )
    document = json.loads(answer.choices[0].message.content)
    assert isinstance(document["capital"], str)
    assert isinstance(document["population"], int)


def test_vllms_own_parameters(client: OpenAI) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "top_k": 1, "repetition_penalty": 1.0}
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, extra_body=extra)
    assert answer.choices[0].message.content.startswith(" Paris")


def test_two_streams_at_once_take_turns(client: OpenAI) -> None:
    order = []

    def read(name: str) -> None:
        stream = client.completions.create(
            model=MODEL, prompt=f"{name}:", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in stream:
            order.append(name)

    threads = [threading.Thread(target=read, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(order) == ["a"] * 40 + ["b"] * 40
    turns = sum(before != after for before, after in itertools.pairwise(order))
    assert turns > 20


def test_two_engines_in_one_process_and_an_alias(client: OpenAI, gateway: Process) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias", "second"]
    assert client.models.retrieve("second").owned_by == "headrace"
    for name in ("alias", "second"):
        answer = client.chat.completions.create(model=name, messages=QUESTION, temperature=0)
        assert (answer.model, answer.choices[0].message.content) == (name, PARIS)
        stream = client.chat.completions.create(model=name, messages=QUESTION, temperature=0, stream=True)
        assert {chunk.model for chunk in stream} == {name}
    with client.completions.create(model="second", prompt="x", stream=True, max_tokens=400) as stream:
        next(iter(stream))
        wait_for(lambda: gateway.running("other") == 1, 10, "the second engine reports its load")
        assert gateway.running("local") == 0
    wait_for(lambda: gateway.running("other") == 0, 3, "the second engine was told to stop")
    components = gateway.http.get("/health").json()["components"]
    assert {name: part["status"] for name, part in components.items()} == {
        "engine:local": "ok",
        "engine:other": "ok",
        "config": "ok",
    }


@pytest.mark.parametrize("n", [1, 3])
def test_abandoned_stream_is_aborted_in_the_engine(client: OpenAI, gateway: Process, n: int) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, n=n, **LONG)
    next(iter(stream))
    wait_for(lambda: gateway.running() == n, 10, "it runs")
    stream.close()
    wait_for(lambda: gateway.running() == 0, 3, "it is aborted")


@contextlib.contextmanager
def leaving(gateway: Process, path: str, body: dict) -> Iterator[socket.socket]:
    """Ask, and leave at the end without having read anything."""
    with socket.create_connection(("127.0.0.1", httpx.URL(gateway.url).port)) as connection:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.token}\r\n"
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        yield connection
        assert not select.select([connection], [], [], 0)[0], "there is an answer already"


@pytest.mark.parametrize(
    ("path", "input"),
    [
        ("/v1/chat/completions", {"messages": QUESTION}),
        ("/v1/chat/completions", {"messages": QUESTION, "n": 3}),
        ("/v1/completions", {"prompt": ["One", "Two"], "n": 2}),
    ],
)
def test_abandoned_whole_request_is_aborted_in_the_engine(gateway: Process, path: str, input: dict) -> None:
    body = {"model": MODEL, "max_tokens": 4000, "ignore_eos": True, **input}
    count = body.get("n", 1) * (len(input["prompt"]) if "prompt" in input else 1)
    with leaving(gateway, path, body):
        wait_for(lambda: gateway.running() == count, 10, "it runs")
    wait_for(lambda: gateway.running() == 0, 3, "it is aborted")


def test_caller_who_leaves_before_the_first_token_is_noticed(gateway: Process) -> None:
    # The second engine reads 32 tokens a step, so that this prompt alone takes it seconds.
    body = {"model": "second", "prompt": ["word " * 480 + str(n) for n in range(8)], "max_tokens": 20, "stream": True}
    started = time.monotonic()
    assert gateway.http.post("/v1/completions", json=body).status_code == 200
    whole_s = time.monotonic() - started
    body["prompt"] = [f"{n} {prompt}" for n, prompt in enumerate(body["prompt"])]  # not in the prefix cache
    with leaving(gateway, "/v1/completions", body):
        wait_for(lambda: gateway.running("other") > 0, 10, "it runs")
    took_s = wait_for(lambda: gateway.running("other") == 0, 3, "it is aborted")
    assert took_s < whole_s


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context_length_exceeded", None),
        ({"messages": QUESTION, "max_tokens": -1}, "invalid_request", "max_tokens"),
        ({"messages": QUESTION, "max_tokens": 99999}, "invalid_request", "max_tokens"),
        ({"messages": QUESTION, "n": 16384}, "invalid_request", "n"),
        ({"messages": QUESTION, "temperature": -1}, "invalid_request", "temperature"),
        ({"messages": QUESTION, "temperature": "hot"}, "invalid_request", "temperature"),
        ({"messages": QUESTION, "logprobs": True, "top_logprobs": 9999}, "invalid_request", "logprobs"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "invalid_request", None),
        ({"messages": ["hi"]}, "invalid_request", None),
        ({"messages": QUESTION, "stop": 5}, "invalid_request", None),
        ({"messages": QUESTION, "logit_bias": {"x": 1}}, "invalid_request", None),
        ({"messages": QUESTION, "tools": [{}]}, "invalid_request", None),
        ({"messages": QUESTION, "structured_outputs": 1}, "invalid_request", None),
        ({"messages": QUESTION, "response_format": {"type": "x"}}, "invalid_request", None),
        (
            {
                "messages": QUESTION,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}},
            },
            "invalid_request",
            None,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_gets_400_before_the_first_byte(gateway: Process, body: dict, code: str, param, stream: bool) -> None:
    body = {"model": MODEL, "stream": stream, "max_tokens": 5, **body}
    response = gateway.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == code
    if param:
        assert error["param"] == param


def test_prompts_in_all_their_forms(gateway: Process) -> None:
    for prompt, choices in (("x", 1), ([1, 2, 3], 1), ([[1, 2], [3]], 2), (["x", "y"], 2)):
        response = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
        assert (response.status_code, len(response.json()["choices"])) == (200, choices)
    for prompt in ([], [[]], 7, [999999999], [-5], {"a": 1}, ["x", 3], ""):
        response = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
        assert response.status_code == 400, (prompt, response.text)
    nulls = {"stream": None, "logprobs": None, "n": None, "max_tokens": None, "suffix": None}
    response = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", **nulls})
    assert (response.status_code, response.json()["usage"]["completion_tokens"] <= 16) == (200, True)


def test_unknown_model_is_the_packages_own_error(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=QUESTION)
    assert caught.value.code == "model_not_found"


def test_prefix_cache_tells_cached_tokens(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 20}]
    details = [
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage.prompt_tokens_details
        for _ in range(2)
    ]
    assert details[1].cached_tokens > 100 > details[0].cached_tokens


def test_log_at_debug_level_never_holds_prompts_or_answers(gateway: Process) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": "canary-prompt"}]},
        {"messages": [{"role": "user", "content": "canary-prompt " * 9000}]},
        {"messages": [{"role": "user", "content": {"canary-prompt": 1}}]},
        {"messages": QUESTION, "stop": {"canary-prompt": 1}},
        {"messages": QUESTION, "response_format": {"type": "canary-prompt"}},
        {"messages": QUESTION, "chat_template": "{{ canary-prompt"},
        {"messages": QUESTION, "canary-prompt": "canary-prompt"},
    ]
    for body in bodies:
        for stream in (False, True):
            gateway.http.post("/v1/chat/completions", json={"model": MODEL, "max_tokens": 2, "stream": stream, **body})
    time.sleep(0.5)
    log = gateway.log.read_text()
    assert "request_id=" in log
    assert "canary-prompt" not in log
    assert "capital of France?" not in log.replace(
        '"content": "What is the capital of France?"', ""
    )  # the printed example


def test_what_a_caller_leaves_is_charged_for_what_the_engine_did(gateway: Process, client: OpenAI) -> None:
    def charged(before: tuple[float, float]) -> tuple[float, float]:
        wait_for(lambda: gateway.running() == 0 and gateway.tokens() != before, 5, "charged")
        after = gateway.tokens()
        return after[0] - before[0], after[1] - before[1]

    prompt = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "extra_body": {"ignore_eos": True}}
    before = gateway.tokens()
    whole = client.completions.create(**prompt, max_tokens=30)
    assert charged(before) == (whole.usage.prompt_tokens, 30)
    # Streams that are left after some tokens: of one choice, of three, and of two prompts.
    for more, prompts, choices in (
        ({}, 1, 1),
        ({"n": 3, "temperature": 1}, 1, 3),
        ({"prompt": ["Once upon a time"] * 2}, 2, 2),
    ):
        before = gateway.tokens()
        with client.completions.create(**{**prompt, **more}, max_tokens=400, stream=True) as stream:
            read = [chunk for chunk, _ in zip(stream, range(20 * choices), strict=False)]
        prompt_tokens, completion_tokens = charged(before)
        assert prompt_tokens == prompts * whole.usage.prompt_tokens, more
        assert len(read) <= completion_tokens < 400 * choices, more
    # Left before its first token: the prompt was worked on.
    before = gateway.tokens()
    body = {"model": MODEL, "prompt": "word " * 1500, "max_tokens": 300, "stream": True}
    with httpx.Client(base_url=gateway.url, headers=bearer(gateway.token)) as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post("/v1/completions", json=body, timeout=0.05)
    prompt_tokens, completion_tokens = charged(before)
    assert prompt_tokens >= 1500
