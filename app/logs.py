"""Log lines: JSON for machines, readable ones for people; and the one line that every request leaves.

Never in a line: tokens, keys, prompts, answers.
"""

import logging
import logging.config
import time
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from routing.engine import Usage

access_logger = logging.getLogger("headrace.access")


@dataclass(slots=True)
class Access:
    """What is known of a request when it ends. Times are of the monotonic clock, in seconds."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    operation: str | None = None
    model: str | None = None
    tenant: str | None = None
    subject: str | None = None
    stream: bool = False
    status: int | None = None
    outcome: str = "ok"
    error: str | None = None
    reason: str | None = None
    first_token: float | None = None
    usage: Usage | None = None
    cache: str | None = None
    cache_detail: str | None = None
    duration_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started

    def end(self) -> None:
        """Note the time of the end, and write the line."""
        self.duration_s = time.perf_counter() - self.started
        self._write()

    def _write(self) -> None:
        level = logging.DEBUG if self.path == "/metrics" or self.path.startswith("/health") else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        ttft_s = self.ttft_s
        fields = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "operation": self.operation,
            "model": self.model,
            "tenant": self.tenant,
            "subject": self.subject,
            "stream": self.stream or None,
            "status": self.status,
            "outcome": self.outcome,
            "error": self.error,
            "reason": self.reason,
            "cache": self.cache,
            "cache_detail": self.cache_detail,
            "ttft_ms": None if ttft_s is None else round(ttft_s * 1000, 2),
            "duration_ms": round(self.duration_s * 1000, 2),
            "prompt_tokens": self.usage and self.usage.prompt_tokens,
            "completion_tokens": self.usage and self.usage.completion_tokens,
            "cached_tokens": self.usage and self.usage.cached_tokens,
        }
        access_logger.log(level, "request", extra={"fields": {k: v for k, v in fields.items() if v is not None}})


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()

    def formatException(self, ei: Any) -> str:
        return _trace_without_text(ei)


class ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        fields = " ".join(f"{key}={value}" for key, value in getattr(record, "fields", {}).items())
        line = f"{stamp} {level}{record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    def formatException(self, ei: Any) -> str:
        return _trace_without_text(ei)


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
