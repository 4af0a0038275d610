"""Engines of this process, pools with their replicas, models with their variants."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from routing.models import Model
from routing.pool import Pool

from ..engines.supervisor import SupervisedEngine

REPLICA = ("pool", "replica")
OPENNESS = {"closed": 0.0, "half_open": 0.5, "open": 1.0}


def of_engines(engines: Iterable[SupervisedEngine]) -> Iterable[Metric]:
    def gauge(name: str, documentation: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"headrace_engine_{name}", documentation, labels=["pool"])

    def counter(name: str, documentation: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"headrace_engine_{name}", documentation, labels=["pool"])

    up = gauge("up", "1 while the engine can answer.")
    running = gauge("running", "Requests that it works on.")
    waiting = gauge("waiting", "Requests in its queue.")
    restarts = counter("restarts", "Restarts after it died.")
    kv_cache = gauge("kv_cache_usage_ratio", "Of its KV cache, what is in use.")
    queries = counter("prefix_cache_queries", "Tokens of prompts that were looked for in its prefix cache.")
    hits = counter("prefix_cache_hits", "Those that were found there.")
    preemptions = counter("preemptions", "Requests put back into its queue: the KV cache was full.")
    drafts = counter("draft_tokens", "Tokens drafted by speculation.")
    accepted = counter("accepted_tokens", "Those that were accepted.")
    for engine in engines:
        label, load = [engine.name], engine.load
        up.add_metric(label, float(engine.is_ready))
        running.add_metric(label, load.running)
        waiting.add_metric(label, load.waiting)
        restarts.add_metric(label, engine.restarts)
        if load.kv_cache_usage is not None:
            kv_cache.add_metric(label, load.kv_cache_usage)
        queries.add_metric(label, load.prefix_queries)
        hits.add_metric(label, load.prefix_hits)
        preemptions.add_metric(label, load.preemptions)
        drafts.add_metric(label, load.draft_tokens)
        accepted.add_metric(label, load.accepted_tokens)
    yield from (up, running, waiting, restarts, kv_cache, queries, hits, preemptions, drafts, accepted)


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
