"""Streams: events as they come, errors where they belong, and nothing of the model's text taken for framing."""

import asyncio
import json
import re

from app.engines.scripted import Gate, Script, ScriptedEngine
from routing.engine import Call, Event, Take
from routing.errors import EngineError

from .conftest import CHAT, events_of, serving, text_of


async def test_every_token_leaves_as_one_event_as_soon_as_it_comes() -> None:
    gate = Gate()
    async with serving(Script("One two three.", gate=gate)) as client:
        gate.release(1)
        async with client.stream() as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-store"
            assert response.headers["x-accel-buffering"] == "no"
            assert "connection" not in response.headers
            lines = response.aiter_lines()
            for number, token in enumerate(("One", " two", " three.")):
                assert re.fullmatch(rf"id: [0-9a-f]{{16}}\.{number}", await anext(lines))
                event = json.loads((await anext(lines)).removeprefix("data: "))
                assert event["choices"][0]["delta"]["content"] == token
                assert await anext(lines) == ""
                gate.release(1)
            assert await anext(lines) == "data: [DONE]"


async def test_frames_are_separated_by_line_feeds_alone(client) -> None:
    response = await client.post({**CHAT, "stream": True})
    assert "\r" not in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert len(frames) == 6
    assert all(re.fullmatch(r"id: [0-9a-f.]+\ndata: [^\n]+", frame) for frame in frames[:-1])
    assert frames[-1] == "data: [DONE]"


async def test_usage_event_comes_when_asked_for_and_only_then(client) -> None:
    plain = events_of((await client.post({**CHAT, "stream": True})).text)
    assert not any("usage" in event for event in plain[:-1])
    asked = events_of((await client.post({**CHAT, "stream": True, "stream_options": {"include_usage": True}})).text)
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


async def test_scripted_engine_honours_max_tokens_stop_and_n(client) -> None:
    async def ask(**more):
        events = events_of((await client.post({**CHAT, "stream": True, **more})).text)
        whole = (await client.post({**CHAT, **more})).json()
        return events, whole

    events, whole = await ask(max_tokens=2)
    assert text_of(events) == whole["choices"][0]["message"]["content"] == "One two"
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    events, whole = await ask(stop=["four", "three"])
    assert text_of(events) == whole["choices"][0]["message"]["content"] == "One two"
    assert whole["choices"][0]["finish_reason"] == "stop"
    events, whole = await ask(n=3)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 15
    assert {event["choices"][0]["index"] for event in events[:-1]} == {0, 1, 2}


async def test_pings_come_before_the_first_token_and_between_tokens() -> None:
    gate = Gate()
    async with serving(Script("One two.", gate=gate), {"ping_s": 0.05}) as client, client.stream() as response:
        assert response.status_code == 200  # the first ping brings the headers
        lines = response.aiter_lines()
        seen = []
        for expected in (": ping", "One", ": ping", "two", "[DONE]"):
            line = ""
            while expected not in line:
                line = await anext(lines)
                seen.append(line)
            gate.release(1 if expected == ": ping" else 0)
        payloads = [line for line in seen if line.startswith("data: {")]
        assert len(payloads) == 2


async def test_text_that_looks_like_framing_is_text() -> None:
    text = 'Say "data: [DONE]"\n\ndata: {"error": 1}\n\n: ping\r\n\r\n"choices":[] end'
    async with serving(Script(text)) as client:
        response = await client.post({**CHAT, "stream": True})
        events = events_of(response.text)
        assert text_of(events) == text
        assert events.count("[DONE]") == 1


async def test_failure_before_the_first_event_is_an_http_error() -> None:
    async with serving(Script("One two.", error_after=0)) as client:
        response = await client.post({**CHAT, "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_error")


async def test_failure_after_the_first_event_is_told_in_the_stream_and_done_does_not_follow() -> None:
    async with serving(Script("One two three.", error_after=2)) as client:
        response = await client.post({**CHAT, "stream": True})
        events = events_of(response.text)
        assert response.status_code == 200
        assert text_of(events) == "One two"
        assert events[-1]["error"]["code"] == "engine_error"
        assert events[-1]["error"]["request_id"] == response.headers["x-request-id"]
        assert "[DONE]" not in events
        await client.until_idle()
        assert client.gateway.counts.failed == 1


class CutEngine(ScriptedEngine):
    """Breaks off within the second event's making, as a lost connection would."""

    async def stream(self, call: Call, take: Take) -> None:
        take([Event(b'{"choices":[{"index":0,"delta":{"content":"One"}}]}')])
        raise EngineError("The engine ended the stream early.")


async def test_a_stream_that_is_cut_ends_with_an_error_and_not_with_done() -> None:
    async with serving(engine=CutEngine(Script(""))) as client:
        events = events_of((await client.post({**CHAT, "stream": True})).text)
        assert events[-1]["error"]["code"] == "engine_error"


async def test_500_streams_run_at_once() -> None:
    gate = Gate()
    async with serving(Script("One two.", gate=gate)) as client:
        streams = [await client.open({**CHAT, "stream": True}) for _ in range(500)]
        async with asyncio.timeout(20):
            while client.engine.load.running < 500:
                await asyncio.sleep(0.01)
        gate.open()
        for stream in streams:
            assert b"[DONE]" in await stream.reader.readuntil(b"data: [DONE]\n\n")
            stream.abort()
