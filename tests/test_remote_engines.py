"""Servers elsewhere as callers of a whole gateway see them."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from app.engines.discovery import Discovery
from app.gateway import Gateway
from app.settings import RemoteSettings
from routing.admission import Admission
from routing.balance import make_balancer
from routing.breaker import Breaker
from routing.engine import Call
from routing.errors import EngineConfigError
from routing.pool import Pool, RetryBudget

from .conftest import CHAT, Client, events_of, make_settings, serving, text_of, until
from .fault_answers import GOOD, Behaviour
from .fault_server import Authority, FaultServer, fault_server, http_date

FAR = {**CHAT, "model": "far"}
TEXT = "One two three four five."
UNBREAKABLE = {"breaker": {"failures": 10**6, "min_requests": 10**6}}
USAGE = {"stream_options": {"include_usage": True}}


def pools(remote: dict[str, Any], **pool: Any) -> list[dict[str, Any]]:
    return [{"name": "demo", "engine": "scripted"}, {"name": "far", "engine": "remote", "remote": remote, **pool}]


MODELS = [{"name": "demo", "pool": "demo"}, {"name": "far", "pool": "far"}]


@asynccontextmanager
async def in_front_of(
    upstream: FaultServer, remote: dict[str, Any] | None = None, **pool: Any
) -> AsyncIterator[Client]:
    async with serving(pools=pools({"urls": [upstream.url], **(remote or {})}, **pool), models=MODELS) as client:
        yield client


@pytest.fixture(scope="module")
async def upstream() -> AsyncIterator[FaultServer]:
    async with fault_server() as upstream:
        yield upstream


@pytest.fixture(scope="module")
async def gateway(upstream: FaultServer) -> AsyncIterator[Client]:
    async with in_front_of(upstream, **UNBREAKABLE) as client:
        yield client


@pytest.fixture
async def far(gateway: Client, upstream: FaultServer) -> Client:
    """A gateway in front of a server that is well, and has been asked nothing. All tests have the same one."""
    upstream.behave(GOOD)
    upstream.script([])
    for requests in (upstream.requests, upstream.aborted, upstream.probes):
        requests.clear()
    return gateway


async def choices_of(client: Client, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[str]:
    """The text of a whole answer and of a stream."""
    whole = (await client.post(body, path)).json()["choices"][0]
    response = await client.post({**body, "stream": True}, path)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    return [whole["message"]["content"] if "message" in whole else whole["text"], text_of(events_of(response.text))]


# What goes there and what comes back


async def test_chats_and_completions_are_answered_whole_and_streamed(far: Client, upstream: FaultServer) -> None:
    assert await choices_of(far, FAR) == [TEXT, TEXT]
    prompt = {"model": "far", "prompt": "How are you?"}
    assert await choices_of(far, prompt, "/v1/completions") == [TEXT, TEXT]
    assert [request.path for request in upstream.requests] == ["/v1/chat/completions"] * 2 + ["/v1/completions"] * 2
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert [request.json for request in upstream.requests] == [FAR, {**FAR, **streamed}, prompt, {**prompt, **streamed}]


async def test_only_request_id_and_trace_context_of_the_callers_headers_go_on(
    far: Client, upstream: FaultServer
) -> None:
    parent, state = f"00-{'a' * 32}-{'b' * 16}-01", "vendor=1,other=2"
    headers = {
        "x-request-id": "request-1",
        "traceparent": parent,
        "tracestate": state,
        "authorization": "Bearer of-the-caller",
        "cookie": "session=1",
        "x-session-id": "s",
        "x-forwarded-for": "10.0.0.1",
        "forwarded": "for=10.0.0.1",
        "te": "trailers",
        "trailer": "x-more",
        "keep-alive": "timeout=5",
        "proxy-authorization": "Basic x",
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "x-api-key": "k",
        "baggage": "user=1",
        "cache-control": "no-cache",
        "accept-encoding": "gzip, br",
        "accept-language": "de",
    }
    for body in (FAR, {**FAR, "stream": True}):
        response = await far.post({**body, "user": "Grüße"}, headers=headers)
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "request-1"
        request = upstream.requests.pop()
        assert dict(request.headers) == {
            "host": f"127.0.0.1:{upstream.port}",
            "user-agent": "headrace",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "x-request-id": "request-1",
            "traceparent": parent,
            "tracestate": state,
            "content-length": str(len(request.body)),
        }
        assert len(request.headers) == 8
        assert request.json["user"] == "Grüße"
    chunked = b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
        json.dumps(FAR)[:5].encode(),
        len(json.dumps(FAR)) - 5,
        json.dumps(FAR)[5:].encode(),
    )
    answer = await far.raw(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"transfer-encoding: chunked\r\ntraceparent: not one\r\n\r\n" + chunked
    )
    assert answer.startswith(b"HTTP/1.1 200")
    assert upstream.requests[-1].header("transfer-encoding") is None
    assert upstream.requests[-1].header("traceparent") is None
    assert re.fullmatch("[0-9a-f]{32}", upstream.requests[-1].header("x-request-id") or "")


async def test_none_of_the_servers_headers_comes_back(far: Client, upstream: FaultServer) -> None:
    plain = [set((await far.post({**FAR, "stream": stream})).headers) for stream in (False, True)]
    more = {
        "set-cookie": "a=b",
        "server": "uvicorn",
        "x-internal": "1",
        "x-request-id": "theirs",
        "keep-alive": "timeout=5",
    }
    more |= {
        "content-language": "de",
        "retry-after": "7",
        "etag": '"x"',
        "age": "5",
        "access-control-allow-origin": "*",
    }
    upstream.behave(Behaviour(headers=tuple(more.items()), encoding="gzip"))
    for stream in (False, True):
        response = await far.post({**FAR, "stream": stream})
        assert set(response.headers) == plain[stream]
        assert response.headers["x-request-id"] != "theirs"
        if not stream:
            assert response.headers["content-length"] == str(len(response.content))
    upstream.behave(Behaviour(status=400, headers=tuple(more.items())))
    response = await far.post(FAR)
    assert not set(response.headers) & (set(more) - {"x-request-id"})


async def test_servers_own_key_goes_to_it_and_to_its_probes(tmp_path: Any) -> None:
    file = tmp_path / "key"
    file.write_text("secret-2\n")
    for remote, key in (({"api_key": "secret-1"}, "secret-1"), ({"api_key_file": str(file)}, "secret-2")):
        async with fault_server() as upstream, in_front_of(upstream, remote) as client:
            assert (await client.post(FAR, headers={"authorization": "Bearer mine"})).status_code == 200
            await until(lambda upstream=upstream: len(upstream.probes) > 0)
            for request in (upstream.requests[0], upstream.probes[0]):
                assert [value for name, value in request.headers if name == "authorization"] == [f"Bearer {key}"]


async def test_key_file_that_cannot_be_read_stops_the_start(tmp_path: Any) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary"):
        remote = {"urls": ["http://127.0.0.1:1"], "api_key_file": str(tmp_path / name)}
        with pytest.raises(EngineConfigError, match=name):
            Gateway(make_settings(pools=pools(remote)), {})


@pytest.mark.parametrize(
    ("path", "root"), [("/v1", ""), ("/v1/", ""), ("/", ""), ("/llm/a", "/llm/a"), ("/llm/v1", "/llm")]
)
async def test_url_may_end_in_v1_and_have_a_root(path: str, root: str) -> None:
    async with fault_server() as upstream, in_front_of(upstream, {"urls": [upstream.url + path]}) as client:
        assert (await client.post(FAR)).status_code == 200
        assert upstream.requests[0].path == f"{root}/v1/chat/completions"
        await until(lambda: len(upstream.probes) > 0)
        assert upstream.probes[0].path == f"{root}/health"


async def test_server_is_asked_for_the_model_by_its_own_name_and_answers_by_the_callers() -> None:
    async with fault_server() as upstream, in_front_of(upstream, {"model": "org/real"}) as client:
        assert (await client.post(FAR)).json()["model"] == "far"
        events = events_of((await client.post({**FAR, **USAGE, "stream": True})).text)
        assert {event["model"] for event in events[:-1]} == {"far"}
        assert text_of(events) == TEXT
        assert [request.json["model"] for request in upstream.requests] == ["org/real"] * 2


async def test_answers_name_the_model_asked_for_whatever_the_server_says(far: Client, upstream: FaultServer) -> None:
    def chunk(content: str, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": None}
        return {"id": "x", "object": "chat.completion.chunk", "created": 1, "choices": [choice], **more}

    documents = (
        chunk("a", model="one"),
        chunk("b", model="two"),
        chunk('"model": "c"', model="one"),
        chunk("d"),
        chunk("e", model=None),
        {"meta": {"model": "nested"}, **chunk("f", model="one")},
        chunk("g", model="far", meta={"model": "nested"}),
        {**chunk("h", model='qu"oted'), "usage": None},
    )
    upstream.behave(Behaviour(documents=documents))
    events = events_of((await far.post({**FAR, "stream": True})).text)
    assert [event["model"] for event in events[:-1]] == ["far"] * len(documents)
    assert text_of(events) == 'ab"model": "c"defgh'
    assert events[5]["meta"] == events[6]["meta"] == {"model": "nested"}
    for document in documents:
        upstream.behave(Behaviour(documents=(document,)))
        answer = (await far.post(FAR)).json()
        assert answer == {**document, "model": "far"}


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(newline="\r\n"),
        Behaviour(newline="\r"),
        Behaviour(has_space_after_colon=False),
        Behaviour(has_comments=True, has_ids=True, retry_ms=1000, has_bom=True),
        Behaviour(is_multi_line=True, newline="\r\n"),
        Behaviour(is_compact=False),
        Behaviour(split=1),
        Behaviour(split=7, newline="\r\n", events_per_write=3),
        Behaviour(events_per_write=100),
        Behaviour(encoding="gzip", split=5),
        Behaviour(encoding="deflate", framing="until-close"),
        Behaviour(has_done=False),
        Behaviour(has_final_blank_line=False),
        Behaviour(text=("data: [DONE]", "\n\ndata: x\r\n\r\n", "\u2028 世界")),
    ],
)
async def test_every_form_of_events_arrives_in_one_form(
    far: Client, upstream: FaultServer, behaviour: Behaviour
) -> None:
    upstream.behave(behaviour)
    text = (await far.post({**FAR, **USAGE, "stream": True})).text
    assert re.fullmatch(r"(id: [0-9a-f.]+\ndata: \{[^\r\n]*\}\n\n)+data: \[DONE\]\n\n", text)
    events = events_of(text)
    assert text_of(events) == (TEXT if isinstance(behaviour.text, str) else "".join(behaviour.text))
    assert events[-2]["usage"]["prompt_tokens"] == 3


async def test_events_without_data_and_names_of_events_do_no_harm(far: Client, upstream: FaultServer) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}], "model": "far"}
    body = (
        b"data:\n\ndata\n\nevent: chunk\ndata: %b\n\nevent: ping\n\ndata: [DONE]\n\ndata: nothing\n\n"
        % json.dumps(chunk).encode()
    )
    upstream.behave(Behaviour(body=body, content_type="Text/Event-Stream ; charset=utf-8"))
    response = await far.post({**FAR, "stream": True})
    assert text_of(events_of(response.text)) == "a"
    assert response.text.endswith("data: [DONE]\n\n")


# Usage


LOGGED = {"x-request-id": "logged"}


async def logged(client: Client, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    await client.until_idle()
    return [line for line in client.access_lines(capsys) if line["request_id"] == "logged"]


async def test_usage_that_comes_with_the_last_choice_is_told_in_an_event_of_its_own(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.access")
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "far"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    first = {**head, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
    last = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}
    async with fault_server(Behaviour(documents=(first, last))) as upstream, in_front_of(upstream) as client:
        events = events_of((await client.post({**FAR, **USAGE, "stream": True}, headers=LOGGED)).text)
        assert events[-2] == {**head, "choices": [], "usage": usage}
        (line,) = await logged(client, capsys)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 2)


async def test_usage_that_is_not_told_is_counted_by_events(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.access")
    async with fault_server(Behaviour(has_usage=False)) as upstream, in_front_of(upstream) as client:
        events = events_of((await client.post({**FAR, **USAGE, "stream": True}, headers=LOGGED)).text)
        assert text_of(events) == TEXT
        assert not any("usage" in event for event in events[:-1])
        assert (await client.post(FAR, headers=LOGGED)).status_code == 200
        streamed, whole = await logged(client, capsys)
    assert streamed["completion_tokens"] >= 5
    assert whole["status"] == 200


@pytest.mark.parametrize(
    "usage",
    [
        [],
        "x",
        {"prompt_tokens": "3"},
        {"prompt_tokens": 3, "completion_tokens": None, "prompt_tokens_details": [1]},
        {"prompt_tokens": 3, "completion_tokens": "x", "prompt_tokens_details": {"cached_tokens": "y"}},
    ],
)
async def test_odd_usage_does_not_spoil_an_answer(far: Client, upstream: FaultServer, usage: Any) -> None:
    document = {
        "choices": [{"index": 0, "message": {"content": "a"}, "delta": {}, "finish_reason": "stop"}],
        "usage": usage,
    }
    upstream.behave(Behaviour(documents=(document,)))
    assert (await far.post(FAR)).status_code == 200
    assert (await far.post({**FAR, "stream": True})).text.endswith("data: [DONE]\n\n")


# Errors, each with its status, code, and param for the caller


def answers(body: bytes | str, status: int = 200, content_type: str = "application/json") -> Behaviour:
    return Behaviour(status=status, body=body if isinstance(body, bytes) else body.encode(), content_type=content_type)


OLD_FORM = '{"object": "error", "message": "no", "param": "n", "code": 400}'
IN_BAND = '{"error": {"message": "no", "code": 400, "param": "n"}}'
WRONG, TOO_LONG, UNSUPPORTED = "invalid_request", "context_length_exceeded", "unsupported_operation"
FAILED, UNAVAILABLE = "engine_error", "engine_unavailable"
STATUSES = {WRONG: 400, TOO_LONG: 400, UNSUPPORTED: 501, FAILED: 502, UNAVAILABLE: 503}
ERRORS = {
    "wrong field": (Behaviour(status=400, error={"message": "no", "param": "n"}), WRONG, "n"),
    "wrong without a field": (Behaviour(status=422), WRONG, None),
    "too long by its param": (Behaviour(status=400, error={"param": "input_tokens"}), TOO_LONG, "input_tokens"),
    "too long by its older param": (Behaviour(status=400, error={"param": "input_text"}), TOO_LONG, "input_text"),
    "too long by its code": (Behaviour(status=400, error={"code": "context_length_exceeded"}), TOO_LONG, None),
    "aside of vLLM's": (Behaviour(status=400, error={"message": "no (parameter=n)", "param": "n"}), WRONG, "n"),
    "param of an odd form": (Behaviour(status=400, error={"param": ["n"], "code": {"a": 1}}), WRONG, "['n']"),
    "validation without OpenAI's form": (answers('{"detail": [{"loc": ["body"]}]}', 422), WRONG, None),
    "error without its object": (answers(OLD_FORM, 400), WRONG, "n"),
    "error as text": (answers('{"error": "no"}', 422), WRONG, None),
    "body too large": (answers("<html>", 413, "text/html"), WRONG, None),
    "key refused": (Behaviour(status=401), FAILED, None),
    "key not allowed": (Behaviour(status=403), FAILED, None),
    "proxy wants a key": (Behaviour(status=407), FAILED, None),
    "unknown model": (Behaviour(status=404, error={"param": "model"}), FAILED, None),
    "unknown model by its code": (Behaviour(status=404, error={"code": "model_not_found"}), FAILED, None),
    "no such path": (answers('{"detail": "Not Found"}', 404), UNSUPPORTED, None),
    "no such method": (answers('{"detail": "Method Not Allowed"}', 405), UNSUPPORTED, None),
    "not implemented": (Behaviour(status=501), UNSUPPORTED, None),
    "waited for the request": (Behaviour(status=408), FAILED, None),
    "internal": (Behaviour(status=500, error={"message": "secret trace"}), FAILED, None),
    "bad gateway page": (answers("<html>secret", 502, "text/html"), FAILED, None),
    "unavailable": (Behaviour(status=503), UNAVAILABLE, None),
    "behind it too slow": (answers("", 504), FAILED, None),
    "redirect": (replace(answers("", 302), headers=(("location", "/login"),)), FAILED, None),
    "no content": (Behaviour(raw=b"HTTP/1.1 204 No Content\r\n\r\n"), FAILED, None),
    "created": (answers('{"choices": []}', 201), FAILED, None),
    "page": (answers("<html>secret", content_type="text/html"), FAILED, None),
    "empty": (answers(""), FAILED, None),
    "no type": (Behaviour(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"), FAILED, None),
    "other type": (answers('{"choices": []}', content_type="text/plain"), FAILED, None),
    "error with status 200": (answers(IN_BAND), WRONG, "n"),
    "failure with status 200": (answers('{"error": {"message": "secret"}}'), FAILED, None),
    "failure with status 200 as text": (answers('{"error": "secret"}'), FAILED, None),
}  # fmt: skip
ERRORS_OF_WHOLE_ANSWERS = {
    "cut": answers('{"choices": [], "secret'),
    "list": answers('["secret"]'),
    "number": answers("1"),
    "no choices": answers('{"secret": 1}'),
    "choices of another form": answers('{"choices": {}}'),
    "stream": answers("data: {}\n\n", content_type="text/event-stream"),
}
ERRORS_OF_STREAMS = {
    "no event": answers("", content_type="text/event-stream"),
    "comments only": answers(": secret\n\n", content_type="text/event-stream"),
    "not JSON": answers("data: secret\n\n", content_type="text/event-stream"),
    "list": answers("data: []\n\n", content_type="text/event-stream"),
    "no choices": answers('data: {"object": "error", "message": "secret"}\n\n', content_type="text/event-stream"),
    "choices of another form": answers('data: {"choices": [1]}\n\n', content_type="text/event-stream"),
    "failure": answers('event: error\ndata: {"error": {"message": "secret"}}\n\n', content_type="text/event-stream"),
    "whole answer": answers('{"choices": []}'),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ERRORS)
async def test_error_before_the_first_byte_has_a_status_and_openais_form(
    far: Client, upstream: FaultServer, name: str, stream: bool
) -> None:
    behaviour, code, param = ERRORS[name]
    status = STATUSES[code]
    if stream and "status 200" in name:
        assert behaviour.body is not None
        behaviour = answers(b"data: %b\n\n" % behaviour.body, content_type="text/event-stream")
    upstream.behave(behaviour)
    response = await far.post({**FAR, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == ("invalid_request_error" if status == 400 else "server_error")
    assert "secret" not in response.text
    told = (behaviour.error or {}).get("message")
    if status == 400 and told:
        assert error["message"] == told.partition(" (parameter=")[0]
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_is_not_what_was_asked_for_is_an_error(
    far: Client, upstream: FaultServer, stream: bool
) -> None:
    for behaviour in (ERRORS_OF_STREAMS if stream else ERRORS_OF_WHOLE_ANSWERS).values():
        upstream.behave(behaviour)
        response = await far.post({**FAR, "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_error"), behaviour
        assert "secret" not in response.text


async def test_stream_without_done_is_whole_when_every_choice_has_ended(far: Client, upstream: FaultServer) -> None:
    def chunk(index: int, reason: str | None) -> dict[str, Any]:
        return {"choices": [{"index": index, "delta": {"content": "a"}, "finish_reason": reason}]}

    documents = (chunk(0, None), chunk(1, None), chunk(0, "stop"), chunk(1, "length"))
    for count, is_whole in ((3, False), (4, True)):
        upstream.behave(Behaviour(documents=documents[:count], has_done=False, framing="until-close"))
        response = await far.post({**FAR, "n": 2, "stream": True})
        assert ("[DONE]" in response.text) == is_whole
        assert ("engine_error" in response.text) == (not is_whole)


@pytest.mark.parametrize("retry_after", ["3", "soon", "", "-1", "²", "9" * 400, "1.5"])
async def test_retry_after_is_passed_on_in_seconds_where_it_is_understood(retry_after: str) -> None:
    headers = (("retry-after", retry_after),)
    async with fault_server(Behaviour(status=429, headers=headers)) as upstream, in_front_of(upstream) as client:
        response = await client.post(FAR)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert response.headers["retry-after"] == {"3": "3", "9" * 400: "3600"}.get(retry_after, "1")


async def test_retry_after_may_be_a_date() -> None:
    headers = (("retry-after", http_date(in_s=8)),)
    async with fault_server(Behaviour(status=503, headers=headers)) as upstream, in_front_of(upstream) as client:
        response = await client.post(FAR)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert int(response.headers["retry-after"]) in (6, 7, 8)


async def test_server_that_is_slow_is_a_gateway_timeout_that_says_of_what() -> None:
    remote = {"first_byte_timeout_s": 0.15, "chunk_timeout_s": 0.15}
    async with fault_server() as upstream, in_front_of(upstream, remote) as client:
        upstream.behave(Behaviour(stalls_before_headers=True))
        for stream in (False, True):
            response = await client.post({**FAR, "stream": stream})
            assert (response.status_code, response.json()["error"]["code"]) == (504, "engine_timeout")
            assert "did not begin" in response.json()["error"]["message"]
        upstream.behave(Behaviour(stall_after_events=2))
        text = (await client.post({**FAR, "stream": True})).text
        assert events_of(text)[-1]["error"]["code"] == "engine_timeout"
        assert "[DONE]" not in text


# Leaving, and many at once


@pytest.mark.parametrize(
    ("behaviour", "stream"),
    [
        (Behaviour(stalls_before_headers=True), False),
        (Behaviour(stalls_before_headers=True), True),
        (Behaviour(stall_after_events=0), False),
        (Behaviour(stall_after_events=2), True),
        (Behaviour(event_s=0.01, text="word " * 5000), True),
    ],
)
async def test_server_sees_within_a_second_that_the_caller_has_left(
    far: Client, upstream: FaultServer, behaviour: Behaviour, stream: bool
) -> None:
    upstream.behave(behaviour)
    connection = await far.open({**FAR, "stream": stream})
    await upstream.arrived(1)
    if stream and not behaviour.stalls_before_headers:
        await connection.reader.readuntil(b"data: ")
    assert upstream.aborted == []
    began = time.monotonic()
    connection.abort()
    await until(lambda: upstream.aborted == upstream.requests, timeout_s=2)
    assert time.monotonic() - began < 1
    await far.until_idle()


async def test_requests_of_all_kinds_share_connections_one_after_the_other() -> None:
    async with fault_server() as upstream, in_front_of(upstream, {"probe_every_s": 60}) as client:
        await until(lambda: len(upstream.probes) == 1)
        for number in range(6):
            upstream.script([Behaviour(status=400) if number == 3 else GOOD])
            await client.post({**FAR, "stream": number % 2 == 0})
        assert {request.connection_number for request in upstream.requests} == {2}


async def test_connection_closed_meanwhile_is_no_error_for_the_caller() -> None:
    async with fault_server(Behaviour(on_reuse="close")) as upstream, in_front_of(upstream) as client:
        for number in range(6):
            response = await client.post({**FAR, "stream": number % 2 == 0})
            assert response.status_code == 200
        assert (upstream.refused_reuses, len(upstream.requests)) == (5, 6)
        stats = (await client.http.get("/v1/routing")).json()["pools"][1]
        assert (stats["retries"], stats["replicas"][0]["failures"]) == (0, 0)


@pytest.mark.slow
async def test_five_hundred_callers_stream_at_once_through_the_gateway() -> None:
    async with fault_server(Behaviour(stall_after_events=2)) as upstream, in_front_of(upstream) as client:
        connections = [await client.open({**FAR, "stream": True}) for _ in range(500)]
        await asyncio.gather(*(connection.reader.readuntil(b'"One"') for connection in connections))
        assert len({request.connection_number for request in upstream.requests}) == 500
        upstream.gate.open()
        await asyncio.gather(*(connection.reader.readuntil(b"[DONE]") for connection in connections))


# TLS


async def test_servers_certificate_is_checked_by_the_configured_authority(tmp_path: Any) -> None:
    authority = Authority()
    ca_file = str(authority.write(tmp_path / "ca.pem"))
    for trusts, name, status in ((True, "127.0.0.1", 200), (True, "other.example", 503), (False, "127.0.0.1", 503)):
        remote = {"ca_file": ca_file} if trusts else {}
        async with fault_server(tls=authority.server(name)) as upstream, in_front_of(upstream, remote) as client:
            response = await client.post(FAR)
            assert response.status_code == status
            if status == 503:
                assert "certificate" in response.json()["error"]["message"]


# Names


async def test_each_address_of_a_name_is_a_replica() -> None:
    async with fault_server() as upstream:
        remote = {"urls": [], "dns": f"http://localhost:{upstream.port}/v1"}
        async with in_front_of(upstream, remote) as client:
            for _ in range(3):
                assert (await client.post(FAR)).status_code == 200
            assert upstream.requests[0].header("host") == f"localhost:{upstream.port}"
            replicas = (await client.http.get("/v1/routing")).json()["pools"][1]["replicas"]
            assert f"http://127.0.0.1:{upstream.port}" in [replica["name"] for replica in replicas]


async def test_name_that_does_not_resolve_leaves_nobody_to_answer(upstream: FaultServer) -> None:
    remote = {"urls": [], "dns": "http://nothing.invalid:8000"}
    async with in_front_of(upstream, remote, ready_wait_s=0.2) as client:
        response = await client.post(FAR)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) >= 1
        health = (await client.http.get("/health")).json()
        assert health["components"]["pool:far"]["last_error"].startswith("nothing.invalid does not resolve")


class Names:
    """A resolver that knows what it is told."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: set[str] | Exception = set(addresses)
        self.asked: list[str] = []

    async def __call__(self, name: str) -> set[str]:
        self.asked.append(name)
        if isinstance(self.addresses, Exception):
            raise self.addresses
        return self.addresses


@asynccontextmanager
async def discovering(names: Names, port: int) -> AsyncIterator[Pool]:
    pool = Pool("far", make_balancer("round_robin"), Admission(None, 0, 0, 1.0), RetryBudget(0.2), 0.5, 2)
    settings = RemoteSettings(dns=f"http://gpu.example:{port}", resolve_every_s=0.01, probe_every_s=0.02)
    task = asyncio.create_task(Discovery(pool, settings, Breaker, names).run())
    try:
        await until(lambda: len(names.asked) > 0)
        yield pool
    finally:
        task.cancel()
        await asyncio.wait([task])


def call(number: int = 0) -> Call:
    return Call("chat.completions", "demo", CHAT, f"request-{number}")


def hosts(pool: Pool) -> list[str]:
    return [re.sub(r"http://|:\d+$", "", replica.name) for replica in pool.replicas]


async def test_replicas_come_and_go_with_the_names_addresses() -> None:
    names = Names("127.0.0.1")
    async with (
        fault_server() as first,
        fault_server(host="127.0.0.2", port=first.port) as second,
        discovering(names, first.port) as pool,
    ):
        await until(lambda: hosts(pool) == ["127.0.0.1"])
        (kept,) = pool.replicas
        await pool.answer(call())
        names.addresses = {"127.0.0.2", "127.0.0.1"}
        await until(lambda: hosts(pool) == ["127.0.0.1", "127.0.0.2"])
        assert pool.replicas[0] is kept
        for number in range(4):
            await pool.answer(call(number))
        assert (len(first.requests), len(second.requests)) == (3, 2)
        assert second.requests[0].header("host") == f"gpu.example:{first.port}"
        names.addresses = {"127.0.0.2"}
        await until(lambda: hosts(pool) == ["127.0.0.2"])
        await until(lambda: first.open_connections == 0)
        probes = len(first.probes)
        await pool.answer(call())
        assert (len(first.requests), len(second.requests), len(first.probes)) == (3, 3, probes)
        assert set(names.asked) == {"gpu.example"}


async def test_request_goes_on_where_its_server_has_left_the_name() -> None:
    names = Names("127.0.0.1")
    async with fault_server(Behaviour(is_gated=True)) as upstream, discovering(names, upstream.port) as pool:
        await until(lambda: len(pool.replicas) > 0)
        asked = asyncio.create_task(pool.answer(call()))
        await upstream.arrived(1)
        names.addresses = {"127.0.0.3"}
        await until(lambda: hosts(pool) == ["127.0.0.3"])
        upstream.gate.open()
        assert b"five." in (await asked).body
        await until(lambda: upstream.open_connections == 0)


@pytest.mark.parametrize("error", [OSError(-2, "Name or service not known"), UnicodeError("label too long")])
async def test_name_that_resolves_no_more_changes_nothing(error: Exception) -> None:
    names = Names("127.0.0.1")
    async with fault_server() as upstream, discovering(names, upstream.port) as pool:
        await until(lambda: len(pool.replicas) > 0)
        names.addresses = error
        asked = len(names.asked)
        await until(lambda: len(names.asked) > asked + 2)
        assert (await pool.answer(call())).usage is not None
        assert hosts(pool) == ["127.0.0.1"]
        names.addresses = {"127.0.0.4"}
        await until(lambda: hosts(pool) == ["127.0.0.4"])
