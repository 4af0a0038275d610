"""A real gateway on loopback, in the test's own event loop, in front of scripted engines."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import pytest

from app.engines.scripted import Script, ScriptedEngine
from app.gateway import Gateway
from app.settings import Settings, SettingsSource

from .redis_server import RedisServer, redis_server

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "How are you?"}]}


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


def make_settings(server: dict[str, Any] | None = None, **more: Any) -> Settings:
    return Settings.model_validate(
        {
            "server": {"port": 0, "drain": {"settle_s": 0, "drain_s": 5}, **(server or {})},
            "auth": {"mode": "off"},
            "pools": [{"name": "demo", "engine": "scripted"}],
            **more,
        }
    )


class Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def abort(self) -> None:
        """Go away as a crashed client does."""
        self.writer.transport.abort()


class Client:
    """Speaks to one gateway; `engines` are what answers in it, by their pools' names, `engine` is the first of them."""

    def __init__(self, gateway: Gateway, engines: dict[str, ScriptedEngine], http: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.engines = engines
        self.engine = next(iter(engines.values()))
        self.http = http
        host, port = gateway.server.servers[0].sockets[0].getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        self._connections: list[Connection] = []

    async def post(self, body: Any = CHAT, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    @asynccontextmanager
    async def stream(
        self, body: Any = CHAT, path: str = "/v1/chat/completions", **options: Any
    ) -> AsyncIterator[httpx.Response]:
        async with self.http.stream("POST", path, json={**body, "stream": True}, **options) as response:
            yield response

    async def open(
        self, body: Any = CHAT, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
    ) -> "Connection":
        """Send a request on a connection of its own; the answer is left to be read. Quicker than httpx by far."""
        connection = await self.connect()
        data = json.dumps(body).encode()
        all_headers = {"host": "x", "content-type": "application/json", "content-length": len(data), **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
        connection.writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
        return connection

    async def connect(self) -> "Connection":
        connection = Connection(*await asyncio.open_connection(*self.address))
        self._connections = [other for other in self._connections if not other.writer.is_closing()]
        self._connections.append(connection)
        return connection

    async def close(self) -> None:
        for connection in self._connections:
            connection.abort()
        await asyncio.sleep(0.01)

    async def raw(self, request: bytes, timeout_s: float = 10.0) -> bytes:
        """Send bytes, and read until the gateway closes the connection."""
        connection = await self.connect()
        connection.writer.write(request)
        async with asyncio.timeout(timeout_s):
            return await connection.reader.read()

    def access_lines(self, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
        """What the access log has written since the last look."""
        self.gateway.access_log.flush()
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        return [line for line in lines if line["logger"] == "headrace.access"]

    async def until_idle(self, timeout_s: float = 1.0) -> None:
        """Wait until nothing of any request is left; fail after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while self._is_busy():
                await asyncio.sleep(0.005)

    def _is_busy(self) -> bool:
        running = sum(engine.load.running for engine in self.engines.values())
        return running + self.gateway.lifecycle.active_requests > 0


@asynccontextmanager
async def serving(
    script: Script | Callable[..., Script] | None = None,
    server: dict[str, Any] | None = None,
    engine: ScriptedEngine | None = None,
    engines: dict[str, ScriptedEngine] | None = None,
    source: SettingsSource | None = None,
    **settings: Any,
) -> AsyncIterator[Client]:
    """Without `engines`, `engine` or `script` answers in the pool `demo`. `source` is in place of all settings."""
    engines = engines or {"demo": engine or ScriptedEngine(script or Script("One two three four five."))}
    configured = make_settings(server, **settings) if source is None else source.load()
    gateway = Gateway(configured, dict(engines), source)
    task = asyncio.create_task(gateway.serve())
    try:
        starts = asyncio.gather(*(engine.has_started.wait() for engine in gateway.engines.values()))
        await asyncio.wait([task, starts], return_when=asyncio.FIRST_COMPLETED)
        await gateway.server.has_started.wait()
        url = gateway.server.url
        limits = httpx.Limits(max_connections=None)
        # Without TLS there is nothing to verify, and no need to load the certificates each time.
        async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits, verify=False) as http:
            client = Client(gateway, engines, http)
            try:
                yield client
            finally:
                await client.close()
    finally:
        gateway.server.leave()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as client:
        yield client


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """The payloads of a stream, decoded; `[DONE]` as it is."""
    payloads = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def text_of(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for event in events
        if event != "[DONE]"
        for choice in event.get("choices", [])
    )
