"""The Redis that replicas share: one connection for scripts, and whether it can be relied on just now.

Scripts that wait while others are under way leave together, in one pipeline: a round trip costs this process about as
much for fifty as for one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha1
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

logger = logging.getLogger("headrace")

CHECK_S = 1.0
CHECK_TIMEOUT_S = 2.0
FAILURES_TO_OPEN = 3  # in a row
NOT_REACHED = "not reached yet"
# A deadline comes in so many steps, each a timer of its own and a pass more. An answer may be there and still wait for
# this event loop, which is not Redis's fault: in a busy loop each step takes two passes at least, and so many are
# enough for the batch before it and its own to be sent, read, and handed over.
DEADLINE_STEPS = 8
TIMER_LAG = 0.15  # uvloop's timers have milliseconds and come late, so the steps together are shorter by this
MAX_BATCH = 512  # some ten milliseconds of Redis's time; only a busy loop lets so many come together


@dataclass(frozen=True, slots=True)
class RedisStatus:
    """`latency_ms` is that of the last check that worked, `last_error` None while it works; `failures` counts round
    trips."""

    is_up: bool
    latency_ms: float | None
    last_error: str | None
    failures: int


@dataclass(slots=True)
class Evaluation:
    """A script that is to be run; `answer` is None when it cannot be, or not in time."""

    script: str
    keys: Sequence[str]
    arguments: Sequence[Any]
    answer: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def arguments_of(self, script: str) -> tuple[Any, ...]:
        return (script, len(self.keys), *self.keys, *self.arguments)


class RedisLink:
    """A circuit breaker: open (not up) from the start, closed by a check that answers within `budget_s`, opened by
    failures in a row, and only checks are sent while it is open."""

    def __init__(self, url: str, budget_s: float) -> None:
        self._pool = ConnectionPool.from_url(
            url,
            socket_connect_timeout=CHECK_TIMEOUT_S,
            socket_timeout=None,  # every use has a deadline already
            # A connection that was kept over a restart of Redis is dead: one more try, with a new one.
            retry=Retry(NoBackoff(), 1),
            retry_on_error=[RedisConnectionError],
        )
        self._client = Redis(connection_pool=self._pool)
        self._budget_s = budget_s
        # Mutable state, changed by `_send`, `_failed`, `_open`, and `_check`.
        self.is_up = False
        self._failures_in_a_row = 0
        self._failures = 0
        self._latency_s: float | None = None
        self._error: str | None = NOT_REACHED
        self._waiting: list[Evaluation] = []
        self._is_wanted = asyncio.Event()

    def status(self) -> RedisStatus:
        latency_ms = None if self._latency_s is None else round(self._latency_s * 1000, 2)
        return RedisStatus(self.is_up, latency_ms, self._error, self._failures)

    def submit(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> "asyncio.Future[Any]":
        """Have a Lua script run, after those submitted before. Its answer must not be nil: None says that Redis is not
        to be relied on now, or failed; the script may have run all the same. Nobody need wait for it."""
        evaluation = Evaluation(script, keys, arguments)
        if self.is_up:
            self._waiting.append(evaluation)
            self._is_wanted.set()
        else:
            evaluation.answer.set_result(None)
        return evaluation.answer

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any], timeout_s: float) -> Any:
        """Submit, and wait so long for the answer: None when it does not come in time."""
        answer = self.submit(script, keys, arguments)
        with deadline(timeout_s, lambda: give_up([answer])):
            return await answer

    async def run(self) -> None:
        """Check, and send, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._check_for_ever())
                group.create_task(self._send_for_ever())
        finally:
            self.is_up = False
            give_up(evaluation.answer for evaluation in self._waiting)
            await self._client.aclose()
            await self._pool.disconnect()

    async def _send_for_ever(self) -> None:
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                batch = [evaluation for evaluation in batch if not evaluation.answer.done()]
                if batch:
                    await self._send(batch)

    async def _send(self, batch: list[Evaluation]) -> None:
        """Run the batch. Each time that the budget passes without an answer counts as a failure; the connection is kept
        until there are enough of those, since a new one takes several round trips."""

        def late() -> None:
            give_up(evaluation.answer for evaluation in batch)
            self._failed("TimeoutError")
            if not self.is_up:
                timeout.reschedule(0)

        try:
            async with asyncio.timeout(None) as timeout:
                with deadline(self._budget_s, late):
                    answers = await self._evaluate_all(batch)
        except TimeoutError:
            return
        except (RedisError, OSError) as exc:
            give_up(evaluation.answer for evaluation in batch)
            self._failed(type(exc).__name__)
            return
        except asyncio.CancelledError:
            give_up(evaluation.answer for evaluation in batch)
            raise
        error = next((answer for answer in answers if isinstance(answer, Exception)), None)
        for evaluation, answer in zip(batch, answers, strict=True):
            if not evaluation.answer.done():
                evaluation.answer.set_result(None if isinstance(answer, Exception) else answer)
        if error is None:
            self._failures_in_a_row = 0
        else:
            self._failed(type(error).__name__)

    async def _evaluate_all(self, batch: list[Evaluation]) -> list[Any]:
        """Run the scripts in one round trip; one more for those that Redis does not know yet."""
        answers = await self._pipeline("EVALSHA", batch, [script_id(evaluation.script) for evaluation in batch])
        unknown = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            again = [batch[place] for place in unknown]
            more = await self._pipeline("EVAL", again, [evaluation.script for evaluation in again])
            for place, answer in zip(unknown, more, strict=True):
                answers[place] = answer
        return answers

    async def _pipeline(self, command: str, batch: list[Evaluation], scripts: list[str]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for evaluation, script in zip(batch, scripts, strict=True):
                pipeline.execute_command(command, *evaluation.arguments_of(script))
            return await pipeline.execute(raise_on_error=False)

    def _failed(self, error: str) -> None:
        self._failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_TO_OPEN:
            self._open(error)

    def _open(self, error: str) -> None:
        if self.is_up or self._error == NOT_REACHED:
            logger.warning("Redis fails (%s); this replica goes by its own counts until it is back", error)
        self.is_up, self._error = False, error
        give_up(evaluation.answer for evaluation in self._waiting)

    async def _check_for_ever(self) -> None:
        while True:
            await self._check()
            await asyncio.sleep(CHECK_S)

    async def _check(self) -> None:
        started = time.monotonic()
        is_late = asyncio.Event()
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                if not self.is_up:
                    await self._client.ping()  # on a new connection, perhaps, which takes several round trips
                with deadline(self._budget_s, is_late.set):
                    await self._client.ping()
        except (RedisError, OSError) as exc:  # TimeoutError is an OSError
            self._open(type(exc).__name__)
            return
        self._latency_s = time.monotonic() - started
        if self.is_up:
            return
        if is_late.is_set():
            self._open("slow")
            return
        self.is_up, self._failures_in_a_row, self._error = True, 0, None
        logger.info("Redis is reached")


@contextmanager
def deadline(timeout_s: float, late: Callable[[], None]) -> Iterator[None]:
    """Call `late` whenever `timeout_s` have passed in the context, or twice as many passes of the event loop as there
    are steps, whichever is longer."""
    loop = asyncio.get_running_loop()
    step_s = timeout_s * (1 - TIMER_LAG) / DEADLINE_STEPS

    timer: asyncio.Handle | None = None

    def one_pass_more(left: int) -> None:
        nonlocal timer
        timer = loop.call_soon(step, left)

    def step(left: int) -> None:
        nonlocal timer
        if left == 0:
            late()
            left = DEADLINE_STEPS
        timer = loop.call_later(step_s, one_pass_more, left - 1)

    timer = loop.call_later(step_s, one_pass_more, DEADLINE_STEPS - 1)
    try:
        yield
    finally:
        timer.cancel()


def give_up(answers: Iterable["asyncio.Future[Any]"]) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_result(None)


@cache
def script_id(script: str) -> str:
    """What EVALSHA knows a script by; there are only a few scripts."""
    return sha1(script.encode(), usedforsecurity=False).hexdigest()
