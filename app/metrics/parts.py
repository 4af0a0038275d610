"""What components count of themselves, read when /metrics is."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from auth.authenticator import Authenticator, Everyone
from auth.jwks import KeySet
from auth.limits import Limiter
from cache.flight import Flights
from cache.store import ResponseCache

from ..answers import Answers, Landed
from ..connections import Connections
from ..redis_link import RedisLink
from ..reload import Reloading
from ..routes import Routes
from .routing import of_engines, of_models, of_pools


@dataclass(frozen=True)
class Parts:
    """What has counts of its own."""

    routes: Routes
    connections: Connections
    active_requests: Callable[[], int]
    is_ready: Callable[[], bool]
    authenticator: Authenticator | Everyone
    limiter: Limiter
    redis: RedisLink | None
    key_set: KeySet | None
    answers: Answers
    cache: ResponseCache | None
    flights: Flights[Landed]
    reloading: Reloading | None


def families_of(parts: Parts) -> Iterable[Metric]:
    yield from of_cache(parts)
    yield from of_flights(parts)
    yield from of_engines(parts.routes.supervised)
    yield from of_pools([unit.pool for unit in parts.routes.pools.values()])
    yield from of_models(parts.routes.models)
    yield from of_connections(parts)
    yield from of_callers(parts)
    yield from of_redis(parts)
    yield from of_keys(parts)
    yield from of_settings(parts)


def of_cache(parts: Parts) -> Iterable[Metric]:
    answers = CounterMetricFamily(
        "headrace_cache_answers",
        "Requests by where their answer came from: hit (and the tier), miss, collapsed (a flight under way), "
        "resumed, or bypass.",
        labels=["outcome", "tier"],
    )
    by_outcome: Counter[tuple[str, str]] = Counter()
    for (outcome, detail), count in parts.answers.outcomes.items():
        by_outcome[outcome, detail if outcome == "hit" else ""] += count
    for label, count in by_outcome.items():
        answers.add_metric(label, count)
    yield answers
    if parts.cache is None:
        return
    lookups = CounterMetricFamily("headrace_cache_lookups", "Looks into a tier.", labels=["tier", "result"])
    stores = CounterMetricFamily("headrace_cache_stores", "Answers stored.", labels=["tier"])
    evictions = CounterMetricFamily("headrace_cache_evictions", "Answers that made room.", labels=["tier"])
    failures = CounterMetricFamily("headrace_cache_failures", "Uses of a tier that failed.", labels=["tier"])
    entries = GaugeMetricFamily("headrace_cache_entries", "Answers in a tier.", labels=["tier"])
    size = GaugeMetricFamily("headrace_cache_bytes", "What they take.", labels=["tier"])
    for tier in parts.cache.tiers:
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


def of_flights(parts: Parts) -> Iterable[Metric]:
    stats = parts.flights.stats()
    yield CounterMetricFamily("headrace_flights", "Engine calls, and flights of other replicas.", value=stats.flights)
    yield CounterMetricFamily("headrace_flight_followers", "Requests that joined a flight.", value=stats.followers)
    yield CounterMetricFamily("headrace_flight_resumptions", "Streams read on in.", value=stats.resumed)
    yield GaugeMetricFamily("headrace_flights_in_air", "Flights that are not over.", value=stats.in_flight)


def of_connections(parts: Parts) -> Iterable[Metric]:
    in_flight = parts.active_requests()
    yield GaugeMetricFamily("headrace_ready", "1 while requests can be answered.", value=float(parts.is_ready()))
    yield GaugeMetricFamily("headrace_requests_in_flight", "Requests that run now.", value=in_flight)
    stats = parts.connections.stats()
    yield GaugeMetricFamily("headrace_connections", "Open connections.", value=stats.open)
    closed = CounterMetricFamily(
        "headrace_connections_closed", "Connections that the gateway closed, by cause.", labels=["cause"]
    )
    for cause, count in stats.closed.items():
        closed.add_metric([cause], count)
    yield closed


def of_callers(parts: Parts) -> Iterable[Metric]:
    results = CounterMetricFamily(
        "headrace_authentications",
        "Looks at who is calling; result is ok, missing_token, invalid_token, expired_token, or unavailable.",
        labels=["result"],
    )
    for result, count in parts.authenticator.results.items():
        results.add_metric([result], count)
    decisions = CounterMetricFamily(
        "headrace_limiter_decisions",
        "Requests of callers who have limits; decision is allowed, or the limit reached: requests, tokens, "
        "concurrent; by is shared (Redis) or local (this replica alone).",
        labels=["decision", "by"],
    )
    for (decision, by), count in parts.limiter.decisions.items():
        decisions.add_metric([decision, by], count)
    yield from (results, decisions)
    running = parts.limiter.running
    yield GaugeMetricFamily("headrace_limiter_slots", "Slots of concurrent requests in use here.", value=running)


def of_redis(parts: Parts) -> Iterable[Metric]:
    if parts.redis is None:
        return
    status = parts.redis.status()
    yield GaugeMetricFamily("headrace_redis_up", "1 while Redis can be relied on.", value=float(status.is_up))
    yield CounterMetricFamily(
        "headrace_redis_failures", "Uses of Redis that failed or took too long.", value=status.failures
    )


def of_keys(parts: Parts) -> Iterable[Metric]:
    if parts.key_set is None:
        return
    status = parts.key_set.status()
    yield GaugeMetricFamily("headrace_jwks_keys", "Keys that tokens are verified with.", value=status.keys)
    if status.age_s is not None:
        yield GaugeMetricFamily("headrace_jwks_age_seconds", "Since the keys were fetched.", value=status.age_s)
    refreshes = CounterMetricFamily("headrace_jwks_refreshes", "Fetches of the keys.", labels=["result"])
    refreshes.add_metric(["ok"], status.refreshes - status.failures)
    refreshes.add_metric(["error"], status.failures)
    yield refreshes


def of_settings(parts: Parts) -> Iterable[Metric]:
    if parts.reloading is None:
        return
    status = parts.reloading.status()
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
