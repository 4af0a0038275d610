"""The engine as its consumers see it: an OpenAI-shaped request in, a whole document or a sequence of events out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Usage(NamedTuple):
    """Tokens of one answer. `cached_tokens` (of the prompt, found in the engine's KV cache) is None when not told."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(slots=True)
class Tally:
    """What became of a call so far. The engine counts the tokens that it has worked on itself, so that a call that is
    cut short can be charged. `replica` is the one that answers, or was the last to try; `fallback` the pool that
    stepped in; `first_event_at` is when a stream began, by the monotonic clock. `queued_s` is the wait for a turn and
    for a replica, `engine_s` that for replicas' answers, or first events, all tries together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    replica: str | None = None
    retries: int = 0
    fallback: str | None = None
    first_event_at: float | None = None
    queued_s: float = 0.0
    engine_s: float = 0.0


@dataclass(slots=True)
class Call:
    """One request for an engine, not to be changed; frozen, it would take three times as long to make. `body` is the
    OpenAI request, decoded and without nulls.
    `affinity` is what keeps calls together on a replica, `trace` the W3C trace context as headers; `size_bytes` says
    how much the request holds while it waits."""

    operation: str
    model: str
    body: dict[str, Any]
    request_id: str
    tally: Tally = field(default_factory=Tally)
    tenant: str = ""
    priority: int = 0
    affinity: bytes = b""
    trace: tuple[tuple[bytes, bytes], ...] = ()
    size_bytes: int = 0


class Answer(NamedTuple):
    """A whole answer: a JSON document as it goes to the caller, and, of an engine that has it, the same decoded."""

    body: bytes
    usage: Usage | None
    document: dict[str, Any] | None = None


class Event(NamedTuple):
    """One server-sent event; `data` is its payload without framing, `document` the same decoded, of an engine that has
    it. One with a `text` is the event before it in all but that, its text. The event that only tells usage carries it.
    """

    data: bytes
    name: str | None = None
    usage: Usage | None = None
    document: dict[str, Any] | None = None
    text: str | None = None


@dataclass(slots=True)
class Load:
    """What the engine has said of itself: the requests that it works on, and those in its queue; the share of its KV
    cache in use, where it has one; and, counted since the first start, tokens of prompts that were looked for in its
    prefix cache, and found; requests that it put back into the queue; tokens that it drafted, and accepted."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float | None = None
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def idle(self) -> None:
        """There is no engine any more."""
        self.running = self.waiting = 0
        self.kv_cache_usage = None


# It gets events that came together, is called where they come up, which may be outside of any task, and must not wait
# for anything.
Take = Callable[[list[Event]], None]


class Answerer(Protocol):
    """Both ways to ask raise RequestRejected, UnsupportedOperation, and EngineError with its kinds."""

    async def answer(self, call: Call) -> Answer: ...

    async def stream(self, call: Call, take: Take) -> None:
        """Give events to `take`, as they come; to return is the end of a whole answer (there is no `[DONE]`).

        Always tells usage at the end. To cancel it aborts the engine's work; so does an error that `take` raises.
        """
        ...


class Engine(Answerer, Protocol):
    """An engine with its life. `load` is what it is busy with; `stage` what a start is doing just now, for people who
    wait ("loading the weights")."""

    @property
    def load(self) -> Load: ...

    @property
    def stage(self) -> str: ...

    async def start(self) -> None:
        """Return when requests can be answered. May be called again after `stop`.

        Raises: EngineConfigError, EngineError.
        """
        ...

    async def stop(self) -> None:
        """Free everything, processes included; also after a failed start, and after one that was cancelled."""
        ...

    async def check(self) -> None:
        """Make one round trip to the engine. Raises: EngineDied."""
        ...
