"""`/v1/cache/…`: what the cache does, and what it is told to do."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from auth.principal import Principal
from cache.clearing import Clearings
from cache.entry import KEY_BYTES, Selection, tag

from .bodies import parse
from .cache_headers import read_cache_control
from .cache_report import CacheReport
from .callers import Callers
from .errors import InvalidRequest, RequestTooLarge
from .exchange import read_on
from .pipeline import Pipeline
from .warming import Warmer, progress_document, read_item

SELECTORS = ("all", "tenant", "model", "key")
MAX_RATE = 10_000.0


@dataclass(frozen=True)
class CacheParts:
    pipeline: Pipeline
    clearings: Clearings | None
    report: CacheReport
    warmer: Warmer
    max_body_bytes: int
    warm_requests_per_s: float


def add_cache_endpoints(app: FastAPI, parts: CacheParts, callers: Callers) -> None:
    async def body_of(request: Request) -> dict[str, Any]:
        """Raises: RequestTooLarge, RequestTimeout, InvalidJSON, InvalidRequest."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > parts.max_body_bytes:
                await read_on(request.receive)
                raise RequestTooLarge(parts.max_body_bytes)
        document = parse(body or b"{}")
        if not isinstance(document, dict):
            raise InvalidRequest("The body must be a JSON object.")
        return document

    @app.get("/v1/cache/stats")
    async def stats(principal: Annotated[Principal, callers.with_scope("cache:read")]) -> JSONResponse:
        return JSONResponse(parts.report.body())

    @app.post("/v1/cache/explain")
    async def explain(
        request: Request, principal: Annotated[Principal, callers.with_scope("cache:read")]
    ) -> JSONResponse:
        item = read_item(await body_of(request))
        headers = dict(request.headers.raw)
        control = read_cache_control(headers.get(b"cache-control"))
        access = request.state.access
        wanted = parts.pipeline.prepare(item.operation, item.body, principal, control, headers, access)
        return JSONResponse(await parts.pipeline.explain(wanted))

    @app.post("/v1/cache/clear")
    async def clear(
        request: Request, principal: Annotated[Principal, callers.with_scope("cache:admin")]
    ) -> JSONResponse:
        selection = selection_of(await body_of(request))
        if parts.clearings is None:
            return JSONResponse({"removed": {}, "replicas_told": True})
        removed, is_told = await parts.clearings.clear(selection)
        return JSONResponse({"removed": removed, "replicas_told": is_told})

    @app.post("/v1/cache/warm")
    async def warm(request: Request, principal: Annotated[Principal, callers.with_scope("cache:admin")]) -> Response:
        principal.check_scope("inference")
        body = await body_of(request)
        documents, per_s = body.get("requests"), body.get("requests_per_s", parts.warm_requests_per_s)
        if not isinstance(documents, list) or not documents:
            raise InvalidRequest("`requests` must be a list of requests.", "requests")
        if not isinstance(per_s, int | float) or isinstance(per_s, bool) or not 0 < per_s <= MAX_RATE:
            raise InvalidRequest(f"`requests_per_s` must be a number up to {MAX_RATE:g}.", "requests_per_s")
        steps = parts.warmer.warm([without_owner(item) for item in documents], principal, per_s)

        async def events() -> AsyncIterator[bytes]:
            async for progress in steps:
                yield b"data: " + orjson.dumps(progress_document(progress)) + b"\n\n"
            yield b"data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        last: dict[str, Any] = {}
        async for progress in steps:
            last = progress_document(progress)
        return JSONResponse(last)


def without_owner(document: Any) -> Any:
    """Who warms through the API does so for themselves: what they would ask for another tenant is not theirs to see."""
    if not isinstance(document, dict) or not isinstance(document.get("body"), dict):
        return document
    return {name: value for name, value in document.items() if name not in ("tenant", "subject")}


def selection_of(body: dict[str, Any]) -> Selection:
    """Raises: InvalidRequest. An empty body clears nothing, rather than everything."""
    for name, value in body.items():
        if name not in SELECTORS:
            raise InvalidRequest(f"There is no {name[:50]!r}; there are: {', '.join(SELECTORS)}.", name[:50])
        if name == "all" and value is not True:
            raise InvalidRequest("`all` can only be true.", "all")
        if name != "all" and (not isinstance(value, str) or not value):
            raise InvalidRequest(f"`{name}` must be a string.", name)
    if not body or ("all" in body and len(body) > 1) or ("key" in body and len(body) > 1):
        raise InvalidRequest("Give one of `all`, `key`, or `tenant` and `model` (one of them or both).")
    if "key" in body:
        try:
            key = bytes.fromhex(body["key"])
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise InvalidRequest(f"`key` must be {2 * KEY_BYTES} hexadecimal digits, as explain tells them.", "key")
        return Selection(key=key)
    return Selection(*(tag(body[name]) if name in body else None for name in ("tenant", "model")))
