"""The bounds on connections, headers, and unread answers."""

import asyncio
import contextlib
import resource
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from app.engines.scripted import Gate, Script
from app.server import raise_file_limit

from .conftest import CHAT, Client, serving

GET = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.slow
async def test_headers_that_trickle_in_get_408_and_silence_is_closed() -> None:
    async with serving(server={"header_timeout_s": 0.3}) as client:
        reader, writer = await client.connect()

        async def trickle() -> None:
            for byte in b"GET /health HTTP/1.1\r\nx-slow: " + b"a" * 1000:
                if writer.is_closing():
                    return
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)  # each byte is in time, the whole is not

        task = asyncio.create_task(trickle())
        answer = await asyncio.wait_for(reader.read(), 5)
        await task
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer
        assert await client.raw(b"") == b""
        assert client.gateway.connections.stats().closed["header_timeout"] == 2


async def test_1000_connections_that_trickle_or_say_nothing_keep_nobody_out() -> None:
    async with serving(server={"max_connections": 500, "header_timeout_s": 30, "body_timeout_s": 30}) as client:
        slow = []
        for number in range(1000):
            _, writer = await client.connect()
            if number % 3 == 1:
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: a")
            if number % 3 == 2:
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n{")
            slow.append(writer)
        async with httpx.AsyncClient(base_url=client.gateway.server.url) as http:
            for _ in range(20):
                assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        stats = client.gateway.connections.stats()
        assert stats.open <= 500
        assert stats.closed["made_room"] >= 500
        for writer in slow:
            writer.transport.abort()


async def test_one_connection_too_many_is_refused_when_all_are_busy() -> None:
    gate = Gate()
    async with serving(Script("One.", gate=gate), {"max_connections": 3}) as client:
        busy = [await client.open() for _ in range(3)]
        async with asyncio.timeout(5):
            while client.engine.load.running < 3:
                await asyncio.sleep(0.005)
        answer = await client.raw(GET)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        gate.open()
        for connection in busy:
            assert (await connection.reader.readline()).startswith(b"HTTP/1.1 200 ")
            connection.abort()


async def test_kept_connection_makes_room_for_a_new_one_and_the_longest_idle_goes_first() -> None:
    async with serving(server={"max_connections": 2}) as client:
        first, second = [await client.connect() for _ in range(2)]
        for reader, writer in (first, second, first):  # now `second` is the longest idle
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.02)
        third = await client.connect()
        third[1].write(GET)
        assert (await third[0].readline()).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(ConnectionResetError):  # closed in order would be as good
            await asyncio.wait_for(second[0].read(), 2)
        first[1].write(GET)
        assert await asyncio.wait_for(first[0].readuntil(b"HTTP/1.1 200 OK"), 2)
        for _, writer in (first, second, third):
            writer.close()


@pytest.mark.parametrize("pieces", [1, 40])
async def test_headers_beyond_the_limit_get_431_in_one_piece_or_many(pieces: int) -> None:
    async with serving(server={"max_header_bytes": 4096}) as client:
        reader, writer = await client.connect()
        request = b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: " + b"a" * 8000 + b"\r\n\r\n"
        size = -(-len(request) // pieces)
        for start in range(0, len(request), size):
            if not writer.is_closing():
                writer.write(request[start : start + size])
                await asyncio.sleep(0.005)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
        writer.close()
        assert (await client.http.get("/health")).status_code == 200


async def test_large_body_in_the_same_piece_as_the_headers_is_no_large_header() -> None:
    async with serving(server={"max_header_bytes": 1024}) as client:
        response = await client.post({**CHAT, "metadata": {"x": "y" * 20000}})
        assert response.status_code == 200


async def test_what_is_not_http_gets_400_in_openai_form(client) -> None:
    answer = await client.raw(b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_request"' in answer


async def test_two_requests_at_once_on_one_connection_are_answered_in_turn(client) -> None:
    reader, writer = await client.connect()
    writer.write(GET + GET)
    for _ in range(2):
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b'"components"'), 2)
    writer.close()


@pytest.mark.slow
async def test_caller_who_does_not_read_loses_the_connection_and_the_engine_is_freed() -> None:
    async with serving(Script("word " * 200_000), {"send_timeout_s": 0.3}) as client:
        connection = await client.open({**CHAT, "stream": True})
        connection.writer.transport.pause_reading()
        async with asyncio.timeout(20):
            while not client.gateway.connections.stats().closed["send_timeout"]:
                await asyncio.sleep(0.05)
        await client.until_idle(2)
        connection.abort()


async def test_idle_connection_is_closed_after_keep_alive() -> None:
    async with serving(server={"keep_alive_s": 0.1}) as client:
        assert (await client.raw(GET)).startswith(b"HTTP/1.1 200 ")  # ends because the gateway closes


async def test_tls_by_certificate_and_key_files(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for number, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(tmp_path / "cert.pem", append=number > 0)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    tls = {"tls_cert_file": str(tmp_path / "cert.pem"), "tls_key_file": str(tmp_path / "key.pem")}
    async with serving(server={**tls, "header_timeout_s": 0.3}) as client:
        url = client.gateway.server.url
        assert url.startswith("https://")
        async with httpx.AsyncClient(base_url=url, verify=trust) as http:
            response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert response.text.endswith("data: [DONE]\n\n")
        assert await client.raw(b"\x16\x03\x01") == b""  # a handshake that stops is given up


def test_soft_file_limit_is_raised_to_the_hard_one_and_bounds_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert raise_file_limit(100) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        assert raise_file_limit(10**9) < 10**9
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_many_connections_are_taken_in_while_the_loop_is_busy(client: Client) -> None:
    stats = client.gateway.connections.stats
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(client.address))
        passes = 0
        while stats().open < 64:
            await asyncio.sleep(0)
            passes += 1
        assert passes < 20  # one a pass would be 64
