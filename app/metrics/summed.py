"""What all workers of a gateway have counted, as one: metrics as plain values, and how they come together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import orjson

# Of gauges that tell no amounts, what is told is the worst that any worker sees; of shares, the mean, so that they
# still add up. The first ending that fits decides; all other gauges are added up.
GAUGES: Mapping[str, Callable[[list[float]], float]] = {
    "_up": min,
    "_ready": min,
    "_open": max,
    "_rolled_back": max,
    "_jwks_keys": min,
    "_latency_seconds": max,
    "_age_seconds": max,
    "_timestamp_seconds": min,
    "_created": min,  # of counters and histograms: since when they count
    "_share": fmean,
    "_ratio": fmean,
    "_difference": fmean,
}
COUNTED = frozenset({"counter", "histogram", "summary"})

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric. Its samples: name, labels, value."""

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


def encode(families: Sequence[Family]) -> bytes:
    return orjson.dumps(families)


def decode(data: bytes) -> list[Family]:
    """Raises: ValueError, TypeError."""
    return [Family(**document) for document in orjson.loads(data)]


def counted(families: Iterable[Family]) -> list[Family]:
    """What stays true of a process that has ended."""
    return [family for family in families if family.type in COUNTED]


def together(snapshots: Iterable[Sequence[Family]]) -> list[Family]:
    families: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, Labels], list[float]]] = {}
    for snapshot in snapshots:
        for family in snapshot:
            families.setdefault(family.name, family)
            series = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                series.setdefault((name, tuple(sorted(labels.items()))), []).append(value)
    return [
        Family(
            family.name,
            family.documentation,
            family.type,
            [(name, dict(labels), way_of(family, name)(told)) for (name, labels), told in values[family.name].items()],
        )
        for family in families.values()
    ]


def way_of(family: Family, sample: str) -> Callable[[list[float]], float]:
    """How the values that several workers tell become one."""
    if family.type in COUNTED and not sample.endswith("_created"):
        return sum
    return next((way for ending, way in GAUGES.items() if sample.endswith(ending)), sum)
