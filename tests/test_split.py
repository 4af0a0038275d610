"""Splits by themselves: who gets which variant, and who keeps it."""

import random
from collections import Counter
from functools import partial
from itertools import pairwise, product

import pytest

from app.engines.scripted import Script, ScriptedEngine
from routing.guardrails import Guardrail, GuardrailRules
from routing.split import Split, StickyBy, Variant, VariantNotFound, sticky_key

ENGINE = ScriptedEngine(Script("Hello."))


def variants(**weights: float) -> list[Variant]:
    return [Variant(name, "pool", weight, ENGINE) for name, weight in weights.items()]


def canary(*steps: float, name: str = "b") -> Guardrail:
    return Guardrail(GuardrailRules(name, 0.05, None, min_requests=1, steps=steps, step_s=0), clock=lambda: 0.0)


def fail(guardrail: Guardrail) -> None:
    guardrail.record(True, True, None)
    guardrail.evaluate()


def succeed(guardrail: Guardrail) -> None:
    guardrail.record(True, False, None)
    guardrail.evaluate()


def chosen(split: Split, keys: list[bytes]) -> list[str]:
    return [split.choose(key).name for key in keys]


def burst(count: int, start: int = 0) -> list[bytes]:
    return [sticky_key("request", "demo", "t", "s", None, f"req-{number:08}") for number in range(start, start + count)]


def subjects(count: int) -> list[bytes]:
    luck = random.Random(7)
    return [sticky_key("subject", "demo", "t", f"{luck.getrandbits(64):x}", None, "r") for _ in range(count)]


def chi_square(names: list[str], shares: dict[str, float]) -> float:
    counts = Counter(names)
    return sum((counts[name] - share * len(names)) ** 2 / (share * len(names)) for name, share in shares.items())


@pytest.mark.parametrize("keys", [burst(10_000), burst(1000, 500), subjects(10_000)])
def test_requests_are_split_by_weight(keys: list[bytes]) -> None:
    split = Split(variants(a=70, b=30))
    assert chi_square(chosen(split, keys), {"a": 0.7, "b": 0.3}) < 10.83  # one in a thousand, one degree of freedom


def test_neighbours_in_a_burst_are_independent() -> None:
    names = chosen(Split(variants(a=50, b=50)), burst(10_000))
    pairs = [left + right for left, right in pairwise(names)]
    assert chi_square(pairs, dict.fromkeys(("aa", "ab", "ba", "bb"), 0.25)) < 16.27  # three degrees


def test_key_keeps_its_variant_whatever_the_order() -> None:
    keys = subjects(500)
    assert chosen(Split(variants(a=1, b=2, c=3)), keys) == chosen(Split(variants(c=3, a=1, b=2)), keys)


def test_changed_weight_moves_only_the_share_it_must() -> None:
    keys = subjects(10_000)
    before, after = chosen(Split(variants(a=90, b=10)), keys), chosen(Split(variants(a=80, b=20)), keys)
    moves = Counter((old, new) for old, new in zip(before, after, strict=True) if old != new)
    assert set(moves) == {("a", "b")}
    assert moves["a", "b"] == pytest.approx(1000, abs=100)


def test_others_do_not_trade_keys_when_a_canary_grows() -> None:
    keys = subjects(3000)
    guardrail = canary(10, 40)
    split = Split(variants(a=50, b=1, c=30), guardrail)
    before = chosen(split, keys)
    succeed(guardrail)
    moves = {(old, new) for old, new in zip(before, chosen(split, keys), strict=True) if old != new}
    assert moves == {("a", "b"), ("c", "b")}


def test_single_variant_is_chosen_without_a_key() -> None:
    def key() -> bytes:
        raise AssertionError("it was not needed")

    assert Split(variants(a=1)).choose(key).name == "a"
    assert Split(variants(a=0, b=5, c=0)).choose(key).name == "b"


def test_key_may_be_asked_for() -> None:
    split = Split(variants(a=1, b=1))
    assert all(split.choose(partial(bytes, key)) is split.choose(key) for key in burst(20))


def test_variant_of_no_weight_is_reached_by_name_alone() -> None:
    split = Split(variants(a=1, b=1, c=0))
    assert "c" not in chosen(split, burst(2000))
    assert split.named("c").name == "c"
    with pytest.raises(VariantNotFound) as caught:
        split.named("d")
    assert caught.value.variant == "d"


# A canary


def test_guardrails_share_is_the_canarys_and_the_others_have_the_rest() -> None:
    guardrail = canary(20)
    split = Split(variants(a=30, b=70, c=10), guardrail)
    assert split.weights() == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2})
    assert chi_square(chosen(split, burst(5000)), split.weights()) < 13.82


def test_canary_without_steps_has_its_weight() -> None:
    assert Split(variants(a=3, b=1), canary()).weights() == {"a": 0.75, "b": 0.25}


def test_choices_follow_the_guardrail() -> None:
    guardrail = canary(50, 100)
    split = Split(variants(a=90, b=10), guardrail)
    keys, generations = burst(200), [split.generation]
    assert set(chosen(split, keys)) == {"a", "b"}
    succeed(guardrail)
    generations.append(split.generation)
    assert set(chosen(split, keys)) == {"b"}
    fail(guardrail)
    generations.append(split.generation)
    assert set(chosen(split, keys)) == {"a"}
    assert (split.weights(), split.named("b").name) == ({"a": 1.0, "b": 0.0}, "b")
    guardrail.reset()
    generations.append(split.generation)
    assert set(chosen(split, keys)) == {"a", "b"}
    assert generations == sorted(set(generations))


@pytest.mark.parametrize(
    ("weights", "stable", "expected"),
    [
        ({"a": 90, "b": 10}, None, {"a": 1.0, "b": 0.0}),
        ({"a": 0, "b": 10, "c": 0}, None, {"a": 1.0, "b": 0.0, "c": 0.0}),
        ({"a": 0, "b": 10, "c": 0}, "c", {"a": 0.0, "b": 0.0, "c": 1.0}),
        ({"b": 10}, None, {"b": 1.0}),
    ],
)
def test_rest_of_a_canary_that_is_rolled_back(
    weights: dict[str, float], stable: str | None, expected: dict[str, float]
) -> None:
    guardrail = canary()
    split = Split(variants(**weights), guardrail, stable)
    fail(guardrail)
    assert split.weights() == expected
    assert {name for name, share in expected.items() if share} == set(chosen(split, burst(50)))


def test_without_any_weight_the_stable_variant_answers() -> None:
    assert Split(variants(a=0, b=0)).weights() == {"a": 1.0, "b": 0.0}
    assert Split(variants(a=0, b=0), stable="b").weights() == {"a": 0.0, "b": 1.0}
    assert Split(variants(b=0, a=0), canary(5)).weights() == pytest.approx({"b": 0.05, "a": 0.95})


def test_splits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="needs variants"):
        Split([])
    with pytest.raises(ValueError, match="name of its own"):
        Split(variants(a=1) * 2)
    with pytest.raises(ValueError, match="canary"):
        Split(variants(a=1, b=1), canary(), stable="b")
    with pytest.raises(VariantNotFound):
        Split(variants(a=1, b=1), stable="c")
    with pytest.raises(VariantNotFound):
        Split(variants(a=1, b=1), canary(name="c"))


# Keys


def test_keys_cannot_be_mixed_up() -> None:
    pieces = ["", "a", "1:a", "a,1:a", ",", ":", "\x00", "ä", "\ud800"]
    keys = [
        sticky_key("session", model, tenant, subject, session, "r")
        for model, tenant, subject, session in product(pieces, pieces, ["s"], pieces)
    ] + [
        sticky_key("subject", model, tenant, subject, None, "r") for model, tenant, subject in product(pieces, repeat=3)
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("sticky_by", "kept"),
    [
        ("request", {"tenant", "subject", "session"}),
        ("tenant", {"subject", "session", "request_id"}),
        ("subject", {"session", "request_id"}),
        ("session", {"subject", "request_id"}),
    ],
)
def test_key_depends_on_what_is_sticky_and_the_model(sticky_by: StickyBy, kept: set[str]) -> None:
    parts = {"model": "m", "tenant": "t", "subject": "u", "session": "s", "request_id": "r"}
    key = sticky_key(sticky_by, **parts)
    for name in parts:
        assert (sticky_key(sticky_by, **{**parts, name: "other"}) == key) == (name in kept), name


def test_without_a_session_the_subject_is_sticky() -> None:
    by_session = sticky_key("session", "m", "t", "u", None, "1")
    assert by_session == sticky_key("subject", "m", "t", "u", "s", "2")
    assert by_session != sticky_key("session", "m", "t", "x", "u", "1")


def test_models_are_split_independently() -> None:
    split = Split(variants(a=50, b=50))
    pairs = [
        "".join(split.choose(sticky_key("subject", model, "t", f"user-{n}", None, "")).name for model in ("m1", "m2"))
        for n in range(4000)
    ]
    assert chi_square(pairs, dict.fromkeys(("aa", "ab", "ba", "bb"), 0.25)) < 16.27
