"""Limits as callers meet them, and what becomes of them when Redis fails."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from openai import AsyncOpenAI, RateLimitError

from app.engines.scripted import Gate, Script

from .conftest import CHAT, Client, Connection, serving, until
from .redis_server import RedisServer, redis_server, slow_proxy
from .tokens import JWT_SETTINGS, bearer, token

AUTH = {"jwt": JWT_SETTINGS}
PROMPT_TOKENS = 3  # of CHAT, to the scripted engine
ANSWER_TOKENS = 5


def limits(redis_url: str | None = None, **quotas: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"auth": AUTH, "limits": {"time_budget_ms": 2000, **quotas}}
    return settings | ({"cache": {"redis": {"url": redis_url}}} if redis_url else {})


async def remaining(client: Client, kind: str, headers: dict[str, str]) -> int:
    """As the headers of one more request say, which is refused for its body and costs no tokens."""
    response = await client.post({**CHAT, "n": 0}, headers=headers)
    assert response.status_code == 400
    return int(response.headers[f"x-ratelimit-remaining-{kind}"])


async def open_stream(client: Client, headers: dict[str, str], **more: Any) -> Connection:
    connection = await client.open({**CHAT, "stream": True, **more}, headers=headers)
    return connection


async def test_limit_is_told_in_openais_form_and_headers() -> None:
    async with serving(**limits(tenant={"requests_per_minute": 2, "tokens_per_minute": 1000})) as client:
        headers = bearer(token())
        whole = await client.post(headers=headers)
        assert whole.headers["x-ratelimit-limit-requests"] == "2"
        assert whole.headers["x-ratelimit-remaining-requests"] == "1"
        assert re.fullmatch(r"(60|59)s", whole.headers["x-ratelimit-reset-requests"])
        assert whole.headers["x-ratelimit-limit-tokens"] == "1000"
        assert whole.headers["x-ratelimit-remaining-tokens"] == str(1000 - PROMPT_TOKENS - ANSWER_TOKENS)
        streamed = await client.post({**CHAT, "stream": True}, headers=headers)
        assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
        refused = await client.post(headers=headers)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "requests")
        assert error["message"].startswith(
            "Rate limit reached for this tenant on requests per minute: limit 2, used 2."
        )
        assert 55 <= int(refused.headers["retry-after"]) <= 60
        assert f"try again in {refused.headers['retry-after']}s." in error["message"]
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await client.post(headers=bearer(token(sub="eve")))).status_code == 200
        assert client.engine.calls == 3
        text = (await client.http.get("/metrics")).text
        assert 'headrace_limiter_decisions_total{by="local",decision="requests"} 1.0' in text
        assert 'headrace_limiter_decisions_total{by="local",decision="allowed"} 3.0' in text


async def test_openai_sdk_sees_a_rate_limit_error() -> None:
    async with serving(**limits(subject={"requests_per_minute": 0})) as client:
        url = f"{client.gateway.server.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=token(), max_retries=0) as openai:
            with pytest.raises(RateLimitError) as caught:
                await openai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
            assert caught.value.code == "rate_limit_exceeded"


async def test_without_limits_there_are_no_headers_of_them() -> None:
    async with serving(auth=AUTH) as client:
        assert not any("ratelimit" in name for name in (await client.post(headers=bearer(token()))).headers)


async def test_tier_and_claims_of_the_token_count() -> None:
    tiers = [{"name": "gold", "tenant": {"requests_per_minute": 7}}]
    async with serving(**limits(tenant={"requests_per_minute": 5}, tiers=tiers)) as client:

        async def limit(kind: str, **claims: Any) -> str:
            return (await client.post(headers=bearer(token(**claims)))).headers[f"x-ratelimit-limit-{kind}"]

        assert await limit("requests") == "5"
        assert await limit("requests", tier="gold") == "7"
        assert await limit("requests", tier="tin") == "5"
        assert await limit("requests", limits={"requests_per_minute": 1}, sub="low") == "1"
        assert await limit("tokens", limits={"tokens_per_minute": 50}) == "50"


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_answer_are_charged(stream: bool) -> None:
    async with serving(**limits(subject={"tokens_per_minute": 100})) as client:
        headers = bearer(token())
        await client.post({**CHAT, "stream": stream}, headers=headers)
        assert await remaining(client, "tokens", headers) == 100 - PROMPT_TOKENS - ANSWER_TOKENS
        for _ in range(12):
            await client.post({**CHAT, "stream": stream}, headers=headers)
        refused = await client.post({**CHAT, "stream": stream}, headers=headers)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (429, "tokens")
        assert "used 104" in error["message"]


async def test_stream_that_is_left_is_charged_for_what_it_had() -> None:
    gate = Gate()
    async with serving(
        Script("One two three four five.", gate=gate), **limits(tenant={"tokens_per_minute": 100})
    ) as client:
        headers = bearer(token())
        gate.release(2)
        connection = await open_stream(client, headers)
        await connection.reader.readuntil(b'"content":" two"')
        connection.abort()
        await client.until_idle()
        assert await remaining(client, "tokens", headers) == 100 - PROMPT_TOKENS - 2
        connection = await open_stream(client, headers)  # left before its first token: the prompt was worked on
        await until(lambda: client.engine.load.running)
        connection.abort()
        await client.until_idle()
        assert await remaining(client, "tokens", headers) == 100 - 2 * PROMPT_TOKENS - 2


async def test_failed_stream_is_charged_for_what_it_had() -> None:
    async with serving(Script("One two three.", error_after=2), **limits(tenant={"tokens_per_minute": 100})) as client:
        headers = bearer(token())
        assert '"engine_error"' in (await client.post({**CHAT, "stream": True}, headers=headers)).text
        assert await remaining(client, "tokens", headers) == 100 - PROMPT_TOKENS - 2


@pytest.fixture(params=["local", "shared"])
async def one_slot(request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[tuple[Client, Gate]]:
    """A gateway whose callers have one concurrent request, and the gate of its answers."""
    gate = Gate()
    url = redis.url if request.param == "shared" else None
    script = Script("One two three four five.", gate=gate)
    async with serving(script, server={"body_timeout_s": 0.2}, **limits(url, subject={"concurrent": 1})) as client:
        if url:
            await until(lambda: client.gateway.redis.is_up)
        yield client, gate


async def test_slot_comes_back_whatever_ends_the_request(one_slot: tuple[Client, Gate]) -> None:
    client, gate = one_slot
    headers = bearer(token())

    async def is_busy() -> bool:
        return (await client.post({**CHAT, "n": 0}, headers=headers)).status_code == 429

    async def expect_free() -> None:
        # An abort takes a moment to be noticed; the slot is free as soon as it is.
        await client.until_idle()
        async with asyncio.timeout(1):
            while await is_busy():
                await asyncio.sleep(0.01)

    # A stream and a whole answer that are left, before their first token and after it.
    for stream in (True, False):
        for tokens in (0, 2):
            gate.release(tokens)
            connection = await open_stream(client, headers, stream=stream)
            await until(lambda: client.engine.load.running)
            refused = await client.post(headers=headers)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (429, "concurrency_limit_exceeded")
            assert refused.headers["retry-after"] == "1"
            connection.abort()
            await expect_free()
    # A refused body, one that never comes, one that is not read, and an unknown model.
    for body in (b"{", b'{"model": "demo"}', b'{"model": "nope", "messages": [{}]}'):
        assert (await client.http.post("/v1/chat/completions", content=body, headers=headers)).status_code in (400, 404)
        await expect_free()
    connection = await client.connect()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n"
    connection.writer.write(f"{head}authorization: {headers['authorization']}\r\n\r\n".encode())
    assert (await connection.reader.readline()).startswith(b"HTTP/1.1 408 ")
    await expect_free()
    # One after the other: who has read the last byte may go on at once.
    gate.open()
    for number in range(20):
        assert (await client.post({**CHAT, "stream": number % 2 == 0}, headers=headers)).status_code == 200


async def test_slot_comes_back_when_the_engine_fails_or_dies(redis: RedisServer) -> None:
    for script in (Script("One two.", error_after=1), Script("One two.", error_after=0)):
        async with serving(script, **limits(redis.url, subject={"concurrent": 1})) as client:
            await until(lambda: client.gateway.redis.is_up)
            headers = bearer(token(sub=f"s{script.error_after}"))
            for stream in (True, False, True):
                response = await client.post({**CHAT, "stream": stream}, headers=headers)
                assert response.status_code == (502 if not (stream and script.error_after) else 200)


async def test_many_aborts_leave_no_slot(one_slot: tuple[Client, Gate]) -> None:
    client, gate = one_slot
    for _ in range(10):
        people = [bearer(token(sub=f"s{number}")) for number in range(30)]
        connections = [await open_stream(client, headers) for headers in people]
        await asyncio.sleep(0.02)
        for connection in connections:
            connection.abort()
        await client.until_idle(5)
    gate.open()
    for number in range(30):
        assert (await client.post(headers=bearer(token(sub=f"s{number}")))).status_code == 200
    assert (await client.http.get("/metrics")).text.count("headrace_limiter_slots 0.0") == 1


# Redis


@pytest.mark.slow
async def test_two_gateways_enforce_one_limit_and_each_its_own_while_redis_is_gone(redis: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        quotas = limits(redis.url, tenant={"requests_per_minute": 6}, time_budget_ms=100)
        gateways = [await stack.enter_async_context(serving(**quotas)) for _ in range(2)]
        await until(lambda: all(client.gateway.redis.is_up for client in gateways))

        async def statuses(tenant: str, count: int) -> list[list[int]]:
            headers = bearer(token(tenant=tenant))
            return [[(await client.post(headers=headers)).status_code for _ in range(count)] for client in gateways]

        async def component() -> dict[str, Any]:
            body = (await gateways[0].http.get("/health/ready")).json()
            return {"overall": body["status"], **body["components"]["redis"]}

        assert sum(statuses.count(200) for statuses in await statuses("healthy", 5)) == 6
        assert (await component())["overall"] == "ok"

        redis.freeze()
        # Some of these find out that Redis hangs: each loses the budget at most, and all are answered.
        async with asyncio.timeout(5):
            assert await statuses("frozen", 8) == [[200] * 6 + [429] * 2] * 2
        seen = await component()
        assert (seen["overall"], seen["status"], seen["is_up"]) == ("degraded", "down", False)
        text = (await gateways[0].http.get("/metrics")).text
        assert "headrace_redis_up 0.0" in text
        assert 'headrace_limiter_decisions_total{by="local",decision="requests"} 2.0' in text
        assert not re.search(r"headrace_redis_failures_total 0\.0", text)

        redis.thaw()
        await until(lambda: all(client.gateway.redis.is_up for client in gateways))
        assert sum(statuses.count(200) for statuses in await statuses("thawed", 5)) == 6

        redis.stop()
        await until(lambda: not any(client.gateway.redis.is_up for client in gateways))
        assert await statuses("stopped", 8) == [[200] * 6 + [429] * 2] * 2
        redis.start()
        await until(lambda: all(client.gateway.redis.is_up for client in gateways))
        assert sum(statuses.count(200) for statuses in await statuses("restarted", 5)) == 6
        assert (await component())["overall"] == "ok"


async def test_redis_killed_under_traffic_costs_no_request(redis: RedisServer) -> None:
    async with serving(**limits(redis.url, tenant={"requests_per_minute": 100_000})) as client:
        await until(lambda: client.gateway.redis.is_up)
        headers = bearer(token())

        async def ask(count: int) -> set[int]:
            return {(await client.post(headers=headers)).status_code for _ in range(count)}

        callers = [asyncio.create_task(ask(40)) for _ in range(5)]
        await asyncio.sleep(0.05)
        redis.stop()
        assert await asyncio.gather(*callers) == [{200}] * 5
        redis.start()


async def test_redis_that_is_down_at_the_start_is_found_later() -> None:
    server = RedisServer()
    async with serving(**limits(server.url, tenant={"requests_per_minute": 100})) as client:
        assert (await client.post(headers=bearer(token()))).status_code == 200
        health = (await client.http.get("/health/ready")).json()
        assert (health["status"], health["components"]["redis"]["status"]) == ("degraded", "down")
        server.start()
        try:
            await until(lambda: client.gateway.redis.is_up)
            assert (await client.post(headers=bearer(token()))).headers["x-ratelimit-remaining-requests"] == "99"
        finally:
            server.stop()


@pytest.mark.slow
async def test_slow_redis_is_left_alone_until_it_is_quick_again(redis: RedisServer) -> None:
    async with slow_proxy(redis.port) as (proxy, url):
        quotas = limits(url, tenant={"requests_per_minute": 1000}, time_budget_ms=50)
        async with serving(**quotas) as client:
            await until(lambda: client.gateway.redis.is_up)
            headers = bearer(token(tenant="slow"))
            proxy.delay_s = 0.4
            for _ in range(10):
                assert (await client.post(headers=headers)).status_code == 200
            assert not client.gateway.redis.is_up
            assert client.gateway.redis.status().failures == 3
            await asyncio.sleep(2.5)  # checks are answered meanwhile, but not in time
            assert not client.gateway.redis.is_up
            proxy.delay_s = 0.0
            await until(lambda: client.gateway.redis.is_up)


async def test_wrong_password_is_a_failure_like_any_other() -> None:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(redis_server("--requirepass", "right"))
        url = server.url.replace("redis://", "redis://:canary-password@")
        client = await stack.enter_async_context(serving(**limits(url, tenant={"requests_per_minute": 1})))
        assert (await client.post(headers=bearer(token()))).status_code == 200
        assert (await client.post(headers=bearer(token()))).status_code == 429
        await until(lambda: client.gateway.redis.status().last_error != "not reached yet")
        body = (await client.http.get("/health")).text
        assert '"is_up":false' in body
        assert "canary" not in body
