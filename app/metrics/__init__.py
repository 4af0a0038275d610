"""Everything that /metrics shows of our own; the only package that imports prometheus_client."""

from .counts import Counts
from .parts import Parts
from .registry import Metrics, of_workers, text_of

__all__ = ["Counts", "Metrics", "Parts", "of_workers", "text_of"]
