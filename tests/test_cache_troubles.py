"""Redis in every kind of trouble: nobody waits for it longer than the budget, nobody fails for it, and it heals."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from app.engines.scripted import Script

from .conftest import CHAT, Client, serving, until
from .redis_server import RedisServer, ask, redis_cluster, redis_sentinels, redis_server, slow_proxy

BUDGET_S = 0.02
# What else a request takes here, in a busy test process.
ELSE_S = 0.25


def question(number: int | str) -> dict[str, Any]:
    return {**CHAT, "temperature": 0, "messages": [{"role": "user", "content": f"Question {number}?"}]}


@asynccontextmanager
async def cached(url: str, redis: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Client]:
    """A gateway that has Redis, and no memory, for a cache."""
    cache = {"redis": {"url": url, **(redis or {})}, "memory": {"enabled": False}}
    async with serving(Script("One two."), cache=cache, **settings) as client:
        yield client


async def is_cached(client: Client, number: int | str) -> bool:
    return "detail=redis" in (await client.post(question(number))).headers["cache-status"]


async def is_healthy(client: Client) -> bool:
    health = (await client.http.get("/health")).json()
    assert health["status"] == ("ok" if health["components"]["redis"]["status"] == "ok" else "degraded")
    return health["status"] == "ok"


async def serves_within_budget(client: Client, name: str) -> None:
    for number in range(8):
        started = time.monotonic()
        response = await client.post(question(f"{name} {number}"))
        took_s = time.monotonic() - started
        assert response.status_code == 200
        assert took_s < BUDGET_S + ELSE_S


async def heals(client: Client) -> None:
    async with asyncio.timeout(10):
        while not await is_healthy(client):
            await asyncio.sleep(0.05)
    name = f"healed {time.time_ns()}"
    assert not await is_cached(client, name)
    await until_cached(client, name)


async def until_cached(client: Client, number: int | str) -> None:
    async with asyncio.timeout(5):
        while not await is_cached(client, number):
            await asyncio.sleep(0.02)


async def until_up(client: Client) -> None:
    await until(lambda: client.gateway.redis.is_up)


async def fill(client: Client) -> None:
    """Have the answer to question 1 cached."""
    await until_up(client)
    assert not await is_cached(client, 1)
    await until_cached(client, 1)


async def test_replicas_share_answers(redis: RedisServer) -> None:
    async with cached(redis.url) as one, cached(redis.url) as two:
        await until_up(one)
        await until_up(two)
        assert not await is_cached(one, 1)
        await until_cached(two, 1)
        assert two.engine.calls == 0


async def test_redis_that_is_down_at_the_start() -> None:
    with redis_server() as server:
        server.stop()
        async with cached(server.url) as client:
            await serves_within_budget(client, "down")
            assert not await is_healthy(client)
            assert client.engine.calls == 8
            server.start()
            await heals(client)


async def test_redis_that_freezes() -> None:
    with redis_server() as server:
        async with cached(server.url) as client:
            await fill(client)
            server.freeze()
            await serves_within_budget(client, "frozen")
            await until(lambda: not client.gateway.redis.is_up)
            assert client.gateway.redis.status().failures >= 3
            assert not await is_healthy(client)
            server.thaw()
            await heals(client)
            assert await is_cached(client, 1)


async def test_redis_that_is_slow(redis: RedisServer) -> None:
    async with slow_proxy(redis.port) as (proxy, url), cached(url) as client:
        await until_up(client)
        proxy.delay_s = 0.2
        await serves_within_budget(client, "slow")
        await until(lambda: not client.gateway.redis.is_up)
        assert not await is_healthy(client)
        proxy.delay_s = 0
        await heals(client)


async def test_redis_that_restarts_empty() -> None:
    with redis_server() as server:
        async with cached(server.url) as client:
            await fill(client)
            server.stop()
            await serves_within_budget(client, "restarting")
            server.start()
            await heals(client)
            assert not await is_cached(client, 1)


@pytest.mark.slow
async def test_redis_that_is_out_of_memory() -> None:
    with redis_server() as server:
        async with cached(server.url) as client:
            await fill(client)
            ask(server.port, "config", "set", "maxmemory", "1")
            await serves_within_budget(client, "full")
            await until(lambda: not client.gateway.redis.is_up)
            assert not await is_healthy(client)
            assert client.gateway.redis.status().last_error == "OutOfMemoryError"
            ask(server.port, "config", "set", "maxmemory", "0")
            await heals(client)
            assert await is_cached(client, 1)


async def test_redis_with_another_password(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("wrong\n")
    with redis_server("--requirepass", "right") as server:
        async with cached(server.url, {"password_file": str(password)}) as client:
            await serves_within_budget(client, "wrong password")
            assert not await is_healthy(client)
            assert client.gateway.redis.status().last_error == "AuthenticationError"
            password.write_text("right\n")  # it is read at each connection
            await heals(client)


async def test_failed_uses_are_counted_and_shown() -> None:
    with redis_server() as server:
        async with cached(server.url) as client:
            await until_up(client)
            server.freeze()
            await serves_within_budget(client, "counted")
            await until(lambda: not client.gateway.redis.is_up)
            metrics = (await client.http.get("/metrics")).text
            assert "headrace_redis_up 0.0" in metrics
            failures = next(line for line in metrics.splitlines() if line.startswith("headrace_redis_failures_total "))
            assert float(failures.split()[1]) >= 3
            alerts = (await client.http.get("/v1/cache/stats")).json()["alerts"]
            assert [alert["component"] for alert in alerts] == ["redis"]
            server.thaw()


# Topologies

LIMITS = {"subject": {"requests_per_minute": 1000, "concurrent": 10}, "tenant": {"tokens_per_minute": 10**6}}


@pytest.mark.slow
async def test_cluster_holds_answers_limits_and_flights() -> None:
    with redis_cluster() as url:
        settings = {"limits": LIMITS, "singleflight": {"scope": "cluster"}}
        async with cached(url, **settings) as one, cached(url, **settings) as two:
            await until_up(one)
            await until_up(two)
            for number in range(20):  # of all slots
                assert not await is_cached(one, number)
                await until_cached(two, number)
            assert two.engine.calls == 0
            left = (await two.post(question(0))).headers["x-ratelimit-remaining-requests"]
            assert int(left) < 1000 - 20  # both count
            assert [client.gateway.redis.status().failures for client in (one, two)] == [0, 0]
            response = await one.http.post("/v1/cache/clear", json={"all": True})
            assert response.json() == {"removed": {"redis": 20}, "replicas_told": True}
            assert not await is_cached(two, 3)


@pytest.mark.slow
async def test_sentinels_lead_to_the_new_master() -> None:
    with redis_sentinels() as sentinels:
        async with cached(sentinels.url) as client:
            await fill(client)
            sentinels.master.stop()
            await serves_within_budget(client, "failing over")
            await until(sentinels.has_failed_over, 15)
            await heals(client)
            assert await is_cached(client, 1)  # the replica had it


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@contextlib.contextmanager
def tls_server(authority: trustme.CA, folder: Path, *options: str) -> Any:
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(folder / "server.key")
    issued.cert_chain_pems[0].write_to_path(folder / "server.pem")
    own = authority.issue_cert("gateway")
    own.private_key_pem.write_to_path(folder / "gateway.key")
    own.cert_chain_pems[0].write_to_path(folder / "gateway.pem")
    files = ["--tls-cert-file", folder / "server.pem", "--tls-key-file", folder / "server.key"]
    with redis_server("--tls-ca-cert-file", str(folder / "ca.pem"), *map(str, files), *options, tls=True) as server:
        yield server


async def test_tls_with_certificates_of_both_sides(authority: trustme.CA, tmp_path: Path) -> None:
    files: Callable[..., dict[str, str]] = lambda **names: {name: str(tmp_path / file) for name, file in names.items()}  # noqa: E731
    own = files(cert_file="gateway.pem", key_file="gateway.key")
    with tls_server(authority, tmp_path) as server:
        async with cached(server.url, {**files(ca_file="ca.pem"), **own}) as client:
            await fill(client)
        for redis in (own, files(ca_file="ca.pem")):  # an unknown authority; no certificate of the gateway's own
            async with cached(server.url, redis) as client:
                await asyncio.sleep(0.3)
                assert not await is_healthy(client)
                await serves_within_budget(client, "refused")
