"""The models callers can name, and the variants that stand behind each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .errors import ModelNotFound
from .guardrails import Guardrail
from .shadow import Shadow
from .split import Split, StickyBy


@dataclass(frozen=True, slots=True)
class Model:
    """A public name, and who shares its requests. `has_variants`: callers are told which one answers."""

    name: str
    split: Split
    sticky_by: StickyBy = "subject"
    has_variants: bool = False
    guardrail: Guardrail | None = None
    shadow: Shadow | None = None


class Models:
    """`generation` grows whenever requests may fall to other variants than before; a guardrail's owner says when."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.generation = 0
        self._models: dict[str, Model] = {}
        self.replace(models)

    def replace(self, models: Mapping[str, Model]) -> None:
        """Swap all of them at once; requests that have found one keep it."""
        self.generation += 1
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
