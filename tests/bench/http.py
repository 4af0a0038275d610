"""Servers on one core, wrk on another: requests per CPU-second of the server.

Debian's `wrk` is needed. Everything listens on loopback, and every run is bounded in time.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.redis_server import free_port
from tests.tokens import AUDIENCE, ISSUER, SECRET

SERVER_CORE, CLIENT_CORE = 0, 1

# What a server does that does nothing else: reads a body of JSON, and gives fixed bytes.
RAW_APP = """
import orjson
BODY = orjson.dumps({"id": "chatcmpl-" + "0" * 32, "choices": [{"message": {"content": "x" * 400}}], "usage": {}})
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))],
}
END = {"type": "http.response.body", "body": BODY}
async def app(scope, receive, send):
    if scope["type"] != "http":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    message = await receive()
    body = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    orjson.loads(body)
    await send(START)
    await send(END)
"""

WRK = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local bodies = {}
for line in io.lines(os.getenv("BODIES")) do bodies[#bodies + 1] = line end
wrk.headers["Authorization"] = os.getenv("AUTH")
local number, unique = 0, os.getenv("UNIQUE") == "1"
request = function()
  number = number + 1
  local body = bodies[number % #bodies + 1]
  if unique then body = body:gsub("NUMBER", tostring(number) .. os.getenv("SALT")) end
  return wrk.format(nil, nil, nil, body)
end
done = function(summary, latency, requests)
  io.write(string.format('JSON {"requests": %d, "p50": %d, "p99": %d, "bad": %d}\\n',
    summary.requests, latency:percentile(50), latency:percentile(99),
    summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.write))
end
"""


@dataclass(frozen=True, slots=True)
class Load:
    """`per_cpu_s`: requests per second of the server's CPU. Latencies in microseconds."""

    per_cpu_s: float
    per_s: float
    p50_us: int
    p99_us: int


class Server:
    def __init__(self, process: "subprocess.Popen[bytes]", url: str, path: str) -> None:
        self.process = psutil.Process(process.pid)
        self.url = url
        self.path = path

    def cpu_s(self) -> float:
        """Seconds of CPU so far, of the process and all under it."""
        times = [process.cpu_times() for process in (self.process, *self.process.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def load(
        self, folder: Path, bodies: list[str], token: str, connections: int, seconds: int, unique: bool = False
    ) -> Load:
        (folder / "bodies").write_text("\n".join(bodies) + "\n")
        (folder / "load.lua").write_text(WRK)
        salt = f"-{time.time_ns()}"
        env = {
            "BODIES": str(folder / "bodies"),
            "AUTH": f"Bearer {token}",
            "UNIQUE": str(int(unique)),
            "SALT": salt,
        }
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds}s",
            "-s",
            str(folder / "load.lua"),
            self.url + self.path,
        ]
        before = self.cpu_s()
        done = subprocess.run(
            ["taskset", "-c", str(CLIENT_CORE), *command],
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=seconds + 30,
            check=True,
        )
        cpu_s = self.cpu_s() - before
        result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("JSON "))[5:])
        if result["bad"]:
            raise RuntimeError(f"{result['bad']} requests of {result['requests']} failed")
        return Load(result["requests"] / cpu_s, result["requests"] / seconds, result["p50"], result["p99"])


@contextlib.contextmanager
def running(
    command: list[str], port: int, ready: str, path: str, log: Path, core: int = SERVER_CORE
) -> Iterator[Server]:
    with log.open("wb") as output:
        process = subprocess.Popen(["taskset", "-c", str(core), *command], stdout=output, stderr=output, cwd=log.parent)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.post(url + ready, json={}).status_code != 503:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text()[-2000:])
            time.sleep(0.1)
        yield Server(process, url, path)
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def raw_app(folder: Path) -> Iterator[Server]:
    (folder / "raw.py").write_text(RAW_APP)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "raw:app", "--port", str(port), "--loop", "uvloop"]
    command += ["--http", "httptools", "--no-access-log", "--log-level", "warning", "--lifespan", "off"]
    with running(command, port, "/", "/", folder / "raw.log") as server:
        yield server


AUTH = f"""
[auth.jwt]
secret = "{SECRET}"
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
"""
BASE_WITHOUT_LIMITS = f"""{AUTH}
[[pools]]
name = "demo"
engine = "scripted"
[pools.scripted]
text = "{"water " * 70}"
"""
LIMITS = """
[limits.tenant]
requests_per_minute = 1_000_000_000
tokens_per_minute = 1_000_000_000
concurrent = 100_000
"""
BASE = LIMITS + BASE_WITHOUT_LIMITS


@contextlib.contextmanager
def gateway(folder: Path, config: str = "", base: str = BASE, preset: str = "production") -> Iterator[Server]:
    """Its access log goes to a file, as all its logs."""
    port = free_port()
    file = folder / "headrace.toml"
    file.write_text(f"[server]\nport = {port}\n[server.drain]\nsettle_s = 0\n{base}\n{config}")
    command = [sys.executable, "-m", "app", "serve", "--preset", preset, "--config", str(file)]
    env_path = Path(__file__).parent.parent.parent
    os.environ["PYTHONPATH"] = str(env_path)
    with running(command, port, "/v1/chat/completions", "/v1/chat/completions", folder / "gateway.log") as server:
        yield server


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
