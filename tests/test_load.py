"""Many at once: 1,000 streams beside 10,000 idle connections, in a process of its own."""

import asyncio
import json
import re
import sys
from pathlib import Path

import psutil
import pytest

from .conftest import CHAT

STREAMS = 1000
IDLE = 10_000
TOKENS = 30
GET = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
CONFIG = """
preset = "production"
[server]
port = 0
drain = { settle_s = 0, drain_s = 1 }
[monitoring]
log_format = "console"
log_level = "warning"
[auth]
mode = "off"
[singleflight]
resume_s = 1
[[pools]]
name = "demo"
engine = "scripted"
scripted = { text = "%s", token_s = 0.2 }
"""


async def get_health(address: tuple[str, int]) -> dict:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(GET.replace(b"host: x", b"host: x\r\nconnection: close"))
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def read_stream(address: tuple[str, int], started: asyncio.Semaphore) -> int:
    """Read one stream to its end; return its number of tokens."""
    body = json.dumps({**CHAT, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"data: ")
    started.release()
    rest = await reader.readuntil(b"data: [DONE]\n\n")
    writer.close()
    return rest.count(b'"content"')


async def round_of_streams(address: tuple[str, int]) -> int:
    """Run all streams at once; return the gateway's memory in bytes while they ran."""
    started = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(read_stream(address, started)) for _ in range(STREAMS)]
        for _ in streams:
            await started.acquire()
        health = await get_health(address)
    assert health["active_requests"] == STREAMS
    assert {stream.result() for stream in streams} == {TOKENS}
    return health["memory_usage_bytes"]


@pytest.mark.slow
async def test_1000_streams_beside_10000_idle_connections_with_memory_flat(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(CONFIG % " ".join(["word"] * TOKENS))
    command = [sys.executable, "-m", "app", "serve", "--config", str(config)]
    gateway = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        address = ("127.0.0.1", await port_of(gateway.pid))
        idle = []
        for start in range(0, IDLE, 500):
            some = [await asyncio.open_connection(*address) for _ in range(start, start + 500)]
            for _, writer in some:
                writer.write(GET)
            for reader, _ in some:
                await reader.readuntil(b"\r\n\r\n")
            idle += some
        memory = [await round_of_streams(address) for _ in range(3)]
        print("memory of the gateway, MB:", [round(size / 1e6) for size in memory])
        assert memory[2] < memory[1] * 1.05  # the first was measured before there were logs of streams
        assert not any(reader.at_eof() for reader, _ in idle)
        for _, writer in idle:
            writer.transport.abort()
        gateway.terminate()
        assert await asyncio.wait_for(gateway.wait(), 20) == 0
    finally:
        if gateway.returncode is None:
            gateway.kill()
            await gateway.wait()
    assert re.search(rb"error|Traceback", await gateway.stderr.read()) is None


async def port_of(pid: int) -> int:
    async with asyncio.timeout(20):
        while True:
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    return connection.laddr.port
            await asyncio.sleep(0.1)
