"""What a request meets first: its id, its limits, and a clear answer to whatever is wrong with it."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from app.engines.scripted import Script
from app.exchange import accepts_gzip

from .conftest import CHAT, Client, serving


@pytest.fixture(scope="module")
async def lasting() -> AsyncIterator[Client]:
    """One gateway for all bodies that are refused: they leave nothing behind."""
    async with serving() as client:
        yield client


def error_of(response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id", "timestamp"}
    assert error["request_id"] == response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": "demo", "messages": NaN}', "invalid_json"),
        (b'{"model": "demo", "prompt": "\xff\xfe"}', "invalid_json"),
        (b'{"model": "demo", "prompt": "\\ud800"}', "invalid_json"),
        (b"[" * 10_000 + b"]" * 10_000, "invalid_json"),
        (b'{"model": "demo", "messages": ' + b"[" * 500 + b"]" * 500 + b"}", "invalid_request"),
        (b"[1]", "invalid_request"),
        (b'"x"', "invalid_request"),
        (b"null", "invalid_request"),
        (b"{}", "invalid_request"),
        (b'{"model": 7, "messages": []}', "invalid_request"),
        (b'{"model": "demo"}', "invalid_request"),
        (b'{"model": "demo", "messages": []}', "invalid_request"),
        (b'{"model": "demo", "messages": 3}', "invalid_request"),
        (b'{"model": "demo", "messages": [3]}', "invalid_request"),
        (b'{"model": "demo", "messages": [{}], "stream": "yes"}', "invalid_request"),
        (b'{"model": "demo", "messages": [{}], "stream": true, "stream_options": 1}', "invalid_request"),
        (b'{"model": "demo", "messages": [{}], "n": 16384}', "invalid_request"),
        (b'{"model": "demo", "messages": [{}], "n": 0}', "invalid_request"),
        (b'{"model": "demo", "messages": [{}], "n": true}', "invalid_request"),
        (b'{"model": "demo", "messages": [{}], "max_tokens": -1}', "invalid_request"),
        (b'{"model": "demo", "messages": [{}], "stop": 5}', "invalid_request"),
        (b'{"model": "demo", "messages": [{}], "stop": [5]}', "invalid_request"),
    ],
)
async def test_bad_body_gets_400_in_openai_form(lasting: Client, body: bytes, code: str) -> None:
    headers = {"content-type": "application/json"}
    response = await lasting.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert error_of(response)["code"] == code
    assert (await lasting.post()).status_code == 200


async def test_bad_prompts_get_400_and_all_forms_of_prompt_are_taken(client: Client) -> None:
    for prompt in ([], 3, [[1], "x", 3], None, {"text": "x"}, [["x"]], [[]], [[{}]]):
        response = await client.post({"model": "demo", "prompt": prompt}, "/v1/completions")
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt"), prompt
    for prompt, choices in (("x", 1), (["x", "y"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2)):
        response = await client.post({"model": "demo", "prompt": prompt, "n": 2}, "/v1/completions")
        assert (response.status_code, len(response.json()["choices"])) == (200, 2 * choices), prompt


async def test_number_of_prompts_counts_into_the_bound_on_answers(client: Client) -> None:
    response = await client.post({"model": "demo", "prompt": ["x"] * 65, "n": 2}, "/v1/completions")
    assert (response.status_code, error_of(response)["param"]) == (400, "n")


async def test_null_stands_for_a_field_left_out(client: Client) -> None:
    nulls = dict.fromkeys(["stream", "logprobs", "n", "max_tokens", "stop", "stream_options", "temperature"])
    response = await client.post({**CHAT, **nulls})
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "One two three four five."


async def test_wrong_content_type_gets_400_and_parameters_of_the_right_one_are_ignored(client: Client) -> None:
    body = json.dumps(CHAT)
    for content_type, status in (
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
    ):
        headers = {"content-type": content_type}
        response = await client.http.post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == status, content_type


async def test_compressed_body_is_refused_and_not_taken_for_json(client: Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(json.dumps(CHAT).encode())
    response = await client.http.post("/v1/chat/completions", content=body, headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_request")


async def test_unknown_model_path_and_wrong_method(client: Client) -> None:
    response = await client.post({**CHAT, "model": "nope"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    response = await client.http.get("/v1/models/nope")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    for path in ("/nope", "/v1/chat/completions/", "/docs", "/openapi.json", "/v1/models/"):
        response = await client.http.get(path)
        assert response.status_code == 404, path
        assert error_of(response)["code"] in ("not_found", "model_not_found")
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
    ):
        response = await client.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed), path
        assert error_of(response)["code"] == "method_not_allowed"


async def test_prompt_beyond_the_context_gets_context_length_exceeded(client: Client) -> None:
    response = await client.post({"model": "demo", "messages": [{"role": "user", "content": "x " * 9000}]})
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")


# Where bodies are read: by the door, and by FastAPI's side.
READERS = ["/v1/chat/completions", "/v1/cache/explain"]


@pytest.mark.slow
async def test_announced_large_body_gets_413_before_it_is_sent(client: Client) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    answer = await client.raw(head + b"content-length: 50000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"request_too_large"' in answer


@pytest.mark.parametrize("path", READERS)
async def test_large_body_gets_413_while_it_is_sent_and_the_client_can_read_it(client: Client, path: str) -> None:
    async def megabytes(count: int):
        for _ in range(count):
            yield b" " * 1_000_000

    headers = {"content-type": "application/json"}
    for content, more in ((b" " * 50_000_000, {}), (megabytes(12), {"transfer-encoding": "chunked"})):
        response = await client.http.post(path, content=content, headers=headers | more)
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize("path", READERS)
async def test_body_that_stops_coming_gets_408_and_one_that_goes_on_does_not(path: str) -> None:
    async with serving(server={"body_timeout_s": 0.2}) as client:
        body = json.dumps(CHAT).encode()
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % path.encode()
        head += b"content-length: %d\r\n\r\n" % len(body)
        answer = await client.raw(head + body[:10])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer

        reader, writer = await client.connect()
        writer.write(head)
        for start in range(0, len(body), 10):
            writer.write(body[start : start + 10])
            await asyncio.sleep(0.05)  # the whole takes longer than the limit, no pause does
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_request_id_is_the_callers_if_it_is_harmless_and_a_new_one_if_not(client: Client) -> None:
    assert (await client.post(headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    seen = set()
    for bad in ("", "a b", "x" * 129, 'a"b'):
        seen.add((await client.post(headers={"x-request-id": bad})).headers["x-request-id"])
    assert len(seen) == 4
    assert not seen & {"", "a b", 'a"b'}


async def test_json_above_1_kb_is_compressed_when_asked_and_streams_never_are() -> None:
    async with serving(Script("word " * 1000)) as client:
        for accepted, encoding in (
            ("gzip", "gzip"),
            ("br, GZIP;q=0.5", "gzip"),
            ("*", "gzip"),
            ("identity", None),
            ("gzip;q=0", None),
            ("br", None),
        ):
            response = await client.post(headers={"accept-encoding": accepted})
            assert response.headers.get("content-encoding") == encoding, accepted
            assert response.headers["vary"] == "accept-encoding"
            assert response.json()["usage"]["completion_tokens"] == 1000
        response = await client.post({**CHAT, "max_tokens": 1}, headers={"accept-encoding": "gzip"})
        assert "content-encoding" not in response.headers
        response = await client.post({**CHAT, "stream": True}, headers={"accept-encoding": "gzip"})
        assert "content-encoding" not in response.headers


def test_accept_encoding_is_read_as_rfc_9110_says() -> None:
    assert accepts_gzip(b"gzip, deflate, br, zstd")
    assert not accepts_gzip(b"*;q=0")
    assert not accepts_gzip(b"gzip; q=0.0, *")
    assert not accepts_gzip(b"")


async def test_engine_failure_gets_502_without_its_cause() -> None:
    async with serving(Script("One two.", error_after=1)) as client:
        response = await client.post()
        assert (response.status_code, error_of(response)["code"]) == (502, "engine_error")


async def test_unexpected_error_gets_500_and_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(call: object) -> Script:
        raise ZeroDivisionError("the secret prompt")

    async with serving(broken) as client:
        response = await client.post()
        assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
        assert "secret" not in response.text
        stream = await client.post({**CHAT, "stream": True})
        assert (stream.status_code, error_of(stream)["code"]) == (500, "internal_error")
