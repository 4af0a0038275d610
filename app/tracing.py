"""Traces of requests (OpenTelemetry): a span for each step of the walk, sent by OTLP; the only module that imports it.

A request notes its steps in any case, for `Server-Timing`; their spans are made of that when it ends. Only the span of
the engine call lives while the call does, since the engine's own spans go below it. What a span is called and told
follows OpenTelemetry's semantic conventions for HTTP and generative AI. Never in a span: prompts, answers, tokens.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from routing.engine import Tally, Usage

from . import __version__
from .logs import Access

SHUTDOWN_S = 5.0
# OpenTelemetry's names for the operations, and for what a request asks (semantic conventions, generative AI).
OPERATIONS = {"chat.completions": "chat", "completions": "text_completion"}
ASKED = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
OF_OTHERS = "engine"  # the step whose span is the call's own

PROPAGATOR = TraceContextTextMapPropagator()

Headers = Mapping[bytes, bytes]


class Tracing:
    """`endpoint` is an OTLP/HTTP receiver's address for traces. Of requests without a trace context of their own, a
    `sample_ratio` is traced; of others, those that their callers trace. To be run as long as spans are to be sent."""

    def __init__(self, endpoint: str, sample_ratio: float, service_name: str, instance: str) -> None:
        resource = Resource.create(
            {"service.name": service_name, "service.version": __version__, "service.instance.id": instance}
        )
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("headrace", __version__)

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(self._provider.force_flush, int(SHUTDOWN_S * 1000))
            await asyncio.to_thread(self._provider.shutdown)

    def begin(self, access: Access, headers: Headers) -> None:
        """Trace a request to an operation from its start, unless it is not to be traced."""
        carrier = {
            name: headers[name.encode()].decode("latin-1") for name in PROPAGATOR.fields if name.encode() in headers
        }
        clock_ns = time.time_ns() - int(time.perf_counter() * 1e9)
        span = self._tracer.start_span(
            f"{access.method} {access.path}",
            PROPAGATOR.extract(carrier) if carrier else Context(),
            SpanKind.SERVER,
            {"http.request.method": access.method, "http.route": access.path, "url.path": access.path},
            start_time=clock_ns + int(access.started * 1e9),
        )
        if span.is_recording():
            access.trace = Trace(self._tracer, span, clock_ns)
            access.trace_id = f"{span.get_span_context().trace_id:032x}"


class Trace:
    """One request's. `clock_ns` is what has to be added to the monotonic clock for nanoseconds since the epoch: the
    same for all of its spans, so that none begins before the one above it."""

    __slots__ = ("_clock_ns", "_context", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span, clock_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._clock_ns = clock_ns
        self._context = set_span_in_context(span, Context())

    @contextmanager
    def calling(self, operation: str, model: str, body: Mapping[str, Any]) -> Iterator["EngineCall"]:
        """An engine call, which may outlive the request."""
        name = OPERATIONS.get(operation, operation)
        attributes = {"gen_ai.operation.name": name, "gen_ai.provider.name": "vllm", "gen_ai.request.model": model}
        for field, attribute in ASKED.items():
            value = body.get(field)
            if isinstance(value, int | float):
                attributes[attribute] = value  # type: ignore[assignment]
        began_ns = self._unix_ns(time.perf_counter())
        span = self._tracer.start_span(
            f"{name} {model}", self._context, SpanKind.CLIENT, attributes, start_time=began_ns
        )
        try:
            yield EngineCall(span)
        except BaseException as exc:
            note_error(span, type(exc).__qualname__)
            raise
        finally:
            span.end(self._unix_ns(time.perf_counter()))

    def end(self, access: Access) -> None:
        """Make the spans of the request's steps, and end its own."""
        ended = access.started + access.duration_s
        before = access.started
        for step, at in (*access.steps, ("reply", ended)):
            if step != OF_OTHERS:
                span = self._tracer.start_span(step, self._context, start_time=self._unix_ns(before))
                span.end(self._unix_ns(at))
            before = at
        self._span.set_attributes({name: value for name, value in told_of(access).items() if value is not None})
        if access.outcome == "error":
            note_error(self._span, access.error or "internal_error")
        elif access.error is not None:
            self._span.set_attribute("error.type", access.error)
        self._span.end(self._unix_ns(ended))

    def _unix_ns(self, monotonic_s: float) -> int:
        return self._clock_ns + int(monotonic_s * 1e9)


class EngineCall:
    """`headers` are the W3C trace context for whoever is asked."""

    __slots__ = ("_span", "headers")

    def __init__(self, span: Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        self.headers = tuple((name.encode(), value.encode()) for name, value in carrier.items())

    def tried(self, tally: Tally) -> None:
        """Note who was asked, whatever came of it."""
        told = {
            "headrace.replica": tally.replica,
            "headrace.retries": tally.retries,
            "headrace.fallback": tally.fallback,
            "headrace.queue_s": tally.queued_s,
            "gen_ai.response.time_to_first_chunk": None if tally.first_event_at is None else tally.engine_s,
        }
        self._span.set_attributes({name: value for name, value in told.items() if value is not None})

    def answered(self, usage: Usage | None) -> None:
        if usage is not None:
            told = {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
            self._span.set_attributes({name: value for name, value in told.items() if value is not None})


def told_of(access: Access) -> dict[str, Any]:
    usage = access.usage
    return {
        "http.response.status_code": access.status,
        "gen_ai.operation.name": None if access.operation is None else OPERATIONS.get(access.operation),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": access.model,
        "gen_ai.usage.input_tokens": None if usage is None else usage.prompt_tokens,
        "gen_ai.usage.output_tokens": None if usage is None else usage.completion_tokens,
        "headrace.request_id": access.request_id,
        "headrace.tenant": access.tenant,
        "headrace.variant": access.variant,
        "headrace.replica": access.replica,
        "headrace.cache": access.cache,
        "headrace.cache_detail": access.cache_detail,
        "headrace.outcome": access.outcome,
        "headrace.stream": access.stream,
    }


def note_error(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))
