"""The Redis that replicas share: its connections, and whether it can be relied on just now."""

import asyncio
import logging
import time
from dataclasses import dataclass

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

logger = logging.getLogger("headrace")

CHECK_S = 1.0
CHECK_TIMEOUT_S = 1.0
FAILURES_TO_OPEN = 3  # in a row; a single one may be the event loop's own delay
MAX_CONNECTIONS = 64
NOT_REACHED = "not reached yet"


@dataclass(frozen=True, slots=True)
class RedisStatus:
    """`latency_ms` is that of the last check that worked, `last_error` None while it works; `failures` counts uses."""

    is_up: bool
    latency_ms: float | None
    last_error: str | None
    failures: int


class RedisLink:
    """A circuit breaker: open (not up) from the start, closed by a check that answers within `budget_s`, opened by
    failures in a row, and only checks are sent while it is open."""

    def __init__(self, url: str, budget_s: float) -> None:
        self.pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=CHECK_TIMEOUT_S,
            socket_timeout=CHECK_TIMEOUT_S,
            socket_connect_timeout=CHECK_TIMEOUT_S,
            # Connections that were kept over a restart of Redis are dead: one more try, with a new one.
            retry=Retry(NoBackoff(), 1),
            retry_on_error=[RedisConnectionError],
        )
        self._client = Redis(connection_pool=self.pool)
        self._budget_s = budget_s
        # Mutable state, changed by `succeeded`, `failed`, and `_check`.
        self.is_up = False
        self._failures_in_a_row = 0
        self._failures = 0
        self._latency_s: float | None = None
        self._error: str | None = NOT_REACHED

    def status(self) -> RedisStatus:
        latency_ms = None if self._latency_s is None else round(self._latency_s * 1000, 2)
        return RedisStatus(self.is_up, latency_ms, self._error, self._failures)

    def succeeded(self) -> None:
        self._failures_in_a_row = 0

    def failed(self, exc: BaseException) -> None:
        self._failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_TO_OPEN:
            self._open(type(exc).__name__)

    def _open(self, error: str) -> None:
        if self.is_up or self._error == NOT_REACHED:
            logger.warning("Redis fails (%s); this replica goes by its own counts until it is back", error)
        self.is_up, self._error = False, error

    async def run(self) -> None:
        """Check until cancelled."""
        try:
            while True:
                await self._check()
                await asyncio.sleep(CHECK_S)
        finally:
            await self._client.aclose()
            await self.pool.disconnect()

    async def _check(self) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self._client.ping()
        except (RedisError, OSError) as exc:  # TimeoutError is an OSError
            self._open(type(exc).__name__)
            return
        self._latency_s = time.monotonic() - started
        if self._latency_s > self._budget_s:
            # Not enough to open it: what is slow may be this event loop. But it does not close it.
            if not self.is_up:
                self._open("slow")
            return
        self._error = None
        if not self.is_up:
            self.is_up, self._failures_in_a_row = True, 0
            logger.info("Redis is reached")
