"""Who is let in, what they may use, and what everybody else is told."""

import gc
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jwt
import psutil
import pytest
from openai import AsyncOpenAI

from app.security import digest_of
from auth.api_keys import ApiKeys, new_key
from auth.authenticator import Authenticator
from auth.errors import ExpiredToken, InvalidToken
from auth.keys import StaticKey, secret_key
from auth.principal import ClaimNames, ClaimsReader, Principal
from auth.tokens import TokenVerifier

from .conftest import CHAT, Client, make_settings, serving
from .tokens import (
    AUDIENCE,
    ISSUER,
    JWT_SETTINGS,
    OTHER_RSA_KEY,
    PRIVATE_KEYS,
    RSA_KEY,
    SECRET,
    bearer,
    by_hand,
    claims,
    pem_of,
    token,
)

OPEN = {"/health", "/health/live", "/health/ready", "/metrics"}
KEY = SECRET.encode()
TWO_MODELS = {
    "models": [{"name": "small", "pool": "demo"}, {"name": "large", "pool": "demo"}],
}


@pytest.fixture
async def closed() -> AsyncIterator[Client]:
    async with serving(auth={"jwt": JWT_SETTINGS}) as client:
        yield client


@pytest.fixture(scope="module")
async def refusing() -> AsyncIterator[Client]:
    """One gateway for all who are refused: they leave nothing behind."""
    async with serving(auth={"jwt": JWT_SETTINGS}) as client:
        yield client


def rsa_settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    file = tmp_path / "public.pem"
    file.write_bytes(pem_of(RSA_KEY))
    return {"jwt": {"public_key_file": str(file), "issuer": ISSUER, "audience": AUDIENCE, **more}}


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (lambda: None, "missing_token"),
        (lambda: "", "missing_token"),
        (lambda: "Bearer", "missing_token"),
        (lambda: "bearer", "missing_token"),
        (lambda: "Basic YTpi", "missing_token"),
        (lambda: token(), "missing_token"),
        (lambda: "Bearer x", "invalid_token"),
        (lambda: "Bearer a.b", "invalid_token"),
        (lambda: "Bearer a.b.c", "invalid_token"),
        (lambda: "Bearer ..", "invalid_token"),
        (lambda: "Bearer \xff.\xff.\xff", "invalid_token"),
        (lambda: "Bearer " + "x" * 100_000, "invalid_token"),
        (lambda: "Bearer " + token(padding="x" * 75_000), "invalid_token"),
        (lambda: f"Bearer {token()} {token()}", "invalid_token"),
        (lambda: f"Bearer {token(key=SECRET[::-1])}", "invalid_token"),
        (lambda: f"Bearer {token(key=RSA_KEY, algorithm='RS256')}", "invalid_token"),
        (lambda: f"Bearer {token(algorithm='HS384')}", "invalid_token"),
        (lambda: f"Bearer {by_hand({'alg': 'none'}, claims())}", "invalid_token"),
        (lambda: f"Bearer {by_hand({'alg': 'None', 'typ': 'JWT'}, claims())}", "invalid_token"),
        (lambda: f"Bearer {by_hand({'alg': 'HS256'}, claims())}", "invalid_token"),
        (lambda: f"Bearer {by_hand({}, claims(), KEY)}", "invalid_token"),
        (lambda: f"Bearer {by_hand({'alg': ['HS256']}, claims(), KEY)}", "invalid_token"),
        (lambda: f"Bearer {by_hand({'alg': 'HS256', 'kid': 7}, claims(), KEY)}", "invalid_token"),
        (
            lambda: f"Bearer {by_hand({'alg': 'HS256', 'crit': ['x'], 'x': 1}, claims(), KEY)}",
            "invalid_token",
        ),
        (
            lambda: f"Bearer {by_hand({'alg': 'HS256', 'b64': False, 'crit': ['b64']}, '', KEY)}",
            "invalid_token",
        ),
        (lambda: f"Bearer {by_hand([1], claims(), KEY)}", "invalid_token"),
        (lambda: f"Bearer {by_hand({'alg': 'HS256'}, [1], KEY)}", "invalid_token"),
        (lambda: f"Bearer {token(exp=int(time.time()) - 60)}", "expired_token"),
        (lambda: f"Bearer {token(exp=None)}", "invalid_token"),
        (lambda: f"Bearer {token(exp='soon')}", "invalid_token"),
        (lambda: f"Bearer {token(exp=str(int(time.time()) + 60))}", "invalid_token"),
        (lambda: f"Bearer {token(exp=float('inf'))}", "invalid_token"),
        (lambda: f"Bearer {token(exp=[1])}", "invalid_token"),
        (lambda: f"Bearer {token(nbf=int(time.time()) + 60)}", "invalid_token"),
        (lambda: f"Bearer {token(nbf='soon')}", "invalid_token"),
        (lambda: f"Bearer {token(iat=int(time.time()) + 60)}", "invalid_token"),
        (lambda: f"Bearer {token(aud='other')}", "invalid_token"),
        (lambda: f"Bearer {token(aud=None)}", "invalid_token"),
        (lambda: f"Bearer {token(aud=[])}", "invalid_token"),
        (lambda: f"Bearer {token(aud={'headrace': 1})}", "invalid_token"),
        (lambda: f"Bearer {token(iss='https://other.example')}", "invalid_token"),
        (lambda: f"Bearer {token(iss=None)}", "invalid_token"),
        (lambda: f"Bearer {token(sub=None)}", "invalid_token"),
        (lambda: f"Bearer {token(sub=7)}", "invalid_token"),
        (lambda: f"Bearer {token(sub='')}", "invalid_token"),
        (lambda: f"Bearer {token(sub='ann' + chr(10) + 'forged=line')}", "invalid_token"),
        (lambda: f"Bearer {token(sub='x' * 257)}", "invalid_token"),
        (lambda: f"Bearer {token(tenant=['a'])}", "invalid_token"),
        (lambda: f"Bearer {token(scope=7)}", "invalid_token"),
        (lambda: f"Bearer {token(scope=[7])}", "invalid_token"),
        (lambda: f"Bearer {token(models={'a': 1})}", "invalid_token"),
        (lambda: f"Bearer {token(priority='high')}", "invalid_token"),
        (lambda: f"Bearer {token(priority=True)}", "invalid_token"),
        (lambda: f"Bearer {token(tier=3)}", "invalid_token"),
        (lambda: f"Bearer {token(limits={'requests_per_minute': -1})}", "invalid_token"),
        (lambda: f"Bearer {token(limits={'tokens_per_minute': 1.5})}", "invalid_token"),
    ],
)
async def test_whoever_is_not_known_gets_401_and_a_challenge(
    refusing: Client, header: Callable[[], str | None], code: str
) -> None:
    value = header()  # made now, so that "in a minute" is
    headers = {} if value is None else {"authorization": value.encode("latin-1")}
    for response in (await refusing.post(headers=headers), await refusing.http.get("/v1/models", headers=headers)):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (401, code, "authentication_error"), error
        assert response.headers["www-authenticate"].startswith("Bearer ")
        assert error["message"] in (
            "The token is not valid.",
            "The token has expired.",
            "A token is needed: `Authorization: Bearer <token>`.",
        )
    assert refusing.engine.calls == 0


async def test_each_byte_of_a_token_counts(closed: Client) -> None:
    good = token()
    assert (await closed.post(headers=bearer(good))).status_code == 200
    for place in range(0, len(good), 7):
        changed = good[:place] + ("A" if good[place] != "A" else "B") + good[place + 1 :]
        assert (await closed.post(headers=bearer(changed))).status_code == 401, place


async def test_public_key_is_never_a_secret(tmp_path: Path) -> None:
    forged = by_hand({"alg": "HS256", "typ": "JWT"}, claims(), pem_of(RSA_KEY))
    async with serving(auth=rsa_settings(tmp_path)) as client:
        assert (await client.post(headers=bearer(forged))).json()["error"]["code"] == "invalid_token"
        other = token(OTHER_RSA_KEY, "RS256")
        assert (await client.post(headers=bearer(other))).json()["error"]["code"] == "invalid_token"
        assert (await client.post(headers=bearer(token(RSA_KEY, "RS256")))).status_code == 200
        # A strong signature of the right key, but not of an algorithm that was allowed.
        assert (await client.post(headers=bearer(token(RSA_KEY, "RS512")))).status_code == 401


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512", *PRIVATE_KEYS])
async def test_every_algorithm_verifies_with_its_own_kind_of_key(tmp_path: Path, algorithm: str) -> None:
    settings: dict[str, Any] = {"issuer": ISSUER, "audience": AUDIENCE, "algorithms": [algorithm]}
    key: Any = SECRET
    if algorithm in PRIVATE_KEYS:
        key = PRIVATE_KEYS[algorithm]
        (tmp_path / "public.pem").write_bytes(pem_of(key))
        settings["public_key_file"] = str(tmp_path / "public.pem")
    else:
        (tmp_path / "secret").write_text(SECRET + "\n")
        settings["secret_file"] = str(tmp_path / "secret")
    async with serving(auth={"jwt": settings}) as client:
        assert (await client.post(headers=bearer(token(key, algorithm, kid="any")))).status_code == 200
        for other in {"HS256", "RS256", "ES256", "EdDSA"} - {algorithm}:
            bad = token(PRIVATE_KEYS.get(other, SECRET), other)
            assert (await client.post(headers=bearer(bad))).status_code == 401, other


async def test_openai_sdk_needs_nothing_but_the_token(closed: Client) -> None:
    async with AsyncOpenAI(base_url=f"{closed.gateway.server.url}/v1", api_key=token(), max_retries=0) as openai:
        answer = await openai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content == "One two three four five."
        assert [model.id async for model in openai.models.list()] == ["demo"]


async def test_leeway_is_for_clocks_and_waived_checks_are_waived_by_name() -> None:
    late = token(exp=int(time.time()) - 5)
    async with serving(auth={"jwt": {**JWT_SETTINGS, "leeway_s": 30}}) as client:
        assert (await client.post(headers=bearer(late))).status_code == 200
    async with serving(auth={"jwt": {**JWT_SETTINGS, "leeway_s": 0}}) as client:
        assert (await client.post(headers=bearer(late))).json()["error"]["code"] == "expired_token"
    waived = {"secret": SECRET, "allow_any_issuer": True, "allow_any_audience": True}
    async with serving(auth={"jwt": waived}) as client:
        for more in ({}, {"iss": None, "aud": None}, {"iss": "x", "aud": ["y"]}):
            assert (await client.post(headers=bearer(token(**more)))).status_code == 200, more


async def test_only_open_paths_answer_without_a_token(closed: Client) -> None:
    inner = closed.gateway.inner
    paths = {route.path: route.methods for route in inner.routes if hasattr(route, "methods")}
    assert paths.keys() >= OPEN
    for path, methods in paths.items():
        if path.startswith("/console"):  # files that everybody has
            continue
        method = "GET" if "GET" in methods else "POST"
        response = await closed.http.request(method, path.replace("{name:path}", "demo"))
        assert response.status_code == (200 if path in OPEN else 401), path
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert (await closed.post(path=path)).status_code == 401
    for path in ("/docs", "/openapi.json", "/nope", "/v1", "/v1/nope", "//v1/models"):
        assert (await closed.http.get(path)).status_code == 404, path


async def test_each_endpoint_asks_for_its_scope(closed: Client) -> None:
    for scope in (None, "", "openid profile", ["cache:read"]):
        headers = bearer(token(scope=scope))
        for response in (await closed.post(headers=headers), await closed.http.get("/v1/models", headers=headers)):
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (403, "insufficient_scope")
            assert response.headers["www-authenticate"].endswith('error="insufficient_scope", scope="inference"')
    for scope in ("openid inference", ["inference", "x"]):
        assert (await closed.post(headers=bearer(token(scope=scope)))).status_code == 200
    async with serving(auth={"jwt": JWT_SETTINGS, "default_scopes": ["inference"]}) as client:
        assert (await client.post(headers=bearer(token(scope=None)))).status_code == 200
        assert (await client.post(headers=bearer(token(scope="x")))).status_code == 403


async def test_models_are_those_that_the_token_allows() -> None:
    async with serving(auth={"jwt": JWT_SETTINGS}, **TWO_MODELS) as client:

        async def status(model: str, allowed: Any) -> tuple[int, str | None]:
            headers = bearer(token(models=allowed))
            asked = await client.post({**CHAT, "model": model}, headers=headers)
            shown = await client.http.get(f"/v1/models/{model}", headers=headers)
            assert asked.status_code == shown.status_code
            return asked.status_code, asked.json().get("error", {}).get("code")

        async def listed(allowed: Any) -> list[str]:
            response = await client.http.get("/v1/models", headers=bearer(token(models=allowed)))
            return [model["id"] for model in response.json()["data"]]

        for everything in (None, ["*"], "*", ["small", "*"]):
            assert await listed(everything) == ["small", "large"]
            assert await status("large", everything) == (200, None)
            assert await status("nope", everything) == (404, "model_not_found")
        for some in (["sm*"], ["small"], "small other", ["s[m]all"]):
            assert await listed(some) == ["small"]
            assert await status("small", some) == (200, None)
            # The same answer whether a model exists or not.
            assert await status("large", some) == (403, "model_not_allowed")
            assert await status("nope", some) == (403, "model_not_allowed")
            assert await status("small-2", some) == (403, "model_not_allowed")
        assert await listed([]) == []
        assert await status("small", []) == (403, "model_not_allowed")


def test_claims_may_have_other_names_and_stand_inside_others() -> None:
    names = ClaimNames(
        subject="client_id",
        tenant="https://example.com/org.id",
        scope="realm_access.roles",
        models="ext.ai.models",
        tier="",
    )
    reader = ClaimsReader(names, frozenset())
    found = reader.principal(
        {
            "client_id": "bot",
            "https://example.com/org.id": "acme",
            "realm_access": {"roles": ["inference", "cache:read"]},
            "ext": {"ai": {"models": ["a*"]}},
            "limits": {"concurrent": 2},
            "priority": 5,
            "tier": "gold",
        }
    )
    assert (found.subject, found.tenant, found.scopes) == ("bot", "acme", {"inference", "cache:read"})
    assert (found.models, found.priority, found.tier, found.quota.concurrent) == (("a*",), 5, None, 2)
    assert reader.principal({"client_id": "bot", "realm_access": 3, "ext": []}).tenant == "bot"


async def test_api_keys_are_known_by_their_digest_only(caplog: pytest.LogCaptureFixture) -> None:
    key, other = new_key(), new_key()
    entries = [
        {"sha256": digest_of(key), "subject": "bot", "models": ["small"]},
        {"sha256": digest_of("sk-migrated.with.dots"), "subject": "old"},
        {"sha256": digest_of(other), "subject": "reader", "scopes": ["cache:read"]},
    ]
    async with serving(auth={"api_keys": entries}, **TWO_MODELS) as client:
        assert (await client.post({**CHAT, "model": "small"}, headers=bearer(key))).status_code == 200
        assert (await client.post({**CHAT, "model": "large"}, headers=bearer(key))).status_code == 403
        assert (
            await client.post({**CHAT, "model": "large"}, headers=bearer("sk-migrated.with.dots"))
        ).status_code == 200
        assert (await client.post(headers=bearer(other))).status_code == 403
        for bad in (digest_of(key), key[:-1], key + "x", new_key(), token()):
            assert (await client.post(headers=bearer(bad))).json()["error"]["code"] == "invalid_token"
    async with serving(auth={"api_keys": entries, "jwt": JWT_SETTINGS}, **TWO_MODELS) as client:
        for good in (key, token()):
            assert (await client.post({**CHAT, "model": "small"}, headers=bearer(good))).status_code == 200


def test_api_keys_with_equal_beginnings_of_digests_are_told_apart() -> None:
    first, second = bytes(32), bytes(31) + b"\1"
    keys = ApiKeys({first: Principal("a", "a"), second: Principal("b", "b")})
    assert keys.find(second) == Principal("b", "b")
    assert keys.find(bytes(30) + b"\1\1") is None


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def make_authenticator(clock: Clock, max_remembered: int = 10) -> tuple[Authenticator, TokenVerifier]:
    keys = StaticKey(secret_key(SECRET.encode(), ["HS256"]))
    reader = ClaimsReader(ClaimNames(), frozenset())
    verifier = TokenVerifier(keys, ["HS256"], reader, ISSUER, [AUDIENCE], leeway_s=0)
    return Authenticator(verifier, ApiKeys({}), max_remembered, clock), verifier


async def test_remembered_token_is_good_until_it_expires_or_keys_change() -> None:
    clock = Clock()
    authenticator, verifier = make_authenticator(clock)
    header = b"Bearer " + token(exp=int(clock.now) + 2).encode()
    principal = await authenticator.authenticate(header)
    assert await authenticator.authenticate(header) is principal
    verifier.keys.generation = 1  # a key was withdrawn: look again
    again = await authenticator.authenticate(header)
    assert again == principal
    assert again is not principal
    clock.now += 3  # past exp: PyJWT is asked again (by its own clock the token is still good)
    assert await authenticator.authenticate(header) is not again


async def test_memory_of_tokens_is_bounded_and_keeps_those_in_use() -> None:
    authenticator, _ = make_authenticator(Clock())
    used = b"Bearer " + token(sub="used").encode()
    principal = await authenticator.authenticate(used)
    for number in range(50):
        await authenticator.authenticate(b"Bearer " + token(sub=f"other-{number}").encode())
        assert await authenticator.authenticate(used) is principal
    assert authenticator.remembered == 10


@pytest.mark.slow
async def test_strangers_cost_no_memory(closed: Client) -> None:
    authenticator = closed.gateway.authenticator
    rss = psutil.Process()

    async def knock(count: int) -> None:
        for number in range(count):
            bad = secrets.token_urlsafe(300) if number % 2 else token(key=secrets.token_hex(40))
            with pytest.raises(InvalidToken):
                await authenticator.authenticate(f"Bearer {bad}".encode())

    await knock(1000)
    gc.collect()
    before = rss.memory_info().rss
    await knock(10_000)
    gc.collect()
    assert rss.memory_info().rss - before < 2_000_000
    assert authenticator.remembered == 0


async def test_log_says_why_and_never_holds_a_token(
    closed: Client, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("headrace").setLevel(logging.DEBUG)
    bad = [token(key="canary-" + SECRET), token(aud="canary-other"), token(sub="canary\n"), "canary-plain"]
    good = token(sub="ann", tenant="acme", jti="canary-jti")
    for value in [*bad, good]:
        await closed.post(headers=bearer(value))
        await closed.http.get("/v1/models", headers=bearer(value))
    fields = closed.access_lines(capsys)
    text = caplog.text + repr(fields)
    for part in [SECRET, *bad, good, *".".join([*bad, good]).split(".")]:
        assert part not in text
    assert "canary" not in text
    reasons = [line.get("reason") for line in fields if line["path"].startswith("/v1")]
    assert reasons[0:4:2] == ["InvalidSignatureError", "InvalidAudienceError"]
    assert reasons[0::2] == reasons[1::2]
    assert [(line["tenant"], line["subject"]) for line in fields if line["status"] == 200] == [("acme", "ann")] * 2


async def test_results_are_counted(closed: Client) -> None:
    for headers in ({}, bearer("x"), bearer(token(exp=int(time.time()) - 60)), bearer(token()), bearer(token())):
        await closed.post(headers=headers)
    text = (await closed.http.get("/metrics")).text
    for result, count in (("ok", 2), ("missing_token", 1), ("invalid_token", 1), ("expired_token", 1)):
        assert f'headrace_authentications_total{{result="{result}"}} {count}.0' in text


async def test_refused_caller_with_a_large_body_is_answered_before_it_is_read(closed: Client) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection = await closed.connect()
    connection.writer.write(head + b"content-length: 5000000\r\n\r\n")
    assert (await connection.reader.readline()).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("auth", "server", "message"),
    [
        ({}, {}, "nobody could get in"),
        ({"jwt": {"secret": SECRET}}, {}, "issuer is needed"),
        ({"jwt": {"secret": SECRET, "issuer": ISSUER}}, {}, "audience is needed"),
        ({"jwt": {"secret": SECRET, "allow_any_issuer": True}}, {}, "audience is needed"),
        ({"jwt": {**JWT_SETTINGS, "jwks_url": "https://x"}}, {}, "exclude each other"),
        ({"jwt": {**JWT_SETTINGS, "algorithms": ["RS256"]}}, {}, "RS256 is not for a secret"),
        ({"jwt": {**JWT_SETTINGS, "algorithms": ["none"]}}, {}, "algorithms"),
        ({"jwt": {"issuer": ISSUER, "audience": "a", "algorithms": ["HS256"]}}, {}, "HS256 is not for public keys"),
        ({"jwt": {"jwks_url": "http://keys.example", "issuer": "x", "audience": "a"}}, {}, "is not https"),
        ({"jwt": {"issuer": "http://keys.example", "audience": "a"}}, {}, "is not https"),
        ({"jwt": {**JWT_SETTINGS, "leeway_s": 4000}}, {}, "leeway_s"),
        ({"mode": "off"}, {"host": "0.0.0.0"}, "'off' is for loopback"),
        ({"mode": "off"}, {"host": "::"}, "'off' is for loopback"),
        ({"mode": "off", "jwt": JWT_SETTINGS}, {}, "leaves keys unused"),
        ({"api_keys": [{"sha256": "abc", "subject": "x"}]}, {}, "sha256"),
        ({"api_keys": [{"sha256": "0" * 64, "subject": "x"}] * 2}, {}, "the same key is there twice"),
    ],
)
def test_unsafe_settings_do_not_start(auth: dict[str, Any], server: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_settings(server, auth=auth)


def test_what_is_unsafe_can_be_asked_for_by_name() -> None:
    make_settings({"host": "0.0.0.0"}, auth={"mode": "off", "allow_insecure": True})
    make_settings({"host": "127.0.0.2"}, auth={"mode": "off"})
    make_settings(auth={"jwt": {"issuer": "http://keys.example", "audience": "a"}, "allow_insecure": True})
    make_settings(auth={"jwt": {"issuer": "http://127.0.0.1:9", "audience": "a"}})


async def test_expired_is_told_from_invalid_only_when_the_signature_is_right() -> None:
    authenticator, _ = make_authenticator(Clock())
    old = {"exp": int(time.time()) - 60}
    with pytest.raises(ExpiredToken):
        await authenticator.authenticate(b"Bearer " + token(**old).encode())
    with pytest.raises(InvalidToken):
        await authenticator.authenticate(b"Bearer " + token(key=SECRET[::-1], **old).encode())
    assert jwt.decode(token(), SECRET, ["HS256"], audience=AUDIENCE)["sub"] == "ann"
