"""Log lines: JSON for machines, readable ones for people; and the one line that every request leaves.

Never in a line: tokens, keys, prompts, answers.
"""

import asyncio
import contextlib
import logging
import logging.config
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson

from routing.engine import Tally, Usage

if TYPE_CHECKING:
    from .tracing import Trace

logger = logging.getLogger("headrace")
access_logger = logging.getLogger("headrace.access")

FLUSH_S = 0.02


@dataclass(slots=True)
class Access:
    """What is known of a request when it ends. Times are of the monotonic clock, in seconds. `steps` are those of its
    walk, each with the time of its end."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    operation: str | None = None
    model: str | None = None
    variant: str | None = None
    replica: str | None = None
    retries: int = 0
    fallback: str | None = None
    tenant: str | None = None
    subject: str | None = None
    stream: bool = False
    status: int | None = None
    outcome: str = "ok"
    error: str | None = None
    reason: str | None = None
    steps: list[tuple[str, float]] = field(default_factory=list)
    first_token: float | None = None
    last_token: float = 0.0
    usage: Usage | None = None
    cache: str | None = None
    cache_detail: str | None = None
    duration_s: float = 0.0
    gateway_s: float = 0.0
    trace_id: str | None = None
    trace: "Trace | None" = None
    _waited_s: float = 0.0

    @property
    def level(self) -> int:
        is_watch = self.path == "/metrics" or self.path.startswith("/health")
        return logging.DEBUG if is_watch else logging.INFO

    def did(self, step: str) -> None:
        """Note the end of a step, which began where the one before it ended."""
        self.steps.append((step, time.perf_counter()))

    def received(self) -> None:
        """The body is here; the wait for it was not of the gateway's making."""
        began = self.steps[-1][1] if self.steps else self.started
        now = time.perf_counter()
        self._waited_s += now - began
        self.steps.append(("body", now))

    def waited(self, tally: Tally, leads: bool) -> None:
        """The wait for a flight is over. Its leader knows what of it was for the queue, and what for the engine."""
        began = self.steps[-1][1] if self.steps else self.started
        now = time.perf_counter()
        if not leads:
            self._waited_s += now - began
            self.steps.append(("flight", now))
            return
        self._waited_s += tally.queued_s + tally.engine_s
        queued = began + tally.queued_s
        if tally.queued_s:
            self.steps.append(("queue", queued))
        self.steps += (("dispatch", max(queued, now - tally.engine_s)), ("engine", now))

    def end(self) -> None:
        """Note the time of the end. The gateway's own part is that up to an answer's first byte, less the waits."""
        now = time.perf_counter()
        self.duration_s = now - self.started
        self.gateway_s = (self.first_token or now) - self.started - self._waited_s

    def add_to(self, line: dict[str, Any]) -> None:
        """What there is to say; written out, since it is done for every request."""
        line["request_id"], line["method"], line["path"] = self.request_id, self.method, self.path
        if self.trace_id is not None:
            line["trace_id"] = self.trace_id
        if self.operation is not None:
            line["operation"] = self.operation
        if self.model is not None:
            line["model"] = self.model
        if self.variant is not None:
            line["variant"] = self.variant
        if self.replica is not None:
            line["replica"] = self.replica
        if self.retries:
            line["retries"] = self.retries
        if self.fallback is not None:
            line["fallback"] = self.fallback
        if self.tenant is not None:
            line["tenant"], line["subject"] = self.tenant, self.subject
        if self.stream:
            line["stream"] = True
        if self.status is not None:
            line["status"] = self.status
        line["outcome"] = self.outcome
        if self.error is not None:
            line["error"] = self.error
        if self.reason is not None:
            line["reason"] = self.reason
        if self.cache is not None:
            line["cache"] = self.cache
        if self.cache_detail is not None:
            line["cache_detail"] = self.cache_detail
        if self.first_token is not None:
            line["ttft_ms"] = round((self.first_token - self.started) * 1000, 2)
        line["duration_ms"] = round(self.duration_s * 1000, 2)
        usage = self.usage
        if usage is not None:
            line["prompt_tokens"], line["completion_tokens"] = usage.prompt_tokens, usage.completion_tokens
            if usage.cached_tokens is not None:
                line["cached_tokens"] = usage.cached_tokens


class AccessLog:
    """Writes the line of every request, in the form and at the level that logging is configured with, but not through
    it: a record that passes a formatter and a handler takes longer than an answer from the cache. The lines of FLUSH_S
    are made and written together, which is quicker still."""

    def __init__(self, log_format: str) -> None:
        self._is_json = log_format == "json"
        self._ended: list[tuple[float, Access]] = []

    def write(self, access: Access) -> None:
        """Of a request that has ended. To be called in the event loop."""
        if not self._ended:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        self._ended.append((time.time(), access))

    def flush(self) -> None:
        ended, self._ended = self._ended, []
        lines = [line for ended_at, access in ended if (line := self._line(ended_at, access)) is not None]
        if lines:
            # What logging does when nobody reads what it writes: nothing.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("\n".join([*lines, ""]))
                sys.stderr.flush()

    def _line(self, ended_at: float, access: Access) -> str | None:
        level = access.level
        if not access_logger.isEnabledFor(level):
            return None
        if not self._is_json:
            fields: dict[str, Any] = {}
            access.add_to(fields)
            return f"{_clock(int(ended_at))} request {' '.join(f'{name}={value}' for name, value in fields.items())}"
        line = {
            "time": _iso(ended_at),
            "level": "debug" if level == logging.DEBUG else "info",
            "logger": access_logger.name,
            "message": "request",
        }
        access.add_to(line)
        return orjson.dumps(line).decode()


def log_failure(access: Access, exc: BaseException) -> None:
    """A fault of the gateway's own."""
    logger.error("request %s failed", access.request_id, exc_info=exc, extra={"trace_id": access.trace_id})


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _iso(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        trace_id = getattr(record, "trace_id", None)
        if trace_id is not None:
            line["trace_id"] = trace_id
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()

    def formatException(self, ei: Any) -> str:
        return _trace_without_text(ei)


class ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        line = f"{_clock(int(record.created))} {level}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    def formatException(self, ei: Any) -> str:
        return _trace_without_text(ei)


@lru_cache(1)
def _iso_second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _iso(seconds: float) -> str:
    second = int(seconds)
    return f"{_iso_second(second)}.{int((seconds - second) * 1000):03}+00:00"


@lru_cache(1)
def _clock(second: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(second))


def _trace_without_text(ei: Any) -> str:
    """The trace with each error's kind, but not its text, which may quote a prompt."""
    kind, exc, trace = ei
    lines = traceback.format_tb(trace)
    cause = exc.__cause__ if exc is not None else None
    while cause is not None:
        lines = [*traceback.format_tb(cause.__traceback__), f"{type(cause).__qualname__}\n", "then:\n", *lines]
        cause = cause.__cause__
    return "".join([*lines, kind.__qualname__ if kind else ""])


def logging_config(log_format: str, log_level: str, engine_log_level: str) -> dict[str, Any]:
    """For `logging.config.dictConfig`, here and in the engines' own processes."""
    formatter = JsonFormatter if log_format == "json" else ConsoleFormatter
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"class": f"{formatter.__module__}.{formatter.__qualname__}"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            "headrace": {"level": log_level.upper()},
            "vllm": {"level": engine_log_level.upper()},
            # The serving layer logs an error with its text, which may quote the request; the gateway has its own line.
            "vllm.entrypoints": {"level": "CRITICAL"},
            "uvicorn": {"level": "WARNING"},
        },
    }


def configure_logging(log_format: str, log_level: str, engine_log_level: str) -> None:
    logging.config.dictConfig(logging_config(log_format, log_level, engine_log_level))
