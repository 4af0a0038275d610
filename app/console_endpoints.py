"""`/console`: the page that shows what the gateway does, as it lies in app/console. It needs no token; what it asks the
gateway for does.
"""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .errors import MethodNotAllowed, NotFound, Refusal, describe

FOLDER = Path(__file__).parent / "console"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What a model says is shown on this page, and a token is typed into it: nothing but its own files is run or asked, and
# no text can become markup (require-trusted-types-for).
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    media_type: str
    etag: str


class Console:
    """An ASGI application for `/console` and what lies under it. The files are read once, so a name in a URL never is a
    path on the disk."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {path.name: read_file(path) for path in folder.iterdir() if path.suffix in MEDIA_TYPES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(Request(scope, receive))(scope, receive, send)

    def _answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return refuse(request, MethodNotAllowed(request.method, "GET"))
        name: str | None = request.path_params.get("name")
        if name is None:
            # The page's addresses are relative, so that it works behind a proxy that puts a path before it.
            return Response(status_code=307, headers={**HEADERS, "location": "console/"})
        file = self._files.get(name or "index.html")
        if file is None:
            return refuse(request, NotFound(request.url.path))
        headers = {**HEADERS, "etag": file.etag}
        if file.etag in map(str.strip, request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)


def add_console_endpoints(app: Starlette) -> None:
    console = Console()
    app.router.routes += [Route("/console", console), Route("/console/{name:path}", console)]


def read_file(path: Path) -> File:
    body = path.read_bytes()
    # Weak, as the same file also leaves compressed (RFC 9110, section 8.8.1).
    return File(body, MEDIA_TYPES[path.suffix], f'W/"{blake2b(body, digest_size=16).hexdigest()}"')


def refuse(request: Request, refusal: Refusal) -> Response:
    """The error that the gateway answers everywhere, with this page's headers."""
    failure = describe(refusal)
    request.state.access.error = failure.code
    headers = HEADERS | {name.decode(): value.decode() for name, value in failure.headers()}
    body = failure.body(request.state.access.request_id)
    return Response(body, failure.status, headers, media_type="application/json")
