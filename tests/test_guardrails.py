"""Guardrails by themselves: when a canary goes on, and when it goes."""

import random
import statistics
from typing import Any

import pytest

from routing.guardrails import SLOTS, Guardrail, GuardrailRules, State

CANARY, STABLE = True, False


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watch:
    """A guardrail, its clock, and the changes that it told of."""

    def __init__(self, **rules: Any) -> None:
        self.clock = Clock()
        self.changes: list[tuple[State, State]] = []
        limits = {"max_error_rate": 0.05, "max_ttft_ratio": 1.5, "step_s": 600.0, **rules}
        self.guardrail = Guardrail(
            GuardrailRules("new", **limits), self.clock, lambda old, new: self.changes.append((old, new))
        )

    def record(self, side: bool, requests: int, errors: int = 0, ttft_s: float | None = None) -> None:
        for number in range(requests):
            self.guardrail.record(side, number < errors, ttft_s)
        self.guardrail.evaluate()

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.guardrail.evaluate()

    def is_in(self, state: State) -> bool:
        return self.guardrail.state == state


# Errors


def test_canary_that_fails_more_often_is_rolled_back() -> None:
    watch = Watch()
    watch.record(STABLE, 450, errors=4)
    watch.record(CANARY, 50, errors=6)
    assert (watch.guardrail.state, watch.guardrail.share) == ("rolled_back", 0.0)
    assert watch.guardrail.reason == "error rate 0.12 over 0.05 in 50 requests, the stable variant's is 0.0089"
    assert watch.changes == [("watching", "rolled_back")]


def test_nothing_is_decided_on_too_few_requests() -> None:
    watch = Watch()
    watch.record(STABLE, 1000, ttft_s=0.1)
    watch.record(CANARY, 49, errors=49, ttft_s=10)
    assert watch.is_in("watching")
    watch.record(CANARY, 1)
    assert watch.is_in("rolled_back")


def test_errors_up_to_the_limit_are_allowed() -> None:
    watch = Watch()
    watch.record(STABLE, 1000)
    watch.record(CANARY, 100, errors=5)
    assert watch.is_in("watching")


@pytest.mark.parametrize("canary_share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_outage_behind_both_variants_is_not_the_canarys_fault(rate: float, canary_share: float) -> None:
    luck, blamed = random.Random(1), 0
    for _ in range(10):
        watch = Watch()
        for number in range(3000):
            is_error = number >= 1000 and luck.random() < rate
            watch.guardrail.record(luck.random() < canary_share, is_error, None)
            if number % 50 == 0:
                watch.guardrail.evaluate()
        blamed += watch.is_in("rolled_back")
    assert blamed <= 1  # it is a matter of chance


def test_canary_is_stopped_though_the_stable_variant_fails_too() -> None:
    watch = Watch()
    watch.record(STABLE, 450, errors=45)
    watch.record(CANARY, 200, errors=60)
    assert watch.is_in("rolled_back")


@pytest.mark.parametrize("stable", [1, 10, 49])
def test_canary_with_nearly_all_the_traffic_is_stopped(stable: int) -> None:
    watch = Watch()
    watch.record(STABLE, stable)
    watch.record(CANARY, 100, errors=12)
    assert watch.is_in("rolled_back")


def test_few_requests_of_the_stable_variant_are_compared_as_they_are() -> None:
    watch = Watch()
    watch.record(STABLE, 10, errors=10)
    watch.record(CANARY, 100, errors=99)
    assert watch.is_in("watching")


def test_without_stable_traffic_the_limit_alone_counts() -> None:
    watch = Watch()
    watch.record(CANARY, 50, errors=3)
    assert watch.is_in("rolled_back")
    assert watch.guardrail.reason == "error rate 0.06 over 0.05 in 50 requests, the stable variant had none"


def test_what_is_older_than_the_window_is_forgotten() -> None:
    watch = Watch(window_s=300.0)
    watch.record(CANARY, 49, errors=49, ttft_s=1)
    watch.wait(289)
    assert watch.guardrail.status().canary.requests == 49
    watch.wait(12)
    watch.record(CANARY, 49)
    status = watch.guardrail.status().canary
    assert (status.requests, status.errors, status.ttft_median_s) == (49, 0, None)
    assert watch.is_in("watching")
    watch.wait(1e6)
    assert watch.guardrail.status().canary.requests == 0


def test_window_slides_in_slots() -> None:
    watch = Watch(window_s=300.0)
    for _ in range(3 * SLOTS):
        watch.record(STABLE, 1)
        watch.wait(300 / SLOTS)
    assert watch.guardrail.status().stable.requests == SLOTS - 1  # and the one that is being filled


# Time to the first token


def test_slow_canary_is_rolled_back() -> None:
    watch = Watch()
    watch.record(STABLE, 50, ttft_s=0.4)
    watch.record(CANARY, 49, ttft_s=0.8)
    assert watch.is_in("watching")
    watch.record(CANARY, 1, ttft_s=0.8)
    assert watch.is_in("rolled_back")
    reason = watch.guardrail.reason
    assert reason is not None
    assert "0.795 s in 50 requests is 2 times the stable variant's of 0.397 s" in reason
    assert reason.endswith("over 1.5")


def test_slow_outliers_move_nothing() -> None:
    watch = Watch(max_error_rate=None)
    watch.record(STABLE, 50, ttft_s=0.4)
    watch.record(CANARY, 51, ttft_s=0.45)
    watch.record(CANARY, 1, ttft_s=3600)
    watch.record(CANARY, 20, ttft_s=1e9)
    assert watch.is_in("watching")


def test_both_sides_need_enough_first_tokens() -> None:
    watch = Watch()
    watch.record(STABLE, 500)  # whole answers: none had a first token to wait for
    watch.record(STABLE, 49, ttft_s=0.1)
    watch.record(CANARY, 500, ttft_s=1)
    assert watch.is_in("watching")
    watch.record(STABLE, 1, ttft_s=0.1)
    assert watch.is_in("rolled_back")


def test_median_is_within_a_hundredth() -> None:
    watch, luck = Watch(window_s=300.0), random.Random(1)
    times: list[float] = []
    for number in range(3000):
        times.append(luck.lognormvariate(-1, 1.5))
        watch.guardrail.record(CANARY, False, times[-1])
        watch.clock.now += 1
        if number % 50 == 0:
            counted = watch.guardrail.status().canary
            expected = statistics.median_low(times[-counted.requests :])
            assert counted.ttft_median_s == pytest.approx(expected, rel=0.01)


def test_impossible_times_are_counted_at_the_ends() -> None:
    watch = Watch()
    watch.record(CANARY, 1, ttft_s=-1)
    assert watch.guardrail.status().canary.ttft_median_s == pytest.approx(1e-4, rel=0.02)
    watch.guardrail.reset()
    watch.record(CANARY, 1, ttft_s=1e9)
    assert watch.guardrail.status().canary.ttft_median_s == pytest.approx(3600, rel=0.02)


# Steps


def test_canary_goes_up_step_by_step_and_is_promoted() -> None:
    watch = Watch(steps=(1, 5, 25, 100))
    shares = []
    while watch.is_in("stepping"):
        shares.append(watch.guardrail.share)
        watch.record(CANARY, 50)
        watch.wait(599)
        assert watch.guardrail.share == shares[-1]
        watch.wait(1)
    assert shares == [0.01, 0.05, 0.25, 1.0]
    assert (watch.guardrail.state, watch.guardrail.share) == ("promoted", 1.0)
    assert watch.changes == [("stepping", "stepping")] * 3 + [("stepping", "promoted")]
    assert watch.guardrail.generation == 3


def test_step_goes_on_until_enough_was_seen_in_it() -> None:
    watch = Watch(steps=(1, 100), window_s=10_000.0)
    watch.record(CANARY, 90)
    watch.wait(600)
    assert watch.guardrail.step == 1
    watch.record(CANARY, 49)  # those of the first step do not count
    watch.wait(6000)
    assert watch.is_in("stepping")
    watch.record(CANARY, 1)
    assert watch.is_in("promoted")


def test_canary_that_fails_in_a_step_goes_to_nothing_and_stays() -> None:
    watch = Watch(steps=(10, 50))
    watch.record(CANARY, 50)
    watch.wait(600)
    watch.record(CANARY, 50, errors=50)
    status = watch.guardrail.status()
    assert (status.state, status.share, status.step) == ("rolled_back", 0.0, 1)
    watch.wait(1e6)
    watch.record(CANARY, 1000)
    watch.wait(1e6)
    assert (watch.guardrail.state, watch.guardrail.share) == ("rolled_back", 0.0)


def test_promotion_is_the_last_word() -> None:
    watch = Watch(steps=(100,))
    watch.record(CANARY, 50)
    watch.wait(600)
    watch.record(CANARY, 500, errors=500)
    assert watch.is_in("promoted")


@pytest.mark.parametrize(("steps", "state", "share"), [((), "watching", None), ((5, 10), "stepping", 0.05)])
def test_reset_begins_anew(steps: tuple[float, ...], state: State, share: float | None) -> None:
    watch = Watch(steps=steps)
    watch.record(CANARY, 50, errors=50)
    generation = watch.guardrail.generation
    watch.guardrail.reset()
    watch.guardrail.evaluate()
    assert (watch.guardrail.state, watch.guardrail.share, watch.guardrail.reason) == (state, share, None)
    assert watch.guardrail.status().canary.requests == 0
    assert watch.guardrail.generation == generation + 1
    assert watch.changes[-1] == ("rolled_back", state)


@pytest.mark.parametrize(
    "rules",
    [
        {"steps": (5, 5)},
        {"steps": (0, 5)},
        {"steps": (50, 101)},
        {"steps": (5, 1)},
        {"min_requests": 0},
        {"window_s": 0},
    ],
)
def test_rules_that_cannot_be_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Watch(**rules)


def test_status_tells_both_sides() -> None:
    watch = Watch(steps=(5,))
    watch.record(CANARY, 40, errors=1, ttft_s=0.2)
    watch.record(STABLE, 10)
    watch.wait(7)
    status = watch.guardrail.status()
    assert (status.canary.requests, status.canary.errors, status.canary.error_rate) == (40, 1, 0.025)
    assert (status.stable.error_rate, status.stable.ttft_median_s) == (0.0, None)
    assert (status.state, status.step, status.share, status.since_s) == ("stepping", 0, 0.05, 7)
