"""A pool of replicas, any of which may answer: who does, and who does next when one fails."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .admission import Admission, AdmissionStats
from .balance import Balancer
from .engine import Answer, Call, Event, Take
from .errors import (
    EngineError,
    EngineOverloaded,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    RoutingError,
)
from .replica import Lease, Replica, ReplicaStats

logger = logging.getLogger("headrace")

LOOK_S = 0.05  # how often a request that waits for a replica looks for one
REST_S = 1.0  # of a replica that is overloaded and does not say for how long
NO_REPLICA_RETRY_S = 2.0


T = TypeVar("T")


class RetryBudget:
    """Retries as a share of requests, as Finagle's RetryBudget: each request brings `share` of a retry, each retry
    takes one. `reserve` are saved up at most. So many are there at the start, too, for a pool that is asked little; the
    first requests pay them back, so that the share is kept from the start on."""

    def __init__(self, share: float, reserve: float = 10.0) -> None:
        self._share = share
        self._reserve = reserve
        # Mutable state: retries that there are, and those that are still to be paid back.
        self._balance = self._debt = reserve if share > 0 else 0.0

    def deposit(self) -> None:
        if self._debt > 0.0:
            self._debt -= self._share
        else:
            self._balance = min(self._balance + self._share, self._reserve)

    def withdraw(self) -> bool:
        """Whether a retry is within the budget; it is taken from it then."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts since the start. `waited` are requests that found no replica at first, `spilled` those that another pool
    was given when there were too many."""

    replicas: tuple[ReplicaStats, ...]
    admission: AdmissionStats
    retries: int
    retries_refused: int
    waited: int
    spilled: int


class Pool:
    """Answers by one of its replicas. `ready_wait_s`: how long a request waits for one when none can be asked;
    `max_retries`: further replicas that one request may be sent to."""

    def __init__(
        self,
        name: str,
        balancer: Balancer,
        admission: Admission,
        budget: RetryBudget,
        ready_wait_s: float,
        max_retries: int,
    ) -> None:
        self.name = name
        self.balancer = balancer
        self.admission = admission
        self._budget = budget
        self._ready_wait_s = ready_wait_s
        self._max_retries = max_retries
        # Mutable state; `use` changes the replicas.
        self.replicas: tuple[Replica, ...] = ()
        self.spilled = 0  # counted by whoever hands requests over to another pool
        self._retries = self._retries_refused = self._waited = 0

    @property
    def is_ready(self) -> bool:
        return any(replica.is_available for replica in self.replicas)

    @property
    def in_flight(self) -> int:
        return sum(replica.in_flight for replica in self.replicas)

    def use(self, replicas: Iterable[Replica]) -> None:
        """Send requests to these from now on; those under way elsewhere go on."""
        replicas = tuple(replicas)
        for name in {old.name for old in self.replicas} - {new.name for new in replicas}:
            self.balancer.forget(name)
        self.replicas = replicas

    def stats(self) -> PoolStats:
        return PoolStats(
            tuple(replica.stats() for replica in self.replicas),
            self.admission.stats(),
            self._retries,
            self._retries_refused,
            self._waited,
            self.spilled,
        )

    async def answer(self, call: Call) -> Answer:
        """Raises: Overloaded, EngineUnavailable, and what the replicas raise."""
        return await self._ask(call, False, lambda replica, lease: replica.backend.answer(call))

    async def stream(self, call: Call, take: Take) -> None:
        """The same, event by event; once there was one, nothing is tried again."""
        await self._ask(call, True, lambda replica, lease: replica.backend.stream(call, watched(call, lease, take)))

    async def _ask(self, call: Call, streams: bool, ask: Callable[[Replica, Lease], Awaitable[T]]) -> T:
        admission, tally = self.admission, call.tally
        if not admission.try_enter(call.tenant):
            began = time.monotonic()
            try:
                await admission.enter(call.priority, call.tenant, call.size_bytes)
            finally:
                tally.queued_s += time.monotonic() - began
        try:
            self._budget.deposit()
            tried: tuple[Replica, ...] = ()
            while True:
                replica = self._choose(call, streams, tried) or await self._wait_for_one(call, streams)
                tally.replica = replica.name
                with replica.acquire(streams) as lease:
                    try:
                        answer = await ask(replica, lease)
                    except RoutingError as exc:
                        judge(exc, lease, replica)
                        error = exc
                    else:
                        lease.succeed()
                        return answer
                    finally:
                        if tally.first_event_at is None:
                            tally.engine_s += time.monotonic() - lease.began_at
                tried = (*tried, replica)
                if tally.first_event_at is not None or not self._may_retry(error, call, tried):
                    raise error
        finally:
            admission.leave(call.tenant)

    def _choose(self, call: Call, streams: bool, tried: Sequence[Replica]) -> Replica | None:
        replicas = self.replicas
        if len(replicas) == 1:
            return replicas[0] if not tried and replicas[0].is_available else None
        available = [replica for replica in replicas if replica.is_available and replica not in tried]
        return self.balancer.choose(available, call, streams) if available else None

    async def _wait_for_one(self, call: Call, streams: bool) -> Replica:
        """Raises: EngineUnavailable, EngineOverloaded."""
        self._waited += 1
        rests_s = self._rests()
        if len(rests_s) == len(self.replicas) and min(rests_s, default=0.0) > self._ready_wait_s:
            raise EngineOverloaded(min(rests_s))
        began = time.monotonic()
        try:
            while time.monotonic() - began < self._ready_wait_s:
                await asyncio.sleep(min(LOOK_S, self._ready_wait_s))
                if (replica := self._choose(call, streams, ())) is not None:
                    return replica
        finally:
            call.tally.queued_s += time.monotonic() - began
        raise self._unavailable()

    def _rests(self) -> list[float]:
        """Seconds for which replicas rest that could be asked otherwise."""
        stats = [replica.stats() for replica in self.replicas if replica.backend.is_ready and replica.breaker.allows]
        return [replica.resting_s for replica in stats if replica.resting_s > 0]

    def _unavailable(self) -> EngineUnavailable | EngineOverloaded:
        if rests_s := self._rests():
            return EngineOverloaded(min(rests_s))
        reasons = [reason for replica in self.replicas if (reason := replica.unavailable()) is not None]
        return min(
            reasons,
            key=lambda reason: reason.retry_after_s,
            default=EngineUnavailable("No engine behind this model can take requests now.", NO_REPLICA_RETRY_S),
        )

    def _may_retry(self, error: RoutingError, call: Call, tried: Sequence[Replica]) -> bool:
        """Whether another replica is to be asked, within bounds; it is counted then."""
        is_worth_it = isinstance(error, EngineError) and not (
            isinstance(error, EngineTimeout) and error.phase == "total"
        )
        if not is_worth_it or len(tried) > self._max_retries:
            return False
        if not any(replica.is_available and replica not in tried for replica in self.replicas):
            return False
        if not self._budget.withdraw():
            self._retries_refused += 1
            return False
        self._retries += 1
        call.tally.retries += 1
        return True


def watched(call: Call, lease: Lease, take: Take) -> Take:
    """`take`, with a note of the first time."""
    tally = call.tally

    def take_and_note(events: list[Event]) -> None:
        if tally.first_event_at is None:
            now = tally.first_event_at = time.monotonic()
            tally.engine_s += now - lease.began_at
            lease.first_token()
        take(events)

    return take_and_note


def judge(error: RoutingError, lease: Lease, replica: Replica) -> None:
    """What an error says of the replica. There are three cases: it has too much to do, and gets a rest; it was not to
    blame, as for a request that is wrong, while its supervisor starts it again, or when the gateway itself has too much
    to do; or it failed."""
    if isinstance(error, EngineOverloaded):
        replica.rest(REST_S if error.retry_after_s is None else error.retry_after_s)
    elif isinstance(error, EngineError) and not isinstance(error, EngineUnavailable | EngineRefused):
        lease.fail()
    else:
        lease.ignore()
