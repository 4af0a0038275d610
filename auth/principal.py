"""The caller, as the token's claims tell."""

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from .errors import InsufficientScope, InvalidToken, ModelNotAllowed

MAX_NAME_CHARS = 256  # of a subject, a tenant, a tier: they are written into logs and Redis keys


@dataclass(frozen=True, slots=True)
class Quota:
    """How much somebody may; None is without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    def or_else(self, other: "Quota") -> "Quota":
        """This quota, with `other` for what it leaves open."""
        return Quota(
            other.requests_per_minute if self.requests_per_minute is None else self.requests_per_minute,
            other.tokens_per_minute if self.tokens_per_minute is None else self.tokens_per_minute,
            other.concurrent if self.concurrent is None else self.concurrent,
        )


NO_QUOTA = Quota()


class Principal(NamedTuple):
    """`models` are globs, None for all; a greater `priority` goes first; `quota` is what the token itself says."""

    subject: str
    tenant: str
    scopes: frozenset[str] = frozenset()
    models: tuple[str, ...] | None = None
    priority: int = 0
    tier: str | None = None
    quota: Quota = NO_QUOTA

    def check_scope(self, scope: str) -> None:
        """Raises: InsufficientScope."""
        if scope not in self.scopes:
            raise InsufficientScope(scope)

    def may_use(self, model: str) -> bool:
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)

    def check_model(self, model: str, exists: bool) -> None:
        """Refuse a model that is not theirs. Who may not use all is not told which others there are.

        Raises: ModelNotAllowed.
        """
        if self.models is not None and not (exists and self.may_use(model)):
            raise ModelNotAllowed(model)


@dataclass(frozen=True, slots=True)
class ClaimNames:
    """Where each fact stands in a token: a claim's name, or a path into nested claims, parts joined by dots. Empty: no
    claim says it."""

    subject: str = "sub"
    tenant: str = "tenant"
    scope: str = "scope"
    models: str = "models"
    priority: str = "priority"
    tier: str = "tier"
    requests_per_minute: str = "limits.requests_per_minute"
    tokens_per_minute: str = "limits.tokens_per_minute"
    concurrent: str = "limits.concurrent"


class ClaimsReader:
    """Makes principals of verified claims. `default_scopes` are those of a token without a claim for them."""

    def __init__(self, names: ClaimNames, default_scopes: frozenset[str]) -> None:
        self._default_scopes = default_scopes
        # Each claim's name, and the path that it may stand for.
        self._places = {
            fact: (name, tuple(name.split(".")) if "." in name else ()) for fact, name in asdict(names).items()
        }

    def principal(self, claims: dict[str, Any]) -> Principal:
        """Raises: InvalidToken, also for a claim of a wrong type."""
        subject = self._name(claims, "subject")
        if subject is None:
            raise InvalidToken("no claim for the subject")
        scopes = self._words(claims, "scope")
        models = self._words(claims, "models")
        return Principal(
            subject,
            self._name(claims, "tenant") or subject,
            self._default_scopes if scopes is None else frozenset(scopes),
            None if models is None or "*" in models else models,
            self._integer(claims, "priority") or 0,
            self._name(claims, "tier"),
            self._quota(claims),
        )

    def _quota(self, claims: dict[str, Any]) -> Quota:
        requests = self._integer(claims, "requests_per_minute", 0)
        tokens = self._integer(claims, "tokens_per_minute", 0)
        concurrent = self._integer(claims, "concurrent", 0)
        return NO_QUOTA if requests is tokens is concurrent is None else Quota(requests, tokens, concurrent)

    def _value(self, claims: dict[str, Any], fact: str) -> Any:
        """None where there is none. A claim whose name has dots itself (a URL) goes before a path."""
        name, path = self._places[fact]
        value = claims.get(name)
        if value is None and path:
            value = claims
            for part in path:
                value = value.get(part) if isinstance(value, dict) else None
                if value is None:
                    break
        return value

    def _name(self, claims: dict[str, Any], fact: str) -> str | None:
        value = self._value(claims, fact)
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS or not value.isprintable():
            raise InvalidToken(f"the claim for the {fact} is not a name")
        return value

    def _words(self, claims: dict[str, Any], fact: str) -> tuple[str, ...] | None:
        """A list of strings, or one string with spaces between (RFC 8693, section 4.2)."""
        value = self._value(claims, fact)
        if value is None:
            return None
        if isinstance(value, str):
            return tuple(value.split())
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InvalidToken(f"the claim for the {fact} is not a list of words")
        return tuple(value)

    def _integer(self, claims: dict[str, Any], fact: str, minimum: int | None = None) -> int | None:
        value = self._value(claims, fact)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or (minimum is not None and value < minimum):
            raise InvalidToken(f"the claim for the {fact} is not a whole number")
        return value
