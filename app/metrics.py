"""Everything that /metrics shows of our own; the only module that imports prometheus_client."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from auth.authenticator import Authenticator, Everyone
from auth.jwks import KeySet
from auth.limits import Limiter
from cache.flight import Flights
from cache.store import ResponseCache
from routing.engine import Usage
from routing.models import Model
from routing.pool import Pool

from .answers import Answers, Landed
from .connections import Connections
from .logs import Access
from .redis_link import RedisLink
from .reload import Reloading
from .routes import Routes
from .summed_metrics import Family

# In seconds; from a cache hit to a long generation.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

REPLICA = ("pool", "replica")
OPENNESS = {"closed": 0.0, "half_open": 0.5, "open": 1.0}
SAVED_BY = {"hit": "saved_by_cache", "collapsed": "saved_by_singleflight", "resumed": "saved_by_singleflight"}


class Seconds:
    """A histogram's counts. prometheus_client's own takes a lock and two microseconds at each observation; this one is
    for one event loop."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total_s += seconds

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [*map(str, map(float, BUCKETS)), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self.counts), strict=True)), self.total_s)


class Requests:
    """What is counted of one operation's requests for one variant of a model."""

    __slots__ = ("duration", "fallbacks", "outcomes", "tokens", "ttft")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.duration = Seconds()
        self.ttft = Seconds()


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = 0
        self.failed = 0
        self._by_label: defaultdict[tuple[str, str, str], Requests] = defaultdict(Requests)
        self._hits = 0
        self._hits_s = 0.0

    def record(self, access: Access, duration_s: float) -> None:
        """Count a request that has ended. A model that is not configured has no label of its own."""
        counts = self._by_label[access.operation or "", access.model or "", access.variant or ""]
        self.requests += 1
        self.failed += access.outcome == "error"
        counts.outcomes[access.outcome] += 1
        counts.duration.observe(duration_s)
        if access.fallback is not None:
            counts.fallbacks[access.fallback] += 1
        if access.first_token is not None:
            counts.ttft.observe(access.first_token - access.started)
        if access.cache == "hit":
            self._hits += 1
            self._hits_s += duration_s
        if access.usage is not None:
            self._count_tokens(counts.tokens, access.usage, SAVED_BY.get(access.cache or ""))

    def _count_tokens(self, tokens: "Counter[str]", usage: Usage, saved_by: str | None) -> None:
        if saved_by is not None:
            tokens[saved_by] += usage.prompt_tokens + usage.completion_tokens
            return
        tokens["prompt"] += usage.prompt_tokens
        tokens["completion"] += usage.completion_tokens
        tokens["cached"] += usage.cached_tokens or 0

    def hit_time_us(self) -> float | None:
        """Mean time of a request that was answered from the cache."""
        return round(self._hits_s / self._hits * 1e6, 1) if self._hits else None

    def saved_share(self) -> float | None:
        """Of all tokens of prompts and answers, how many no engine worked on."""
        totals: Counter[str] = Counter()
        for counts in self._by_label.values():
            totals.update(counts.tokens)
        saved = sum(totals[kind] for kind in SAVED_BY.values())
        everything = saved + totals["prompt"] + totals["completion"]
        return round(saved / everything, 4) if everything else None

    def show(self, parts: "Parts") -> None:
        """Add what is read when /metrics is, from the components' own counts."""
        self.registry.register(_Snapshot(parts, self._by_label))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def families(self) -> list[Family]:
        """The same, to be added to those of other workers."""
        return [
            Family(
                metric.name,
                metric.documentation,
                metric.type,
                [(sample.name, sample.labels, sample.value) for sample in metric.samples],
            )
            for metric in self.registry.collect()
        ]


@dataclass(frozen=True)
class Parts:
    """What has counts of its own."""

    routes: Routes
    connections: Connections
    active_requests: Callable[[], int]
    authenticator: Authenticator | Everyone
    limiter: Limiter
    redis: RedisLink | None
    key_set: KeySet | None
    answers: Answers
    cache: ResponseCache | None
    flights: Flights[Landed]
    reloading: Reloading | None


class _Told(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def text_of(families: Sequence[Family]) -> bytes:
    return generate_latest(_Told(families))  # type: ignore[arg-type,unused-ignore]  # older releases ask for a registry


def of_workers(expected: int, up: int) -> Family:
    name = "headrace_workers"
    samples = [(name, {"state": state}, float(count)) for state, count in (("expected", expected), ("up", up))]
    return Family(name, "Worker processes: how many there are to be, and how many answer.", "gauge", samples)


class _Snapshot(Collector):
    def __init__(self, parts: Parts, requests: Mapping[tuple[str, str, str], Requests]) -> None:
        self._parts = parts
        self._requests = requests

    def collect(self) -> Iterable[Metric]:
        yield from self._of_requests()
        yield from self._of_cache()
        yield from self._of_flights()
        yield from self._of_engines()
        yield from of_pools([unit.pool for unit in self._parts.routes.pools.values()])
        yield from of_models(self._parts.routes.models)
        yield from self._of_connections()
        yield from self._of_callers()
        yield from self._of_redis()
        yield from self._of_keys()
        yield from self._of_settings()

    def _of_requests(self) -> Iterable[Metric]:
        labels = ("operation", "model", "variant")
        requests = CounterMetricFamily(
            "headrace_requests",
            "Requests to an operation; outcome is ok, refused, error, or disconnected.",
            labels=[*labels, "outcome"],
        )
        tokens = CounterMetricFamily(
            "headrace_tokens",
            "Tokens by kind: those of prompts and completions that engines worked on, those of prompts that were in "
            "their KV caches, and those that no engine worked on, thanks to the cache or to singleflight.",
            labels=[*labels, "kind"],
        )
        fallbacks = CounterMetricFamily(
            "headrace_fallbacks", "Requests that another pool was asked for in the end.", labels=[*labels, "fallback"]
        )
        duration = HistogramMetricFamily(
            "headrace_request_duration_seconds", "From the request's headers to the end of its answer.", labels=labels
        )
        ttft = HistogramMetricFamily(
            "headrace_time_to_first_token_seconds",
            "From the request's headers to the answer's first event, of streams.",
            labels=labels,
        )
        for label, counts in self._requests.items():
            for outcome, count in counts.outcomes.items():
                requests.add_metric([*label, outcome], count)
            for name, count in counts.fallbacks.items():
                fallbacks.add_metric([*label, name], count)
            for kind, count in counts.tokens.items():
                tokens.add_metric([*label, kind], count)
            counts.duration.add_to(duration, label)
            counts.ttft.add_to(ttft, label)
        yield from (requests, fallbacks, tokens, duration, ttft)

    def _of_cache(self) -> Iterable[Metric]:
        answers = CounterMetricFamily(
            "headrace_cache_answers",
            "Requests by where their answer came from: hit (and the tier), miss, collapsed (a flight under way), "
            "resumed, or bypass.",
            labels=["outcome", "tier"],
        )
        by_outcome: Counter[tuple[str, str]] = Counter()
        for (outcome, detail), count in self._parts.answers.outcomes.items():
            by_outcome[outcome, detail if outcome == "hit" else ""] += count
        for label, count in by_outcome.items():
            answers.add_metric(label, count)
        yield answers
        if self._parts.cache is None:
            return
        lookups = CounterMetricFamily("headrace_cache_lookups", "Looks into a tier.", labels=["tier", "result"])
        stores = CounterMetricFamily("headrace_cache_stores", "Answers stored.", labels=["tier"])
        evictions = CounterMetricFamily("headrace_cache_evictions", "Answers that made room.", labels=["tier"])
        failures = CounterMetricFamily("headrace_cache_failures", "Uses of a tier that failed.", labels=["tier"])
        entries = GaugeMetricFamily("headrace_cache_entries", "Answers in a tier.", labels=["tier"])
        size = GaugeMetricFamily("headrace_cache_bytes", "What they take.", labels=["tier"])
        for tier in self._parts.cache.tiers:
            stats = tier.stats()
            lookups.add_metric([tier.name, "hit"], stats.hits)
            lookups.add_metric([tier.name, "miss"], stats.misses)
            stores.add_metric([tier.name], stats.stores)
            evictions.add_metric([tier.name], stats.evictions)
            failures.add_metric([tier.name], stats.failures)
            if stats.entries is not None:
                entries.add_metric([tier.name], stats.entries)
            if stats.size_bytes is not None:
                size.add_metric([tier.name], stats.size_bytes)
        yield from (lookups, stores, evictions, failures, entries, size)

    def _of_flights(self) -> Iterable[Metric]:
        stats = self._parts.flights.stats()
        yield CounterMetricFamily(
            "headrace_flights", "Engine calls, and flights of other replicas.", value=stats.flights
        )
        yield CounterMetricFamily("headrace_flight_followers", "Requests that joined a flight.", value=stats.followers)
        yield CounterMetricFamily("headrace_flight_resumptions", "Streams read on in.", value=stats.resumed)
        yield GaugeMetricFamily("headrace_flights_in_air", "Flights that are not over.", value=stats.in_flight)

    def _of_engines(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("headrace_engine_up", "1 while the engine can answer.", labels=["pool"])
        running = GaugeMetricFamily("headrace_engine_running", "Requests that it works on.", labels=["pool"])
        waiting = GaugeMetricFamily("headrace_engine_waiting", "Requests in its queue.", labels=["pool"])
        restarts = CounterMetricFamily("headrace_engine_restarts", "Restarts after it died.", labels=["pool"])
        for engine in self._parts.routes.supervised:
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

    def _of_settings(self) -> Iterable[Metric]:
        if self._parts.reloading is None:
            return
        status = self._parts.reloading.status()
        reloads = CounterMetricFamily(
            "headrace_config_reloads", "Settings read again; result is ok, or refused.", labels=["result"]
        )
        for result, count in status.results.items():
            reloads.add_metric([result], count)
        yield reloads
        yield GaugeMetricFamily(
            "headrace_config_loaded_timestamp_seconds",
            "When the settings in force were loaded, in UNIX time.",
            value=status.loaded_at,
        )


def of_pools(pools: Iterable[Pool]) -> Iterable[Metric]:
    ready = GaugeMetricFamily("headrace_replica_up", "1 while its own probes find it well.", labels=REPLICA)
    in_flight = GaugeMetricFamily("headrace_replica_in_flight", "Requests that it works on.", labels=REPLICA)
    latency = GaugeMetricFamily(
        "headrace_replica_latency_seconds",
        "What the balancer goes by: peak EWMA of the time to a stream's first token (stream), or to a whole answer.",
        labels=[*REPLICA, "of"],
    )
    breaker = GaugeMetricFamily(
        "headrace_replica_breaker_open", "0 closed, 0.5 half open, 1 open: it gets no requests.", labels=REPLICA
    )
    requests = CounterMetricFamily("headrace_replica_requests", "Requests sent to it.", labels=REPLICA)
    failures = CounterMetricFamily("headrace_replica_failures", "Requests at which it failed.", labels=REPLICA)
    retries = CounterMetricFamily(
        "headrace_pool_retries",
        "Requests sent to another replica; result is made, or refused for want of budget.",
        labels=["pool", "result"],
    )
    waited = CounterMetricFamily(
        "headrace_pool_waits_for_replica", "Requests that found no replica at first.", labels=["pool"]
    )
    spilled = CounterMetricFamily(
        "headrace_pool_spilled_over", "Requests handed over to another pool: its own queue was long.", labels=["pool"]
    )
    admitted = CounterMetricFamily("headrace_admission_admitted", "Requests let through.", labels=["pool"])
    refused = CounterMetricFamily(
        "headrace_admission_refused",
        "Requests refused, by cause: queue_full, shed (for one of higher priority), queue_timeout.",
        labels=["pool", "cause"],
    )
    running = GaugeMetricFamily("headrace_admission_in_flight", "Slots taken.", labels=["pool"])
    waiting = GaugeMetricFamily("headrace_admission_waiting", "Requests in the queue.", labels=["pool"])
    waiting_bytes = GaugeMetricFamily("headrace_admission_waiting_bytes", "What they take.", labels=["pool"])
    wait = CounterMetricFamily(
        "headrace_admission_wait_seconds", "Time in the queue, of those who got in.", labels=["pool"]
    )
    waits = CounterMetricFamily("headrace_admission_waits", "Those who waited and got in.", labels=["pool"])
    for pool in pools:
        stats = pool.stats()
        for replica in stats.replicas:
            label = [pool.name, replica.name]
            ready.add_metric(label, float(replica.is_ready))
            in_flight.add_metric(label, replica.in_flight)
            breaker.add_metric(label, OPENNESS[replica.state])
            requests.add_metric(label, replica.requests)
            failures.add_metric(label, replica.failures)
            for kind, seconds in (("stream", replica.ttft_s), ("answer", replica.answer_s)):
                if seconds is not None:
                    latency.add_metric([*label, kind], seconds)
        retries.add_metric([pool.name, "made"], stats.retries)
        retries.add_metric([pool.name, "refused"], stats.retries_refused)
        waited.add_metric([pool.name], stats.waited)
        spilled.add_metric([pool.name], stats.spilled)
        admission = stats.admission
        admitted.add_metric([pool.name], admission.admitted)
        for cause, count in admission.refused.items():
            refused.add_metric([pool.name, cause], count)
        running.add_metric([pool.name], admission.in_flight)
        waiting.add_metric([pool.name], admission.waiting)
        waiting_bytes.add_metric([pool.name], admission.waiting_bytes)
        wait.add_metric([pool.name], admission.waited_s)
        waits.add_metric([pool.name], admission.waited)
    yield from (ready, in_flight, latency, breaker, requests, failures, retries, waited, spilled)
    yield from (admitted, refused, running, waiting, waiting_bytes, wait, waits)


def of_models(models: Iterable[Model]) -> Iterable[Metric]:
    share = GaugeMetricFamily(
        "headrace_variant_share", "Of its model's requests, what falls to a variant.", labels=["model", "variant"]
    )
    rolled_back = GaugeMetricFamily(
        "headrace_canary_rolled_back", "1 while a guardrail keeps requests from it.", labels=["model", "variant"]
    )
    copies = CounterMetricFamily(
        "headrace_shadow_requests",
        "Copies for a shadow; outcome is answered, dropped, or the kind of error.",
        labels=["model", "variant", "outcome"],
    )
    compared = CounterMetricFamily(
        "headrace_shadow_compared", "Its answers that were compared.", labels=["model", "variant"]
    )
    identical = CounterMetricFamily(
        "headrace_shadow_identical", "Those with the same text.", labels=["model", "variant"]
    )
    difference = GaugeMetricFamily(
        "headrace_shadow_difference", "Mean difference of the texts, from 0 to 1.", labels=["model", "variant"]
    )
    for model in models:
        if model.has_variants:
            for name, value in model.split.weights().items():
                share.add_metric([model.name, name], value)
        if model.guardrail is not None:
            label = [model.name, model.guardrail.rules.variant]
            rolled_back.add_metric(label, float(model.guardrail.state == "rolled_back"))
        if model.shadow is not None:
            label = [model.name, model.shadow.variant.name]
            stats = model.shadow.stats()
            outcomes = {"answered": stats.answered, "dropped": stats.dropped, **stats.errors}
            for outcome, count in outcomes.items():
                copies.add_metric([*label, outcome], count)
            compared.add_metric(label, stats.compared)
            identical.add_metric(label, stats.identical)
            if stats.difference_mean is not None:
                difference.add_metric(label, stats.difference_mean)
    yield from (share, rolled_back, copies, compared, identical, difference)
