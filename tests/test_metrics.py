"""What is counted of requests, what their answers say of the time that they took, and that nobody can make it grow."""

import asyncio
import json
from typing import Any

import pytest

from app.engines.scripted import Gate, Script, ScriptedEngine
from routing.engine import Load

from .conftest import CHAT, Client, Connection, serving, until
from .metrics_text import Samples, samples
from .tokens import JWT_SETTINGS, bearer, token

ASK = {**CHAT, "temperature": 0}
REQUESTS, TOKENS = "headrace_requests_total", "headrace_tokens_total"
DURATION, GATEWAY = "headrace_request_duration_seconds", "headrace_gateway_duration_seconds"
TTFT, BETWEEN = "headrace_time_to_first_token_seconds", "headrace_time_between_tokens_seconds"
WAIT_S = 0.2
NEARLY_S = WAIT_S - 0.02  # clocks differ, and timers may be early by a tick


async def test_requests_tokens_and_outcomes(client: Client) -> None:
    await client.post()
    await client.post({**CHAT, "stream": True})
    await client.post({**CHAT, "model": "junk"})
    await client.until_idle()
    told = await samples(client.http)
    label = {"model": "demo", "operation": "chat.completions", "variant": ""}
    assert told.total(REQUESTS, **label, outcome="ok") == 2
    assert told.total(REQUESTS, model="", outcome="refused") == 1
    assert told.total(TOKENS, **label, kind="completion") == 10
    assert told.total(f"{TTFT}_count", **label) == 1
    assert told.total("headrace_engine_up", pool="demo") == 1


def waits(told: Samples, before: Samples | None = None) -> float:
    """Seconds of requests that were not the gateway's own part."""
    seconds = told.total(f"{DURATION}_sum") - told.total(f"{GATEWAY}_sum")
    return seconds if before is None else seconds - waits(before)


@pytest.mark.parametrize("stream", [False, True])
async def test_wait_for_the_engine_is_not_the_gateways(stream: bool) -> None:
    async with serving(Script("One two.", first_token_s=WAIT_S)) as client:
        await client.post({**ASK, "stream": stream})
        told = await samples(client.http)
        assert waits(told) >= NEARLY_S
        assert told.total(f"{GATEWAY}_sum") > 0
        await client.post({**ASK, "stream": stream})  # from the cache
        again = await samples(client.http)
    assert again.total(f"{GATEWAY}_count") == 2
    # All of that is the gateway's, but for a stream's events after the first.
    assert waits(again, told) < (again.total(f"{DURATION}_sum") - told.total(f"{DURATION}_sum")) * (
        1 if stream else 0.01
    )


async def test_wait_in_the_queue_is_not_the_gateways() -> None:
    pool = {"name": "demo", "engine": "scripted", "admission": {"max_in_flight": 1}}
    async with serving(Script("One.", first_token_s=WAIT_S), pools=[pool]) as client:
        answers = await asyncio.gather(client.post(), client.post())
        assert waits(await samples(client.http)) >= 3 * NEARLY_S
    steps = [timing(answer.headers["server-timing"]) for answer in answers]
    assert sorted("queue" in of_one for of_one in steps) == [False, True]
    assert max(of_one.get("queue", 0) for of_one in steps) >= NEARLY_S * 1000


async def test_wait_for_the_body_is_not_the_gateways(client: Client) -> None:
    body = json.dumps(CHAT).encode()
    connection = await client.connect()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.writer.write(head.encode() + body[:20])
    await asyncio.sleep(WAIT_S)
    connection.writer.write(body[20:])
    answer = await connection.reader.readuntil(b"\r\n\r\n")
    assert b"body;dur=" in answer
    assert waits(await samples(client.http)) >= NEARLY_S


async def test_followers_wait_is_not_the_gateways() -> None:
    gate = Gate()
    async with serving(Script("One.", gate=gate)) as client:
        leader = asyncio.create_task(client.post(ASK))
        await gate.arrived.wait()
        follower = asyncio.create_task(client.post(ASK))
        await until(lambda: client.gateway.flights.stats().followers == 1)
        await asyncio.sleep(WAIT_S)
        gate.open()
        steps = timing((await follower).headers["server-timing"])
        await leader
        assert waits(await samples(client.http)) >= 2 * NEARLY_S
    assert "engine" not in steps
    assert steps["flight"] >= NEARLY_S * 1000


async def test_time_between_tokens_is_that_between_events() -> None:
    async with serving(Script("One two three four five.", token_s=0.05)) as client:
        await client.post({**CHAT, "stream": True})
        await client.post(CHAT)  # has no events
        told = await samples(client.http)
    assert told.total(f"{BETWEEN}_count", model="demo") == 5  # after the first: four words, and the end
    assert told.total(f"{BETWEEN}_sum", model="demo") >= 4 * 0.045
    assert told.total(f"{BETWEEN}_bucket", model="demo", le="0.03") == 1  # the end comes with the last word


async def test_tokens_that_no_engine_worked_on_are_told_apart() -> None:
    gate = Gate()
    async with serving(Script("One two three four five.", gate=gate)) as client:
        leader = asyncio.create_task(client.post(ASK))
        await gate.arrived.wait()
        follower = asyncio.create_task(client.post({**ASK, "stream": True}))
        await until(lambda: client.gateway.flights.stats().followers == 1)
        gate.open()
        await asyncio.gather(leader, follower)
        await client.post(ASK)
        told = await samples(client.http)
    assert told.total(TOKENS, kind="prompt") == 3
    assert told.total(TOKENS, kind="completion") == 5
    assert told.total(TOKENS, kind="saved_by_singleflight") == 8
    assert told.total(TOKENS, kind="saved_by_cache") == 8


# Tenants


async def ask_as(client: Client, tenant: str, body: Any = CHAT) -> int:
    return (await client.post(body, headers=bearer(token(tenant=tenant)))).status_code


async def test_tenants_are_told_apart_as_far_as_is_allowed() -> None:
    async with serving(auth={"jwt": JWT_SETTINGS}, monitoring={"max_tenants": 2}) as client:
        for tenant in ("acme", "zeta", "umbrella", "hooli", "acme"):
            assert await ask_as(client, tenant) == 200
        told = await samples(client.http)
    outcomes = {
        sample.labels["tenant"]: sample.value for sample in told if sample.name == "headrace_tenant_requests_total"
    }
    assert outcomes == {"acme": 2, "zeta": 1, "other": 2}
    assert told.total("headrace_tenant_tokens_total", tenant="other") == 16


async def test_tenants_at_their_limit_and_what_the_cache_saves_them() -> None:
    limits = {"tenant": {"requests_per_minute": 2}}
    async with serving(auth={"jwt": JWT_SETTINGS}, limits=limits) as client:
        assert [await ask_as(client, "acme", ASK) for _ in range(3)] == [200, 200, 429]
        told = await samples(client.http)
    assert told.total("headrace_tenant_requests_total", tenant="acme", outcome="ok") == 2
    assert told.total("headrace_tenant_requests_total", tenant="acme", outcome="limited") == 1
    assert told.total("headrace_tenant_tokens_total", tenant="acme") == 8


async def test_tenants_can_be_left_out() -> None:
    async with serving(auth={"jwt": JWT_SETTINGS}, monitoring={"max_tenants": 0}) as client:
        assert await ask_as(client, "acme") == 200
        assert "acme" not in (await client.http.get("/metrics")).text


# Engines


async def test_each_engine_of_the_process_tells_of_itself() -> None:
    engines = {"one": ScriptedEngine(Script("One.")), "two": ScriptedEngine(Script("Two."))}
    pools = [{"name": name, "engine": "scripted"} for name in engines]
    models = [{"name": name, "pool": name} for name in engines]
    async with serving(engines=engines, pools=pools, models=models) as client:
        engines["one"].load = Load(3, 2, 0.25, 100, 40, 1, 10, 6)
        told = await samples(client.http)
        of_one = {
            sample.name.removeprefix("headrace_engine_"): sample.value
            for sample in told
            if sample.name.startswith("headrace_engine_") and sample.labels == {"pool": "one"}
        }
        assert of_one == {
            "up": 1,
            "running": 3,
            "waiting": 2,
            "restarts_total": 0,
            "kv_cache_usage_ratio": 0.25,
            "prefix_cache_queries_total": 100,
            "prefix_cache_hits_total": 40,
            "preemptions_total": 1,
            "draft_tokens_total": 10,
            "accepted_tokens_total": 6,
        }
        assert told.total("headrace_engine_running", pool="two") == 0
        assert told.total("headrace_ready") == 1
        for engine in client.gateway.engines.values():
            engine._enter("waiting")
        assert (await samples(client.http)).total("headrace_ready") == 0


# Nobody can make it grow


async def exchange(connection: Connection, method: str, path: str, body: bytes = b"") -> None:
    request = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.writer.write(request.encode() + body)
    head = (await connection.reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 40"), head
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await connection.reader.readexactly(length)


async def send_junk(client: Client, numbers: range) -> None:
    """Of each number a model, two paths, and a variant."""
    connection = await client.connect()
    for number in numbers:
        body = json.dumps({**CHAT, "model": f"junk-{number}"}).encode()
        await exchange(connection, "POST", "/v1/chat/completions", body)
        await exchange(connection, "GET", f"/junk-{number}")
        await exchange(connection, "GET", f"/v1/models/junk-{number}")


@pytest.mark.slow
async def test_ten_thousand_junk_models_and_paths_add_not_one_series(client: Client) -> None:
    async def series() -> set[Any]:
        return (await samples(client.http)).series()

    await send_junk(client, range(2))  # adds the series for something unknown
    before = await series()
    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(send_junk(client, range(1000 * number + 2, 1000 * (number + 1) + 2)))
    assert await series() == before
    assert (await samples(client.http)).total(REQUESTS, outcome="refused", model="") == 10_002


# Server-Timing


def timing(header: str) -> dict[str, float]:
    """Milliseconds by the step's name, in the order of the steps."""
    parts = [part.split(";dur=") for part in header.split(", ")]
    return {name: float(milliseconds) for name, milliseconds in parts}


def check_sum(steps: dict[str, float]) -> None:
    assert all(milliseconds >= 0 for milliseconds in steps.values())
    assert sum(steps.values()) - steps["total"] <= steps["total"] + 0.01  # each is rounded


async def test_answers_say_what_took_how_long() -> None:
    async with serving(Script("One two.", first_token_s=WAIT_S)) as client:
        miss = timing((await client.post(ASK)).headers["server-timing"])
        first_hit = timing((await client.post(ASK)).headers["server-timing"])
        hit = timing((await client.post(ASK)).headers["server-timing"])
        stream = timing((await client.post({**CHAT, "stream": True})).headers["server-timing"])
        stream_hit = timing((await client.post({**ASK, "stream": True})).headers["server-timing"])
        refused = timing((await client.post({**CHAT, "n": 0})).headers["server-timing"])
    assert [*miss] == ["auth", "route", "key", "lookup", "limit", "dispatch", "engine", "total"]
    assert [*first_hit] == [*stream_hit] == ["auth", "route", "key", "lookup", "limit", "total"]
    assert [*hit] == ["auth", "key", "lookup", "limit", "total"]  # what was understood once is known
    assert [*stream] == ["auth", "route", "limit", "dispatch", "engine", "total"]
    assert [*refused] == ["auth", "limit", "total"]
    assert min(miss["engine"], stream["engine"]) >= NEARLY_S * 1000
    for steps in (miss, first_hit, hit, stream, stream_hit, refused):
        check_sum(steps)
