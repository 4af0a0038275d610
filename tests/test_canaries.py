"""Canaries behind guardrails, as callers and operators meet them: they take over, or they go."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.engines.scripted import Gate, Script, ScriptedEngine
from routing.guardrails import Guardrail

from .conftest import CHAT, Client, serving, until
from .test_answers_at_once import Watched
from .tokens import JWT_SETTINGS, bearer, token

ASK = {**CHAT, "temperature": 0}
STABLE, CANARY = Script("As ever."), Script("Something new.")
JWT = {"mode": "jwt", "jwt": JWT_SETTINGS}


class Stage:
    """Two variants; what their engines do can be changed at any time."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.asked = 0
        self.scripts = {"stable": STABLE, "canary": CANARY}

    @property
    def guardrail(self) -> Guardrail:
        guardrail = self.client.gateway.routes.models.find("demo").guardrail
        assert guardrail is not None
        return guardrail

    @property
    def canary(self) -> ScriptedEngine:
        return self.client.engines["canary"]

    def fail(self, *names: str) -> None:
        for name in names:
            self.scripts[name] = replace(self.scripts[name], error_after=1)

    async def ask(self, count: int, **body: Any) -> list[tuple[str, int]]:
        """The variants and statuses of so many requests, one after the other."""
        answers = [await self.post(**body) for _ in range(count)]
        return [(answer.headers["x-headrace-variant"], answer.status_code) for answer in answers]

    async def post(self, **body: Any) -> httpx.Response:
        """With an id that decides on the variant, the same in each run."""
        self.asked += 1
        return await self.client.post({**CHAT, **body}, headers={"x-request-id": f"request-{self.asked}"})

    async def ask_until(self, state: str, most: int = 300, **body: Any) -> list[tuple[str, int]]:
        told = []
        while self.guardrail.state != state and len(told) < most:
            told += await self.ask(1, **body)
        assert self.guardrail.state == state
        return told


@asynccontextmanager
async def canary(
    sticky_by: str = "request", auth: dict[str, Any] | None = None, weight: float = 50, **rules: Any
) -> AsyncIterator[Stage]:
    stage: Stage
    engines = {name: ScriptedEngine(lambda call, name=name: stage.scripts[name]) for name in ("stable", "canary")}
    model = {
        "name": "demo",
        "variants": [
            {"name": "stable", "pool": "stable", "weight": 50},
            {"name": "canary", "pool": "canary", "weight": weight},
        ],
        "sticky_by": sticky_by,
        "guardrails": {"variant": "canary", "min_requests": 10, **rules},
    }
    pools = [{"name": name, "engine": "scripted"} for name in engines]
    async with serving(engines=engines, models=[model], pools=pools, auth=auth or {"mode": "off"}) as client:
        stage = Stage(client)
        yield stage


async def page(client: Client) -> dict[str, Any]:
    response = await client.http.get("/v1/routing", headers=bearer(token(scope="routing:read")))
    model: dict[str, Any] = response.json()["models"][0]
    return model


def shares(model: dict[str, Any]) -> dict[str, float]:
    return {variant["name"]: variant["share"] for variant in model["variants"]}


async def test_canary_that_fails_gets_no_more_requests_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with canary(max_error_rate=0.2) as stage:
        stage.fail("canary")
        told = await stage.ask_until("rolled_back")
        failed = [answer for answer in told if answer[1] != 200]
        assert failed == [("canary", 502)] * 10  # no more than it takes to know
        assert await stage.ask(40) == [("stable", 200)] * 40

        health = (await stage.client.http.get("/health")).json()
        assert health["status"] == "degraded"
        component = health["components"]["canary:demo"]
        assert (component["status"], component["variant"]) == ("degraded", "canary")
        assert component["last_error"].startswith("error rate 1 over 0.2 in 10 requests, the stable variant's is 0")
        assert (await stage.client.http.get("/health/ready")).status_code == 200
        model = await page(stage.client)
        assert shares(model) == {"stable": 1.0, "canary": 0.0}
        guardrail = model["guardrail"]
        assert (guardrail["state"], guardrail["share"], guardrail["reason"]) == (
            "rolled_back",
            0.0,
            component["last_error"],
        )
        assert (guardrail["canary"]["requests"], guardrail["canary"]["errors"]) == (10, 10)
        metrics = (await stage.client.http.get("/metrics")).text
        assert 'headrace_canary_rolled_back{model="demo",variant="canary"} 1.0' in metrics
        assert 'headrace_variant_share{model="demo",variant="canary"} 0.0' in metrics
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert lines == [f"model demo: the canary canary is rolled back: {component['last_error']}"]


async def test_canary_that_was_rolled_back_is_reached_by_name() -> None:
    async with canary(max_error_rate=0.2) as stage:
        stage.fail("canary")
        await stage.ask_until("rolled_back")
        stage.scripts["canary"] = CANARY
        answer = await stage.client.post(headers={"x-headrace-variant": "canary"})
        assert (answer.status_code, answer.headers["x-headrace-variant"]) == (200, "canary")
        stage.guardrail.reset()
        assert {variant for variant, _ in await stage.ask(40)} == {"stable", "canary"}
        assert (await stage.client.http.get("/health")).json()["status"] == "ok"


async def test_stream_that_breaks_off_counts_as_failed() -> None:
    async with canary(max_error_rate=0.2) as stage:
        stage.fail("canary")
        told = await stage.ask_until("rolled_back", stream=True)
        assert {status for _, status in told} == {200}  # each had begun
        assert (await page(stage.client))["guardrail"]["canary"]["errors"] == 10


async def test_outage_behind_both_is_not_the_canarys_fault() -> None:
    async with canary(max_error_rate=0.2) as stage:
        stage.fail("stable", "canary")
        assert {variant for variant, _ in await stage.ask(80)} == {"stable", "canary"}
        assert stage.guardrail.state == "watching"
        assert stage.guardrail.status().canary.errors >= 10


async def test_what_callers_do_wrong_does_not_count() -> None:
    async with canary(max_error_rate=0.0) as stage:
        for body in ({"max_tokens": -1}, {"messages": [{"role": "user", "content": "word " * 9000}]}, {"n": 0}):
            for stream in (False, True):
                answers = [await stage.post(**body, stream=stream) for _ in range(20)]
                assert {answer.status_code for answer in answers} == {400}
        assert stage.canary.calls >= 20
        status = stage.guardrail.status()
        assert (status.state, status.canary.requests, status.canary.errors) == ("watching", 0, 0)


async def test_what_callers_leave_does_not_count() -> None:
    async with canary(max_error_rate=0.0) as stage:
        gate = Gate()
        for name, script in stage.scripts.items():
            stage.scripts[name] = replace(script, gate=gate)
        for number in range(30):
            body = {**CHAT, "stream": number % 2 == 0}
            connection = await stage.client.open(body, headers={"x-request-id": f"request-{number}"})
            await until(lambda: sum(engine.load.running for engine in stage.client.engines.values()) == 1)
            connection.abort()
            await stage.client.until_idle()
        assert stage.canary.calls >= 5
        assert stage.guardrail.status().canary.errors == 0


async def test_canary_that_takes_longer_to_its_first_token_is_rolled_back() -> None:
    async with canary(max_ttft_ratio=5) as stage:
        stage.scripts["canary"] = replace(CANARY, first_token_s=0.2)
        while stage.guardrail.state == "watching" and stage.canary.calls < 100:
            await asyncio.gather(*(stage.ask(1, stream=True) for _ in range(8)))
        model = await page(stage.client)
        guardrail = model["guardrail"]
        assert guardrail["state"] == "rolled_back"
        assert guardrail["reason"].startswith("median time to first token ")
        assert guardrail["canary"]["ttft_median_s"] > 0.15 > guardrail["stable"]["ttft_median_s"] * 5
        assert await stage.ask(20, stream=True) == [("stable", 200)] * 20


async def test_slower_whole_answers_are_not_measured_as_first_tokens() -> None:
    async with canary(max_ttft_ratio=5, min_requests=3) as stage:
        stage.scripts["canary"] = replace(CANARY, first_token_s=0.02)
        await stage.ask(30)
        status = stage.guardrail.status()
        assert (status.state, status.canary.ttft_median_s) == ("watching", None)
        assert status.canary.requests > 3


async def test_canary_that_does_well_steps_up_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace")
    async with canary(max_error_rate=0.2, steps=(30, 60, 100), step_s=0.05, min_requests=3) as stage:
        assert shares(await page(stage.client)) == {"stable": 0.7, "canary": 0.3}
        seen = []
        while stage.guardrail.state != "promoted" and stage.canary.calls < 300:
            await stage.ask(1)
            if stage.guardrail.share not in seen:
                seen.append(stage.guardrail.share)
        assert seen == [0.3, 0.6, 1.0]
        assert await stage.ask(20) == [("canary", 200)] * 20
        model = await page(stage.client)
        assert shares(model) == {"stable": 0.0, "canary": 1.0}
        assert (model["guardrail"]["state"], model["guardrail"]["step"]) == ("promoted", 2)
        lines = [record.getMessage() for record in caplog.records if "the canary" in record.getMessage()]
        assert lines == [
            "model demo: the canary canary is stepping, with 60% of the requests",
            "model demo: the canary canary is stepping, with 100% of the requests",
            "model demo: the canary canary is promoted, with 100% of the requests",
        ]


async def test_step_is_kept_while_the_canary_gets_too_few_requests() -> None:
    async with canary(max_error_rate=0.2, steps=(10, 100), step_s=0.01, min_requests=200) as stage:
        await stage.ask(40)
        assert shares(await page(stage.client)) == {"stable": 0.9, "canary": 0.1}


async def subject_of(stage: Stage, variant: str) -> dict[str, str]:
    """The headers of somebody who stays with the variant."""
    for number in range(200):
        headers = bearer(token(sub=f"s{number}", tenant="t"))
        if (await stage.client.post(headers=headers)).headers["x-headrace-variant"] == variant:
            return headers
    raise AssertionError


async def test_answers_of_a_canary_that_was_rolled_back_are_not_given_any_more() -> None:
    async with canary("subject", JWT, max_error_rate=0.2) as stage:
        watched = Watched(stage.client.gateway)
        ann = await subject_of(stage, "canary")
        bob = await subject_of(stage, "stable")

        async def answers(headers: dict[str, str], text: str, variant: str, is_hit: bool) -> None:
            for stream in (False, True):
                response = await stage.client.post({**ASK, "stream": stream}, headers=headers)
                assert response.headers["x-headrace-variant"] == variant
                assert text.split()[-1] in response.text
                assert ("; hit; " in response.headers["cache-status"]) == (is_hit or stream)

        await answers(ann, "new.", "canary", is_hit=False)
        for _ in range(2):
            await answers(ann, "new.", "canary", is_hit=True)
        assert watched.told[-2:] == [True, False]
        stage.fail("canary")
        for _ in range(20):
            await stage.client.post(headers=ann)
        assert stage.guardrail.state == "rolled_back"
        await answers(ann, "ever.", "stable", is_hit=False)
        await answers(ann, "ever.", "stable", is_hit=True)
        await answers(bob, "ever.", "stable", is_hit=True)
        assert watched.told[-2:] == [True, False]


async def test_who_comes_to_the_canary_by_a_step_gets_its_answers() -> None:
    async with canary("subject", JWT, max_error_rate=0.2, steps=(30, 100), step_s=0.01, min_requests=3) as stage:
        bob = await subject_of(stage, "stable")
        for due in ("As ever.", "As ever.", "As ever."):
            assert due in (await stage.client.post(ASK, headers=bob)).text
        ann = await subject_of(stage, "canary")
        while stage.guardrail.share != 1.0:
            await stage.client.post(headers=ann)
        answer = await stage.client.post(ASK, headers=bob)
        assert (answer.headers["x-headrace-variant"], "Something new." in answer.text) == ("canary", True)
        assert "; hit; " not in answer.headers["cache-status"]
