"""The console's files as they are served: what a browser may do with them, and that nothing else is."""

import re
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from .conftest import Client, serving
from .tokens import JWT_SETTINGS, SECRET

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "app" / "console"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SVG_NAMESPACE = "http://www.w3.org/2000/svg"  # a name, and nothing that is asked


@pytest.fixture(scope="module")
async def page() -> AsyncIterator[Client]:
    """A gateway that lets nobody in without a token."""
    async with serving(auth={"jwt": JWT_SETTINGS}) as client:
        yield client


def policy_of(header: str) -> dict[str, list[str]]:
    directives = [directive.split() for directive in header.split(";")]
    return {name: sources for name, *sources in directives}


def references_of(text: str) -> set[str]:
    """Names of files in the page's markup, and of modules in a script."""
    return set(re.findall(r'(?:src|href)="([^"#]+)"', text)) | set(re.findall(r'from "\./([^"]+)"', text))


async def test_address_without_a_slash_leads_to_the_page(page: Client) -> None:
    response = await page.http.get("/console", follow_redirects=True)
    assert (response.status_code, response.url.path) == (200, "/console/")
    assert [(step.status_code, step.headers["location"]) for step in response.history] == [(307, "console/")]
    assert "<title>Headrace console</title>" in response.text


@pytest.mark.parametrize("path", ["/console", "/console/", "/console/main.js", "/console/icon.svg", "/console/nope"])
async def test_browser_may_use_nothing_but_the_consoles_own_files(page: Client, path: str) -> None:
    headers = (await page.http.get(path)).headers
    policy = policy_of(headers["content-security-policy"])
    for name in ("default-src", "frame-ancestors", "base-uri", "form-action"):
        assert policy[name] == ["'none'"], name
    sources = {name: value for name, value in policy.items() if name.endswith("-src") and value != ["'none'"]}
    assert set(map(tuple, sources.values())) == {("'self'",)}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"


@pytest.mark.parametrize("name", NAMES)
async def test_file_comes_with_its_type_and_asks_for_no_token(page: Client, name: str) -> None:
    response = await page.http.get(f"/console/{name}")
    assert response.status_code == 200
    assert response.headers["content-type"].partition(";")[0] == TYPES[Path(name).suffix]
    assert response.content == (FOLDER / name).read_bytes()
    assert SECRET not in response.text


@pytest.mark.parametrize("name", NAMES)
def test_file_names_no_outside_address_and_nothing_that_the_policy_forbids(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not re.findall(r"\b(?:https?|wss?):|[\"'`(]//", text.replace(SVG_NAMESPACE, ""))
    assert not re.findall(r"@import|url\(|\son\w+=|style=|<style|<script(?![^>]*src=)", text)
    assert not re.findall(r"\beval\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
    assert not re.findall(r"localStorage|sessionStorage|indexedDB|document\.cookie", text)


def test_files_that_are_referenced_are_there_and_all_others_are_not() -> None:
    found, left = set(), ["index.html"]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += references_of((FOLDER / name).read_text())
    assert found == set(NAMES)


async def test_file_that_has_not_changed_is_not_sent_again(page: Client) -> None:
    path = "/console/main.js"
    first = await page.http.get(path)
    etag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (etag, f'"other", {etag}'):
        again = await page.http.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    changed = await page.http.get(path, headers={"if-none-match": '"other"'})
    assert (changed.status_code, changed.content) == (200, first.content)
    assert (await page.http.get("/console/chat.js")).headers["etag"] != etag


async def test_head_tells_what_get_would_and_sends_nothing(page: Client) -> None:
    for path in ("/console/", "/console/main.js"):
        plain = {"accept-encoding": "identity"}
        got = await page.http.get(path, headers=plain)
        head = await page.http.head(path, headers=plain)
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-length", "content-type", "etag", "content-security-policy"):
            assert head.headers[name] == got.headers[name]


async def test_other_methods_are_refused(page: Client) -> None:
    response = await page.http.post("/console/main.js")
    assert (response.status_code, response.headers["allow"]) == (405, "GET")
    assert response.json()["error"]["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    "path",
    [
        "../console_endpoints.py",
        "../../pyproject.toml",
        "%2e%2e/console_endpoints.py",
        "..%2fconsole_endpoints.py",
        "..%5cconsole_endpoints.py",
        "%252e%252e/console_endpoints.py",
        "/etc/passwd",
        "./main.js",
        "main.js%00",
        "main.js/",
        "sub/main.js",
        ".",
    ],
)
async def test_name_is_never_a_path(page: Client, path: str) -> None:
    answer = await page.raw(f"GET /console/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b'"code":"not_found"' in answer.replace(b" ", b"")


async def test_console_that_is_off_is_not_there() -> None:
    async with serving(monitoring={"console": False}) as client:
        for path in ("/console", "/console/", "/console/main.js"):
            response = await client.http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_wheel_has_all_files(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        assert {f"app/console/{name}" for name in NAMES} <= set(archive.namelist())
