"""Clients for each way in which Redis is run: alone, behind Sentinels, as a Cluster; with TLS or without."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from hiredis import pack_command
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis, RedisCluster, Sentinel, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from .settings import RedisSettings

# What a client raises. A Cluster's "not reached" is no RedisError.
Failures = (RedisError, RedisClusterException, OSError)
Client = Redis | RedisCluster

MAX_CONNECTIONS = 8
PORT, SENTINEL_PORT = 6379, 26379


class PasswordFile(CredentialProvider):
    """Read at each connection, so that a changed password needs no restart."""

    def __init__(self, path: Path, username: str | None) -> None:
        self._path = path
        self._username = username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._path.read_text().strip()
        return (password,) if self._username is None else (self._username, password)


def make_clients(settings: RedisSettings, connect_timeout_s: float) -> tuple[Client, list[Client]]:
    """A client that has connected to nothing yet, and all that are to be closed in the end. Uses have deadlines of
    their own, so its sockets have none."""
    assert settings.url is not None
    url = urlsplit(settings.url)
    scheme, _, topology = url.scheme.partition("+")
    options: dict[str, Any] = {
        "socket_connect_timeout": connect_timeout_s,
        "socket_timeout": None,
        # A connection that was kept over a restart of Redis is dead: one more try, with a new one.
        "retry": Retry(NoBackoff(), 1),
        "retry_on_error": [RedisConnectionError],
    }
    tls = tls_options(settings) if scheme == "rediss" else {}
    login = credentials(settings.password_file, url)
    if topology == "cluster":
        nodes = [ClusterNode(host, port) for host, port in addresses(url, PORT)]
        cluster = RedisCluster(startup_nodes=nodes, ssl=bool(tls), **login, **tls, **options)
        return cluster, [cluster]
    if topology == "sentinel":
        service, _, db = url.path.strip("/").partition("/")
        of_sentinels = {"socket_connect_timeout": connect_timeout_s, "socket_timeout": connect_timeout_s, **tls}
        if settings.sentinel_password_file is not None:
            of_sentinels["credential_provider"] = PasswordFile(settings.sentinel_password_file, None)
        if tls:
            of_sentinels["ssl"] = tls["ssl"] = True
        sentinel = Sentinel(addresses(url, SENTINEL_PORT), sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
        master: Redis = sentinel.master_for(service, db=int(db or 0), **login, **tls, **options)
        return master, [master, *sentinel.sentinels]
    if settings.password_file is not None:
        options |= login
    if tls:
        options["connection_class"] = SSLConnection
    pool = BlockingConnectionPool.from_url(
        settings.url, max_connections=MAX_CONNECTIONS, timeout=connect_timeout_s, **tls, **options
    )
    client = Redis.from_pool(pool)
    return client, [client]


def tls_options(settings: RedisSettings) -> dict[str, Any]:
    files = {"ssl_ca_certs": settings.ca_file, "ssl_certfile": settings.cert_file, "ssl_keyfile": settings.key_file}
    return {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        **{option: str(path) for option, path in files.items() if path is not None},
    }


def credentials(password_file: Path | None, url: SplitResult) -> dict[str, Any]:
    username = unquote(url.username) if url.username else None
    if password_file is not None:
        return {"credential_provider": PasswordFile(password_file, username)}
    return {"username": username, "password": unquote(url.password) if url.password else None}


def addresses(url: SplitResult, default_port: int) -> list[tuple[str, int]]:
    """The hosts of a URL that names several, divided by commas."""
    found = []
    for address in url.netloc.rpartition("@")[2].split(","):
        host, colon, port = address.rpartition(":")
        is_port = bool(colon) and port.isdigit()
        found.append((host.strip("[]"), int(port)) if is_port else (address.strip("[]"), default_port))
    return found


class Pipeline:
    """Runs commands together, in one round trip, on a connection that it keeps: what redis-py does around each of its
    pipelines costs more than the commands."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._connection: AbstractConnection | None = None

    async def run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers, Redis's errors among them. Raises: what is in Failures."""
        if isinstance(self._client, RedisCluster):
            async with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute(raise_on_error=False)
        try:
            return await self._run(self._client.connection_pool, commands, is_new=self._connection is None)
        except _Stale:
            return await self._run(self._client.connection_pool, commands, is_new=True)

    async def _run(self, pool: ConnectionPool, commands: Sequence[tuple[Any, ...]], is_new: bool) -> list[Any]:
        """Raises: _Stale when a connection that was kept turns out to be dead, and what is in Failures."""
        connection = self._connection
        if connection is None:
            connection = self._connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        answers: list[Any] = []
        try:
            await connection.send_packed_command(b"".join(map(pack_command, commands)), check_health=False)
            for _ in commands:
                try:
                    answers.append(await connection.read_response())
                except ResponseError as exc:
                    answers.append(exc)
        except BaseException as exc:
            # Nobody will read what is still to come.
            await self.close()
            if isinstance(exc, RedisConnectionError) and not is_new and not answers:
                raise _Stale from exc
            raise
        return answers

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not isinstance(self._client, RedisCluster):
            await connection.disconnect(nowait=True)
            await self._client.connection_pool.release(connection)


class _Stale(Exception):
    """A connection that was kept over a restart of Redis is dead; one more try, with a new one."""


async def check(client: Client, key: str) -> None:
    """Ask every node whether it lives, and write: a Redis that is full, or only a replica, is of no use.

    Raises: what is in Failures.
    """
    if isinstance(client, RedisCluster):
        await client.ping(target_nodes=RedisCluster.PRIMARIES)
    await client.set(key, 1, px=60_000)
