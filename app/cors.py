"""Cross-origin requests of browsers: Starlette's middleware, with refusals in the gateway's own form."""

import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from .errors import OriginNotAllowed, describe

EXPOSED = [
    "X-Request-ID",
    "Cache-Status",
    "Age",
    "Retry-After",
    "WWW-Authenticate",
    "Server-Timing",
    *(f"X-RateLimit-{what}-{kind}" for what in ("Limit", "Remaining", "Reset") for kind in ("Requests", "Tokens")),
]
MAX_AGE_S = 600


class Cors(CORSMiddleware):
    """Answers preflights without a token, since browsers send none with them, and marks answers for the configured
    origins. A token travels in a header, never in a cookie, so credentials are not allowed."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        # What headers a caller may send is not limited: the OpenAI package adds several of its own.
        super().__init__(
            app, origins, ["GET", "POST"], ["*"], allow_credentials=False, expose_headers=EXPOSED, max_age=MAX_AGE_S
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return Response(status_code=204, headers=_without_body(response.headers))
        failure = describe(OriginNotAllowed())
        body = failure.body(uuid.uuid4().hex)
        return Response(body, failure.status, _without_body(response.headers), media_type="application/json")


def _without_body(headers: Headers) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in ("content-length", "content-type")}
