"""Several worker processes that share one port, and the parent process that looks after them.

Each worker has a listening socket of its own on the port (SO_REUSEPORT), between which the kernel divides connections
evenly; on one socket for all, whoever wakes first takes most of them. The parent keeps all of the sockets open, so that
a worker that dies loses no connection that it has not accepted yet: another one accepts for it until it is back.
"""

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from .place import Place
from .settings import ServerSettings, SettingsError

logger = logging.getLogger("headrace")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
START_S = 120.0  # for imports on a busy machine
LEAVE_S = 10.0  # for what a worker does at its end besides draining
STEADY_S = 30.0  # who ran so long starts again at once
MIN_WAIT_S, MAX_WAIT_S = 0.1, 30.0  # doubled from one to the other for who does not


class Worker:
    """One that is running. `is_up` from when it accepts connections."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self.reader = reader
        self.is_up = False
        self._writer = writer

    def tell(self, order: str) -> None:
        self._writer.write(f"{order}\n".encode())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close(self) -> None:
        self._writer.close()


class Workers:
    """The workers of a gateway. `command` starts one, with its place as one more argument; `on_up` is called with the
    URL when all of them are up for the first time."""

    def __init__(self, settings: ServerSettings, command: Sequence[str], on_up: Callable[[str], None]) -> None:
        self._settings = settings
        self._command = command
        self._on_up = on_up
        self._listeners = listen(settings)
        # Mutable state: who runs, who accepts for whom that is down, and how far the end is.
        self._running: dict[int, Worker] = {}
        self._covering: dict[int, Worker] = {}
        self._was_up = False
        self._stopping = asyncio.Event()
        self._is_hurrying = False
        self._code = 0

    async def run(self) -> int:
        """Run them until told to stop; return the exit code: of a worker that cannot start, or of how the end went."""
        loop = asyncio.get_running_loop()
        for which in SIGNALS:
            loop.add_signal_handler(which, self._obey, which)
        with tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True) as folder:
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(self._settings.workers):
                        group.create_task(self._keep_running(number, folder))
            finally:
                for worker in self._running.values():
                    worker.kill()
                for which in SIGNALS:
                    loop.remove_signal_handler(which)
                for listener in itertools.chain(*self._listeners):
                    listener.close()
        return self._code

    def _obey(self, which: signal.Signals) -> None:
        if which is not signal.SIGHUP:
            self.stop(which.name)
            return
        for worker in self._running.values():
            if worker.is_up:
                worker.signal(which)

    def stop(self, why: str) -> None:
        """Have all drain and leave; said twice, have them hurry. Who takes too long is killed."""
        loop = asyncio.get_running_loop()
        if self._stopping.is_set():
            self._is_hurrying = True
            loop.call_later(LEAVE_S, self._kill_all)
        else:
            logger.info("stopping %d workers (%s)", self._settings.workers, why)
            self._stopping.set()
            drain = self._settings.drain
            loop.call_later(drain.settle_s + drain.drain_s + LEAVE_S, self._kill_all)
        for worker in self._running.values():
            self._have_it_stop(worker)

    def _have_it_stop(self, worker: Worker) -> None:
        if not worker.is_up:
            worker.signal(signal.SIGTERM)  # it has nothing to drain, and does not listen to orders yet
            return
        worker.tell("stop")
        if self._is_hurrying:
            worker.tell("hurry")

    def _kill_all(self) -> None:
        for number, worker in self._running.items():
            logger.error("worker %d does not end; killing it", number)
            worker.kill()

    async def _keep_running(self, number: int, folder: str) -> None:
        wait_s = 0.0
        while not self._stopping.is_set():
            started = time.monotonic()
            code, was_up = await self._run(number, folder)
            lived_s = time.monotonic() - started
            if self._stopping.is_set():
                self._code = self._code or (code if was_up else 0)
            elif not was_up and not self._was_up:
                self._code = code or 1
                self.stop(f"worker {number} cannot start")
                self.stop("with no wait")
            else:
                wait_s = 0.0 if was_up and lived_s > STEADY_S else min(max(2 * wait_s, MIN_WAIT_S), MAX_WAIT_S)
                logger.error(
                    "worker %d ended with code %d after %.1f s; it starts again in %g s", number, code, lived_s, wait_s
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait_s)

    async def _run(self, number: int, folder: str) -> tuple[int, bool]:
        """Run a worker to its end; return its exit code, as shells tell it, and whether it was up."""
        try:
            worker = self._running[number] = await self._start(number, folder)
        except OSError as exc:
            logger.error("worker %d cannot be started: %s", number, exc.strerror or exc)
            return 1, False
        try:
            async with asyncio.timeout(START_S):
                with contextlib.suppress(ConnectionError):
                    if await worker.reader.readline():
                        self._note_up(worker)
        except TimeoutError:
            worker.kill()
        code = await worker.process.wait()
        worker.close()
        del self._running[number]
        self._share_out()
        return code if code >= 0 else 128 - code, worker.is_up

    async def _start(self, number: int, folder: str) -> Worker:
        """Raises: OSError."""
        ours, its = socket.socketpair()
        listeners = tuple(tuple(listener.fileno() for listener in own) for own in self._listeners)
        place = Place(number, self._settings.workers, its.fileno(), listeners, folder)
        descriptors = (its.fileno(), *itertools.chain(*listeners))
        try:
            with its:
                process = await asyncio.create_subprocess_exec(*self._command, place.dump(), pass_fds=descriptors)
        except OSError:
            ours.close()
            raise
        return Worker(process, *await asyncio.open_connection(sock=ours))

    def _note_up(self, worker: Worker) -> None:
        worker.is_up = True
        if self._stopping.is_set():
            self._have_it_stop(worker)
        if not self._was_up and self._up_count() == self._settings.workers:
            self._was_up = True
            self._on_up(self._url())
        self._share_out()

    def _up_count(self) -> int:
        return sum(worker.is_up for worker in self._running.values())

    def _share_out(self) -> None:
        """Have others accept for those that are down, until they are back."""
        if not self._was_up or self._stopping.is_set():
            return
        up = {number: worker for number, worker in self._running.items() if worker.is_up}
        for number in range(self._settings.workers):
            by = self._covering.get(number)
            if by is not None and (number in up or by not in up.values()):
                del self._covering[number]
                if by in up.values():
                    by.tell(f"uncover {number}")
                by = None
            if by is None and number not in up and up:
                by = self._covering[number] = list(up.values())[number % len(up)]
                by.tell(f"cover {number}")

    def _url(self) -> str:
        host, port = self._listeners[0][0].getsockname()[:2]
        scheme = "https" if self._settings.tls_cert_file else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def listen(settings: ServerSettings) -> list[list[socket.socket]]:
    """For each worker a socket for each of the addresses. Raises: SettingsError."""
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
        for family, address in addresses:
            check_is_free(family, address)
        listeners: list[list[socket.socket]] = []
        for _ in range(settings.workers):
            own = []
            for family, (name, _, *rest) in addresses:
                own.append(
                    socket.create_server(
                        (name, port, *rest),
                        family=family,
                        backlog=settings.backlog,
                        reuse_port=True,
                    )
                )
                port = own[0].getsockname()[1]
            listeners.append(own)
        return listeners
    except OSError as exc:
        raise SettingsError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc


def check_is_free(family: int, address: Any) -> None:
    """Raise OSError if somebody listens there: sockets with SO_REUSEPORT would join those of another gateway."""
    with socket.socket(family) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def own_command() -> list[str]:
    """What started this process, so that its workers are of the same program."""
    return [sys.executable, *sys.orig_argv[1:]]
