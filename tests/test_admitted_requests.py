"""A pool's admission as callers meet it: who is answered, who waits, who is told to come again."""

import asyncio
import hashlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.engines.scripted import Gate, Script, ScriptedEngine
from routing.admission import AdmissionStats
from routing.engine import Call

from .conftest import CHAT, Client, Connection, events_of, serving, until
from .test_collapsed_requests import finish
from .test_load import port_of
from .tokens import JWT_SETTINGS, bearer, token

ASK = {**CHAT, "temperature": 0}
KEY = "hr-key-of-somebody-important"
AUTH = {
    "jwt": JWT_SETTINGS,
    "api_keys": [{"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "subject": "vip", "priority": 9}],
}
OVERLOADED = (503, "overloaded")


class Queue:
    """A gateway whose engine answers one request with each `let`."""

    def __init__(self, client: Client, gate: Gate, asked: list[str]) -> None:
        self.client = client
        self.gate = gate
        self.asked = asked  # what the engine was asked, in this order

    def stats(self, pool: str = "demo") -> AdmissionStats:
        return self.client.gateway.routes.pools[pool].pool.admission.stats()

    async def open(
        self, name: str = "x", stream: bool = False, is_to_wait: bool | None = None, **claims: Any
    ) -> Connection:
        """Send a request; `is_to_wait` tells whether it is to find a place in the queue, or a free slot."""
        return await self.send(name, bearer(token(**claims)), stream, is_to_wait)

    async def send(
        self, name: str, headers: dict[str, str], stream: bool = False, is_to_wait: bool | None = None
    ) -> Connection:
        before = self.stats()
        body = {**CHAT, "messages": [{"role": "user", "content": name}], "stream": stream}
        connection = await self.client.open(body, headers=headers)
        if is_to_wait:
            await until(lambda: self.stats().waiting == before.waiting + 1)
        elif is_to_wait is not None:
            await until(lambda: self.client.engine.load.running == before.in_flight + 1)
        return connection

    async def fill(self, slots: int, places: int = 0) -> list[Connection]:
        connections = [await self.open("first", is_to_wait=False) for _ in range(slots)]
        return connections + [await self.open("waiting", is_to_wait=True) for _ in range(places)]

    async def let(self, count: int = 1) -> None:
        """Have so many answered, one after the other."""
        for _ in range(count):
            admitted, waiting = self.stats().admitted, self.stats().waiting
            self.gate.release(1)
            if waiting:
                await until(lambda admitted=admitted: self.stats().admitted == admitted + 1)  # type: ignore[misc]


@asynccontextmanager
async def queue(
    max_in_flight: int, max_queue: int, server: dict[str, Any] | None = None, **admission: Any
) -> AsyncIterator[Queue]:
    gate = Gate()
    asked: list[str] = []

    def script(call: Call) -> Script:
        asked.append(call.body["messages"][0]["content"])
        return Script("One.", gate=gate)

    bounds = {"max_in_flight": max_in_flight, "max_queue": max_queue, **admission}
    async with serving(script, server, auth=AUTH, admission=bounds) as client:
        yield Queue(client, gate, asked)


async def outcome(connection: Connection) -> tuple[int, str]:
    """The status, and the text or the error's code."""
    status, _, text = await asyncio.wait_for(finish(connection), 5)
    return status, text


@pytest.mark.parametrize("stream", [False, True])
async def test_one_more_than_slots_and_queue_hold_is_refused_at_once(stream: bool) -> None:
    async with queue(2, 3) as full:
        held = await full.fill(2, 3)
        async with asyncio.timeout(1):
            refused = await full.client.post({**CHAT, "stream": stream}, headers=bearer(token()))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (503, "overloaded", "server_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert full.asked == ["first"] * 2
        full.gate.open()
        assert [await outcome(connection) for connection in held] == [(200, "One.")] * 5
        metrics = (await full.client.http.get("/metrics")).text
        for line in (
            'headrace_admission_admitted_total{pool="demo"} 5.0',
            'headrace_admission_refused_total{cause="queue_full",pool="demo"} 1.0',
            'headrace_admission_waits_total{pool="demo"} 3.0',
            'headrace_admission_in_flight{pool="demo"} 0.0',
            'headrace_admission_waiting{pool="demo"} 0.0',
            'headrace_admission_waiting_bytes{pool="demo"} 0.0',
            'headrace_requests_total{model="demo",operation="chat.completions",outcome="error",variant=""} 1.0',
        ):
            assert line in metrics, line


async def test_page_for_operators_tells_the_queue_and_who_was_refused() -> None:
    async with queue(1, 1) as full:
        await full.fill(1, 1)
        assert (await full.client.post(headers=bearer(token()))).status_code == 503
        page = await full.client.http.get("/v1/routing", headers=bearer(token(scope="routing:read")))
        (pool,) = page.json()["pools"]
        assert pool["admission"]["refused"] == {"queue_full": 1}
        assert (pool["admission"]["in_flight"], pool["admission"]["waiting"]) == (1, 1)
        assert pool["admission"]["waiting_bytes"] > len(json.dumps(CHAT)) / 2


async def test_higher_priority_overtakes() -> None:
    async with queue(1, 10) as one:
        await one.fill(1)
        for name, priority in (("low", -1), ("usual", 0), ("high", 5), ("higher", 7), ("high too", 5)):
            await one.open(name, is_to_wait=True, priority=priority)
        await one.send("highest", bearer(KEY), is_to_wait=True)
        await one.let(6)
        assert one.asked == ["first", "highest", "higher", "high", "high too", "usual", "low"]


@pytest.mark.parametrize("stream", [False, True])
async def test_higher_priority_takes_the_place_of_a_lower_one_in_a_full_queue(stream: bool) -> None:
    async with queue(1, 2) as full:
        await full.fill(1)
        low = [await full.open(f"low {number}", stream, is_to_wait=True) for number in range(2)]
        high = [await full.open(f"high {number}", priority=5) for number in range(2)]
        assert [await outcome(connection) for connection in low] == [OVERLOADED] * 2
        assert full.stats().refused == {"shed": 2}
        assert await outcome(await full.open("high 2", priority=5)) == OVERLOADED  # there is nobody to shed
        full.gate.open()
        assert [await outcome(connection) for connection in high] == [(200, "One.")] * 2
        assert full.asked == ["first", "high 0", "high 1"]


async def test_tenants_take_turns_however_many_of_one_wait() -> None:
    async with queue(1, 20) as one:
        await one.fill(1)
        for number in range(6):
            await one.open(f"a{number}", is_to_wait=True, tenant="a")
        for number in range(3):
            await one.open(f"b{number}", is_to_wait=True, tenant="b")
        await one.let(9)
        assert one.asked[1:] == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


async def test_tenant_gets_the_slots_that_another_has_more_of() -> None:
    async with queue(4, 20) as four:
        for number in range(4):
            await four.open(f"a{number}", is_to_wait=False, tenant="a")
        for number in range(4, 8):
            await four.open(f"a{number}", is_to_wait=True, tenant="a")
        for number in range(2):
            await four.open(f"b{number}", is_to_wait=True, tenant="b")
        await four.let(2)
        assert four.asked[4:] == ["b0", "b1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_caller_who_leaves_the_queue_leaves_the_place_to_another(stream: bool) -> None:
    async with queue(1, 2) as full:
        await full.fill(1)
        gone = [await full.open("gone", stream, is_to_wait=True) for _ in range(2)]
        for connection in gone:
            connection.abort()
        await until(lambda: full.stats().waiting == 0, timeout_s=1)
        assert full.stats().waiting_bytes == 0
        stayed = [await full.open("stayed", stream, is_to_wait=True) for _ in range(2)]
        full.gate.open()
        assert [await outcome(connection) for connection in stayed] == [(200, "One.")] * 2
        assert full.asked == ["first", "stayed", "stayed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_caller_who_leaves_the_engine_leaves_the_slot_to_who_waits(stream: bool) -> None:
    async with queue(1, 2) as one:
        leaving = await one.open("leaving", stream, is_to_wait=False)
        waiting = await one.open("waiting", stream, is_to_wait=True)
        leaving.abort()
        await until(lambda: one.asked == ["leaving", "waiting"], timeout_s=1)
        one.gate.open()
        assert await outcome(waiting) == (200, "One.")


async def test_stored_answers_do_not_wait_while_the_engine_has_too_much_to_do() -> None:
    async with queue(1, 1) as full:
        ann = bearer(token())
        full.gate.release(2)
        for seed in (1, 2):
            assert (await full.client.post({**ASK, "seed": seed}, headers=ann)).status_code == 200
        await full.fill(1, 1)
        assert (await full.client.post(headers=ann)).status_code == 503
        async with asyncio.timeout(1):
            for number in range(20):
                body = {**ASK, "seed": 1 + number % 2, "stream": number % 3 == 0, "user": f"u{number % 5}"}
                response = await full.client.post(body, headers=ann)
                assert (response.status_code, "; hit; " in response.headers["cache-status"]) == (200, True)
        assert full.stats().admitted == 3


async def test_identical_requests_take_one_slot_together() -> None:
    async with queue(1, 0) as one:
        together = [asyncio.create_task(one.client.post(ASK, headers=bearer(token()))) for _ in range(10)]
        await until(lambda: one.client.gateway.flights.stats().followers == 9)
        assert (await one.client.post(headers=bearer(token()))).status_code == 503
        one.gate.open()
        assert {(await task).status_code for task in together} == {200}


@pytest.mark.parametrize("stream", [False, True])
async def test_wait_ends_after_its_time(stream: bool) -> None:
    async with queue(1, 5, queue_timeout_s=0.15) as one:
        await one.fill(1)
        began = time.monotonic()
        assert await outcome(await one.open(stream=stream, is_to_wait=True)) == OVERLOADED
        assert 0.1 < time.monotonic() - began < 1
        assert one.stats().refused == {"queue_timeout": 1}
        assert one.asked == ["first"]


async def test_stream_that_waits_is_kept_alive_and_told_of_the_end_in_band() -> None:
    async with queue(1, 5, server={"ping_s": 0.04}, queue_timeout_s=0.3) as one:
        await one.fill(1)
        response = await one.client.post({**CHAT, "stream": True}, headers=bearer(token()))
        assert response.status_code == 200
        assert response.text.startswith(":")
        (error,) = events_of(response.text)
        assert error["error"]["code"] == "overloaded"


async def test_requests_that_wait_take_no_more_bytes_than_they_may() -> None:
    async with queue(1, 100, max_queue_bytes=2000) as one:
        await one.fill(1)
        assert await outcome(await one.open("x" * 2000)) == OVERLOADED
        await one.open("x" * 1500, is_to_wait=True)
        assert await outcome(await one.open("x" * 1500)) == OVERLOADED
        await one.open("y", is_to_wait=True)
        assert 1500 < one.stats().waiting_bytes <= 2000
        high = await one.open("x" * 1500, priority=5)
        await until(lambda: one.stats().refused == {"queue_full": 2, "shed": 2})
        one.gate.open()
        assert await outcome(high) == (200, "One.")


async def test_pool_has_bounds_of_its_own_and_leaves_others_alone() -> None:
    gates = {"small": Gate(), "large": Gate()}
    engines = {name: ScriptedEngine(Script("One.", gate=gate)) for name, gate in gates.items()}
    own = {"admission": {"max_in_flight": 1, "max_queue": 0}}
    pools = [{"name": "small", "engine": "scripted", **own}, {"name": "large", "engine": "scripted"}]
    bounds = {"max_in_flight": 5, "max_queue": 5}
    async with serving(engines=engines, pools=pools, auth=AUTH, admission=bounds) as client:
        ann = bearer(token())
        small = await client.open({**CHAT, "model": "small"}, headers=ann)
        await until(lambda: engines["small"].load.running == 1)
        assert (await client.post({**CHAT, "model": "small"}, headers=ann)).status_code == 503
        large = [await client.open({**CHAT, "model": "large"}, headers=ann) for _ in range(5)]
        await until(lambda: engines["large"].load.running == 5)
        for gate in gates.values():
            gate.open()
        assert {await outcome(connection) for connection in (small, *large)} == {(200, "One.")}


async def test_whatever_becomes_of_requests_every_slot_and_place_is_given_back() -> None:
    scripts = [Script("One two.", token_s=0.005), Script("One.", error_after=0), Script("One.", error_after=1)]
    bounds = {"max_in_flight": 3, "max_queue": 20, "queue_timeout_s": 0.3}
    async with serving(lambda call: scripts[int(call.body["user"]) % 3], auth=AUTH, admission=bounds) as client:
        for _ in range(3):
            connections = []
            for number in range(40):
                body = {**CHAT, "user": str(number), "stream": number % 2 == 0}
                headers = bearer(token(priority=number % 4, tenant=f"t{number % 5}"))
                connections.append(await client.open(body, headers=headers))
                if number % 5 == 4:
                    connections[-1 - number % 4].abort()
            await client.until_idle(5)
        stats = client.gateway.routes.pools["demo"].pool.admission.stats()
        assert (stats.in_flight, stats.waiting, stats.waiting_bytes) == (0, 0, 0)
        assert stats.admitted > 10
        assert (await client.post({**CHAT, "user": "0"}, headers=bearer(token()))).status_code == 200


# Under load

SLOTS, PLACES = 50, 100
TOKENS, TOKEN_S = 10, 0.025
CONFIG = f"""
preset = "production"
[server]
port = 0
drain = {{ settle_s = 0, drain_s = 1 }}
[monitoring]
log_level = "warning"
[auth]
mode = "off"
[admission]
max_in_flight = {SLOTS}
max_queue = {PLACES}
[[pools]]
name = "demo"
engine = "scripted"
scripted = {{ text = "{" ".join(["word"] * TOKENS)}", first_token_s = {TOKEN_S}, token_s = {TOKEN_S} }}
"""


class Crowd:
    """Asks one gateway; each answer's status, its seconds, and when it was there are written down."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._idle: list[Connection] = []
        data = json.dumps(CHAT).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        self._request = head.encode() + data
        self.answers: list[tuple[int, float, float]] = []

    async def ask(self) -> None:
        connection = self._idle.pop() if self._idle else Connection(*await asyncio.open_connection(*self._address))
        began = time.monotonic()
        connection.writer.write(self._request)
        head = await connection.reader.readuntil(b"\r\n\r\n")
        await connection.reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        now = time.monotonic()
        self.answers.append((int(head[9:12]), now - began, now))
        self._idle.append(connection)

    async def in_turns(self, callers: int, seconds: float) -> float:
        """So many at a time; answers per second."""
        end = time.monotonic() + seconds

        async def call() -> None:
            while time.monotonic() < end:
                await self.ask()

        await asyncio.gather(*(call() for _ in range(callers)))
        return self.rate(end - 0.8 * seconds, end)

    async def at_a_rate(self, per_s: float, seconds: float) -> float:
        """So many a second, whatever becomes of them; answers per second."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(int(per_s * seconds)):
                await asyncio.sleep(began + number / per_s - time.monotonic())
                group.create_task(self.ask())
        return self.rate(began + 0.2 * seconds, began + seconds)

    def rate(self, start: float, end: float) -> float:
        return sum(status == 200 and start <= at < end for status, _, at in self.answers) / (end - start)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()


@pytest.mark.slow
async def test_twice_the_load_that_is_admitted_costs_neither_throughput_nor_patience(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "app", "serve", "--config", str(config)]
    gateway = await asyncio.create_subprocess_exec(*command)
    try:
        address = ("127.0.0.1", await port_of(gateway.pid))
        at_limit = Crowd(address)
        limit_per_s = await at_limit.in_turns(SLOTS, 5)
        assert {status for status, _, _ in at_limit.answers} == {200}
        at_limit.close()
        twice = Crowd(address)
        rate_per_s = await twice.at_a_rate(2 * limit_per_s, 8)
        twice.close()
        accepted = [seconds for status, seconds, _ in twice.answers if status == 200]
        refused = [seconds for status, seconds, _ in twice.answers if status == 503]
        p99_s = statistics.quantiles(accepted, n=100)[98]
        print(
            f"{limit_per_s:.0f}/s at the limit, {rate_per_s:.0f}/s at twice the load, {len(refused)} refused in "
            f"{statistics.median(refused) * 1000:.1f} ms, accepted p99 {p99_s * 1000:.0f} ms"
        )
        assert len(accepted) + len(refused) == len(twice.answers)
        assert limit_per_s > 0.8 * SLOTS / (TOKENS * TOKEN_S)  # the engine is the bound
        assert rate_per_s > 0.95 * limit_per_s
        assert p99_s < 1.1 * (SLOTS + PLACES) / limit_per_s
        assert statistics.median(refused) < 0.05
    finally:
        gateway.terminate()
        assert await asyncio.wait_for(gateway.wait(), 20) == 0
