"""Requests that are run ahead of their callers, so that the answers are in the cache when those come.

A line of a file, or an item of a list, is a request's body (what has `messages` is a chat, what has `prompt` a
completion), or an object with `url` and `body`, as in OpenAI's batch files, and perhaps `tenant` and `subject`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from auth.principal import Principal
from cache.store import Hit

from .bodies import parse
from .cache_headers import SILENT
from .errors import InvalidRequest, describe
from .logs import Access
from .operations import OPERATIONS, Operation
from .pipeline import Pipeline

logger = logging.getLogger("headrace")

MAX_AT_ONCE = 8
PROGRESS_S = 0.5
LOG_PROGRESS_S = 5.0
ENGINE_POLL_S = 0.2
MAX_REASONS = 20
SUBJECT = "warming"


@dataclass(frozen=True, slots=True)
class Item:
    """A request to be run. `tenant` None: whoever warms."""

    operation: Operation
    body: dict[str, Any]
    tenant: str | None = None
    subject: str | None = None


@dataclass(slots=True)
class Progress:
    """How far it is. `failures` says why, and how often; misses were computed, and are stored now."""

    total: int
    done: int = 0
    hits: int = 0
    misses: int = 0
    failed: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)


def read_item(document: Any) -> Item:
    """Raises: InvalidRequest."""
    if not isinstance(document, dict):
        raise InvalidRequest("A request must be a JSON object.")
    path, body = document.get("url"), document.get("body")
    if not isinstance(body, dict):
        body = document
    if path is None:
        path = next((path for path, operation in OPERATIONS.items() if operation.input in body), None)
    operation = OPERATIONS.get(path) if isinstance(path, str) else None
    if operation is None:
        raise InvalidRequest("It is neither a chat nor a completion: `url`, `messages`, or `prompt` must say.", "url")
    owner = [document.get(name) if body is not document else None for name in ("tenant", "subject")]
    if not all(name is None or isinstance(name, str) for name in owner):
        raise InvalidRequest("`tenant` and `subject` must be strings.", "tenant")
    return Item(operation, body, *owner)


class Warmer:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.running = 0  # how many warmings

    async def warm(self, documents: Sequence[Any], principal: Principal, per_s: float) -> AsyncIterator[Progress]:
        """Run the requests for `principal`, or whom they name where `principal` may act for others (none is given a
        `tenant` otherwise). Yields now and then, and at the end."""
        progress = Progress(total=len(documents))
        failures: Counter[str] = Counter()
        started = time.monotonic()
        self.running += 1
        work = asyncio.create_task(self._run_all(documents, principal, per_s, progress, failures))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=PROGRESS_S)
                progress.seconds = round(time.monotonic() - started, 3)
                progress.failures = dict(failures.most_common(MAX_REASONS))
                yield progress
            work.result()
        finally:
            self.running -= 1
            work.cancel()
            await asyncio.wait([work])

    async def _run_all(
        self, documents: Sequence[Any], principal: Principal, per_s: float, progress: Progress, failures: Counter[str]
    ) -> None:
        slots = asyncio.Semaphore(MAX_AT_ONCE)
        next_at = time.monotonic()

        async def run(document: Any) -> None:
            try:
                outcome = await self._run(document, principal)
                progress.hits += outcome == "hit"
                progress.misses += outcome == "miss"
            except Exception as exc:
                progress.failed += 1
                failures[describe(exc).message[:200]] += 1
            finally:
                progress.done += 1
                slots.release()

        async with asyncio.TaskGroup() as group:
            for document in documents:
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))
                next_at = max(next_at, time.monotonic() - 1) + 1 / per_s
                await slots.acquire()
                group.create_task(run(document))

    async def _run(self, document: Any, principal: Principal) -> str:
        """Raises: InvalidRequest for what is not cached anyway, and what a request raises."""
        item = read_item(document)
        if item.tenant is not None:
            principal = principal._replace(tenant=item.tenant, subject=item.subject or SUBJECT)
        access = Access("warming", "POST", item.operation.path)
        body = {name: value for name, value in item.body.items() if name not in ("stream", "stream_options")}
        wanted = self._pipeline.prepare(
            item.operation, body, principal, SILENT._replace(max_age_s=float("inf")), {}, access
        )
        if wanted.obstacle is not None:
            raise InvalidRequest(f"Such a request is not cached: {wanted.obstacle}.")
        source = await self._pipeline.find(wanted)
        if isinstance(source, Hit):
            return "hit"
        landed = await self._pipeline.wait(wanted, source)
        if not landed.is_stored:
            raise InvalidRequest("The answer was not one that is stored.")
        return "miss"


class StartupWarming:
    """Runs a file's requests when an engine is ready; part of the gateway's life."""

    def __init__(
        self, warmer: Warmer, file: Path, tenant: str | None, per_s: float, is_ready: Callable[[], bool]
    ) -> None:
        self._warmer = warmer
        self._file = file
        self._per_s = per_s
        self._is_ready = is_ready
        self._principal = Principal(SUBJECT, tenant or SUBJECT, frozenset({"inference"}))

    async def run(self) -> None:
        try:
            lines = await asyncio.to_thread(self._file.read_bytes)
        except OSError as exc:
            logger.error("warming: %s: %s", self._file, exc.strerror or exc)
            return
        while not self._is_ready():  # noqa: ASYNC110 - readiness is of several parts, and has no event
            await asyncio.sleep(ENGINE_POLL_S)
        documents = list(parse_lines(lines.splitlines()))
        logger.info("warming: %d requests of %s", len(documents), self._file)
        told = time.monotonic()
        progress = Progress(0)
        async for progress in self._warmer.warm(documents, self._principal, self._per_s):
            if time.monotonic() - told > LOG_PROGRESS_S:
                told = time.monotonic()
                logger.info("warming: %s", progress_line(progress))
        logger.info("warming is done: %s", progress_line(progress))


def parse_lines(lines: Iterable[bytes]) -> Iterator[Any]:
    """A document for each line that is not empty; None for one that is not JSON, which will count as a failure."""
    for line in lines:
        if line.strip():
            try:
                yield parse(line)
            except Exception:
                yield None


def progress_line(progress: Progress) -> str:
    line = (
        f"{progress.done} of {progress.total}, {progress.hits} hits, {progress.misses} misses, {progress.failed} failed"
    )
    reasons = "; ".join(f"{count} times {reason}" for reason, count in progress.failures.items())
    return f"{line} ({reasons})" if reasons else line


def progress_document(progress: Progress) -> dict[str, Any]:
    return asdict(progress)
