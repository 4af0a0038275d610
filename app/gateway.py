"""Puts the parts together; the only place that knows them all."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_fastapi_instrumentator import Instrumentator

from auth.jwks import KeySet
from auth.limits import Limiter
from auth.shared_counts import RedisCounts
from routing.engine import Engine
from routing.models import Model, Models

from . import __version__
from .connections import Connections
from .cors import Cors
from .door import Door
from .endpoints import Health, add_endpoints
from .engines.scripted import Script, ScriptedEngine
from .engines.supervisor import SupervisedEngine
from .lifecycle import Lifecycle
from .logs import logging_config
from .metrics import Metrics, Parts
from .pipeline import Pipeline
from .redis_link import RedisLink
from .security import make_authenticator, make_keys, make_policy
from .server import Server, raise_file_limit
from .settings import BUILTIN_MODEL, PoolSettings, Settings


class Gateway:
    """One gateway process. `engines` replaces the engines of pools by name, for tests."""

    def __init__(self, settings: Settings, engines: dict[str, Engine] | None = None) -> None:
        server = settings.server
        given = engines or {}
        self.engines = {
            pool.name: SupervisedEngine(pool.name, given.get(pool.name) or make_engine(pool, settings))
            for pool in settings.pools
        }
        models = Models(
            {model.name: Model(model.name, model.pool, self.engines[model.pool]) for model in settings.offered_models()}
        )
        supervised = list(self.engines.values())
        self.lifecycle = Lifecycle(server.drain.settle_s, server.drain.drain_s)
        self.connections = Connections(
            raise_file_limit(server.max_connections),
            server.max_header_bytes,
            server.header_timeout_s,
            server.send_timeout_s,
        )
        keys = make_keys(settings.auth)
        self._key_set = keys if isinstance(keys, KeySet) else None
        authenticator = self.authenticator = make_authenticator(settings.auth, keys)
        budget_s = settings.limits.time_budget_ms / 1000
        redis = settings.cache.redis
        self.redis = RedisLink(redis.url, budget_s) if redis.url is not None else None
        self._counts = RedisCounts(self.redis, redis.namespace, budget_s) if self.redis else None
        limiter = Limiter(make_policy(settings.limits), self._counts)

        self.metrics = Metrics()
        self.metrics.show(
            Parts(
                supervised,
                self.connections,
                lambda: self.lifecycle.active_requests,
                authenticator,
                limiter,
                self.redis,
                self._key_set,
            )
        )
        self.health = Health(supervised, self.lifecycle, self.metrics, self.redis, self._key_set)

        inner = self.inner = FastAPI(title="Headrace", version=__version__, openapi_url=None, lifespan=self._lifespan)
        inner.router.redirect_slashes = False
        add_endpoints(inner, models, self.health, self.metrics, authenticator, started=int(time.time()))
        Instrumentator(registry=self.metrics.registry, excluded_handlers=["/metrics"]).instrument(
            inner, metric_namespace="headrace"
        )
        door = Door(
            inner,
            Pipeline(authenticator, limiter, models, server.max_choices),
            self.lifecycle,
            self.metrics,
            max_body_bytes=server.max_body_bytes,
            body_timeout_s=server.body_timeout_s,
            ping_s=server.ping_s,
        )
        front = Cors(door, server.cors_origins) if server.cors_origins else door
        self.server = Server(front, server, self.lifecycle, self.connections)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Engines run from here on; the gateway listens while they start."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._look_after(engine)) for engine in self.engines.values()]
            for part in (self.redis, self._counts, self._key_set):
                if part is not None:
                    tasks.append(group.create_task(self._look_after(part)))
            yield
            for task in tasks:
                task.cancel()

    async def _look_after(self, part: SupervisedEngine | RedisLink | RedisCounts | KeySet) -> None:
        try:
            await part.run()
        except Exception as exc:
            self.server.fail(exc)

    async def serve(self) -> None:
        """Serve until told to stop. Raises: SettingsError, or the error for which an engine can never start."""
        await self.server.serve()
        if self.server.failure is not None:
            raise self.server.failure


def make_engine(pool: PoolSettings, settings: Settings) -> Engine:
    if pool.scripted is not None:
        script = pool.scripted
        return ScriptedEngine(
            Script(script.text, script.first_token_s, script.token_s, script.error_after), script.max_model_len
        )
    from .engines.embedded import EmbeddedEngine

    options = pool.vllm or {}
    monitoring = settings.monitoring
    return EmbeddedEngine(
        options,
        names=[model.name for model in settings.offered_models() if model.pool == pool.name],
        cache_dir=settings.cache_dir,
        is_builtin=options["model"] == BUILTIN_MODEL,
        log_config=logging_config(monitoring.log_format, monitoring.log_level, monitoring.engine_log_level),
    )
