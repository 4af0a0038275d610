"""Replicas by themselves: what is counted, what an answer's time and outcome change, and who is to be asked."""

import asyncio
import random
from math import e

import pytest

from routing.breaker import Breaker
from routing.engine import Answer, Call, Take
from routing.errors import EngineUnavailable
from routing.replica import MAX_REST_S, PeakEwma, Replica


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Silent:
    """A backend that is there and is not asked."""

    def __init__(self, name: str = "a") -> None:
        self.name = name
        self.is_ready = True

    def unavailable(self) -> EngineUnavailable:
        return EngineUnavailable("It is not ready.", 7.0)

    async def answer(self, call: Call) -> Answer:
        raise NotImplementedError

    async def stream(self, call: Call, take: Take) -> None:
        raise NotImplementedError


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replica(clock: Clock) -> Replica:
    return Replica(Silent(), Breaker(failures=2, clock=clock), decay_s=10.0, clock=clock)


def answer(replica: Replica, clock: Clock, seconds: float, streams: bool = False) -> None:
    with replica.acquire(streams) as lease:
        clock.now += seconds
        if streams:
            lease.first_token()
        lease.succeed()


def fail(replica: Replica) -> None:
    with replica.acquire(False) as lease:
        lease.fail()


# Peak EWMA


def test_peak_replaces_the_estimate_at_once(clock: Clock) -> None:
    ewma = PeakEwma(10.0, clock)
    assert ewma.value is None
    for seconds in (0.1, 0.5, 3.0):
        ewma.observe(seconds)
        assert ewma.value == seconds


def test_estimate_falls_slowly_towards_what_is_observed(clock: Clock) -> None:
    ewma = PeakEwma(10.0, clock)
    ewma.observe(3.0)
    clock.now += 10.0
    ewma.observe(1.0)
    assert ewma.value == pytest.approx(3.0 / e + 1.0 * (1 - 1 / e))
    for _ in range(100):
        clock.now += 1.0
        ewma.observe(1.0)
    assert ewma.value == pytest.approx(1.0, rel=0.01)


def test_estimate_falls_while_nothing_is_observed_whether_or_not_it_is_looked_at(clock: Clock) -> None:
    watched, unwatched = PeakEwma(10.0, clock), PeakEwma(10.0, clock)
    for ewma in (watched, unwatched):
        ewma.observe(2.0)
    for _ in range(10):
        clock.now += 1.0
        assert watched.value is not None
    assert watched.value == unwatched.value == pytest.approx(2.0 / e)
    for ewma in (watched, unwatched):
        ewma.observe(1.0)  # above what is left
    assert watched.value == unwatched.value == 1.0


# Leases


def test_lease_counts_until_it_is_left_and_only_once(replica: Replica) -> None:
    first, second = replica.acquire(False), replica.acquire(True)
    assert replica.in_flight == 2
    with first:
        first.succeed()
        assert replica.in_flight == 2
    first.release()
    with first:
        pass
    assert replica.in_flight == 1
    second.release()
    second.fail()
    second.first_token()
    second.release()
    assert replica.in_flight == 0
    assert replica.stats().failures == 0


def test_lease_is_left_by_an_exception_too(replica: Replica) -> None:
    with pytest.raises(ValueError, match="broken"), replica.acquire(False):
        raise ValueError("broken")
    assert replica.in_flight == 0


async def test_in_flight_is_exact_when_requests_are_cancelled_anywhere(replica: Replica) -> None:
    async def ask(streams: bool, steps: int) -> None:
        with replica.acquire(streams) as lease:
            for _ in range(steps):
                await asyncio.sleep(0)
                lease.first_token()
            lease.succeed()

    chance = random.Random(1)
    for _ in range(50):
        tasks = [asyncio.create_task(ask(chance.random() < 0.5, chance.randrange(6))) for _ in range(20)]
        for _ in range(3):
            await asyncio.sleep(0)
            for task in chance.sample(tasks, 5):
                task.cancel()
        await asyncio.wait(tasks)
        assert replica.in_flight == 0
    assert replica.stats().requests == 1000
    assert replica.breaker.state == "closed"


def test_what_was_told_last_counts(replica: Replica) -> None:
    for _ in range(5):
        with replica.acquire(False) as lease:
            lease.fail()
            lease.succeed()
        with replica.acquire(False) as lease:
            lease.fail()
            lease.ignore()
    assert (replica.breaker.state, replica.stats().failures) == ("closed", 0)
    for _ in range(2):
        with replica.acquire(False) as lease:
            lease.succeed()
            lease.fail()
    assert (replica.breaker.state, replica.stats().failures) == ("open", 2)


def test_cancelled_request_says_nothing_about_the_replica(replica: Replica, clock: Clock) -> None:
    fail(replica)
    with replica.acquire(False):
        clock.now += 50.0
    assert replica.latency(False) is None
    assert replica.breaker.state == "closed"
    fail(replica)
    assert replica.breaker.state == "open"  # two in a row still


# Probes


def test_lease_is_the_probe_of_a_half_open_breaker(replica: Replica, clock: Clock) -> None:
    fail(replica)
    fail(replica)
    assert not replica.is_available
    clock.now += 5.0
    assert replica.is_available
    with replica.acquire(False) as probe:
        assert not replica.is_available
        with replica.acquire(False) as other:  # whoever sent it all the same
            other.succeed()
        assert replica.breaker.state == "half_open"
        probe.succeed()
    assert (replica.breaker.state, replica.is_available) == ("closed", True)


def test_cancelled_probe_makes_room_for_another(replica: Replica, clock: Clock) -> None:
    fail(replica)
    fail(replica)
    clock.now += 5.0
    replica.acquire(True).release()
    assert (replica.breaker.state, replica.is_available) == ("half_open", True)


def test_first_token_of_a_probe_is_proof_enough(replica: Replica, clock: Clock) -> None:
    fail(replica)
    fail(replica)
    clock.now += 5.0
    with replica.acquire(True) as probe:
        probe.first_token()
        assert (replica.breaker.state, replica.is_available) == ("closed", True)
        probe.fail()  # is one failure of a closed breaker
    assert replica.breaker.state == "closed"
    fail(replica)
    assert replica.breaker.state == "open"


def test_late_failures_do_not_open_a_breaker_that_has_closed_again(replica: Replica, clock: Clock) -> None:
    late = [replica.acquire(False) for _ in range(10)]
    fail(replica)
    fail(replica)
    clock.now += 5.0
    answer(replica, clock, 0.1)
    for lease in late:
        lease.fail()
        lease.release()
    assert replica.breaker.state == "closed"
    assert replica.stats().failures == 12


# Latency and cost


def test_streams_and_whole_answers_are_timed_apart(replica: Replica, clock: Clock) -> None:
    with replica.acquire(True) as lease:
        clock.now += 0.2
        lease.first_token()
        clock.now += 30.0
        lease.first_token()  # the first one is
        lease.succeed()
    assert replica.latency(False) is None
    assert replica.latency(True) == pytest.approx(0.2 / e**3)
    answer(replica, clock, 4.0)
    assert replica.latency(False) == pytest.approx(4.0)


def test_cost_grows_with_latency_and_with_requests_in_flight(replica: Replica, clock: Clock) -> None:
    answer(replica, clock, 2.0)
    assert replica.cost(False) == pytest.approx(2.0)
    with replica.acquire(False), replica.acquire(True):
        assert replica.cost(False) == pytest.approx(6.0)
    assert replica.cost(True) == 0.0


def test_unknown_replica_costs_nothing_until_it_is_tried_and_much_until_it_has_answered(
    replica: Replica, clock: Clock
) -> None:
    assert replica.cost(True) == 0.0
    with replica.acquire(True) as lease:
        one = replica.cost(True)
        with replica.acquire(True):
            assert replica.cost(True) > one > 3600.0
        lease.first_token()
    assert replica.cost(True) == 0.0


def test_replica_that_hangs_does_not_look_better_with_time(replica: Replica, clock: Clock) -> None:
    answer(replica, clock, 2.0)
    with replica.acquire(False):
        clock.now += 60.0
        assert replica.cost(False) == pytest.approx(4.0)
    assert replica.cost(False) < 0.01  # idle, it gets another chance


def test_streams_under_way_do_not_keep_an_old_estimate(replica: Replica, clock: Clock) -> None:
    with replica.acquire(True) as lease:
        clock.now += 20.0
        lease.first_token()
        assert replica.cost(True) == pytest.approx(40.0)
        clock.now += 60.0
        assert replica.cost(True) < 0.1


# Being asked


def test_available_when_ready_and_neither_open_nor_resting(clock: Clock) -> None:
    backend = Silent()
    replica = Replica(backend, Breaker(clock=clock), clock=clock)
    assert replica.is_available
    backend.is_ready = False
    assert not replica.is_available
    reason = replica.unavailable()
    assert reason is not None
    assert reason.retry_after_s == 7.0
    backend.is_ready = True
    assert replica.unavailable() is None
    replica.rest(2.0)
    assert not replica.is_available
    clock.now += 2.0
    assert replica.is_available


def test_rest_is_bounded_and_not_cut_short(replica: Replica, clock: Clock) -> None:
    replica.rest(3600.0)
    replica.rest(0.0)
    replica.rest(-5.0)
    assert replica.stats().resting_s == MAX_REST_S
    clock.now += MAX_REST_S
    assert (replica.is_available, replica.stats().resting_s) == (True, 0.0)


def test_stats_tell_how_it_is(replica: Replica, clock: Clock) -> None:
    answer(replica, clock, 0.5, streams=True)
    fail(replica)
    lease = replica.acquire(False)
    replica.rest(1.0)
    stats = replica.stats()
    assert (stats.name, stats.is_ready, stats.state, stats.in_flight) == ("a", True, "closed", 1)
    assert (stats.ttft_s, stats.answer_s) == (pytest.approx(0.5), None)
    assert (stats.requests, stats.failures, stats.resting_s) == (3, 1, 1.0)
    lease.release()
