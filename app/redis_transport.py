"""Clients for each way in which Redis is run: alone, behind Sentinels, as a Cluster; with TLS or without."""

from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, Sentinel, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError

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


async def check(client: Client, key: str) -> None:
    """Ask every node whether it lives, and write: a Redis that is full, or only a replica, is of no use.

    Raises: what is in Failures.
    """
    if isinstance(client, RedisCluster):
        await client.ping(target_nodes=RedisCluster.PRIMARIES)
    await client.set(key, 1, px=60_000)
