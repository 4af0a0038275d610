"""The Redis that replicas share: one connection for commands, and whether it can be relied on just now.

Commands that wait while others are under way leave together, in one pipeline: a round trip costs this process about as
much for fifty as for one.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha1
from typing import Any

from redis.exceptions import NoScriptError

from .deadlines import Deadlines
from .redis_transport import Failures, Pipeline, check, make_clients
from .settings import RedisSettings

logger = logging.getLogger("headrace")

CHECK_S = 1.0
CHECK_TIMEOUT_S = 2.0
FAILURES_TO_OPEN = 3  # in a row
NOT_REACHED = "not reached yet"
SCAN_STEP = 500
SCAN_TIMEOUT_S = 60.0
MAX_BATCH = 512  # some ten milliseconds of Redis's time; only a busy loop lets so many come together


@dataclass(frozen=True, slots=True)
class RedisStatus:
    """`latency_ms` is that of the last round trip that was answered, `last_error` None while it works; `failures`
    counts round trips."""

    is_up: bool
    latency_ms: float | None
    last_error: str | None
    failures: int


@dataclass(slots=True)
class Command:
    """A command that is to be sent; `answer` is None when it cannot be, or not in time. A `script` is sent by its
    digest (`arguments` begin after it), and in full where Redis does not know that."""

    arguments: tuple[Any, ...]
    script: str | None = None
    answer: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def quick(self) -> tuple[Any, ...]:
        return self.arguments if self.script is None else ("EVALSHA", script_id(self.script), *self.arguments)

    @property
    def full(self) -> tuple[Any, ...]:
        return ("EVAL", self.script, *self.arguments)


class RedisLink:
    """A circuit breaker: open (not up) from the start, closed by a check that answers within `budget_s`, opened by
    failures in a row, and only checks are sent while it is open."""

    def __init__(self, settings: RedisSettings, budget_s: float) -> None:
        self._client, self._clients = make_clients(settings, CHECK_TIMEOUT_S)
        self._pipeline = Pipeline(self._client)
        self._deadlines = Deadlines()
        self._check_key = f"{settings.namespace}:check"
        self._budget_s = budget_s
        # Mutable state, changed by `_send`, `_failed`, `_open`, and `_check`.
        self.is_up = False
        self._failures_in_a_row = 0
        self._failures = 0
        self._latency_s: float | None = None
        self._error: str | None = NOT_REACHED
        self._waiting: list[Command] = []
        self._is_wanted = asyncio.Event()

    def status(self) -> RedisStatus:
        latency_ms = None if self._latency_s is None else round(self._latency_s * 1000, 2)
        return RedisStatus(self.is_up, latency_ms, self._error, self._failures)

    def submit(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> "asyncio.Future[Any]":
        """Have a Lua script run, after what was submitted before. Its answer must not be nil: None says that Redis is
        not to be relied on now, or failed; the script may have run all the same. Nobody need wait for it."""
        return self._submit(Command((len(keys), *keys, *arguments), script))

    def submit_command(self, *arguments: Any) -> "asyncio.Future[Any]":
        """Have a command run, after what was submitted before; its first argument is its key. None is nil, or stands
        for an answer that cannot be had. Nobody need wait for it."""
        return self._submit(Command(arguments))

    def _submit(self, command: Command) -> "asyncio.Future[Any]":
        if self.is_up:
            self._waiting.append(command)
            self._is_wanted.set()
        else:
            command.answer.set_result(None)
        return command.answer

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any], timeout_s: float) -> Any:
        """Submit a script, and wait so long for the answer: None when it does not come in time."""
        return await self._in_time(self.submit(script, keys, arguments), timeout_s)

    async def command(self, *arguments: Any, timeout_s: float) -> Any:
        """Submit a command, and wait so long for the answer: None when it does not come in time."""
        return await self._in_time(self.submit_command(*arguments), timeout_s)

    async def wait(self, answer: "asyncio.Future[Any]", timeout_s: float) -> None:
        """Wait so long for what was submitted, and let it go on."""
        if answer.done():
            return
        waiting = asyncio.get_running_loop().create_future()

        def wake(_: object = None) -> None:
            if not waiting.done():
                waiting.set_result(None)

        answer.add_done_callback(wake)
        self._deadlines.after(timeout_s, wake)
        await waiting

    async def _in_time(self, answer: "asyncio.Future[Any]", timeout_s: float) -> Any:
        if not answer.done():
            self._deadlines.after(timeout_s, partial(give_up, (answer,)))
        return await answer

    async def delete_matching(self, pattern: str) -> int:
        """Delete all keys that match, on every node, those too that were submitted before; return how many there were.
        Fails as other uses do: what is gone then, is."""
        if await self.command("EXISTS", self._check_key, timeout_s=SCAN_TIMEOUT_S) is None:
            return 0
        removed = 0
        keys: list[bytes] = []
        try:
            async with asyncio.timeout(SCAN_TIMEOUT_S):
                async for key in self._client.scan_iter(match=pattern, count=SCAN_STEP):
                    keys.append(key)
                    if len(keys) == SCAN_STEP:
                        removed += await self._client.unlink(*keys)
                        keys.clear()
                if keys:
                    removed += await self._client.unlink(*keys)
        except Failures as exc:
            self._failed(type(exc).__name__)
        return removed

    async def run(self) -> None:
        """Check, and send, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._check_for_ever())
                group.create_task(self._send_for_ever())
        finally:
            self.is_up = False
            give_up(command.answer for command in self._waiting)
            await self._pipeline.close()
            for client in self._clients:
                await client.aclose()

    async def _send_for_ever(self) -> None:
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                batch = [command for command in batch if not command.answer.done()]
                if batch:
                    await self._send(batch)

    async def _send(self, batch: list[Command]) -> None:
        """Run the batch. Each time that the budget passes without an answer counts as a failure; the connection is kept
        until there are enough of those, since a new one takes several round trips."""
        is_over = False
        sent = time.monotonic()

        def late() -> None:
            if is_over:
                return
            give_up(command.answer for command in batch)
            self._failed("TimeoutError")
            if self.is_up:
                self._deadlines.after(self._budget_s, late)
            else:
                timeout.reschedule(0)

        try:
            async with asyncio.timeout(None) as timeout:
                self._deadlines.after(self._budget_s, late)
                answers = await self._run_all(batch)
        except TimeoutError:
            return
        except Failures as exc:
            give_up(command.answer for command in batch)
            self._failed(type(exc).__name__)
            return
        except asyncio.CancelledError:
            give_up(command.answer for command in batch)
            raise
        finally:
            is_over = True
        self._latency_s = time.monotonic() - sent
        error = next((answer for answer in answers if isinstance(answer, Exception)), None)
        for command, answer in zip(batch, answers, strict=True):
            if not command.answer.done():
                command.answer.set_result(None if isinstance(answer, Exception) else answer)
        if error is None:
            self._failures_in_a_row = 0
        else:
            self._failed(type(error).__name__)

    async def _run_all(self, batch: list[Command]) -> list[Any]:
        """Run the commands in one round trip; one more for scripts that Redis does not know yet."""
        answers = await self._pipeline.run([command.quick for command in batch])
        unknown = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            more = await self._pipeline.run([batch[place].full for place in unknown])
            for place, answer in zip(unknown, more, strict=True):
                answers[place] = answer
        return answers

    def _failed(self, error: str) -> None:
        self._failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_TO_OPEN:
            self._open(error)

    def _open(self, error: str) -> None:
        if self.is_up or self._error == NOT_REACHED:
            logger.warning("Redis fails (%s); limits, cache, and flights are this replica's own meanwhile", error)
        self.is_up, self._error = False, error
        give_up(command.answer for command in self._waiting)

    async def _check_for_ever(self) -> None:
        while True:
            await self._check()
            await asyncio.sleep(CHECK_S)

    async def _check(self) -> None:
        is_late = asyncio.Event()
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                if not self.is_up:
                    await check(self._client, self._check_key)  # on new connections, perhaps: several round trips
                started = time.monotonic()
                self._deadlines.after(self._budget_s, is_late.set)
                await check(self._client, self._check_key)
                is_slow = is_late.is_set()
        except Failures as exc:  # TimeoutError is an OSError
            self._open(type(exc).__name__)
            return
        self._latency_s = time.monotonic() - started
        if self.is_up:
            return
        if is_slow:
            self._open("slow")
            return
        self.is_up, self._failures_in_a_row, self._error = True, 0, None
        logger.info("Redis is reached")


def give_up(answers: Iterable["asyncio.Future[Any]"]) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_result(None)


@cache
def script_id(script: str) -> str:
    """What EVALSHA knows a script by; there are only a few scripts."""
    return sha1(script.encode(), usedforsecurity=False).hexdigest()
