"""The breaker by itself: when it opens, whom it lets through then, and what closes it."""

import pytest

from routing.breaker import Breaker, State


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(clock: Clock, **options: float) -> Breaker:
    breaker = Breaker(failures=1, clock=clock, **options)  # type: ignore[arg-type]
    breaker.fail(breaker.begin())
    assert breaker.state == "open"
    return breaker


def half_opened(clock: Clock) -> Breaker:
    breaker = opened(clock)
    clock.now += 5.0
    assert breaker.state == "half_open"
    return breaker


# Opening


def test_opens_after_failures_in_a_row(clock: Clock) -> None:
    breaker = Breaker(failures=3, clock=clock)
    for has_failed in (True, True, False, True, True):
        assert not breaker.begin()
        breaker.fail(False) if has_failed else breaker.succeed(False)
    assert (breaker.state, breaker.allows) == ("closed", True)
    breaker.fail(False)
    assert (breaker.state, breaker.allows, breaker.begin()) == ("open", False, False)


def test_neutral_results_neither_count_nor_end_a_row(clock: Clock) -> None:
    breaker = Breaker(failures=3, error_rate=0.5, min_requests=4, clock=clock)
    breaker.fail(False)
    breaker.fail(False)
    for _ in range(100):
        breaker.ignore(False)
    assert breaker.state == "closed"
    breaker.fail(False)
    assert breaker.state == "open"


def test_opens_at_a_share_of_errors_of_enough_requests(clock: Clock) -> None:
    breaker = Breaker(failures=5, error_rate=0.5, min_requests=20, clock=clock)
    for _ in range(9):
        breaker.succeed(False)
        breaker.fail(False)
    assert breaker.state == "closed"  # half of them failed, but there are 18
    breaker.succeed(False)
    breaker.fail(False)
    assert breaker.state == "open"


def test_share_below_the_rate_does_not_open(clock: Clock) -> None:
    breaker = Breaker(error_rate=0.5, clock=clock)
    for _ in range(1000):
        breaker.succeed(False)
        breaker.succeed(False)
        breaker.fail(False)
    assert breaker.state == "closed"


@pytest.mark.parametrize(("later_s", "state"), [(20.0, "open"), (34.0, "closed")])
def test_errors_outside_the_window_are_forgotten(clock: Clock, later_s: float, state: State) -> None:
    breaker = Breaker(failures=100, error_rate=0.5, min_requests=20, window_s=30.0, clock=clock)
    for _ in range(19):
        breaker.fail(False)
    clock.now += later_s
    breaker.succeed(False)
    breaker.fail(False)
    assert breaker.state == state


# Half open


def test_one_probe_at_a_time_when_half_open(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += 4.9
    assert not breaker.begin()
    clock.now += 0.1
    assert (breaker.state, breaker.allows) == ("half_open", True)
    assert [breaker.begin() for _ in range(100)] == [True] + [False] * 99
    assert (breaker.state, breaker.allows) == ("half_open", False)
    clock.now += 1000.0
    assert not breaker.allows  # however long it takes


def test_successful_probe_closes(clock: Clock) -> None:
    breaker = half_opened(clock)
    breaker.succeed(breaker.begin())
    assert (breaker.state, breaker.allows, breaker.begin()) == ("closed", True, False)


def test_failed_probe_opens_for_twice_as_long_up_to_a_bound(clock: Clock) -> None:
    breaker = opened(clock, open_s=5.0, max_open_s=60.0)
    waits = []
    for _ in range(6):
        began = clock.now
        while not breaker.allows:
            clock.now += 1.0
        waits.append(clock.now - began)
        breaker.fail(breaker.begin())
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    clock.now += 60.0
    breaker.succeed(breaker.begin())
    breaker.fail(False)
    clock.now += 5.0
    assert breaker.allows


def test_neutral_probe_gives_its_place_back(clock: Clock) -> None:
    breaker = half_opened(clock)
    for _ in range(10):
        probe = breaker.begin()
        assert (probe, breaker.allows) == (True, False)
        breaker.ignore(probe)
        assert (breaker.state, breaker.allows) == ("half_open", True)


def test_results_of_requests_from_before_it_opened_change_nothing(clock: Clock) -> None:
    breaker = opened(clock)
    breaker.succeed(False)
    assert breaker.state == "open"
    clock.now += 5.0
    assert breaker.begin()
    for tell in (breaker.succeed, breaker.fail, breaker.ignore):
        tell(False)
        assert (breaker.state, breaker.allows) == ("half_open", False)


def test_probe_is_told_once(clock: Clock) -> None:
    breaker = half_opened(clock)
    probe = breaker.begin()
    breaker.succeed(probe)
    breaker.fail(probe)
    assert breaker.state == "closed"


def test_closed_again_it_remembers_nothing(clock: Clock) -> None:
    breaker = Breaker(failures=3, error_rate=0.5, min_requests=4, clock=clock)
    for _ in range(3):
        breaker.fail(False)
    clock.now += 5.0
    breaker.succeed(breaker.begin())
    breaker.fail(False)
    breaker.fail(False)
    assert breaker.state == "closed"


def test_looking_changes_nothing(clock: Clock) -> None:
    breaker = half_opened(clock)
    assert all(breaker.allows and breaker.state == "half_open" for _ in range(10))
    assert breaker.changes == {"open": 1}


def test_changes_are_counted_and_told(clock: Clock) -> None:
    told: list[State] = []
    breaker = Breaker(failures=1, clock=clock, on_change=told.append)
    breaker.fail(False)
    clock.now += 5.0
    breaker.ignore(breaker.begin())
    breaker.fail(breaker.begin())
    clock.now += 10.0
    breaker.succeed(breaker.begin())
    assert told == ["open", "half_open", "open", "half_open", "closed"]
    assert breaker.changes == {"open": 2, "half_open": 2, "closed": 1}
