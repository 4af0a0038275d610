"""Hashes that decide: the same key is decided the same way by every process, now and later.

BLAKE2b (RFC 7693) mixes so well that keys in a row, or of one moment, are as good as random ones. It is fast, too, but
that nobody can choose keys that all fall together is not claimed: it is not keyed.
"""

from collections.abc import Sequence
from hashlib import blake2b
from math import log


def share(key: bytes) -> float:
    """Where a key lies in [0, 1): evenly spread over keys."""
    return (_hash64(key) >> 11) * 2.0**-53  # as many bits as a float holds, or it could be rounded up to 1


def weight_score(key: bytes, name: bytes, weight: float) -> float:
    """A name's bid for a key; the highest gets it, each name a share of keys as its weight is of all weights.

    Rendezvous hashing (Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998), weighted by
    -w/ln(u) (Schindelhauer and Schomaker, Weighted distributed hash tables, 2005). A bid depends on no other name or
    weight, so that when one changes, keys move only to it or from it. Names have no zero bytes.
    """
    # The middle of one of 2**52 cells: neither 0 nor 1, whose logarithms would end the matter.
    u = ((_hash64(name + b"\0" + key) >> 12) + 0.5) * 2.0**-52
    return -weight / log(u)


def choose_weighted(key: bytes, options: Sequence[tuple[bytes, float]]) -> int:
    """The place in `options` of the one that gets the key; never one of weight 0.

    Raises: ValueError, when no weight is above 0.
    """
    best, best_score = -1, 0.0
    for place, (name, weight) in enumerate(options):
        if weight > 0 and (score := weight_score(key, name, weight)) > best_score:
            best, best_score = place, score
    if best < 0:
        raise ValueError("no option has a weight above 0")
    return best


def _hash64(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
