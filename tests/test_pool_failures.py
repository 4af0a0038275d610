"""Pools whose servers fail, one way or the other: who answers then, and what the caller is told when nobody does."""

import asyncio
import json
import os
import resource
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest

from app.engines.remote import RemoteEngine, Upstream
from app.engines.scripted import Script, ScriptedEngine
from routing.detours import Fallback, WithFallbacks
from routing.engine import Call

from .conftest import CHAT, Client, events_of, serving, text_of, until
from .fault_answers import GOOD, Behaviour
from .fault_server import FaultServer, fault_server

FAR = {**CHAT, "model": "far"}
CACHED = {**FAR, "temperature": 0}
TEXT = "One two three four five."
QUIET = {"probe_every_s": 60}
UNBREAKABLE = {"failures": 10**6, "min_requests": 10**6}
CAUSES = ["unavailable", "overloaded", "timeout", "error", "context_length"]


class Fleet:
    """A gateway in front of servers, each a replica of the pool `far`, which are asked in turn."""

    def __init__(self, client: Client, servers: Sequence[FaultServer]) -> None:
        self.client = client
        self.servers = servers

    @property
    def counts(self) -> list[int]:
        return [len(server.requests) for server in self.servers]

    async def ask(self, body: dict[str, Any] = FAR, **more: Any) -> httpx.Response:
        return await self.client.post({**body, **more})

    async def pool(self) -> dict[str, Any]:
        pools = (await self.client.http.get("/v1/routing")).json()["pools"]
        return next(pool for pool in pools if pool["name"] == "far")

    async def replicas(self, field: str) -> list[Any]:
        """In the servers' order."""
        named = {replica["name"]: replica[field] for replica in (await self.pool())["replicas"]}
        return [named[server.url] for server in self.servers]

    async def until(self, field: str, values: list[Any]) -> None:
        async with asyncio.timeout(5):
            while await self.replicas(field) != values:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet(
    *behaviours: Behaviour,
    remote: dict[str, Any] | None = None,
    fallback: list[dict[str, Any]] | None = None,
    engine: ScriptedEngine | None = None,
    demo: dict[str, Any] | None = None,
    **pool: Any,
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(fault_server(behaviour)) for behaviour in behaviours]
        far = {
            "name": "far",
            "engine": "remote",
            "remote": {"urls": [server.url for server in servers], **QUIET, **(remote or {})},
            "balance": "round_robin",
            "ready_wait_s": 0.1,
            **pool,
        }
        client = await stack.enter_async_context(
            serving(
                engine=engine,
                pools=[{"name": "demo", "engine": "scripted", **(demo or {})}, far],
                models=[
                    {"name": "demo", "pool": "demo"},
                    {"name": "far", "pool": "far", "fallback": fallback or []},
                ],
            )
        )
        ships = Fleet(client, servers)
        yield ships
        await client.until_idle()
        assert await ships.replicas("in_flight") == [0] * len(servers)


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def text_in(response: httpx.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        return text_of(events_of(response.text))
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


# Probes


async def test_server_that_fails_its_probes_is_not_asked_until_one_is_answered() -> None:
    async with fleet(GOOD, GOOD, remote={"probe_every_s": 0.02, "probe_failures": 3}) as ships:
        ships.servers[0].health_status = 503
        await ships.until("is_ready", [False, True])
        assert len(ships.servers[0].probes) >= 3
        for _ in range(4):
            assert (await ships.ask()).status_code == 200
        assert ships.counts == [0, 4]
        health = (await ships.client.http.get("/health")).json()["components"]["pool:far"]
        assert (health["replicas"], health["available"]) == (2, 1)
        assert "503" in health["last_error"]
        ships.servers[0].health_status = 200
        await ships.until("is_ready", [True, True])
        for _ in range(4):
            assert (await ships.ask()).status_code == 200
        assert ships.counts == [2, 6]


async def test_server_whose_probe_hangs_or_finds_nobody_is_down() -> None:
    remote = {"probe_every_s": 0.02, "probe_timeout_s": 0.1}
    async with fleet(GOOD, GOOD, GOOD, remote=remote) as ships:
        ships.servers[0].health_stalls = True
        await ships.servers[1].stop()
        await ships.until("is_ready", [False, False, True])
        ships.servers[0].health_stalls = False
        await ships.servers[1].start()
        await ships.until("is_ready", [True, True, True])


async def test_busy_event_loop_fails_no_probe() -> None:
    async with fault_server() as upstream:
        engine = RemoteEngine("a", "127.0.0.1", upstream.port, Upstream(probe_every_s=0.01, probe_timeout_s=0.1))
        probing = asyncio.create_task(engine.run())
        for _ in range(3):
            probes = len(upstream.probes)
            await until(lambda probes=probes: len(upstream.probes) > probes)  # type: ignore[misc]
            time.sleep(0.15)  # noqa: ASYNC251
        await asyncio.sleep(0.05)
        assert (engine.is_ready, engine.last_error) == (True, None)
        probing.cancel()
        await asyncio.wait([probing])


# Breakers


async def test_server_that_fails_again_and_again_is_asked_no_more_for_a_while() -> None:
    async with fleet(Behaviour(status=500), GOOD, breaker={"failures": 3, "open_s": 60}) as ships:
        for _ in range(12):
            assert text_in(await ships.ask()) == TEXT
        assert ships.counts == [3, 12]
        assert await ships.replicas("state") == ["open", "closed"]
        assert await ships.replicas("failures") == [3, 0]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 413, 422])
async def test_refusals_do_not_open_a_breaker(status: int) -> None:
    breaker = {"failures": 1, "min_requests": 1}
    async with fleet(Behaviour(status=status, error={"param": "model"}), breaker=breaker) as ships:
        for number in range(4):
            assert (await ships.ask(stream=number % 2 == 0)).status_code in (400, 501, 502)
        assert await ships.replicas("state") == ["closed"]
        assert await ships.replicas("failures") == [0]
        ships.servers[0].behave(GOOD)
        assert text_in(await ships.ask()) == TEXT


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_refusal_of_the_probe_leaves_a_breaker_half_open(status: int) -> None:
    async with fleet(Behaviour(status=500), breaker={"failures": 1, "open_s": 0.1}) as ships:
        assert error_of(await ships.ask()) == (502, "engine_error")
        await ships.until("state", ["half_open"])
        ships.servers[0].behave(Behaviour(status=status))
        for _ in range(3):
            assert (await ships.ask()).status_code in (400, 501, 502)
            assert await ships.replicas("state") == ["half_open"]
        ships.servers[0].behave(GOOD)
        assert text_in(await ships.ask()) == TEXT
        assert await ships.replicas("state") == ["closed"]


async def test_half_open_breaker_lets_one_request_through() -> None:
    async with fleet(Behaviour(status=500), breaker={"failures": 1, "open_s": 0.2}, ready_wait_s=0.02) as ships:
        await ships.ask()
        assert await ships.replicas("state") == ["open"]
        assert error_of(await ships.ask()) == (503, "engine_unavailable")
        await ships.until("state", ["half_open"])
        ships.servers[0].behave(Behaviour(is_gated=True))
        asked = [asyncio.create_task(ships.ask()) for _ in range(10)]
        await ships.servers[0].arrived(2)
        await until(lambda: sum(task.done() for task in asked) == 9)
        refused, probing = await asyncio.wait(asked, timeout=0.1)
        assert (len(refused), len(probing)) == (9, 1)
        assert {error_of(await task) for task in refused} == {(503, "engine_unavailable")}
        assert ships.counts == [2]
        ships.servers[0].gate.open()
        assert text_in(await probing.pop()) == TEXT
        assert await ships.replicas("state") == ["closed"]


async def test_first_event_of_the_probe_closes_the_breaker() -> None:
    async with fleet(Behaviour(status=500), breaker={"failures": 1, "open_s": 0.05}) as ships:
        await ships.ask()
        await ships.until("state", ["half_open"])
        ships.servers[0].behave(Behaviour(stall_after_events=2))
        connection = await ships.client.open({**FAR, "stream": True})
        await connection.reader.readuntil(b'"One"')
        assert await ships.replicas("state") == ["closed"]
        connection.abort()


async def test_callers_who_leave_say_nothing_about_a_server() -> None:
    async with fleet(Behaviour(stalls_before_headers=True), breaker={"failures": 1, "min_requests": 1}) as ships:
        for number in range(6):
            connection = await ships.client.open({**FAR, "stream": number % 2 == 0})
            await ships.servers[0].arrived(number + 1)
            connection.abort()
        await ships.client.until_idle()
        assert await ships.replicas("state") == ["closed"]
        assert await ships.replicas("failures") == [0]


async def test_lack_of_files_here_says_nothing_about_a_server() -> None:
    async with fleet(GOOD, breaker={"failures": 1, "min_requests": 1}) as ships:
        await ships.pool()  # over the connection that the requests take, too
        with no_files_left():
            for _ in range(4):
                response = await ships.ask()
                assert error_of(response) == (503, "engine_unavailable")
                assert "retry-after" in response.headers
        assert await ships.replicas("state") == ["closed"]
        assert text_in(await ships.ask()) == TEXT


@contextmanager
def no_files_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        while True:
            try:
                spare.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in spare:
            os.close(file)


# Retries


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(status=500),
        Behaviour(status=502, body=b"<html>", content_type="text/html"),
        Behaviour(status=503),
        Behaviour(status=504),
        Behaviour(status=401),
        Behaviour(body=b"<html>", content_type="text/html"),
        Behaviour(body=b"{}"),
        Behaviour(raw=b"SSH-2.0\r\n"),
        Behaviour(cut_at_byte=0),
        Behaviour(cut_at_byte=20),
        Behaviour(cut_at_byte=130),
        Behaviour(cut_at_byte=130, resets=True),
        Behaviour(stalls_before_headers=True),
        Behaviour(stall_after_events=0),
        Behaviour(malformed_at=0, documents=("x",)),
        Behaviour(error_at=0, documents=({"error": {"message": "dead"}},)),
    ],
)
async def test_request_that_fails_before_its_first_byte_is_answered_by_another_server(
    behaviour: Behaviour, stream: bool
) -> None:
    async with fleet(behaviour, GOOD, remote={"first_byte_timeout_s": 0.1}) as ships:
        for _ in range(2):
            response = await ships.ask(stream=stream)
            assert response.status_code == 200
            assert text_in(response) == TEXT
        assert ships.counts == [1, 2]
        assert (await ships.pool())["retries"] == 1


async def test_server_that_is_gone_is_passed_over() -> None:
    async with fleet(GOOD, GOOD, GOOD) as ships:
        await ships.servers[0].stop()
        await ships.servers[1].stop()
        for _ in range(3):
            assert text_in(await ships.ask()) == TEXT
        assert ships.counts == [0, 0, 3]


@pytest.mark.parametrize("status", [400, 405, 413, 422])
async def test_refusal_that_others_would_repeat_is_not_retried(status: int) -> None:
    async with fleet(Behaviour(status=status), Behaviour(status=status)) as ships:
        for number in range(4):
            await ships.ask(stream=number % 2 == 0)
        assert sum(ships.counts) == 4
        assert (await ships.pool())["retries"] == 0


async def test_whole_time_that_has_run_out_is_not_retried() -> None:
    async with fleet(*[Behaviour(drip_s=0.01)] * 2, remote={"total_timeout_s": 0.1}) as ships:
        assert error_of(await ships.ask()) == (504, "engine_timeout")
        assert sum(ships.counts) == 1


async def test_each_further_server_is_asked_once_and_not_more_than_allowed() -> None:
    broken = Behaviour(status=500)
    for max_retries, asked in ((0, 1), (1, 2), (2, 3), (9, 4)):
        async with fleet(*[broken] * 4, max_retries=max_retries, breaker=UNBREAKABLE) as ships:
            assert error_of(await ships.ask()) == (502, "engine_error")
            assert sorted(ships.counts) == [0] * (4 - asked) + [1] * asked


async def test_thousand_failing_requests_bring_a_fifth_of_load_more_at_most() -> None:
    async with fleet(Behaviour(status=500), Behaviour(status=500), breaker=UNBREAKABLE) as ships:
        body = json.dumps(FAR).encode()
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        connection = await ships.client.connect()
        for number in range(1, 1001):
            connection.writer.write(request)
            assert b" 502 " in await connection.reader.readuntil(b"}}")
            assert sum(ships.counts) <= max(number * 1.2, number + 10)
        assert 1150 <= sum(ships.counts) <= 1200
        pool = await ships.pool()
        assert pool["retries"] == sum(ships.counts) - 1000
        assert pool["retries"] + pool["retries_refused"] == 1000


async def test_pool_without_a_budget_retries_nothing() -> None:
    async with fleet(Behaviour(status=500), GOOD, retry_budget=0) as ships:
        assert {(await ships.ask()).status_code for _ in range(2)} == {502, 200}
        assert ships.counts == [1, 1]


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (Behaviour(cut_at_byte=900), "engine_error"),
        (Behaviour(cut_at_byte=900, resets=True), "engine_error"),
        (Behaviour(framing="until-close", cut_at_byte=900), "engine_error"),
        (Behaviour(malformed_at=3), "engine_error"),
        (Behaviour(error_at=3), "engine_error"),
        (Behaviour(stall_after_events=3), "engine_timeout"),
        (Behaviour(framing="chunked", documents=({"choices": [{"delta": {}}]}, [])), "engine_error"),
    ],
)
async def test_stream_that_breaks_after_its_first_byte_ends_with_an_error_and_is_not_begun_anew(
    behaviour: Behaviour, code: str
) -> None:
    fallback = [{"pool": "demo", "on": CAUSES}]
    async with fleet(behaviour, behaviour, remote={"chunk_timeout_s": 0.1}, fallback=fallback) as ships:
        response = await ships.ask(CACHED, stream=True)
        assert response.status_code == 200
        events = events_of(response.text)
        assert events[-1]["error"]["code"] == code
        assert "[DONE]" not in response.text
        assert TEXT.startswith(text_of(events[:-1]))
        assert (sum(ships.counts), ships.client.engine.calls) == (1, 0)
        for server in ships.servers:
            server.behave(GOOD)
        for outcome in ("miss", "hit"):  # since a broken answer is not stored
            response = await ships.ask(CACHED)
            assert outcome in response.headers["cache-status"]
            assert text_in(response) == TEXT


# Fallbacks


async def provoke(ships: Fleet, cause: str) -> None:
    (server,) = ships.servers
    if cause == "unavailable":
        await server.stop()
    server.behave(
        {
            "unavailable": GOOD,
            "overloaded": Behaviour(status=429),
            "timeout": Behaviour(stalls_before_headers=True),
            "error": Behaviour(status=500),
            "context_length": Behaviour(status=400, error={"param": "input_tokens"}),
        }[cause]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cause", CAUSES)
async def test_other_pool_answers_for_the_listed_causes_and_no_others(cause: str, stream: bool) -> None:
    for on in ([cause], [other for other in CAUSES if other != cause]):
        options = {"remote": {"first_byte_timeout_s": 0.1}, "fallback": [{"pool": "demo", "on": on}]}
        async with fleet(GOOD, **options) as ships:
            assert text_in(await ships.ask(stream=stream)) == TEXT
            assert ships.client.engine.calls == 0
            await provoke(ships, cause)
            response = await ships.ask(stream=stream)
            if on == [cause]:
                assert text_in(response) == TEXT
                assert ships.client.engine.calls == 1
                events = events_of(response.text)[:-1] if stream else [response.json()]
                assert {event["model"] for event in events} == {"far"}
            else:
                assert response.status_code == (400 if cause == "context_length" else response.status_code)
                assert response.status_code >= 400
                assert ships.client.engine.calls == 0


@pytest.mark.parametrize("status", [400, 404, 405, 413, 422, 501])
async def test_refused_request_is_tried_nowhere_else(status: int) -> None:
    async with fleet(Behaviour(status=status), fallback=[{"pool": "demo", "on": CAUSES}]) as ships:
        for stream in (False, True):
            assert (await ships.ask(stream=stream)).status_code in (400, 501)
        assert ships.client.engine.calls == 0


async def test_fallback_may_be_a_model() -> None:
    async with fleet(Behaviour(status=500), fallback=[{"model": "demo"}]) as ships:
        for stream in (False, True):
            response = await ships.ask(stream=stream)
            assert text_in(response) == TEXT
            assert '"model":"far"' in response.text


async def test_fallback_that_is_a_model_is_asked_by_its_name_and_answers_by_the_callers() -> None:
    async with fault_server() as upstream:
        broken = ScriptedEngine(Script("", error_after=0))
        await broken.start()
        other = RemoteEngine("other", "127.0.0.1", upstream.port, Upstream())
        engine = WithFallbacks(broken, [Fallback("other", other, frozenset(["error"]), model="small")])
        answer = await engine.answer(Call("chat.completions", "far", FAR, "request-1"))
        assert json.loads(answer.body)["model"] == "far"
        assert upstream.requests[0].json["model"] == "small"


async def test_fallback_is_not_asked_while_the_first_pool_answers_again() -> None:
    async with fleet(Behaviour(status=500), fallback=[{"pool": "demo"}]) as ships:
        await ships.ask()
        ships.servers[0].behave(GOOD)
        await ships.ask()
        assert (ships.client.engine.calls, ships.counts) == (1, [2])
        metrics = (await ships.client.http.get("/metrics")).text
        labels = 'fallback="demo",model="far",operation="chat.completions",variant=""'
        assert f"headrace_fallbacks_total{{{labels}}} 1.0" in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_of_a_fallback_is_not_cached(stream: bool) -> None:
    async with fleet(Behaviour(status=500), fallback=[{"pool": "demo"}], breaker=UNBREAKABLE) as ships:
        for _ in range(2):
            response = await ships.ask(CACHED, stream=stream)
            assert text_in(response) == TEXT
            assert "hit" not in response.headers["cache-status"]
            assert "stored" not in response.headers["cache-status"]
        assert ships.client.engine.calls == 2
        ships.servers[0].behave(GOOD)
        assert "hit" not in (await ships.ask(CACHED, stream=stream)).headers["cache-status"]
        assert "hit" in (await ships.ask(CACHED, stream=stream)).headers["cache-status"]


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(status=500),
        Behaviour(cut_at_byte=300),
        Behaviour(body=b'{"choices": [{"index": 0', content_type="application/json"),
        Behaviour(finish_reason="length"),
    ],
)
async def test_answer_that_is_not_whole_is_not_cached(behaviour: Behaviour) -> None:
    async with fleet(behaviour, breaker=UNBREAKABLE) as ships:
        await ships.ask(CACHED)
        ships.servers[0].behave(GOOD)
        response = await ships.ask(CACHED)
        assert response.status_code == 200
        assert "hit" not in response.headers["cache-status"]
        assert "hit" in (await ships.ask(CACHED)).headers["cache-status"]


# Nobody is ready


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_finds_no_server_waits_a_while_and_is_refused_with_a_time_to_come_back(stream: bool) -> None:
    async with fleet(GOOD, GOOD, remote={"probe_every_s": 0.02}, ready_wait_s=0.3) as ships:
        for server in ships.servers:
            server.health_status = 503
        await ships.until("is_ready", [False, False])
        began = time.monotonic()
        response = await ships.ask(stream=stream)
        assert error_of(response) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) >= 1
        assert 0.25 < time.monotonic() - began < 1
        assert ships.counts == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_wait_are_answered_when_a_server_comes_up(stream: bool) -> None:
    async with fleet(GOOD, GOOD, remote={"probe_every_s": 0.02}, ready_wait_s=5) as ships:
        for server in ships.servers:
            server.health_status = 503
        await ships.until("is_ready", [False, False])
        asked = [asyncio.create_task(ships.ask(stream=stream)) for _ in range(10)]
        async with asyncio.timeout(2):
            while (await ships.pool())["waited_for_replica"] < 10:
                await asyncio.sleep(0.01)
        ships.servers[1].health_status = 200
        assert [text_in(await task) for task in asked] == [TEXT] * 10
        assert ships.counts == [0, 10]


async def test_caller_who_leaves_while_waiting_for_a_server_is_forgotten() -> None:
    async with fleet(GOOD, remote={"probe_every_s": 0.02}, ready_wait_s=5) as ships:
        ships.servers[0].health_status = 503
        await ships.until("is_ready", [False])
        connection = await ships.client.open(FAR)
        async with asyncio.timeout(2):
            while (await ships.pool())["waited_for_replica"] < 1:
                await asyncio.sleep(0.01)
        connection.abort()
        await ships.client.until_idle()
        assert (await ships.pool())["admission"]["in_flight"] == 0


# A server that has too much to do


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_overloaded_server_rests_while_another_answers(status: int, stream: bool) -> None:
    busy = Behaviour(status=status, headers=(("retry-after", "20"),))
    async with fleet(busy, GOOD, breaker={"failures": 1, "min_requests": 1}) as ships:
        for _ in range(4):
            assert text_in(await ships.ask(stream=stream)) == TEXT
        assert ships.counts == [1, 4]
        assert await ships.replicas("state") == ["closed", "closed"]
        assert await ships.replicas("failures") == [0, 0]
        resting_s, other_s = await ships.replicas("resting_s")
        assert 15 < resting_s <= 20
        assert other_s == 0


async def test_only_server_that_is_overloaded_says_when_to_come_back() -> None:
    busy = Behaviour(status=429, headers=(("retry-after", "7"),))
    async with fleet(busy, ready_wait_s=3) as ships:
        for number in range(4):
            began = time.monotonic()
            response = await ships.ask(stream=number % 2 == 0)
            assert error_of(response) == (503, "overloaded")
            assert response.headers["retry-after"] == "7"
            assert time.monotonic() - began < 0.5  # as it is known that waiting would not help
        assert ships.counts == [1]
        assert await ships.replicas("state") == ["closed"]


async def test_request_waits_for_a_rest_that_is_short_enough() -> None:
    async with fleet(Behaviour(status=429, headers=(("retry-after", "1"),)), ready_wait_s=3) as ships:
        assert error_of(await ships.ask()) == (503, "overloaded")
        ships.servers[0].behave(GOOD)
        began = time.monotonic()
        assert text_in(await ships.ask()) == TEXT
        assert 0.5 < time.monotonic() - began < 1.5


async def test_servers_that_rest_for_different_times_are_back_when_the_first_is() -> None:
    async with fleet(*[Behaviour(status=429, headers=(("retry-after", s),)) for s in ("25", "9")]) as ships:
        response = await ships.ask()
        assert error_of(response) == (503, "overloaded")
        assert (await ships.ask()).headers["retry-after"] == "9"
        assert ships.counts == [1, 1]


# Spilling over


def spilling(above: int = 3, until: int = 1) -> dict[str, Any]:
    return {"spill_over": {"pool": "far", "above": above, "until": until}}


async def test_long_queue_spills_over_until_it_is_drained() -> None:
    async with fleet(GOOD, demo=spilling()) as ships:
        engine = ships.client.engine
        for waiting, calls, count in ((0, 1, 0), (3, 2, 0), (4, 2, 1), (9, 2, 2), (2, 2, 3), (1, 3, 3), (3, 4, 3)):
            engine.load.waiting = waiting
            response = await ships.ask(CHAT, stream=waiting % 2 == 0)
            assert text_in(response) == TEXT
            assert '"model":"demo"' in response.text
            assert (engine.calls, ships.counts) == (calls, [count])
        metrics = (await ships.client.http.get("/metrics")).text
        assert 'headrace_pool_spilled_over_total{pool="demo"} 3.0' in metrics


async def test_long_queue_is_better_than_a_pool_that_cannot_answer() -> None:
    async with fleet(GOOD, demo=spilling(), remote={"probe_every_s": 0.02}) as ships:
        ships.servers[0].health_status = 503
        await ships.until("is_ready", [False])
        ships.client.engine.load.waiting = 10
        for stream in (False, True):
            assert text_in(await ships.ask(CHAT, stream=stream)) == TEXT
        assert ships.client.engine.calls == 2
        ships.servers[0].health_status = 200
        await ships.until("is_ready", [True])
        assert text_in(await ships.ask(CHAT)) == TEXT
        assert ships.counts == [1]
