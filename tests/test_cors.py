"""Browsers on other origins."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from .conftest import CHAT, Client, make_settings, serving
from .tokens import JWT_SETTINGS, bearer, token

ORIGIN = "https://chat.example.com"
SERVER = {"cors_origins": [ORIGIN, "http://localhost:3000"]}


@pytest.fixture(scope="module")
async def crossed() -> AsyncIterator[Client]:
    async with serving(server=SERVER, auth={"jwt": JWT_SETTINGS}) as client:
        yield client


async def preflight(client: Client, origin: str, method: str = "POST", **headers: str) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": method}
    wanted = {"access-control-request-headers": "authorization,content-type,x-stainless-os"}
    return await client.http.options("/v1/chat/completions", headers={**asked, **wanted, **headers})


async def test_preflight_of_a_configured_origin_is_answered_without_a_token(crossed: Client) -> None:
    for origin in SERVER["cors_origins"]:
        response = await preflight(crossed, origin)
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-origin"] == origin
        assert "POST" in response.headers["access-control-allow-methods"]
        allowed = response.headers["access-control-allow-headers"]
        assert {"authorization", "content-type", "x-stainless-os"} <= {name.strip() for name in allowed.split(",")}
        assert "access-control-allow-credentials" not in response.headers
        assert "origin" in response.headers["vary"].lower()


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", ORIGIN + ".evil.example", ORIGIN.upper(), "https://example.com", ""]
)
async def test_preflight_of_any_other_origin_is_refused(crossed: Client, origin: str) -> None:
    response = await preflight(crossed, origin)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in response.headers
    answer = await crossed.post(headers={"origin": origin, **bearer(token())})
    assert "access-control-allow-origin" not in answer.headers


async def test_preflight_for_other_methods_is_refused(crossed: Client) -> None:
    assert (await preflight(crossed, ORIGIN, method="DELETE")).status_code == 403


async def test_answers_errors_and_streams_can_be_read_by_the_page(crossed: Client) -> None:
    good = {"origin": ORIGIN, **bearer(token())}
    for response, status in (
        (await crossed.post(headers=good), 200),
        (await crossed.post({**CHAT, "stream": True}, headers=good), 200),
        (await crossed.post({**CHAT, "n": 0}, headers=good), 400),
        (await crossed.post(headers={"origin": ORIGIN}), 401),
        (await crossed.http.get("/v1/models", headers=good), 200),
        (await crossed.http.get("/v1/models", headers={"origin": ORIGIN}), 401),
        (await crossed.http.get("/nope", headers=good), 404),
    ):
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        exposed = response.headers["access-control-expose-headers"].lower()
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed.split(", "))


async def test_without_configured_origins_no_page_may_call() -> None:
    async with serving(auth={"jwt": JWT_SETTINGS}) as client:
        response = await preflight(client, ORIGIN)
        assert response.status_code == 405
        assert not any(name.startswith("access-control") for name in response.headers)
        answer = await client.post(headers={"origin": ORIGIN, **bearer(token())})
        assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", "https://x/y", "https://", ""])
def test_what_is_no_origin_stops_the_start(origin: str) -> None:
    settings: dict[str, Any] = {"cors_origins": [origin]}
    with pytest.raises(ValueError, match="is not an origin"):
        make_settings(settings)
