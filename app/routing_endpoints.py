"""`GET /v1/routing`: who answers now, and how it goes."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from auth.principal import Principal
from routing.models import Model

from .callers import Callers
from .routes import PoolUnit, Routes


def add_routing_endpoints(app: FastAPI, routes: Routes, callers: Callers, about: dict[str, int]) -> None:
    """`about` says who answers, where it is one of several workers, each with a view of its own."""

    @app.get("/v1/routing")
    async def show(principal: Annotated[Principal, callers.with_scope("routing:read")]) -> JSONResponse:
        return JSONResponse(
            {
                **about,
                "models": [of_model(model) for model in routes.models],
                "pools": [of_pool(unit) for unit in routes.pools.values()],
            }
        )


def of_model(model: Model) -> dict[str, Any]:
    shares = model.split.weights()
    return {
        "name": model.name,
        "sticky_by": model.sticky_by,
        "variants": [
            {
                "name": variant.name,
                "pool": variant.pool,
                "weight": variant.weight,
                "share": round(shares[variant.name], 6),
                "revision": variant.revision,
            }
            for variant in model.split.variants
        ],
        "guardrail": None
        if model.guardrail is None
        else {"variant": model.guardrail.rules.variant, **asdict(model.guardrail.status())},
        "shadow": None
        if model.shadow is None
        else {"variant": model.shadow.variant.name, **asdict(model.shadow.stats())},
    }


def of_pool(unit: PoolUnit) -> dict[str, Any]:
    stats = unit.pool.stats()
    return {
        "name": unit.name,
        "engine": unit.settings.engine,
        "balance": unit.settings.balance,
        "is_ready": unit.pool.is_ready,
        "replicas": [asdict(replica) for replica in stats.replicas],
        "admission": asdict(stats.admission),
        "retries": stats.retries,
        "retries_refused": stats.retries_refused,
        "waited_for_replica": stats.waited,
        "spilled_over": stats.spilled,
    }
