"""The HTTP client by itself, in front of a server that frames, stalls, and breaks its answers as it is told."""

import asyncio
import gzip
import json
import os
import resource
import socket
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from app.engines.http_client import HttpClient, Reading, Timeouts
from routing.errors import EngineError, EngineTimeout, EngineUnavailable, EngineUnreachable

from .conftest import CHAT, events_of, text_of, until
from .fault_answers import GOOD, Behaviour
from .fault_server import Authority, FaultServer, fault_server

TEXT = "One two three four five."
PATIENT = Timeouts(5, 5, 5, 5)


def request(stream: bool = False) -> bytes:
    body = json.dumps({**CHAT, "stream": stream}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@asynccontextmanager
async def asking(
    behaviour: Behaviour = GOOD, timeouts: Timeouts = PATIENT
) -> AsyncIterator[tuple[HttpClient, FaultServer]]:
    async with fault_server(behaviour) as upstream:
        client = HttpClient("127.0.0.1", upstream.port, timeouts)
        try:
            yield client, upstream
        finally:
            client.close()


async def ask(client: HttpClient, stream: bool = False) -> str:
    """The text of a whole answer, asked for by either way."""
    if not stream:
        _, body = await client.ask(request())
        return json.loads(body)["choices"][0]["message"]["content"]
    reading = await client.open(request(stream=True))
    try:
        return text_of(events_of((await reading.rest()).decode()))
    finally:
        reading.close()


async def read_until(reading: Reading, part: bytes) -> None:
    """And no further."""
    data = b""

    def read(more: bytes) -> bool:
        nonlocal data
        data += more
        return part not in data

    await reading.feed(read)
    assert part in data, "the answer is over"


# Framing (RFC 9112, section 6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(framing="content-length"),
        Behaviour(framing="chunked"),
        Behaviour(framing="until-close"),
        Behaviour(framing="until-close", version="HTTP/1.0"),
        Behaviour(framing="chunked", split=1),
        Behaviour(framing="chunked", chunk_head='{size:X};name="a b";flag'),
        Behaviour(framing="chunked", trailers=(("x-done", "yes"), ("content-encoding", "gzip"))),
        Behaviour(interim=(100,)),
        Behaviour(interim=(103, 102, 100), head_split=1),
        Behaviour(has_odd_head=True, head_split=3, reason="", framing="content-length"),
        Behaviour(keeps_alive=False),
        Behaviour(encoding="gzip"),
        Behaviour(encoding="gzip", framing="chunked", split=3),
        Behaviour(encoding="gzip", framing="until-close"),
        Behaviour(encoding="deflate"),
        Behaviour(headers=(("content-encoding", "identity"),)),
        Behaviour(drip_s=1e-6),
    ],
)
async def test_every_framing_that_the_standard_allows_is_read(behaviour: Behaviour, stream: bool) -> None:
    async with asking(behaviour) as (client, upstream):
        for _ in range(2):
            assert await ask(client, stream) == TEXT
        is_kept = behaviour.framing != "until-close" and behaviour.keeps_alive
        assert upstream.connections == (1 if is_kept else 2)


async def test_coded_answers_end_where_their_coding_ends() -> None:
    body = gzip.compress(b'{"first":') + gzip.compress(b" 1}")
    coded = Behaviour(body=body, headers=(("content-encoding", "gzip"),), framing="chunked", split=5)
    async with asking(coded) as (client, upstream):
        assert (await client.ask(request()))[1] == b'{"first": 1}'
        upstream.behave(Behaviour(body=b"", status=429, headers=(("content-encoding", "gzip"),)))
        response, body = await client.ask(request())
        assert (response.status, body) == (429, b"")


@pytest.mark.parametrize("stream", [False, True])
async def test_coded_answer_that_is_cut_is_an_error_though_its_frame_is_whole(stream: bool) -> None:
    whole = gzip.compress(b"{}" * 50)
    for length in (1, 9, 15, len(whole) - 8, len(whole) - 1):
        async with asking(Behaviour(body=whole[:length], headers=(("content-encoding", "gzip"),))) as (client, _):
            with pytest.raises(EngineError, match="ended early"):
                await ask(client, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(raw=b"SSH-2.0-OpenSSH_9.7\r\n"),
        Behaviour(raw=b"\x16\x03\x01\x00\x05hello"),
        Behaviour(raw=b"HTTP/1.1 2x0 OK\r\n\r\n"),
        Behaviour(raw=b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello"),
        Behaviour(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!"),
        Behaviour(raw=b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nhello!"),
        Behaviour(raw=b"HTTP/1.1 200 OK\r\nname without colon\r\ncontent-length: 0\r\n\r\n"),
        Behaviour(raw=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
        Behaviour(raw=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\t\r\n\r\n0\r\n\r\n"),
        Behaviour(framing="chunked", also_content_length=10),
        Behaviour(framing="chunked", chunk_head="zz"),
        Behaviour(framing="chunked", chunk_head="-1"),
        Behaviour(framing="chunked", chunk_head="fffffffffffffffff"),
        Behaviour(headers=(("x-padding", "x" * 100_000),), head_split=10_000),
        Behaviour(headers=tuple((f"x-{number}", "x" * 100) for number in range(1000)), head_split=10_000),
        Behaviour(interim=(100,) * 10_000, stalls_before_headers=False),
        Behaviour(cut_at_byte=0),
        Behaviour(cut_at_byte=10),
        Behaviour(cut_at_byte=200),
        Behaviour(cut_at_byte=200, resets=True),
        Behaviour(framing="chunked", split=20, cut_at_byte=300),
        Behaviour(encoding="gzip", framing="until-close", cut_at_byte=200),
        Behaviour(body=gzip.compress(b"{}") + b"more", headers=(("content-encoding", "gzip"),)),
        Behaviour(headers=(("content-encoding", "gzip"),)),
        Behaviour(headers=(("content-encoding", "br"),)),
    ],
)
async def test_answer_that_breaks_the_rules_is_an_error_and_ends_its_connection(
    behaviour: Behaviour, stream: bool
) -> None:
    async with asking(replace(behaviour, keeps_alive=True)) as (client, upstream):
        with pytest.raises(EngineError):
            await ask(client, stream)
        await until(lambda: client.connections == 0, timeout_s=0.5)
        assert len(upstream.requests) == 1
        upstream.behave(GOOD)
        assert await ask(client, stream) == TEXT
        assert upstream.connections == 2


@pytest.mark.parametrize("extra", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", b"\x00" * 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_after_an_answer_are_nobodys_and_end_the_connection(stream: bool, extra: bytes) -> None:
    async with asking(Behaviour(extra_bytes=extra)) as (client, upstream):
        for _ in range(2):
            assert await ask(client, stream) == TEXT
            await until(lambda: client.connections == 0)
        assert upstream.connections == 2


@pytest.mark.parametrize(("encoding", "stream"), [("gzip", False), ("deflate", True)])
async def test_decompression_bomb_is_bounded(encoding: str, stream: bool) -> None:
    compressor = zlib.compressobj(1, wbits=31 if encoding == "gzip" else 15)
    megabyte = bytes(1 << 20)
    bomb = b"".join(compressor.compress(megabyte) for _ in range(80)) + compressor.flush()
    async with asking(Behaviour(body=bomb, headers=(("content-encoding", encoding),))) as (client, _):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(EngineError, match="too large"):
            await ask(client, stream)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 * 1024


# Connections that are kept


@pytest.mark.parametrize("on_reuse", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
async def test_connection_that_was_closed_meanwhile_costs_one_silent_retry(stream: bool, on_reuse: Any) -> None:
    async with asking() as (client, upstream):
        upstream.script([Behaviour(on_reuse=on_reuse)])
        assert await ask(client, stream) == TEXT
        assert await ask(client, stream) == TEXT
        assert (upstream.refused_reuses, upstream.connections, len(upstream.requests)) == (1, 2, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_stale_connections_are_retried_once_and_on_a_new_one(stream: bool) -> None:
    async with asking(Behaviour(on_reuse="close")) as (client, upstream):
        await asyncio.gather(*(ask(client, stream) for _ in range(3)))
        assert client.connections == 3
        upstream.script([Behaviour(cut_at_byte=0)])
        with pytest.raises(EngineError):
            await ask(client, stream)
        assert (upstream.refused_reuses, upstream.connections, len(upstream.requests)) == (1, 4, 4)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_retried_after_the_first_byte(stream: bool) -> None:
    async with asking() as (client, upstream):
        await ask(client, stream)
        upstream.script([Behaviour(cut_at_byte=1)])
        with pytest.raises(EngineError):
            await ask(client, stream)
        assert len(upstream.requests) == 2


async def test_connection_that_the_server_closes_while_idle_is_forgotten() -> None:
    async with asking(Behaviour(close_idle_after_s=0)) as (client, upstream):
        for _ in range(3):
            assert await ask(client) == TEXT
            await until(lambda: client.connections == 0)
        assert upstream.connections == 3


async def test_stream_whose_end_comes_after_its_last_word_keeps_its_connection() -> None:
    async with asking(Behaviour(stall_after_events=8)) as (client, upstream):
        reading = await client.open(request(stream=True))
        await read_until(reading, b"[DONE]")
        reading.close()
        upstream.gate.release(1)
        await until(lambda: client.connections == 1 and not reading.response.error and reading.response.is_over)
        upstream.behave(GOOD)
        assert await ask(client) == TEXT
        assert (upstream.connections, upstream.aborted) == (1, [])


async def test_stream_that_goes_on_after_its_last_word_is_cut() -> None:
    async with asking(Behaviour(stall_after_events=8)) as (client, upstream):
        reading = await client.open(request(stream=True))
        await read_until(reading, b"[DONE]")
        reading.close()
        await until(lambda: client.connections == 0, timeout_s=2)
        await until(lambda: len(upstream.aborted) == 1)


# Deadlines


@asynccontextmanager
async def deaf_listener() -> AsyncIterator[int]:
    """A port whose connections are never made: its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        try:
            await asyncio.sleep(0.05)
            yield port
        finally:
            for filler in fillers:
                filler.close()


async def test_server_that_takes_no_connection_is_a_timeout_of_connecting() -> None:
    async with deaf_listener() as port:
        client = HttpClient("127.0.0.1", port, replace(PATIENT, connect_s=0.2))
        began = time.monotonic()
        with pytest.raises(EngineTimeout) as caught:
            await client.ask(request())
        assert caught.value.phase == "connect"
        assert 0.15 < time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    ("behaviour", "phase"),
    [
        (Behaviour(stalls_before_headers=True), "first_byte"),
        (Behaviour(interim=(100,), is_gated=True), "first_byte"),  # headers are no answer yet
        (Behaviour(drip_s=0.05), "first_byte"),  # and neither is a part of them
        (Behaviour(stall_after_events=2), "between_chunks"),
        (Behaviour(event_s=0.1), "total"),
    ],
)
async def test_stream_that_stalls_is_a_timeout_that_says_where(behaviour: Behaviour, phase: str) -> None:
    async with asking(behaviour, Timeouts(5, 0.2, 0.2, 0.45)) as (client, upstream):
        began = time.monotonic()
        with pytest.raises(EngineTimeout) as caught:
            await ask(client, stream=True)
        assert caught.value.phase == phase
        assert time.monotonic() - began < 1.5
        assert client.connections == 0
        await until(lambda: upstream.aborted == upstream.requests, timeout_s=0.5)


async def test_whole_answer_that_does_not_come_is_a_timeout() -> None:
    for behaviour, timeouts, phase in (
        (Behaviour(stalls_before_headers=True), Timeouts(5, 0.3, 0.1, 5), "first_byte"),
        (Behaviour(framing="chunked", split=100, stall_after_events=1), Timeouts(5, 5, 0.1, 5), "between_chunks"),
        (Behaviour(framing="chunked", drip_s=0.002), Timeouts(5, 5, 0.1, 0.35), "total"),
    ):
        async with asking(behaviour, timeouts) as (client, _):
            with pytest.raises(EngineTimeout) as caught:
                await ask(client)
            assert caught.value.phase == phase


async def test_slow_drip_is_no_timeout() -> None:
    async with asking(Behaviour(event_s=0.05), Timeouts(5, 0.2, 0.2, 5)) as (client, _):
        assert await ask(client, stream=True) == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_time_in_which_the_event_loop_stood_still_is_nobodys_lateness(stream: bool) -> None:
    async with asking(Behaviour(stalls_before_headers=True), Timeouts(5, 0.15, 0.15, 0.3)) as (client, upstream):
        asked = asyncio.create_task(ask(client, stream))
        await upstream.arrived(1)
        time.sleep(0.5)  # noqa: ASYNC251
        await asyncio.sleep(0.05)
        upstream.gate.release(1)
        assert await asked == TEXT
        with pytest.raises(EngineTimeout):
            await ask(client, stream)  # whose deadline counts as ever


async def test_connecting_is_given_the_time_that_the_event_loop_lost() -> None:
    async with deaf_listener() as port:
        client = HttpClient("127.0.0.1", port, replace(PATIENT, connect_s=0.4))
        began = time.monotonic()
        asked = asyncio.create_task(client.ask(request()))
        await asyncio.sleep(0.1)
        time.sleep(0.6)  # noqa: ASYNC251
        with pytest.raises(EngineTimeout):
            await asked
        assert time.monotonic() - began > 0.85


# Leaving


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(stalls_before_headers=True),
        Behaviour(stall_after_events=0),
        Behaviour(framing="chunked", drip_s=0.01),
        Behaviour(encoding="gzip", stall_after_events=0),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_closes_the_connection_at_once(behaviour: Behaviour, stream: bool) -> None:
    async with asking(behaviour) as (client, upstream):
        asked = asyncio.create_task(ask(client, stream))
        await upstream.arrived(1)
        asked.cancel()
        await asyncio.wait([asked])
        assert client.connections == 0
        await until(lambda: upstream.aborted == upstream.requests, timeout_s=0.5)


async def test_cancelling_at_every_step_leaves_no_connection_behind() -> None:
    async with asking(Behaviour(head_split=20, split=20, framing="chunked")) as (client, upstream):
        for steps in range(60):
            for stream in (False, True):
                asked = asyncio.create_task(ask(client, stream))
                for _ in range(steps):
                    await asyncio.sleep(0)
                asked.cancel()
                await asyncio.wait([asked])
        await until(lambda: upstream.open_connections == client.connections <= 1)
        upstream.behave(GOOD)
        assert await ask(client) == TEXT


async def test_closed_client_lets_answers_under_way_go_on_and_keeps_nothing() -> None:
    async with asking(Behaviour(is_gated=True)) as (client, upstream):
        asked = asyncio.create_task(ask(client))
        await upstream.arrived(1)
        client.close()
        upstream.gate.open()
        assert await asked == TEXT
        await until(lambda: upstream.open_connections == 0)


async def test_five_hundred_streams_run_at_once() -> None:
    async with asking(Behaviour(stall_after_events=2)) as (client, upstream):
        readings = await asyncio.gather(*(client.open(request(stream=True)) for _ in range(500)))
        await asyncio.gather(*(read_until(reading, b"One") for reading in readings))
        assert upstream.open_connections == client.connections == 500
        upstream.gate.open()
        assert all(b"five." in rest for rest in await asyncio.gather(*(reading.rest() for reading in readings)))
        await until(lambda: client.connections == 500)
        await asyncio.gather(*(ask(client) for _ in range(500)))
        assert upstream.connections == 500


# Who answers


async def test_nobody_there_is_unreachable() -> None:
    async with fault_server() as upstream:
        await upstream.stop()
        for host in ("127.0.0.1", "nothing.invalid", "no..name", "x" * 80):
            with pytest.raises(EngineUnreachable):
                await HttpClient(host, upstream.port, PATIENT).ask(request())


async def test_lack_of_files_here_is_not_the_servers_fault() -> None:
    async with asking() as (client, _):
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, most))
        spare = []
        try:
            while True:
                try:
                    spare.append(os.dup(0))
                except OSError:
                    break
            with pytest.raises(EngineUnavailable):
                await client.ask(request())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
            for file in spare:
                os.close(file)
        assert await ask(client) == TEXT


async def test_tls_is_checked_against_the_authority_and_the_name() -> None:
    authority, stranger = Authority(), Authority()
    async with fault_server(tls=authority.server("gpu.example")) as upstream:

        def client(trusted: Authority, peer: str) -> HttpClient:
            return HttpClient("127.0.0.1", upstream.port, PATIENT, trusted.client(), peer)

        good = client(authority, "gpu.example")
        for stream in (False, True):
            assert await ask(good, stream) == TEXT
        assert upstream.connections == 1
        with pytest.raises(EngineUnreachable, match="certificate"):
            await client(stranger, "gpu.example").ask(request())
        with pytest.raises(EngineUnreachable, match="certificate"):
            await client(authority, "other.example").ask(request())
        plain = HttpClient("127.0.0.1", upstream.port, PATIENT)
        with pytest.raises(EngineError):
            await plain.ask(request())
        good.close()
        assert len(upstream.requests) == 2


async def test_cancelling_closes_a_connection_with_tls_at_once() -> None:
    authority = Authority()
    async with fault_server(Behaviour(stall_after_events=1), authority.server("127.0.0.1")) as upstream:
        client = HttpClient("127.0.0.1", upstream.port, PATIENT, authority.client())
        reading = await client.open(request(stream=True))
        reading.close()
        await until(lambda: len(upstream.aborted) == 1, timeout_s=0.5)
