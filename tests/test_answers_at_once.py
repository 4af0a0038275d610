"""Stored answers that leave from the connection's own callback, and whatever must not: same rules, same counts."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.bodies import parse
from app.engines.scripted import Script
from app.exchange import GZIP_IN_THREAD_BYTES
from app.gateway import Gateway

from .conftest import CHAT, Client, serving, until
from .redis_server import RedisServer
from .tokens import JWT_SETTINGS, bearer, token

ASK = {**CHAT, "temperature": 0}
JWT = {"mode": "jwt", "jwt": JWT_SETTINGS}


def request(body: Any = ASK, **headers: str) -> tuple[bytes, bytes]:
    """Head and body."""
    data = json.dumps(body).encode()
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{''.join(lines)}\r\n"
    return head.encode(), data


class Watched:
    """Tells which requests were answered at once."""

    def __init__(self, gateway: Gateway) -> None:
        assert gateway.connections.answerer is not None
        self._door = gateway.connections.answerer
        self.told: list[bool] = []
        gateway.connections.answerer = self

    def answer_at_once(self, *request: Any) -> Any:
        answer = self._door.answer_at_once(*request)
        self.told.append(isinstance(answer, tuple))
        return answer

    def begin(self, *request: Any) -> None:
        self._door.begin(*request)


@asynccontextmanager
async def watching(**settings: Any) -> AsyncIterator[tuple[Client, Watched]]:
    async with serving(**settings) as client:
        yield client, Watched(client.gateway)


async def answer_on(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
    return head, json.loads(await asyncio.wait_for(reader.readexactly(length), 5))


async def test_second_answer_leaves_at_once_and_says_the_same() -> None:
    async with watching() as (client, watched):
        first, second = await client.post(ASK), await client.post(ASK)
        assert watched.told == [False, True]
        one, other = first.json(), second.json()
        assert one.pop("id") != other.pop("id")
        assert one == other
        assert set(second.headers) - set(first.headers) == {"age"}
        assert "; hit; " in second.headers["cache-status"]
        assert client.engine.calls == 1


@pytest.mark.parametrize("pieces", [1, 2, 5])
async def test_body_may_follow_its_headers_in_pieces(pieces: int) -> None:
    async with watching() as (client, watched):
        await client.post(ASK)
        connection = await client.connect()
        for number in range(3):
            head, data = request()
            connection.writer.write(head)
            step = -(-len(data) // pieces)
            for start in range(0, len(data), step):
                if pieces > 1:
                    await asyncio.sleep(0.001)
                connection.writer.write(data[start : start + step])
            head, _ = await answer_on(connection.reader)
            assert head.startswith(b"http/1.1 200 "), number
            assert b"; hit; " in head
        assert watched.told == [False, True, True, True]


async def test_late_body_is_answered_the_other_way_and_one_that_never_comes_gets_408() -> None:
    async with watching(server={"body_timeout_s": 0.3}) as (client, watched):
        await client.post(ASK)
        connection = await client.connect()
        head, data = request()
        connection.writer.write(head + data[:5])
        await asyncio.sleep(0.1)
        assert client.gateway.lifecycle.active_requests == 1  # it has a task by now
        connection.writer.write(data[5:])
        answer, _ = await answer_on(connection.reader)
        assert b"; hit; " in answer
        assert watched.told == [False]
        connection.writer.write(head + data[:5])
        answer, body = await answer_on(connection.reader)
        assert (answer[:12], body["error"]["code"]) == (b"http/1.1 408", "request_timeout")


async def test_caller_who_leaves_between_headers_and_body_leaves_nothing() -> None:
    async with watching() as (client, watched):
        connection = await client.open(ASK)
        await answer_on(connection.reader)
        connection.writer.write(request()[0])
        await asyncio.sleep(0.005)
        connection.abort()
        await asyncio.sleep(0.05)  # longer than a request is held
        assert client.gateway.lifecycle.active_requests == 0
        assert client.gateway.connections.stats().open == 0
        assert watched.told == [False]


async def test_requests_in_a_row_on_one_connection_are_answered_in_turn() -> None:
    async with watching() as (client, _):
        await client.post(ASK)
        connection = await client.connect()
        other = {**ASK, "seed": 7}
        connection.writer.write(b"".join(b"".join(request(body)) for body in (ASK, other, ASK, ASK)))
        told = [(await answer_on(connection.reader))[0] for _ in range(4)]
        assert ["; hit; " in head.decode() for head in told] == [True, False, True, True]


async def test_who_may_not_is_refused_as_ever_and_everything_is_counted_once() -> None:
    limits = {"subject": {"requests_per_minute": 3}}
    async with watching(auth=JWT, limits=limits) as (client, watched):
        ann = bearer(token())
        statuses = [(await client.post(ASK, headers=ann)).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        assert watched.told == [False, True, True, False, False]
        assert (await client.post(ASK, headers=bearer(token(scope="cache:read")))).status_code == 403
        assert (await client.post(ASK, headers=bearer("x" * 20))).status_code == 401
        assert (await client.post(ASK)).status_code == 401
        metrics = (await client.http.get("/metrics")).text
        for line in (
            'headrace_authentications_total{result="ok"} 6.0',
            'headrace_authentications_total{result="invalid_token"} 1.0',
            'headrace_limiter_decisions_total{by="local",decision="allowed"} 3.0',
            'headrace_limiter_decisions_total{by="local",decision="requests"} 2.0',
            'headrace_cache_answers_total{outcome="hit",tier="memory"} 2.0',
            'headrace_cache_answers_total{outcome="miss",tier=""} 1.0',
            'headrace_cache_lookups_total{result="miss",tier="memory"} 1.0',
            'headrace_requests_total{model="demo",operation="chat.completions",outcome="ok",variant=""} 3.0',
        ):
            assert line in metrics


async def test_known_request_is_not_read_again_where_redis_counts_and_keeps(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("headrace").setLevel(logging.INFO)
    read: list[bytes] = []
    monkeypatch.setattr("app.pipeline.parse", lambda body: read.append(body) or parse(body))
    cache = {"redis": {"url": redis.url}, "memory": {"enabled": False}}
    async with serving(auth=JWT, limits={"subject": {"requests_per_minute": 5}}, cache=cache) as client:
        await until(lambda: client.gateway.redis is not None and client.gateway.redis.is_up)
        ann = bearer(token(tenant="reader"))
        for times_read in (1, 2, 2):  # computed, found, known
            answer = await client.post(ASK, headers=ann)
            assert (answer.status_code, len(read)) == (200, times_read)
        assert "detail=redis" in answer.headers["cache-status"]
        cleared = await client.post({"all": True}, path="/v1/cache/clear", headers=bearer(token(scope="cache:admin")))
        assert cleared.json()["removed"]["redis"] == 1
        for times_read, told in ((3, "headrace; fwd=miss; stored"), (3, "headrace; hit; ")):
            answer = await client.post(ASK, headers=ann)
            assert len(read) == times_read
            assert answer.headers["cache-status"].startswith(told)
        assert client.engine.calls == 2
        assert (await client.post(ASK, headers=ann)).status_code == 429
        lines = [line for line in client.access_lines(capsys) if line["path"] == "/v1/chat/completions"]
        assert [line["model"] for line in lines] == ["demo"] * 6
        outcomes = [line.get("cache") for line in lines]
        assert outcomes == ["miss", "hit", "hit", "miss", "hit", None]


async def test_of_full_slots_the_tenants_are_told_first() -> None:
    limits = {"tenant": {"concurrent": 1}, "subject": {"concurrent": 1}}
    async with serving(Script("One.", first_token_s=2), auth=JWT, limits=limits) as client:
        waiting = await client.open(CHAT, headers=bearer(token()))
        async with asyncio.timeout(5):
            while client.engine.load.running < 1:
                await asyncio.sleep(0.005)
        refused = await client.post(ASK, headers=bearer(token()))
        assert (refused.status_code, "tenant" in refused.json()["error"]["message"]) == (429, True)
        waiting.abort()


async def test_answer_that_takes_long_to_compress_is_compressed_in_a_thread() -> None:
    text = "water" * GZIP_IN_THREAD_BYTES
    async with watching(script=Script(text), cache={"max_entry_bytes": 10 * len(text)}) as (client, watched):
        for accepted, at_once in (("gzip", [False, False]), ("identity", [True])):
            watched.told.clear()
            for _ in at_once:
                answer = await client.post(ASK, headers={"accept-encoding": accepted})
                assert answer.json()["choices"][0]["message"]["content"] == text
                assert answer.headers.get("content-encoding") == ("gzip" if accepted == "gzip" else None)
            assert watched.told == at_once
        metrics = (await client.http.get("/metrics")).text
        assert 'headrace_cache_lookups_total{result="hit",tier="memory"} 2.0' in metrics
