"""The gateway beside vllm-router, a router in Rust, both in front of the same upstream.

    pip install vllm-router    # best in an environment of its own
    python -m tests.bench.routers [--seconds 5] [--rounds 3] [--router vllm-router]

The gateway has everything on: tokens are checked, limits counted, two variants share the model, equal requests would be
answered once, answers are looked up in the cache and kept there (no two requests are equal), and metrics and access log
are written. The router passes requests on in turn. Each round runs both one after the other, on one core; the upstream
and the loads (wrk, and one of streams) are in C and on another. `gcc` and Debian's `wrk` are needed.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.redis_server import free_port
from tests.tokens import token

from .cache_hits import bodies
from .http import AUTH, CLIENT_CORE, LIMITS, Server, gateway, running, workspace

CONNECTIONS = 32
STREAMS = 100
EVENT_PAUSE_MS = 10
WARM_UP_S = 2
READY_TIMEOUT_S = 60
PATH = "/v1/chat/completions"
# The requests are one caller's, whom the variants would have stay with one of them.
MODEL = """
[[models]]
name = "demo"
sticky_by = "request"
variants = [{ name = "stable", pool = "a", weight = 90 }, { name = "canary", pool = "b", weight = 10 }]
"""
POOL = """
[[pools]]
name = "{name}"
engine = "remote"
[pools.remote]
urls = ["{url}"]
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """`requests` and `events` per second of the server's CPU; `p50_ms` of one connection."""

    requests: float
    events: float
    p50_ms: float
    first_event_ms: float


class Bench:
    """The tools, compiled, and the upstream that both servers have."""

    def __init__(self, folder: Path, upstream: Server, seconds: int) -> None:
        self.folder = folder
        self.upstream = upstream
        self.token = token(exp=4_000_000_000)
        self._seconds = seconds
        self.whole = bodies(1, unique=True)

    def measure(self, server: Server) -> Figures:
        self._wait_until_ready(server)
        self._load(server, CONNECTIONS, WARM_UP_S)
        count = self._stats("requests")
        whole = self._load(server, CONNECTIONS, self._seconds)
        if self._stats("requests") - count < whole.per_s * self._seconds:
            raise RuntimeError("the upstream was not asked each time")
        alone = self._load(server, 1, self._seconds)
        events, first_event_ms = self._stream(server)
        return Figures(whole.per_cpu_s, events, alone.p50_us / 1000, first_event_ms)

    def p50_ms_without_server(self) -> float:
        return self._load(self.upstream, 1, self._seconds).p50_us / 1000

    def _load(self, server: Server, connections: int, seconds: int) -> Any:
        return server.load(self.folder, self.whole, self.token, connections, seconds, unique=True)

    def _stream(self, server: Server) -> tuple[float, float]:
        """Events per second of CPU, and milliseconds to the first of a stream."""
        # The time is in it because the load counts from 0 again.
        content = f"NUMBER-{time.time_ns()} [delay={EVENT_PAUSE_MS}]"
        messages = [{"role": "user", "content": content}]
        body = self.folder / "stream.json"
        body.write_text(json.dumps({"model": "demo", "temperature": 0, "stream": True, "messages": messages}))
        tool, port = str(self.folder / "sse_load"), server.url.rpartition(":")[2]
        command = [tool, port, str(STREAMS), str(self._seconds), str(body), f"Authorization: Bearer {self.token}"]
        before, count = server.cpu_s(), self._stats("streams")
        done = subprocess.run(
            ["taskset", "-c", str(CLIENT_CORE), *command], capture_output=True, text=True, check=True, timeout=60
        )
        cpu_s = server.cpu_s() - before
        result = json.loads(done.stdout)
        if result["errors"] or result["unfinished"] or self._stats("streams") - count < result["streams"]:
            raise RuntimeError(f"streams failed, or were answered by the cache: {done.stdout}{done.stderr}")
        return result["events"] / cpu_s, result["first_event_p50_ms"]

    def _stats(self, name: str) -> int:
        count: int = httpx.get(self.upstream.url + "/stats").json()[name]
        return count

    def _wait_until_ready(self, server: Server) -> None:
        """A server answers before it has found its upstream healthy."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        body = self.whole[0].replace("NUMBER", f"of {time.time_ns()}")
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        while (answer := httpx.post(server.url + PATH, content=body, headers=headers)).status_code != 200:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready: {answer.status_code} {answer.text}")
            time.sleep(0.1)


def compile_tools(folder: Path) -> None:
    for name in ("mock_upstream", "sse_load"):
        source = Path(__file__).with_name(f"{name}.c")
        subprocess.run(["gcc", "-O2", "-o", str(folder / name), str(source)], check=True)


def mock_upstream(folder: Path) -> AbstractContextManager[Server]:
    port = free_port()
    command = [str(folder / "mock_upstream"), f"{port}:0"]
    return running(command, port, "/health", PATH, folder / "upstream.log", core=CLIENT_CORE)


def gateway_with_all(folder: Path, upstream_url: str) -> AbstractContextManager[Server]:
    pools = "".join(POOL.format(name=name, url=upstream_url) for name in ("a", "b"))
    return gateway(folder, base=LIMITS + AUTH + MODEL + pools)


def vllm_router(folder: Path, program: str, upstream_url: str) -> AbstractContextManager[Server]:
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", upstream_url]
    command += ["--policy", "round_robin", "--log-level", "warning"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return running(command, port, "/health", PATH, folder / "router.log")


@contextlib.contextmanager
def bench(seconds: int) -> Iterator[Bench]:
    with workspace() as folder:
        compile_tools(folder)
        with mock_upstream(folder) as upstream:
            yield Bench(folder, upstream, seconds)


def tell(name: str, figures: Figures, direct_ms: float) -> None:
    added_ms = figures.p50_ms - direct_ms
    print(
        f"{name:24} {figures.requests:14,.0f} {figures.events:14,.0f} {figures.p50_ms:8.3f} {added_ms:9.3f} "
        f"{figures.first_event_ms:12.2f}",
        flush=True,
    )


def median_of(rounds: list[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*map(astuple, rounds), strict=True)))


def tell_ratios(gateways: list[Figures], routers: list[Figures]) -> None:
    pairs = list(zip(gateways, routers, strict=True))
    for name in ("requests", "events"):
        ratio = statistics.median(getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs)
        print(f"{name} per CPU-second, gateway to vllm-router: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--router", default="vllm-router")
    arguments = parser.parse_args()
    program = shutil.which(arguments.router)
    if program is None:
        sys.exit(f"{arguments.router} is not there; `pip install vllm-router`, and name it with --router")
    figures: defaultdict[str, list[Figures]] = defaultdict(list)
    direct: list[float] = []
    print(f"{'':24} {'req/CPU-s':>14} {'events/CPU-s':>14} {'p50 ms':>8} {'added ms':>9} {'1st event ms':>12}")
    with bench(arguments.seconds) as tools:
        folder, url = tools.folder, tools.upstream.url
        for number in range(1, arguments.rounds + 1):
            direct.append(tools.p50_ms_without_server())
            for name, server in (
                ("gateway", gateway_with_all(folder, url)),
                ("vllm-router", vllm_router(folder, program, url)),
            ):
                with server as running_server:
                    figures[name].append(tools.measure(running_server))
                tell(f"round {number}, {name}", figures[name][-1], direct[-1])
    for name, rounds in figures.items():
        tell(f"median, {name}", median_of(rounds), statistics.median(direct))
    print(f"p50 of the upstream alone: {statistics.median(direct):.3f} ms")
    tell_ratios(figures["gateway"], figures["vllm-router"])


if __name__ == "__main__":
    main()
