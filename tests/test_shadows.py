"""Shadow traffic as callers and operators meet it: the former never, the latter in figures."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from app.engines.scripted import Gate, Script, ScriptedEngine

from .conftest import CHAT, Client, events_of, serving, text_of, until
from .test_variants import choosing
from .tokens import JWT_SETTINGS, bearer, token

ASK = {**CHAT, "temperature": 0}
TEXT = "One two three four five."
JWT = {"mode": "jwt", "jwt": JWT_SETTINGS}
TOKENS = 3 + 5  # of CHAT and its answer


@asynccontextmanager
async def shadowed(
    shadow: Script, primary: Script | None = None, options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Client]:
    """The engine of the pool `a` answers, that of `b` gets the copies."""
    engines = {"a": ScriptedEngine(primary or Script(TEXT)), "b": ScriptedEngine(shadow)}
    model = {
        "name": "demo",
        "variants": [{"name": "a", "pool": "a"}, {"name": "b", "pool": "b", "weight": 0}],
        "shadow": {"variant": "b", **(options or {})},
    }
    pools = [{"name": "a", "engine": "scripted"}, {"name": "b", "engine": "scripted", **settings.pop("pool", {})}]
    async with serving(engines=engines, models=[model], pools=pools, **settings) as client:
        yield client


async def figures(client: Client) -> dict[str, Any]:
    page = await client.http.get("/v1/routing", headers=bearer(token(scope="routing:read")))
    shadow: dict[str, Any] = page.json()["models"][0]["shadow"]
    return shadow


async def until_copied(client: Client, count: int) -> dict[str, Any]:
    """Until so many copies are over; the figures then."""
    async with asyncio.timeout(5):
        while True:
            told = await figures(client)
            if told["answered"] + sum(told["errors"].values()) >= count and not told["in_flight"]:
                return told
            await asyncio.sleep(0.01)


async def test_each_request_that_an_engine_answered_is_asked_of_the_shadow_once_more() -> None:
    bodies: list[dict[str, Any]] = []
    async with shadowed(Script(TEXT)) as client:
        engine = client.engines["b"]
        engine._script = lambda call: bodies.append(call.body) or Script(TEXT)  # type: ignore[func-returns-value]
        for body in (CHAT, ASK, {**ASK, "seed": 1, "stream": True}, {**CHAT, "stream": True}):
            response = await client.post(body)
            assert response.headers["x-headrace-variant"] == "a"
        told = await until_copied(client, 4)
        assert told == {
            **told,
            "variant": "b",
            "sent": 4,
            "dropped": 0,
            "answered": 4,
            "errors": {},
            "compared": 3,  # a stream that nobody else may have is not put together
            "identical": 3,
            "difference_mean": 0.0,
        }
        assert told["latency_mean_s"] > 0 < told["primary_latency_mean_s"]
        assert client.engine.calls == engine.calls == 4
        assert all("stream" not in body and body["messages"] == CHAT["messages"] for body in bodies)
        metrics = (await client.http.get("/metrics")).text
        label = 'model="demo",variant="b"'
        for line in (
            'headrace_shadow_requests_total{model="demo",outcome="answered",variant="b"} 4.0',
            'headrace_shadow_requests_total{model="demo",outcome="dropped",variant="b"} 0.0',
            f"headrace_shadow_compared_total{{{label}}} 3.0",
            f"headrace_shadow_identical_total{{{label}}} 3.0",
            f"headrace_shadow_difference{{{label}}} 0.0",
        ):
            assert line in metrics, line


async def test_what_the_shadow_says_otherwise_is_measured() -> None:
    async with shadowed(Script("One two three")) as client:
        for stream in (False, True):
            assert TEXT.split()[-1] in (await client.post({**ASK, "seed": int(stream), "stream": stream})).text
        told = await until_copied(client, 2)
        assert (told["compared"], told["identical"]) == (2, 0)
        assert told["difference_mean"] == 0.25  # of five and three pairs of neighbouring words three are the same
        metrics = (await client.http.get("/metrics")).text
        assert 'headrace_shadow_difference{model="demo",variant="b"} 0.25' in metrics


async def test_copies_are_neither_stored_nor_charged() -> None:
    limits = {"subject": {"tokens_per_minute": 1000, "requests_per_minute": 100, "concurrent": 2}}
    async with shadowed(Script("Something else."), auth=JWT, limits=limits) as client:
        ann = bearer(token())
        for number in range(4):
            response = await client.post({**ASK, "seed": number, "stream": number % 2 == 0}, headers=ann)
            assert response.status_code == 200
        await until_copied(client, 4)
        response = await client.post({**CHAT, "n": 0}, headers=ann)  # refused, and told what is left
        assert response.headers["x-ratelimit-remaining-tokens"] == str(1000 - 4 * TOKENS)
        assert response.headers["x-ratelimit-remaining-requests"] == "95"
        metrics = (await client.http.get("/metrics")).text
        for line in (
            'headrace_tokens_total{kind="completion",model="demo",operation="chat.completions",variant="a"} 20.0',
            'headrace_requests_total{model="demo",operation="chat.completions",outcome="ok",variant="a"} 4.0',
            'headrace_cache_entries{tier="memory"} 4.0',
            "headrace_flights_total 4.0",
            "headrace_limiter_slots 0.0",
        ):
            assert line in metrics, line
        assert not any(
            line.startswith(("headrace_tokens", "headrace_requests")) and 'variant="b"' in line
            for line in metrics.splitlines()
        )
        chosen = await client.post({**ASK, "seed": 0}, headers=choosing("b"))
        assert chosen.headers["cache-status"] == "headrace; fwd=miss; stored"
        assert "Something else." in chosen.text
        assert "Something else." not in (await client.post({**ASK, "seed": 0}, headers=ann)).text


async def test_neither_hits_nor_followers_nor_the_shadows_own_requests_are_copied() -> None:
    gate = Gate()
    async with shadowed(Script(TEXT), Script(TEXT, gate=gate), auth=JWT) as client:
        ann = bearer(token())
        together = [asyncio.create_task(client.post({**ASK, "stream": number > 2}, headers=ann)) for number in range(5)]
        await until(lambda: client.gateway.flights.stats().followers == 4)
        gate.open()
        await asyncio.gather(*together)
        for stream in (False, True, False):
            response = await client.post({**ASK, "stream": stream}, headers=ann)
            assert "; hit; " in response.headers["cache-status"]
        assert (await client.post(headers=choosing("b"))).headers["x-headrace-variant"] == "b"
        told = await until_copied(client, 1)
        assert told["sent"] == 1
        assert client.engines["b"].calls == 2


async def test_share_of_the_requests_is_copied() -> None:
    async with shadowed(Script(TEXT), options={"share": 0.3, "max_in_flight": 100}) as client:
        for number in range(300):
            await client.post(headers={"x-request-id": f"request-{number}"})
        sent = (await figures(client))["sent"]
        # The chi-square's 99.9th percentile at one degree of freedom.
        assert (sent - 90) ** 2 / 90 + (sent - 90) ** 2 / 210 < 10.828


async def test_shadow_that_fails_or_refuses_is_told_by_kind_and_callers_do_not_notice() -> None:
    async with shadowed(Script(TEXT, error_after=2)) as client:
        for _ in range(3):
            assert (await client.post()).status_code == 200
        client.engines["b"]._max_model_len = 1
        assert (await client.post()).status_code == 200
        told = await until_copied(client, 4)
        assert (told["answered"], told["errors"]) == (0, {"engine": 3, "rejected": 1})
        assert (told["difference_mean"], told["latency_mean_s"]) == (None, None)
        metrics = (await client.http.get("/metrics")).text
        assert 'headrace_shadow_requests_total{model="demo",outcome="engine",variant="b"} 3.0' in metrics
        assert (await client.http.get("/health")).json()["status"] == "ok"


async def test_request_that_failed_or_was_left_is_not_copied() -> None:
    gate = Gate()
    async with shadowed(Script(TEXT), Script(TEXT, error_after=3)) as client:
        assert (await client.post()).status_code == 502
        streamed = await client.post({**CHAT, "stream": True})
        assert "error" in events_of(streamed.text)[-1]
        client.engine._script = lambda call: Script(TEXT, gate=gate)
        for stream in (False, True):
            connection = await client.open({**CHAT, "stream": stream})
            await until(lambda: client.engine.load.running == 1)
            connection.abort()
            await client.until_idle()
        assert (await figures(client))["sent"] == client.engines["b"].calls == 0


async def test_shadow_that_hangs_delays_nobody_and_gets_no_more_than_its_bound() -> None:
    gate = Gate()
    async with shadowed(Script(TEXT, gate=gate), options={"max_in_flight": 3}) as client:
        for number in range(20):
            async with asyncio.timeout(1):
                response = await client.post({**CHAT, "stream": number % 2 == 0})
            assert response.status_code == 200
        await until(lambda: client.engines["b"].load.running == 3)
        told = await figures(client)
        assert (told["sent"], told["dropped"], told["in_flight"], told["answered"]) == (3, 17, 3, 0)
        assert client.engines["b"].calls == 3
        gate.open()
        assert (await until_copied(client, 3))["answered"] == 3
        await client.post()
        assert (await until_copied(client, 4))["sent"] == 4


async def test_copy_ends_after_its_time() -> None:
    gate = Gate()
    async with shadowed(Script(TEXT, gate=gate), options={"timeout_s": 0.1}) as client:
        await client.post()
        told = await until_copied(client, 1)
        assert told["errors"] == {"timeout": 1}
        assert client.engines["b"].load.running == 0


async def test_copies_give_way_to_callers_of_the_shadows_pool() -> None:
    gate = Gate()
    order: list[str] = []
    pool = {"admission": {"max_in_flight": 1, "max_queue": 2}}
    async with shadowed(Script(TEXT), auth=JWT, pool=pool) as client:

        def note(call: Any) -> Script:
            order.append("copy" if call.request_id.endswith("-shadow") else "caller")
            return Script(TEXT, gate=gate)

        client.engines["b"]._script = note
        first = asyncio.create_task(client.post(headers=choosing("b")))
        await until(lambda: client.engines["b"].load.running == 1)
        admission = client.gateway.routes.pools["b"].pool.admission
        for _ in range(2):
            await client.post(headers=bearer(token()))
        await until(lambda: admission.stats().waiting == 2)
        late = [asyncio.create_task(client.post(headers=choosing("b"))) for _ in range(2)]
        await until(lambda: admission.stats().refused.get("shed") == 2)  # of a full queue, the copies go
        gate.open()
        assert [(await task).status_code for task in (first, *late)] == [200, 200, 200]
        assert order == ["caller"] * 3
        assert (await until_copied(client, 2))["errors"] == {"refused": 2}


async def test_gateway_ends_at_once_while_a_copy_is_under_way() -> None:
    async with shadowed(Script(TEXT, gate=Gate())) as client:
        assert text_of(events_of((await client.post({**CHAT, "stream": True})).text)) == TEXT
        engine = client.engines["b"]
        await until(lambda: engine.load.running == 1)
        leaving = time.monotonic()
    assert time.monotonic() - leaving < 2
    assert engine.load.running == 0
