"""Shadows by themselves: what is copied, what becomes of it, and that nobody else notices."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from app.engines.scripted import Gate, Script, ScriptedEngine
from routing.engine import Answer, Call, Take, Tally
from routing.errors import EngineError, EngineTimeout, EngineUnavailable, RequestRejected, RoutingError
from routing.shadow import COMPARED_BYTES, COMPARED_WORDS, Shadow, difference
from routing.split import Variant

from .conftest import until

MESSAGES = [{"role": "user", "content": "How are you?"}]


def make_call(**body: Any) -> Call:
    return Call("chat.completions", "demo", {"model": "demo", "messages": MESSAGES, **body}, "req-1")


def document(*texts: str) -> bytes:
    choices = [{"index": index, "message": {"content": text}} for index, text in enumerate(texts)]
    return orjson.dumps({"choices": choices})


class Recorder:
    """Answers with a text, or raises; keeps the calls."""

    def __init__(self, result: str | Exception = "Fine.") -> None:
        self.result = result
        self.calls: list[Call] = []

    async def answer(self, call: Call) -> Answer:
        self.calls.append(call)
        if isinstance(self.result, Exception):
            raise self.result
        return Answer(document(self.result), None)

    async def stream(self, call: Call, take: Take) -> None:
        raise AssertionError("a copy is never streamed")


@asynccontextmanager
async def shadowing(engine: Any, share: float = 1.0, **options: Any) -> AsyncIterator[Shadow]:
    shadow = Shadow(Variant("new", "pool", 0, engine), share, **options)
    task = asyncio.create_task(shadow.run())
    await asyncio.sleep(0)
    try:
        yield shadow
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert shadow.stats().in_flight == 0


async def until_done(shadow: Shadow) -> None:
    await until(lambda: shadow.stats().in_flight == 0)


async def gated(text: str = "One two three.") -> tuple[ScriptedEngine, Gate]:
    gate = Gate()
    engine = ScriptedEngine(Script(text, gate=gate))
    await engine.start()
    return engine, gate


async def test_copy_is_whole_and_has_an_account_of_its_own() -> None:
    engine = Recorder()
    async with shadowing(engine) as shadow:
        call = make_call(stream=True, stream_options={"include_usage": True}, temperature=0.5)
        shadow.offer(b"k", call, None, 1.0)
        await until_done(shadow)
    (copy,) = engine.calls
    assert copy.body == {"model": "demo", "messages": MESSAGES, "temperature": 0.5}
    assert (copy.operation, copy.model) == (call.operation, call.model)
    assert copy.request_id != call.request_id
    assert copy.tally is not call.tally
    assert call.body["stream"] is True
    assert call.tally == Tally()


async def test_share_of_keys_is_copied_and_always_the_same() -> None:
    def sampled(engine: Recorder, name: str = "new") -> Shadow:
        return Shadow(Variant(name, "pool", 0, engine), 0.1)

    async def copied(shadow: Shadow) -> list[int]:
        numbers = []
        for number in range(5000):  # nothing runs: each one in the share is dropped, and counted
            dropped = shadow.stats().dropped
            shadow.offer(b"req-%d" % number, make_call(), None, 0.0)
            if shadow.stats().dropped > dropped:
                numbers.append(number)
        return numbers

    numbers = await copied(sampled(Recorder()))
    assert len(numbers) == pytest.approx(500, abs=75)
    assert await copied(sampled(Recorder())) == numbers
    assert await copied(sampled(Recorder(), "other")) != numbers


async def test_no_more_than_a_few_are_in_flight() -> None:
    engine, gate = await gated()
    async with shadowing(engine, max_in_flight=2) as shadow:
        for number in range(5):
            shadow.offer(b"%d" % number, make_call(), None, 0.0)
        stats = shadow.stats()
        assert (stats.sent, stats.dropped, stats.in_flight) == (2, 3, 2)
        gate.open()
        await until_done(shadow)
        shadow.offer(b"k", make_call(), None, 0.0)
        assert shadow.stats().in_flight == 1


async def test_offers_before_and_after_the_run_are_dropped() -> None:
    engine = Recorder()
    shadow = Shadow(Variant("new", "pool", 0, engine), 1.0)
    shadow.offer(b"k", make_call(), None, 0.0)
    task = asyncio.create_task(shadow.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    shadow.offer(b"k", make_call(), None, 0.0)
    assert (shadow.stats().dropped, shadow.stats().sent, engine.calls) == (2, 0, [])


@pytest.mark.parametrize("has_begun", [True, False])
async def test_copies_end_with_the_gateway(has_begun: bool) -> None:
    engine, gate = await gated()
    async with shadowing(engine) as shadow:
        shadow.offer(b"k", make_call(), None, 0.0)
        if has_begun:
            await gate.arrived.wait()
    assert engine.load.running == 0
    assert (shadow.stats().answered, shadow.stats().errors) == (0, {})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestRejected("no"), "rejected"),
        (EngineUnavailable("down", 1.0), "unavailable"),
        (EngineTimeout("total", 1.0), "timeout"),
        (EngineError("broken"), "engine"),
        (RoutingError("full"), "refused"),
        (ValueError("a bug"), "unexpected"),
    ],
)
async def test_errors_are_counted_by_kind_and_stop_nothing(error: Exception, kind: str) -> None:
    engine = Recorder(error)
    async with shadowing(engine) as shadow:
        for _ in range(2):
            shadow.offer(b"k", make_call(), document("Fine."), 1.0)
        await until_done(shadow)
        engine.result = "Fine."
        shadow.offer(b"k", make_call(), document("Fine."), 1.0)
        await until_done(shadow)
        stats = shadow.stats()
        assert (stats.errors, stats.answered, stats.compared) == ({kind: 2}, 1, 1)


async def test_slow_copy_times_out() -> None:
    engine, _ = await gated()
    async with shadowing(engine, timeout_s=0.01) as shadow:
        shadow.offer(b"k", make_call(), None, 0.0)
        await until_done(shadow)
        assert shadow.stats().errors == {"timeout": 1}
        assert engine.load.running == 0


async def test_answers_and_latencies_are_compared() -> None:
    times = iter([10.0, 13.0, 20.0, 21.0, 30.0, 31.0])
    async with shadowing(Recorder("Fine, and you?"), clock=lambda: next(times)) as shadow:
        for answer, latency_s in (
            (document("Fine, and you?"), 1.0),
            (document("Something else"), 2.0),
            (None, 3.0),
        ):
            shadow.offer(b"k", make_call(), answer, latency_s)
            await until_done(shadow)
        stats = shadow.stats()
    assert (stats.answered, stats.compared, stats.identical, stats.difference_mean) == (3, 2, 1, 0.5)
    assert stats.latency_mean_s == pytest.approx(5 / 3)
    assert stats.primary_latency_mean_s == 2.0


def test_without_answers_there_are_no_means() -> None:
    stats = Shadow(Variant("new", "pool", 0, Recorder()), 1.0).stats()
    assert (stats.difference_mean, stats.latency_mean_s, stats.primary_latency_mean_s) == (None, None, None)


# How far answers are apart


@pytest.mark.parametrize(
    ("text", "other", "expected"),
    [
        ("", "", 0.0),
        ("Yes.", "Yes.", 0.0),
        ("Yes.", "No.", 1.0),
        ("Yes.", "", 1.0),
        ("one two", " one\ntwo ", 0.0),
        ("a b c d", "a b c e", 0.25),
        ("a b c d e f g", "x a b c d e f g", 0.2),
        ("a b", "b a", 1.0),
        ("今日は晴れ", "今日は雨だ", 0.4),
    ],
)
def test_difference_of_texts(text: str, other: str, expected: float) -> None:
    assert difference(document(text), document(other)) == pytest.approx(expected)
    assert difference(document(other), document(text)) == pytest.approx(expected)


def test_difference_is_a_mean_over_choices_and_a_missing_one_counts() -> None:
    assert difference(document("a", "b"), document("a", "c")) == 0.5
    assert difference(document("a", "b"), document("a")) == 0.5


def test_choices_are_compared_by_index() -> None:
    choices = [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]
    assert difference(orjson.dumps({"choices": choices}), document("a", "b")) == 0.0


def test_tool_calls_are_compared() -> None:
    def calling(arguments: str) -> bytes:
        message = {"content": None, "tool_calls": [{"function": {"name": "find", "arguments": arguments}}]}
        return orjson.dumps({"choices": [{"index": 0, "message": message}]})

    assert difference(calling("1"), calling("1")) == 0.0
    assert difference(calling("1"), calling("2")) == 0.5


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"nothing",
        b'{"choices": []}',
        b'{"choices": [{}]}',
        b'{"choices": [7]}',
        b'{"choices": [{"index": 0, "message": {"content": [1]}}]}',
        b'{"choices": [{"index": 0, "message": {"content": "", "tool_calls": [{}]}}]}',
        b'{"data": [{"embedding": [1]}]}',
        document("a" * COMPARED_BYTES),
    ],
)
def test_what_cannot_be_compared_is_not(answer: bytes) -> None:
    assert difference(answer, document("Fine.")) is None
    assert difference(document("Fine."), answer) is None


def test_comparison_looks_at_the_first_words_of_long_answers() -> None:
    luck = random.Random(1)
    words = [str(luck.random()) for _ in range(COMPARED_WORDS)]
    same = " ".join(words)
    assert difference(document(f"{same} and so on"), document(f"{same} or not")) == 0.0
    assert difference(document(*["x y"] * 2 * COMPARED_WORDS), document(*["x z"] * 2 * COMPARED_WORDS)) == 0.0
