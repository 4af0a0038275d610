"""Answers on disk: they outlive the process, however it ends, within bounds."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cache.disk import DiskTier
from cache.entry import Selection, tag

from .cache_helpers import entry_of, key_of
from .conftest import CHAT, serving, until
from .test_cache_tiers import MB, open_disk

# Writes without end, and says which entries it has stored.
WRITER = """
import asyncio, sys
from pathlib import Path
from cache.disk import DiskTier
from tests.cache_helpers import entry_of, key_of
async def main():
    tier = DiskTier(Path(sys.argv[1]), 64 * 1024 * 1024, "zstd")
    asyncio.create_task(tier.run())
    while tier.last_error is not None:
        await asyncio.sleep(0.01)
    for n in range(10**9):
        tier.put(key_of(n), entry_of(b"%d " % n * 100))
        while tier.stats().stores <= n:
            await asyncio.sleep(0)
        print(n, flush=True)
asyncio.run(main())
"""


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def kill_while_writing(path: Path, after: int) -> int:
    """Kill a process once it has stored that many entries; return the last one that it said was stored."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    stored = -1
    for line in writer.stdout:
        stored = int(line)
        if stored == after:
            break
    writer.send_signal(signal.SIGKILL)
    stored = max([stored, *map(int, writer.stdout.read().split())])
    writer.stdout.close()
    writer.wait()
    return stored


async def test_answers_outlive_the_process(tmp_path: Path) -> None:
    async with open_disk(tmp_path) as tier:
        for n in range(1000):
            tier.put(key_of(n), entry_of(b"%d " % n * 1000))
    async with open_disk(tmp_path, compression="none") as tier:
        assert tier.stats().entries == 1000
        for n in range(1000):
            assert b"%d " % n * 1000 in (await tier.get(key_of(n))).rest
    assert size_of(tmp_path) < 0.25 * 1000 * 4000  # they are packed


async def test_process_killed_while_writing_loses_at_most_the_entry_being_written(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / str(attempt)
        stored = await asyncio.to_thread(kill_while_writing, path, 300 + 77 * attempt)
        async with open_disk(path) as tier:
            assert stored + 1 <= tier.stats().entries <= stored + 2
            for n in range(stored + 1):
                assert b"%d " % n * 100 in (await tier.get(key_of(n))).rest
            assert tier.stats().failures == 0
            tier.put(key_of("after"), entry_of())
            assert await tier.get(key_of("after")) is not None


@pytest.mark.parametrize("size", [500, 20_000])
@pytest.mark.slow
async def test_disk_is_bounded_and_the_oldest_make_room(tmp_path: Path, size: int) -> None:
    async with open_disk(tmp_path, max_bytes=4 * MB, compression="none") as tier:
        count = 16 * MB // size
        for start in range(0, count, 100):
            for n in range(start, min(count, start + 100)):
                tier.put(key_of(n), entry_of(os.urandom(size)))
            await until(lambda: not tier._waiting)
        stats = tier.stats()
        assert stats.failures == 0
        assert size_of(tmp_path) <= 4.1 * MB
        assert stats.entries * size > MB
        assert stats.evictions == count - stats.entries
        assert await tier.get(key_of(count - 1)) is not None
        assert await tier.get(key_of(0)) is None
        tier.put(key_of("huge"), entry_of(os.urandom(5 * MB)))
        await until(lambda: not tier._waiting)
        assert await tier.get(key_of("huge")) is None
        await until(lambda: tier.last_error is None)
        tier.put(key_of("small"), entry_of())
        assert await tier.get(key_of("small")) is not None


async def test_clearing_a_tenant_on_a_full_disk_works(tmp_path: Path) -> None:
    async with open_disk(tmp_path, max_bytes=4 * MB, compression="none") as tier:
        for n in range(6000):
            tier.put(key_of(n, tenant="ab"[n % 2]), entry_of(os.urandom(800)))
        await until(lambda: not tier._waiting)
        entries = tier.stats().entries
        removed = await tier.clear(Selection(tenant=tag("a")))
        assert 0 < removed == entries - tier.stats().entries
        assert tier.stats().failures == 0


async def test_second_process_does_without_and_takes_over_when_the_first_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.disk.RETRY_S", 0.05)
    async with open_disk(tmp_path) as first:
        second = DiskTier(tmp_path, 64 * MB, "zstd")
        task = asyncio.create_task(second.run())
        await until(lambda: second.last_error == "another process uses it")
        second.put(key_of(1), entry_of())
        assert await second.get(key_of(1)) is None
        first.put(key_of(1), entry_of())
    await until(lambda: second.last_error is None)
    assert await second.get(key_of(1)) is not None
    task.cancel()
    await asyncio.wait([task])


async def test_damaged_file_is_put_away(tmp_path: Path) -> None:
    (tmp_path / "answers.lmdb").write_bytes(os.urandom(100_000))
    async with open_disk(tmp_path) as tier:
        tier.put(key_of(1), entry_of())
        assert await tier.get(key_of(1)) is not None
    assert (tmp_path / "answers.damaged").exists()


async def test_damaged_entry_is_a_miss_and_removed(tmp_path: Path) -> None:
    async with open_disk(tmp_path) as tier:
        tier.put(key_of(1), entry_of(b"some text " * 50))
        await until(lambda: tier.stats().stores == 1)
        environment = tier._store._environment
        with environment.begin(write=True) as transaction:
            value = transaction.get(key_of(1), db=tier._store._entries)
            transaction.put(key_of(1), value[:20] + b"\0" * 20, db=tier._store._entries)
        assert await tier.get(key_of(1)) is None
        assert (tier.stats().failures, tier.last_error) == (1, None)
        await until(lambda: tier.stats().entries == 0)


async def test_gateway_without_a_usable_folder_serves_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with serving(cache={"disk": {"path": str(tmp_path / "file" / "folder")}}) as client:
        body = {**CHAT, "temperature": 0}
        assert (await client.post(body)).status_code == (await client.post(body)).status_code == 200
        await until(lambda: client.gateway.health.body()["components"]["disk"]["last_error"] != "not open yet")
        health = (await client.http.get("/health")).json()
        assert health["status"] == "degraded"
        assert health["components"]["disk"]["status"] == "down"
        assert "Not a directory" in health["components"]["disk"]["last_error"]


async def test_answers_are_there_after_a_restart_of_the_gateway(tmp_path: Path) -> None:
    cache = {"disk": {"path": str(tmp_path)}}
    body = {**CHAT, "temperature": 0}
    async with serving(cache=cache) as client:
        await until(lambda: client.gateway.health.body()["components"]["disk"]["status"] == "ok")
        first = await client.post(body)
        assert first.headers["cache-status"] == "headrace; fwd=miss; stored"
    async with serving(cache=cache) as client:
        await until(lambda: client.gateway.health.body()["components"]["disk"]["status"] == "ok")
        second = await client.post(body)
        assert "hit" in second.headers["cache-status"]
        assert second.headers["cache-status"].endswith("detail=disk")
        assert client.engine.calls == 0
        assert "detail=memory" in (await client.post(body)).headers["cache-status"]
