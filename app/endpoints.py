"""What FastAPI's router serves: health, metrics, models, and every path that is not there."""

import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import psutil
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from auth.errors import AuthError
from auth.jwks import KeySet
from auth.principal import Principal
from cache.disk import DiskTier
from cache.errors import CacheError
from routing.errors import RoutingError

from . import __version__
from .cache_endpoints import CacheParts, add_cache_endpoints
from .callers import Callers
from .engines.supervisor import SupervisedEngine
from .errors import Failure, MethodNotAllowed, NotFound, Refusal, describe
from .lifecycle import Lifecycle
from .metrics import Metrics
from .peers import Peers
from .place import Place
from .redis_link import RedisLink
from .reload import Reloading
from .routes import PoolUnit, Routes
from .routing_endpoints import add_routing_endpoints

STATUS_OF_STATE = {"ready": "ok", "unresponsive": "degraded", "waiting": "down", "stopped": "down"}


class Health:
    """`status` is ok, degraded (something is not there that others make up for), or down."""

    def __init__(
        self,
        routes: Routes,
        lifecycle: Lifecycle,
        metrics: Metrics,
        redis: RedisLink | None,
        key_set: KeySet | None,
        disk: DiskTier | None,
        reloading: Reloading | None,
        place: Place | None = None,
    ) -> None:
        self._routes = routes
        self._redis = redis
        self._key_set = key_set
        self._disk = disk
        self._about = {} if place is None else place.about()
        self._reloading = reloading
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._process = psutil.Process()

    @property
    def is_ready(self) -> bool:
        """Some engine can answer, somebody can be let in, and the gateway is not on its way out."""
        can_check_tokens = self._key_set is None or self._key_set.is_ready
        return can_check_tokens and not self._lifecycle.is_draining and self._routes.is_ready

    def body(self) -> dict[str, Any]:
        components = dict(map(self._of_pool, self._routes.pools.values()))
        engine_states = {component["status"] for component in components.values()}
        components |= self._of_canaries()
        if self._redis is not None:
            status = self._redis.status()
            components["redis"] = {"status": "ok" if status.is_up else "down", **asdict(status)}
        if self._disk is not None:
            error = self._disk.last_error
            components["disk"] = {"status": "ok" if error is None else "down", "last_error": error}
        if self._key_set is not None:
            keys = self._key_set.status()
            state = "down" if keys.age_s is None else "degraded" if keys.last_error else "ok"
            components["jwks"] = {"status": state, **asdict(keys)}
        if self._reloading is not None:
            config = self._reloading.status()
            components["config"] = {
                "status": "ok" if config.last_error is None else "degraded",
                "last_error": config.last_error,
                "loaded_at": in_iso_form(config.loaded_at),
            }
        states = {component["status"] for component in components.values()}
        if self._lifecycle.is_draining:
            overall = "draining"
        elif states == {"ok"}:
            overall = "ok"
        elif self.is_ready:
            overall = "degraded"
        else:
            overall = "starting" if engine_states == {"starting"} else "down"
        now = time.time()
        return {
            "status": overall,
            "version": __version__,
            "timestamp": in_iso_form(now),
            "uptime_seconds": round(now - self._lifecycle.started, 3),
            "active_requests": self._lifecycle.active_requests,
            "memory_usage_bytes": self._process.memory_info().rss,
            "requests_total": self._metrics.requests,
            "requests_failed": self._metrics.failed,
            **self._about,
            "components": components,
        }

    def _of_pool(self, unit: PoolUnit) -> tuple[str, dict[str, Any]]:
        if isinstance(unit.part, SupervisedEngine):
            engine = unit.part.status()
            return f"engine:{unit.name}", {"status": STATUS_OF_STATE.get(engine.state, "starting"), **asdict(engine)}
        replicas = unit.pool.replicas
        available = sum(replica.is_available for replica in replicas)
        state = "ok" if replicas and available == len(replicas) else "degraded" if available else "down"
        told = {"status": state, "replicas": len(replicas), "available": available, "last_error": unit.part.error()}
        return f"pool:{unit.name}", told

    def _of_canaries(self) -> dict[str, dict[str, Any]]:
        """Those that were rolled back: others serve their requests."""
        return {
            f"canary:{model.name}": {
                "status": "degraded",
                "variant": guardrail.rules.variant,
                "reason": guardrail.reason,
            }
            for model in self._routes.models
            if (guardrail := model.guardrail) is not None and guardrail.state == "rolled_back"
        }


def in_iso_form(unix_time_s: float) -> str:
    return datetime.fromtimestamp(unix_time_s, UTC).isoformat(timespec="milliseconds")


def add_endpoints(
    app: FastAPI,
    routes: Routes,
    health: Health,
    metrics: Metrics,
    callers: Callers,
    cache: CacheParts,
    started: int,
    peers: Peers | None = None,
    place: Place | None = None,
) -> None:
    """Add all paths. Health and metrics need no token; every other one asks for a caller with a scope."""
    models = routes.models

    @app.get("/health")
    async def overall() -> JSONResponse:
        return JSONResponse(health.body())

    @app.get("/health/live")
    async def live() -> JSONResponse:
        return JSONResponse(health.body())

    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        return JSONResponse(health.body(), 200 if health.is_ready else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        text = metrics.text() if peers is None else await peers.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def entry(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "headrace"}

    @app.get("/v1/models")
    async def list_models(principal: Annotated[Principal, callers.with_scope("inference")]) -> JSONResponse:
        names = [model.name for model in models if principal.may_use(model.name)]
        return JSONResponse({"object": "list", "data": [entry(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str, principal: Annotated[Principal, callers.with_scope("inference")]) -> JSONResponse:
        principal.check_model(name, exists=name in models)
        return JSONResponse(entry(models.find(name).name))

    add_cache_endpoints(app, cache, callers)
    add_routing_endpoints(app, routes, callers, {} if place is None else place.about())
    app.add_middleware(GZipMiddleware, minimum_size=1024)
    add_error_handlers(app)


def add_error_handlers(app: FastAPI) -> None:
    """Errors of FastAPI's side, in the same form as all others."""

    def reply(request: Request, failure: Failure) -> Response:
        headers = {name.decode(): value.decode() for name, value in failure.headers()}
        request.state.access.error = failure.code
        body = failure.body(request.state.access.request_id)
        return Response(body, failure.status, headers, media_type="application/json")

    def handle(translate: Callable[[Request, Any], Exception]) -> Callable[[Request, Any], Any]:
        async def handler(request: Request, exc: Exception) -> Response:
            return reply(request, describe(translate(request, exc)))

        return handler

    def of_http(request: Request, exc: HTTPException) -> Exception:
        if exc.status_code == 405:
            return MethodNotAllowed(request.method, (exc.headers or {}).get("Allow", "GET"))
        return NotFound(request.url.path) if exc.status_code == 404 else exc

    app.add_exception_handler(HTTPException, handle(of_http))

    def as_it_is(request: Request, exc: Exception) -> Exception:
        request.state.access.reason = getattr(exc, "reason", None)
        return exc

    for kind in (RoutingError, AuthError, CacheError, Refusal, Exception):
        app.add_exception_handler(kind, handle(as_it_is))
