"""`headrace cache warm`: has a gateway run the requests of a file, and shows how far it is."""

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .warming import Progress, parse_lines, progress_line

CHUNK = 200  # requests sent at once
CHUNK_BYTES = 4 * 1024 * 1024
TIMEOUT_S = 300.0  # between two signs of progress
SHOW_S = 5.0  # where the output is no terminal


class WarmingError(Exception):
    """Warming cannot go on; the message says why."""


def warm(file: Path, url: str, token: str, per_s: float | None) -> Progress:
    """Run the requests of a JSON Lines file through the gateway at `url`. Raises: WarmingError."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as exc:
        raise WarmingError(f"{file}: {exc.strerror or exc}") from None
    documents = list(parse_lines(lines))
    total = Progress(total=len(documents))
    failures: Counter[str] = Counter()
    display = Display()
    for chunk in chunks(documents):
        before = Progress(total.total, total.done, total.hits, total.misses, total.failed, total.seconds)
        step: dict[str, Any] = {}
        for step in run_chunk(chunk, url, token, per_s):
            for name in ("done", "hits", "misses", "failed", "seconds"):
                setattr(total, name, getattr(before, name) + step[name])
            display.show(total)
        failures.update(step.get("failures", {}))
    total.failures = dict(failures)
    display.end(total)
    return total


def chunks(documents: list[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    size = 0
    for document in documents:
        length = len(json.dumps(document))
        if chunk and (len(chunk) == CHUNK or size + length > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(document)
        size += length
    if chunk:
        yield chunk


def run_chunk(documents: list[Any], url: str, token: str, per_s: float | None) -> Iterator[dict[str, Any]]:
    """What the gateway says of its progress, and at the end."""
    body = {"requests": documents, "stream": True, **({} if per_s is None else {"requests_per_s": per_s})}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/cache/warm",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {token}"},
    )
    is_done = False
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            for line in response:
                payload = line.removeprefix(b"data: ").strip()
                is_done = is_done or payload == b"[DONE]"
                if payload.startswith(b"{"):
                    yield json.loads(payload)
    except urllib.error.HTTPError as exc:
        raise WarmingError(f"{url} says {exc.code}: {message_of(exc.read())}") from None
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise WarmingError(f"{url}: {getattr(exc, 'reason', None) or exc}") from None
    if not is_done:
        raise WarmingError(f"{url} ended before it was done")


def message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


class Display:
    """One line that is written over on a terminal; a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown = time.monotonic()

    def show(self, progress: Progress) -> None:
        if self._is_terminal:
            print(f"\r\033[K{progress_line(progress)}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._shown > SHOW_S:
            self._shown = time.monotonic()
            print(progress_line(progress), file=sys.stderr, flush=True)

    def end(self, progress: Progress) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr)
        print(f"{progress_line(progress)}, in {progress.seconds:.1f} s")
