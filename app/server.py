"""The server process: listen, serve, and on SIGTERM or SIGINT drain and leave."""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from .connections import Connection, Connections
from .lifecycle import Lifecycle
from .settings import ServerSettings, SettingsError

logger = logging.getLogger("headrace")

OWN_FILES = 256  # what the process needs besides connections: libraries, engines' sockets, logs
GRACE_S = 2  # for what is still under way once there is no more waiting
TAKEN_IN_A_PASS = 8  # a connection costs a few microseconds more for each
LOOK_S = 0.01
MOST_FILES = 1 << 20  # some containers say that a billion are allowed, and tables grow with the limit


class Server(uvicorn.Server):
    """uvicorn, with the gateway's own end: a signal starts the drain, and the exit code says how it went.

    A worker listens on `inherited` descriptors, and only its parent has it hurry: Ctrl-C, or who stops a service, sends
    a signal to all processes of a gateway, and the parent says so, too."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        lifecycle: Lifecycle,
        connections: Connections,
        inherited: tuple[int, ...] | None = None,
    ) -> None:
        check_tls_files(settings)
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=functools.partial(Connection, connections=connections),  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here looks at the client's address
                ssl_certfile=settings.tls_cert_file,
                ssl_keyfile=settings.tls_key_file,
            )
        )
        self._settings = settings
        self._lifecycle = lifecycle
        self._inherited = inherited
        self._listen: Callable[..., Awaitable[asyncio.Server]]  # from `startup` on
        # Mutable state: those who listen for other workers, changed by `cover` and `uncover`.
        self._covered: dict[tuple[int, ...], list[asyncio.Server]] = {}
        self._drain: asyncio.Task[None] | None = None
        self._is_leaving = asyncio.Event()
        self.failure: BaseException | None = None
        self.has_started = asyncio.Event()

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self._settings.tls_cert_file else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def fail(self, error: BaseException) -> None:
        """Leave without draining: the gateway cannot serve."""
        self.failure = error
        self.leave()

    def leave(self) -> None:
        """End without draining; what is still under way has `GRACE_S`."""
        self.should_exit = True
        self._is_leaving.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Called by the interpreter between two steps of the loop, in the loop's thread.
        stop = self.stop if self._inherited is None else self.begin_drain
        asyncio.get_running_loop().call_soon_threadsafe(stop, signal.Signals(sig).name)

    def stop(self, why: str) -> None:
        """Drain, then leave; said twice, leave with no further wait."""
        if self._drain is not None:
            self.hurry()
        self.begin_drain(why)

    def hurry(self) -> None:
        """Have the drain wait no longer."""
        self._lifecycle.hurry()

    def begin_drain(self, why: str) -> None:
        """Drain, then leave; said twice, it changes nothing."""
        if self._drain is not None:
            return
        logger.info("stopping (%s)", why)
        self._drain = asyncio.get_running_loop().create_task(self._lifecycle.drain())
        self._drain.add_done_callback(lambda _: self.leave())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, but for a bound on the TLS handshake, and the error of an address that cannot be used."""
        loop = asyncio.get_running_loop()
        settings, config = self._settings, self.config
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise SettingsError("the gateway did not start; the reason stands above")

        def make_connection() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
            )

        self._listen = functools.partial(
            loop.create_server,
            make_connection,
            backlog=settings.backlog,
            ssl=config.ssl,
            ssl_handshake_timeout=settings.header_timeout_s if config.ssl else None,
        )
        try:
            self.servers = await self._open()
        except OSError as exc:
            await self.lifespan.shutdown()
            raise SettingsError(f"cannot listen on {settings.host}:{settings.port}: {exc.strerror or exc}") from exc
        self.started = True
        self.has_started.set()

    async def _open(self) -> list[asyncio.Server]:
        if self._inherited is not None:
            return await self._listen_on(self._inherited, TAKEN_IN_A_PASS)
        server = await self._listen(self._settings.host, self._settings.port)
        same = await self._listen_on([listener.fileno() for listener in server.sockets], TAKEN_IN_A_PASS - 1)
        return [server, *same]

    async def _listen_on(self, descriptors: Sequence[int], times: int) -> list[asyncio.Server]:
        # uvloop takes one connection from each listener in a pass of the loop, which is slow when the loop is busy.
        copies = [os.dup(descriptor) for descriptor in descriptors for _ in range(times)]
        return [await self._listen(sock=socket.socket(fileno=copy)) for copy in copies]

    async def cover(self, descriptors: tuple[int, ...]) -> None:
        """Take the connections of another worker, too."""
        if descriptors not in self._covered:
            self._covered[descriptors] = []
            self._covered[descriptors] += await self._listen_on(descriptors, 1)

    def uncover(self, descriptors: tuple[int, ...]) -> None:
        for server in self._covered.pop(descriptors, ()):
            server.close()

    async def main_loop(self) -> None:
        """uvicorn's, which looks ten times a second whether it has to end; this one is told."""
        while not await self.on_tick(0):  # sets the answers' date, too
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_leaving.wait(), timeout=1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which sleeps for at least 0.1 s."""
        for server in (*self.servers, *itertools.chain(*self._covered.values())):
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        for _ in range(int(GRACE_S / LOOK_S)):
            if not state.connections and not state.tasks:
                break
            await asyncio.sleep(LOOK_S)
        else:
            logger.warning("cancelling %d requests that are still under way", len(state.tasks))
            for task in list(state.tasks):
                task.cancel()
        await self.lifespan.shutdown()


def check_tls_files(settings: ServerSettings) -> None:
    """Raises: SettingsError, where uvicorn would fail with less to say, or ask the terminal for a password."""
    certificate, key = settings.tls_cert_file, settings.tls_key_file
    if certificate is None or key is None:
        return
    for name, file in (("tls_cert_file", certificate), ("tls_key_file", key)):
        try:
            file.read_bytes()
        except OSError as exc:
            raise SettingsError(f"server.{name}: {file}: {exc.strerror}") from exc
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as exc:
        reason = getattr(exc, "reason", None) or "no certificate and key that fit"
        raise SettingsError(f"server.tls_cert_file and tls_key_file: {reason}") from exc


def raise_file_limit(max_connections: int) -> int:
    """Raise the soft limit on open files to the hard one; return how many connections fit into it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    fitting = max(limit - OWN_FILES, 1)
    if max_connections > fitting:
        logger.warning("max_connections is %d, but the limit on open files allows %d", max_connections, fitting)
    return min(max_connections, fitting)
