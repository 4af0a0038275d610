"""The caller, as the token's claims tell."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Principal:
    """`models` are globs, None for all; a greater `priority` goes first; `quota` is what the token itself says."""

    subject: str
    tenant: str
    scopes: frozenset[str] = frozenset()
    models: tuple[str, ...] | None = None
    priority: int = 0
    tier: str | None = None
    quota: Quota = field(default_factory=Quota)

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
        self._names = names
        self._default_scopes = default_scopes

    def principal(self, claims: Mapping[str, Any]) -> Principal:
        """Raises: InvalidToken, also for a claim of a wrong type."""
        names = self._names
        subject = _name(claims, names.subject)
        if subject is None:
            raise InvalidToken(f"no claim {names.subject!r}")
        scopes = _words(claims, names.scope)
        models = _words(claims, names.models)
        return Principal(
            subject=subject,
            tenant=_name(claims, names.tenant) or subject,
            scopes=self._default_scopes if scopes is None else frozenset(scopes),
            models=None if models is None or "*" in models else models,
            priority=_integer(claims, names.priority) or 0,
            tier=_name(claims, names.tier),
            quota=Quota(
                _integer(claims, names.requests_per_minute, minimum=0),
                _integer(claims, names.tokens_per_minute, minimum=0),
                _integer(claims, names.concurrent, minimum=0),
            ),
        )


def claim(claims: Mapping[str, Any], name: str) -> Any:
    """The value at `name`, None where there is none. A claim whose name has dots itself (a URL) goes first."""
    if name in claims:
        return claims[name]
    if "." not in name:
        return None
    value: Any = claims
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _name(claims: Mapping[str, Any], name: str) -> str | None:
    value = claim(claims, name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS or not value.isprintable():
        raise InvalidToken(f"claim {name!r} is not a name")
    return value


def _words(claims: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """A list of strings, or one string with spaces between (RFC 8693, section 4.2)."""
    value = claim(claims, name)
    if value is None:
        return None
    if isinstance(value, str):
        return tuple(value.split())
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidToken(f"claim {name!r} is not a list of words")
    return tuple(value)


def _integer(claims: Mapping[str, Any], name: str, minimum: int | None = None) -> int | None:
    value = claim(claims, name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or (minimum is not None and value < minimum):
        raise InvalidToken(f"claim {name!r} is not a whole number")
    return value
