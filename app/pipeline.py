"""The walk of a request, in the order of its steps; it knows nothing of HTTP."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from auth.authenticator import Authenticator, Everyone
from auth.limits import Admission, Limiter
from auth.principal import Principal
from routing.engine import Answer, Answerer, Call, Event, Usage
from routing.models import Models

from .errors import InvalidRequest
from .logs import Access
from .operations import Operation


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may make one request now, and what that took of their limits."""

    principal: Principal
    admission: Admission


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that was understood, and the engine that will answer it."""

    caller: Caller
    engine: Answerer
    call: Call
    access: Access
    stream: bool
    tells_usage: bool


class Pipeline:
    def __init__(
        self, authenticator: Authenticator | Everyone, limiter: Limiter, models: Models, max_choices: int
    ) -> None:
        self._authenticator = authenticator
        self._limiter = limiter
        self._models = models
        self._max_choices = max_choices

    @asynccontextmanager
    async def admit(self, operation: Operation, authorization: bytes | None, access: Access) -> AsyncIterator[Caller]:
        """Let the caller in for one request, which is counted until the context is left.

        Raises: Unauthenticated, KeysUnavailable, InsufficientScope, LimitExceeded.
        """
        principal = await self._authenticator.authenticate(authorization)
        access.tenant, access.subject = principal.tenant, principal.subject
        principal.check_scope(operation.scope)
        admission = await self._limiter.admit(principal)
        try:
            yield Caller(principal, admission)
        finally:
            await admission.settle()

    def prepare(self, operation: Operation, document: Any, caller: Caller, access: Access) -> Ready:
        """Understand the request and choose its engine, without waiting for anything.

        Raises: InvalidRequest, ModelNotAllowed, ModelNotFound.
        """
        if not isinstance(document, dict):
            raise InvalidRequest("The body must be a JSON object.")
        # As in OpenAI's API, a null stands for a field left out.
        body = {key: value for key, value in document.items() if value is not None}
        name = body.get("model")
        if not isinstance(name, str):
            raise InvalidRequest("`model` must be given, as a string.", "model")
        stream = body.get("stream", False)
        if not isinstance(stream, bool):
            raise InvalidRequest("`stream` must be true or false.", "stream")
        self._check_choices(operation, body)
        caller.principal.check_model(name, exists=name in self._models)
        model = self._models.find(name)
        access.model, access.stream = model.name, stream

        options = body.get("stream_options", {})
        if not isinstance(options, dict):
            raise InvalidRequest("`stream_options` must be an object.", "stream_options")
        if stream:
            # The gateway counts tokens; a caller who did not ask for the usage event does not see it.
            body["stream_options"] = {**options, "include_usage": True}
        call = Call(operation.name, model.name, body, access.request_id)
        return Ready(caller, model.engine, call, access, stream, tells_usage=bool(options.get("include_usage")))

    def _check_choices(self, operation: Operation, body: dict[str, Any]) -> None:
        """Raise InvalidRequest unless input and `n` are there and within bounds: an engine would work on `n: 16384` for
        minutes."""
        inputs = body.get(operation.input)
        if inputs is None or inputs == []:
            raise InvalidRequest(f"`{operation.input}` must be given, and not be empty.", operation.input)
        n = body.get("n", 1)
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidRequest("`n` must be a whole number from 1.", "n")
        is_several = operation.is_batch and isinstance(inputs, list) and not isinstance(inputs[0], int)
        choices = n * len(inputs) if is_several else n
        if choices > self._max_choices:
            raise InvalidRequest(f"The request asks for {choices} answers; {self._max_choices} are allowed.", "n")

    async def answer(self, ready: Ready) -> Answer:
        """Raises: RoutingError."""
        try:
            answer = await ready.engine.answer(ready.call)
            ready.access.usage = answer.usage
            return answer
        finally:
            await self._settle(ready)

    async def stream(self, ready: Ready) -> AsyncGenerator[Event, None]:
        """Raises: RoutingError, before the first event or after it."""
        access = ready.access
        try:
            async with aclosing(ready.engine.stream(ready.call)) as events:
                async for event in events:
                    if access.first_token is None:
                        access.first_token = time.perf_counter()
                    if event.usage is not None:
                        access.usage = event.usage
                        if not ready.tells_usage:
                            continue
                    yield event
        finally:
            await self._settle(ready)

    async def _settle(self, ready: Ready) -> None:
        """Charge the caller, before the last byte leaves: who has read it may call again at once."""
        tally = ready.call.tally
        if ready.access.usage is None and tally.prompt_tokens + tally.completion_tokens:
            ready.access.usage = Usage(tally.prompt_tokens, tally.completion_tokens)
        usage = ready.access.usage
        await ready.caller.admission.settle(usage.prompt_tokens + usage.completion_tokens if usage else 0)
