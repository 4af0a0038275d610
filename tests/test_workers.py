"""Several worker processes on one port: what they share, and what becomes of them."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.metrics.summed import Family, counted, decode, encode, together
from app.routes import bounds_of
from app.settings import ServerSettings, Settings, SettingsError, load_settings
from app.workers import Workers, listen

from .conftest import CHAT, events_of, make_settings, text_of
from .redis_server import RedisServer, free_port

CONFIG = """
[server]
port = {port}
workers = 2
drain = {{ settle_s = 0, drain_s = 10 }}
[auth]
mode = "jwt"
api_keys = [
  {{ sha256 = "{free}", subject = "free", scopes = ["inference", "routing:read"] }},
  {{ sha256 = "{few}", subject = "few", tier = "few" }},
]
[limits]
tiers = [{{ name = "few", subject = {{ requests_per_minute = 10 }} }}]
[cache.redis]
url = "{redis}"
namespace = "{namespace}"
[[pools]]
name = "demo"
engine = "scripted"
scripted = {{ text = "One two three four five six.", token_s = {token_s} }}
"""
FREE, FEW = ({"authorization": f"Bearer key-of-{who}"} for who in ("free", "few"))


class Process:
    """A gateway with its workers, whose log goes to a file: a pipe that nobody reads would fill up."""

    def __init__(self, config: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = config.with_suffix(".log")
        command = [sys.executable, "-m", "app", "serve", "--config", str(config)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        deadline = time.monotonic() + 30
        while "listening on" not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@contextmanager
def two_workers(folder: Path, redis: RedisServer, token_s: float = 0.0) -> Iterator[Process]:
    config = folder / "headrace.toml"
    hashes = {who: sha256(f"key-of-{who}".encode()).hexdigest() for who in ("free", "few")}
    port = free_port()
    config.write_text(CONFIG.format(port=port, redis=redis.url, namespace=f"on-{port}", token_s=token_s, **hashes))
    process = Process(config, port)
    workers = process.workers
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert not alive


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[Process]:
    with two_workers(tmp_path_factory.mktemp("workers"), redis) as process:
        yield process


@asynccontextmanager
async def connections_of_their_own(gateway: Process) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose requests come on a new connection each, so that any worker may get them."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, headers=FREE, verify=False, timeout=20) as client:
        yield client


async def until(condition: Callable[[], Any], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def answered(metrics: str) -> float:
    """All requests to the operation, whatever their outcome."""
    return sum(float(value) for value in re.findall(r"^headrace_requests_total\{.*\} (\S+)$", metrics, re.M))


def workers_up(metrics: str) -> float:
    return float(re.findall(r'^headrace_workers\{state="up"\} (\S+)$', metrics, re.M)[0])


@pytest.mark.slow
async def test_connections_reach_every_worker_which_says_who_it_is(gateway: Process) -> None:
    async with connections_of_their_own(gateway) as client:
        bodies = [(await client.get("/health/ready")).json() for _ in range(50)]
        assert {body["workers"] for body in bodies} == {2}
        # Each is as likely as the other: fewer than 8 of 50 come once in a million runs.
        assert min(Counter(body["worker"] for body in bodies)[number] for number in (0, 1)) >= 8
        routing = [(await client.get("/v1/routing")).json()["worker"] for _ in range(30)]
        assert set(routing) == {0, 1}


@pytest.mark.slow
async def test_any_worker_tells_what_all_have_counted(gateway: Process) -> None:
    async with connections_of_their_own(gateway) as client:
        before = answered((await client.get("/metrics")).text)
        for number in range(1, 21):
            assert (await client.post("/v1/chat/completions", json={**CHAT, "seed": number})).status_code == 200
            assert answered((await client.get("/metrics")).text) == before + number
        texts = [(await client.get("/metrics")).text for _ in range(20)]
        assert {answered(text) for text in texts} == {before + 20}
        assert {workers_up(text) for text in texts} == {2}
        assert all("headrace_redis_up 1.0" in text for text in texts)


@pytest.mark.slow
async def test_answer_of_one_worker_is_a_hit_for_the_other(gateway: Process) -> None:
    async with connections_of_their_own(gateway) as client:
        body = {**CHAT, "temperature": 0}
        statuses = [(await client.post("/v1/chat/completions", json=body)).headers["cache-status"] for _ in range(30)]
        assert [status for status in statuses if "fwd=miss" in status] == statuses[:1]
        assert sum("detail=redis" in status for status in statuses) == 1
        assert sum("detail=memory" in status for status in statuses) == 28


@pytest.mark.slow
async def test_limit_holds_for_all_workers_together(gateway: Process) -> None:
    async with connections_of_their_own(gateway) as client:
        bodies = [{**CHAT, "seed": number} for number in range(20)]
        answers = [await client.post("/v1/chat/completions", json=body, headers=FEW) for body in bodies]
        assert Counter(answer.status_code for answer in answers) == {200: 10, 429: 10}


@pytest.mark.slow
async def test_sighup_reaches_all_workers(gateway: Process) -> None:
    gateway.process.send_signal(signal.SIGHUP)
    await until(lambda: gateway.log.count("settings reloaded") == 2)


@pytest.mark.slow
async def test_killed_worker_comes_back_and_neither_connections_nor_counts_are_lost(gateway: Process) -> None:
    async with connections_of_their_own(gateway) as client:
        for number in range(10):
            await client.post("/v1/chat/completions", json={**CHAT, "seed": 100 + number})
        told = answered((await client.get("/metrics")).text)
        victim = gateway.workers[0]
        victim.kill()
        started = time.monotonic()
        is_back = False
        while not is_back:
            assert time.monotonic() - started < 10
            assert (await client.post("/v1/chat/completions", json={**CHAT, "seed": 1})).status_code == 200
            told += 1
            text = (await client.get("/metrics")).text
            assert answered(text) == told
            is_back = workers_up(text) == 2 and victim not in gateway.workers
        served = {(await client.get("/health/ready")).json()["worker"] for _ in range(40)}
        assert served == {0, 1}


@pytest.mark.slow
@pytest.mark.slow
async def test_sigterm_drains_all_workers_and_the_exit_code_is_0(tmp_path: Path, redis: RedisServer) -> None:
    with two_workers(tmp_path, redis, token_s=0.2) as gateway:
        async with contextlib.AsyncExitStack() as stack:
            streams = []
            for number in range(12):
                client = await stack.enter_async_context(connections_of_their_own(gateway))
                body = {**CHAT, "stream": True, "seed": number}
                response = await stack.enter_async_context(client.stream("POST", "/v1/chat/completions", json=body))
                streams.append(response.aiter_text())
            begun = [await anext(stream) for stream in streams]
            gateway.process.send_signal(signal.SIGTERM)
            for first, stream in zip(begun, streams, strict=True):
                text = first + "".join([piece async for piece in stream])
                assert text_of(events_of(text)) == "One two three four five six."
        assert await asyncio.to_thread(gateway.process.wait, 10) == 0


@pytest.mark.slow
@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, redis: RedisServer) -> None:
    with two_workers(tmp_path, redis) as gateway:
        workers = gateway.workers
        assert len(workers) == 2
        folder = Path(json.loads(workers[0].cmdline()[-1])["folder"])
        assert folder.stat().st_mode & 0o777 == 0o700
        gateway.process.kill()
        _, alive = psutil.wait_procs(workers, 5)
        assert not alive
        assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[pools]]\nname = "x"\nengine = "vllm"\nvllm = {model = "m"}\n', "would load the model of the pool 'x'"),
        ('[[pools]]\nname = "x"\nengine = "scripted"\n', r"needs cache\.redis\.url"),
        (
            '[cache]\nredis = {url = "redis://x"}\ndisk = {path = "d"}\n[[pools]]\nname = "x"\nengine = "scripted"\n',
            r"excludes cache\.disk\.path",
        ),
    ],
)
def test_what_workers_cannot_share_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    env = {"HEADRACE__AUTH__MODE": "off", "HEADRACE__SERVER__WORKERS": "2"}
    with pytest.raises(SettingsError, match=rf"server\.workers: .*{message}") as caught:
        load_settings(file, None, env)
    assert "\n" not in str(caught.value)


def test_each_worker_has_its_part_of_the_bounds() -> None:
    settings = make_settings(
        {"workers": 3},
        cache={"redis": {"url": "redis://x"}},
        admission={"max_in_flight": 10, "max_queue": 0, "max_queue_bytes": 300, "queue_timeout_s": 7},
    )
    assert bounds_of(settings.pools[0], settings) == (4, 0, 100, 7)
    alone: Settings = make_settings(admission={"max_in_flight": None, "max_queue": 5})
    assert bounds_of(alone.pools[0], alone)[:2] == (None, 5)


def of(name: str, type: str, *samples: tuple[str, dict[str, str], float]) -> Family:
    return Family(name, "What it is.", type, list(samples))


def test_amounts_are_added_up_by_their_labels() -> None:
    one = [of("a", "counter", ("a_total", {"x": "1", "y": "2"}, 3.0), ("a_created", {}, 70.0))]
    other = [
        of(
            "a",
            "counter",
            ("a_total", {"y": "2", "x": "1"}, 4.0),
            ("a_total", {"x": "3"}, 5.0),
            ("a_created", {}, 60.0),
        ),
        of("b", "histogram", ("b_bucket", {"le": "+Inf"}, 1.0), ("b_sum", {}, 0.5)),
        of("in_flight", "gauge", ("in_flight", {}, 2.0)),
    ]
    assert together([one, other, decode(encode(other))]) == [
        of(
            "a",
            "counter",
            ("a_total", {"x": "1", "y": "2"}, 11.0),
            ("a_created", {}, 60.0),
            ("a_total", {"x": "3"}, 10.0),
        ),
        of("b", "histogram", ("b_bucket", {"le": "+Inf"}, 2.0), ("b_sum", {}, 1.0)),
        of("in_flight", "gauge", ("in_flight", {}, 4.0)),
    ]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("replica_up", 0.0),
        ("replica_breaker_open", 1.0),
        ("canary_rolled_back", 1.0),
        ("replica_latency_seconds", 1.0),
        ("variant_share", 0.5),
        ("connections", 1.0),
    ],
)
def test_of_what_is_no_amount_the_worst_is_told_and_of_shares_the_mean(name: str, told: float) -> None:
    snapshots = [[of(name, "gauge", (name, {}, value))] for value in (0.0, 1.0)]
    assert together(snapshots)[0].samples == [(name, {}, told)]


def test_only_counts_outlive_a_worker() -> None:
    families = [of("a", "counter"), of("b", "gauge"), of("c", "histogram"), of("d", "summary")]
    assert [family.name for family in counted(families)] == ["a", "c", "d"]


def test_port_of_another_gateway_is_not_shared() -> None:
    first = listen(ServerSettings(port=0, workers=2))
    try:
        ports = {listener.getsockname()[1] for own in first for listener in own}
        assert len(ports) == 1
        with pytest.raises(SettingsError, match="cannot listen on 127"):
            listen(ServerSettings(port=ports.pop(), workers=2))
    finally:
        for own in first:
            for listener in own:
                listener.close()


# What a worker does as far as its parent can see, and how it went, in a file of its own.
FAKE = """
import json, os, socket, sys
kind, folder, place = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if kind == "broken":
    sys.exit(3)
log = open(f"{folder}/{place['number']}", "a", buffering=1)
print("up", os.getpid(), file=log)
control = socket.socket(fileno=place["control"])
control.sendall(b"up\\n")
for line in control.makefile():
    log.write(line)
    if line == "hurry\\n" or (line == "stop\\n" and kind == "quick"):
        break
"""


class Fakes:
    def __init__(self, kind: str, folder: Path) -> None:
        self._folder = folder
        self.urls: list[str] = []
        command = [sys.executable, "-S", "-c", FAKE, kind, str(folder)]
        self.parent = Workers(ServerSettings(port=0, workers=2), command, self.urls.append)
        self.running = asyncio.ensure_future(self.parent.run())

    def log(self, number: int) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / str(number)).read_text().splitlines()
        return []

    def kill(self, number: int) -> None:
        os.kill(int(self.log(number)[-1].removeprefix("up ")), signal.SIGKILL)


@pytest.mark.slow
async def test_another_worker_accepts_for_one_that_is_down(tmp_path: Path) -> None:
    fakes = Fakes("quick", tmp_path)
    await until(lambda: fakes.urls)
    fakes.kill(0)
    await until(lambda: fakes.log(1)[1:] == ["cover 0", "uncover 0"])
    assert [line.split()[0] for line in fakes.log(0)] == ["up", "up"]
    fakes.parent.stop("test")
    assert await fakes.running == 0
    assert fakes.log(0)[-1] == fakes.log(1)[-1] == "stop"
    assert len(fakes.urls) == 1


@pytest.mark.slow
async def test_told_twice_to_stop_workers_hurry(tmp_path: Path) -> None:
    fakes = Fakes("slow", tmp_path)
    await until(lambda: fakes.urls)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: fakes.log(0)[1:] == fakes.log(1)[1:] == ["stop"])
    assert not fakes.running.done()
    os.kill(os.getpid(), signal.SIGINT)
    assert await fakes.running == 0
    assert fakes.log(0)[1:] == fakes.log(1)[1:] == ["stop", "stop", "hurry"]


@pytest.mark.slow
async def test_worker_that_cannot_start_ends_all_with_its_code(tmp_path: Path) -> None:
    assert await Fakes("broken", tmp_path).running == 3
