"""The upstream that misbehaves as told does as it is told."""

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from .conftest import CHAT, events_of, text_of, until
from .fault_answers import Behaviour, Request
from .fault_server import Authority, FaultServer, fault_server, http_date

STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
TEXT = "One two three four five."


async def ask(upstream: FaultServer, body: Any = CHAT, path: str = "/v1/chat/completions") -> httpx.Response:
    async with httpx.AsyncClient(timeout=5, verify=False) as http:
        return await http.post(upstream.url + path, json=body)


async def bytes_of(behaviour: Behaviour, body: Any = STREAM) -> bytes:
    """All that one request gets, on a connection that ends then."""
    async with fault_server(replace(behaviour, keeps_alive=False)) as upstream, asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", upstream.port)
        data = json.dumps(body).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data))
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_answers_whole_and_streamed_for_chats_and_completions() -> None:
    async with fault_server() as upstream:
        whole = (await ask(upstream)).json()
        assert whole["choices"][0]["message"]["content"] == TEXT
        assert whole["model"] == "demo"
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        events = events_of((await ask(upstream, STREAM)).text)
        assert text_of(events) == TEXT
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["completion_tokens"] == 5
        assert events[-3]["choices"][0]["finish_reason"] == "stop"
        prompt = {"model": "demo", "prompt": "How?"}
        assert (await ask(upstream, prompt, "/v1/completions")).json()["choices"][0]["text"] == TEXT
        assert text_of(events_of((await ask(upstream, {**prompt, "stream": True}, "/v1/completions")).text)) == TEXT
        assert [request.json for request in upstream.requests][:2] == [CHAT, STREAM]


async def test_probes_are_kept_apart_and_have_a_status_of_their_own() -> None:
    async with fault_server(Behaviour(status=500)) as upstream, httpx.AsyncClient() as http:
        assert (await http.get(upstream.url + "/health")).status_code == 200
        upstream.health_status = 503
        assert (await http.get(upstream.url + "/health")).status_code == 503
        assert (await http.get(upstream.url + "/v1/models")).json()["data"][0]["id"] == "demo"
        upstream.health_stalls = True
        with pytest.raises(httpx.ReadTimeout):
            await http.get(upstream.url + "/health", timeout=0.1)
        assert len(upstream.probes) == 4
        assert upstream.requests == []


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(encoding="gzip"),
        Behaviour(encoding="deflate", is_compact=False),
        Behaviour(framing="content-length"),
        Behaviour(framing="until-close"),
        Behaviour(framing="chunked", trailers=(("x-done", "yes"),), chunk_head="{size:X};name=value"),
        Behaviour(split=7, events_per_write=100),
        Behaviour(events_per_write=3, has_comments=True, has_ids=True, event_name="chunk", retry_ms=1000),
        Behaviour(has_space_after_colon=True, has_odd_head=True, head_split=3, interim=(103, 100)),
        Behaviour(drip_s=1e-6, keeps_alive=False),
        Behaviour(text=tuple(word if word == "One" else f" {word}" for word in TEXT.split())),
    ],
)
async def test_odd_answers_within_the_rules_are_read_by_a_good_client(behaviour: Behaviour) -> None:
    async with fault_server(behaviour) as upstream:
        assert (await ask(upstream)).json()["choices"][0]["message"]["content"] == TEXT
        assert text_of(events_of((await ask(upstream, STREAM)).text)) == TEXT


async def test_events_take_the_forms_that_were_told() -> None:
    behaviour = Behaviour(newline="\r", has_space_after_colon=False, has_bom=True, has_final_blank_line=False)
    body = await bytes_of(behaviour)
    assert "\ufeffdata:{".encode() in body
    assert b'"finish_reason":"stop"}],"usage":null}\r\r\r\n' in body
    assert b"data:[DONE]\r\r\n0\r\n\r\n" in body
    assert b"data: [DONE]" not in await bytes_of(Behaviour(has_done=False))
    assert b'data: {\ndata:  "id": ' in await bytes_of(Behaviour(is_multi_line=True))
    assert b'"content":"data: [DONE]"' in await bytes_of(Behaviour(text=("data: [DONE]",)))
    assert b'data: {"id": "chatcmpl-\n\n' in await bytes_of(Behaviour(malformed_at=2))
    failed = await bytes_of(Behaviour(error_at=1, has_done=False))
    assert failed.count(b"data: ") == 2
    assert b'"code":500' in failed


async def test_answers_break_the_rules_of_http() -> None:
    assert b"\r\nzz\r\n" in await bytes_of(Behaviour(chunk_head="zz"))
    both = await bytes_of(Behaviour(also_content_length=5))
    assert b"content-length: 5\r\ntransfer-encoding: chunked" in both
    assert (await bytes_of(Behaviour(extra_bytes=b"HTTP/1.1 200"))).endswith(b"0\r\n\r\nHTTP/1.1 200")
    assert await bytes_of(Behaviour(raw=b"SSH-2.0\r\n")) == b"SSH-2.0\r\n"
    assert b"x" * 100_000 in await bytes_of(Behaviour(headers=(("x-padding", "x" * 100_000),)))
    empty = await bytes_of(Behaviour(body=b"", content_type="text/html"))
    assert b"text/html" in empty
    assert empty.endswith(b"content-length: 0\r\nconnection: close\r\n\r\n")


@pytest.mark.parametrize("length", [0, 1, 10, 300, 1000])
async def test_an_answer_is_cut_at_its_byte(length: int) -> None:
    assert len(await bytes_of(Behaviour(cut_at_byte=length))) == length


async def test_a_cut_can_be_a_reset() -> None:
    with pytest.raises(ConnectionResetError):
        await bytes_of(Behaviour(cut_at_byte=300, resets=True))


async def test_errors_come_in_openais_form_with_their_headers() -> None:
    overloaded = Behaviour(status=429, headers=(("retry-after", http_date(5)),), error={"code": "slow_down"})
    async with fault_server() as upstream:
        upstream.script([overloaded, Behaviour(status=400, error={"param": "n"}), Behaviour(status=503)])
        first = await ask(upstream, STREAM)
        assert (first.status_code, first.json()["error"]["code"]) == (429, "slow_down")
        assert first.headers["retry-after"].endswith(" GMT")
        assert (await ask(upstream)).json()["error"]["param"] == "n"
        assert (await ask(upstream)).status_code == 503
        assert (await ask(upstream)).status_code == 200


async def test_a_parked_answer_goes_on_when_the_gate_lets_it() -> None:
    async with fault_server(Behaviour(stall_after_events=2)) as upstream, httpx.AsyncClient() as http:
        async with http.stream("POST", upstream.url + "/v1/chat/completions", json=STREAM) as response:
            lines = response.aiter_lines()
            first = [await anext(lines) for _ in range(4)]
            await upstream.gate.arrived.wait()
            upstream.gate.release(1)
            rest = [line async for line in lines]
        assert text_of(events_of("\n".join(first + rest))) == TEXT


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(stalls_before_headers=True),
        Behaviour(stall_before_headers_s=10),
        Behaviour(is_gated=True),
        Behaviour(stall_after_events=0),
        Behaviour(drip_s=0.1),
    ],
)
@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_client_that_leaves_early_is_noticed_at_once(behaviour: Behaviour, body: Any) -> None:
    async with fault_server(behaviour) as upstream:
        asking = asyncio.create_task(ask(upstream, body))
        await upstream.arrived(1)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: upstream.aborted == upstream.requests and upstream.open_connections == 0, timeout_s=0.5)


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with fault_server(Behaviour(close_idle_after_s=0)) as upstream, httpx.AsyncClient() as http:
        for _ in range(2):
            response = await http.post(upstream.url + "/v1/chat/completions", json=CHAT)
            assert "connection" not in response.headers
            await until(lambda: upstream.open_connections == 0)
        assert upstream.connections == 2


@pytest.mark.parametrize("on_reuse", ["close", "reset"])
async def test_a_connection_is_refused_when_it_is_used_again(on_reuse: Any) -> None:
    async with fault_server(Behaviour(on_reuse=on_reuse)) as upstream, httpx.AsyncClient() as http:
        await http.post(upstream.url + "/v1/chat/completions", json=CHAT)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await http.post(upstream.url + "/v1/chat/completions", json=CHAT)
        assert (upstream.refused_reuses, len(upstream.requests)) == (1, 1)
        await http.post(upstream.url + "/v1/chat/completions", json=CHAT)
        assert upstream.requests[-1].connection_number == 2


async def test_a_stopped_server_refuses_and_comes_back_on_its_port() -> None:
    async with fault_server(Behaviour(is_gated=True)) as upstream:
        asking = asyncio.create_task(ask(upstream))
        await upstream.arrived(1)
        await upstream.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            await asking
        with pytest.raises(httpx.ConnectError):
            await ask(upstream)
        await upstream.start()
        upstream.behave(Behaviour())
        assert (await ask(upstream)).status_code == 200


async def test_tls_with_a_good_and_with_a_wrong_name() -> None:
    authority = Authority()
    for name, is_good in (("127.0.0.1", True), ("other.example", False)):
        client = httpx.AsyncClient(verify=authority.client())
        async with fault_server(tls=authority.server(name)) as upstream, client as http:
            with contextlib.nullcontext() if is_good else pytest.raises(httpx.ConnectError):
                assert (await http.post(upstream.url + "/v1/chat/completions", json=CHAT)).status_code == 200


async def test_requests_are_kept_as_they_came() -> None:
    async def chunks() -> Any:
        yield json.dumps(CHAT).encode()

    async with fault_server() as upstream, httpx.AsyncClient() as http:
        url = upstream.url + "/v1/chat/completions"
        await http.post(url, content=chunks(), headers=[("X-One", "1"), ("x-one", "2")])
        request = upstream.requests[0]
        assert isinstance(request, Request)
        assert request.json == CHAT
        assert [pair for pair in request.headers if pair[0].lower() == "x-one"] == [("X-One", "1"), ("x-one", "2")]
