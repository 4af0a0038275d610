"""Settings that change while the gateway runs: all at once, or not at all; and who is under way meanwhile."""

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w

from app.cache_headers import SILENT
from app.engines.scripted import Gate, Script, ScriptedEngine
from app.exchange import Exchange
from app.operations import OPERATIONS
from app.pipeline import Pipeline
from app.settings import SettingsError, SettingsSource
from auth.limits import Limiter, Policy

from .conftest import CHAT, Client, events_of, serving, text_of, until
from .fault_answers import Behaviour
from .fault_server import fault_server
from .test_lifecycle import process, until_up

SERVER = {"port": 0, "reload_every_s": 0, "drain": {"settle_s": 0, "drain_s": 5}}
WATCHED = {**SERVER, "reload_every_s": 0.02}
A = {"name": "a", "engine": "scripted", "scripted": {"text": "From a."}}
B = {"name": "b", "engine": "scripted", "scripted": {"text": "From b."}}
M = {"name": "m", "pool": "a"}
N = {"name": "n", "pool": "b"}
ASK = {**CHAT, "model": "m"}
DETERMINED = {**ASK, "temperature": 0}


def toml(**sections: Any) -> str:
    return tomli_w.dumps({"server": SERVER, "auth": {"mode": "off"}, "pools": [A], "models": [M], **sections})


class Running:
    """A gateway, and the file that its settings come from."""

    def __init__(self, client: Client, file: Path) -> None:
        self.client = client
        self.file = file

    @property
    def results(self) -> dict[str, int]:
        assert self.client.gateway.reloading is not None
        return dict(self.client.gateway.reloading.status().results)

    def write(self, **sections: Any) -> None:
        self.file.write_text(toml(**sections))

    async def reload(self, **sections: Any) -> None:
        """Write the file, and have it taken."""
        self.write(**sections)
        assert await self.tell() == "ok", await self.config()

    async def tell(self) -> str:
        """Have the file read, and say what came of it."""
        assert self.client.gateway.reloading is not None
        before = self.results
        self.client.gateway.reloading.now()
        return await self.next_result(before)

    async def next_result(self, before: dict[str, int]) -> str:
        await until(lambda: self.results != before)
        return next(name for name, count in self.results.items() if count != before[name])

    async def config(self) -> dict[str, Any]:
        told: dict[str, Any] = (await self.client.http.get("/health")).json()["components"]["config"]
        return told

    async def ask(self, model: str = "m", **more: Any) -> str:
        response = await self.client.post({**CHAT, "model": model, **more})
        if response.status_code != 200:
            return str(response.json()["error"]["code"])
        return str(response.json()["choices"][0]["message"]["content"])


@asynccontextmanager
async def running(
    tmp_path: Path, engines: dict[str, ScriptedEngine] | None = None, **sections: Any
) -> AsyncIterator[Running]:
    file = tmp_path / "headrace.toml"
    file.write_text(toml(**sections))
    async with serving(engines=engines, source=SettingsSource(file)) as client:
        yield Running(client, file)


def remote(url: str, **more: Any) -> dict[str, Any]:
    return {"name": "a", "engine": "remote", "remote": {"urls": [url], "probe_every_s": 0.05, **more}}


def variants(a: float, b: float, **more: Any) -> dict[str, Any]:
    both = [{"name": "a", "pool": "a", "weight": a}, {"name": "b", "pool": "b", "weight": b}]
    return {"pools": [A, B], "models": [{"name": "m", "variants": both, "sticky_by": "request", **more}]}


# What changes


async def test_other_weights_move_the_traffic(tmp_path: Path) -> None:
    async with running(tmp_path, **variants(1, 0)) as gateway:
        assert {await gateway.ask() for _ in range(10)} == {"From a."}
        await gateway.reload(**variants(0, 1))
        assert {await gateway.ask() for _ in range(10)} == {"From b."}
        await gateway.reload(**variants(1, 1))
        assert {await gateway.ask() for _ in range(50)} == {"From a.", "From b."}


async def test_models_come_and_go_and_streams_of_those_that_went_end_well(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(Script("One two three.", gate=gate))
    async with running(tmp_path, {"b": engine}, pools=[A, B], models=[M, N]) as gateway:
        client = gateway.client
        gate.release(1)
        async with client.stream({**CHAT, "model": "n"}) as response:
            await gateway.reload(models=[M, {"name": "new", "pool": "a"}])
            assert await gateway.ask("n") == "model_not_found"
            assert await gateway.ask("new") == "From a."
            listed = (await client.http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["m", "new"]
            assert [pool.name for pool in client.gateway.routes.pools.values()] == ["a"]
            assert engine.is_alive
            gate.open()
            events = events_of((await response.aread()).decode())
        assert (text_of(events), events[-1]) == ("One two three.", "[DONE]")
        await until(lambda: not engine.is_alive)
        assert await gateway.ask("m") == "From a."


async def test_pool_with_other_options_answers_otherwise_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        assert await gateway.ask(temperature=0) == "From a."
        for number in range(5):
            await gateway.reload(pools=[{**A, "scripted": {"text": f"From a, {number}."}}])
            assert await gateway.ask(temperature=0) == f"From a, {number}."  # and not from the cache


async def test_streams_from_a_server_that_is_replaced_end_well_and_then_it_is_left_alone(tmp_path: Path) -> None:
    async with (
        fault_server(Behaviour(text="Of old.", is_gated=True)) as old,
        fault_server() as new,
        running(tmp_path, pools=[remote(old.url)]) as gateway,
    ):
        old.gate.release(1)
        async with gateway.client.stream(ASK) as response:
            await gateway.reload(pools=[remote(new.url)])
            assert await gateway.ask() == "One two three four five."
            probes = len(old.probes)
            await until(lambda: len(old.probes) > probes)  # while it is needed, it is looked after
            old.gate.open()
            events = events_of((await response.aread()).decode())
        assert (text_of(events), events[-1]) == ("Of old.", "[DONE]")
        await until(lambda: old.open_connections == 0)
        probes = len(old.probes)
        await asyncio.sleep(0.2)
        assert (len(old.probes), len(old.requests), len(old.aborted)) == (probes, 1, 0)
        assert len(new.requests) == 1


async def test_who_waits_for_a_pool_that_goes_is_answered_there(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(Script("From b.", gate=gate))
    narrow = {**B, "admission": {"max_in_flight": 1}}
    async with running(tmp_path, {"b": engine}, pools=[A, narrow], models=[M, N]) as gateway:
        requests = [asyncio.create_task(gateway.ask("n")) for _ in range(3)]
        admission = gateway.client.gateway.routes.pools["b"].pool.admission
        await until(lambda: admission.stats().waiting == 2)
        await gateway.reload(models=[M, {"name": "n", "pool": "a"}])
        assert await gateway.ask("n") == "From a."
        await asyncio.sleep(0.3)
        gate.open()
        assert await asyncio.gather(*requests) == ["From b."] * 3
        await until(lambda: not engine.is_alive)


async def test_work_that_nobody_waits_for_any_more_is_done_before_its_pool_goes(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(Script("From b.", gate=gate))
    settings = {"pools": [A, {**B, "admission": {"max_in_flight": 1}}], "models": [M, N]}
    async with running(tmp_path, {"b": engine}, **settings, singleflight={"linger_s": 60}) as gateway:
        client = gateway.client
        connections = [await client.open({**CHAT, "model": "n", "seed": seed}) for seed in range(2)]
        admission = client.gateway.routes.pools["b"].pool.admission
        await until(lambda: admission.stats().waiting == 1)
        for connection in connections:
            connection.abort()
        await until(lambda: client.gateway.lifecycle.active_requests == 0)
        await gateway.reload(singleflight={"linger_s": 60})
        await asyncio.sleep(0.3)
        gate.release(2)  # one answer; the other one is in the queue until then
        await until(lambda: engine.calls == 2)
        await asyncio.sleep(0.3)
        assert engine.is_alive
        gate.open()
        await until(lambda: not engine.is_alive)
        assert (admission.stats().admitted, client.gateway.flights.stats().in_flight) == (2, 0)


async def test_new_engine_is_ready_before_it_is_asked(tmp_path: Path) -> None:
    class Slow(ScriptedEngine):
        may_start = asyncio.Event()

        async def start(self) -> None:
            await self.may_start.wait()
            await super().start()

    engine = Slow(Script("From b."))
    async with running(tmp_path, {"b": engine}) as gateway:
        gateway.write(pools=[B], models=[{**M, "pool": "b"}])
        result = asyncio.create_task(gateway.tell())
        await asyncio.sleep(0.1)
        assert await gateway.ask() == "From a."
        assert not result.done()
        engine.may_start.set()
        assert await result == "ok"
        assert await gateway.ask() == "From b."


async def test_request_that_began_before_finds_its_fallback_afterwards(tmp_path: Path) -> None:
    gate = Gate()
    failing = ScriptedEngine(Script("x", gate=gate, error_after=0))
    engines = {"a": failing, "b": ScriptedEngine(Script("From b."))}
    async with running(tmp_path, engines, pools=[A, B], models=[{**M, "fallback": [{"pool": "b"}]}]) as gateway:
        request = asyncio.create_task(gateway.ask())
        await gate.arrived.wait()
        await gateway.reload()
        await asyncio.sleep(0.3)
        gate.open()
        assert await request == "From b."
        await until(lambda: not engines["b"].is_alive)
        assert await gateway.ask() == "engine_error"


async def test_admission_is_another_size_and_nobody_in_the_queue_is_lost(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(Script("From a.", gate=gate))
    async with running(tmp_path, {"a": engine}, admission={"max_in_flight": 1}) as gateway:
        requests = [asyncio.create_task(gateway.ask()) for _ in range(3)]
        admission = gateway.client.gateway.routes.pools["a"].pool.admission
        await until(lambda: admission.stats().waiting == 2)
        await gateway.reload(admission={"max_in_flight": 2})
        await until(lambda: (admission.stats().in_flight, admission.stats().waiting) == (2, 1))
        gate.open()
        assert await asyncio.gather(*requests) == ["From a."] * 3
        assert gateway.client.gateway.routes.pools["a"].pool.admission is admission


async def test_what_was_counted_counts_under_new_limits(tmp_path: Path) -> None:
    def of(limit: int) -> dict[str, Any]:
        return {"limits": {"tenant": {"requests_per_minute": limit}}}

    async with running(tmp_path, **of(5)) as gateway:
        assert [await gateway.ask(temperature=0) for _ in range(3)] == ["From a."] * 3
        await gateway.reload(**of(2))
        assert await gateway.ask(temperature=0) == "rate_limit_exceeded"
        await gateway.reload(**of(4))
        response = await gateway.client.post(DETERMINED)  # a hit, which goes the short way
        assert "hit" in response.headers["cache-status"]
        assert (response.headers["x-ratelimit-limit-requests"], response.status_code) == ("4", 200)
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert await gateway.ask(temperature=0) == "rate_limit_exceeded"
        await gateway.reload()
        assert await gateway.ask(temperature=0) == "From a."


async def test_slots_that_were_taken_are_given_back_under_new_limits(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(Script("From a.", gate=gate))

    def of(limit: int) -> dict[str, Any]:
        return {"limits": {"tenant": {"concurrent": limit}}}

    async with running(tmp_path, {"a": engine}, **of(2)) as gateway:
        requests = [asyncio.create_task(gateway.ask()) for _ in range(2)]
        await until(lambda: engine.load.running == 2)
        await gateway.reload(**of(1))
        assert await gateway.ask() == "concurrency_limit_exceeded"
        gate.open()
        assert await asyncio.gather(*requests) == ["From a."] * 2
        assert await gateway.ask() == "From a."
        assert "headrace_limiter_slots 0.0" in (await gateway.client.http.get("/metrics")).text


async def test_answers_are_kept_for_as_long_as_the_new_settings_say(tmp_path: Path) -> None:
    async with running(tmp_path, models=[{**M, "cache_ttl_s": 100}]) as gateway:

        async def ttl(seed: int) -> int:
            await gateway.client.post({**ASK, "seed": seed})
            status = (await gateway.client.post({**ASK, "seed": seed})).headers["cache-status"]
            return int(re.findall(r"hit; ttl=(\d+)", status)[0])

        assert await ttl(1) in (99, 100)
        await gateway.reload(models=[{**M, "cache_ttl_s": 1000}])
        assert await ttl(1) in (99, 100)
        assert await ttl(2) in (999, 1000)
        await gateway.reload()
        assert await ttl(3) in (3599, 3600)


async def test_answer_that_was_found_before_does_not_speak_for_those_who_ask_afterwards(tmp_path: Path) -> None:
    async with running(tmp_path, **variants(1, 0, sticky_by="subject")) as gateway:
        parts = gateway.client.gateway
        pipeline = Pipeline(
            parts.authenticator, Limiter(Policy()), parts.routes.models, parts.answers, 128, parts.counts
        )
        operation = OPERATIONS["/v1/chat/completions"]
        body = httpx.Request("POST", "http://x", json=DETERMINED).content

        def exchange() -> Exchange:
            return Exchange("POST", "/v1/chat/completions", {})

        early = exchange()
        assert pipeline.find_at_once(operation, early, body) is None
        assert early.wanted is not None
        await gateway.client.post(DETERMINED)
        hit = parts.answers.at_hand(parts.answers.key(early.wanted))
        assert hit is not None
        known = exchange()
        assert pipeline.find_at_once(operation, known, body) is not None
        known = exchange()
        assert pipeline.find_at_once(operation, known, body) is not None
        assert known.known is not None

        await gateway.reload(**variants(0, 1, sticky_by="subject"))
        assert pipeline.find_at_once(operation, exchange(), body) is None
        pipeline.use(early, hit)
        later = exchange()
        assert pipeline.find_at_once(operation, later, body) is None
        assert later.wanted is not None
        assert later.wanted.variant.name == "b"
        # Nor is what the one asked for, and did not find, stored as what the other one asked for.
        assert known.principal is not None
        wanted = pipeline.understand(operation, known, body, known.principal, SILENT)
        assert parts.answers.key(wanted) == parts.answers.key(later.wanted)


async def test_servers_get_the_key_that_its_file_holds_now(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first\n")
    async with fault_server() as upstream:
        pool = remote(upstream.url, api_key_file=str(key))
        async with running(tmp_path, pools=[pool]) as gateway:
            await gateway.ask()
            key.write_text("second\n")
            assert await gateway.tell() == "ok"
            await gateway.ask()
            unit = gateway.client.gateway.routes.pools["a"]
            assert await gateway.tell() == "ok"
            assert gateway.client.gateway.routes.pools["a"] is unit
            sent = [request.header("authorization") for request in upstream.requests]
            assert sent == ["Bearer first", "Bearer second"]


async def test_canary_that_was_rolled_back_stays_so_until_its_rules_are_others(tmp_path: Path) -> None:
    engines = {"a": ScriptedEngine(Script("From a.")), "b": ScriptedEngine(Script("x", error_after=0))}
    rules = {"variant": "b", "max_error_rate": 0.1, "min_requests": 5}
    async with running(tmp_path, engines, **variants(1, 1, guardrails=rules)) as gateway:

        def state() -> str:
            guardrail = gateway.client.gateway.routes.models.find("m").guardrail
            assert guardrail is not None
            return guardrail.state

        while state() != "rolled_back":
            await gateway.ask()
        await gateway.reload(**variants(1, 9, guardrails=rules))
        assert state() == "rolled_back"
        assert {await gateway.ask() for _ in range(20)} == {"From a."}
        await gateway.reload(**variants(1, 9, guardrails={**rules, "min_requests": 6}))
        assert state() == "watching"


async def test_shadows_go_on_counting_when_only_limits_change(tmp_path: Path) -> None:
    settings = variants(1, 0, shadow={"variant": "b"})
    async with running(tmp_path, **settings) as gateway:
        shadow = gateway.client.gateway.routes.models.find("m").shadow
        await gateway.reload(**settings, limits={"tenant": {"concurrent": 9}})
        assert gateway.client.gateway.routes.models.find("m").shadow is shadow
        await gateway.reload(**variants(1, 0, shadow={"variant": "b", "share": 0.5}))
        assert gateway.client.gateway.routes.models.find("m").shadow is not shadow


async def test_pools_and_parts_of_the_past_are_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        crew = gateway.client.gateway._crew._tasks
        parts = len(crew)
        for number in range(20):
            await gateway.reload(pools=[{**A, "scripted": {"text": f"{number}"}}])
        assert await gateway.ask() == "19"
        await until(lambda: len(crew) == parts)
        text = (await gateway.client.http.get("/metrics")).text
        assert text.count("\nheadrace_admission_in_flight{") == 1


async def test_reloads_under_load_lose_no_request(tmp_path: Path) -> None:
    statuses: list[int] = []
    async with fault_server() as upstream, running(tmp_path) as gateway:
        is_over = False

        async def load() -> None:
            while not is_over:
                statuses.append((await gateway.client.post(ASK)).status_code)

        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(load())
            for number in range(15):
                text = {"text": f"From a, {number}.", "token_s": 0.002}
                pool = remote(upstream.url) if number % 3 == 2 else {**A, "scripted": text}
                await gateway.reload(pools=[pool])
                await asyncio.sleep(0.03)
            is_over = True
    assert set(statuses) == {200}
    assert len(statuses) > 100


# What is refused

REMOTE = {"name": "a", "engine": "remote", "remote": {"urls": ["http://127.0.0.1:9"]}}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[server", "not TOML"),
        (toml(sever={}), "sever: unknown key"),
        (toml()[: len(toml()) // 2], ""),
        ("", "nobody could get in"),
        ("preset = [1]", "preset: Input should be"),
        (toml(pools=[A, B]), "no model uses 'b'"),
        (toml(models=[{"name": "m", "pool": "nope"}]), "names the pool 'nope'"),
        (toml(pools=[{**REMOTE, "remote": {"urls": ["http://h:99999"]}}]), "Port out of range"),
        (toml(pools=[remote("http://h", api_key_file="/nowhere/key")]), "/nowhere/key: No such file"),
        (toml(pools=[remote("https://h", ca_file="/nowhere/ca")]), "/nowhere/ca: No such file"),
        (toml(pools=[{"name": "a", "engine": "vllm", "vllm": {"model": "x"}}]), "options of 'a' have changed, which"),
        (
            toml(pools=[A, {"name": "v", "engine": "vllm", "vllm": {"model": "x"}}], models=[M, {**N, "pool": "v"}]),
            "pools: 'v' is new, which needs a restart",
        ),
        (toml(server={**SERVER, "port": 1}), "server.port has changed, which needs a restart"),
        (toml(server={**SERVER, "drain": {"drain_s": 6}}), "server.drain.settle_s has changed"),
        (toml(auth={"mode": "off", "allow_insecure": True}), "auth.allow_insecure has changed"),
        (toml(cache={"ttl_s": 5}), "cache.ttl_s has changed"),
        (toml(cache_dir="/nowhere"), "cache_dir has changed"),
        (toml(limits={"time_budget_ms": 5}), "limits.time_budget_ms has changed"),
    ],
)
async def test_file_that_cannot_be_used_changes_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, error: str
) -> None:
    async with running(tmp_path) as gateway:
        client = gateway.client
        before = client.gateway.routes.pools["a"]
        good = gateway.file.read_text()
        gateway.file.write_text(text)
        assert await gateway.tell() == "refused"
        config = await gateway.config()
        assert config["status"] == "degraded"
        assert error in config["last_error"]
        assert "\n" not in config["last_error"]
        health = await client.http.get("/health/ready")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert 'headrace_config_reloads_total{result="refused"} 1.0' in (await client.http.get("/metrics")).text
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert errors == [f"settings refused, the old ones stay in force: {config['last_error']}"]
        assert await gateway.ask() == "From a."
        assert client.gateway.routes.pools["a"] is before

        gateway.file.write_text(good)
        assert await gateway.tell() == "ok"
        assert (await gateway.config())["last_error"] is None
        assert (await client.http.get("/health")).json()["status"] == "ok"
        assert client.gateway.routes.pools["a"] is before


async def test_engine_of_this_process_keeps_its_options_and_may_go(tmp_path: Path) -> None:
    def of(model: str, **more: Any) -> dict[str, Any]:
        return {"name": "b", "engine": "vllm", "vllm": {"model": model}, **more}

    engine = ScriptedEngine(Script("From b."))
    async with running(tmp_path, {"b": engine}, pools=[A, of("x")], models=[M, N]) as gateway:
        gateway.write(pools=[A, of("y")], models=[M, N])
        assert await gateway.tell() == "refused"
        assert "options of 'b' have changed, which needs a restart" in (await gateway.config())["last_error"]
        await gateway.reload(pools=[A, of("x", admission={"max_in_flight": 3})], models=[M, {**N, "name": "o"}])
        assert await gateway.ask("o") == "From b."
        assert engine.starts == 1
        await gateway.reload()
        await until(lambda: not engine.is_alive)


async def test_what_has_changed_is_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(tmp_path, pools=[A, B], models=[M, N]) as gateway:
        loaded_at = (await gateway.config())["loaded_at"]
        await gateway.reload(
            pools=[A, {**B, "name": "c"}],
            models=[{**M, "revision": "2"}, {**N, "pool": "c"}, {**M, "name": "o"}],
            limits={"tenant": {"concurrent": 9}},
            admission={"max_queue": 9},
        )
        await gateway.reload(models=[M])
        assert await gateway.tell() == "ok"
        told = [text for record in caplog.records if (text := record.getMessage()).startswith("settings reloaded: ")]
        assert [text.removeprefix("settings reloaded: ") for text in told] == [
            "models added: o; models changed: m, n; pools added: c; pools removed: b; admission changed; "
            "limits changed",
            "models removed: n, o; models changed: m; pools removed: c; admission changed; limits changed",
            "nothing has changed",
        ]
        text = (await gateway.client.http.get("/metrics")).text
        assert 'headrace_config_reloads_total{result="ok"} 3.0' in text
        assert abs(float(text.split("\nheadrace_config_loaded_timestamp_seconds ")[1].split()[0]) - time.time()) < 60
        assert (await gateway.config())["loaded_at"] > loaded_at


async def test_gateway_without_a_source_says_nothing_of_its_settings(client: Client) -> None:
    assert "config" not in (await client.http.get("/health")).json()["components"]
    assert "headrace_config" not in (await client.http.get("/metrics")).text


# Who looks


async def test_change_of_the_file_is_seen(tmp_path: Path) -> None:
    async with running(tmp_path, server=WATCHED) as gateway:
        await asyncio.sleep(0.2)
        assert gateway.results == {"ok": 0, "refused": 0}
        gateway.write(server=WATCHED, models=[{**M, "name": "o"}])
        assert await gateway.next_result({"ok": 0, "refused": 0}) == "ok"
        assert await gateway.ask("o") == "From a."
        os.utime(gateway.file)  # as if written; nothing is another
        await asyncio.sleep(0.2)
        assert gateway.results == {"ok": 1, "refused": 0}


async def test_change_before_the_first_look_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(toml(server=WATCHED))
    source = SettingsSource(file)
    source.load()
    file.write_text(toml(server=WATCHED, models=[{**M, "name": "o"}]))
    assert source.has_changed(source.digest())
    source.load()
    assert not source.has_changed(source.digest())


async def test_volume_of_kubernetes_is_swapped_by_its_link(tmp_path: Path) -> None:
    def add(version: str, **sections: Any) -> None:
        """As kubelet's AtomicWriter: a folder, and a link to it that is renamed onto the old one."""
        folder = tmp_path / f"..{version}"
        folder.mkdir()
        (folder / "headrace.toml").write_text(toml(server=WATCHED, **sections))
        (tmp_path / "..data_tmp").symlink_to(folder.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    add("1")
    file = tmp_path / "headrace.toml"
    file.symlink_to("..data/headrace.toml")
    async with serving(source=SettingsSource(file)) as client:
        gateway = Running(client, file)
        add("2", models=[{**M, "name": "o"}])
        assert await gateway.next_result({"ok": 0, "refused": 0}) == "ok"
        assert await gateway.ask("o") == "From a."


async def test_half_a_file_is_refused_once_and_the_whole_one_is_taken(tmp_path: Path) -> None:
    async with running(tmp_path, server=WATCHED) as gateway:
        text = toml(server=WATCHED, models=[{**M, "name": "o"}])
        gateway.file.write_text(text[:-5])
        assert await gateway.next_result({"ok": 0, "refused": 0}) == "refused"
        await asyncio.sleep(0.3)
        assert gateway.results == {"ok": 0, "refused": 1}
        assert await gateway.ask("m") == "From a."
        gateway.file.write_text(text)
        assert await gateway.next_result({"ok": 0, "refused": 1}) == "ok"
        assert await gateway.ask("o") == "From a."


async def test_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    async with running(tmp_path, server=WATCHED) as gateway:
        text = toml(server=WATCHED, models=[{**M, "name": "o"}])
        with gateway.file.open("w") as file:
            for start in range(0, len(text), 20):
                file.write(text[start : start + 20])
                file.flush()
                await asyncio.sleep(0.03)
        assert await gateway.next_result({"ok": 0, "refused": 0}) == "ok"


async def test_refused_file_is_tried_again_when_it_needed_another_one(tmp_path: Path) -> None:
    async with fault_server() as upstream, running(tmp_path, server=WATCHED) as gateway:
        key = tmp_path / "key"
        gateway.write(server=WATCHED, pools=[remote(upstream.url, api_key_file=str(key))])
        assert await gateway.next_result({"ok": 0, "refused": 0}) == "refused"
        key.write_text("late")
        assert await gateway.next_result({"ok": 0, "refused": 1}) == "ok"
        await gateway.ask()
        assert upstream.requests[0].header("authorization") == "Bearer late"


def test_file_that_is_gone_is_no_reason_for_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    default = tmp_path / "headrace.toml"
    default.write_text(toml())
    source = SettingsSource()
    source.load()
    default.unlink()
    assert source.has_changed(source.digest())
    with pytest.raises(SettingsError, match=r"headrace\.toml: No such file"):
        source.load()


def test_settings_of_the_environment_alone_never_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = SettingsSource(preset="development")
    assert source.load().preset == "development"
    assert not source.has_changed(source.digest())


@pytest.mark.slow
async def test_hangup_reloads_and_the_gateway_ends_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE__SERVER__RELOAD_EVERY_S", "0")
    with process(tmp_path, settle_s=0) as (gateway, url):
        await until_up(url)
        file = tmp_path / "headrace.toml"
        file.write_text(file.read_text().replace("[server]", "[server]\nbacklog = 7", 1))
        async with httpx.AsyncClient(base_url=url) as http:

            async def hang_up(total: str) -> None:
                gateway.send_signal(signal.SIGHUP)
                async with asyncio.timeout(10):
                    while total not in (await http.get("/metrics")).text:
                        await asyncio.sleep(0.02)

            async def status(model: str) -> int:
                return (await http.post("/v1/chat/completions", json={**CHAT, "model": model})).status_code

            await hang_up('headrace_config_reloads_total{result="refused"} 1.0')
            assert (
                "server.backlog has changed" in (await http.get("/health")).json()["components"]["config"]["last_error"]
            )
            file.write_text(file.read_text().replace("backlog = 7\n", "").replace('"demo"', '"renamed"'))
            await hang_up('headrace_config_reloads_total{result="ok"} 1.0')
            assert (await status("demo"), await status("renamed")) == (404, 200)
        gateway.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.wait, 10) == 0
