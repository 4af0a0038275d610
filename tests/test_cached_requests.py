"""The response cache, as callers see it."""

import asyncio
import json
import logging
import re
import time
from typing import Any

import httpx
import orjson
import pytest

from app.engines.scripted import Script, ScriptedEngine
from cache.assembly import Assembly
from cache.entry import Selection
from routing.engine import Answer, Call, Event, Take, Usage

from .conftest import CHAT, Client, events_of, serving, text_of, until
from .tokens import JWT_SETTINGS, bearer, token

ASK = {**CHAT, "temperature": 0}
COMPLETION = {"model": "demo", "prompt": "Say", "temperature": 0}
TEXT = "One two three four five."


def status_of(response: httpx.Response) -> str:
    return response.headers["cache-status"]


def is_hit(response: httpx.Response) -> bool:
    return re.fullmatch(r"headrace; hit; ttl=[0-9]+; detail=(memory|redis|disk)", status_of(response)) is not None


async def test_repeated_request_is_answered_from_the_cache(client: Client) -> None:
    first = await client.post(ASK)
    assert status_of(first) == "headrace; fwd=miss; stored"
    assert "age" not in first.headers
    second = await client.post(ASK)
    assert status_of(second) == "headrace; hit; ttl=3599; detail=memory"
    assert second.headers["age"] == "0"
    assert client.engine.calls == 1
    one, two = first.json(), second.json()
    assert one.pop("id") != two.pop("id")
    assert one == two
    assert two["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    ids = {(await client.post(ASK)).json()["id"] for _ in range(20)}
    assert len(ids) == 20
    assert all(re.fullmatch(r"chatcmpl-[0-9a-f]{32}", id) for id in ids)


async def test_same_request_in_another_form_is_the_same(client: Client) -> None:
    await client.post(ASK)
    body = {"user": "u", "n": 1, "temperature": 0.0, "stop": None, **dict(reversed(list(CHAT.items())))}
    assert is_hit(await client.post(body))
    assert not is_hit(await client.post({**ASK, "seed": 4}))


@pytest.mark.parametrize(("path", "body"), [("chat/completions", ASK), ("completions", COMPLETION)])
async def test_streams_and_whole_answers_share_entries(client: Client, path: str, body: dict[str, Any]) -> None:
    for first, name in (({"stream": True}, "a"), ({}, "b")):
        question = {**body, "user": name, "seed": ord(name)}
        streamed, whole = [], []
        for more in (first, {"stream": True}, {}):
            response = await client.post({**question, **more}, f"/v1/{path}")
            (streamed if more else whole).append(response)
        assert client.engine.calls == {"a": 1, "b": 2}[name]
        for response in streamed:
            assert response.headers["content-type"].startswith("text/event-stream")
            events = events_of(response.text)
            assert text_of(events) == TEXT
            assert events[-1] == "[DONE]"
            assert not any("usage" in event for event in events[:-1])
            assert events[-2]["choices"][0]["finish_reason"] == "stop"
            assert len({event["id"] for event in events[:-1]}) == 1
        assert len({events_of(response.text)[0]["id"] for response in streamed}) == len(streamed)
        for response in whole:
            choice = response.json()["choices"][0]
            assert (choice["message"]["content"] if path[0:4] == "chat" else choice["text"]) == TEXT


async def test_usage_event_of_a_stored_stream_comes_when_asked_for(client: Client) -> None:
    await client.post({**ASK, "stream": True})
    asked = await client.post({**ASK, "stream": True, "stream_options": {"include_usage": True}})
    assert is_hit(asked)
    assert events_of(asked.text)[-2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert events_of(asked.text)[-2]["choices"] == []


async def test_several_choices_are_replayed(client: Client) -> None:
    body = {**CHAT, "n": 3, "seed": 1}
    await client.post(body)
    events = events_of((await client.post({**body, "stream": True})).text)
    for index in range(3):
        own = [event for event in events[:-1] if event["choices"][0]["index"] == index]
        assert text_of(own) == TEXT
    assert client.engine.calls == 1


class FramesEngine(ScriptedEngine):
    """Streams these chunks, or gives them as one answer."""

    def __init__(self, *chunks: dict[str, Any]) -> None:
        super().__init__(Script(""))
        self._chunks = chunks

    async def stream(self, call: Call, take: Take) -> None:
        self.calls += 1
        head = {"id": "chatcmpl-9", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
        for choice in self._chunks:
            take([Event(orjson.dumps({**head, "choices": [{"index": 0, "finish_reason": None, **choice}]}))])
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        take([Event(orjson.dumps({**head, "choices": [], "usage": usage}), usage=Usage(3, 2))])

    async def answer(self, call: Call) -> Answer:
        assembly = Assembly(is_chat=True)
        await self.stream(call, lambda event: assembly.add(event.data))
        return Answer(orjson.dumps(assembly.document()), Usage(3, 2))


TOOL_CHUNKS = (
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f"}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"Berlin"}'}}]}},
    {"delta": {}, "finish_reason": "tool_calls"},
)


async def test_tool_calls_are_stored_and_replayed_as_deltas() -> None:
    engine = FramesEngine(*TOOL_CHUNKS)
    async with serving(engine=engine) as client:
        body = {**ASK, "tools": [{"type": "function", "function": {"name": "f"}}]}
        await client.post({**body, "stream": True})
        whole = await client.post(body)
        assert is_hit(whole)
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Berlin"}'}}
        assert whole.json()["choices"][0]["message"]["tool_calls"] == [call]
        events = events_of((await client.post({**body, "stream": True})).text)
        deltas = [call for event in events[:-1] for call in event["choices"][0]["delta"].get("tool_calls", ())]
        assert deltas[0] == {**call, "index": 0, "function": {"name": "f", "arguments": ""}}
        assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"city": "Berlin"}'
        assert len(deltas) > 2
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert engine.calls == 1


# What is never stored


async def calls_for_two(engine: ScriptedEngine, body: dict[str, Any], **settings: Any) -> tuple[int, str]:
    """How many engine calls two such requests take, and what the second is told."""
    async with serving(engine=engine, **settings) as client:
        await client.post(body)
        second = await client.post(body)
        return engine.calls, second.headers["cache-status"]


@pytest.mark.parametrize(
    ("more", "detail"),
    [
        ({"temperature": 0.7}, "temperature>0"),
        ({}, "temperature>0"),
        ({"temperature": 0, "store": True}, "side effects"),
        ({"temperature": 0, "web_search_options": {}}, "side effects"),
        ({"temperature": 0, "tools": [{"type": "mcp", "server_url": "https://x"}]}, "side effects"),
    ],
)
async def test_what_has_no_one_answer_or_does_more_is_not_cached(more: dict[str, Any], detail: str) -> None:
    told = f'headrace; fwd=bypass; detail="{detail}"'
    for stream in (False, True):
        body = {**CHAT, **more, "stream": stream}
        assert await calls_for_two(ScriptedEngine(Script(TEXT)), body) == (2, told)


async def test_several_samples_without_a_seed_are_not_cached_even_if_all_is() -> None:
    cache = {"policy": "all"}
    calls, told = await calls_for_two(ScriptedEngine(Script(TEXT)), {**CHAT, "n": 2}, cache=cache)
    assert (calls, told) == (2, 'headrace; fwd=bypass; detail="n>1 without a seed"')
    calls, told = await calls_for_two(ScriptedEngine(Script(TEXT)), CHAT, cache=cache)
    assert calls == 1
    assert "hit" in told


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_are_not_whole_are_not_stored(stream: bool) -> None:
    body = {**ASK, "stream": stream}
    miss = ("headrace; fwd=miss", "headrace; fwd=miss")
    for engine in (
        ScriptedEngine(Script(TEXT, error_after=0)),
        ScriptedEngine(Script(TEXT, error_after=3)),
        FramesEngine(*TOOL_CHUNKS[:3], {"delta": {}, "finish_reason": "tool_calls"}),
        FramesEngine({"delta": {"content": "x"}, "finish_reason": "length"}),
        FramesEngine({"delta": {"content": "x"}, "finish_reason": "abort"}),
        FramesEngine({"delta": {"content": "x"}}),
    ):
        async with serving(engine=engine) as client:
            statuses = [status_of(await client.post(body)) for _ in miss]
            assert tuple(statuses) == miss
            assert engine.calls == 2


async def test_answer_cut_by_the_callers_own_limit_is_stored(client: Client) -> None:
    for _ in range(2):
        response = await client.post({**ASK, "max_tokens": 2})
    assert is_hit(response)
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_stream_that_its_reader_left_is_not_stored() -> None:
    async with serving(Script(TEXT, token_s=0.05)) as client:
        connection = await client.open({**ASK, "stream": True})
        await connection.reader.readuntil(b"data: ")
        connection.abort()
        await client.until_idle()
        assert status_of(await client.post(ASK)) == "headrace; fwd=miss; stored"


async def test_large_answers_are_not_stored() -> None:
    calls, told = await calls_for_two(ScriptedEngine(Script("x" * 1000)), ASK, cache={"max_entry_bytes": 1000})
    assert (calls, told) == (2, "headrace; fwd=miss")


async def test_refused_requests_are_not_stored_and_not_counted_as_answers(client: Client) -> None:
    body = {**ASK, "messages": [{"role": "user", "content": "word " * 9000}]}
    for _ in range(2):
        response = await client.post(body)
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert client.engine.calls == 2


# Control


async def ask(client: Client, control: str | None = None, body: dict[str, Any] = ASK) -> httpx.Response:
    return await client.post(body, headers={} if control is None else {"cache-control": control})


async def test_callers_say_what_they_want_of_the_cache(client: Client) -> None:
    refused = await ask(client, "only-if-cached")
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "not_in_cache")
    assert status_of(refused) == 'headrace; detail="not in cache"'
    assert client.engine.calls == 0

    assert status_of(await ask(client, "no-store")) == 'headrace; fwd=bypass; detail="no-store"'
    assert status_of(await ask(client)) == "headrace; fwd=miss; stored"
    assert is_hit(await ask(client, "only-if-cached"))
    assert is_hit(await ask(client, "max-age=60, x=y"))
    assert is_hit(await ask(client, "max-stale"))
    assert client.engine.calls == 2

    assert status_of(await ask(client, "No-Cache")) == "headrace; fwd=request; stored"
    assert status_of(await ask(client, "no-store")) == 'headrace; fwd=bypass; detail="no-store"'
    assert client.engine.calls == 4
    assert (await ask(client, "only-if-cached", CHAT)).status_code == 504
    assert (await ask(client, "only-if-cached, no-cache")).status_code == 504


async def test_answers_that_are_too_old_for_the_caller_are_made_anew(client: Client) -> None:
    await ask(client)
    await asyncio.sleep(1.1)
    aged = await ask(client)
    assert is_hit(aged)
    assert aged.headers["age"] == "1"
    assert "fwd=miss" in status_of(await ask(client, "max-age=1"))
    assert is_hit(await ask(client, "max-age=1"))
    assert "fwd=miss" in status_of(await ask(client, "max-age=0"))
    assert "fwd=miss" in status_of(await ask(client, "max-age=nonsense"))


async def test_opt_in_caches_for_those_who_ask() -> None:
    async with serving(cache={"policy": "opt-in"}) as client:
        assert status_of(await ask(client)) == 'headrace; fwd=bypass; detail="not asked for"'
        assert status_of(await ask(client, "max-age=100")) == "headrace; fwd=miss; stored"
        assert is_hit(await ask(client, "max-age=100"))
        assert is_hit(await ask(client, "only-if-cached"))
        assert status_of(await ask(client)) == 'headrace; fwd=bypass; detail="not asked for"'


async def test_cache_can_be_off() -> None:
    calls, told = await calls_for_two(ScriptedEngine(Script(TEXT)), ASK, cache={"enabled": False})
    assert (calls, told) == (2, 'headrace; fwd=bypass; detail="off"')
    calls, told = await calls_for_two(ScriptedEngine(Script(TEXT)), CHAT, cache={"enabled": False})
    assert (calls, told) == (2, 'headrace; fwd=bypass; detail="temperature>0"')


async def test_each_model_has_its_ttl_and_its_revision() -> None:
    models = [
        {"name": "short", "pool": "demo", "cache_ttl_s": 0.2},
        {"name": "long", "pool": "demo"},
        {"name": "new", "pool": "demo", "revision": "2"},
    ]
    async with serving(models=models, cache={"ttl_s": 100}) as client:
        for name in ("short", "long", "new"):
            assert not is_hit(await client.post({**ASK, "model": name}))
            assert is_hit(await client.post({**ASK, "model": name}))
        assert "ttl=99;" in status_of(await client.post({**ASK, "model": "long"}))
        await asyncio.sleep(0.25)
        assert not is_hit(await client.post({**ASK, "model": "short"}))
        assert is_hit(await client.post({**ASK, "model": "long"}))


# Whose


@pytest.mark.parametrize(("scope", "sharers"), [("tenant", {"ann", "bob"}), ("subject", {"ann"}), ("shared", None)])
async def test_scope_says_whose_answers_are_shared(scope: str, sharers: set[str] | None) -> None:
    callers = {
        "ann": token(sub="ann", tenant="acme"),
        "bob": token(sub="bob", tenant="acme"),
        "eve": token(sub="ann", tenant="other"),
    }
    async with serving(auth={"mode": "jwt", "jwt": JWT_SETTINGS}, cache={"scope": scope}) as client:
        await client.post(ASK, headers=bearer(callers["ann"]))
        got = {name for name, value in callers.items() if is_hit(await client.post(ASK, headers=bearer(value)))}
        assert got == (set(callers) if sharers is None else sharers)


async def test_stored_answers_are_for_those_who_may_use_the_model() -> None:
    async with serving(auth={"mode": "jwt", "jwt": JWT_SETTINGS}) as client:
        await client.post(ASK, headers=bearer(token(tenant="acme")))
        for more, status in (({"models": ["other"]}, 403), ({"scope": "cache:read"}, 403), ({"exp": 1}, 401)):
            assert (await client.post(ASK, headers=bearer(token(tenant="acme", **more)))).status_code == status
        assert (await client.post(ASK)).status_code == 401


async def test_hits_cost_a_request_and_no_tokens() -> None:
    limits = {"subject": {"requests_per_minute": 10, "tokens_per_minute": 100}}
    async with serving(auth={"mode": "jwt", "jwt": JWT_SETTINGS}, limits=limits) as client:
        left = []
        for _ in range(3):
            headers = (await client.post(ASK, headers=bearer(token()))).headers
            left.append([int(headers[f"x-ratelimit-remaining-{kind}"]) for kind in ("requests", "tokens")])
        assert left == [[9, 92], [8, 92], [7, 92]]


async def test_hits_are_marked_in_the_log_and_the_metrics(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("headrace").setLevel(logging.INFO)
    for stream in (False, False, True):
        await client.post({**ASK, "stream": stream})
    await client.post(CHAT)
    lines = client.access_lines(capsys)
    assert [(line["cache"], line.get("cache_detail")) for line in lines] == [
        ("miss", None),
        ("hit", "memory"),
        ("hit", "memory"),
        ("bypass", "temperature>0"),
    ]
    assert all(line["prompt_tokens"] == 3 and line["completion_tokens"] == 5 for line in lines)
    metrics = (await client.http.get("/metrics")).text
    for line in (
        'headrace_cache_answers_total{outcome="hit",tier="memory"} 2.0',
        'headrace_cache_answers_total{outcome="miss",tier=""} 1.0',
        'headrace_cache_answers_total{outcome="bypass",tier=""} 1.0',
        'headrace_cache_lookups_total{result="hit",tier="memory"} 2.0',
        'headrace_cache_entries{tier="memory"} 1.0',
        'headrace_tokens_total{kind="saved_by_cache",model="demo",operation="chat.completions",variant=""} 16.0',
        'headrace_tokens_total{kind="completion",model="demo",operation="chat.completions",variant=""} 10.0',
    ):
        assert line in metrics, line


async def test_first_token_does_not_wait_for_the_cache() -> None:
    """The events of a miss leave as they come, before the answer is whole."""
    async with serving(Script(TEXT, token_s=0.05)) as client:
        started = time.monotonic()
        async with client.stream(ASK) as response:
            lines = response.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass
            first_s = time.monotonic() - started
            async for _ in lines:
                pass
        assert first_s < (time.monotonic() - started) / 2
        await until(lambda: client.gateway.cache.tiers[0].stats().entries == 1)


async def test_cleared_while_computed_is_not_stored() -> None:
    async with serving(Script(TEXT, token_s=0.05)) as client:
        asked = asyncio.create_task(client.post(ASK))
        await until(lambda: client.engine.load.running == 1)
        await client.gateway.cache.clear(Selection(), time.time())
        assert status_of(await asked) == "headrace; fwd=miss"
        assert status_of(await client.post(ASK)) == "headrace; fwd=miss; stored"


async def test_many_different_questions_at_once_get_their_own_answers() -> None:
    async with serving(lambda call: Script(f"Echo {call.body['messages'][0]['content']}.")) as client:

        async def talk(number: int) -> None:
            body = {**ASK, "messages": [{"role": "user", "content": f"q{number % 20}"}], "stream": number % 2 == 0}
            response = await client.post(body)
            text = text_of(events_of(response.text)) if body["stream"] else json.dumps(response.json())
            assert f"Echo q{number % 20}." in text

        await asyncio.gather(*(talk(number) for number in range(100)))
        assert client.engine.calls == 20
