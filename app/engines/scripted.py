"""An engine that answers as it was told, at the pace it was told: for tests and demonstrations.

It speaks of words as tokens, and honours max_tokens, stop, n, and usage as a model would.
"""

import asyncio
import itertools
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from routing.engine import Answer, Call, Event, Load, Take, Usage
from routing.errors import ContextLengthExceeded, EngineDied, EngineError, RequestRejected, UnsupportedOperation

WORD = re.compile(r"\s*\S+")


class Gate:
    """Where a scripted answer waits before each token until the test says go on."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._permits = 0
        self._is_open = False
        self._changed = asyncio.Event()

    async def pass_through(self) -> None:
        self.arrived.set()
        while not self._is_open and self._permits == 0:
            self._changed.clear()
            await self._changed.wait()
        self._permits = max(0, self._permits - 1)

    def release(self, tokens: int) -> None:
        self._permits += tokens
        self._changed.set()

    def open(self) -> None:
        self._is_open = True
        self._changed.set()


@dataclass(frozen=True, slots=True)
class Script:
    """How to answer one request. `error_after` and `die_after` count tokens; 0 is before the first."""

    text: str
    first_token_s: float = 0.0
    token_s: float = 0.0
    error_after: int | None = None
    die_after: int | None = None
    gate: Gate | None = None


class ScriptedEngine:
    """`script` chooses the answer to each call; `calls` counts them."""

    stage = "learning its lines"

    def __init__(
        self,
        script: Script | Callable[[Call], Script],
        max_model_len: int = 8192,
        operations: frozenset[str] = frozenset({"chat.completions", "completions"}),
    ) -> None:
        self._script = script if callable(script) else lambda call: script
        self._max_model_len = max_model_len
        self._operations = operations
        self.load = Load()
        self.calls = 0
        self.starts = 0
        self.is_alive = False

    async def start(self) -> None:
        self.starts += 1
        self.is_alive = True

    async def stop(self) -> None:
        self.is_alive = False

    async def check(self) -> None:
        if not self.is_alive:
            raise EngineDied("the scripted engine was told to die")

    async def answer(self, call: Call) -> Answer:
        reply = self._begin(call)
        with self._running():
            pieces: list[list[str]] = [[] for _ in range(reply.choices)]
            async for choice, token in self._tokens(reply):
                pieces[choice].append(token)
        choices = [
            reply.choice(index, "".join(pieces[index]), is_delta=False) | {"finish_reason": reply.finish_reason}
            for index in range(reply.choices)
        ]
        body = reply.head() | {"choices": choices, "usage": usage_document(reply.usage)}
        return Answer(orjson.dumps(body), reply.usage)

    async def stream(self, call: Call, take: Take) -> None:
        reply = self._begin(call)
        with self._running():
            left = [len(reply.tokens)] * reply.choices
            async for choice, token in self._tokens(reply):
                left[choice] -= 1
                finish_reason = reply.finish_reason if left[choice] == 0 else None
                chunk = reply.choice(choice, token, is_delta=True) | {"finish_reason": finish_reason}
                if "delta" in chunk and left[choice] == len(reply.tokens) - 1:
                    chunk["delta"]["role"] = "assistant"
                take([Event(orjson.dumps(reply.head() | {"choices": [chunk]}))])
            last = reply.head() | {"choices": [], "usage": usage_document(reply.usage)}
            take([Event(orjson.dumps(last), usage=reply.usage)])

    def _begin(self, call: Call) -> "Reply":
        if not self.is_alive:
            raise EngineDied("the scripted engine was told to die")
        if call.operation not in self._operations:
            raise UnsupportedOperation(f"This model has no operation {call.operation}.")
        self.calls += 1
        reply = Reply(call, self._script(call))
        if reply.usage.prompt_tokens > self._max_model_len:
            raise ContextLengthExceeded(
                f"The model's context is {self._max_model_len} tokens; the prompt has {reply.usage.prompt_tokens}.",
                call_input(call)[0],
            )
        reply.tally.prompt_tokens = reply.usage.prompt_tokens
        return reply

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.load.running += 1
        try:
            yield
        finally:
            self.load.running -= 1

    async def _tokens(self, reply: "Reply") -> AsyncGenerator[tuple[int, str], None]:
        script = reply.script
        sent = 0
        if script.first_token_s:
            await asyncio.sleep(script.first_token_s)
        for position, token in enumerate(reply.tokens):
            for choice in range(reply.choices):
                if script.gate is not None:
                    await script.gate.pass_through()
                self._fail_if_told(script, sent)
                reply.tally.completion_tokens += 1
                yield choice, token
                sent += 1
            if script.token_s and position + 1 < len(reply.tokens):
                await asyncio.sleep(script.token_s)
        self._fail_if_told(script, sent)

    def _fail_if_told(self, script: Script, sent: int) -> None:
        if script.die_after is not None and sent >= script.die_after:
            self.is_alive = False
        if not self.is_alive:
            raise EngineDied("the scripted engine was told to die")
        if script.error_after is not None and sent >= script.error_after:
            raise EngineError("The scripted engine was told to fail.")


class Reply:
    """One answer as it will be given: the same tokens for every choice."""

    def __init__(self, call: Call, script: Script) -> None:
        body = call.body
        self.script = script
        self.tally = call.tally
        self._call = call
        self._id = uuid.uuid4().hex
        self._created = int(time.time())
        field, value = call_input(call)
        prompts = [words(prompt) for prompt in prompts_of(field, value)]
        self.choices = int(body.get("n", 1)) * len(prompts)
        text, self.finish_reason = cut_at_stop(script.text, body.get("stop"))
        self.tokens = WORD.findall(text) or [""]
        limit = whole_number(body, "max_completion_tokens") or whole_number(body, "max_tokens")
        if limit is not None and limit < len(self.tokens):
            self.tokens, self.finish_reason = self.tokens[:limit], "length"
        self.usage = Usage(sum(prompts), len(self.tokens) * self.choices)

    def head(self) -> dict[str, Any]:
        is_chat = self._call.operation == "chat.completions"
        kind = ("chat.completion.chunk" if self._call.body.get("stream") else "chat.completion") if is_chat else None
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._id}",
            "object": kind or "text_completion",
            "created": self._created,
            "model": self._call.model,
        }

    def choice(self, index: int, text: str, is_delta: bool) -> dict[str, Any]:
        if self._call.operation != "chat.completions":
            return {"index": index, "text": text, "logprobs": None}
        message = {"content": text} if is_delta else {"role": "assistant", "content": text}
        return {"index": index, "delta" if is_delta else "message": message, "logprobs": None}


def call_input(call: Call) -> tuple[str, Any]:
    field = "messages" if call.operation == "chat.completions" else "prompt"
    return field, call.body[field]


def prompts_of(field: str, value: Any) -> list[Any]:
    """One prompt or several: text, a list of texts, token ids, or lists of those.

    Raises: RequestRejected.
    """
    if field == "messages":
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise RequestRejected("`messages` must be a list of objects.", field)
        return [value]
    if isinstance(value, str) or is_token_ids(value):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) or is_token_ids(item) for item in value):
        return value
    raise RequestRejected("`prompt` must be text, token ids, or a list of those.", field)


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, int) for item in value)


def words(prompt: Any) -> int:
    """How many tokens a prompt has: a token id is one, and so is a word."""
    if isinstance(prompt, str):
        return len(WORD.findall(prompt))
    if all(isinstance(item, int) for item in prompt):
        return len(prompt)
    texts = itertools.chain.from_iterable(
        [message.get("content")] if isinstance(message.get("content"), str) else [json.dumps(message.get("content"))]
        for message in prompt
    )
    return sum(len(WORD.findall(text)) for text in texts)


def cut_at_stop(text: str, stop: Any) -> tuple[str, str]:
    """The text up to the first stop string, and the finish reason. Raises: RequestRejected."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise RequestRejected("`stop` must be text, or a list of texts.", "stop")
    ends = [text.find(item) for item in stops if item and item in text]
    return (text[: min(ends)] if ends else text), "stop"


def whole_number(body: dict[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestRejected(f"`{key}` must be a whole number from 1.", key)
    return value


def usage_document(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
