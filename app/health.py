"""What /health tells: whether requests can be answered, and how those parts are that they depend on."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import psutil

from auth.jwks import KeySet
from cache.disk import DiskTier
from routing.replica import Replica

from . import __version__
from .engines.discovery import Discovery
from .engines.supervisor import SupervisedEngine
from .gpu import Gpus
from .lifecycle import Lifecycle
from .metrics import Counts
from .place import Place
from .redis_link import RedisLink
from .reload import Reloading
from .routes import PoolUnit, Routes

STATUS_OF_STATE = {"ready": "ok", "unresponsive": "degraded", "waiting": "down", "stopped": "down"}
MAX_REPLICAS = 100  # that are listed of a pool, those that cannot be asked before the others

Component = dict[str, Any]


class Health:
    """`status` is ok, degraded (something is not there that others make up for), starting, draining, or down (nothing
    can be answered).

    Every component has a `status` (ok, degraded, starting, or down), a `latency_ms` (of the last check or use of it
    that was answered; None: there was none, or there is nothing to wait for), and a `last_error` (why it is not ok; an
    engine's outlives the recovery from it).
    """

    def __init__(
        self,
        routes: Routes,
        lifecycle: Lifecycle,
        counts: Counts,
        redis: RedisLink | None,
        key_set: KeySet | None,
        disk: DiskTier | None,
        reloading: Reloading | None,
        gpus: Gpus,
        place: Place | None = None,
    ) -> None:
        self._routes = routes
        self._redis = redis
        self._key_set = key_set
        self._disk = disk
        self._about = {} if place is None else place.about()
        self._reloading = reloading
        self._gpus = gpus
        self._lifecycle = lifecycle
        self._counts = counts
        self._process = psutil.Process()

    @property
    def is_ready(self) -> bool:
        """Some engine can answer, somebody can be let in, and the gateway is not on its way out."""
        return self._can_check_tokens and not self._lifecycle.is_draining and self._routes.is_ready

    @property
    def _can_check_tokens(self) -> bool:
        return self._key_set is None or self._key_set.is_ready

    def body(self) -> dict[str, Any]:
        pools = dict(map(of_pool, self._routes.pools.values()))
        others = dict(self._others())
        components = pools | others
        now = time.time()
        return {
            "status": self._overall(pools, others),
            "version": __version__,
            "timestamp": in_iso_form(now),
            "uptime_seconds": round(now - self._lifecycle.started, 3),
            "active_requests": self._lifecycle.active_requests,
            "memory_usage_bytes": self._process.memory_info().rss,
            "requests_total": self._counts.total,
            "requests_failed": self._counts.failed,
            **self._about,
            "components": components,
        }

    def _overall(self, pools: dict[str, Component], others: dict[str, Component]) -> str:
        if self._lifecycle.is_draining:
            return "draining"
        if self.is_ready:
            states = {component["status"] for component in (pools | others).values()}
            return "ok" if states == {"ok"} else "degraded"
        missing = set() if self._routes.is_ready else {component["status"] for component in pools.values()}
        if not self._can_check_tokens:
            missing.add(others["jwks"]["status"])
        return "starting" if missing == {"starting"} else "down"

    def _others(self) -> Iterator[tuple[str, Component]]:
        """Those that requests are answered without, if need be; except for keys that were never fetched."""
        yield from self._canaries()
        if self._redis is not None:
            redis = self._redis.status()
            yield "redis", {"status": "ok" if redis.is_up else "down", **asdict(redis)}
        if self._disk is not None:
            error = self._disk.last_error
            yield "disk", component("ok" if error is None else "down", self._disk.latency_ms, error)
        if self._key_set is not None:
            keys = self._key_set.status()
            if keys.age_s is None:
                state = "starting" if keys.last_error is None else "down"
            else:
                state = "ok" if keys.last_error is None else "degraded"
            yield "jwks", {"status": state, **asdict(keys)}
        if self._reloading is not None:
            config = self._reloading.status()
            state = "ok" if config.last_error is None else "degraded"
            yield "config", component(state, None, config.last_error, loaded_at=in_iso_form(config.loaded_at))
        for gpu in self._gpus.status():
            told = {} if gpu.reading is None else asdict(gpu.reading)
            name = "gpu" if gpu.index is None else f"gpu:{gpu.index}"
            yield name, component(gpu.status, gpu.latency_ms, gpu.last_error, **told)

    def _canaries(self) -> Iterator[tuple[str, Component]]:
        """Those that were rolled back: others serve their requests."""
        for model in self._routes.models:
            guardrail = model.guardrail
            if guardrail is not None and guardrail.state == "rolled_back":
                told = component("degraded", None, guardrail.reason, variant=guardrail.rules.variant)
                yield f"canary:{model.name}", told


def component(status: str, latency_ms: float | None, last_error: str | None, **more: Any) -> Component:
    return {"status": status, "latency_ms": latency_ms, "last_error": last_error, **more}


def of_pool(unit: PoolUnit) -> tuple[str, Component]:
    if isinstance(unit.part, SupervisedEngine):
        engine = unit.part.status()
        return f"engine:{unit.name}", {"status": STATUS_OF_STATE.get(engine.state, "starting"), **asdict(engine)}
    return f"pool:{unit.name}", of_servers(unit.pool.replicas, unit.part)


def of_servers(replicas: tuple[Replica, ...], discovery: Discovery) -> Component:
    """`latency_ms` is that of the slowest server that is up, of each the last probe that was answered."""
    available = sum(replica.is_available for replica in replicas)
    if not replicas and discovery.last_error is None:
        state = "starting"  # its name is being resolved for the first time
    elif replicas and available == len(replicas):
        state = "ok"
    else:
        state = "degraded" if available else "down"
    error = discovery.error()
    if state == "degraded" and error is None:
        error = (
            f"{len(replicas) - available} of {len(replicas)} replicas are not asked: a breaker is open, or they rest"
        )
    latencies = [engine.latency_ms for engine in discovery.engines.values() if engine.is_ready and engine.latency_ms]
    worst_first = sorted(replicas, key=lambda replica: replica.is_available)
    return component(
        state,
        max(latencies, default=None),
        error,
        replicas=len(replicas),
        available=available,
        by_replica={replica.name: of_replica(replica, discovery) for replica in worst_first[:MAX_REPLICAS]},
    )


def of_replica(replica: Replica, discovery: Discovery) -> Component:
    engine = discovery.engines[replica.name]
    return {
        "is_up": engine.is_ready,
        "breaker": replica.breaker.state,
        "latency_ms": engine.latency_ms,
        "last_error": engine.last_error,
    }


def in_iso_form(unix_time_s: float) -> str:
    return datetime.fromtimestamp(unix_time_s, UTC).isoformat(timespec="milliseconds")
