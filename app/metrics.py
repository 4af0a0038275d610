"""Everything that /metrics shows of our own; the only module that imports prometheus_client."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from auth.authenticator import Authenticator, Everyone
from auth.jwks import KeySet
from auth.limits import Limiter

from .connections import Connections
from .engines.supervisor import SupervisedEngine
from .logs import Access
from .redis_link import RedisLink

# In seconds; from a cache hit to a long generation.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.requests = 0
        self.failed = 0
        labels = ("operation", "model")
        self._requests = Counter(
            "headrace_requests_total",
            "Requests to an operation; outcome is ok, refused, error, or disconnected.",
            (*labels, "outcome"),
            registry=self.registry,
        )
        self._duration = Histogram(
            "headrace_request_duration_seconds",
            "From the request's headers to the end of its answer.",
            labels,
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._ttft = Histogram(
            "headrace_time_to_first_token_seconds",
            "From the request's headers to the engine's first event, of streams.",
            labels,
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._tokens = Counter("headrace_tokens_total", "Tokens by kind.", (*labels, "kind"), registry=self.registry)

    def record(self, access: Access, duration_s: float) -> None:
        """Count a request that has ended. A model that is not configured has no label of its own."""
        labels = (access.operation or "", access.model or "")
        self.requests += 1
        self.failed += access.outcome == "error"
        self._requests.labels(*labels, access.outcome).inc()
        self._duration.labels(*labels).observe(duration_s)
        if access.ttft_s is not None:
            self._ttft.labels(*labels).observe(access.ttft_s)
        if access.usage is not None:
            self._tokens.labels(*labels, "prompt").inc(access.usage.prompt_tokens)
            self._tokens.labels(*labels, "completion").inc(access.usage.completion_tokens)
            self._tokens.labels(*labels, "cached").inc(access.usage.cached_tokens or 0)

    def show(self, parts: "Parts") -> None:
        """Add what is read when /metrics is, from the components' own counts."""
        self.registry.register(_Snapshot(parts))

    def text(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(frozen=True)
class Parts:
    """What has counts of its own."""

    engines: Sequence[SupervisedEngine]
    connections: Connections
    active_requests: Callable[[], int]
    authenticator: Authenticator | Everyone
    limiter: Limiter
    redis: RedisLink | None
    key_set: KeySet | None


class _Snapshot(Collector):
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        yield from self._of_engines()
        yield from self._of_connections()
        yield from self._of_callers()
        yield from self._of_redis()
        yield from self._of_keys()

    def _of_engines(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("headrace_engine_up", "1 while the engine can answer.", labels=["pool"])
        running = GaugeMetricFamily("headrace_engine_running", "Requests that it works on.", labels=["pool"])
        waiting = GaugeMetricFamily("headrace_engine_waiting", "Requests in its queue.", labels=["pool"])
        restarts = CounterMetricFamily("headrace_engine_restarts", "Restarts after it died.", labels=["pool"])
        for engine in self._parts.engines:
            up.add_metric([engine.name], float(engine.is_ready))
            running.add_metric([engine.name], engine.load.running)
            waiting.add_metric([engine.name], engine.load.waiting)
            restarts.add_metric([engine.name], engine.restarts)
        yield from (up, running, waiting, restarts)

    def _of_connections(self) -> Iterable[Metric]:
        in_flight = self._parts.active_requests()
        yield GaugeMetricFamily("headrace_requests_in_flight", "Requests that run now.", value=in_flight)
        stats = self._parts.connections.stats()
        yield GaugeMetricFamily("headrace_connections", "Open connections.", value=stats.open)
        closed = CounterMetricFamily(
            "headrace_connections_closed", "Connections that the gateway closed, by cause.", labels=["cause"]
        )
        for cause, count in stats.closed.items():
            closed.add_metric([cause], count)
        yield closed

    def _of_callers(self) -> Iterable[Metric]:
        results = CounterMetricFamily(
            "headrace_authentications",
            "Looks at who is calling; result is ok, missing_token, invalid_token, expired_token, or unavailable.",
            labels=["result"],
        )
        for result, count in self._parts.authenticator.results.items():
            results.add_metric([result], count)
        decisions = CounterMetricFamily(
            "headrace_limiter_decisions",
            "Requests of callers who have limits; decision is allowed, or the limit reached: requests, tokens, "
            "concurrent; by is shared (Redis) or local (this replica alone).",
            labels=["decision", "by"],
        )
        for (decision, by), count in self._parts.limiter.decisions.items():
            decisions.add_metric([decision, by], count)
        yield from (results, decisions)
        running = self._parts.limiter.running
        yield GaugeMetricFamily("headrace_limiter_slots", "Slots of concurrent requests in use here.", value=running)

    def _of_redis(self) -> Iterable[Metric]:
        if self._parts.redis is None:
            return
        status = self._parts.redis.status()
        yield GaugeMetricFamily("headrace_redis_up", "1 while Redis can be relied on.", value=float(status.is_up))
        yield CounterMetricFamily(
            "headrace_redis_failures", "Uses of Redis that failed or took too long.", value=status.failures
        )

    def _of_keys(self) -> Iterable[Metric]:
        if self._parts.key_set is None:
            return
        status = self._parts.key_set.status()
        yield GaugeMetricFamily("headrace_jwks_keys", "Keys that tokens are verified with.", value=status.keys)
        if status.age_s is not None:
            yield GaugeMetricFamily("headrace_jwks_age_seconds", "Since the keys were fetched.", value=status.age_s)
        refreshes = CounterMetricFamily("headrace_jwks_refreshes", "Fetches of the keys.", labels=["result"])
        refreshes.add_metric(["ok"], status.refreshes - status.failures)
        refreshes.add_metric(["error"], status.failures)
        yield refreshes
