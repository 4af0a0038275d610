"""What FastAPI's router serves: health, metrics, models, and every path that is not there."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from auth.errors import AuthError
from auth.principal import Principal
from cache.errors import CacheError
from routing.errors import RoutingError

from .cache_endpoints import CacheParts, add_cache_endpoints
from .callers import Callers
from .console_endpoints import add_console_endpoints
from .errors import Failure, MethodNotAllowed, NotFound, Refusal, describe
from .health import Health
from .metrics import Metrics
from .peers import Peers
from .place import Place
from .routes import Routes
from .routing_endpoints import add_routing_endpoints


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
    has_console: bool = True,
) -> None:
    """Add all paths. Health, metrics, and the console's files need no token; every other one asks for a caller with a
    scope."""
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
    if has_console:
        add_console_endpoints(app)
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
