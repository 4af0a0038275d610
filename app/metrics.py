"""Everything that /metrics shows of our own; the only module that imports prometheus_client."""

from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .connections import Connections
from .engines.supervisor import SupervisedEngine
from .logs import Access

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

    def show(
        self,
        engines: Iterable[SupervisedEngine],
        connections: Connections,
        active_requests: Callable[[], int],
    ) -> None:
        """Add what is read when /metrics is, from the components' own counts."""
        self.registry.register(_Snapshot(list(engines), connections, active_requests))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Snapshot(Collector):
    def __init__(
        self, engines: list[SupervisedEngine], connections: Connections, active_requests: Callable[[], int]
    ) -> None:
        self._engines = engines
        self._connections = connections
        self._active_requests = active_requests

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("headrace_engine_up", "1 while the engine can answer.", labels=["pool"])
        running = GaugeMetricFamily("headrace_engine_running", "Requests that it works on.", labels=["pool"])
        waiting = GaugeMetricFamily("headrace_engine_waiting", "Requests in its queue.", labels=["pool"])
        restarts = CounterMetricFamily("headrace_engine_restarts", "Restarts after it died.", labels=["pool"])
        for engine in self._engines:
            up.add_metric([engine.name], float(engine.is_ready))
            running.add_metric([engine.name], engine.load.running)
            waiting.add_metric([engine.name], engine.load.waiting)
            restarts.add_metric([engine.name], engine.restarts)
        yield from (up, running, waiting, restarts)
        yield GaugeMetricFamily("headrace_requests_in_flight", "Requests that run now.", value=self._active_requests())
        stats = self._connections.stats()
        yield GaugeMetricFamily("headrace_connections", "Open connections.", value=stats.open)
        closed = CounterMetricFamily(
            "headrace_connections_closed", "Connections that the gateway closed, by cause.", labels=["cause"]
        )
        for cause, count in stats.closed.items():
            closed.add_metric([cause], count)
        yield closed
