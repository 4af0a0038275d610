"""The registry behind /metrics, and how several workers' metrics become one text."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from .counts import Counts
from .parts import Parts, families_of
from .requests import of_requests, of_tenants
from .summed import Family


class Metrics:
    """`registry` also has what the instrumentation of FastAPI's side counts."""

    def __init__(self, counts: Counts) -> None:
        self.registry = CollectorRegistry()
        self._counts = counts

    def show(self, parts: Parts) -> None:
        """Add what is read when /metrics is, from the components' own counts."""
        self.registry.register(_Snapshot(parts, self._counts))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def families(self) -> list[Family]:
        """The same, to be added to those of other workers."""
        return [
            Family(
                metric.name,
                metric.documentation,
                metric.type,
                [(sample.name, sample.labels, sample.value) for sample in metric.samples],
            )
            for metric in self.registry.collect()
        ]


class _Snapshot(Collector):
    def __init__(self, parts: Parts, counts: Counts) -> None:
        self._parts = parts
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        yield from of_requests(self._counts)
        yield from of_tenants(self._counts)
        yield from families_of(self._parts)


class _Told(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def text_of(families: Sequence[Family]) -> bytes:
    return generate_latest(_Told(families))  # type: ignore[arg-type,unused-ignore]  # older releases ask for a registry


def of_workers(expected: int, up: int) -> Family:
    name = "headrace_workers"
    samples = [(name, {"state": state}, float(count)) for state, count in (("expected", expected), ("up", up))]
    return Family(name, "Worker processes: how many there are to be, and how many answer.", "gauge", samples)
