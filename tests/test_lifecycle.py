"""From the first request to the last: what a gateway does when it is told to stop."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.engines.scripted import Gate, Script
from routing.engine import Call

from .conftest import CHAT, Client, events_of, serving, text_of


async def stop(client: Client) -> None:
    client.gateway.server.stop("test")
    await asyncio.sleep(0)


async def ready_status(client: Client) -> int:
    return (await client.http.get("/health/ready")).status_code


async def test_readiness_turns_false_at_once_and_requests_are_accepted_while_it_settles() -> None:
    async with serving(server={"drain": {"settle_s": 30, "drain_s": 30}}) as client:
        assert await ready_status(client) == 200
        await stop(client)
        assert await ready_status(client) == 503
        assert (await client.post()).status_code == 200
        assert (await client.http.get("/health/live")).json()["status"] == "draining"
        await stop(client)  # said twice: no further wait


async def test_after_settling_requests_are_refused_and_running_streams_finish() -> None:
    gate = Gate()
    async with serving(Script("One two three.", gate=gate)) as client:
        connection = await client.open({**CHAT, "stream": True})
        gate.release(1)
        await connection.reader.readuntil(b"data: ")
        await stop(client)
        await asyncio.sleep(0.05)
        response = await client.post()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        assert response.headers["retry-after"] == "1"
        assert response.headers["connection"] == "close"
        gate.open()
        rest = await connection.reader.readuntil(b"data: [DONE]\n\n")
        assert b" three." in rest
        connection.abort()


async def test_what_still_runs_after_drain_s_ends_with_an_error() -> None:
    gates = {1: Gate(), 2: Gate(), 3: Gate()}

    def script(call: Call) -> Script:
        return Script("One two.", gate=gates[call.body["seed"]])

    async with serving(script, {"drain": {"settle_s": 0, "drain_s": 0.2}}) as client:
        whole = await client.open({**CHAT, "seed": 1})
        stream = await client.open({**CHAT, "seed": 2, "stream": True})
        waiting = await client.open({**CHAT, "seed": 3, "stream": True})
        gates[2].release(1)
        await stream.reader.readuntil(b"data: ")
        await stop(client)
        answer = await asyncio.wait_for(whole.reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"shutting_down"' in answer
        told = await asyncio.wait_for(stream.reader.read(), 5)
        assert b'"code":"shutting_down"' in told
        assert b"[DONE]" not in told
        assert b'"code":"shutting_down"' in await asyncio.wait_for(waiting.reader.read(), 5)
        for connection in (whole, stream, waiting):
            connection.abort()


SCRIPTED = """
preset = "development"
[server]
port = {port}
drain = {{ settle_s = {settle_s}, drain_s = 10 }}
[auth]
mode = "off"
[[pools]]
name = "demo"
engine = "scripted"
scripted = {{ text = "One two three four five six.", token_s = 0.2 }}
"""


@contextlib.contextmanager
def process(tmp_path: Path, settle_s: float) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "headrace.toml"
    config.write_text(SCRIPTED.format(port=port, settle_s=settle_s))
    command = [sys.executable, "-m", "app", "serve", "--config", str(config)]
    gateway = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield gateway, f"http://127.0.0.1:{port}"
    finally:
        gateway.kill()
        gateway.communicate()


async def until_up(url: str) -> None:
    async with asyncio.timeout(20), httpx.AsyncClient() as http:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"{url}/health/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
async def test_signal_drains_and_the_exit_code_is_0(tmp_path: Path, sig: signal.Signals) -> None:
    with process(tmp_path, settle_s=0.5) as (gateway, url):
        await until_up(url)
        async with (
            httpx.AsyncClient(base_url=url) as http,
            http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
        ):
            lines = response.aiter_lines()
            first = await anext(lines)
            os.kill(gateway.pid, sig)
            await asyncio.sleep(0.1)
            assert (await http.get("/health/ready")).status_code == 503
            assert (await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})).status_code == 200
            await asyncio.sleep(0.6)
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 503
            text = "\n".join([first, *[line async for line in lines]])
        assert text_of(events_of(text)) == "One two three four five six."
        assert await asyncio.to_thread(gateway.wait, 5) == 0


@pytest.mark.slow
async def test_second_signal_ends_the_wait(tmp_path: Path) -> None:
    with process(tmp_path, settle_s=60) as (gateway, url):
        await until_up(url)
        gateway.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        assert gateway.poll() is None
        gateway.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(gateway.wait, 5) == 0


@pytest.mark.slow
async def test_port_in_use_is_one_clear_line_and_exit_code_1(tmp_path: Path) -> None:
    with process(tmp_path, settle_s=0) as (_, url):
        await until_up(url)
        command = [sys.executable, "-m", "app", "serve", "--config", str(tmp_path / "headrace.toml")]
        second = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        assert second.returncode == 1
        assert "cannot listen on 127.0.0.1" in second.stderr.splitlines()[-1]
        assert "Traceback" not in second.stderr


@pytest.mark.slow
async def test_production_logs_are_json_and_never_hold_prompts_answers_or_credentials(tmp_path: Path) -> None:
    secrets = {"prompt": "canary-prompt", "answer": "canary-answer", "key": "canary-key"}
    config = tmp_path / "headrace.toml"
    config.write_text(
        'preset = "production"\n[monitoring]\nlog_level = "debug"\n[server]\nport = 0\n'
        'drain = {settle_s = 0, drain_s = 1}\n[auth]\nmode = "off"\n[[pools]]\nname = "demo"\nengine = "scripted"\n'
        f'scripted = {{text = "{secrets["answer"]} two three", error_after = 2}}\n'
    )
    command = [sys.executable, "-m", "app", "serve", "--config", str(config)]
    gateway = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert gateway.stderr is not None
    lines = []
    url = ""
    while not url:
        lines.append(json.loads(await gateway.stderr.readline()))
        url = lines[-1]["message"].partition("listening on ")[2]
    headers = {"authorization": f"Bearer {secrets['key']}", "x-request-id": "seen-1"}
    message = [{"role": "user", "content": secrets["prompt"]}]
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        for more in ({}, {"stream": True}, {"n": 0}, {"model": "nope"}, {"messages": [secrets["prompt"]]}):
            await http.post("/v1/chat/completions", json={**CHAT, "messages": message, **more})
        await http.post("/v1/chat/completions", content=b"{" + secrets["prompt"].encode())
        await http.get(f"/v1/models/x?key={secrets['key']}")
    gateway.terminate()
    rest = await gateway.stderr.read()
    assert await gateway.wait() == 0
    lines += [json.loads(line) for line in rest.splitlines()]
    assert not any(secret in json.dumps(lines) for secret in secrets.values())
    accesses = [line for line in lines if line["logger"] == "headrace.access" and line["path"].startswith("/v1")]
    assert len(accesses) == 7
    assert {line["request_id"] for line in accesses} == {"seen-1"}
    cut = next(line for line in accesses if "stream" in line)
    failed = next(line for line in accesses if line["outcome"] == "error" and line is not cut)
    assert (failed["status"], failed["error"]) == (502, "engine_error")
    assert (cut["status"], cut["outcome"], cut["error"]) == (200, "error", "engine_error")
    assert cut["ttft_ms"] <= cut["duration_ms"]
    assert [line["outcome"] for line in accesses].count("refused") == 5
