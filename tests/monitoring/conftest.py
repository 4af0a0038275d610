"""What a gateway with every part in use tells of itself, and the files that are made of it."""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml
from aiohttp import web
from jwt.algorithms import RSAAlgorithm

from app.engines.scripted import Gate, Script, ScriptedEngine
from app.metrics import of_workers, text_of
from app.settings import SettingsSource
from routing.engine import Load

from ..conftest import CHAT, Client, serving, until
from ..fault_server import fault_server
from ..metrics_text import Samples
from ..redis_server import RedisServer
from ..tokens import AUDIENCE, ISSUER, RSA_KEY, bearer, token

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "helm" / "monitoring" / "alerts.yaml"
DASHBOARD = ROOT / "helm" / "monitoring" / "dashboard.json"
# What Prometheus says of where samples come from.
TARGET_LABELS = frozenset({"job", "instance", "namespace"})


@pytest.fixture(scope="session")
def promtool() -> str:
    beside_python = str(Path(sys.executable).parent)
    found = shutil.which("promtool", path=beside_python) or shutil.which("promtool")
    assert found, "promtool is not installed; scripts/install_promtool.sh installs it"
    return found


@pytest.fixture(scope="session")
def alerts() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"] if "alert" in rule
    ]


@pytest.fixture(scope="session")
def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


class Told:
    """The text of /metrics. `types` are by the names that stand in it, without what is made of each (`_bucket`, …);
    `labels` by those of the samples."""

    def __init__(self, text: str) -> None:
        lines = [line.split() for line in text.splitlines() if line.startswith("# TYPE ")]
        self.types = {name: kind for _, _, name, kind in lines}
        self.labels: dict[str, set[str]] = {}
        for sample in Samples.of(text):
            self.labels.setdefault(sample.name, set()).update(sample.labels)

    def labels_of(self, metric: str) -> set[str]:
        found = [self.labels[name] for name in (metric, f"{metric}_sum") if name in self.labels]
        assert found, f"{metric} has no samples"
        return found[0]


@pytest.fixture(scope="module")
async def told(anyio_backend: object, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Of one gateway that has done everything once, and of several workers."""
    gate = Gate()
    engines = {
        "stable": ScriptedEngine(Script("One two three.")),
        "next": ScriptedEngine(Script("One two four.")),
        "small": ScriptedEngine(Script("One.", gate=gate)),
    }
    async with key_server() as jwks_url, fault_server() as far:
        file = tmp_path_factory.mktemp("gateway") / "headrace.toml"
        file.write_text(tomli_w.dumps(settings(redis.url, jwks_url, far.url, file.parent / "answers")))
        async with serving(engines=engines, source=SettingsSource(file)) as client:
            await until(lambda: client.gateway.health.is_ready)
            await use_everything(client, engines, gate)
            text = (await client.http.get("/metrics")).text
    return Told(text + text_of([of_workers(2, 2)]).decode())


def settings(redis_url: str, jwks_url: str, far_url: str, disk: Path) -> dict[str, Any]:
    variants = [{"name": name, "pool": name} for name in ("stable", "next")]
    return {
        "server": {"port": 0, "drain": {"settle_s": 0, "drain_s": 5}},
        "auth": {"jwt": {"jwks_url": jwks_url, "issuer": ISSUER, "audience": AUDIENCE}},
        "limits": {"tenant": {"requests_per_minute": 1000}},
        "cache": {"redis": {"url": redis_url}, "disk": {"path": str(disk)}},
        "models": [
            {
                "name": "demo",
                "variants": [*variants, {"name": "shadow", "pool": "stable", "weight": 0}],
                "guardrails": {"variant": "next", "max_error_rate": 0.5},
                "shadow": {"variant": "shadow"},
            },
            {"name": "small", "pool": "small", "fallback": [{"pool": "far"}]},
        ],
        "pools": [
            {"name": "stable", "engine": "scripted"},
            {"name": "next", "engine": "scripted"},
            {"name": "small", "engine": "scripted", "admission": {"max_in_flight": 1, "max_queue": 0}},
            {"name": "far", "engine": "remote", "remote": {"urls": [far_url], "model": "demo"}},
        ],
    }


async def use_everything(client: Client, engines: dict[str, ScriptedEngine], gate: Gate) -> None:
    async def ask(**more: Any) -> int:
        return (await client.post({**CHAT, **more}, headers=bearer(token(RSA_KEY, "RS256", "k1")))).status_code

    assert [await ask(temperature=0) for _ in range(2)] == [200, 200]
    assert [await ask(), await ask(stream=True)] == [200, 200]
    shadow = client.gateway.routes.models.find("demo").shadow
    assert shadow is not None
    await until(lambda: shadow.stats().compared > 0)
    first = asyncio.create_task(ask(model="small"))
    await gate.arrived.wait()
    assert await ask(model="small") == 200  # by the fallback: there is no room for it
    gate.open()
    assert await first == 200
    engines["stable"].load = Load(0, 0, 0.0, 1, 1, 0, 1, 1)


@asynccontextmanager
async def key_server() -> AsyncIterator[str]:
    key = {**json.loads(RSAAlgorithm.to_jwk(RSA_KEY.public_key())), "kid": "k1", "alg": "RS256", "use": "sig"}

    async def show(request: web.Request) -> web.Response:
        return web.json_response({"keys": [key]})

    app = web.Application()
    app.router.add_get("/jwks", show)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/jwks"
    finally:
        await runner.cleanup()
