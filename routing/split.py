"""Which variant of a model answers: a choice by weights that stays the same for the same key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .engine import Answerer
from .errors import RoutingError
from .guardrails import Guardrail
from .hashing import choose_weighted

StickyBy = Literal["subject", "tenant", "session", "request"]


class VariantNotFound(RoutingError):
    """The model has no variant of this name."""

    def __init__(self, variant: str) -> None:
        super().__init__(f"The variant {variant[:50]!r} does not exist.")
        self.variant = variant


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the ways that a model is answered. Variants get requests in proportion to their weights; one of weight 0
    only gets those that name it. Another `revision` gives other answers. `hash_by` is what keeps calls together on one
    of its replicas: session, tenant, or the name of a header."""

    name: str
    pool: str
    weight: float
    engine: Answerer
    revision: str = ""
    hash_by: str | None = None


class Split:
    """A model's variants, and which of them gets a key.

    A guardrail that sets the canary's share has the last word: the others have the rest, in proportion to their
    weights. What nobody has a weight for goes to the stable variant: all of it when every weight is 0, and what is left
    by a canary that alone has one. `stable` names it; without that it is the one of the greatest weight beside the
    canary, the first of several. A canary without any other variant gets everything, whatever the guardrail says.

    Raises: VariantNotFound, when `stable` or the guardrail names one that is not there; ValueError, when there is no
    variant, two have one name, or the canary is to be the stable one of several.
    """

    def __init__(
        self, variants: Sequence[Variant], guardrail: Guardrail | None = None, stable: str | None = None
    ) -> None:
        self.variants = tuple(variants)
        self._by_name = {variant.name: variant for variant in variants}
        if not variants or len(self._by_name) < len(variants):
            raise ValueError("a split needs variants, each with a name of its own")
        self._guardrail = guardrail
        self._canary = None if guardrail is None else self.named(guardrail.rules.variant)
        self._stable = self._most_stable() if stable is None else self.named(stable)
        if self._stable is self._canary and len(variants) > 1:
            raise ValueError("the canary cannot be the stable variant")
        # Mutable state, all of it from the guardrail's share: changed by `_adopt`. `_only` is the one that gets all.
        self._adopted = -1
        self._options: list[tuple[bytes, float]] = []
        self._only: Variant | None = None
        self._adopt()

    @property
    def generation(self) -> int:
        """Grows when another variant may be chosen for a key than before."""
        return 0 if self._guardrail is None else self._guardrail.generation

    def choose(self, key: bytes | Callable[[], bytes]) -> Variant:
        """The variant for a key, which is only asked for if it decides."""
        guardrail = self._guardrail
        if guardrail is not None and guardrail.generation != self._adopted:
            self._adopt()
        if self._only is not None:
            return self._only
        return self.variants[choose_weighted(key() if callable(key) else key, self._options)]

    def named(self, name: str) -> Variant:
        """The variant that a request asks for, of whatever weight. Raises: VariantNotFound."""
        try:
            return self._by_name[name]
        except KeyError:
            raise VariantNotFound(name) from None

    def weights(self) -> dict[str, float]:
        """Each variant's share of the requests now; together they are 1."""
        return dict(zip(self._by_name, self._shares(), strict=True))

    def _most_stable(self) -> Variant:
        others = [variant for variant in self.variants if variant is not self._canary]
        return max(others or self.variants, key=lambda variant: variant.weight)

    def _adopt(self) -> None:
        """Take over the guardrail's share."""
        shares = self._shares()
        self._adopted = self.generation
        self._options = [(variant.name.encode(), share) for variant, share in zip(self.variants, shares, strict=True)]
        chosen = [variant for variant, share in zip(self.variants, shares, strict=True) if share > 0]
        self._only = chosen[0] if len(chosen) == 1 else None

    def _shares(self) -> list[float]:
        canary_share = None if self._guardrail is None else self._guardrail.share
        if self._canary is None or canary_share is None or len(self.variants) == 1:
            return self._proportions(self.variants, 1.0)
        others = [variant for variant in self.variants if variant is not self._canary]
        shares = iter(self._proportions(others, 1.0 - canary_share))
        return [canary_share if variant is self._canary else next(shares) for variant in self.variants]

    def _proportions(self, variants: Sequence[Variant], whole: float) -> list[float]:
        total = sum(variant.weight for variant in variants)
        if total <= 0:
            return [whole if variant is self._stable else 0.0 for variant in variants]
        return [whole * variant.weight / total for variant in variants]


def sticky_key(
    sticky_by: StickyBy, model: str, tenant: str, subject: str, session: str | None, request_id: str
) -> bytes:
    """What stays with its variant: a tenant's subject, a tenant, a tenant's session, or nothing but the request itself.
    Without a session it is the subject.

    Two models' keys differ, so that who gets one's canary is not who gets the other's. The parts are netstrings (D. J.
    Bernstein, 1997), so that no two lists of parts make the same key.
    """
    if sticky_by == "request":
        key = f"{netstring(model)}7:request,{netstring(request_id)}"
    elif sticky_by == "tenant":
        key = f"{netstring(model)}6:tenant,{netstring(tenant)}"
    elif sticky_by == "session" and session is not None:
        key = f"{netstring(model)}7:session,{netstring(tenant)}{netstring(session)}"
    else:
        key = f"{netstring(model)}7:subject,{netstring(tenant)}{netstring(subject)}"
    return key.encode(errors="surrogatepass")  # a token's JSON can hold half of a surrogate pair


def netstring(text: str) -> str:
    return f"{len(text)}:{text},"
