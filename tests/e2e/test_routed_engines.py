"""One model whose requests are split between an engine of the gateway's own and a `vllm serve` elsewhere."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.builtin_model import fetch
from app.engines.vllm_options import BUILTIN_DEFAULTS
from app.settings import default_cache_dir

from ..redis_server import free_port
from .conftest import MODEL, QUESTION, START_TIMEOUT_S, Process, gateway_process, wait_for

SMALL = {"kv_cache_memory_bytes": 268435456, "max_model_len": 512}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Server"]:
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        yield server
    finally:
        server.stop()


class Server:
    """`vllm serve` with the built-in model, called `small` there."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        options = BUILTIN_DEFAULTS | SMALL | {"served_model_name": "small", "host": "127.0.0.1", "port": self.port}
        options["model"] = str(fetch(default_cache_dir()))
        words = [
            f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"
            for name, value in options.items()
        ]
        # As `vllm serve`, whose command looks for a distribution called vllm, which that for the CPU is not.
        command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", *words]
        env = os.environ | {"VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("wb") as output:
            self.popen = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)

    def is_up(self) -> bool:
        assert self.popen.poll() is None, self.log.read_text()[-4000:]
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def works(self) -> bool:
        """By its CPU time: its own counts of requests and tokens have been seen to stand still in a stream's middle."""
        before_s = self._cpu_s()
        time.sleep(0.5)
        return self._cpu_s() - before_s > 0.2

    def _cpu_s(self) -> float:
        process = psutil.Process(self.popen.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def stop(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


def config(server: Server) -> str:
    return f"""
[[models]]
name = "{MODEL}"
sticky_by = "request"
variants = [{{ name = "here", pool = "local", weight = 1 }}, {{ name = "there", pool = "far", weight = 1 }}]
fallback = [{{ pool = "local" }}]
[[pools]]
name = "local"
engine = "vllm"
[pools.vllm]
model = "builtin"
kv_cache_memory_bytes = {SMALL["kv_cache_memory_bytes"]}
max_model_len = {SMALL["max_model_len"]}
[[pools]]
name = "far"
engine = "remote"
ready_wait_s = 0.5
[pools.remote]
urls = ["{server.url}"]
model = "small"
probe_every_s = 0.5
"""


@pytest.fixture(scope="module")
def routed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    wait_for(server.is_up, START_TIMEOUT_S, "vllm serve is not up")
    with gateway_process(tmp_path_factory.mktemp("routed"), config(server)) as process:
        process.wait_until_ready()
        yield process


def ask(process: Process, number: int, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 8, **more}
    headers = {"x-request-id": f"request-{number}", "cache-control": "no-store"}
    return process.http.post("/v1/chat/completions", json=body, headers=headers)


def test_requests_are_split_and_both_engines_give_the_same_answer(routed: Process) -> None:
    answers = [ask(routed, number) for number in range(16)]
    assert {answer.status_code for answer in answers} == {200}
    assert set(Counter(answer.headers["x-headrace-variant"] for answer in answers)) == {"here", "there"}
    documents = [answer.json() for answer in answers]
    assert {document["model"] for document in documents} == {MODEL}
    assert len({document["choices"][0]["message"]["content"] for document in documents}) == 1
    usages = {(document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) for document in documents}
    assert len(usages) == 1


def test_official_package_streams_from_both(routed: Process) -> None:
    with routed.openai() as client:
        texts: dict[str, str] = {}
        for number in range(12):
            with client.chat.completions.with_streaming_response.create(
                model=MODEL,
                messages=QUESTION,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-request-id": f"stream-{number}", "cache-control": "no-store"},
            ) as response:
                chunks = list(response.parse())
                texts[response.headers["x-headrace-variant"]] = "".join(
                    chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
                )
            assert {chunk.model for chunk in chunks} == {MODEL}
            assert chunks[-1].usage.completion_tokens == 8
        assert set(texts) == {"here", "there"}
        assert texts["here"] == texts["there"]


def test_refusals_of_the_server_are_the_callers(routed: Process) -> None:
    too_long = [{"role": "user", "content": "word " * 2000}]
    codes = {}
    for number in range(12):
        answer = ask(routed, number, messages=too_long)
        codes[answer.headers["x-headrace-variant"]] = (answer.status_code, answer.json()["error"]["code"])
    assert codes == {"here": (400, "context_length_exceeded"), "there": (400, "context_length_exceeded")}


def test_caller_who_leaves_stops_the_server(routed: Process, server: Server) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 400, "ignore_eos": True}
    for number in range(20):
        headers = {"x-request-id": f"leaver-{number}", "cache-control": "no-store"}
        with routed.http.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers
        ) as response:
            if response.headers["x-headrace-variant"] == "there":
                wait_for(server.works, 5, "the server does nothing")
                break
    # The whole answer would take it many times as long.
    wait_for(lambda: not server.works(), 5, "the server goes on")


def test_dead_server_is_made_up_for_by_the_other_engine(routed: Process, server: Server) -> None:
    server.stop()
    wait_for(lambda: routed.http.get("/health").json()["components"]["pool:far"]["status"] == "down", 10, "not noticed")
    began = time.monotonic()
    answers = [ask(routed, number) for number in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert time.monotonic() - began < 30
    assert routed.http.get("/health").json()["status"] == "degraded"
