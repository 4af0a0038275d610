"""The tier on this machine's disk: answers that outlive the process.

LMDB (OpenLDAP's memory-mapped B+ tree) never writes over a page in use, so a process killed at any moment leaves the
last whole transaction. Its file is written back by the kernel, and synced once in a while rather than at each
transaction: only a crash of the machine itself can cost what came after the last sync, and, since the order of the
kernel's writes is not known then, the file; a damaged one is put away, and a new one begun.

All of LMDB's work is done by one thread, so nothing here blocks the event loop.
"""

import asyncio
import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

import lmdb
import zstandard

from .entry import KEY_BYTES, TAG_BYTES, Corrupt, Entry, Selection, decode
from .tier import TierStats

logger = logging.getLogger("headrace")

Compression = Literal["zstd", "none"]
T = TypeVar("T")

RETRY_S = 5.0
SYNC_S = 5.0
MAX_WAITING_BYTES = 64 * 1024 * 1024  # of answers that wait to be written; more are not kept
PAGE_BYTES = 4096
MAX_BATCH = 256  # answers in a transaction
FULL = 0.8  # of the pages: above it the oldest answers go
# A transaction writes copies of the pages that it changes, some six for an answer, into the rest.
PAGES_OF_ANSWER = 6
ROOM = 0.05  # of the pages: how much is freed at once
MAX_ENTRY_BYTES = 100 * 1024 * 1024  # unpacked
NONE, ZSTD = b"n", b"z"
AGE = struct.Struct(">Q")  # the order in which entries were stored


class DiskTier:
    """In `path`, within `max_bytes`; the oldest answers make room. Out of use until `run` has opened it, and whenever
    that fails: `last_error` says why. `latency_ms` is how long LMDB took over what it did last, None before that."""

    name = "disk"
    is_shared = False

    def __init__(
        self, path: Path, max_bytes: int, compression: Compression, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._compression = compression
        self._clock = clock
        self._batch = batch_for(max_bytes)
        self.last_error: str | None = "not open yet"
        # Mutable state of the event loop.
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: dict[bytes, Entry] = {}  # to be written, where they can be read meanwhile
        self._waiting_bytes = 0
        self._is_writing = False
        self._stats = TierStats()
        # Mutable state of the thread.
        self._store: Store | None = None
        self.latency_ms: float | None = None

    async def get(self, key: bytes) -> Entry | None:
        waiting = self._waiting.get(key)
        if waiting is not None:
            return self._found(waiting)
        return self._found(await self._in_thread(lambda store: store.get(key)))

    def _found(self, entry: Entry | None) -> Entry | None:
        if entry is None or entry.expires_at <= self._clock():
            self._stats.misses += 1
            return None
        self._stats.hits += 1
        return entry

    def put(self, key: bytes, entry: Entry) -> None:
        if self._thread is None or entry.expires_at <= self._clock():
            return
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._stats.failures += 1
            return
        self._forget(key)
        self._waiting[key] = entry
        self._waiting_bytes += len(entry.rest)
        if not self._is_writing:
            self._write_some(self._thread)

    async def clear(self, selection: Selection) -> int:
        waiting = {key for key in self._waiting if key in selection}
        for key in waiting:
            self._forget(key)
        # After the batch that is being written now, whose entries may be among those.
        removed = await self._in_thread(lambda store: store.clear(selection)) or set()
        return len(waiting | removed)

    def _forget(self, key: bytes) -> None:
        entry = self._waiting.pop(key, None)
        if entry is not None:
            self._waiting_bytes -= len(entry.rest)

    def _write_some(self, thread: ThreadPoolExecutor) -> None:
        batch = list(islice(self._waiting.items(), self._batch))
        self._is_writing = bool(batch)
        if batch:
            written = thread.submit(self._guarded, lambda store: store.put(batch))
            loop = asyncio.get_running_loop()
            written.add_done_callback(lambda _: loop.call_soon_threadsafe(self._written, batch))

    def _written(self, batch: list[tuple[bytes, Entry]]) -> None:
        """In the event loop again. What could not be written is not tried again."""
        for key, entry in batch:
            if self._waiting.get(key) is entry:
                self._forget(key)
        self._is_writing = False
        if self._thread is not None:
            self._write_some(self._thread)

    def stats(self) -> TierStats:
        return self._stats

    async def run(self) -> None:
        """Open, and stay open until cancelled; try again while it cannot be."""
        with ThreadPoolExecutor(1, "disk-tier") as thread:
            loop = asyncio.get_running_loop()
            try:
                while True:
                    if self._store is None:
                        is_open = await loop.run_in_executor(thread, self._open)
                        self._thread = thread if is_open else None
                        self.last_error = None if is_open else self.last_error
                    await asyncio.sleep(RETRY_S if self._store is None else SYNC_S)
                    await self._in_thread(lambda store: store.sync())
            finally:
                self._thread = None
                thread.submit(self._close, list(self._waiting.items()))

    async def _in_thread(self, work: "Callable[[Store], T]") -> T | None:
        """None also when it fails."""
        if self._thread is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(self._guarded, work))

    # In the thread

    def _guarded(self, work: "Callable[[Store], T]") -> T | None:
        if self._store is None:
            return None
        began = time.perf_counter()
        try:
            return work(self._store)
        except (Corrupt, lmdb.MapFullError):  # one entry that is damaged, or too large
            self._stats.failures += 1
        except (lmdb.Error, OSError) as exc:
            self._stats.failures += 1
            self._fail(exc)
        finally:
            self.latency_ms = round((time.perf_counter() - began) * 1000, 3)
        return None

    def _open(self) -> bool:
        try:
            self._store = Store(self._path, self._max_bytes, self._compression, self._stats)
        except (lmdb.Error, OSError) as exc:
            self._fail(exc)
            return False
        logger.info("answers on disk: %d in %s", self._stats.entries, self._path)
        return True

    def _close(self, waiting: list[tuple[bytes, Entry]]) -> None:
        for start in range(0, len(waiting), self._batch):
            batch = waiting[start : start + self._batch]
            self._guarded(lambda store, batch=batch: store.put(batch))  # type: ignore[misc]
        self._guarded(lambda store: store.close())
        self._store = None

    def _fail(self, exc: Exception) -> None:
        """Give it up; `run` opens it again in a while."""
        error = str(exc) if isinstance(exc, OSError) else type(exc).__name__
        if error != self.last_error:
            logger.warning("answers cannot be kept on disk in %s: %s", self._path, error)
        self.last_error = error
        if self._store is not None:
            self._store.give_up()
            self._store = None


class Store:
    """The file, for one thread; keeps `stats` up to date.

    Raises: OSError (also when another process has it), lmdb.Error.
    """

    def __init__(self, path: Path, max_bytes: int, compression: Compression, stats: TierStats) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._environment = open_environment(path, max_bytes)
            self._entries = self._environment.open_db(b"entries")
            self._ages = self._environment.open_db(b"ages")
        except BlockingIOError as exc:
            os.close(self._lock)
            raise OSError("another process uses it") from exc
        except BaseException:
            os.close(self._lock)
            raise
        self._stats = stats
        self._compression = compression
        self._batch = batch_for(max_bytes)
        self._pages = max_bytes // self._environment.stat()["psize"]
        self._packer = zstandard.ZstdCompressor(level=3)
        self._unpacker = zstandard.ZstdDecompressor()
        with self._environment.begin() as transaction:
            last = transaction.cursor(self._ages)
            self._age = AGE.unpack(last.key())[0] if last.last() else 0
        self._count()

    def get(self, key: bytes) -> Entry | None:
        """Raises: Corrupt, after having removed it."""
        with self._environment.begin(buffers=True) as transaction:
            value = transaction.get(key, db=self._entries)
            data = None if value is None else bytes(value)
        if data is None:
            return None
        try:
            return decode(self._unpack(data[AGE.size :]))
        except (Corrupt, zstandard.ZstdError) as exc:
            self.clear(Selection(key=key))
            raise Corrupt from exc

    def put(self, batch: list[tuple[bytes, Entry]]) -> None:
        values = [(key, self._pack(entry.encode())) for key, entry in batch]
        self._make_room(sum(len(value) for _, value in values))
        try:
            self._put(values)
        except lmdb.MapFullError:
            self._evict(self._pages * 4 * ROOM)
            if len(values) == 1:
                raise
            for value in values:
                self._put([value])
        self._stats.stores += len(batch)
        self._count()

    def _put(self, values: list[tuple[bytes, bytes]]) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, value in values:
                self._remove(transaction, key)
                self._age += 1
                age = AGE.pack(self._age)
                transaction.put(key, age + value, db=self._entries)
                transaction.put(age, key, db=self._ages)

    def clear(self, selection: Selection) -> set[bytes]:
        """Remove what is selected; return the keys."""
        if selection.key is not None:
            selected = [selection.key]
        else:
            with self._environment.begin() as transaction:
                selected = [key for key in self._from(transaction, selection.tenant or b"") if key in selection]
        removed = set()
        for start in range(0, len(selected), self._batch):
            with self._environment.begin(write=True) as transaction:
                removed |= {key for key in selected[start : start + self._batch] if self._remove(transaction, key)}
        self._count()
        return removed

    def sync(self) -> None:
        self._environment.sync(True)

    def close(self) -> None:
        self.sync()
        self.give_up()

    def give_up(self) -> None:
        self._environment.close()
        os.close(self._lock)

    def _from(self, transaction: lmdb.Transaction, prefix: bytes) -> "list[bytes]":
        assert len(prefix) in (0, TAG_BYTES)
        keys = []
        cursor = transaction.cursor(self._entries)
        if cursor.set_range(prefix.ljust(KEY_BYTES, b"\0")):
            for found in cursor.iternext(values=False):
                key = bytes(found)
                if not key.startswith(prefix):
                    break
                keys.append(key)
        return keys

    def _remove(self, transaction: lmdb.Transaction, key: bytes) -> bool:
        value = transaction.get(key, db=self._entries)
        if value is None:
            return False
        transaction.delete(value[: AGE.size], db=self._ages)
        return bool(transaction.delete(key, db=self._entries))

    def _make_room(self, needed_bytes: int) -> None:
        if self._used_pages() + needed_bytes / PAGE_BYTES > self._pages * FULL:
            self._evict(needed_bytes / PAGE_BYTES + self._pages * ROOM)

    def _evict(self, pages: float) -> None:
        """Remove the oldest entries, so many pages of them; a few at a time, since a transaction needs pages too."""
        freed = 0.0
        while freed < pages:
            with self._environment.begin(write=True) as transaction:
                cursor = transaction.cursor(self._ages)
                if not cursor.first():
                    return
                oldest = [bytes(key) for _, key in zip(range(self._batch), cursor.iternext(keys=False), strict=False)]
                for key in oldest:
                    freed += max(1.0, len(transaction.get(key, db=self._entries) or b"") / PAGE_BYTES)
                    self._remove(transaction, key)
            self._stats.evictions += len(oldest)

    def _used_pages(self) -> int:
        """Those of the file less those that are free again."""
        with self._environment.begin() as transaction:
            stats = [transaction.stat(db) for db in (self._entries, self._ages)]
        return sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)

    def _count(self) -> None:
        with self._environment.begin() as transaction:
            self._stats.entries = int(transaction.stat(self._entries)["entries"])
        self._stats.size_bytes = self._used_pages() * int(self._environment.stat()["psize"])

    def _pack(self, data: bytes) -> bytes:
        return NONE + data if self._compression == "none" else ZSTD + self._packer.compress(data)

    def _unpack(self, data: bytes) -> bytes:
        """Raises: Corrupt, zstandard.ZstdError. Either form is read, whatever is written now."""
        kind, packed = data[:1], data[1:]
        if kind == NONE:
            return packed
        if kind != ZSTD:
            raise Corrupt
        return self._unpacker.decompress(packed, max_output_size=MAX_ENTRY_BYTES)


def batch_for(max_bytes: int) -> int:
    """How many answers may be changed in one transaction."""
    free_pages = (1 - FULL) * max_bytes / PAGE_BYTES
    return max(1, min(MAX_BATCH, int(free_pages / PAGES_OF_ANSWER)))


def open_environment(path: Path, max_bytes: int) -> lmdb.Environment:
    """Open LMDB's file; one that is damaged is put away."""
    file = path / "answers.lmdb"

    def open_file() -> lmdb.Environment:
        return lmdb.open(str(file), map_size=max_bytes, max_dbs=2, subdir=False, lock=False, sync=False, metasync=False)

    try:
        return open_file()
    except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError):
        logger.warning("%s is damaged; it is put away, and a new one is begun", file)
        file.replace(path / "answers.damaged")
        return open_file()
