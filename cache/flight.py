"""Flights: engine calls that any number of requests can wait for.

As in Go's singleflight (golang.org/x/sync), the first caller with a key leads and those who come meanwhile follow. Here
a flight has a log of events besides, which each of them reads from its start, and its work is done by a task of the
gateway's, so that anybody may leave, the first one too.
"""

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from .errors import FlightAborted, StreamGone

KEPT_BYTES = 64 * 1024 * 1024  # of logs of flights that are over
EVENT_BYTES = 300  # what an event costs besides its data
SWEEP_S = 1.0
WATCH_S = 0.2

R = TypeVar("R")


class LogEvent(NamedTuple):
    """One event of an answer: `id` is its place, `<flight>.<number>`; `tells_usage` marks the one that only does so."""

    id: bytes
    data: bytes
    name: str | None = None
    tells_usage: bool = False


# As LogEvent itself, without a call into Python: there is one for each token of each stream.
_log_event: Callable[[tuple[bytes, bytes, str | None, bool]], LogEvent] = partial(tuple.__new__, LogEvent)


class Flight(Generic[R]):
    """One engine call. It is over when `result` or `error` is there."""

    __slots__ = (
        "_paid",
        "_readers",
        "_waiting",
        "_when_over",
        "began_at",
        "cost",
        "ended_at",
        "error",
        "is_over",
        "is_shared",
        "key",
        "log",
        "owners",
        "ref",
        "result",
        "seats",
        "size_bytes",
        "source",
        "task",
    )

    def __init__(self, key: bytes, ref: bytes | None = None, is_shared: bool = False) -> None:
        self.key = key
        self.is_shared = is_shared
        self.ref = ref or b"%016x" % random.getrandbits(64)  # who may read is not a matter of knowing it
        self.log: list[LogEvent] = []
        self.size_bytes = 0
        self.result: R | None = None
        self.error: BaseException | None = None
        self.is_over = False
        self.began_at = time.time()
        self.ended_at = 0.0
        self.owners: set[bytes] = set()  # who has read it as a stream, and may read on
        self.seats: dict[Seat[R], None] = {}  # in the order of their coming
        self.source: bytes | None = None  # the flight whose log in Redis this one writes or reads
        self.cost: Callable[[], int] = lambda: 0  # what it has cost so far, in whatever is paid with
        self._paid = 0
        self.task: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._readers: list[Callable[[], None]] = []
        self._when_over: list[Callable[[], None]] = []

    def append(self, data: bytes, name: str | None = None, tells_usage: bool = False, id: bytes | None = None) -> None:
        """Add an event, to be followed by `tell`; without an id of another flight's log it gets this one's next."""
        if id is None:
            id = b"%b.%d" % (self.ref, len(self.log))
        # A copy: what orjson returns keeps the room that it was written in, some 4 KB.
        self.log.append(_log_event((id, b"%b" % data, name, tells_usage)))
        self.size_bytes += len(data) + EVENT_BYTES

    def end(self, result: R | None, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.is_over = True
        self.ended_at = time.monotonic()
        # Nothing of the work is kept with the log.
        cost = self.cost()
        self.cost = lambda: cost
        self.task = None
        self.tell()
        when_over, self._when_over = self._when_over, []
        for call in when_over:
            call()

    def when_over(self, call: Callable[[], None]) -> None:
        """Call this at the end, of a flight that is not over; it must not raise."""
        self._when_over.append(call)

    def progress(self) -> "asyncio.Future[None]":
        """Done at the next event or at the end."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def tell(self) -> None:
        """Let readers know of what is new."""
        for read in self._readers:
            read()
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    @contextmanager
    def read_by(self, read: Callable[[], None]) -> Iterator[None]:
        """Call this at each event and at the end, where they come up; it must not raise."""
        self._readers.append(read)
        try:
            yield
        finally:
            self._readers.remove(read)

    def bill(self) -> int:
        """What has to be paid since the last bill."""
        due = self.cost() - self._paid
        self._paid += due
        return due

    def find(self, event_id: bytes) -> int | None:
        """The place of an event in the log."""
        return next((place for place, event in enumerate(self.log) if event.id == event_id), None)


class Seat(Generic[R]):
    """One request's place in a flight; to be left with `leave`, once."""

    __slots__ = ("_end", "_left", "flight", "leads", "position")

    def __init__(self, flight: Flight[R], leads: bool, position: int, left: "Callable[[Flight[R]], None]") -> None:
        self.flight = flight
        self.leads = leads
        self.position = position
        self._left = left
        self._end: asyncio.Future[bool] | None = None  # of a `feed` under way
        flight.seats[self] = None

    @property
    def pays(self) -> bool:
        """Whether what the engine does is for this request's account: that of the longest waiting one."""
        return next(iter(self.flight.seats), None) is self

    def leave(self) -> None:
        if self.flight.seats.pop(self, self) is None:
            self._left(self.flight)

    async def feed(self, take: Callable[[list[LogEvent]], bool]) -> bool:
        """Give `take` the events that it was not given yet, each where it comes up and not in a task, until it wants no
        more for now, or `wake` is called (False), or the flight is over (True). Raises what ended it, and what `take`
        raises."""
        flight, log = self.flight, self.flight.log
        end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._end = end

        def read() -> None:
            if end.done():
                return
            wants_more, position = True, self.position
            if position < len(log):
                self.position = len(log)
                try:
                    wants_more = take(log[position:])
                except Exception as exc:
                    end.set_exception(exc)
                    return
            if flight.is_over or not wants_more:
                end.set_result(wants_more)

        with flight.read_by(read):
            read()
            is_over = await end
        if is_over and flight.error is not None:
            raise flight.error.with_traceback(None)
        return is_over

    def wake(self) -> None:
        """Make `feed` return."""
        if self._end is not None and not self._end.done():
            self._end.set_result(False)

    async def result(self) -> R | None:
        """What the whole flight came to. Raises what ended it."""
        flight = self.flight
        while not flight.is_over:
            await flight.progress()
        if flight.error is not None:
            raise flight.error.with_traceback(None)
        return flight.result


Work = Callable[[Flight[R]], Coroutine[Any, Any, R]]


class Commons(Protocol[R]):
    """Flights that replicas share."""

    async def fly(self, flight: Flight[R], work: Work[R]) -> R:
        """Do the work, or follow the replica that does it, if the flight is shared. Raises what the work raises."""
        ...

    async def is_watched(self, flight: Flight[R]) -> bool:
        """Whether another replica follows this flight."""
        ...

    async def open(self, key: bytes, ref: bytes, owner: bytes) -> Work[R] | None:
        """What follows a flight of another replica that this owner has read; None: there is none."""
        ...

    def admit(self, flight: Flight[R], owner: bytes) -> None:
        """Let an owner read on, through any replica."""
        ...


@dataclass(slots=True)
class FlightStats:
    """Counts since the start: flights, and requests that joined one."""

    flights: int = 0
    followers: int = 0
    resumed: int = 0
    in_flight: int = 0
    kept: int = 0


class Flights(Generic[R]):
    """`resume_s`: how long a stream can be read on in after its end. `linger_s`: how long a flight goes on that nobody
    waits for. Producers run from when `run` does."""

    def __init__(self, resume_s: float, linger_s: float = 0.0, commons: Commons[R] | None = None) -> None:
        self._resume_s = resume_s
        self._linger_s = linger_s
        self._commons = commons
        self._is_running = False
        # Mutable state: the tasks of flights, and of those that are left (a TaskGroup takes longer to begin one);
        # flights that can be joined, all that are not over, those that are, and their size.
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[bytes, Flight[R]] = {}
        self._flying: dict[bytes, Flight[R]] = {}
        self._kept: OrderedDict[bytes, Flight[R]] = OrderedDict()
        self._kept_bytes = 0
        self._stats = FlightStats()

    def stats(self) -> FlightStats:
        self._stats.in_flight, self._stats.kept = len(self._flying), len(self._kept)
        return self._stats

    def is_open(self, key: bytes) -> bool:
        return key in self._open

    async def run(self) -> None:
        """Let producers run, and forget old flights, until cancelled."""
        self._is_running = True
        try:
            while True:
                await asyncio.sleep(SWEEP_S)
                self._forget_old()
        finally:
            self._is_running = False
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def join(self, key: bytes, work: Work[R], is_shared: bool, anew: bool = False) -> Seat[R]:
        """Follow the flight of this key, or lead one. One that is not shared, or begun `anew` beside another, is
        followed by nobody."""
        flight = self._open.get(key) if is_shared and not anew else None
        if flight is not None:
            self._stats.followers += 1
            return self._seat(flight, leads=False)
        return self._seat(self._start(Flight(key, is_shared=is_shared), work), leads=True)

    async def resume(self, key: bytes, event_id: bytes, owner: bytes, work: Work[R] | None) -> Seat[R]:
        """Read on after an event that this owner was sent. A flight that was aborted meanwhile goes on with `work`,
        when it is given: the same answer computed again.

        Raises: StreamGone.
        """
        ref = event_id.partition(b".")[0]
        flight = self._flying.get(ref) or self._kept.get(ref) or self._of_other_ref(key, event_id)
        if flight is None and self._commons is not None:
            follow = await self._commons.open(key, ref, owner)
            if follow is not None:
                flight = self._start(Flight(key, ref), follow, is_alone=True)
                flight.owners.add(owner)
        if flight is None or flight.key != key or owner not in flight.owners:
            raise StreamGone
        seat = self._seat(flight, leads=False)
        try:
            while (place := flight.find(event_id)) is None:
                if flight.is_over:
                    raise StreamGone
                await flight.progress()
        except BaseException:
            seat.leave()
            raise
        self._stats.resumed += 1
        if isinstance(flight.error, FlightAborted):
            seat.leave()
            if work is None:
                raise StreamGone
            again = Flight[R](key, is_shared=True)
            again.owners.add(owner)
            for event in flight.log[: place + 1]:
                again.append(event.data, event.name, event.tells_usage, event.id)
            seat = self._seat(self._start(again, work), leads=True)
        seat.position = place + 1
        return seat

    def admit(self, seat: Seat[R], owner: bytes) -> None:
        """Let the owner read on in this flight later."""
        seat.flight.owners.add(owner)
        if self._commons is not None:
            self._commons.admit(seat.flight, owner)

    def _of_other_ref(self, key: bytes, event_id: bytes) -> Flight[R] | None:
        """A flight that took another one over has events of that one's in its log."""
        flight = self._open.get(key)
        return flight if flight is not None and flight.find(event_id) is not None else None

    def _seat(self, flight: Flight[R], leads: bool) -> Seat[R]:
        return Seat(flight, leads, 0, self._left)

    def _start(self, flight: Flight[R], work: Work[R], is_alone: bool = False) -> Flight[R]:
        if not self._is_running:
            raise RuntimeError("flights do not run")
        self._stats.flights += 1
        self._flying[flight.ref] = flight
        if flight.is_shared:
            self._open.setdefault(flight.key, flight)
        commons = None if is_alone or not flight.key else self._commons
        flight.task = self._begin(self._produce(flight, work, commons), partial(self._done, flight))
        return flight

    def _begin(self, work: Coroutine[Any, Any, None], done: Callable[[asyncio.Task[None]], None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    def _done(self, flight: Flight[R], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before it ran at all
            self._land(flight, None, FlightAborted())

    async def _produce(self, flight: Flight[R], work: Work[R], commons: Commons[R] | None) -> None:
        try:
            result = await (work(flight) if commons is None else commons.fly(flight, work))
        except Exception as exc:
            self._land(flight, None, exc)
        else:
            self._land(flight, result, None)

    def _land(self, flight: Flight[R], result: R | None, error: BaseException | None) -> None:
        """No await between this and what stored the result: who comes now finds it there or starts anew."""
        self._close(flight)
        self._flying.pop(flight.ref, None)
        flight.end(result, error)
        is_of_use = flight.is_shared or not isinstance(error, FlightAborted)
        if flight.owners and is_of_use:
            self._kept[flight.ref] = flight
            self._kept_bytes += flight.size_bytes
            self._forget_old()

    def _close(self, flight: Flight[R]) -> None:
        if self._open.get(flight.key) is flight:
            del self._open[flight.key]

    def _left(self, flight: Flight[R]) -> None:
        """Somebody has; the last one takes the flight along."""
        if flight.seats or flight.is_over or not self._is_running:
            return
        if self._linger_s > 0 or self._commons is not None:
            self._begin(self._abort_unless_wanted(flight), self._tasks.discard)
        else:
            self._abort(flight)

    async def _abort_unless_wanted(self, flight: Flight[R]) -> None:
        if self._linger_s > 0:
            await asyncio.sleep(self._linger_s)
        while not flight.seats and not flight.is_over:
            if self._commons is None or not await self._commons.is_watched(flight):
                if not flight.seats:
                    self._abort(flight)
                return
            await asyncio.sleep(WATCH_S)

    def _abort(self, flight: Flight[R]) -> None:
        self._close(flight)
        if flight.task is not None:
            flight.task.cancel()

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self._resume_s
        while self._kept:
            flight = next(iter(self._kept.values()))
            if flight.ended_at > oldest and self._kept_bytes <= KEPT_BYTES:
                return
            self._kept.popitem(last=False)
            self._kept_bytes -= flight.size_bytes


@contextmanager
def seated(seat: Seat[R]) -> Iterator[Seat[R]]:
    try:
        yield seat
    finally:
        seat.leave()
