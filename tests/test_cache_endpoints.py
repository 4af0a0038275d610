"""`/v1/cache/…`, and what does the same from the command line and at the start."""

import asyncio
import json
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from app.engines.scripted import Gate, Script
from cache.entry import Selection

from .conftest import CHAT, Client, serving, until
from .redis_server import RedisServer, redis_server
from .test_disk_tier import open_disk
from .tokens import JWT_SETTINGS, bearer, token

ASK = {**CHAT, "temperature": 0}
JWT = {"mode": "jwt", "jwt": JWT_SETTINGS}


def admin() -> dict[str, str]:
    return bearer(token(sub="root", scope="inference cache:read cache:admin"))


def ask_about(subject: int | str, model: str = "demo") -> dict[str, Any]:
    return {"model": model, "temperature": 0, "messages": [{"role": "user", "content": f"What is {subject}?"}]}


async def is_hit(client: Client, body: dict[str, Any], headers: dict[str, str] | None = None) -> bool:
    return "hit" in (await client.post(body, headers=headers)).headers["cache-status"]


# Explain


async def test_explain_says_what_a_request_would_do_and_does_nothing(client: Client) -> None:
    body = {**ASK, "n": 1, "user": "u", "stop": "x", "stream": True, "top_p": 0.5}

    async def explain(body: dict[str, Any], **headers: str) -> dict[str, Any]:
        response = await client.post(body, "/v1/cache/explain", headers=headers)
        assert response.status_code == 200
        return response.json()

    before = await explain(body)
    assert before == {
        "cacheable": True,
        "reason": None,
        "operation": "chat.completions",
        "model": "demo",
        "variant": None,
        "revision": before["revision"],
        "policy": "deterministic",
        "scope": "tenant",
        "fields": {"messages": CHAT["messages"], "temperature": 0, "stop": ["x"]},
        "key": before["key"],
        "tier": None,
        "age_s": None,
        "ttl_s": 3600.0,
        "in_flight": False,
    }
    assert client.engine.calls == 0
    await client.post(body)
    after = await explain({**body, "stream": False})
    assert (after["key"], after["tier"], after["age_s"], after["ttl_s"]) == (before["key"], "memory", 0, 3599)
    assert (await explain(body, **{"cache-control": "no-cache"}))["tier"] is None
    sampled = await explain({**CHAT, "temperature": 1})
    assert (sampled["cacheable"], sampled["reason"], sampled["key"]) == (False, "temperature>0", None)
    assert (await explain({**ASK, "stream": True}, **{"cache-control": "no-store"}))["reason"] == "no-store"
    batch = await explain({"url": "/v1/completions", "body": {"model": "demo", "prompt": "x", "seed": 3}})
    assert (batch["operation"], batch["fields"]) == ("completions", {"prompt": "x", "seed": 3})
    assert client.engine.calls == 1
    stats = (await client.http.get("/v1/cache/stats")).json()["cache_manager"]["kv_cache"]
    assert (stats["hits"], stats["misses"]) == (0, 1)  # looking is no use of the cache


async def test_explain_tells_of_a_flight() -> None:
    gate = Gate()
    async with serving(Script("One.", gate=gate)) as client:
        asked = asyncio.create_task(client.post(ASK))
        await gate.arrived.wait()
        assert (await client.post(ASK, "/v1/cache/explain")).json()["in_flight"] is True
        gate.open()
        await asked


async def test_cache_endpoints_ask_for_their_scopes_and_refuse_nonsense() -> None:
    async with serving(auth=JWT) as client:
        for path, scope in (("explain", "cache:read"), ("clear", "cache:admin"), ("warm", "cache:admin")):
            assert (await client.post(ASK, f"/v1/cache/{path}")).status_code == 401
            refused = await client.post(ASK, f"/v1/cache/{path}", headers=bearer(token()))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
            assert scope in refused.headers["www-authenticate"]
        assert (await client.http.get("/v1/cache/stats", headers=bearer(token()))).status_code == 403
        for path, body in (
            ("explain", {"model": "demo"}),
            ("explain", {"url": "/v1/nothing", "body": {}}),
            ("explain", {**ASK, "n": 0}),
            ("clear", {}),
            ("clear", {"everything": True}),
            ("clear", {"all": False}),
            ("clear", {"all": True, "tenant": "a"}),
            ("clear", {"key": "12"}),
            ("clear", {"key": "x" * 96}),
            ("clear", {"tenant": ""}),
            ("warm", {}),
            ("warm", {"requests": {}}),
            ("warm", {"requests": [ASK], "requests_per_s": 0}),
            ("warm", {"requests": [ASK], "requests_per_s": "fast"}),
        ):
            response = await client.post(body, f"/v1/cache/{path}", headers=admin())
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request"), body
        assert (await client.post({**ASK, "model": "x"}, "/v1/cache/explain", headers=admin())).status_code == 404


# Stats

NULL = {
    "radix_tree": ["prefix_matches", "sharing_hits", "memory_saved", "active_prefixes", "avg_prefix_length"],
    "speculation": ["hits", "misses", "hit_rate", "tokens_generated", "avg_depth", "early_stops"],
    "sliding_window": ["hits", "misses", "hit_rate", "memory_bytes", "evictions", "utilization"],
}


async def test_stats_are_what_was_measured(tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cache_report.SAMPLE_S", 0.05)
    cache = {"redis": {"url": redis.url}, "disk": {"path": str(tmp_path)}}
    async with serving(cache=cache) as client:
        await until(lambda: client.gateway.redis.is_up and "disk" in str(client.gateway.cache.tiers))
        await until(lambda: client.gateway.health.body()["status"] == "ok")
        empty = (await client.http.get("/v1/cache/stats")).json()
        assert empty["cache_manager"]["kv_cache"]["hit_rate"] is None
        assert empty["overall"]["avg_response_time_us"] is None
        for subject in (1, 2, 1, 1, 2):
            await client.post(ask_about(subject))
        memory, shared, _ = client.gateway.cache.tiers
        await until(lambda: shared.stats().stores == 2)
        await memory.clear(Selection())
        await client.post(ask_about(1))
        await memory.clear(Selection())
        await shared.clear(Selection())
        await client.post(ask_about(1))
        await asyncio.sleep(0.1)
        stats = (await client.http.get("/v1/cache/stats")).json()
    assert stats["cache_manager"]["kv_cache"] == {
        "hits": 5,
        "misses": 2,
        "hit_rate": 0.7143,
        "memory_bytes": memory.stats().size_bytes,
        "evictions": 0,
        "l1_hits": 3,
        "l2_hits": 1,
        "l3_hits": 1,
    }
    for part, names in NULL.items():
        assert stats["cache_manager"][part] == dict.fromkeys(names)
    overall = stats["overall"]
    assert overall["hit_rate"] == 0.7143
    assert overall["total_memory_bytes"] > 300
    assert overall["operations_per_second"] > 0
    assert 0 < overall["avg_response_time_us"] < 1e6
    assert overall["efficiency_score"] == round(5 / 7, 4)  # all answers are of one length
    assert overall["background_tasks_active"] == 0
    assert stats["alerts"] == []
    assert stats["trends"]["window_seconds"] == 300
    points = stats["trends"]["data_points"]
    assert sum(point["hits"] for point in points) <= 5
    assert points[0].keys() == {"timestamp", "hits", "misses", "hit_rate"}
    assert stats["tiers"]["disk"]["entries"] == 2


async def test_fall_of_the_hit_rate_is_told(client: Client) -> None:
    report = client.gateway.report
    for _ in range(150):
        await client.post(ASK)
    report._samples.clear()
    report._samples.append(report._sample())
    for number in range(110):
        await client.post(ask_about(number))
    alerts = (await client.http.get("/v1/cache/stats")).json()["alerts"]
    assert [alert["component"] for alert in alerts] == ["hit_rate"]


# Clear


async def test_clear_takes_what_it_names() -> None:
    models = [{"name": name, "pool": "demo"} for name in ("x", "y")]
    async with serving(auth=JWT, models=models) as client:
        callers = {name: bearer(token(tenant=name)) for name in ("acme", "other")}

        async def left_after(selector: dict[str, Any]) -> tuple[dict[str, int], set[tuple[str, str]]]:
            for headers in callers.values():
                for model in ("x", "y"):
                    await client.post(ask_about(1, model), headers=headers)
            response = await client.post(selector, "/v1/cache/clear", headers=admin())
            assert response.json()["replicas_told"] is True
            left = {
                (name, model)
                for name, headers in callers.items()
                for model in ("x", "y")
                if await is_hit(client, ask_about(1, model), headers)
            }
            return response.json()["removed"], left

        assert await left_after({"tenant": "acme"}) == ({"memory": 2}, {("other", "x"), ("other", "y")})
        assert await left_after({"model": "x"}) == ({"memory": 2}, {("acme", "y"), ("other", "y")})
        three = {("acme", "y"), ("other", "x"), ("other", "y")}
        assert await left_after({"model": "x", "tenant": "acme"}) == ({"memory": 1}, three)
        caller = bearer(token(tenant="acme", scope="inference cache:read"))
        key = (await client.post(ask_about(1, "x"), "/v1/cache/explain", headers=caller)).json()["key"]
        assert await left_after({"key": key}) == ({"memory": 1}, three)
        assert await left_after({"all": True}) == ({"memory": 4}, set())


async def test_clear_reaches_every_replica_and_every_tier_within_a_second(tmp_path: Path, redis: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        clients = []
        for number in range(3):
            cache = {"redis": {"url": redis.url, "namespace": "clear"}, "disk": {"path": str(tmp_path / str(number))}}
            clients.append(await stack.enter_async_context(serving(cache=cache)))
        for client in clients:
            await until(lambda client=client: client.gateway.health.body()["status"] == "ok")
        await clients[0].post(ASK)
        await asyncio.sleep(0.1)
        for client in clients[1:]:
            assert await is_hit(client, ASK)  # in the memory of all, in Redis, and on the disk of the first
        await asyncio.sleep(0.1)
        cleared = time.monotonic()
        response = await clients[1].post({"model": "demo"}, "/v1/cache/clear")
        assert response.json() == {"removed": {"memory": 1, "redis": 1, "disk": 0}, "replicas_told": True}
        await asyncio.sleep(cleared + 0.95 - time.monotonic())
        for client in clients:
            peeked = (await client.post(ASK, "/v1/cache/explain")).json()
            assert peeked["tier"] is None
            assert all(not tier.stats().entries for tier in client.gateway.cache.tiers)
        assert not await is_hit(clients[2], ASK)
        assert sum(client.engine.calls for client in clients) == 2


async def test_clearing_while_redis_is_away_is_done_when_it_is_back() -> None:
    with redis_server() as server:
        async with (
            serving(cache={"redis": {"url": server.url}}) as one,
            serving(cache={"redis": {"url": server.url}}) as two,
        ):
            for client in (one, two):
                await until(lambda client=client: client.gateway.redis.is_up)
            await one.post(ASK)
            await asyncio.sleep(0.1)
            assert await is_hit(two, ASK)
            server.freeze()
            for number in range(5):
                await one.post(ask_about(number))
            await until(lambda: not one.gateway.redis.is_up)
            response = await one.post({"all": True}, "/v1/cache/clear")
            assert response.json()["replicas_told"] is False
            assert not await is_hit(one, ASK)
            assert await is_hit(two, ASK)
            server.thaw()
            for client in (one, two):
                await until(lambda client=client: client.gateway.redis.is_up)
            await until(lambda: two.gateway.cache.tiers[0].stats().entries == 0)


async def test_replica_that_was_away_at_a_clearing_does_not_answer_from_its_disk(
    tmp_path: Path, redis: RedisServer
) -> None:
    shared = {"url": redis.url, "namespace": "away"}
    with_disk = {"redis": shared, "disk": {"path": str(tmp_path)}}
    async with serving(cache=with_disk) as client:
        await until(lambda: client.gateway.health.body()["status"] == "ok")
        await client.post(ASK)
    async with serving(cache={"redis": shared}) as other:
        await until(lambda: other.gateway.redis.is_up)
        await other.post({"all": True}, "/v1/cache/clear")
    async with open_disk(tmp_path) as disk:
        assert disk.stats().entries == 1
    async with serving(cache=with_disk) as client:
        await until(lambda: client.gateway.health.body()["status"] == "ok")
        await asyncio.sleep(0.6)
        assert not await is_hit(client, ASK)


# Warm


async def test_warming_fills_the_cache_and_can_be_repeated(client: Client) -> None:
    requests = [ask_about(number) for number in range(5)]
    requests += [{"url": "/v1/completions", "body": {"model": "demo", "prompt": "x", "seed": 1}}]
    bad = [None, {"x": 1}, {**CHAT, "temperature": 1}, {**ASK, "model": "none"}]
    body = {"requests": requests + bad, "requests_per_s": 1000}
    first = (await client.post(body, "/v1/cache/warm")).json()
    assert (first["total"], first["done"], first["hits"], first["misses"], first["failed"]) == (10, 10, 0, 6, 4)
    assert sum(first["failures"].values()) == 4
    assert "Such a request is not cached: temperature>0." in first["failures"]
    second = (await client.post(body, "/v1/cache/warm")).json()
    assert (second["hits"], second["misses"], second["failed"]) == (6, 0, 4)
    assert client.engine.calls == 6
    assert await is_hit(client, ask_about(3))


async def test_warming_is_bounded_and_shows_its_progress(client: Client) -> None:
    body = {"requests": [ask_about(number) for number in range(30)], "requests_per_s": 30, "stream": True}
    started = time.monotonic()
    response = await client.post(body, "/v1/cache/warm")
    assert time.monotonic() - started > 0.9
    steps = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    assert [step["done"] for step in steps] == sorted(step["done"] for step in steps)
    assert steps[0]["done"] < steps[-1]["done"] == steps[-1]["total"] == 30
    assert response.text.endswith("data: [DONE]\n\n")


async def test_whoever_warms_does_so_for_themselves() -> None:
    async with serving(auth=JWT) as client:
        item = {"tenant": "other", "body": ASK, "url": "/v1/chat/completions"}
        await client.post({"requests": [item]}, "/v1/cache/warm", headers=admin())
        assert await is_hit(client, ASK, bearer(token(sub="root")))
        assert not await is_hit(client, ASK, bearer(token(tenant="other")))


async def test_warming_ends_when_its_caller_leaves() -> None:
    async with serving(Script("One two.", token_s=0.05)) as client:
        body = {"requests": [ask_about(number) for number in range(1000)], "requests_per_s": 50, "stream": True}
        connection = await client.open(body, "/v1/cache/warm")
        await connection.reader.readuntil(b"data: ")
        connection.abort()
        await until(lambda: client.engine.load.running == 0 and client.engine.calls > 0)
        calls = client.engine.calls
        await asyncio.sleep(0.3)
        assert client.engine.calls == calls


async def test_file_warms_at_the_start_for_the_tenants_that_it_names(tmp_path: Path) -> None:
    lines = [
        json.dumps(ask_about(1)),
        json.dumps({"tenant": "other", "url": "/v1/chat/completions", "body": ask_about(2)}),
        "not JSON",
        "",
    ]
    (tmp_path / "warm.jsonl").write_text("\n".join(lines))
    cache = {"warm_file": str(tmp_path / "warm.jsonl"), "warm_tenant": "acme", "warm_requests_per_s": 100}
    async with serving(auth=JWT, cache=cache) as client:
        await until(lambda: client.engine.calls == 2 and client.engine.load.running == 0)
        await asyncio.sleep(0.05)
        assert await is_hit(client, ask_about(1), bearer(token(tenant="acme")))
        assert await is_hit(client, ask_about(2), bearer(token(tenant="other")))
        assert not await is_hit(client, ask_about(2), bearer(token(tenant="acme")))


async def test_missing_warm_file_does_not_keep_the_gateway_from_serving(tmp_path: Path) -> None:
    async with serving(cache={"warm_file": str(tmp_path / "none.jsonl")}) as client:
        assert (await client.post(ASK)).status_code == 200


async def headrace(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "app", *arguments]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
async def test_command_warms_a_running_gateway(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(json.dumps(ask_about(number)) for number in range(250)))
    async with serving(auth=JWT) as client:
        url = f"http://{client.address[0]}:{client.address[1]}"
        secret = admin()["authorization"].removeprefix("Bearer ")
        arguments = ["cache", "warm", str(file), "--url", url, "--token", secret, "--rate", "5000"]
        for expected in ("0 hits, 250 misses, 0 failed", "250 hits, 0 misses, 0 failed"):
            done = await headrace(*arguments)
            assert done.returncode == 0, done.stderr
            assert f"250 of 250, {expected}" in done.stdout
        file.write_text(json.dumps(CHAT) + "\nrubbish\n")
        done = await headrace(*arguments)
        assert done.returncode == 1
        assert "2 of 2, 0 hits, 0 misses, 2 failed (1 times" in done.stdout
        done = await headrace(*arguments[:5], "--token", token())
        assert done.returncode == 1
        assert "headrace: http" in done.stderr
        assert "says 403" in done.stderr
    done = await headrace(*arguments)
    assert (done.returncode, "refused" in done.stderr) == (1, True)
    done = await headrace("cache", "warm", str(tmp_path / "none"))
    assert (done.returncode, "No such file" in done.stderr) == (1, True)
