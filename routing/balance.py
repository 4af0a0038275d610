"""Which replica gets the next request: a choice among those that are available, made without waiting."""

from collections.abc import Sequence
from math import ceil
from random import Random
from typing import Any, Literal, Protocol, get_args

import orjson

from .engine import Call
from .hashing import weight_score
from .radix import LOOKED_AT_BYTES, PrefixTree
from .replica import Replica

CLIP_LEVELS = 5  # messages, message, parts, part, image_url
# Requests that a replica always has room for: an engine works on a few in one batch in about the time of one, while a
# session that is moved for one or two of them finds no KV cache where it comes.
FEW = 4

BalancerName = Literal["round_robin", "least_in_flight", "p2c_peak_ewma", "consistent_hash", "prefix"]


class Balancer(Protocol):
    def choose(self, replicas: Sequence[Replica], call: Call, streams: bool) -> Replica:
        """One of the replicas, which are available and at least one. `streams`: whether the answer will be a stream."""
        ...

    def forget(self, replica: str) -> None:
        """It is gone. Most know nothing of one that they could forget."""
        return


class RoundRobin(Balancer):
    """Each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, replicas: Sequence[Replica], call: Call, streams: bool) -> Replica:
        self._turn += 1
        return replicas[self._turn % len(replicas)]


class LeastInFlight(Balancer):
    """The one with the fewest requests in flight; those with as many, in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, replicas: Sequence[Replica], call: Call, streams: bool) -> Replica:
        self._turn += 1
        return min(_from_turn(replicas, self._turn), key=_in_flight)


class P2cPeakEwma(Balancer):
    """The better of two taken at random (Mitzenmacher, The power of two choices in randomized load balancing, 2001), by
    latency and requests in flight. Taking the best of all would send every request of a moment to one replica."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = (random or Random()).random

    def choose(self, replicas: Sequence[Replica], call: Call, streams: bool) -> Replica:
        count = len(replicas)
        if count == 1:
            return replicas[0]
        place = int(self._random() * count)
        other_place = int(self._random() * (count - 1))
        one, other = replicas[place], replicas[other_place + (other_place >= place)]
        return one if one.cost(streams) <= other.cost(streams) else other


class ConsistentHash(Balancer):
    """The one that the call's affinity falls to, by rendezvous hashing with bounded loads (Mirrokni, Thorup and
    Zadimoghaddam, Consistent hashing with bounded loads, 2016): one that has `imbalance` times its share of the
    requests in flight, and FEW at least, is passed over for the next in rank. Calls without affinity go where the
    fewest are in flight."""

    def __init__(self, imbalance: float = 1.25) -> None:
        self._imbalance = imbalance
        self._without_affinity = LeastInFlight()

    def choose(self, replicas: Sequence[Replica], call: Call, streams: bool) -> Replica:
        affinity = call.affinity
        if not affinity:
            return self._without_affinity.choose(replicas, call, streams)
        bound = _bound(replicas, self._imbalance)
        below = [replica for replica in replicas if replica.in_flight < bound]
        return max(below, key=lambda replica: weight_score(affinity, replica.name.encode(), 1.0))


class Prefix(Balancer):
    """The one that was sent most of the prompt's beginning before, and so has it in its KV cache, unless `imbalance`
    times its share of the requests in flight, and FEW at least, are there: then the next. Where that is equal, as for
    prompts that begin like no other, the one with the fewest in flight."""

    def __init__(self, tree: PrefixTree | None = None, imbalance: float = 1.5) -> None:
        self.tree = tree or PrefixTree()
        self._imbalance = imbalance
        self._turn = 0

    def choose(self, replicas: Sequence[Replica], call: Call, streams: bool) -> Replica:
        prompt = prompt_of(call.body)
        matched = self.tree.match(prompt)
        bound = _bound(replicas, self._imbalance)
        self._turn += 1
        chosen = min(
            (replica for replica in _from_turn(replicas, self._turn) if replica.in_flight < bound),
            key=lambda replica: (-matched.get(replica.name, 0), replica.in_flight),
        )
        self.tree.insert(prompt, chosen.name)
        return chosen

    def forget(self, replica: str) -> None:
        self.tree.forget(replica)


def make_balancer(
    name: BalancerName, imbalance: float | None = None, tree: PrefixTree | None = None, random: Random | None = None
) -> Balancer:
    """`imbalance` None: as is usual for that balancer. What one does not go by is not looked at."""
    options = {} if imbalance is None else {"imbalance": imbalance}
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_in_flight":
            return LeastInFlight()
        case "p2c_peak_ewma":
            return P2cPeakEwma(random)
        case "consistent_hash":
            return ConsistentHash(**options)
        case "prefix":
            return Prefix(tree, **options)
    raise ValueError(f"{name!r} is not one of {', '.join(get_args(BalancerName))}")


def prompt_of(body: dict[str, Any]) -> bytes:
    """What a prompt begins with, as far as a PrefixTree looks: tools and messages, or the prompt. Empty if it has none.

    Longer texts are cut before they are serialised; that changes nothing before the cut.
    """
    prompt = bytearray()  # not pieces to join: each would keep the room that orjson wrote it in, some 4 KB
    messages = body.get("messages")
    items = messages if isinstance(messages, list) else []
    for item in (body.get("tools"), *items[:LOOKED_AT_BYTES], body.get("prompt")):
        if item is None:
            continue
        try:
            prompt += orjson.dumps(item if _is_short(item) else _clip(item, CLIP_LEVELS))
        except orjson.JSONEncodeError:  # nested deeper than it writes: what comes before must do
            break
        if len(prompt) >= LOOKED_AT_BYTES:
            break
    return bytes(prompt[:LOOKED_AT_BYTES])


def _is_short(item: Any) -> bool:
    """Whether this is a message as most are, which need no clipping."""
    content = item.get("content") if isinstance(item, dict) else None
    return isinstance(content, str) and len(content) <= LOOKED_AT_BYTES


def _clip(value: Any, levels: int) -> Any:
    """The value without what lies behind the first LOOKED_AT_BYTES of it for sure: every character and every item takes
    a byte at least."""
    if isinstance(value, str):
        return value[:LOOKED_AT_BYTES]
    if levels > 0 and isinstance(value, list):
        return [_clip(item, levels - 1) for item in value[:LOOKED_AT_BYTES]]
    if levels > 0 and isinstance(value, dict):
        return {key: _clip(item, levels - 1) for key, item in value.items()}
    return value


def _bound(replicas: Sequence[Replica], imbalance: float) -> int:
    """How many requests in flight are enough for one replica; at least one has fewer, if `imbalance` is not below 1."""
    in_flight = sum(map(_in_flight, replicas))
    return max(FEW, ceil(imbalance * (in_flight + 1) / len(replicas)))


def _from_turn(replicas: Sequence[Replica], turn: int) -> list[Replica]:
    start = turn % len(replicas)
    return [*replicas[start:], *replicas[:start]]


def _in_flight(replica: Replica) -> int:
    return replica.in_flight
