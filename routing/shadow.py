"""Shadow traffic: a variant gets copies of calls that another one has answered, and nobody gets its answers.

How far two answers are apart is told by the words that they share in pairs of neighbours: the Sørensen-Dice coefficient
of shingles (A. Z. Broder: On the resemblance and containment of documents. SEQUENCES 1997) of two words. Unlike the
place of the first difference it forgives one word at the start; and unlike an alignment (difflib), which is quadratic
or worse for the repetitive texts of a bad model, it takes time in proportion to the texts: the event loop can do it.
"""

import asyncio
import dataclasses
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

import orjson

from .engine import Call, Tally
from .errors import (
    EngineError,
    EngineOverloaded,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
    RequestRejected,
    RoutingError,
    UnsupportedOperation,
)
from .hashing import share as share_of
from .split import Variant

COMPARED_WORDS = 1000  # of an answer, all its choices together: that takes a millisecond
COMPARED_BYTES = 512 * 1024  # a longer answer is not decoded: that alone would take milliseconds
PRIORITY = -sys.maxsize  # of copies: where callers wait for the same pool, they go first

# Without spaces between words, as in Chinese and Japanese, each character is one.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")

ERROR_KINDS = (
    ((TimeoutError, EngineTimeout), "timeout"),
    (EngineOverloaded, "overloaded"),
    (EngineUnreachable, "unreachable"),
    (RequestRejected, "rejected"),
    (UnsupportedOperation, "unsupported"),
    (EngineUnavailable, "unavailable"),
    (EngineError, "engine"),
    (RoutingError, "refused"),
)

logger = logging.getLogger("headrace")


@dataclass(slots=True)
class ShadowStats:
    """Counts since the start. `dropped` are calls that were to be sent while there was no room; `errors` is by kind.

    Of `compared` pairs of answers `identical` have the very same texts; `difference_mean` is from 0 to 1. The latencies
    are means over the same calls, those that the shadow has answered. None: nothing to tell from.
    """

    sent: int = 0
    dropped: int = 0
    in_flight: int = 0
    answered: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    identical: int = 0
    difference_mean: float | None = None
    latency_mean_s: float | None = None
    primary_latency_mean_s: float | None = None


class Shadow:
    """Copies a `share` of the calls it is offered to a variant, at most `max_in_flight` at a time."""

    def __init__(
        self,
        variant: Variant,
        share: float,
        max_in_flight: int = 4,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.variant = variant
        self._share = share
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._clock = clock
        # So that whose calls are copied does not hang on which variant the split gave them.
        self._salt = b"shadow:%b:" % variant.name.encode()
        # Mutable state: `_group` is there while copies can be sent; `_tasks` are those under way.
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sent = self._dropped = 0
        self._errors: Counter[str] = Counter()
        self._answered = self._compared = self._identical = 0
        self._difference = self._latency_s = self._primary_latency_s = 0.0  # sums

    async def run(self) -> None:
        """Let copies be sent until cancelled, and those under way with it."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None

    def is_for(self, key: bytes) -> bool:
        """Whether the key is in the share."""
        return share_of(self._salt + key) < self._share

    def offer(self, key: bytes, call: Call, answer: bytes | None, latency_s: float) -> None:
        """Copy a call that was answered, if its key is in the share, and drop it if there is no room.

        `answer` is the whole document to compare with, None if there is none; `latency_s` what it took. The call's own
        body is not changed.
        """
        if not self.is_for(key):
            return
        if self._group is None or len(self._tasks) >= self._max_in_flight:
            self._dropped += 1
            return
        self._sent += 1
        task = self._group.create_task(self._send(copy_of(call), answer, latency_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)  # also of one that was cancelled before it ran

    def stats(self) -> ShadowStats:
        return ShadowStats(
            sent=self._sent,
            dropped=self._dropped,
            in_flight=len(self._tasks),
            answered=self._answered,
            errors=dict(self._errors),
            compared=self._compared,
            identical=self._identical,
            difference_mean=mean(self._difference, self._compared),
            latency_mean_s=mean(self._latency_s, self._answered),
            primary_latency_mean_s=mean(self._primary_latency_s, self._answered),
        )

    async def _send(self, call: Call, answer: bytes | None, latency_s: float) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                other = await self.variant.engine.answer(call)
            self._answered += 1
            self._latency_s += self._clock() - began
            self._primary_latency_s += latency_s
            self._compare(answer, other.body)
        except Exception as exc:  # the gateway lives, whatever becomes of a copy
            self._failed(exc)

    def _failed(self, exc: Exception) -> None:
        kind = next((kind for errors, kind in ERROR_KINDS if isinstance(exc, errors)), "unexpected")
        self._errors[kind] += 1
        if kind == "unexpected" and self._errors[kind] == 1:
            logger.error("shadow variant %s: unexpected error", self.variant.name, exc_info=exc)

    def _compare(self, answer: bytes | None, other: bytes) -> None:
        texts, others = texts_of(answer), texts_of(other)
        if texts is None or others is None:
            return
        self._compared += 1
        self._identical += texts == others
        self._difference += difference_of_texts(texts, others)


def copy_of(call: Call) -> Call:
    """The same call for a whole answer, with an account and an id of its own, which gives way to all others."""
    body = {name: value for name, value in call.body.items() if name not in ("stream", "stream_options")}
    request_id = f"{call.request_id}-shadow"
    return dataclasses.replace(call, body=body, request_id=request_id, tally=Tally(), priority=PRIORITY)


def difference(answer: bytes, other: bytes) -> float | None:
    """How far two answers are apart, from 0 to 1: the mean over their choices. A choice that only one of them has
    counts 1.

    0 is all but equal: texts are compared as far as `COMPARED_WORDS` go, and but for white space. None: they cannot be
    compared, as documents without choices, or longer than `COMPARED_BYTES`.
    """
    texts, others = texts_of(answer), texts_of(other)
    return None if texts is None or others is None else difference_of_texts(texts, others)


def difference_of_texts(texts: list[str], others: list[str]) -> float:
    """There are some of both."""
    words = max(COMPARED_WORDS // len(texts), 1)
    differences = [
        1.0 if text is None or other is None else difference_of_words(text, other, words)
        for text, other in zip_longest(texts, others)
    ]
    return sum(differences) / len(differences)


def difference_of_words(text: str, other: str, limit: int) -> float:
    if text == other:
        return 0.0
    pairs, other_pairs = pairs_of(text, limit), pairs_of(other, limit)
    total = pairs.total() + other_pairs.total()
    return 1.0 - 2 * (pairs & other_pairs).total() / total if total else 0.0


def pairs_of(text: str, limit: int) -> Counter[tuple[str, str]]:
    """Neighbouring words with their counts; the first word is nothing's neighbour, so that a lone one counts too."""
    words = [match[0] for match in islice(WORD.finditer(text), limit)]
    return Counter(zip(["", *words], words, strict=False))


def texts_of(answer: bytes | None) -> list[str] | None:
    """The texts of a document's choices in their order; None: it has none, or is none."""
    if answer is None or len(answer) > COMPARED_BYTES:
        return None
    try:
        choices = orjson.loads(answer)["choices"]
        return [text_of(choice) for choice in sorted(choices, key=lambda choice: choice["index"])] or None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def text_of(choice: dict[str, Any]) -> str:
    """What a choice says, and the tools that it calls."""
    message = choice.get("message")
    if message is None:
        return str(choice["text"])
    functions = [tool_call["function"] for tool_call in message.get("tool_calls") or ()]
    calls = [f"{function['name']} {function['arguments']}" for function in functions]
    return "\n".join([message.get("content") or "", *calls])


def mean(total: float, count: int) -> float | None:
    return total / count if count else None
