"""The gateway beside vllm-router, a router in Rust, both in front of the same upstream.

    pip install vllm-router    # best in an environment of its own
    python -m tests.bench.routers [--seconds 1] [--rounds 15] [--router vllm-router]

The gateway checks tokens, counts limits, has two variants that share the model, would answer equal requests once (no
two are equal), and keeps metrics; the second one looks up and keeps answers in its memory, too, and writes an access
log. The router passes requests on in turn. All of them wait on one core, and are loaded there in turn, a window of
`--seconds` each; the upstream and the loads (wrk, and one of streams) are in C and on another core. A ratio is that of
two windows in a row. `gcc` and Debian's `wrk` are needed.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
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
READY_TIMEOUT_S = 60
PATH = "/v1/chat/completions"
# The model has the name that the upstream gives it. The requests are one caller's, who would stay with one variant.
MODEL = """
[[models]]
name = "mock"
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
LEAN = """
[monitoring]
log_level = "warning"
[cache]
enabled = false
"""


class Bench:
    """The tools, compiled, and the upstream that both servers have."""

    def __init__(self, folder: Path, upstream: Server, seconds: int) -> None:
        self.folder = folder
        self.upstream = upstream
        self.token = token(exp=4_000_000_000)
        self._seconds = seconds
        self.whole = [body.replace('"demo"', '"mock"') for body in bodies(1, unique=True)]

    def requests_per_cpu_s(self, server: Server) -> float:
        """Whole answers, which the upstream was asked for each."""
        count = self._stats("requests")
        whole = self._load(server, CONNECTIONS, self._seconds)
        if self._stats("requests") - count < whole.per_s * self._seconds:
            raise RuntimeError("the upstream was not asked each time")
        return float(whole.per_cpu_s)

    def p50_ms(self, server: Server) -> float:
        """Of one connection."""
        return float(self._load(server, 1, self._seconds).p50_us) / 1000

    def _load(self, server: Server, connections: int, seconds: int) -> Any:
        return server.load(self.folder, self.whole, self.token, connections, seconds, unique=True)

    def events_per_cpu_s(self, server: Server) -> float:
        # The time is in it because the load counts from 0 again.
        content = f"NUMBER-{time.time_ns()} [delay={EVENT_PAUSE_MS}]"
        messages = [{"role": "user", "content": content}]
        body = self.folder / "stream.json"
        body.write_text(json.dumps({"model": "mock", "temperature": 0, "stream": True, "messages": messages}))
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
        return float(result["events"]) / cpu_s

    def _stats(self, name: str) -> int:
        count: int = httpx.get(self.upstream.url + "/stats").json()[name]
        return count

    def wait_until_ready(self, server: Server) -> None:
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


def config(upstream_url: str) -> str:
    return LIMITS + AUTH + MODEL + "".join(POOL.format(name=name, url=upstream_url) for name in ("a", "b"))


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


def tell(what: str, rounds: list[dict[str, float]]) -> None:
    """Medians, and the medians of each round's ratios to vllm-router."""
    for name in rounds[0]:
        values = [values[name] for values in rounds]
        ratios = sorted(values[name] / values["vllm-router"] for values in rounds)
        spread = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
        median, ratio = statistics.median(values), statistics.median(ratios)
        print(f"{what:24} {name:28} {median:10,.3f} {ratio:8.2f}   half of all {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--router", default="vllm-router")
    arguments = parser.parse_args()
    program = shutil.which(arguments.router)
    if program is None:
        sys.exit(f"{arguments.router} is not there; `pip install vllm-router`, and name it with --router")
    print(f"{'':24} {'':28} {'median':>10} {'ratio':>8}")
    with bench(arguments.seconds) as tools, contextlib.ExitStack() as stack:
        folder, url = tools.folder, tools.upstream.url
        lean, full = folder / "lean", folder / "full"
        lean.mkdir()
        full.mkdir()
        servers = {
            "gateway": stack.enter_context(gateway(lean, base=LEAN + config(url))),
            "gateway, cache and log too": stack.enter_context(gateway(full, base=config(url))),
            "vllm-router": stack.enter_context(vllm_router(folder, program, url)),
        }
        for server in servers.values():
            tools.wait_until_ready(server)
        # Streams come last: for a while after them, whole answers are asked for as streams.
        for what, measure in (
            ("requests per CPU-second", tools.requests_per_cpu_s),
            ("p50 of one, ms", tools.p50_ms),
            ("events per CPU-second", tools.events_per_cpu_s),
        ):
            for server in servers.values():
                measure(server)  # to warm up
            tell(what, [{name: measure(s) for name, s in servers.items()} for _ in range(arguments.rounds)])
        print(f"p50 of the upstream alone: {tools.p50_ms(tools.upstream):.3f} ms")


if __name__ == "__main__":
    main()
