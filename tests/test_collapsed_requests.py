"""Identical requests in flight, and streams that are read on in, in one process and over several."""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.engines.scripted import Gate, Script, ScriptedEngine

from .conftest import CHAT, Client, Connection, events_of, serving, text_of, until
from .redis_server import RedisServer, free_port, redis_server
from .tokens import JWT_SETTINGS, bearer, token

ASK = {**CHAT, "temperature": 0}
TEXT = "One two three four five."
CLUSTER = {"scope": "cluster"}
JWT = {"mode": "jwt", "jwt": JWT_SETTINGS}


async def until_at_the_gate(client: Client, count: int) -> None:
    """Until so many requests run, and the engine waits."""
    await until(lambda: client.gateway.lifecycle.active_requests >= count)
    await asyncio.sleep(0.02)


async def finish(connection: Connection) -> tuple[int, str, str]:
    """Read an answer to its end: the status, what the cache says, the text."""
    head = (await connection.reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split(" ", 2)[1])
    told = re.search(r"cache-status: (.*)\r", head)
    cache_status = told[1] if told else ""
    length = re.search(r"content-length: ([0-9]+)", head)
    if length is not None:
        document = json.loads(await connection.reader.readexactly(int(length[1])))
        text = document["choices"][0]["message"]["content"] if status == 200 else document["error"]["code"]
        return status, cache_status, text
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        part = await connection.reader.read(65536)
        assert part, "the stream was cut"
        data += part
    events = events_of(data.decode())
    assert events[-1] == "[DONE]" or "error" in events[-1]
    return status, cache_status, text_of(events[:-1])


@pytest.mark.parametrize("streams", [100, 0, 50])
async def test_100_identical_requests_cause_one_engine_call(streams: int) -> None:
    gate = Gate()
    async with serving(Script(TEXT, gate=gate)) as client:
        connections = [await client.open({**ASK, "stream": number < streams}) for number in range(100)]
        await until_at_the_gate(client, 100)
        gate.open()
        answers = [await finish(connection) for connection in connections]
        assert {(status, text) for status, _, text in answers} == {(200, TEXT)}
        assert client.engine.calls == 1
        told = [cache_status for _, cache_status, _ in answers]
        assert told.count("headrace; fwd=miss; collapsed") == 99
        assert client.gateway.flights.stats().followers == 99
        assert "hit" in (await client.post(ASK)).headers["cache-status"]


@pytest.mark.parametrize("leader_streams", [True, False])
async def test_requests_are_collapsed_without_a_cache_too(leader_streams: bool) -> None:
    gate = Gate()
    async with serving(Script(TEXT, gate=gate), cache={"enabled": False}) as client:
        connections = [await client.open({**ASK, "stream": leader_streams})]
        await until(lambda: client.engine.calls == 1)
        connections += [await client.open({**ASK, "stream": number % 2 == 0}) for number in range(9)]
        alone = await client.open(CHAT)
        await until_at_the_gate(client, 11)
        gate.open()
        told = [await finish(connection) for connection in connections]
        assert [text for _, _, text in told] == [TEXT] * 10
        assert [cache for _, cache, _ in told].count("headrace; fwd=miss; collapsed") == 9
        assert [cache for _, cache, _ in told].count('headrace; fwd=bypass; detail="off"') == 1
        assert await finish(alone) == (200, 'headrace; fwd=bypass; detail="temperature>0"', TEXT)
        assert client.engine.calls == 2
        assert (await client.post(ASK)).headers["cache-status"] == 'headrace; fwd=bypass; detail="off"'
        assert client.engine.calls == 3


async def test_followers_get_the_tokens_as_they_come_from_the_first() -> None:
    gate = Gate()
    gate.release(2)
    async with serving(Script(TEXT, gate=gate)) as client, client.stream(ASK) as leader:
        lines = leader.aiter_lines()
        seen = ""
        while "two" not in seen:
            seen += await anext(lines)
        async with client.stream(ASK) as follower:
            assert follower.headers["cache-status"] == "headrace; fwd=miss; collapsed"
            others = follower.aiter_lines()
            text = ""
            for token_ in ("One", " two"):
                while f'"{token_}"' not in text:
                    text += await anext(others)
            gate.release(1)
            while '" three"' not in text:
                text += await anext(others)
            assert '" four"' not in text
            gate.open()
        ids = {re.search(r'"id":"([^"]+)"', found)[1] for found in (seen, text)}
        assert len(ids) == 2  # each has its own


@pytest.mark.parametrize("is_streaming_usual", [True, False])
async def test_stream_that_joins_a_whole_answer(is_streaming_usual: bool) -> None:
    gate = Gate()
    gate.release(5 if is_streaming_usual else 0)
    async with serving(Script(TEXT, gate=gate)) as client:
        if is_streaming_usual:
            await client.post({**ASK, "messages": [{"role": "user", "content": "Another."}], "stream": True})
        calls = client.engine.calls
        leader = await client.open(ASK)
        await until(lambda: client.engine.load.running == 1)
        follower = await client.open({**ASK, "stream": True})
        await until_at_the_gate(client, 2)
        gate.release(2)
        if is_streaming_usual:
            await follower.reader.readuntil(b'" two"')
        gate.open()
        if is_streaming_usual:
            assert b'" five."' in await follower.reader.readuntil(b"data: [DONE]\n\n")
        else:  # all of it in the end, from the one engine call
            assert await finish(follower) == (200, "headrace; fwd=miss; collapsed", TEXT)
        assert await finish(leader) == (200, "headrace; fwd=miss; stored", TEXT)
        assert client.engine.calls == calls + 1


async def test_leader_who_leaves_changes_nothing_for_the_followers() -> None:
    gate = Gate()
    async with serving(Script(TEXT, gate=gate)) as client:
        leader = await client.open({**ASK, "stream": True})
        await gate.arrived.wait()
        followers = [await client.open({**ASK, "stream": number % 2 == 0}) for number in range(6)]
        await until_at_the_gate(client, 7)
        gate.release(1)
        await leader.reader.readuntil(b"data: ")
        leader.abort()
        followers.pop().abort()
        await until(lambda: client.gateway.lifecycle.active_requests == 5)
        assert client.engine.load.running == 1
        gate.open()
        answers = [await finish(follower) for follower in followers]
        assert {(status, text) for status, _, text in answers} == {(200, TEXT)}
        assert client.engine.calls == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_last_one_who_leaves_takes_the_engines_work_along(stream: bool) -> None:
    gate = Gate()
    async with serving(Script(TEXT, gate=gate)) as client:
        connections = [await client.open({**ASK, "stream": stream}) for _ in range(10)]
        await until_at_the_gate(client, 10)
        for connection in connections:
            connection.abort()
        started = time.monotonic()
        await client.until_idle(1.0)
        assert time.monotonic() - started < 1.0
        assert client.engine.calls == 1
        gate.open()
        answer = await client.post(ASK)
        assert answer.headers["cache-status"] == "headrace; fwd=miss; stored"


@pytest.mark.parametrize("error_after", [0, 2])
async def test_failed_flight_gives_everybody_the_same_error_and_the_next_starts_anew(error_after: int) -> None:
    gate = Gate()
    async with serving(lambda call: Script(TEXT, gate=gate, error_after=error_after)) as client:
        whole = [await client.open(ASK) for _ in range(5)]
        streams = [await client.open({**ASK, "stream": True}) for _ in range(5)]
        await until_at_the_gate(client, 10)
        gate.open()
        assert {(await finish(connection))[::2] for connection in whole} == {(502, "engine_error")}
        for connection in streams:
            assert b"engine_error" in await connection.reader.readuntil(b"engine_error")
        assert client.engine.calls == 1
        assert (await client.post(ASK)).status_code == 502
        assert client.engine.calls == 2


async def test_tenants_never_share_a_flight_unless_the_scope_is_shared() -> None:
    for scope, calls in (("tenant", 2), ("shared", 1)):
        gate = Gate()
        async with serving(Script(TEXT, gate=gate), auth=JWT, cache={"scope": scope}) as client:
            headers = [bearer(token(tenant=name)) for name in ("acme", "other", "acme", "other")]
            connections = [await client.open({**ASK, "stream": True}, headers=header) for header in headers]
            await until_at_the_gate(client, 4)
            gate.open()
            assert {(await finish(connection))[2] for connection in connections} == {TEXT}
            assert client.engine.calls == calls


async def test_singleflight_can_be_off_and_undetermined_requests_do_not_share() -> None:
    for body, settings in ((ASK, {"singleflight": {"scope": "off"}}), (CHAT, {})):
        gate = Gate()
        async with serving(Script(TEXT, gate=gate), **settings) as client:
            connections = [await client.open({**body, "stream": True}) for _ in range(3)]
            await until_at_the_gate(client, 3)
            gate.open()
            for connection in connections:
                await finish(connection)
            assert client.engine.calls == 3


async def test_what_the_engine_did_is_charged_once() -> None:
    gate = Gate()
    limits = {"subject": {"tokens_per_minute": 1000}}
    async with serving(Script(TEXT, gate=gate), auth=JWT, limits=limits) as client:
        headers = bearer(token())
        connections = [await client.open({**ASK, "stream": number % 2 == 0}, headers=headers) for number in range(6)]
        await until_at_the_gate(client, 6)
        gate.release(2)
        await connections[0].reader.readuntil(b'" two"')
        connections[0].abort()  # pays for what was done so far, the next one for the rest
        await until(lambda: client.gateway.lifecycle.active_requests == 5)
        gate.open()
        for connection in connections[1:]:
            await finish(connection)
        left = (await client.post(ASK, headers=headers)).headers["x-ratelimit-remaining-tokens"]
        assert int(left) == 1000 - 8


# Reading on


async def read_some(client: Client, gate: Gate, count: int, headers: dict[str, str], body: Any = ASK) -> str:
    """Read so many events of a stream, and go away; return the last one's id."""
    connection = await client.open({**body, "stream": True}, headers=headers)
    gate.release(count)
    text = b""
    for _ in range(count):
        text += await connection.reader.readuntil(b"data: ")
        text += await connection.reader.readuntil(b"\n\n")
    connection.abort()
    return re.findall(rb"id: ([0-9a-fh.]+)\n", text)[-1].decode()


async def resume(client: Client, event_id: str, headers: dict[str, str], body: Any = ASK) -> Any:
    return await client.post({**body, "stream": True}, headers={**headers, "last-event-id": event_id})


@pytest.mark.parametrize("body", [ASK, CHAT])
async def test_stream_is_read_on_live_and_after_its_end(body: dict[str, Any]) -> None:
    gate = Gate()
    async with serving(Script(TEXT, gate=gate), auth=JWT, singleflight={"linger_s": 5}) as client:
        ann = bearer(token())
        event_id = await read_some(client, gate, 2, ann, body)
        reading = asyncio.create_task(resume(client, event_id, ann, body))
        await asyncio.sleep(0.1)
        assert not reading.done()
        gate.open()
        response = await reading
        assert (response.status_code, text_of(events_of(response.text))) == (200, " three four five.")
        assert response.text.endswith("data: [DONE]\n\n")
        late = await resume(client, event_id, ann, body)
        assert text_of(events_of(late.text)) == " three four five."
        assert client.engine.calls == 1


async def test_determined_stream_is_read_on_although_the_engine_was_stopped() -> None:
    gate = Gate()
    async with serving(Script(TEXT, gate=gate)) as client:
        event_id = await read_some(client, gate, 2, {})
        await client.until_idle()
        gate.open()
        response = await resume(client, event_id, {})
        assert text_of(events_of(response.text)) == " three four five."
        assert client.engine.calls == 2
        assert "hit" in (await client.post(ASK)).headers["cache-status"]


async def test_stored_answers_stream_is_read_on_too(client: Client) -> None:
    await client.post(ASK)
    text = (await client.post({**ASK, "stream": True})).text
    ids = re.findall(r"id: (h[0-9a-f]+\.[0-9]+)\n", text)
    whole = text_of(events_of(text))
    for place, event_id in enumerate(ids):
        rest = await resume(client, event_id, {})
        begun = "".join(text_of([event]) for event in events_of(text)[: place + 1])
        assert begun + text_of(events_of(rest.text)) == whole
    assert client.engine.calls == 1


async def test_nobody_else_reads_on() -> None:
    gate = Gate()
    async with serving(Script(TEXT, gate=gate), auth=JWT, singleflight={"linger_s": 5}) as client:
        event_id = await read_some(client, gate, 2, bearer(token()))
        gate.open()
        await client.until_idle()
        for caller in (token(sub="bob", tenant="ann"), token(tenant="other"), token(sub="bob")):
            response = await resume(client, event_id, bearer(caller))
            assert (response.status_code, response.json()["error"]["code"]) == (404, "stream_not_found")
        other_body = {**ASK, "seed": 3}
        assert (await resume(client, event_id, bearer(token()), other_body)).status_code == 404
        for rubbish in ("", ".", "x.1", "0" * 16 + ".0", "h.1", event_id + "9"):
            assert (await resume(client, rubbish, bearer(token()))).status_code == 404
        assert (await resume(client, event_id, bearer(token()))).status_code == 200


# Several replicas


@asynccontextmanager
async def replicas(count: int, url: str, script: Any, **settings: Any) -> AsyncIterator[list[Client]]:
    """Gateways that share a Redis, each with an engine of its own."""
    cache = {"redis": {"url": url}, **settings.pop("cache", {})}
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(serving(script, cache=cache, singleflight=CLUSTER, **settings))
            for _ in range(count)
        ]
        for client in clients:
            await until(lambda client=client: client.gateway.redis.is_up)
        yield clients


def calls_of(clients: list[Client]) -> int:
    return sum(client.engine.calls for client in clients)


async def test_100_identical_requests_over_three_replicas_cause_one_engine_call(redis: RedisServer) -> None:
    gate = Gate()
    async with replicas(3, redis.url, Script(TEXT, gate=gate)) as clients:
        body = {**ASK, "seed": time.time_ns() % 10**9}
        connections = [await clients[number % 3].open({**body, "stream": number % 2 == 0}) for number in range(100)]
        await until(lambda: sum(client.gateway.lifecycle.active_requests for client in clients) == 100)
        gate.release(1)
        streams = connections[::2]
        for connection in streams[:3]:  # of each replica: tokens come as they are made
            await connection.reader.readuntil(b'"One"')
        gate.open()
        for connection in streams[:3]:
            await connection.reader.readuntil(b"data: [DONE]\n\n")
        answers = [await finish(connection) for connection in connections if connection not in streams[:3]]
        assert {(status, text) for status, _, text in answers} == {(200, TEXT)}
        assert calls_of(clients) == 1


async def test_error_at_one_replica_is_everybodys(redis: RedisServer) -> None:
    gate = Gate()
    async with replicas(2, redis.url, Script(TEXT, gate=gate, error_after=1)) as clients:
        body = {**ASK, "seed": time.time_ns() % 10**9}
        connections = [await client.open(body) for client in clients]
        await until(lambda: all(client.gateway.lifecycle.active_requests for client in clients))
        await asyncio.sleep(0.1)
        gate.open()
        assert {(await finish(connection))[::2] for connection in connections} == {(502, "engine_error")}
        assert calls_of(clients) == 1


@pytest.mark.slow
async def test_work_at_one_replica_ends_when_nobody_reads_at_any(redis: RedisServer) -> None:
    gate = Gate()
    async with replicas(2, redis.url, Script(TEXT, gate=gate)) as clients:
        body = {**ASK, "seed": time.time_ns() % 10**9, "stream": True}
        leader = await clients[0].open(body)
        await gate.arrived.wait()
        follower = await clients[1].open(body)
        gate.release(1)
        await follower.reader.readuntil(b'"One"')
        leader.abort()
        await asyncio.sleep(1.0)
        assert clients[0].engine.load.running == 1
        follower.abort()
        await clients[0].until_idle(2.5)
        assert calls_of(clients) == 1


async def test_stream_is_read_on_through_another_replica(redis: RedisServer) -> None:
    gate = Gate()
    async with replicas(2, redis.url, Script(TEXT, gate=gate), auth=JWT) as (one, two):
        body = {**ASK, "seed": time.time_ns() % 10**9}
        ann, bob = bearer(token()), bearer(token(sub="bob"))
        follower = await one.open({**body, "stream": True}, headers=ann)  # keeps the flight in the air
        await gate.arrived.wait()
        event_id = await read_some(one, gate, 2, ann, body)
        reading = asyncio.create_task(resume(two, event_id, ann, body))
        await asyncio.sleep(0.3)
        assert not reading.done()
        gate.open()
        assert text_of(events_of((await reading).text)) == " three four five."
        await finish(follower)
        late = await resume(two, event_id, ann, body)
        assert text_of(events_of(late.text)) == " three four five."
        assert (await resume(two, event_id, bob, body)).status_code == 404
        assert calls_of([one, two]) == 1


async def test_without_redis_each_replica_has_its_own_flights() -> None:
    with redis_server() as server:
        gate = Gate()
        async with replicas(2, server.url, Script(TEXT, gate=gate)) as clients:
            server.stop()
            await until(lambda: not any(client.gateway.redis.is_up for client in clients))
            connections = [await clients[number % 2].open(ASK) for number in range(10)]
            await until(lambda: sum(client.gateway.lifecycle.active_requests for client in clients) == 10)
            gate.open()
            assert {(await finish(connection))[2] for connection in connections} == {TEXT}
            assert [client.engine.calls for client in clients] == [1, 1]


async def test_redis_that_goes_in_the_middle_of_a_flight_costs_nobody_the_answer() -> None:
    with redis_server() as server:
        gate = Gate()
        async with replicas(2, server.url, Script(TEXT, gate=gate)) as clients:
            connections = [await clients[number % 2].open({**ASK, "stream": True}) for number in range(6)]
            gate.release(1)
            for connection in connections:
                await connection.reader.readuntil(b'"One"')
            server.stop()
            gate.open()
            for connection in connections:
                rest = await connection.reader.readuntil(b"[DONE]\n\n")
                assert [word for word in TEXT.split() if word.encode() in rest] == TEXT.split()[1:]


CONFIG = """
[server]
port = {port}
drain = {{ settle_s = 0, drain_s = 1 }}
[auth]
mode = "off"
[cache.redis]
url = "{url}"
[singleflight]
scope = "cluster"
[[pools]]
name = "demo"
engine = "scripted"
scripted = {{ text = "{text}", token_s = 0.1 }}
"""


@pytest.mark.slow
async def test_follower_takes_over_when_the_leaders_process_is_killed(redis: RedisServer, tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(40))
    port = free_port()
    config = tmp_path / "headrace.toml"
    config.write_text(CONFIG.format(port=port, url=redis.url, text=text))
    command = [sys.executable, "-m", "app", "serve", "--config", str(config)]
    leader = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    settings = {"cache": {"redis": {"url": redis.url}}, "singleflight": CLUSTER}
    script = Script(text, token_s=0.01)
    try:
        # The same settings of the pool, so that the key is the same.
        pools = [{"name": "demo", "engine": "scripted", "scripted": {"text": text, "token_s": 0.1}}]
        async with serving(engine=ScriptedEngine(script), pools=pools, **settings) as client:
            await until(lambda: client.gateway.redis.is_up)
            reader, writer = await until_connected(port)
            data = json.dumps({**ASK, "stream": True}).encode()
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data))
            writer.write(data)
            await reader.readuntil(b'"word0"')
            follower = await client.open({**ASK, "stream": True})
            await follower.reader.readuntil(b'" word3"')
            assert client.engine.calls == 0
            leader.kill()
            killed = time.monotonic()
            rest = await follower.reader.readuntil(b"data: [DONE]\n\n")
            took_s = time.monotonic() - killed
            assert client.engine.calls == 1
            said = re.findall(rb'"content":"( word[0-9]+)"', rest)
            assert b"".join(said).split() == [word.encode() for word in text.split()[4:]]
            assert took_s < 3 + 40 * 0.012
            writer.close()
    finally:
        if leader.returncode is None:
            leader.kill()
        await leader.wait()


async def until_connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(30):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.write(b"GET /health/ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if answer.startswith(b"HTTP/1.1 200") and b'"redis":{"status":"ok"' in answer:
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.1)
