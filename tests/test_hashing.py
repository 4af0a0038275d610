"""Hashes that decide: how evenly they spread keys, and which keys move when a weight does."""

import uuid
from collections import Counter
from collections.abc import Callable

import pytest

from routing.hashing import choose_weighted, share, weight_score

# Chi-square's 99.9th percentiles, by degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.4).
CRITICAL = {1: 10.828, 2: 13.816, 3: 16.266, 99: 148.230}

KEYS: dict[str, Callable[[int], bytes]] = {
    "sequential": lambda number: b"user-%d" % number,
    "bare numbers": lambda number: b"%d" % number,
    "binary": lambda number: number.to_bytes(8, "little"),
    "a burst's time stamps": lambda number: b"req-%d" % (1_760_000_000_000_000 + 37 * number),
    "a burst's UUIDs": lambda number: uuid.UUID(fields=(0x6A3B5C00 + number, 0x11, 0x1F0, 0x80, 1, 2)).bytes,
    "long and alike": lambda number: b"tenant/" * 40 + b"%06d" % number + b"/session" * 40,
}


def chi_square(observed: list[int], expected: list[float]) -> float:
    return sum((seen - due) ** 2 / due for seen, due in zip(observed, expected, strict=True))


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_shares_are_even_over_keys_in_a_row_and_of_a_burst(key: Callable[[int], bytes]) -> None:
    count = 20_000
    cells = Counter(int(share(key(number)) * 100) for number in range(count))
    statistic = chi_square([cells[cell] for cell in range(100)], [count / 100] * 100)
    assert statistic < CRITICAL[99]


def test_short_burst_is_spread_as_a_long_one() -> None:
    """Of 50 requests of one moment, about a tenth goes to a canary of a tenth; over many moments, so it is exactly."""
    bursts = [sum(share(b"%d-%d" % (burst, number)) < 0.1 for number in range(50)) for burst in range(400)]
    assert chi_square([sum(bursts), 20_000 - sum(bursts)], [2000.0, 18_000.0]) < CRITICAL[1]
    assert max(bursts) <= 17  # more has a chance of 1 in 10_000, at 400 tries


def test_share_lies_between_0_and_1_and_stays() -> None:
    shares = [share(b"%d" % number) for number in range(10_000)]
    assert 0.0 <= min(shares) < 0.001
    assert 0.999 < max(shares) < 1.0
    assert share(b"ann") == 0.5516795764552993  # what was decided before is decided so after an update


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_weights_are_kept(key: Callable[[int], bytes]) -> None:
    options = [(b"a", 1.0), (b"b", 2.0), (b"c", 0.5), (b"d", 0.0), (b"e", 6.5)]
    count = 10_000
    chosen = Counter(choose_weighted(key(number), options) for number in range(count))
    assert chosen[3] == 0
    statistic = chi_square([chosen[place] for place in (0, 1, 2, 4)], [count * w / 10.0 for w in (1.0, 2.0, 0.5, 6.5)])
    assert statistic < CRITICAL[3]


def test_weight_that_grows_only_takes_keys() -> None:
    keys = [b"user-%d" % number for number in range(10_000)]
    before = [choose_weighted(key, [(b"a", 9.0), (b"b", 1.0), (b"c", 5.0)]) for key in keys]
    after = [choose_weighted(key, [(b"a", 9.0), (b"b", 2.0), (b"c", 5.0)]) for key in keys]
    moved = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert {other for _, other in moved} == {1}
    due = len(keys) * (2 / 16 - 1 / 15)  # no more than must
    assert chi_square([len(moved), len(keys) - len(moved)], [due, len(keys) - due]) < CRITICAL[1]


def test_name_that_leaves_only_gives_keys_away() -> None:
    keys = [b"user-%d" % number for number in range(5000)]
    options = [(b"a", 1.0), (b"b", 1.0), (b"c", 1.0)]
    for key in keys:
        before = options[choose_weighted(key, options)]
        after = choose_weighted(key, options[:2])
        assert before == options[2] or before == options[after]


def test_order_of_the_options_does_not_matter() -> None:
    options = [(b"a", 1.0), (b"b", 2.0), (b"c", 3.0)]
    for number in range(1000):
        key = b"%d" % number
        assert options[choose_weighted(key, options)] == options[::-1][choose_weighted(key, options[::-1])]


def test_name_and_key_are_kept_apart() -> None:
    assert weight_score(b"bc", b"a", 1.0) != weight_score(b"c", b"ab", 1.0)
    assert weight_score(b"\0c", b"a", 1.0) != weight_score(b"c", b"a", 1.0)


@pytest.mark.parametrize("options", [[], [(b"a", 0.0)], [(b"a", 0.0), (b"b", 0.0)]])
def test_nothing_to_choose_from_is_an_error(options: list[tuple[bytes, float]]) -> None:
    with pytest.raises(ValueError, match="weight above 0"):
        choose_weighted(b"key", options)


def test_tiny_weight_is_chosen_where_it_is_the_only_one() -> None:
    assert all(choose_weighted(b"%d" % number, [(b"a", 0.0), (b"b", 1e-12)]) == 1 for number in range(100))
