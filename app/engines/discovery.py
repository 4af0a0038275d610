"""The servers of a remote pool: those of a list, or those that a name resolves to now."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from routing.breaker import Breaker
from routing.errors import EngineConfigError
from routing.pool import Pool
from routing.replica import Replica

from ..settings import RemoteSettings
from .http_client import Timeouts
from .remote import RemoteEngine, Upstream

logger = logging.getLogger("headrace")

PORTS = {"http": 80, "https": 443}

# What a name stands for now, as addresses. Raises: OSError, and UnicodeError for what cannot be a name.
Resolver = Callable[[str], Awaitable[Iterable[str]]]


async def resolve(name: str) -> set[str]:
    """As this host does it. Raises: OSError, UnicodeError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


class Discovery:
    """Keeps a pool's replicas: with `urls` they are there at once, with `dns` as soon as `run` has resolved it. A name
    that does not resolve changes nothing; what the probes say of the replicas counts."""

    def __init__(
        self,
        pool: Pool,
        settings: RemoteSettings,
        make_breaker: Callable[[], Breaker],
        resolver: Resolver = resolve,
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._make_breaker = make_breaker
        self._resolver = resolver
        self._upstream = make_upstream(settings)
        self.last_error: str | None = None
        # Mutable state: replicas by name, and the tasks that probe them.
        self._replicas: dict[str, Replica] = {}
        self._engines: dict[str, RemoteEngine] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        if settings.dns is None:
            self._use([self._make_engine(url) for url in settings.urls])

    @property
    def engines(self) -> Mapping[str, RemoteEngine]:
        """By the names of their replicas."""
        return self._engines

    def error(self) -> str | None:
        """The last one: of the name, or of a server that is down."""
        errors = (engine.last_error for engine in self._engines.values() if not engine.is_ready)
        return self.last_error or next(errors, None)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._probe(group)
            while self._settings.dns is not None:
                await self._resolve(self._settings.dns)
                self._probe(group)
                await asyncio.sleep(self._settings.resolve_every_s)

    async def _resolve(self, url: str) -> None:
        name = urlsplit(url).hostname
        assert name is not None
        try:
            addresses = sorted(set(await self._resolver(name)))
        except (OSError, UnicodeError) as exc:
            error = f"{name} does not resolve: {getattr(exc, 'strerror', None) or exc}"
            if self.last_error is None:
                logger.warning("pool %s: %s", self._pool.name, error)
            self.last_error = error
            return
        self.last_error = None
        if not self._replicas or set(addresses) != {engine.host for engine in self._engines.values()}:
            logger.info("pool %s: %s is %s", self._pool.name, name, ", ".join(addresses))
            self._use([self._make_engine(url, address) for address in addresses])

    def _make_engine(self, url: str, address: str | None = None) -> RemoteEngine:
        """`address`: where the URL's host is found, in place of its name."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or PORTS[parts.scheme]
        where = address or host
        root = parts.path.rstrip("/").removesuffix("/v1")
        name = f"{parts.scheme}://{f'[{where}]' if ':' in where else where}:{port}{root}"
        upstream = self._upstream if parts.scheme == "https" else replace(self._upstream, tls=None)
        return RemoteEngine(name, where, port, upstream, root, peer=host)

    def _use(self, engines: list[RemoteEngine]) -> None:
        """Those that were there before stay as they are, with all that is known of them."""
        self._engines = {engine.name: self._engines.get(engine.name, engine) for engine in engines}
        self._replicas = {
            name: self._replicas.get(name) or Replica(engine, self._make_breaker())
            for name, engine in self._engines.items()
        }
        self._pool.use(self._replicas.values())

    def _probe(self, group: asyncio.TaskGroup) -> None:
        for name in self._probes.keys() - self._engines.keys():
            self._probes.pop(name).cancel()
        for name in self._engines.keys() - self._probes.keys():
            self._probes[name] = group.create_task(self._engines[name].run())


def make_upstream(settings: RemoteSettings) -> Upstream:
    """Raises: EngineConfigError."""
    api_key = settings.api_key
    if settings.api_key_file is not None:
        try:
            api_key = settings.api_key_file.read_text().strip()
        except (OSError, UnicodeError) as exc:
            raise EngineConfigError(f"{settings.api_key_file}: {getattr(exc, 'strerror', None) or exc}") from exc
    return Upstream(
        api_key,
        settings.model,
        Timeouts(
            settings.connect_timeout_s,
            settings.first_byte_timeout_s,
            settings.chunk_timeout_s,
            settings.total_timeout_s,
        ),
        make_tls(settings),
        settings.probe_path,
        settings.probe_every_s,
        settings.probe_timeout_s,
        settings.probe_failures,
    )


def make_tls(settings: RemoteSettings) -> ssl.SSLContext | None:
    """None where no URL asks for it. Raises: EngineConfigError."""
    if not any(url.startswith("https://") for url in (*settings.urls, settings.dns or "")):
        return None
    try:
        return ssl.create_default_context(cafile=None if settings.ca_file is None else str(settings.ca_file))
    except (OSError, ssl.SSLError) as exc:
        raise EngineConfigError(f"{settings.ca_file}: {exc.strerror or exc}") from exc
