"""What probes and scrapers are told."""

import pytest

from app import __version__
from app.engines.scripted import Script, ScriptedEngine

from .conftest import CHAT, Client, serving

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


async def test_one_engine_of_two_down_is_degraded_and_still_ready() -> None:
    class Broken(ScriptedEngine):
        async def start(self) -> None:
            raise OSError("no such device")

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


async def test_metrics_count_requests_tokens_and_outcomes(client: Client) -> None:
    await client.post()
    await client.post({**CHAT, "stream": True})
    await client.post({**CHAT, "model": "junk"})
    await client.until_idle()
    text = (await client.http.get("/metrics")).text
    labels = 'model="demo",operation="chat.completions"'
    assert f'headrace_requests_total{{{labels},outcome="ok",variant=""}} 2.0' in text
    assert f'headrace_tokens_total{{kind="completion",{labels},variant=""}} 10.0' in text
    assert f'headrace_time_to_first_token_seconds_count{{{labels},variant=""}} 1.0' in text
    assert 'headrace_engine_up{pool="demo"} 1.0' in text


@pytest.mark.slow
async def test_junk_names_and_paths_add_no_series(client: Client) -> None:
    async def series() -> set[str]:
        lines = (await client.http.get("/metrics")).text.splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    for number in range(2):  # the first round adds the series for "something unknown"
        await client.post({**CHAT, "model": f"junk-{number}"})
        await client.http.get(f"/junk-{number}")
        await client.http.get(f"/v1/models/junk-{number}")
    before = await series()
    for number in range(200):
        await client.post({**CHAT, "model": f"more-{number}"})
        await client.http.get(f"/more-{number}")
        await client.http.get(f"/v1/models/more-{number}")
    assert await series() == before


async def test_scripted_engine_says_what_it_cannot_do() -> None:
    engine = ScriptedEngine(Script("One."), operations=frozenset({"completions"}))
    async with serving(engine=engine) as client:
        response = await client.post()
        assert (response.status_code, response.json()["error"]["code"]) == (501, "unsupported_operation")
