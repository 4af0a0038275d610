"""Ways around a pool: others that step in when it cannot answer, or when it has too much to do."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from .admission import Overloaded
from .engine import Answer, Answerer, Call, Take
from .errors import (
    ContextLengthExceeded,
    EngineDied,
    EngineError,
    EngineOverloaded,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
    RoutingError,
)
from .pool import Pool

logger = logging.getLogger("headrace")

T = TypeVar("T")

Cause = Literal["unavailable", "overloaded", "timeout", "error", "context_length"]


def cause_of(error: RoutingError) -> Cause | None:
    """None: another pool would fare no better."""
    match error:
        case EngineOverloaded() | Overloaded():
            return "overloaded"
        case EngineUnavailable() | EngineUnreachable() | EngineDied():
            return "unavailable"
        case EngineTimeout():
            return "timeout"
        case EngineError():
            return "error"
        case ContextLengthExceeded():
            return "context_length"
    return None


@dataclass(frozen=True, slots=True)
class Fallback:
    """Who steps in, under which name, and when. `model` is what it is asked for; None: what the caller asks for."""

    name: str
    engine: Answerer
    causes: frozenset[str]
    model: str | None = None

    def translate(self, call: Call) -> Call:
        """The caller still sees the model that was asked for."""
        return call if self.model is None else replace(call, body={**call.body, "model": self.model})


class WithFallbacks:
    """Asks the fallbacks, one after the other, when `first` does not answer, for the causes that each is for. After the
    first event nobody steps in."""

    def __init__(self, first: Answerer, fallbacks: Sequence[Fallback]) -> None:
        self._first = first
        self._fallbacks = tuple(fallbacks)

    async def answer(self, call: Call) -> Answer:
        """Raises: what the last one asked does."""
        return await self._ask(call, lambda engine, asked: engine.answer(asked))

    async def stream(self, call: Call, take: Take) -> None:
        """Raises: what the last one asked does."""
        await self._ask(call, lambda engine, asked: engine.stream(asked, take))

    async def _ask(self, call: Call, ask: Callable[[Answerer, Call], Awaitable[T]]) -> T:
        try:
            return await ask(self._first, call)
        except RoutingError as exc:
            error = exc
        for fallback in self._fallbacks:
            if call.tally.first_event_at is None and self._takes(fallback, error, call):
                try:
                    return await ask(fallback.engine, fallback.translate(call))
                except RoutingError as exc:
                    error = exc
        raise error

    def _takes(self, fallback: Fallback, error: RoutingError, call: Call) -> bool:
        cause = cause_of(error)
        if cause is None or cause not in fallback.causes:
            return False
        call.tally.fallback = fallback.name
        return True


class Spillway(Answerer, Protocol):
    """What takes what is too much for another, while it can."""

    @property
    def is_ready(self) -> bool: ...


class SpillOver:
    """Sends requests to `other` while the engine's own queue is long: from `above` requests in it on, until there are
    as few as `until`. `waiting` tells how long it is. Where `other` cannot answer, a long queue is better."""

    def __init__(self, first: Pool, other: Spillway, waiting: Callable[[], int], above: int, until: int) -> None:
        self._first = first
        self._other = other
        self._waiting = waiting
        self._above, self._until = above, until
        self._is_spilling = False

    async def answer(self, call: Call) -> Answer:
        return await self._choose().answer(call)

    async def stream(self, call: Call, take: Take) -> None:
        await self._choose().stream(call, take)

    def _choose(self) -> Answerer:
        waiting = self._waiting()
        if self._is_spilling != (waiting > (self._until if self._is_spilling else self._above)):
            self._is_spilling = not self._is_spilling
            what = "spills over" if self._is_spilling else "takes all requests again"
            logger.info("pool %s: %s", self._first.name, what)
        if not (self._is_spilling and self._other.is_ready):
            return self._first
        self._first.spilled += 1
        return self._other


class Watched:
    """Tells a guardrail how each call went: whether it failed, and its seconds to the first token of a stream."""

    def __init__(self, engine: Answerer, record: Callable[[bool, float | None], None]) -> None:
        self._engine = engine
        self._record = record

    async def answer(self, call: Call) -> Answer:
        try:
            answer = await self._engine.answer(call)
        except RoutingError as exc:
            self._note(exc, None)
            raise
        self._record(False, None)
        return answer

    async def stream(self, call: Call, take: Take) -> None:
        began = time.monotonic()
        try:
            await self._engine.stream(call, take)
        except RoutingError as exc:
            self._note(exc, ttft_s(call, began))
            raise
        self._record(False, ttft_s(call, began))

    def _note(self, error: RoutingError, ttft_s: float | None) -> None:
        """A request that is wrong says nothing of who refuses it."""
        if isinstance(error, EngineError | Overloaded):
            self._record(True, ttft_s)


def ttft_s(call: Call, began: float) -> float | None:
    """Seconds to its first event; None: there was none."""
    return None if call.tally.first_event_at is None else call.tally.first_event_at - began
