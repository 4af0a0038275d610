"""What stands before a pool of engines: so many requests in flight, so many waiting, and who is next.

Higher priorities go first, strictly. Within one the next slot goes to the tenant that holds the fewest (max-min
fairness, Bertsekas and Gallager, Data Networks, 6.5.2), and tenants that hold the same number take turns: round robin
as in RFC 970 (Nagle 1985), which is what deficit round robin (Shreedhar and Varghese 1995) comes to when each request
costs one slot. A tenant's own requests are first come, first served. A full queue takes from the longest one in it, as
in stochastic fairness queueing (McKenney 1990).
"""

import asyncio
import itertools
import math
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from .errors import RoutingError

DECAY_S = 30.0  # how long a completion counts in the drain rate: long to a request, short to a change of load
UNMEASURED_RETRY_S = 1.0
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0

Cause = Literal["queue_full", "shed", "queue_timeout"]

MESSAGES: dict[Cause, str] = {
    "queue_full": "Too many requests are waiting for this model.",
    "shed": "Too many requests are waiting for this model; this one gave way to others.",
    "queue_timeout": "The request waited too long for its turn.",
}


class Overloaded(RoutingError):
    """There is no room for this request; `retry_after_s` is the best guess of when there will be."""

    def __init__(self, cause: Cause, retry_after_s: float) -> None:
        super().__init__(MESSAGES[cause])
        self.cause = cause
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class AdmissionStats:
    """What is there now, and counts since the start. `refused` is by cause; `waited` and `waited_s` are of those who
    waited and got in; `drain_per_s` is None before anything was measured."""

    in_flight: int
    waiting: int
    waiting_bytes: int
    admitted: int
    refused: dict[str, int]
    waited: int
    waited_s: float
    drain_per_s: float | None


@dataclass(eq=False, slots=True)
class Waiter:
    """A request in the queue; its outcome is None when it gets a slot."""

    priority: int
    tenant: str
    size_bytes: int
    since: float
    outcome: "asyncio.Future[Overloaded | None]"
    timer: asyncio.TimerHandle | None = None
    is_waiting: bool = True


@dataclass(slots=True)
class Level:
    """Who waits at one priority: tenants in the order of their turns, each one's waiters in that of their coming."""

    waiting: int = 0
    size_bytes: int = 0
    queues: OrderedDict[str, OrderedDict[Waiter, None]] = field(default_factory=OrderedDict)


class Drain:
    """Completions per second of a full pool: how few come to one that is not full says nothing of what it can do.

    The quotient of two sums that decay with time (moving averages of uneven series, Eckner 2012), so that it is right
    from the first completion on.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = 0.0  # up to when full time is in the sums
        self._completions = 0.0
        self._full_s = 0.0

    def watch(self) -> None:
        """The pool is full from now on."""
        self._since = self._clock()

    def count(self) -> None:
        """A request of the full pool is done."""
        now = self._clock()
        self._completions, self._full_s = self._sums_at(now)
        self._completions += 1
        self._since = now

    def per_s(self, is_full: bool) -> float | None:
        completions, full_s = self._sums_at(self._clock() if is_full else self._since)
        return completions / full_s if completions and full_s else None

    def _sums_at(self, now: float) -> tuple[float, float]:
        passed_s = now - self._since
        kept = math.exp(-passed_s / DECAY_S)
        return self._completions * kept, self._full_s * kept + passed_s


@dataclass(slots=True)
class Slot:
    """`async with` it: a place in flight for as long as the block lasts. Half of what one from a generator costs."""

    admission: "Admission"
    priority: int
    tenant: str
    size_bytes: int

    async def __aenter__(self) -> None:
        await self.admission.enter(self.priority, self.tenant, self.size_bytes)

    async def __aexit__(self, *exc_info: object) -> None:
        self.admission.leave(self.tenant)


class Admission:
    """`max_in_flight`: None is without a bound, and then nobody waits. A wait is over after `queue_timeout_s`.

    A release costs a look at each tenant that waits at the highest priority, but at no more than there are slots taken,
    and at each priority that somebody waits at: those are meant to be few.
    """

    def __init__(
        self,
        max_in_flight: int | None,
        max_queue: int,
        max_queue_bytes: int,
        queue_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        # Mutable state. Slots taken, in all and by tenant: `_hold` and `_release` change them. Who waits, in all and
        # by priority: `_add` and `_drop`. Nobody waits while a slot is free.
        self._in_flight = 0
        self._held: dict[str, int] = {}
        self._waiting = 0
        self._waiting_bytes = 0
        self._levels: dict[int, Level] = {}
        self._drain = Drain(clock)
        self._admitted = self._waited = 0
        self._waited_s = 0.0
        self._refused: Counter[str] = Counter()
        self.resize(max_in_flight, max_queue, max_queue_bytes, queue_timeout_s)

    def stats(self) -> AdmissionStats:
        return AdmissionStats(
            in_flight=self._in_flight,
            waiting=self._waiting,
            waiting_bytes=self._waiting_bytes,
            admitted=self._admitted,
            refused=dict(self._refused),
            waited=self._waited,
            waited_s=self._waited_s,
            drain_per_s=self._drain.per_s(is_full=self._is_full()),
        )

    def slot(self, priority: int, tenant: str, size_bytes: int) -> Slot:
        return Slot(self, priority, tenant, size_bytes)

    def try_enter(self, tenant: str) -> bool:
        """Take a slot if one is free; then to be given back with `leave`, once."""
        if self._in_flight >= self._max_in_flight:
            return False
        self._hold(tenant)
        self._admitted += 1
        if self._in_flight >= self._max_in_flight:
            self._drain.watch()
        return True

    async def enter(self, priority: int, tenant: str, size_bytes: int) -> None:
        """Take a slot, at once or in turn; then to be given back with `leave`, once. Raises: Overloaded."""
        if self.try_enter(tenant):
            return
        refusal = self._make_room(priority, size_bytes)
        if refusal is None:
            refusal = await self._wait(self._add(priority, tenant, size_bytes))
        if refusal is not None:
            self._refused[refusal.cause] += 1
            raise refusal
        self._admitted += 1

    def leave(self, tenant: str) -> None:
        """Give a slot of this tenant's back; whoever is next has it at once."""
        if self._in_flight >= self._max_in_flight:
            self._drain.count()
        self._release(tenant)

    def resize(self, max_in_flight: int | None, max_queue: int, max_queue_bytes: int, queue_timeout_s: float) -> None:
        """Set other bounds: who fits now enters, who no longer fits the queue is shed, who is in flight stays."""
        self._max_in_flight = sys.maxsize if max_in_flight is None else max_in_flight
        self._max_queue, self._max_queue_bytes = max_queue, max_queue_bytes
        self._queue_timeout_s = queue_timeout_s
        self._fill()
        while not self._fits(self._waiting, self._waiting_bytes):
            self._shed()
        queues = [queue for level in self._levels.values() for queue in level.queues.values()]
        for waiter in itertools.chain.from_iterable(queues):
            self._arm(waiter)
        self._drain.watch()  # what another size could do counts up to its last completion

    # Slots

    def _is_full(self) -> bool:
        return self._in_flight >= self._max_in_flight

    def _hold(self, tenant: str) -> None:
        self._held[tenant] = self._held.get(tenant, 0) + 1
        self._in_flight += 1

    def _release(self, tenant: str) -> None:
        held = self._held.pop(tenant)
        if held > 1:
            self._held[tenant] = held - 1
        self._in_flight -= 1
        if self._waiting:
            self._fill()

    def _fill(self) -> None:
        """Give free slots to those who are next."""
        while self._waiting and self._in_flight < self._max_in_flight:
            waiter = self._next()
            if not waiter.outcome.done():  # else it was cancelled in this very step, and is about to leave
                self._levels[waiter.priority].queues.move_to_end(waiter.tenant)
                self._hold(waiter.tenant)
                waiter.outcome.set_result(None)
            self._drop(waiter)

    def _next(self) -> Waiter:
        queues = self._levels[max(self._levels)].queues
        tenant = next((tenant for tenant in queues if tenant not in self._held), None)
        if tenant is None:
            tenant = min(queues, key=self._held.__getitem__)  # of equal ones that whose turn is first
        return next(iter(queues[tenant]))

    # Waiting

    async def _wait(self, waiter: Waiter) -> Overloaded | None:
        try:
            refusal = await waiter.outcome
        except BaseException:
            self._give_up(waiter)
            raise
        if refusal is None:
            self._waited += 1
            self._waited_s += self._clock() - waiter.since
        return refusal

    def _give_up(self, waiter: Waiter) -> None:
        """The caller is gone. There are three cases: it still waits; it was given a slot in the same step, which is
        passed on; it was refused in the same step, or dropped as cancelled, and nothing is left to do."""
        if waiter.is_waiting:
            self._drop(waiter)
        elif not waiter.outcome.cancelled() and waiter.outcome.result() is None:
            self._release(waiter.tenant)

    def _add(self, priority: int, tenant: str, size_bytes: int) -> Waiter:
        outcome = asyncio.get_running_loop().create_future()
        waiter = Waiter(priority, tenant, size_bytes, self._clock(), outcome)
        self._arm(waiter)
        level = self._levels.setdefault(priority, Level())
        level.queues.setdefault(tenant, OrderedDict())[waiter] = None
        self._count_waiter(level, 1, size_bytes)
        return waiter

    def _drop(self, waiter: Waiter) -> None:
        waiter.is_waiting = False
        if waiter.timer is not None:
            waiter.timer.cancel()
        level = self._levels[waiter.priority]
        del level.queues[waiter.tenant][waiter]
        if not level.queues[waiter.tenant]:
            del level.queues[waiter.tenant]
        self._count_waiter(level, -1, -waiter.size_bytes)
        if not level.waiting:
            del self._levels[waiter.priority]

    def _count_waiter(self, level: Level, count: int, size_bytes: int) -> None:
        level.waiting += count
        level.size_bytes += size_bytes
        self._waiting += count
        self._waiting_bytes += size_bytes

    def _arm(self, waiter: Waiter) -> None:
        """Set the timer, anew after a change of the timeout."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        left_s = max(0.0, waiter.since + self._queue_timeout_s - self._clock())
        waiter.timer = waiter.outcome.get_loop().call_later(left_s, self._refuse, waiter, "queue_timeout")

    # Refusals

    def _fits(self, waiting: int, size_bytes: int) -> bool:
        return waiting <= self._max_queue and size_bytes <= self._max_queue_bytes

    def _make_room(self, priority: int, size_bytes: int) -> Overloaded | None:
        """Shed as many of lower priority as one more needs; nobody, when that would not do."""
        lower = [level for other, level in self._levels.items() if other < priority]
        ahead = self._waiting - sum(level.waiting for level in lower)
        ahead_bytes = self._waiting_bytes - sum(level.size_bytes for level in lower)
        if not self._fits(ahead + 1, ahead_bytes + size_bytes):
            return Overloaded("queue_full", self._retry_after_s(ahead))
        while not self._fits(self._waiting + 1, self._waiting_bytes + size_bytes):
            self._shed()
        return None

    def _shed(self) -> None:
        """Refuse the newest request of the tenant with the most waiting, at the lowest priority."""
        queues = self._levels[min(self._levels)].queues
        longest = max(reversed(queues.values()), key=len)  # of equal ones that whose turn is last
        self._refuse(next(reversed(longest)), "shed")

    def _refuse(self, waiter: Waiter, cause: Cause) -> None:
        self._drop(waiter)
        if not waiter.outcome.done():  # an error set as such would be logged if the caller is cancelled before it wakes
            ahead = sum(level.waiting for priority, level in self._levels.items() if priority >= waiter.priority)
            waiter.outcome.set_result(Overloaded(cause, self._retry_after_s(ahead)))

    def _retry_after_s(self, ahead: int) -> float:
        """When as many are through, for RFC 9110's Retry-After (10.2.3)."""
        drain_per_s = self._drain.per_s(is_full=self._is_full())
        if drain_per_s is None:
            return UNMEASURED_RETRY_S
        return min(max((ahead + 1) / drain_per_s, MIN_RETRY_S), MAX_RETRY_S)
