"""A model's variants as callers meet them: who gets which, who stays, and that no two share an answer."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.engines.scripted import Gate, Script, ScriptedEngine

from .conftest import CHAT, Client, events_of, serving, text_of, until
from .test_answers_at_once import Watched
from .tokens import JWT_SETTINGS, bearer, token

ASK = {**CHAT, "temperature": 0}
JWT = {"mode": "jwt", "jwt": JWT_SETTINGS}
TEXTS = {"a": "The text of a.", "b": "What b says."}
MAY_CHOOSE = "inference routing:choose"
CHI_SQUARE_999 = 10.828  # its 99.9th percentile at one degree of freedom


@asynccontextmanager
async def two_variants(
    weights: tuple[float, float] = (70, 30),
    sticky_by: str = "subject",
    gate: Gate | None = None,
    auth: dict[str, Any] = JWT,
    **more: Any,
) -> AsyncIterator[Client]:
    engines = {name: ScriptedEngine(Script(text, gate=gate)) for name, text in TEXTS.items()}
    variants = [{"name": name, "pool": name, "weight": weight} for name, weight in zip(TEXTS, weights, strict=True)]
    async with serving(
        engines=engines,
        pools=[{"name": name, "engine": "scripted"} for name in engines],
        models=[
            {"name": "demo", "variants": variants, "sticky_by": sticky_by},
            {"name": "plain", "pool": "a"},
        ],
        auth=auth,
        **more,
    ) as client:
        yield client


def choosing(variant: str, **claims: Any) -> dict[str, str]:
    return {**bearer(token(scope=MAY_CHOOSE, **claims)), "x-headrace-variant": variant}


def variant_of(response: httpx.Response) -> str:
    """As its header says, which has to be true."""
    assert response.status_code == 200, response.text
    variant = response.headers["x-headrace-variant"]
    if response.headers["content-type"].startswith("text/event-stream"):
        assert text_of(events_of(response.text)) == TEXTS[variant]
    else:
        assert response.json()["choices"][0]["message"]["content"] == TEXTS[variant]
    return variant


def is_hit(response: httpx.Response) -> bool:
    return "; hit; " in response.headers["cache-status"]


def calls(client: Client) -> dict[str, int]:
    return {name: engine.calls for name, engine in client.engines.items()}


async def session_of(client: Client, variant: str, start: int = 0, **body: Any) -> str:
    """One that falls to the variant."""
    for number in range(start, start + 100):
        headers = {**bearer(token()), "x-session-id": f"s{number}"}
        response = await client.post({**CHAT, **body}, headers=headers)
        if response.headers["x-headrace-variant"] == variant:
            return f"s{number}"
    raise AssertionError(f"no session falls to {variant}")


def caller(kind: str, number: int, other: int) -> dict[str, str]:
    """The headers of one who differs from others in what the kind says; with another `other`, in all else."""
    who = {name: f"{name}{number if name == kind else other}" for name in ("tenant", "subject", "session", "request")}
    if kind == "subject":
        who["tenant"] = "tenant"  # a subject is a tenant's
    if kind == "session":
        who["tenant"] = "tenant"
    headers = bearer(token(sub=who["subject"], tenant=who["tenant"]))
    return {**headers, "x-session-id": who["session"], "x-request-id": who["request"]}


@pytest.mark.parametrize("sticky_by", ["subject", "tenant", "session", "request"])
@pytest.mark.slow
async def test_callers_are_shared_as_the_weights_say_and_stay_with_their_variant(sticky_by: str) -> None:
    count = 300
    async with two_variants(sticky_by=sticky_by) as client:
        first = [variant_of(await client.post(headers=caller(sticky_by, number, 0))) for number in range(count)]
        shares = Counter(first)
        due = {"a": 0.7 * count, "b": 0.3 * count}
        assert sum((shares[name] - due[name]) ** 2 / due[name] for name in due) < CHI_SQUARE_999
        assert calls(client) == shares
        again = [variant_of(await client.post(headers=caller(sticky_by, number, number))) for number in range(60)]
        assert again == first[:60]


async def test_without_a_session_the_subject_stays() -> None:
    async with two_variants(sticky_by="session") as client:
        found: dict[str, set[str]] = {}
        for number in range(40):
            sub = f"s{number % 10}"
            found.setdefault(sub, set()).add(variant_of(await client.post(headers=bearer(token(sub=sub)))))
        assert all(len(variants) == 1 for variants in found.values())
        assert set.union(*found.values()) == {"a", "b"}


async def test_same_session_of_another_tenant_is_another_session() -> None:
    async with two_variants((50, 50), sticky_by="session") as client:
        found = set()
        for number in range(20):
            headers = {**bearer(token(tenant=f"t{number}")), "x-session-id": "1"}
            found.add(variant_of(await client.post(headers=headers)))
        assert found == {"a", "b"}


async def test_variant_of_no_weight_is_reached_by_name_alone() -> None:
    async with two_variants((1, 0)) as client:
        for number in range(50):
            assert variant_of(await client.post(headers=bearer(token(sub=f"s{number}")))) == "a"
        assert variant_of(await client.post(headers=choosing("b"))) == "b"


async def test_model_without_variants_tells_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("headrace").setLevel(logging.INFO)
    async with two_variants() as client:
        for _ in range(3):  # computed, found, known
            for stream in (False, True):
                body = {**ASK, "model": "plain", "stream": stream}
                response = await client.post(body, headers=bearer(token()))
                assert response.status_code == 200
                assert "x-headrace-variant" not in response.headers
        assert not any("variant" in line for line in client.access_lines(capsys))
        metrics = (await client.http.get("/metrics")).text
        assert (
            'headrace_requests_total{model="plain",operation="chat.completions",outcome="ok",variant=""} 6.0' in metrics
        )


async def test_choosing_a_variant_needs_the_scope() -> None:
    async with two_variants() as client:
        refused = await client.post(ASK, headers={**bearer(token()), "x-headrace-variant": "b"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (403, "insufficient_scope")
        assert "routing:choose" in error["message"]
        assert calls(client) == {"a": 0, "b": 0}
        for stream in (False, True):
            for name in TEXTS:
                assert variant_of(await client.post({**CHAT, "stream": stream}, headers=choosing(name))) == name


async def test_choosing_needs_the_scope_for_an_answer_that_is_stored_too() -> None:
    async with two_variants((1, 0)) as client:
        for _ in range(3):
            assert variant_of(await client.post(ASK, headers=bearer(token()))) == "a"
        for name in TEXTS:
            refused = await client.post(ASK, headers={**bearer(token()), "x-headrace-variant": name})
            assert refused.status_code == 403


@pytest.mark.parametrize("name", ["c", "", "A", "é", "x" * 5000])
async def test_unknown_variant_is_refused_in_openais_form(name: str) -> None:
    async with two_variants() as client:
        refused = await client.post(headers={**choosing(""), "x-headrace-variant": name.encode("latin-1")})
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["code"] == "invalid_request"
        assert "variant" in error["message"]
        assert len(error["message"]) < 200
        assert calls(client) == {"a": 0, "b": 0}
        assert 'variant="c"' not in (await client.http.get("/metrics")).text


async def test_two_variants_never_share_an_answer() -> None:
    """The callers share everything else: tenant, subject, and the request to the byte."""
    async with two_variants((1, 0)) as client:
        watched = Watched(client.gateway)
        ann = bearer(token(scope=MAY_CHOOSE))
        for stream in (False, True):
            body = {**ASK, "stream": stream, "seed": int(stream)}
            for is_stored in (False, True, True):
                # What falls to the caller, and what is chosen, is the same variant.
                for headers, due, is_known in (
                    (ann, "a", False),
                    (choosing("b"), "b", False),
                    (choosing("a"), "a", True),
                ):
                    response = await client.post(body, headers=headers)
                    assert variant_of(response) == due
                    assert is_hit(response) == (is_stored or is_known)
        assert calls(client) == {"a": 2, "b": 2}
        assert any(watched.told)


async def test_identical_requests_in_flight_for_different_variants_are_two_engine_calls() -> None:
    gate = Gate()
    async with two_variants((50, 50), gate=gate) as client:
        asked = [
            asyncio.create_task(client.post({**ASK, "stream": number % 3 == 0}, headers=choosing(name)))
            for number in range(6)
            for name in TEXTS
        ]
        await until(lambda: client.gateway.flights.stats().followers == 10)
        gate.open()
        answers = [await task for task in asked]
        assert [variant_of(answer) for answer in answers] == ["a", "b"] * 6
        assert calls(client) == {"a": 1, "b": 1}
        assert sum("collapsed" in answer.headers["cache-status"] for answer in answers) == 10


async def test_log_and_metrics_tell_the_variant_of_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("headrace").setLevel(logging.INFO)
    async with two_variants() as client:
        order = ("b", "b", "a")
        for body in (ASK, {**ASK, "stream": True}, CHAT):
            for name in order:
                assert variant_of(await client.post(body, headers=choosing(name))) == name
        lines = client.access_lines(capsys)
        assert [line["variant"] for line in lines] == [*order] * 3
        assert [line["cache"] for line in lines] == ["miss", "hit", "miss", "hit", "hit", "hit", *["bypass"] * 3]
        metrics = (await client.http.get("/metrics")).text
        for name, count in (("a", 3), ("b", 6)):
            labels = f'model="demo",operation="chat.completions",outcome="ok",variant="{name}"'
            assert f"headrace_requests_total{{{labels}}} {count}.0" in metrics
        assert 'headrace_variant_share{model="demo",variant="a"} 0.7' in metrics


async def test_explain_follows_the_chosen_variant() -> None:
    async with two_variants((1, 0)) as client:
        assert variant_of(await client.post(ASK, headers=choosing("b"))) == "b"
        scope = f"{MAY_CHOOSE} cache:read"
        keys, tiers = {}, {}
        for name in (None, "a", "b"):
            headers = bearer(token(scope=scope)) | ({} if name is None else {"x-headrace-variant": name})
            told = await client.post({"body": ASK}, "/v1/cache/explain", headers=headers)
            keys[name], tiers[name] = told.json()["key"], told.json()["tier"]
        assert keys[None] == keys["a"] != keys["b"]
        assert tiers == {None: None, "a": None, "b": "memory"}
        headers = {**bearer(token(scope="cache:read")), "x-headrace-variant": "b"}
        assert (await client.post({"body": ASK}, "/v1/cache/explain", headers=headers)).status_code == 403
        headers = {**bearer(token(scope=scope)), "x-headrace-variant": "c"}
        assert (await client.post({"body": ASK}, "/v1/cache/explain", headers=headers)).status_code == 400


async def test_stored_answer_that_leaves_at_once_is_of_the_sessions_own_variant() -> None:
    async with two_variants((50, 50), sticky_by="session") as client:
        watched = Watched(client.gateway)
        caller = bearer(token())  # one of the next second would have to be verified first
        sessions = [(await session_of(client, name, start), name) for start in (0, 100) for name in TEXTS]
        before = calls(client)
        for session, _ in sessions:
            await client.post(ASK, headers={**caller, "x-session-id": session})
        assert calls(client) == {name: count + 1 for name, count in before.items()}
        watched.told.clear()
        for user in ("u1", "u2", "u3"):  # the bytes of the request are others each time, its meaning is not
            for stream in (False, True):
                for session, name in sessions:
                    body = {**ASK, "stream": stream, "user": user}
                    response = await client.post(body, headers={**caller, "x-session-id": session})
                    assert variant_of(response) == name
                    assert is_hit(response)
        assert watched.told == ([True] * 4 + [False] * 4) * 3


async def test_who_is_dealt_a_variant_with_each_request_is_never_answered_by_another_ones() -> None:
    async with two_variants((50, 50), sticky_by="request", auth={"mode": "off"}) as client:
        found = [variant_of(await client.post(ASK)) for _ in range(80)]
        assert set(found) == {"a", "b"}
        assert calls(client) == {"a": 1, "b": 1}


async def test_routing_page_tells_the_shares_to_those_who_may_read_them() -> None:
    async with two_variants((3, 1)) as client:
        refused = await client.http.get("/v1/routing", headers=bearer(token()))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
        assert (await client.http.get("/v1/routing")).status_code == 401
        page = (await client.http.get("/v1/routing", headers=bearer(token(scope="routing:read")))).json()
        demo, plain = page["models"]
        assert [(variant["name"], variant["share"]) for variant in demo["variants"]] == [("a", 0.75), ("b", 0.25)]
        assert [variant["share"] for variant in plain["variants"]] == [1.0]
        assert [pool["name"] for pool in page["pools"]] == ["a", "b"]


async def test_stream_is_read_on_in_whichever_variant_it_is_of() -> None:
    engines = {name: ScriptedEngine(Script("One two three four five.")) for name in ("a", "b")}
    pools = [{"name": name, "engine": "scripted"} for name in engines]
    variants = [{"name": f"of-{name}", "pool": name, "weight": 1} for name in engines]
    models = [{"name": "demo", "sticky_by": "request", "variants": variants}]
    async with serving(engines=engines, pools=pools, models=models) as client:
        for number in range(20):
            body = {**CHAT, "temperature": 0, "seed": number}
            async with client.stream(body, headers={"x-request-id": f"first-{number}"}) as response:
                whole = (await response.aread()).decode()
                variant = response.headers["x-headrace-variant"]
            third = whole.split("id: ")[3].partition("\n")[0]
            headers = {"x-request-id": f"second-{number}", "last-event-id": third}
            async with client.stream(body, headers=headers) as response:
                rest = (await response.aread()).decode()
            assert response.status_code == 200
            assert response.headers["x-headrace-variant"] == variant
            assert text_of(events_of(rest)) == " four five."
        assert engines["a"].calls + engines["b"].calls == 20
