"""Those who work in the background, for as long as the gateway runs or until they are no longer wanted."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol


class Part(Protocol):
    """Runs until it is cancelled."""

    async def run(self) -> None: ...


class Crew:
    """`fail` is called with the error of a part that ends by one."""

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self._fail = fail
        # Mutable state: who is to run, and their tasks while the crew is at work.
        self._tasks: dict[Part, asyncio.Task[None] | None] = {}
        self._group: asyncio.TaskGroup | None = None

    def add(self, part: Part) -> None:
        self._tasks[part] = None
        if self._group is not None:
            self._start(part)

    def dismiss(self, part: Part) -> None:
        task = self._tasks.pop(part, None)
        if task is not None:
            task.cancel()

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            self._group = group
            for part in list(self._tasks):
                self._start(part)
            yield
            self._group = None
            for task in self._tasks.values():
                if task is not None:
                    task.cancel()

    def _start(self, part: Part) -> None:
        assert self._group is not None
        self._tasks[part] = self._group.create_task(self._look_after(part))

    async def _look_after(self, part: Part) -> None:
        try:
            await part.run()
        except Exception as exc:
            self._fail(exc)
        finally:
            if self._tasks.get(part) is asyncio.current_task():
                del self._tasks[part]
