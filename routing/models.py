"""The models callers can name, and the engine behind each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .engine import Answerer
from .errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class Model:
    """A public name, and the pool that answers for it. Another `revision` gives other answers."""

    name: str
    pool: str
    engine: Answerer
    revision: str = ""


class Models:
    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = dict(models)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def find(self, name: str) -> Model:
        """Raises: ModelNotFound."""
        try:
            return self._models[name]
        except KeyError:
            raise ModelNotFound(name) from None
