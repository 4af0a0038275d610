"""What `/v1/cache/stats` says. A figure that nobody has measured is null."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

from cache.flight import Flights
from cache.store import ResponseCache
from routing.balance import Prefix

from .answers import Answers, Landed
from .metrics import Counts
from .redis_link import RedisLink
from .routes import Routes

SAMPLE_S = 5.0
WINDOW_S = 300.0
FEW_LOOKUPS = 100  # in a window; a rate of fewer says nothing
TIERS = {"memory": "l1_hits", "redis": "l2_hits", "disk": "l3_hits"}


class Sample(NamedTuple):
    at: float  # monotonic clock
    time: float  # since the epoch
    hits: int
    misses: int


class CacheReport:
    """Samples the counts while it runs, for what is told of the last minutes."""

    def __init__(
        self,
        answers: Answers,
        cache: ResponseCache | None,
        flights: Flights[Landed],
        counts: Counts,
        redis: RedisLink | None,
        routes: Routes,
        warmings: Callable[[], int],
    ) -> None:
        self._answers = answers
        self._cache = cache
        self._flights = flights
        self._counts = counts
        self._redis = redis
        self._routes = routes
        self._warmings = warmings
        self._samples: deque[Sample] = deque([self._sample()], maxlen=int(WINDOW_S / SAMPLE_S) + 1)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self._samples.append(self._sample())

    def body(self) -> dict[str, Any]:
        now = self._sample()
        tiers = {} if self._cache is None else {tier.name: tier.stats() for tier in self._cache.tiers}
        memory_bytes = tiers["memory"].size_bytes if "memory" in tiers else 0
        evictions = sum(stats.evictions for stats in tiers.values())
        hits_of = {name: self._answers.outcomes["hit", tier] for tier, name in TIERS.items()}
        hit_rate = rate(now.hits, now.misses)
        first = self._samples[0]
        elapsed_s = now.at - first.at
        operations = now.hits + now.misses - first.hits - first.misses
        nothing = dict.fromkeys
        return {
            "cache_manager": {
                "kv_cache": {
                    "hits": now.hits,
                    "misses": now.misses,
                    "hit_rate": hit_rate,
                    "memory_bytes": memory_bytes,
                    "evictions": evictions,
                    **hits_of,
                },
                "radix_tree": self._radix_tree(),
                "speculation": nothing(["hits", "misses", "hit_rate", "tokens_generated", "avg_depth", "early_stops"]),
                "sliding_window": nothing(["hits", "misses", "hit_rate", "memory_bytes", "evictions", "utilization"]),
            },
            "overall": {
                "hit_rate": hit_rate,
                "total_memory_bytes": memory_bytes,
                "operations_per_second": round(operations / elapsed_s, 3) if elapsed_s > 0 else None,
                "avg_response_time_us": self._counts.hit_time_us(),
                "efficiency_score": self._counts.saved_share(),
                "background_tasks_active": self._flights.stats().in_flight + self._warmings(),
            },
            "tiers": {
                name: {
                    "hits": stats.hits,
                    "misses": stats.misses,
                    "stores": stats.stores,
                    "evictions": stats.evictions,
                    "failures": stats.failures,
                    "entries": stats.entries,
                    "size_bytes": stats.size_bytes,
                }
                for name, stats in tiers.items()
            },
            "alerts": self._alerts(now, hit_rate),
            "trends": {"window_seconds": WINDOW_S, "data_points": self._data_points()},
        }

    def _radix_tree(self) -> dict[str, Any]:
        """Of the pools that are balanced by prefix, together."""
        balancers = [unit.pool.balancer for unit in self._routes.pools.values()]
        trees = [balancer.tree.stats() for balancer in balancers if isinstance(balancer, Prefix)]
        if not trees:
            names = ["prefix_matches", "sharing_hits", "memory_saved", "active_prefixes", "avg_prefix_length"]
            return dict.fromkeys(names)
        prefixes = sum(tree.active_prefixes for tree in trees)
        length = sum(tree.avg_prefix_length * tree.active_prefixes for tree in trees)
        return {
            "prefix_matches": sum(tree.prefix_matches for tree in trees),
            "sharing_hits": sum(tree.sharing_hits for tree in trees),
            "memory_saved": None,  # in the engines' KV caches, which do not say
            "active_prefixes": prefixes,
            "avg_prefix_length": round(length / prefixes, 1) if prefixes else 0.0,
        }

    def _sample(self) -> Sample:
        outcomes = self._answers.outcomes.items()
        hits = sum(count for (outcome, _), count in outcomes if outcome == "hit")
        misses = sum(count for (outcome, _), count in outcomes if outcome == "miss")
        return Sample(time.monotonic(), time.time(), hits, misses)

    def _data_points(self) -> list[dict[str, Any]]:
        """One for each step between two samples."""
        return [
            {
                "timestamp": datetime.fromtimestamp(after.time, UTC).isoformat(timespec="milliseconds"),
                "hits": after.hits - before.hits,
                "misses": after.misses - before.misses,
                "hit_rate": rate(after.hits - before.hits, after.misses - before.misses),
            }
            for before, after in pairwise(self._samples)
        ]

    def _alerts(self, now: Sample, hit_rate: float | None) -> list[dict[str, str]]:
        alerts = []
        if self._redis is not None and not self._redis.is_up:
            error = self._redis.status().last_error
            alerts.append(alert("redis", f"Redis cannot be relied on ({error}); answers are cached here alone."))
        for tier in self._cache.tiers if self._cache is not None else ():
            error = getattr(tier, "last_error", None)
            if error is not None:
                alerts.append(alert(tier.name, f"The tier is out of use: {error}."))
        first = self._samples[0]
        recent_hits, recent_misses = now.hits - first.hits, now.misses - first.misses
        recent = rate(recent_hits, recent_misses)
        enough = recent_hits + recent_misses >= FEW_LOOKUPS
        if enough and recent is not None and hit_rate is not None and recent < hit_rate / 2:
            alerts.append(
                alert("hit_rate", f"The hit rate fell to {recent:.2f}; it was {hit_rate:.2f} since the start.")
            )
        return alerts


def rate(hits: int, misses: int) -> float | None:
    return round(hits / (hits + misses), 4) if hits + misses else None


def alert(component: str, message: str) -> dict[str, str]:
    return {"level": "warning", "component": component, "message": message}
