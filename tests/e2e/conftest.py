"""A gateway process with real vLLM engines on the CPU and the built-in model."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

from ..otlp_receiver import OtlpReceiver, otlp_receiver

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
START_TIMEOUT_S = 240

pytestmark = pytest.mark.e2e


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


class Process:
    """A gateway process. `log` is where its lines go; `token` lets in."""

    def __init__(self, popen: "subprocess.Popen[bytes]", url: str, log: Path, token: str) -> None:
        self.popen = popen
        self.url = url
        self.log = log
        self.token = token
        self.http = httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {token}"})

    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.token, max_retries=0, timeout=60)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every engine is."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.popen.poll() is not None:
                raise AssertionError(f"the gateway ended:\n{self.log.read_text()[-4000:]}")
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health").json()["status"] == "ok":
                    return
            time.sleep(0.3)
        raise AssertionError(f"the gateway is not ready:\n{self.log.read_text()[-4000:]}")

    def engine_processes(self) -> list[psutil.Process]:
        """vLLM's, the ones that hold the model included."""
        children = psutil.Process(self.popen.pid).children(recursive=True)
        return [child for child in children if child.name().startswith("VLLM")]

    def metric(self, line: str) -> float:
        for found in self.http.get("/metrics").text.splitlines():
            if found.startswith(f"{line} "):
                return float(found.rpartition(" ")[2])
        raise AssertionError(f"no metric {line}")

    def tokens(self) -> tuple[float, float]:
        """Prompt and completion tokens that were charged so far, of the model MODEL."""
        found = {"prompt": 0.0, "completion": 0.0}
        for line in self.http.get("/metrics").text.splitlines():
            for kind in found:
                if line.startswith(f'headrace_tokens_total{{kind="{kind}",model="{MODEL}"'):
                    found[kind] += float(line.rpartition(" ")[2])
        return found["prompt"], found["completion"]

    def running(self, pool: str = "local") -> float:
        """Requests in the engine itself, as its scheduler says."""
        label = f'{{pool="{pool}"}}'
        return self.metric(f"headrace_engine_running{label}") + self.metric(f"headrace_engine_waiting{label}")


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Return the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, what
        time.sleep(0.02)
    return time.monotonic() - started


@contextlib.contextmanager
def gateway_process(folder: Path, config: str = "", **env: str) -> Iterator[Process]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = folder / "headrace.toml"
    file.write_text(config)
    log = folder / "gateway.log"
    headrace = [sys.executable, "-m", "app"]
    options = ["--preset", "development", "--config", str(file)]
    create = [*headrace, "token", "create", *options, "--subject", "tester", "--ttl", "1d"]
    token = subprocess.run(create, capture_output=True, text=True, check=True, env=os.environ | env).stdout.strip()
    env = {"HEADRACE__SERVER__PORT": str(port), **env}
    with log.open("wb") as output:
        popen = subprocess.Popen([*headrace, "serve", *options], stdout=output, stderr=output, env=os.environ | env)
    process = Process(popen, f"http://127.0.0.1:{port}", log, token)
    try:
        yield process
    finally:
        process.http.close()
        if popen.poll() is None:
            popen.terminate()
            try:
                popen.wait(30)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()


TWO_ENGINES = f"""
[monitoring]
log_level = "debug"
engine_log_level = "debug"

[[models]]
name = "{MODEL}"
pool = "local"
[[models]]
name = "alias"
pool = "local"
[[models]]
name = "second"
pool = "other"

[[pools]]
name = "local"
engine = "vllm"
[pools.vllm]
model = "builtin"

[[pools]]
name = "other"
engine = "vllm"
[pools.vllm]
model = "builtin"
kv_cache_memory_bytes = 268435456
max_model_len = 512
max_num_batched_tokens = 32
enable_chunked_prefill = true
"""


@pytest.fixture(scope="session")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[Process]:
    """Two engines in one process, shared by all tests that leave them alive. It traces what its callers trace."""
    config = f'{TWO_ENGINES}\n[monitoring.tracing]\nendpoint = "{receiver.url}"\nsample_ratio = 0\n'
    with gateway_process(tmp_path_factory.mktemp("gateway"), config, OTEL_BSP_SCHEDULE_DELAY="200") as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
def client(gateway: Process) -> Iterator[OpenAI]:
    with gateway.openai() as client:
        yield client
