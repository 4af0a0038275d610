"""Engines that die, hang, or never start."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.engines import supervisor
from app.engines.scripted import Gate, Script, ScriptedEngine
from app.engines.supervisor import SupervisedEngine
from app.gateway import Gateway
from routing.engine import Call
from routing.errors import EngineConfigError, EngineError, EngineUnavailable

from .conftest import CHAT, events_of, make_settings, serving, until

CALL = Call("chat.completions", "demo", {"messages": [{"role": "user", "content": "x"}]}, "id")


@asynccontextmanager
async def supervised(engine: ScriptedEngine) -> AsyncIterator[SupervisedEngine]:
    watched = SupervisedEngine("demo", engine, first_backoff_s=0.01)
    task = asyncio.create_task(watched.run())
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert watched.status().state == "stopped"
        assert not engine.is_alive


async def test_engine_that_dies_while_idle_is_noticed_and_started_again() -> None:
    engine = ScriptedEngine(Script("One."))
    async with supervised(engine) as watched:
        await watched.has_started.wait()
        engine.is_alive = False
        await until(lambda: not watched.is_ready)
        assert watched.status().last_error
        await until(lambda: watched.is_ready)
        assert (engine.starts, watched.restarts) == (2, 1)
        assert (await watched.answer(CALL)).usage is not None


@pytest.mark.slow
async def test_death_during_a_request_is_answered_with_engine_unavailable_and_retry_after() -> None:
    scripts = iter([Script("One two.", die_after=1), Script("One two.", die_after=1), Script("One.")])
    async with serving(engine=ScriptedEngine(lambda call: next(scripts))) as client:
        whole = await client.post()
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(whole.headers["retry-after"]) >= 1
        refused = await client.post()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        await until(lambda: client.gateway.engines["demo"].is_ready)
        stream = await client.post({**CHAT, "stream": True})
        events = events_of(stream.text)
        assert events[0]["choices"][0]["delta"]["content"] == "One"
        assert events[-1]["error"]["code"] == "engine_unavailable"
        health = (await client.http.get("/health")).json()
        assert health["components"]["engine:demo"]["last_error"]
        await until(lambda: client.gateway.engines["demo"].is_ready)
        assert (await client.post()).status_code == 200
        metrics = (await client.http.get("/metrics")).text
        assert 'headrace_engine_restarts_total{pool="demo"} 2.0' in metrics


class FlakyEngine(ScriptedEngine):
    """Fails to start the first `failures` times."""

    def __init__(self, failures: int, error: type[Exception] = EngineError) -> None:
        super().__init__(Script("One."))
        self.failures = failures
        self.error = error

    async def start(self) -> None:
        await super().start()
        if self.starts <= self.failures:
            self.is_alive = False
            raise self.error("no memory")


async def test_engine_that_fails_to_start_is_tried_again_with_growing_waits() -> None:
    engine = FlakyEngine(failures=3)
    async with supervised(engine) as watched:
        await until(lambda: watched.is_ready)
        assert engine.starts == 4
        assert watched.status().last_error == "no memory"
        assert watched._backoff_s == pytest.approx(0.04)


async def test_engine_whose_settings_are_wrong_stops_the_gateway() -> None:
    gateway = Gateway(make_settings(), {"demo": FlakyEngine(1, EngineConfigError)})
    with pytest.raises(EngineConfigError, match="no memory"):
        await asyncio.wait_for(gateway.serve(), 5)


async def test_settings_that_turn_wrong_later_do_not_stop_the_gateway() -> None:
    class ForgetfulEngine(ScriptedEngine):
        async def start(self) -> None:
            await super().start()
            if self.starts == 2:
                self.is_alive = False
                raise EngineConfigError("the hub does not answer")

    engine = ForgetfulEngine(Script("One."))
    async with supervised(engine) as watched:
        await watched.has_started.wait()
        engine.is_alive = False
        await until(lambda: watched.is_ready and engine.starts == 3)
        assert watched.status().last_error == "the hub does not answer"


async def test_requests_while_the_engine_starts_are_told_when_to_come_again() -> None:
    gate = asyncio.Event()

    class SlowEngine(ScriptedEngine):
        async def start(self) -> None:
            await gate.wait()
            await super().start()

    async with supervised(SlowEngine(Script("One."))) as watched:
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="is starting") as caught:
            await watched.answer(CALL)
        assert caught.value.retry_after_s > 20
        with pytest.raises(EngineUnavailable):
            await watched.stream(CALL, lambda event: None)
        gate.set()
        await until(lambda: watched.is_ready)


async def test_slow_check_is_shown_and_leaves_running_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CHECK_TIMEOUT_S", 0.05)
    is_slow = asyncio.Event()
    gate = Gate()

    class HangingEngine(ScriptedEngine):
        async def check(self) -> None:
            if is_slow.is_set():
                await asyncio.sleep(60)

    engine = HangingEngine(Script("One two.", gate=gate))
    monkeypatch.setattr(supervisor, "CHECK_EVERY_S", 0.01)
    async with supervised(engine) as watched:
        await watched.has_started.wait()
        answer = asyncio.create_task(watched.answer(CALL))
        is_slow.set()
        await until(lambda: watched.status().state == "unresponsive")
        gate.open()
        assert (await answer).usage.completion_tokens == 2
        is_slow.clear()
        await until(lambda: watched.status().state == "ready")
        assert engine.starts == 1
