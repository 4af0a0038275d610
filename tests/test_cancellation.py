"""A caller who leaves takes the work along, wherever it stands, and leaves nothing behind."""

import asyncio
import gc
from collections import Counter

import pytest

from app.engines.scripted import Gate, Script

from .conftest import CHAT, Client, serving

COMPLETION = {"model": "demo", "prompt": ["a", "b"], "n": 2}


async def until_running(client: Client, count: int) -> None:
    async with asyncio.timeout(20):
        while client.engine.load.running < count:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/chat/completions", {**CHAT, "n": 3}), ("/v1/completions", COMPLETION)],
)
async def test_caller_who_leaves_before_the_first_token_ends_the_work(path: str, body: dict, stream: bool) -> None:
    gate = Gate()
    async with serving(Script("One two.", gate=gate)) as client:
        connection = await client.open({**body, "stream": stream}, path)
        await gate.arrived.wait()
        connection.abort()
        await client.until_idle()


async def test_caller_who_leaves_between_tokens_ends_the_work() -> None:
    gate = Gate()
    async with serving(Script("One two three.", gate=gate)) as client:
        connection = await client.open({**CHAT, "stream": True})
        gate.release(1)
        await connection.reader.readuntil(b"data: ")
        connection.abort()
        await client.until_idle()


async def test_caller_who_leaves_after_a_ping_ends_the_work() -> None:
    gate = Gate()
    async with serving(Script("One two.", gate=gate), {"ping_s": 0.02}) as client:
        connection = await client.open({**CHAT, "stream": True})
        await connection.reader.readuntil(b": ping")
        connection.abort()
        await client.until_idle()


async def test_caller_who_leaves_while_the_body_is_sent_is_not_an_error() -> None:
    async with serving() as client:
        _, writer = await client.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await client.until_idle()
        assert client.engine.calls == 0
        assert client.gateway.counts.failed == 0


@pytest.mark.slow
async def test_1000_aborted_requests_leave_nothing() -> None:
    gate = Gate()
    async with serving(Script("One two three.", gate=gate)) as client:

        async def abort_some(count: int) -> None:
            for start in range(0, count, 100):
                connections = [
                    await client.open({**CHAT, "stream": number % 2 == 0, "n": 1 + number % 3})
                    for number in range(start, start + 100)
                ]
                await until_running(client, 100)
                gate.release(37)  # some get a token first
                await asyncio.sleep(0)
                for connection in connections:
                    connection.abort()
                await client.until_idle(5)
                await asyncio.sleep(0.05)  # for what the loop still has to call of tasks that are done

        def census() -> Counter[str]:
            gc.collect()
            return Counter(type(item).__qualname__ for item in gc.get_objects())

        await abort_some(100)
        tasks_before, before = len(asyncio.all_tasks()), census()
        await abort_some(1000)
        assert len(asyncio.all_tasks()) <= tasks_before
        after = census()
        for kind in (
            "Task",
            "Future",
            "async_generator",
            "coroutine",
            "Exchange",
            "Access",
            "Connection",
            "EventStream",
        ):
            assert after[kind] <= before[kind] + 5, kind
        stats = client.gateway.connections.stats()
        assert stats.open == len(client.gateway.server.server_state.connections) <= 2
        gate.open()
        assert (await client.post()).status_code == 200
