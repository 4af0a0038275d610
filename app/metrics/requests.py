"""Requests, as counted when they end."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from .counts import Counts, Seconds

LABELS = ("operation", "model", "variant")


def of_requests(counts: Counts) -> Iterable[Metric]:
    requests = CounterMetricFamily(
        "headrace_requests",
        "Requests to an operation; outcome is ok, refused, error, or disconnected.",
        labels=[*LABELS, "outcome"],
    )
    tokens = CounterMetricFamily(
        "headrace_tokens",
        "Tokens by kind: those of prompts and completions that engines worked on, those of prompts that were in "
        "their KV caches, and those that no engine worked on, thanks to the cache or to singleflight.",
        labels=[*LABELS, "kind"],
    )
    fallbacks = CounterMetricFamily(
        "headrace_fallbacks", "Requests that another pool was asked for in the end.", labels=[*LABELS, "fallback"]
    )
    duration = HistogramMetricFamily(
        "headrace_request_duration_seconds", "From the request's headers to the end of its answer.", labels=LABELS
    )
    gateway = HistogramMetricFamily(
        "headrace_gateway_duration_seconds",
        "The gateway's own part of that, up to an answer's first byte: without the wait for the body, in the queue, "
        "and for the engine.",
        labels=LABELS,
    )
    ttft = HistogramMetricFamily(
        "headrace_time_to_first_token_seconds",
        "From the request's headers to the answer's first event, of streams.",
        labels=LABELS,
    )
    between_tokens = HistogramMetricFamily(
        "headrace_time_between_tokens_seconds", "Between an answer's events, of streams.", labels=LABELS
    )
    for names, of_label in counts.requests.items():
        label = [name or "" for name in names]
        for outcome, count in of_label.outcomes.items():
            requests.add_metric([*label, outcome], count)
        for name, count in of_label.fallbacks.items():
            fallbacks.add_metric([*label, name], count)
        for kind, count in of_label.tokens.items():
            tokens.add_metric([*label, kind], count)
        add_histogram(duration, label, of_label.duration)
        add_histogram(gateway, label, of_label.gateway)
        add_histogram(ttft, label, of_label.ttft)
        add_histogram(between_tokens, label, of_label.between_tokens)
    yield from (requests, fallbacks, tokens, duration, gateway, ttft, between_tokens)


def of_tenants(counts: Counts) -> Iterable[Metric]:
    requests = CounterMetricFamily(
        "headrace_tenant_requests",
        "Requests by tenant; outcome is that of headrace_requests, or limited. Beyond monitoring.max_tenants all are "
        "one, called other.",
        labels=["tenant", "outcome"],
    )
    tokens = CounterMetricFamily(
        "headrace_tenant_tokens", "Tokens of prompts and completions that engines worked on for it.", labels=["tenant"]
    )
    for name, tenant in counts.tenants.items():
        for outcome, count in tenant.outcomes.items():
            requests.add_metric([name, outcome], count)
        tokens.add_metric([name], tenant.tokens)
    yield from (requests, tokens)


def add_histogram(family: HistogramMetricFamily, label: Sequence[str], seconds: Seconds) -> None:
    bounds = [*map(str, map(float, seconds.bounds)), "+Inf"]
    family.add_metric(label, list(zip(bounds, accumulate(seconds.counts), strict=True)), seconds.total_s)
