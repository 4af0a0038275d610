"""What FastAPI's router serves: health, metrics, models, and every path that is not there."""

import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import psutil
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from routing.errors import ModelNotFound
from routing.models import Models

from . import __version__
from .engines.supervisor import SupervisedEngine
from .errors import Failure, MethodNotAllowed, NotFound, describe
from .lifecycle import Lifecycle
from .metrics import Metrics

STATUS_OF_STATE = {"ready": "ok", "unresponsive": "degraded", "waiting": "down", "stopped": "down"}


class Health:
    """`status` is ok, degraded (some engine is not there, another is), or down."""

    def __init__(self, engines: list[SupervisedEngine], lifecycle: Lifecycle, metrics: Metrics) -> None:
        self._engines = engines
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._process = psutil.Process()

    @property
    def is_ready(self) -> bool:
        """Some engine can answer, and the gateway is not on its way out."""
        return not self._lifecycle.is_draining and any(engine.is_ready for engine in self._engines)

    def body(self) -> dict[str, Any]:
        components = {f"engine:{engine.name}": self._component(engine) for engine in self._engines}
        states = {component["status"] for component in components.values()}
        if self._lifecycle.is_draining:
            status = "draining"
        elif states == {"ok"}:
            status = "ok"
        elif self.is_ready:
            status = "degraded"
        else:
            status = "starting" if states == {"starting"} else "down"
        now = time.time()
        return {
            "status": status,
            "version": __version__,
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
            "uptime_seconds": round(now - self._lifecycle.started, 3),
            "active_requests": self._lifecycle.active_requests,
            "memory_usage_bytes": self._process.memory_info().rss,
            "requests_total": self._metrics.requests,
            "requests_failed": self._metrics.failed,
            "components": components,
        }

    def _component(self, engine: SupervisedEngine) -> dict[str, Any]:
        status = engine.status()
        return {"status": STATUS_OF_STATE.get(status.state, "starting"), **asdict(status)}


def add_endpoints(app: FastAPI, models: Models, health: Health, metrics: Metrics, started: int) -> None:
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
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def entry(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "headrace"}

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [entry(model.name) for model in models]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> JSONResponse:
        return JSONResponse(entry(models.find(name).name))

    app.add_middleware(GZipMiddleware, minimum_size=1024)
    add_error_handlers(app)


def add_error_handlers(app: FastAPI) -> None:
    """Errors of FastAPI's side, in the same form as all others."""

    def reply(request: Request, failure: Failure) -> Response:
        headers = {name.decode(): value.decode() for name, value in failure.headers()}
        body = failure.body(request.state.request_id)
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
    app.add_exception_handler(ModelNotFound, handle(lambda request, exc: exc))
    app.add_exception_handler(Exception, handle(lambda request, exc: exc))
