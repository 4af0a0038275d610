"""Traces as a real OTLP receiver gets them."""

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.engines.scripted import Script
from app.settings import MonitoringSettings

from .conftest import CHAT, Client, serving
from .fault_answers import Behaviour
from .fault_server import FaultServer, fault_server
from .otlp_receiver import SERVER, OtlpReceiver, Span, otlp_receiver
from .redis_server import free_port

CALLER = "00f067aa0ba902b7"
ASK = {**CHAT, "temperature": 0, "max_tokens": 50}
OK, ERROR = 0, 2
CLIENT = 3
numbers = iter(range(1, 1_000_000))

# The exporter's thread sends every second here, and what is left at the end.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    logging.getLogger("headrace").setLevel(logging.INFO)


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


def tracing_to(url: str, **options: Any) -> dict[str, Any]:
    return {"tracing": {"endpoint": url, **options}}


@asynccontextmanager
async def traced(receiver: OtlpReceiver, script: Script | None = None, **settings: Any) -> AsyncIterator[Client]:
    async with serving(script, monitoring=tracing_to(receiver.url), **settings) as client:
        yield client


def caller(is_sampled: bool = True) -> tuple[str, dict[str, str]]:
    """A trace of its own, as it comes with a request."""
    trace_id = f"{next(numbers):032x}"
    return trace_id, {"traceparent": f"00-{trace_id}-{CALLER}-{is_sampled:02x}"}


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def parent_of(spans: list[Span], name: str) -> str:
    """The name of the span above."""
    parent_id = next(span.parent_id for span in spans if span.name == name)
    return next((span.name for span in spans if span.span_id == parent_id), "caller" if parent_id == CALLER else "")


async def test_each_step_of_a_miss_and_of_a_hit_has_a_span(receiver: OtlpReceiver) -> None:
    async with traced(receiver, Script("One two three.", first_token_s=0.05)) as client:
        miss_id, headers = caller()
        await client.post(ASK, headers=headers)
        hit_id, headers = caller()
        await client.post(ASK, headers=headers)
        miss, hit = await receiver.spans_of(miss_id), await receiver.spans_of(hit_id)

    root = "POST /v1/chat/completions"
    assert names(miss)[0] == root
    assert set(names(miss)) == {root, "auth", "route", "key", "lookup", "limit", "dispatch", "chat demo", "reply"}
    assert set(names(hit)) >= {root, "auth", "key", "lookup", "limit", "reply"}
    assert "chat demo" not in names(hit)
    for spans in (miss, hit):
        assert parent_of(spans, root) == "caller"
        assert {parent_of(spans, name) for name in names(spans)[1:]} == {root}
        assert {span.service for span in spans} == {"headrace"}
        assert all(spans[0].began_ns <= span.began_ns <= span.ended_ns <= spans[0].ended_ns for span in spans)
    assert miss[0].kind == SERVER
    assert miss[0].attributes["http.response.status_code"] == 200
    assert miss[0].attributes["headrace.cache"] == "miss"
    assert hit[0].attributes["headrace.cache"] == "hit"
    assert hit[0].attributes["gen_ai.request.model"] == "demo"
    call = next(span for span in miss if span.name == "chat demo")
    assert call.kind == CLIENT
    assert call.ended_ns - call.began_ns >= 0.05e9
    told = call.attributes
    assert (told["gen_ai.operation.name"], told["gen_ai.provider.name"]) == ("chat", "vllm")
    assert (told["gen_ai.request.model"], told["gen_ai.request.max_tokens"]) == ("demo", 50)
    assert told["gen_ai.usage.output_tokens"] == miss[0].attributes["gen_ai.usage.output_tokens"] > 0
    assert "How are you?" not in str(miss) + str(hit)


async def test_stream_and_its_follower(receiver: OtlpReceiver) -> None:
    async with traced(receiver, Script("One two three four.", first_token_s=0.1, token_s=0.02)) as client:
        ids, answers = [], []
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                trace_id, headers = caller()
                ids.append(trace_id)
                answers.append(group.create_task(client.post({**ASK, "stream": True}, headers=headers)))
                await asyncio.sleep(0.03)
        leader, follower = await receiver.spans_of(ids[0], "chat demo"), await receiver.spans_of(ids[1])
    assert all(answer.result().text.endswith("data: [DONE]\n\n") for answer in answers)
    assert "chat demo" in names(leader)
    assert "flight" in names(follower)
    assert "chat demo" not in names(follower)
    call = next(span for span in leader if span.name == "chat demo")
    assert call.attributes["gen_ai.response.time_to_first_chunk"] >= 0.09
    reply = next(span for span in follower if span.name == "reply")
    assert reply.ended_ns - reply.began_ns >= 0.04e9  # the events after the first


async def test_context_goes_to_the_server_and_names_the_call_there(receiver: OtlpReceiver) -> None:
    async with fault_server() as upstream, far(receiver.url, upstream) as client:
        trace_id, headers = caller()
        await client.post(ASK, headers={**headers, "tracestate": "vendor=1"})
        spans = await receiver.spans_of(trace_id, "chat demo")
        call = next(span for span in spans if span.name == "chat demo")
        assert upstream.requests[0].header("traceparent") == f"00-{trace_id}-{call.span_id}-01"
        assert upstream.requests[0].header("tracestate") == "vendor=1"
        assert call.attributes["headrace.replica"] == upstream.url


@asynccontextmanager
async def far(url: str, upstream: FaultServer, **options: Any) -> AsyncIterator[Client]:
    pool = {"name": "demo", "engine": "remote", "remote": {"urls": [upstream.url]}, "max_retries": 0}
    async with serving(pools=[pool], engines={"": None}, monitoring=tracing_to(url, **options)) as client:  # type: ignore[dict-item]
        yield client


async def test_request_that_its_caller_does_not_trace_is_not_traced_and_its_context_passed_on(
    receiver: OtlpReceiver,
) -> None:
    async with fault_server() as upstream, far(receiver.url, upstream) as client:
        trace_id, headers = caller(is_sampled=False)
        await client.post(ASK, headers=headers)
        traced_id, more = caller()
        await client.post(ASK, headers=more)
        await receiver.spans_of(traced_id)
        assert upstream.requests[0].header("traceparent") == headers["traceparent"]
        assert receiver.of(trace_id) == []


async def test_failure_marks_the_call_and_the_request(receiver: OtlpReceiver) -> None:
    async with fault_server(Behaviour(status=500)) as upstream, far(receiver.url, upstream) as client:
        trace_id, headers = caller()
        assert (await client.post(ASK, headers=headers)).status_code == 502
        spans = await receiver.spans_of(trace_id, "chat demo")
    call = next(span for span in spans if span.name == "chat demo")
    assert (call.status, spans[0].status) == (ERROR, ERROR)
    assert spans[0].attributes["error.type"] == "engine_error"
    assert spans[0].attributes["http.response.status_code"] == 502


async def test_refusal_is_no_error_of_the_gateways(receiver: OtlpReceiver) -> None:
    async with traced(receiver) as client:
        trace_id, headers = caller()
        await client.post({**ASK, "model": "nobody"}, headers=headers)
        spans = await receiver.spans_of(trace_id)
    assert spans[0].status == OK
    assert spans[0].attributes["error.type"] == "model_not_found"


async def test_request_without_a_context_begins_a_trace_that_its_log_line_names(
    receiver: OtlpReceiver, capsys: pytest.CaptureFixture[str]
) -> None:
    async with traced(receiver) as client:
        await client.post(ASK)
        line = client.access_lines(capsys)[-1]
        spans = await receiver.spans_of(line["trace_id"])
    assert spans[0].parent_id == ""
    assert spans[0].attributes["headrace.request_id"] == line["request_id"]


async def test_log_line_names_the_callers_trace_where_nothing_is_traced(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_id, headers = caller()
    await client.post(ASK, headers=headers)
    await client.post(ASK, headers={"traceparent": "nonsense"})
    await client.post(ASK)
    traced, nonsense, plain = client.access_lines(capsys)
    assert traced["trace_id"] == trace_id
    assert "trace_id" not in nonsense | plain


async def test_share_of_requests_is_traced(receiver: OtlpReceiver) -> None:
    async with serving(monitoring=tracing_to(receiver.url, sample_ratio=0)) as client:
        before = len(receiver.spans)
        await client.post(ASK)
        trace_id, headers = caller()
        await client.post(ASK, headers=headers)  # its caller traces it
        await receiver.spans_of(trace_id)
        assert all(span.trace_id == trace_id for span in receiver.spans[before:])


async def test_spans_of_the_last_requests_are_sent_at_the_end(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    async with traced(receiver) as client:
        trace_id, headers = caller()
        await client.post(ASK, headers=headers)
        assert receiver.of(trace_id) == []
    assert len(receiver.of(trace_id)) >= 8


@pytest.mark.filterwarnings("ignore")  # of the exporter, about who is not there
async def test_receiver_that_is_not_there_costs_callers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with serving(monitoring=tracing_to(f"http://127.0.0.1:{free_port()}")) as client:
        for _ in range(20):
            assert (await client.post(ASK)).status_code == 200
        await asyncio.sleep(0.2)
        assert (await client.post(ASK)).status_code == 200


def test_without_an_endpoint_neither_spans_nor_exporter_are_loaded() -> None:
    # redis-py loads OpenTelemetry's API and SDK where they are installed.
    code = "import json, sys, app.gateway, app.cli; print(json.dumps([*sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(result.stdout)
    assert "app.gateway" in loaded
    assert [name for name in loaded if name.startswith(("app.tracing", "opentelemetry.exporter"))] == []


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://x/otlp/v1/traces", "https://x/otlp/v1/traces"),
        (None, None),
    ],
)
def test_endpoint_is_a_receivers_address_with_or_without_the_path(endpoint: str | None, url: str | None) -> None:
    assert MonitoringSettings.model_validate(tracing_to(endpoint)).tracing.traces_url == url  # type: ignore[arg-type]


def test_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("begins with http:// or https://")):
        MonitoringSettings.model_validate(tracing_to("collector:4317"))
