"""The key set and what a provider may do to it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from auth.jwks import BUDGET, REFILL_S, Budget, KeyFetchError, KeySet, index
from auth.keys import PUBLIC, VerificationKey
from auth.provider import MAX_DOCUMENT_BYTES, Provider, parse_jwks

from .tokens import OTHER_RSA_KEY, PRIVATE_KEYS

ALGORITHMS = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm, "EdDSA": OKPAlgorithm}


def jwk(algorithm: str = "RS256", key: Any = None, **more: Any) -> dict[str, Any]:
    key = key or PRIVATE_KEYS[algorithm]
    document = json.loads(ALGORITHMS[algorithm].to_jwk(key.public_key()))
    return {name: value for name, value in {**document, **more}.items() if value is not None}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Source:
    """Where a set's keys come from; a fetch waits for its gate."""

    def __init__(self, *kids: str) -> None:
        self.kids = kids
        self.fetches = 0
        self.error: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> list[VerificationKey]:
        self.fetches += 1
        kids = self.kids  # as they were when it was asked
        await self.gate.wait()
        if self.error:
            raise KeyFetchError(self.error)
        return [VerificationKey(f"key of {kid}", frozenset({"RS256"}), kid, kid) for kid in kids]


@asynccontextmanager
async def key_set(source: Source, clock: Clock, refresh_s: float = 3600) -> AsyncIterator[KeySet]:
    keys = KeySet(source, refresh_s, clock)
    task = asyncio.create_task(keys.run())
    await asyncio.sleep(0)
    try:
        yield keys
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_budget_refills_by_one_at_a_time() -> None:
    clock = Clock()
    budget = Budget(BUDGET, REFILL_S, clock)
    assert [budget.take() for _ in range(7)] == [True] * 5 + [False] * 2
    clock.now += 29
    assert not budget.take()
    clock.now += 1
    assert [budget.take() for _ in range(2)] == [True, False]
    clock.now += 10_000
    assert [budget.take() for _ in range(7)] == [True] * 5 + [False] * 2


async def test_unknown_key_ids_share_one_fetch_at_a_time() -> None:
    source, clock = Source("a"), Clock()
    async with key_set(source, clock) as keys:
        await asyncio.sleep(0.01)
        assert source.fetches == 1
        source.kids = ("a", "b")
        found = await asyncio.gather(*(keys.seek("b", "RS256") for _ in range(100)))
        assert {key.kid for key in found} == {"b"}
        assert source.fetches == 2


async def test_key_that_was_rotated_in_while_a_fetch_was_under_way_is_found() -> None:
    source, clock = Source("a"), Clock()
    async with key_set(source, clock) as keys:
        await asyncio.sleep(0.01)
        source.gate.clear()
        stranger = asyncio.create_task(keys.seek("nobody", "RS256"))
        await asyncio.sleep(0.01)  # its fetch has seen the old keys already
        source.kids = ("a", "b")
        late = asyncio.create_task(keys.seek("b", "RS256"))
        await asyncio.sleep(0.01)
        source.gate.set()
        assert await stranger is None
        assert (await late).kid == "b"
        assert source.fetches == 3


async def test_budget_bounds_what_strangers_cause_and_a_new_key_is_found_when_it_has_refilled() -> None:
    source, clock = Source("a"), Clock()
    async with key_set(source, clock) as keys:
        await asyncio.sleep(0.01)
        for number in range(1000):
            assert await keys.seek(f"random-{number}", "RS256") is None
        assert source.fetches == 1 + BUDGET
        source.kids = ("b",)
        assert await keys.seek("b", "RS256") is None
        clock.now += REFILL_S
        assert (await keys.seek("b", "RS256")).kid == "b"


async def test_generation_grows_when_a_key_is_withdrawn_and_only_then() -> None:
    source, clock = Source("a"), Clock()
    async with key_set(source, clock) as keys:
        await asyncio.sleep(0.01)
        for kids, generation in ((("a", "b"), 0), (("a", "b"), 0), (("b",), 1), (("c",), 2)):
            source.kids = kids
            await keys.seek("nobody", "RS256")
            assert keys.generation == generation, kids
            clock.now += REFILL_S


async def test_failure_keeps_the_keys_and_shows() -> None:
    source, clock = Source("a"), Clock()
    async with key_set(source, clock) as keys:
        await asyncio.sleep(0.01)
        source.error = "it is down"
        clock.now += 50
        assert await keys.seek("b", "RS256") is None
        assert keys.find("a", "RS256") is not None
        status = keys.status()
        assert (status.keys, status.age_s, status.last_error, status.failures) == (1, 50.0, "it is down", 1)
        assert keys.is_ready
        source.error = None
        await keys.seek("b", "RS256")
        assert keys.status().last_error is None


async def test_whoever_waits_is_let_go_when_the_gateway_ends_or_they_leave() -> None:
    source, clock = Source("a"), Clock()
    async with key_set(source, clock) as keys:
        await asyncio.sleep(0.01)
        source.gate.clear()
        leaver = asyncio.create_task(keys.seek("b", "RS256"))
        waiter = asyncio.create_task(keys.seek("b", "RS256"))
        await asyncio.sleep(0.01)
        leaver.cancel()
        await asyncio.sleep(0.01)
        assert not waiter.done()
    async with asyncio.timeout(1):
        assert await waiter is None


def test_set_gives_keys_that_verify_and_passes_over_others() -> None:
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    document = {
        "keys": [
            jwk(kid="plain"),
            jwk("ES256", kid="curve", use="sig"),
            jwk("EdDSA", kid="edwards", key_ops=["verify"]),
            jwk(kid="pss", alg="PS256", key=OTHER_RSA_KEY),
            jwk(kid="encrypts", use="enc"),
            jwk(kid="signs", key_ops=["sign"]),
            jwk(kid="weak", key=weak),
            jwk(kid="hmac", alg="HS256"),
            {"kty": "oct", "kid": "secret", "k": "c2VjcmV0"},
            {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "off the curve"},
            {"kty": "RSA", "kid": "half"},
            {"kty": "future", "kid": "future"},
            jwk(kid=7),
            "text",
            None,
            {},
        ]
    }
    found = {key.kid: key.algorithms for key in parse_jwks(document, PUBLIC)}
    assert found == {
        "plain": {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"},
        "curve": {"ES256"},
        "edwards": {"EdDSA"},
        "pss": {"PS256"},
    }
    assert {key.kid for key in parse_jwks(document, frozenset({"ES256"}))} == {"curve"}


@pytest.mark.parametrize(
    "document",
    [[], {}, {"keys": {}}, {"keys": []}, {"keys": [jwk("ES256")]}, {"keys": [jwk()] * 101}, "text", None],
)
def test_set_without_usable_keys_is_a_failure(document: Any) -> None:
    with pytest.raises(KeyFetchError):
        parse_jwks(document, frozenset({"RS256"}))


def test_token_without_a_key_id_gets_the_only_key_that_fits() -> None:
    for document, fits in (
        ({"keys": [jwk(), jwk("ES256", kid="e")]}, {"RS256", "ES256"}),
        ({"keys": [jwk(kid="a"), jwk(kid="b", key=OTHER_RSA_KEY), jwk("ES256", kid="e")]}, {"ES256"}),
        ({"keys": [jwk(), jwk(key=OTHER_RSA_KEY)]}, set()),
    ):
        found = index(parse_jwks(document, PUBLIC))
        assert {name for name in ("RS256", "ES256", "EdDSA") if (None, name) in found} == fits


GOOD = json.dumps({"keys": [jwk(kid="a")]}).encode()


@asynccontextmanager
async def http(answers: dict[str, bytes]) -> AsyncIterator[str]:
    """A server that gives these bytes for a path, whatever they are; nothing stands for silence."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        writer.write(answers[path])
        if not answers[path]:
            while await reader.readline():  # until the client gives up
                pass
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def answer(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}connection: close\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("bytes_sent", "message"),
    [
        (answer(GOOD, "500 Oops"), "answered 500"),
        (answer(b"<html>not here</html>"), "not JSON"),
        (answer(b'{"keys": [' + b'{"kty": "RSA"},' * 40_000), f"larger than {MAX_DOCUMENT_BYTES}"),
        (answer(b"[" * 200_000), "not JSON"),
        (answer(b"", "302 Found", location="/again"), "TooManyRedirects"),
        (b"nonsense\r\n\r\n", "BadStatus|BadHttpMessage|Response|ServerDisconnected"),
        (answer(GOOD, content_length="1000000"), "ClientPayloadError"),
    ],
)
async def test_hostile_answers_are_failures(bytes_sent: bytes, message: str) -> None:
    async with http({"/": bytes_sent, "/again": bytes_sent}) as url:
        with pytest.raises(KeyFetchError, match=message):
            await Provider(["RS256"], f"{url}/", None).fetch()


async def test_provider_that_is_silent_is_given_up() -> None:
    async with http({"/": b""}) as url:
        provider = Provider(["RS256"], f"{url}/", None, timeout_s=0.2)
        with pytest.raises(KeyFetchError, match="Timeout"):
            await provider.fetch()
    with pytest.raises(KeyFetchError, match="Connect"):
        await Provider(["RS256"], f"{url}/", None).fetch()


async def test_discovery_must_name_the_configured_issuer() -> None:
    paths: dict[str, bytes] = {"/keys": answer(GOOD)}
    async with http(paths) as url:
        for document, message in (
            ({"issuer": "http://other", "jwks_uri": f"{url}/keys"}, "another issuer"),
            ({"jwks_uri": f"{url}/keys"}, "another issuer"),
            ({"issuer": url}, "no safe jwks_uri"),
            ({"issuer": url, "jwks_uri": 7}, "no safe jwks_uri"),
            ([], "another issuer"),
        ):
            paths["/.well-known/openid-configuration"] = answer(json.dumps(document).encode())
            with pytest.raises(KeyFetchError, match=message):
                await Provider(["RS256"], None, url).fetch()
        good = json.dumps({"issuer": url, "jwks_uri": f"{url}/keys"}).encode()
        paths["/.well-known/openid-configuration"] = answer(good)
        assert [key.kid for key in await Provider(["RS256"], None, url).fetch()] == ["a"]
