"""Reads what /metrics says."""

from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


class Samples(list[Sample]):
    @classmethod
    def of(cls, text: str) -> "Samples":
        families = text_string_to_metric_families(text)
        return cls(Sample(found.name, found.labels, found.value) for family in families for found in family.samples)

    def total(self, name: str, **labels: str) -> float:
        """Of the series with these labels, whatever else they have; fails when there is none."""
        values = [sample.value for sample in self if sample.name == name and labels.items() <= sample.labels.items()]
        assert values, f"no {name} with {labels}"
        return sum(values)

    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in self}


async def samples(http: httpx.AsyncClient) -> Samples:
    return Samples.of((await http.get("/metrics")).text)
