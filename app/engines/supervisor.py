"""Keeps one engine alive: starts it, notices its death, starts it again."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Literal

from routing.engine import Answer, Call, Engine, Load, Take
from routing.errors import EngineConfigError, EngineDied, EngineError, EngineUnavailable

logger = logging.getLogger("headrace")

CHECK_EVERY_S = 1.0
CHECK_TIMEOUT_S = 5.0
PROGRESS_EVERY_S = 5.0
FIRST_BACKOFF_S = 1.0
MOST_BACKOFF_S = 60.0
STABLE_AFTER_S = 300.0  # an engine that lived as long starts again without a growing wait
GUESSED_START_S = 30.0

State = Literal["starting", "ready", "unresponsive", "waiting", "stopped"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`latency_ms` is that of the last check; `last_error` outlives the recovery from it."""

    state: State
    stage: str | None
    last_error: str | None
    latency_ms: float | None
    restarts: int
    running: int
    waiting: int


class SupervisedEngine:
    """An engine with someone who looks after it: `run` is that, and has to run as a task for as long as the engine is
    wanted. Requests at a time when the engine is not there raise EngineUnavailable."""

    def __init__(self, name: str, engine: Engine, first_backoff_s: float = FIRST_BACKOFF_S) -> None:
        self.name = name
        self._engine = engine
        self._first_backoff_s = first_backoff_s
        self._death = asyncio.Event()
        self.has_started = asyncio.Event()
        # Mutable state, changed by `run` and what it calls only.
        self._state: State = "starting"
        self._since = time.monotonic()
        self._start_took_s = GUESSED_START_S
        self._backoff_s = 0.0
        self._last_error: str | None = None
        self._latency_ms: float | None = None
        self.restarts = 0

    @property
    def is_ready(self) -> bool:
        return self._state in ("ready", "unresponsive")

    @property
    def load(self) -> Load:
        return self._engine.load

    def unavailable(self) -> EngineUnavailable:
        """What callers are told while it is not there."""
        return self._unavailable()

    def status(self) -> EngineStatus:
        return EngineStatus(
            state=self._state,
            stage=self._engine.stage if self._state == "starting" else None,
            last_error=self._last_error,
            latency_ms=self._latency_ms,
            restarts=self.restarts,
            running=self.load.running,
            waiting=self.load.waiting,
        )

    async def answer(self, call: Call) -> Answer:
        """Raises: EngineUnavailable, and what the engine raises."""
        self._require_ready()
        try:
            return await self._engine.answer(call)
        except EngineDied as exc:
            raise self._unavailable(exc) from exc

    async def stream(self, call: Call, take: Take) -> None:
        """Raises: EngineUnavailable, and what the engine raises."""
        self._require_ready()
        try:
            await self._engine.stream(call, take)
        except EngineDied as exc:
            raise self._unavailable(exc) from exc

    async def run(self) -> None:
        """Raises: EngineConfigError, from the first start: nobody has relied on the engine yet, and another start
        cannot help. Later ones are tried again, since something beyond the settings must have changed."""
        try:
            while True:
                try:
                    await self._start()
                    await self._watch()
                except (EngineError, EngineConfigError) as exc:
                    if isinstance(exc, EngineConfigError) and not self.has_started.is_set():
                        raise
                    self._last_error = str(exc)
                    logger.error("engine %s: %s", self.name, exc)
                lived_s = time.monotonic() - self._since if self.is_ready else 0.0
                self._enter("waiting")
                await self._engine.stop()
                await self._back_off(lived_s)
                self.restarts += 1
        finally:
            self._enter("stopped")
            await self._engine.stop()

    async def _start(self) -> None:
        self._enter("starting")
        self._death.clear()
        logger.info("engine %s: starting", self.name)
        progress = asyncio.create_task(self._tell_progress())
        try:
            await self._engine.start()
        finally:
            progress.cancel()
        self._start_took_s = time.monotonic() - self._since
        self._enter("ready")
        self.has_started.set()
        logger.info("engine %s: ready after %.1f s", self.name, self._start_took_s)

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            logger.info("engine %s: %s (%.0f s)", self.name, self._engine.stage, time.monotonic() - self._since)

    async def _watch(self) -> None:
        """Return never; raise EngineDied when the engine dies. One that is only slow to answer is left alone: it may be
        at a long step, and its requests with it."""
        while True:
            asked = time.perf_counter()
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    await self._engine.check()
            except TimeoutError:
                self._last_error = f"the engine did not answer a check within {CHECK_TIMEOUT_S:g} s"
                self._state = "unresponsive"
            else:
                self._state = "ready"
            self._latency_ms = round((time.perf_counter() - asked) * 1000, 3)
            try:
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._death.wait()
            except TimeoutError:
                continue
            raise EngineDied("the engine died")

    async def _back_off(self, lived_s: float) -> None:
        grown = min(max(self._backoff_s * 2, self._first_backoff_s), MOST_BACKOFF_S)
        self._backoff_s = self._first_backoff_s if lived_s > STABLE_AFTER_S else grown
        logger.info("engine %s: starting again in %g s", self.name, self._backoff_s)
        await asyncio.sleep(self._backoff_s)

    def _enter(self, state: State) -> None:
        self._state = state
        self._since = time.monotonic()

    def _require_ready(self) -> None:
        if self._death.is_set() or not self.is_ready:
            raise self._unavailable()

    def _unavailable(self, death: EngineDied | None = None) -> EngineUnavailable:
        if death is not None:
            self._death.set()
        in_state_s = time.monotonic() - self._since
        to_wait_s = self._backoff_s if self._state != "starting" else 0.0
        passed_s = 0.0 if self.is_ready else in_state_s
        what = "is starting" if self._state == "starting" else "is being started again"
        return EngineUnavailable(
            f"The engine behind this model {what}.", max(1.0, to_wait_s + self._start_took_s - passed_s)
        )
