"""How long health probes take, with nothing else to do and under streams.

    python -m tests.bench.probes [--streams 1000] [--token-s 0.2] [--probes 100]

The gateway, with a scripted engine that adds a token to every stream each `--token-s` seconds, is a process of its own
on one core; the streams come from a second process, on another core, and the probes, each on a new connection as those
of a kubelet are, from this one. Printed: milliseconds from before the connection is made to the answer's last byte, and
the share of its core that the gateway has used meanwhile.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import uvloop

from tests.redis_server import free_port

from .http import CLIENT_CORE, SERVER_CORE

PATHS = ("/health/live", "/health/ready", "/health")
PAUSE_S = 0.02  # between two probes
READY_TIMEOUT_S = 20
STREAM_S = 60  # longer than all the probes take: no stream ends while they are sent
CONFIG = """
preset = "production"
[server]
port = {port}
drain = {{ settle_s = 0, drain_s = 0 }}
[monitoring]
log_level = "warning"
[auth]
mode = "off"
[admission]
max_in_flight = {streams}
[[pools]]
name = "demo"
engine = "scripted"
scripted = {{ text = "{text}", token_s = {token_s} }}
"""


@contextlib.contextmanager
def gateway(folder: Path, streams: int, token_s: float) -> Iterator[tuple[int, psutil.Process]]:
    """Its port and its process, ready."""
    port = free_port()
    file = folder / "probes.toml"
    text = " ".join(["word"] * int(STREAM_S / token_s))
    file.write_text(CONFIG.format(port=port, streams=streams, text=text, token_s=token_s))
    command = ["taskset", "-c", str(SERVER_CORE), sys.executable, "-m", "app", "serve", "--config", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not is_ready(port):
            assert time.monotonic() < deadline, "the gateway does not start"
            time.sleep(0.1)
        yield port, psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def is_ready(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
    return False


@contextlib.contextmanager
def load(port: int, streams: int) -> Iterator[None]:
    """So many streams, once all of them have their first token."""
    command = [sys.executable, "-m", "tests.bench.probes", "--load", str(port), "--streams", str(streams)]
    process = subprocess.Popen(["taskset", "-c", str(CLIENT_CORE), *command], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"all stream\n"
        yield
    finally:
        process.kill()
        process.wait()


async def hold_streams(port: int, streams: int) -> None:
    async with asyncio.TaskGroup() as group:
        begun = asyncio.Semaphore(0)
        for number in range(streams):
            group.create_task(hold_stream(port, number, begun))
        for _ in range(streams):
            await begun.acquire()
        print("all stream", flush=True)


async def hold_stream(port: int, number: int, begun: asyncio.Semaphore) -> None:
    message = {"role": "user", "content": f"Question {number}"}
    body = json.dumps({"model": "demo", "stream": True, "messages": [message]}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"data: ")
    begun.release()
    while await reader.read(65536):
        pass


async def probe(port: int, path: str) -> float:
    """Milliseconds. The answer has to be status 200."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    took_ms = (time.perf_counter() - began) * 1000
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:100]
    return took_ms


async def measure(name: str, port: int, process: psutil.Process, probes: int) -> None:
    cpu_s, began = sum(process.cpu_times()[:2]), time.perf_counter()
    took_ms: dict[str, list[float]] = {path: [] for path in PATHS}
    for _ in range(probes):
        for path in PATHS:
            took_ms[path].append(await probe(port, path))
            await asyncio.sleep(PAUSE_S)
    used = (sum(process.cpu_times()[:2]) - cpu_s) / (time.perf_counter() - began)
    for path, times in took_ms.items():
        p99 = statistics.quantiles(times, n=100, method="inclusive")[98]
        print(
            f"{name:14} {path:14} {statistics.median(times):8.1f} {p99:8.1f} {max(times):8.1f} {used:8.0%}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--token-s", type=float, default=0.2)
    parser.add_argument("--probes", type=int, default=100)
    parser.add_argument("--load", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load is not None:
        uvloop.run(hold_streams(arguments.load, arguments.streams))
        return
    os.sched_setaffinity(0, {CLIENT_CORE})
    print(f"{'[ms]':14} {'':14} {'p50':>8} {'p99':>8} {'max':>8} {'CPU':>8}")
    with (
        tempfile.TemporaryDirectory() as folder,
        gateway(Path(folder), arguments.streams, arguments.token_s) as (port, process),
    ):
        uvloop.run(measure("nothing else", port, process, arguments.probes))
        with load(port, arguments.streams):
            uvloop.run(measure(f"{arguments.streams} streams", port, process, arguments.probes))


if __name__ == "__main__":
    main()
