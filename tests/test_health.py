"""What probes and scrapers are told."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w

from app import __version__
from app.engines.discovery import Discovery
from app.engines.scripted import Script, ScriptedEngine
from app.gateway import Gateway
from app.gpu import GpuError, Gpus, Reading
from app.health import MAX_REPLICAS, Health
from app.settings import SettingsSource
from auth.jwks import KeyFetchError, KeySet
from auth.keys import VerificationKey

from .conftest import CHAT, Client, make_settings, serving, until
from .fault_server import fault_server
from .redis_server import RedisServer, free_port
from .test_load import CONFIG, STREAMS, TOKENS, port_of, read_stream

FIELDS = {
    "status": str,
    "version": str,
    "timestamp": str,
    "uptime_seconds": float,
    "active_requests": int,
    "memory_usage_bytes": int,
    "requests_total": int,
    "requests_failed": int,
    "components": dict,
}


async def test_health_bodies_have_their_fields(client: Client) -> None:
    await client.post()
    await client.post({**CHAT, "n": 0})
    await client.until_idle()
    for path in ("/health", "/health/live", "/health/ready"):
        response = await client.http.get(path)
        body = response.json()
        assert response.status_code == 200
        assert {name: type(value) for name, value in body.items()} == FIELDS
        assert (body["status"], body["version"], body["requests_total"]) == ("ok", __version__, 2)
        assert body["requests_failed"] == body["active_requests"] == 0
        assert body["memory_usage_bytes"] > 10_000_000
        engine = body["components"]["engine:demo"]
        assert (engine["status"], engine["state"], engine["last_error"]) == ("ok", "ready", None)
        assert engine["latency_ms"] >= 0


async def health_of(client: Client) -> tuple[int, dict[str, Any]]:
    """The status of readiness, and its body. Liveness is always 200."""
    ready, live = [await client.http.get(f"/health/{name}") for name in ("ready", "live")]
    assert live.status_code == 200
    return ready.status_code, ready.json()


async def until_told(client: Client, name: str, status: str) -> tuple[int, dict[str, Any]]:
    """Wait for a component to have a status."""
    async with asyncio.timeout(10):
        while True:
            code, body = await health_of(client)
            if name in body["components"] and body["components"][name]["status"] == status:
                return code, body
            await asyncio.sleep(0.02)


async def test_every_part_has_latency_and_error_and_each_that_fails_makes_degraded(
    redis: RedisServer, tmp_path: Path
) -> None:
    file = tmp_path / "headrace.toml"
    async with fault_server() as near, fault_server() as far:
        remote = {"urls": [near.url, far.url], "probe_every_s": 0.05, "probe_failures": 1}
        sections = {
            "server": {"port": 0, "drain": {"settle_s": 0, "drain_s": 5}, "reload_every_s": 0.05},
            "auth": {"mode": "off"},
            "pools": [{"name": "demo", "engine": "scripted"}, {"name": "far", "engine": "remote", "remote": remote}],
            "cache": {"redis": {"url": redis.url}, "disk": {"path": str(tmp_path / "answers")}},
        }
        file.write_text(tomli_w.dumps(sections))
        async with serving(source=SettingsSource(file)) as client:
            await client.post({**CHAT, "temperature": 0})  # something for the tiers
            async with asyncio.timeout(15):
                while True:
                    code, body = await health_of(client)
                    parts = body["components"]
                    timed = {name for name, part in parts.items() if part["latency_ms"] is not None}
                    if body["status"] == "ok" and len(timed) == 4:
                        break
                    await asyncio.sleep(0.05)
            assert code == 200
            assert timed == {"engine:demo", "pool:far", "redis", "disk"}
            assert parts.keys() == timed | {"config"}
            assert all(parts[name]["latency_ms"] > 0 for name in timed)
            assert [part["last_error"] for part in parts.values()] == [None] * 5

            file.write_text("nonsense")
            code, body = await until_told(client, "config", "degraded")
            assert (code, body["status"]) == (200, "degraded")
            assert body["components"]["config"]["last_error"]
            file.write_text(tomli_w.dumps(sections))
            assert (await until_told(client, "config", "ok"))[1]["status"] == "ok"

            far.health_status = 503
            code, body = await until_told(client, "pool:far", "degraded")
            assert (code, body["status"]) == (200, "degraded")
            assert "503" in body["components"]["pool:far"]["last_error"]
            far.health_status = 200
            assert (await until_told(client, "pool:far", "ok"))[1]["status"] == "ok"

            redis.stop()
            code, body = await until_told(client, "redis", "down")
            assert (code, body["status"]) == (200, "degraded")
            assert body["components"]["redis"]["last_error"]
            redis.start()
            assert (await until_told(client, "redis", "ok"))[1]["status"] == "ok"


async def test_pool_tells_of_each_replica_and_lists_no_more_than_a_hundred() -> None:
    async with fault_server() as up, fault_server() as sick:
        sick.health_status = 500
        nobody = f"http://127.0.0.1:{free_port()}"
        others = [f"{up.url}/{number}" for number in range(MAX_REPLICAS)]
        remote = {"urls": [*others, sick.url, nobody], "probe_every_s": 60, "probe_failures": 1}
        async with serving(pools=[{"name": "far", "engine": "remote", "remote": remote}]) as client:
            pool, discovery = client.gateway.routes.pools["far"].pool, client.gateway.routes.pools["far"].part
            assert isinstance(discovery, Discovery)
            await until(lambda: sum(replica.is_available for replica in pool.replicas) == MAX_REPLICAS)
            await until(lambda: all(engine.latency_ms for engine in discovery.engines.values() if engine.is_ready))
            far = (await client.http.get("/health")).json()["components"]["pool:far"]
        assert (far["replicas"], far["available"], len(far["by_replica"])) == (102, 100, 100)
        first, second, third = list(far["by_replica"].values())[:3]
        assert (first["is_up"], second["is_up"]) == (False, False)  # those come first
        assert "500" in first["last_error"]
        assert second["last_error"] == "The engine cannot be reached."
        assert third["is_up"]
        assert third["breaker"] == "closed"
        assert third["last_error"] is None
        assert third["latency_ms"] > 0


async def test_open_breaker_is_told_of_though_the_probes_are_answered() -> None:
    async with fault_server() as one, fault_server() as other:
        remote = {"urls": [one.url, other.url], "probe_every_s": 0.05}
        async with serving(pools=[{"name": "far", "engine": "remote", "remote": remote}]) as client:
            breaker = client.gateway.routes.pools["far"].pool.replicas[0].breaker
            for _ in range(5):
                breaker.fail(breaker.begin())
            code, body = await health_of(client)
            assert (code, body["status"]) == (200, "degraded")
            far = body["components"]["pool:far"]
            assert (far["status"], far["available"]) == ("degraded", 1)
            assert far["last_error"] == "1 of 2 replicas are not asked: a breaker is open, or they rest"
            assert far["by_replica"][one.url]["breaker"] == "open"
            assert far["by_replica"][one.url]["is_up"]


async def test_gateway_is_alive_but_not_ready_while_its_engine_starts() -> None:
    class Slow(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(Script("One."))
            self.may_start = asyncio.Event()

        async def start(self) -> None:
            await self.may_start.wait()
            await super().start()

    engine = Slow()
    gateway = Gateway(make_settings(), {"demo": engine})
    task = asyncio.create_task(gateway.serve())
    try:
        await gateway.server.has_started.wait()
        async with httpx.AsyncClient(base_url=gateway.server.url, verify=False) as http:
            client = Client(gateway, {"demo": engine}, http)
            code, body = await health_of(client)
            assert (code, body["status"], body["components"]["engine:demo"]["status"]) == (503, "starting", "starting")
            engine.may_start.set()
            await until(lambda: gateway.health.is_ready)
            code, body = await health_of(client)
            assert (code, body["status"]) == (200, "ok")
    finally:
        gateway.server.leave()
        await task


async def test_gateway_without_anyone_to_answer_is_down_and_alive() -> None:
    remote = {"urls": [f"http://127.0.0.1:{free_port()}"], "probe_every_s": 0.05, "probe_failures": 1}
    async with serving(pools=[{"name": "far", "engine": "remote", "remote": remote}]) as client:
        code, body = await until_told(client, "pool:far", "down")
        assert (code, body["status"]) == (503, "down")
        assert (await client.http.get("/health")).status_code == 200


def health_with(client: Client, key_set: KeySet | None = None, gpus: Gpus | None = None) -> Health:
    """That of the gateway, with other parts."""
    gateway = client.gateway
    return Health(
        gateway.routes, gateway.lifecycle, gateway.counts, None, key_set, None, None, gpus or Gpus(), place=None
    )


@asynccontextmanager
async def at_work(part: KeySet | Gpus) -> AsyncIterator[None]:
    task = asyncio.create_task(part.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_keys_that_were_never_fetched_are_awaited_and_then_missed_and_stale_ones_do(client: Client) -> None:
    may_answer = asyncio.Event()
    errors: list[Exception] = []

    async def fetch() -> list[VerificationKey]:
        await may_answer.wait()
        if errors:
            raise errors[0]
        return []

    keys = KeySet(fetch, refresh_s=0.02)
    health = health_with(client, keys)

    def told() -> tuple[str, bool, str, str | None]:
        body = health.body()
        jwks = body["components"]["jwks"]
        return body["status"], health.is_ready, jwks["status"], jwks["last_error"]

    async with at_work(keys):
        assert told() == ("starting", False, "starting", None)
        errors.append(KeyFetchError("nobody answers"))
        may_answer.set()
        await until(lambda: told() == ("down", False, "down", "nobody answers"))
        assert health.body()["components"]["jwks"]["latency_ms"] is None
        errors.clear()
        await until(lambda: told() == ("ok", True, "ok", None))
        assert health.body()["components"]["jwks"]["latency_ms"] >= 0
        errors.append(KeyFetchError("nobody answers"))
        await until(lambda: told() == ("degraded", True, "degraded", "nobody answers"))


async def test_gpu_is_a_component_and_in_trouble_makes_degraded(client: Client) -> None:
    class Driver:
        """Of two GPUs; `trouble` is raised for the second one."""

        heat: tuple[str, ...] = ()
        trouble: GpuError | None = None

        def count(self) -> int:
            return 2

        def read(self, index: int) -> Reading:
            if index == 1 and self.trouble is not None:
                raise self.trouble
            return Reading("NVIDIA H100", 30, 80, 97, 61, 0, self.heat)

    driver = Driver()
    gpus = Gpus(driver, every_s=0.01)
    health = health_with(client, gpus=gpus)

    def told() -> tuple[str, list[str]]:
        body = health.body()
        return body["status"], [body["components"][name]["status"] for name in ("gpu:0", "gpu:1")]

    assert health.body()["components"].keys() == {"engine:demo"}  # until the first look is over
    async with at_work(gpus):
        await until(lambda: len(health.body()["components"]) == 3)
        assert told() == ("ok", ["ok", "ok"])
        gpu = health.body()["components"]["gpu:0"]
        assert gpu.pop("latency_ms") >= 0
        assert gpu == {
            "status": "ok",
            "last_error": None,
            "name": "NVIDIA H100",
            "memory_used_bytes": 30,
            "memory_total_bytes": 80,
            "utilization_percent": 97,
            "temperature_c": 61,
            "uncorrected_ecc_errors": 0,
            "slowed_by": (),
        }
        driver.heat = ("heat",)
        await until(lambda: told() == ("degraded", ["degraded", "degraded"]))
        driver.heat, driver.trouble = (), GpuError("GPU is lost")
        await until(lambda: told() == ("degraded", ["ok", "down"]))
        assert health.is_ready
        assert health.body()["components"]["gpu:1"]["last_error"] == "GPU is lost"


async def test_one_engine_of_two_down_is_degraded_and_still_ready() -> None:
    pools = [{"name": "demo", "engine": "scripted"}, {"name": "other", "engine": "scripted"}]
    async with serving(pools=pools) as client:
        client.gateway.engines["other"]._enter("waiting")
        body = (await client.http.get("/health/ready")).json()
        assert body["status"] == "degraded"
        assert body["components"]["engine:other"]["status"] == "down"
        assert (await client.post()).status_code == 200


async def test_models_are_listed_and_shown(client: Client) -> None:
    listed = (await client.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["demo"]
    assert (await client.http.get("/v1/models/demo")).json() == listed["data"][0]


async def test_model_names_may_hold_slashes() -> None:
    models = [{"name": "org/name", "pool": "demo"}]
    async with serving(models=models) as client:
        assert (await client.http.get("/v1/models/org/name")).json()["id"] == "org/name"
        assert (await client.post({**CHAT, "model": "org/name"})).json()["model"] == "org/name"


async def test_scripted_engine_says_what_it_cannot_do() -> None:
    engine = ScriptedEngine(Script("One."), operations=frozenset({"completions"}))
    async with serving(engine=engine) as client:
        response = await client.post()
        assert (response.status_code, response.json()["error"]["code"]) == (501, "unsupported_operation")


@pytest.mark.slow
async def test_probes_are_answered_while_a_thousand_streams_run(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(CONFIG % " ".join(["word"] * TOKENS))
    command = [sys.executable, "-m", "app", "serve", "--config", str(config)]
    gateway = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        address = ("127.0.0.1", await port_of(gateway.pid))
        started = asyncio.Semaphore(0)
        seen = []
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(read_stream(address, started)) for _ in range(STREAMS)]
            for _ in streams:
                await started.acquire()
            while not any(stream.done() for stream in streams):
                seen += [await probe(address, path) for path in ("/health/live", "/health/ready", "/health")]
        assert {stream.result() for stream in streams} == {TOKENS}
        assert {status for status, _ in seen} == {200}
        assert {body["status"] for _, body in seen} == {"ok"}
        assert [body["active_requests"] for _, body in seen].count(STREAMS) >= 3
    finally:
        gateway.kill()
        await gateway.wait()


async def probe(address: tuple[str, int], path: str) -> tuple[int, dict[str, Any]]:
    """On a connection of its own, as a kubelet's are."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)
