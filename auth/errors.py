"""Why a caller is not let in. No HTTP here: app/errors.py translates."""

from collections.abc import Sequence

from .plan import Standing


class AuthError(Exception):
    """Base of this package's errors. Its text is shown to callers: it never says what a token should have been."""


class AuthConfigError(Exception):
    """The settings of authentication cannot be used; the text is one clear line."""


# Who is calling


class Unauthenticated(AuthError):
    """Nobody knows who is calling."""


class MissingToken(Unauthenticated):
    """There is no bearer token."""

    def __init__(self) -> None:
        super().__init__("A token is needed: `Authorization: Bearer <token>`.")


class InvalidToken(Unauthenticated):
    """The token is not one of ours. `reason` is for the gateway's log only, and holds nothing of the token."""

    def __init__(self, reason: str) -> None:
        super().__init__("The token is not valid.")
        self.reason = reason


class ExpiredToken(Unauthenticated):
    """The token was valid once."""

    def __init__(self) -> None:
        super().__init__("The token has expired.")


class KeysUnavailable(AuthError):
    """The provider's keys have not been fetched yet, so no token can be checked."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("Tokens cannot be checked now; try again.")
        self.retry_after_s = retry_after_s


# What they may use


class InsufficientScope(AuthError):
    """The token lacks the scope of what was asked for."""

    def __init__(self, scope: str) -> None:
        super().__init__(f"The token lacks the scope {scope!r}.")
        self.scope = scope


class ModelNotAllowed(AuthError):
    """The caller may use other models only; whether this one exists is not told."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The token does not allow the model {model[:200]!r}.")


# How much


class LimitExceeded(AuthError):
    """Too much at once, or within a minute. `kind` is requests, tokens, or concurrent; `standings` are the caller's
    windows."""

    def __init__(self, message: str, kind: str, retry_after_s: float, standings: Sequence[Standing]) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.standings = standings


class RateLimitExceeded(LimitExceeded):
    """The requests or tokens of this minute are used up; `retry_after_s` is when the next one begins."""


class ConcurrencyLimitExceeded(LimitExceeded):
    """As many requests run as may."""
