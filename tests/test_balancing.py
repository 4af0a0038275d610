"""Balancers by themselves: who is chosen, how evenly, and how far affinity goes."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import orjson
import pytest

from routing.balance import (
    FEW,
    Balancer,
    BalancerName,
    ConsistentHash,
    LeastInFlight,
    P2cPeakEwma,
    Prefix,
    RoundRobin,
    make_balancer,
    prompt_of,
)
from routing.breaker import Breaker
from routing.engine import Call
from routing.radix import LOOKED_AT_BYTES, PrefixTree
from routing.replica import Lease, Replica

from .test_replicas import Clock, Silent, answer

SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 150}  # 4 KB


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replicas(clock: Clock) -> list[Replica]:
    return [Replica(Silent(name), Breaker(clock=clock), clock=clock) for name in "abcd"]


def call(affinity: bytes = b"", **body: Any) -> Call:
    return Call("chat", "m", body, "r", affinity=affinity)


def chat(*texts: str, **body: Any) -> Call:
    return call(messages=[SYSTEM, *({"role": "user", "content": text} for text in texts)], **body)


def load(replica: Replica, count: int) -> None:
    for _ in range(count):
        replica.acquire(True)


def names(balancer: Balancer, replicas: Sequence[Replica], count: int, call: Call) -> Counter[str]:
    return Counter(balancer.choose(replicas, call, True).name for _ in range(count))


@pytest.mark.parametrize("name", get_args(BalancerName))
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_balancer_chooses_one_of_those_that_are_there(name: BalancerName, count: int, clock: Clock) -> None:
    balancer = make_balancer(name, random=random.Random(1))
    chance = random.Random(2)
    everyone = [Replica(Silent(f"r{number}"), Breaker(clock=clock), clock=clock) for number in range(count)]
    leases: list[Lease] = []
    for number in range(500):
        there = chance.sample(everyone, chance.randrange(1, count + 1))  # who is available changes all the time
        asked = chance.choice([call(), call(b"%d" % (number % 7)), chat(str(number)), call(messages=None)])
        chosen = balancer.choose(there, asked, chance.random() < 0.5)
        assert chosen in there
        leases.append(chosen.acquire(True))
        if len(leases) > 20:
            leases.pop(chance.randrange(20)).release()


@pytest.mark.parametrize("name", ["round_robin", "least_in_flight", "p2c_peak_ewma", "consistent_hash", "prefix"])
def test_idle_replicas_share_requests_that_have_nothing_in_common(name: BalancerName, replicas: list[Replica]) -> None:
    balancer = make_balancer(name, random=random.Random(1))
    chosen = names(balancer, replicas, 4000, call())
    assert set(chosen) == set("abcd")
    assert all(900 <= count <= 1100 for count in chosen.values())


def test_unknown_balancer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'best' is not one of round_robin, least_in_flight, "):
        make_balancer("best")  # type: ignore[arg-type]


# Round robin, and least in flight


def test_round_robin_takes_each_in_turn(replicas: list[Replica]) -> None:
    balancer = RoundRobin()
    chosen = [balancer.choose(replicas, call(), True).name for _ in range(8)]
    assert chosen[:4] == chosen[4:]
    assert set(chosen[:4]) == set("abcd")


def test_least_in_flight_takes_the_least_loaded_and_ties_in_turn(replicas: list[Replica]) -> None:
    for replica, count in zip(replicas, (3, 1, 2, 1), strict=True):
        load(replica, count)
    assert names(LeastInFlight(), replicas, 100, call()) == {"b": 50, "d": 50}
    load(replicas[1], 1)
    assert names(LeastInFlight(), replicas, 100, call()) == {"d": 100}


# P2C by peak EWMA


def test_slow_replica_gets_less(replicas: list[Replica], clock: Clock) -> None:
    leases = [replica.acquire(True) for replica in replicas]
    for seconds, answered in ((0.1, leases[:3]), (4.9, leases[3:])):
        clock.now += seconds
        for lease in answered:
            lease.first_token()
            lease.release()
    chosen = names(P2cPeakEwma(random.Random(1)), replicas, 1000, call())
    assert chosen["d"] == 0  # it loses to whichever is drawn with it
    assert all(chosen[name] > 200 for name in "abc")


def test_busy_replica_gets_less(replicas: list[Replica], clock: Clock) -> None:
    for replica in replicas:
        answer(replica, clock, 0.1)
        load(replica, 1)
    load(replicas[0], 5)
    assert names(P2cPeakEwma(random.Random(1)), replicas, 1000, call())["a"] == 0


def test_two_different_ones_are_drawn_and_every_pair_as_often(replicas: list[Replica]) -> None:
    for number, replica in enumerate(replicas):
        load(replica, number)  # unknown and loaded: each costs more than the one before
    chosen = names(P2cPeakEwma(random.Random(1)), replicas, 6000, call())
    # Of the 6 pairs, 3 have a, 2 of the rest b, 1 c, and d never wins; chi-square's 99.9th percentile at 2 is 13.816.
    due = {"a": 3000, "b": 2000, "c": 1000}
    assert chosen["d"] == 0
    assert sum((chosen[name] - due[name]) ** 2 / due[name] for name in due) < 13.816


def test_replica_that_is_new_is_tried_with_one_request_and_not_with_all(clock: Clock) -> None:
    known, new = (Replica(Silent(name), Breaker(clock=clock), clock=clock) for name in "an")
    answer(known, clock, 0.1, streams=True)
    balancer = P2cPeakEwma(random.Random(1))
    leases = []
    for _ in range(50):
        chosen = balancer.choose([known, new], call(), True)
        leases.append(chosen.acquire(True))
    assert (known.in_flight, new.in_flight) == (49, 1)


# Consistent hashing


def test_affinity_stays_with_its_replica_and_is_spread(replicas: list[Replica]) -> None:
    balancer = ConsistentHash()
    keys = [b"session-%d" % number for number in range(1000)]
    homes = {key: balancer.choose(replicas, call(key), True).name for key in keys}
    assert homes == {key: balancer.choose(replicas[::-1], call(key), False).name for key in keys}
    assert all(180 < count < 320 for count in Counter(homes.values()).values())
    without = [replica for replica in replicas if replica.name != "b"]
    for key, home in homes.items():
        if home != "b":  # only those move whose replica is gone
            assert balancer.choose(without, call(key), True).name == home


def test_replica_at_its_bound_is_passed_over_for_the_next_in_rank(replicas: list[Replica]) -> None:
    balancer = ConsistentHash(imbalance=1.25)
    for replica in replicas:
        load(replica, 8)  # the bound is ceil(1.25 * 33 / 4) = 11
    first = balancer.choose(replicas, call(b"k"), True)
    load(first, 2)
    assert balancer.choose(replicas, call(b"k"), True) is first
    load(first, 1)  # 11 of 35: at ceil(1.25 * 36 / 4) = 12 but one
    load(first, 1)
    second = balancer.choose(replicas, call(b"k"), True)
    assert second is not first
    rest = [replica for replica in replicas if replica is not first]
    assert second is balancer.choose(rest, call(b"k"), True)


def test_one_hot_key_keeps_every_replica_within_the_bound(replicas: list[Replica]) -> None:
    balancer = ConsistentHash(imbalance=1.25)
    for number in range(1, 401):
        balancer.choose(replicas, call(b"hot"), True).acquire(True)
        bound = max(FEW, -(-5 * number // 16))  # ceil(1.25 * number / 4)
        assert max(replica.in_flight for replica in replicas) <= bound


def test_few_requests_in_flight_move_nobody(replicas: list[Replica]) -> None:
    for number in range(50):
        balancer = ConsistentHash()
        key = call(b"session-%d" % number)
        home = balancer.choose(replicas, key, True)
        leases = [balancer.choose(replicas, key, True).acquire(True) for _ in range(FEW)]
        assert home.in_flight == FEW
        assert balancer.choose(replicas, key, True) is not home
        for lease in leases:
            lease.release()


def test_without_affinity_the_least_loaded_gets_it(replicas: list[Replica]) -> None:
    for replica in replicas[:3]:
        load(replica, 1)
    assert names(ConsistentHash(), replicas, 10, call()) == {"d": 10}


# Prefixes


def test_conversation_goes_on_where_it_began(replicas: list[Replica]) -> None:
    balancer = Prefix()
    for number in range(20):
        text = f"Question {number}: " + str(number) * 200
        first = balancer.choose(replicas, call(messages=[{"role": "user", "content": text}]), True)
        for turn in range(1, 4):
            messages = [{"role": "user", "content": text}] * (2 * turn + 1)
            assert balancer.choose(replicas, call(messages=messages), True) is first


def test_different_prompts_are_spread(replicas: list[Replica]) -> None:
    chosen: Counter[str] = Counter()
    balancer = Prefix()
    for number in range(400):
        chosen[balancer.choose(replicas, call(prompt=f"{number} " * 100), True).name] += 1
    assert set(chosen.values()) == {100}


def test_system_prompt_that_all_share_does_not_take_all_to_one_replica(replicas: list[Replica]) -> None:
    balancer = Prefix(imbalance=1.5)
    chance = random.Random(1)
    leases: list[Lease] = []
    chosen: Counter[str] = Counter()
    for number in range(2000):
        replica = balancer.choose(replicas, chat(f"I am user {number}, and {chance.random()}"), True)
        chosen[replica.name] += 1
        leases.append(replica.acquire(True))
        if len(leases) > 40:
            leases.pop(chance.randrange(40)).release()
        assert max(replica.in_flight for replica in replicas) <= max(FEW, 1.5 * (len(leases) + 1) / 4 + 2)
    assert all(count > 2000 / 4 / 2 for count in chosen.values())


def test_overloaded_replica_is_passed_over_for_the_next_longest_match(replicas: list[Replica]) -> None:
    tree = PrefixTree()
    balancer = Prefix(tree)
    asked = chat("Why?" * 100)
    tree.insert(prompt_of(asked.body), "a")
    tree.insert(prompt_of(chat().body), "c")
    assert balancer.choose(replicas, asked, True).name == "a"
    load(replicas[0], FEW)
    load(replicas[2], 1)
    assert balancer.choose(replicas, asked, True).name == "c"
    load(replicas[2], 7)  # the bound is ceil(1.5 * 13 / 4) = 5
    assert balancer.choose(replicas, asked, True).name == "a"


def test_few_bytes_more_in_common_are_worth_nothing(replicas: list[Replica]) -> None:
    tree = PrefixTree()
    asked = call(prompt="p" * 500)
    tree.insert(prompt_of(asked.body)[:490], "a")
    tree.insert(prompt_of(asked.body)[:450], "b")
    load(replicas[0], 1)
    assert Prefix(tree).choose(replicas, asked, True).name == "b"


def test_forgotten_replica_is_like_a_new_one(replicas: list[Replica]) -> None:
    balancer = Prefix()
    first = balancer.choose(replicas, chat("x"), True)
    balancer.forget(first.name)
    load(first, 1)
    assert balancer.choose(replicas, chat("x"), True) is not first


# Prompts as bytes


def test_prompt_is_tools_and_then_messages_or_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = chat("Why?", tools=tools, temperature=0.5).body
    assert prompt_of(body) == orjson.dumps(tools) + orjson.dumps(SYSTEM) + b'{"role":"user","content":"Why?"}'
    assert prompt_of({"prompt": "Why?"}) == b'"Why?"'
    assert prompt_of({"prompt": [1, 2, 3]}) == b"[1,2,3]"
    assert prompt_of({"input": "not generated from"}) == b""


def test_later_turn_begins_with_the_earlier_one() -> None:
    assert prompt_of(chat("Why?", "And?").body).startswith(prompt_of(chat("Why?").body))


LONG: dict[str, dict[str, Any]] = {
    "a text": {"messages": [{"role": "user", "content": "é" * 100_000}]},
    "a picture": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 100_000}},
                ],
            }
        ]
    },
    "many messages": {"messages": [{"role": "user", "content": str(number)} for number in range(5000)]},
    "many parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 50_000}]},
    "a prompt": {"prompt": "p" * 100_000},
    "tokens": {"prompt": [1] * 100_000},
    "tools": {"tools": [{"type": "function", "function": {"description": "d" * 100_000}}], "messages": [SYSTEM]},
}


@pytest.mark.parametrize("body", LONG.values(), ids=LONG.keys())
def test_long_prompt_is_cut_as_if_it_had_been_serialised_whole(body: dict[str, Any]) -> None:
    whole = b"".join(orjson.dumps(body[field]) for field in ("tools", "prompt") if field in body)
    whole += b"".join(map(orjson.dumps, body.get("messages", ())))
    assert prompt_of(body) == whole[:LOOKED_AT_BYTES]


@pytest.mark.parametrize("what", ["deep", 7, "text", {"a": 1}, None, [None], [[[]]], []])
def test_prompt_of_anything_is_bytes(what: Any) -> None:
    if what == "deep":
        for _ in range(1000):
            what = [what]
    for field in ("messages", "tools", "prompt"):
        assert isinstance(prompt_of({field: what}), bytes)
