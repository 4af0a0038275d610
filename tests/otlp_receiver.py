"""An OTLP/HTTP receiver of traces, which keeps the spans that it gets."""

import asyncio
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SERVER = 2  # a kind of span, as OTLP numbers them


class Span(NamedTuple):
    """`kind` and `status` as OTLP numbers them; times in nanoseconds since the epoch."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    status: int
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    service: str


class OtlpReceiver:
    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []

    async def spans_of(self, trace_id: str, *others: str, timeout_s: float = 20.0) -> list[Span]:
        """Those of a trace, from the outermost to the last begun, once the gateway's request is there, which ends after
        its parts, and those called `others`, which may end after it."""
        async with asyncio.timeout(timeout_s):
            while not self._has(trace_id, others):
                await asyncio.sleep(0.02)
        return self.of(trace_id)

    def of(self, trace_id: str) -> list[Span]:
        spans = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(spans, key=lambda span: (span.began_ns, -span.ended_ns))

    def _has(self, trace_id: str, others: tuple[str, ...]) -> bool:
        spans = self.of(trace_id)
        return any(span.kind == SERVER for span in spans) and {span.name for span in spans}.issuperset(others)

    def take(self, body: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = attributes_of(of_resource.resource).get("service.name", "")
            for of_scope in of_resource.scope_spans:
                self.spans += (
                    Span(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.status.code,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        attributes_of(span),
                        service,
                    )
                    for span in of_scope.spans
                )


def attributes_of(holder: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes}


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                receiver.take(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
