"""The gateway's own refusals, and the one table that turns any error into an answer in OpenAI's form."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from auth.errors import (
    ConcurrencyLimitExceeded,
    ExpiredToken,
    InsufficientScope,
    InvalidToken,
    KeysUnavailable,
    MissingToken,
    ModelNotAllowed,
    RateLimitExceeded,
)
from cache.errors import Diverged, FlightAborted, NotInCache, StreamGone
from routing.admission import Overloaded
from routing.errors import (
    ContextLengthExceeded,
    EngineDied,
    EngineError,
    EngineOverloaded,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
    ModelNotFound,
    RequestRejected,
    UnsupportedOperation,
)
from routing.split import VariantNotFound


class Refusal(Exception):
    """A request that the gateway does not pass on; the text is for the caller."""


class InvalidJSON(Refusal):
    """The body is not JSON."""


class InvalidRequest(Refusal):
    """The body is JSON, and not a request. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLarge(Refusal):
    """The body is over the limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes.")


class RequestTimeout(Refusal):
    """The body stopped coming."""

    def __init__(self) -> None:
        super().__init__("The request body did not arrive in time.")


class NotFound(Refusal):
    """No such path."""

    def __init__(self, path: str) -> None:
        super().__init__(f"There is nothing at {path[:200]!r}.")


class MethodNotAllowed(Refusal):
    """The path exists, this method on it does not."""

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"{method[:20]} is not allowed here; use {allowed}.")
        self.allowed = allowed


class OriginNotAllowed(Refusal):
    """A page of another origin than the configured ones, or one that wants more than it may."""

    def __init__(self) -> None:
        super().__init__("Pages of this origin may not call the gateway like this.")


class ShuttingDown(Refusal):
    """The gateway is on its way out."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("The gateway is shutting down; try again, another replica will answer.")
        self.retry_after_s = retry_after_s


class ClientGone(Exception):
    """The caller has closed the connection: nobody is left to be answered."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it leaves by HTTP."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    allowed: str | None = None
    challenge: str | None = None
    is_last: bool = False  # the connection is closed after it: what is still to come on it is not read

    def body(self, request_id: str) -> bytes:
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                    "request_id": request_id,
                    "timestamp": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
                }
            }
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(self.retry_after_s))))
        if self.allowed is not None:
            headers.append((b"allow", self.allowed.encode()))
        if self.challenge is not None:
            headers.append((b"www-authenticate", self.challenge.encode()))
        if self.is_last:
            headers.append((b"connection", b"close"))
        return headers


class Relayed(Exception):
    """What went wrong at another replica, as it would have left there."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


_CALLER = "invalid_request_error"
_SERVER = "server_error"
_AUTHENTICATION = "authentication_error"
_PERMISSION = "permission_error"

# The first row that fits counts, so a subclass stands above its base.
_TABLE: tuple[tuple[type[Exception], int, str, str], ...] = (
    (InvalidJSON, 400, _CALLER, "invalid_json"),
    (InvalidRequest, 400, _CALLER, "invalid_request"),
    (RequestTooLarge, 413, _CALLER, "request_too_large"),
    (RequestTimeout, 408, _CALLER, "request_timeout"),
    (NotFound, 404, _CALLER, "not_found"),
    (MethodNotAllowed, 405, _CALLER, "method_not_allowed"),
    (MissingToken, 401, _AUTHENTICATION, "missing_token"),
    (InvalidToken, 401, _AUTHENTICATION, "invalid_token"),
    (ExpiredToken, 401, _AUTHENTICATION, "expired_token"),
    (KeysUnavailable, 503, _SERVER, "keys_unavailable"),
    (InsufficientScope, 403, _PERMISSION, "insufficient_scope"),
    (ModelNotAllowed, 403, _PERMISSION, "model_not_allowed"),
    (RateLimitExceeded, 429, "requests", "rate_limit_exceeded"),
    (ConcurrencyLimitExceeded, 429, "requests", "concurrency_limit_exceeded"),
    (OriginNotAllowed, 403, _PERMISSION, "origin_not_allowed"),
    (ShuttingDown, 503, _SERVER, "shutting_down"),
    (NotInCache, 504, _CALLER, "not_in_cache"),
    (StreamGone, 404, _CALLER, "stream_not_found"),
    (FlightAborted, 503, _SERVER, "engine_unavailable"),
    (Diverged, 502, _SERVER, "engine_error"),
    (ModelNotFound, 404, _CALLER, "model_not_found"),
    (ContextLengthExceeded, 400, _CALLER, "context_length_exceeded"),
    (RequestRejected, 400, _CALLER, "invalid_request"),
    (UnsupportedOperation, 501, _SERVER, "unsupported_operation"),
    (VariantNotFound, 400, _CALLER, "invalid_request"),
    (Overloaded, 503, _SERVER, "overloaded"),
    (EngineOverloaded, 503, _SERVER, "overloaded"),
    (EngineTimeout, 504, _SERVER, "engine_timeout"),
    (EngineUnreachable, 503, _SERVER, "engine_unavailable"),
    (EngineUnavailable, 503, _SERVER, "engine_unavailable"),
    (EngineDied, 503, _SERVER, "engine_unavailable"),
    (EngineError, 502, _SERVER, "engine_error"),
)

_INTERNAL = Failure(500, _SERVER, "internal_error", "The gateway failed at this request.")


def describe(exc: BaseException) -> Failure:
    """Translate an error. What the table does not know says nothing of itself to the caller."""
    if isinstance(exc, Relayed):
        return exc.failure
    for kind, status, type_, code in _TABLE:
        if isinstance(exc, kind):
            param = "model" if isinstance(exc, ModelNotFound | ModelNotAllowed) else getattr(exc, "param", None)
            return Failure(
                status,
                exc.kind if isinstance(exc, RateLimitExceeded) else type_,  # as OpenAI has it: requests, tokens
                code,
                str(exc),
                param=param,
                retry_after_s=getattr(exc, "retry_after_s", None),
                allowed=getattr(exc, "allowed", None),
                challenge=_challenge(exc),
                is_last=isinstance(exc, RequestTooLarge | RequestTimeout | ShuttingDown),
            )
    return _INTERNAL


def _challenge(exc: BaseException) -> str | None:
    """RFC 6750, section 3."""
    realm = 'Bearer realm="headrace"'
    if isinstance(exc, MissingToken):
        return realm
    if isinstance(exc, InvalidToken | ExpiredToken):
        return f'{realm}, error="invalid_token"'
    return f'{realm}, error="insufficient_scope", scope="{exc.scope}"' if isinstance(exc, InsufficientScope) else None


def is_known(exc: BaseException) -> bool:
    """Whether the table has a row for it; what it does not know is a fault of ours, and worth a trace in the log."""
    return isinstance(exc, (Relayed, *(kind for kind, *_ in _TABLE)))
