"""What real engines tell of themselves: in metrics, each of two in one process, and in traces."""

import secrets
from typing import Any

import pytest

from ..metrics_text import Samples
from ..otlp_receiver import OtlpReceiver
from .conftest import MODEL, QUESTION, Process, wait_for

CLIENT = 3  # a kind of span, as OTLP numbers them
LONG = [{"role": "user", "content": "Count the sheep on the hill. " * 40}]


def ask(gateway: Process, model: str, headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 8, **more}
    answer = gateway.http.post(
        "/v1/chat/completions", json=body, headers={"cache-control": "no-store", **(headers or {})}
    )
    assert answer.status_code == 200, answer.text
    return answer


def of_engine(gateway: Process, pool: str) -> dict[str, float]:
    samples = Samples.of(gateway.http.get("/metrics").text)
    return {
        sample.name.removeprefix("headrace_engine_"): sample.value
        for sample in samples
        if sample.name.startswith("headrace_engine_") and sample.labels == {"pool": pool}
    }


@pytest.mark.parametrize(("pool", "model"), [("local", MODEL), ("other", "second")])
def test_each_of_two_engines_tells_of_its_caches(gateway: Process, pool: str, model: str) -> None:
    other = {"local": "other", "other": "local"}[pool]
    before, others_before = of_engine(gateway, pool), of_engine(gateway, other)
    for _ in range(2):  # the second finds the prompt's blocks
        tokens = ask(gateway, model, messages=LONG).json()["usage"]["prompt_tokens"]
    wait_for(lambda: of_engine(gateway, pool)["running"] == 0, 5, "it still runs")
    after, others_after = of_engine(gateway, pool), of_engine(gateway, other)
    assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == 2 * tokens
    assert 0 < after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] < 2 * tokens
    assert others_after["prefix_cache_queries_total"] == others_before["prefix_cache_queries_total"]


def test_kv_cache_is_seen_in_use_while_an_answer_is_made(gateway: Process) -> None:
    body = {"model": MODEL, "messages": LONG, "max_tokens": 300, "stream": True, "ignore_eos": True}
    with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
        wait_for(lambda: is_at_work(of_engine(gateway, "local")), 10, "no KV cache is in use")
    wait_for(lambda: of_engine(gateway, "local")["running"] == 0, 5, "it still runs")


def is_at_work(told: dict[str, float]) -> bool:
    return told["running"] == 1 and 0 < told["kv_cache_usage_ratio"] < 1


def test_trace_goes_from_the_caller_into_the_engine(gateway: Process, receiver: OtlpReceiver) -> None:
    trace_id = secrets.token_hex(16)
    usage = ask(gateway, MODEL, {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}).json()["usage"]
    wait_for(lambda: {"llm_request", f"chat {MODEL}"} <= {span.name for span in receiver.of(trace_id)}, 20, "no span")
    wait_for(lambda: any(span.parent_id == "00f067aa0ba902b7" for span in receiver.of(trace_id)), 20, "no request")
    root, *spans = receiver.of(trace_id)
    assert (root.name, root.parent_id) == ("POST /v1/chat/completions", "00f067aa0ba902b7")
    call = next(span for span in spans if span.kind == CLIENT)
    assert call.parent_id == root.span_id
    engine = next(span for span in spans if span.name == "llm_request")
    assert engine.parent_id == call.span_id
    assert call.began_ns <= engine.ended_ns <= call.ended_ns + 1e9
    assert engine.attributes["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert call.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]


def test_what_callers_do_not_trace_is_not_traced(gateway: Process, receiver: OtlpReceiver) -> None:
    before = len(receiver.spans)
    ask(gateway, MODEL)
    trace_id = secrets.token_hex(16)
    ask(gateway, MODEL, {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"})
    wait_for(lambda: any(span.parent_id == "00f067aa0ba902b7" for span in receiver.of(trace_id)), 20, "no request")
    assert {span.trace_id for span in receiver.spans[before:]} == {trace_id}
