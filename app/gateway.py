"""Puts the parts together; the only place that knows them all."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_fastapi_instrumentator import Instrumentator

from auth.jwks import KeySet
from auth.limits import Limiter
from auth.shared_counts import RedisCounts
from cache.clearing import Clearings
from cache.commons import RedisCommons
from cache.disk import DiskTier
from cache.flight import Flights
from cache.key import KeyMaker
from cache.memory import MemoryTier
from cache.redis import RedisTier
from cache.store import ResponseCache
from cache.tier import Tier
from routing.engine import Engine

from . import __version__
from .answers import Answers, Landed
from .cache_endpoints import CacheParts
from .cache_report import CacheReport
from .callers import Callers
from .connections import Connections
from .cors import Cors
from .crew import Crew
from .door import Door
from .endpoints import add_endpoints
from .engines.supervisor import SupervisedEngine
from .gpu import Gpus
from .health import Health
from .lifecycle import Lifecycle
from .logs import AccessLog
from .metrics import Counts, Metrics, Parts
from .peers import Peers
from .pipeline import Pipeline
from .place import Orders, Place
from .redis_link import RedisLink
from .relay import CODEC
from .reload import Reloading
from .routes import Routes
from .security import make_authenticator, make_keys, make_policy
from .server import Server, raise_file_limit
from .settings import CacheSettings, Settings, SettingsSource, TracingSettings
from .warming import StartupWarming, Warmer

if TYPE_CHECKING:
    from .tracing import Tracing


class Gateway:
    """One gateway process. `engines` replaces the engines of pools by name, for tests. With their `source`, settings
    are read again when they change. `place` is that of a worker among others."""

    def __init__(
        self,
        settings: Settings,
        engines: dict[str, Engine] | None = None,
        source: SettingsSource | None = None,
        place: Place | None = None,
    ) -> None:
        server = settings.server
        self._crew = Crew(lambda exc: self.server.fail(exc))
        self.routes = Routes(settings, self._crew, engines or {})
        self.lifecycle = Lifecycle(server.drain.settle_s, server.drain.drain_s)
        self.connections = Connections(
            raise_file_limit(server.max_connections),
            server.max_header_bytes,
            server.header_timeout_s,
            server.body_timeout_s,
            server.send_timeout_s,
            server.keep_alive_s,
        )
        keys = make_keys(settings.auth)
        self._key_set = keys if isinstance(keys, KeySet) else None
        authenticator = self.authenticator = make_authenticator(settings.auth, keys)
        budget_s = settings.limits.time_budget_ms / 1000
        cache, redis = settings.cache, settings.cache.redis
        cache_budget_s = cache.time_budget_ms / 1000
        self.redis = RedisLink(redis, max(budget_s, cache_budget_s)) if redis.url is not None else None
        self._counts = RedisCounts(self.redis, redis.namespace, budget_s) if self.redis else None
        limiter = Limiter(make_policy(settings.limits), self._counts)
        disk = None
        if cache.enabled and cache.disk.path is not None:
            disk = DiskTier(cache.disk.path, cache.disk.max_bytes, cache.disk.compression)
        self.cache = make_cache(cache, self.redis, disk) if cache.enabled else None
        flights = settings.singleflight
        commons = None
        if self.redis is not None and flights.scope == "cluster":
            commons = RedisCommons[Landed](self.redis, redis.namespace, CODEC, cache_budget_s, flights.resume_s)
        self.flights = Flights[Landed](flights.resume_s, flights.linger_s, commons)
        self.answers = Answers(
            KeyMaker(cache.policy, cache.scope),
            self.cache,
            self.flights,
            flights.scope != "off",
            cache.ttl_s,
            settings.cache_ttls_s(),
        )
        self.reloading = (
            None if source is None else Reloading(source, settings, self.routes, limiter, self.answers, self.lifecycle)
        )

        counts = self.counts = Counts(settings.monitoring.max_tenants)
        pipeline = Pipeline(authenticator, limiter, self.routes.models, self.answers, server.max_choices, counts)
        clearings = Clearings(self.cache, self.redis, redis.namespace, cache_budget_s) if self.cache else None
        warmer = Warmer(pipeline)
        self.access_log = AccessLog(settings.monitoring.log_format)
        self.metrics = Metrics(counts)
        self.metrics.show(
            Parts(
                self.routes,
                self.connections,
                lambda: self.lifecycle.active_requests,
                lambda: self.health.is_ready,
                authenticator,
                limiter,
                self.redis,
                self._key_set,
                self.answers,
                self.cache,
                self.flights,
                self.reloading,
            )
        )
        gpus = Gpus()
        self.health = Health(
            self.routes, self.lifecycle, counts, self.redis, self._key_set, disk, self.reloading, gpus, place
        )
        report = self.report = CacheReport(
            self.answers, self.cache, self.flights, counts, self.redis, self.routes, lambda: warmer.running
        )
        cache_parts = CacheParts(pipeline, clearings, report, warmer, server.max_body_bytes, cache.warm_requests_per_s)
        start_up = (
            None
            if cache.warm_file is None or (place is not None and place.number > 0)  # the others find it in Redis
            else StartupWarming(
                warmer, cache.warm_file, cache.warm_tenant, cache.warm_requests_per_s, lambda: self.health.is_ready
            )
        )
        for part in (
            self.routes,
            self.redis,
            self._counts,
            self._key_set,
            disk,
            self.flights,
            clearings,
            report,
            start_up,
            self.reloading,
            gpus,
        ):
            if part is not None:
                self._crew.add(part)

        inner = self.inner = FastAPI(title="Headrace", version=__version__, openapi_url=None, lifespan=self._lifespan)
        inner.router.redirect_slashes = False
        callers = Callers(authenticator)
        peers = None if place is None else Peers(place, self.metrics)
        if peers is not None:
            self._crew.add(peers)
        add_endpoints(
            inner,
            self.routes,
            self.health,
            self.metrics,
            callers,
            cache_parts,
            int(time.time()),
            peers,
            place,
            settings.monitoring.console,
        )
        Instrumentator(registry=self.metrics.registry, excluded_handlers=["/metrics"]).instrument(
            inner, metric_namespace="headrace"
        )
        tracing = make_tracing(settings.monitoring.tracing)
        if tracing is not None:
            self._crew.add(tracing)
        door = Door(
            inner,
            pipeline,
            self.lifecycle,
            counts,
            self.access_log,
            max_body_bytes=server.max_body_bytes,
            ping_s=server.ping_s,
            tracing=tracing,
        )
        self.connections.answerer = door
        front = Cors(door, server.cors_origins) if server.cors_origins else door
        inherited = None if place is None else place.listeners[place.number]
        self.server = Server(front, server, self.lifecycle, self.connections, inherited)
        if place is not None:
            self._crew.add(Orders(place, self.server))

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Engines run from here on; the gateway listens while they start."""
        async with self._crew.at_work():
            yield

    @property
    def engines(self) -> dict[str, SupervisedEngine]:
        """Those of this process, by their pools' names."""
        return {engine.name: engine for engine in self.routes.supervised}

    def reload_on_hangup(self) -> None:
        """Read the settings again at each SIGHUP, in the process's main thread."""
        assert self.reloading is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reloading.now)

    async def serve(self) -> None:
        """Serve until told to stop. Raises: SettingsError, or the error for which an engine can never start."""
        try:
            await self.server.serve()
        finally:
            self.access_log.flush()
        if self.server.failure is not None:
            raise self.server.failure


def make_tracing(settings: TracingSettings) -> "Tracing | None":
    if settings.traces_url is None:
        return None
    from .tracing import Tracing  # OpenTelemetry is not loaded where nothing is traced

    instance = f"{socket.gethostname()}-{os.getpid()}"
    return Tracing(settings.traces_url, settings.sample_ratio, settings.service_name, instance)


def make_cache(settings: CacheSettings, redis: RedisLink | None, disk: DiskTier | None) -> ResponseCache:
    memory = settings.memory
    lower: list[Tier] = []
    if redis is not None:
        lower.append(RedisTier(redis, settings.redis.namespace, settings.time_budget_ms / 1000))
    if disk is not None:
        lower.append(disk)
    return ResponseCache(
        MemoryTier(memory.capacity, memory.max_memory_bytes, memory.eviction) if memory.enabled else None,
        lower,
        settings.max_entry_bytes,
    )
