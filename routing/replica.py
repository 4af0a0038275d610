"""A replica as a balancer sees it: what can answer, how busy it is, how long it takes, and whether it is to be asked.

Load is a number (`in_flight`, `latency`, `cost`), completion a guard (`Lease`); the choice is made in balance.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from types import TracebackType
from typing import Literal, Protocol

from .breaker import Breaker, State
from .engine import Answerer
from .errors import EngineUnavailable

MAX_REST_S = 30.0  # what a replica says about its return is believed up to here
# What the first request on a replica costs until it is answered: more than any estimate, so that a replica that nothing
# is known about gets one request and not all of them. As `Penalty` in Finagle's PeakEwma.
PENALTY_S = 1e6

Clock = Callable[[], float]
Outcome = Literal["succeeded", "failed", "ignored"]


class Backend(Answerer, Protocol):
    """What answers. `is_ready`: whether it can, by its own checks."""

    @property
    def name(self) -> str: ...

    @property
    def is_ready(self) -> bool: ...

    def unavailable(self) -> EngineUnavailable:
        """What to tell callers while it is not ready."""
        ...


class PeakEwma:
    """Twitter Finagle's peak EWMA (com.twitter.finagle.loadbalancer.PeakEwma) of a latency in seconds: it rises at once
    and falls slowly, by a factor e in `decay_s`, also while nothing is observed."""

    __slots__ = ("_clock", "_decay_s", "_observed_at", "last")

    def __init__(self, decay_s: float = 10.0, clock: Clock = time.monotonic) -> None:
        self._decay_s = decay_s
        self._clock = clock
        self._observed_at = 0.0
        self.last: float | None = None  # as it was after the last observation

    @property
    def value(self) -> float | None:
        """None: nothing was observed yet."""
        return None if self.last is None else self.last * self._weight(self._clock())

    def observe(self, seconds: float) -> None:
        now = self._clock()
        weight = self._weight(now)
        decayed = (self.last or 0.0) * weight
        if self.last is None or seconds >= decayed:
            self.last = seconds
        else:
            self.last = decayed + seconds * (1.0 - weight)
        self._observed_at = now

    def _weight(self, now: float) -> float:
        return exp((self._observed_at - now) / self._decay_s)


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """`requests` and `failures` since the start. `ttft_s` is of streams, `answer_s` of whole answers; None: unknown."""

    name: str
    is_ready: bool
    state: State
    in_flight: int
    ttft_s: float | None
    answer_s: float | None
    requests: int
    failures: int
    resting_s: float


class Replica:
    """`in_flight` counts the leases that are out; nothing else changes it."""

    __slots__ = (
        "_awaited",
        "_clock",
        "_failures",
        "_latency",
        "_requests",
        "_rests_until",
        "backend",
        "breaker",
        "in_flight",
        "name",
    )

    def __init__(
        self, backend: Backend, breaker: Breaker, decay_s: float = 10.0, clock: Clock = time.monotonic
    ) -> None:
        self.backend = backend
        self.breaker = breaker
        self.name = backend.name
        self._clock = clock
        # Mutable state, pairs of whole answers and streams among it: both are indexed by `streams`. `_awaited` counts
        # the leases whose latency is still to come.
        self.in_flight = 0
        self._awaited = [0, 0]
        self._latency = (PeakEwma(decay_s, clock), PeakEwma(decay_s, clock))
        self._rests_until = 0.0
        self._requests = 0
        self._failures = 0

    @property
    def is_available(self) -> bool:
        return self.backend.is_ready and self.breaker.allows and self._clock() >= self._rests_until

    def unavailable(self) -> EngineUnavailable | None:
        """What its backend says of why it cannot be asked; None: that is not the reason."""
        return None if self.backend.is_ready else self.backend.unavailable()

    def latency(self, streams: bool) -> float | None:
        """Seconds to the first token of a stream, or to a whole answer. None: there was none yet."""
        return self._latency[streams].value

    def cost(self, streams: bool) -> float:
        """What one more request would cost here, for comparison with other replicas.

        Unlike Finagle's, an estimate stands still while somebody waits for an answer of its kind: a model's answers may
        take longer than the decay, and a replica that hangs would look better by the second.
        """
        latency = self._latency[streams]
        estimate = latency.last if self._awaited[streams] else latency.value
        if estimate is None:
            return PENALTY_S * self.in_flight
        return estimate * (self.in_flight + 1)

    def rest(self, seconds: float) -> None:
        """Choose it no more for so long, at most MAX_REST_S: it has said so itself (Retry-After, RFC 9110 10.2.3)."""
        self._rests_until = max(self._rests_until, self._clock() + min(seconds, MAX_REST_S))

    def acquire(self, streams: bool) -> "Lease":
        """Count one more request in flight, from now until the lease is left. The breaker's probe, if one is due."""
        self.in_flight += 1
        self._requests += 1
        self._awaited[streams] += 1
        return Lease(self, streams, self.breaker.begin(), self._clock())

    def stats(self) -> ReplicaStats:
        return ReplicaStats(
            name=self.name,
            is_ready=self.backend.is_ready,
            state=self.breaker.state,
            in_flight=self.in_flight,
            ttft_s=self.latency(True),
            answer_s=self.latency(False),
            requests=self._requests,
            failures=self._failures,
            resting_s=max(self._rests_until - self._clock(), 0.0),
        )

    def _note_latency(self, lease: "Lease") -> None:
        self._awaited[lease.streams] -= 1
        self._latency[lease.streams].observe(self._clock() - lease.began_at)

    def _release(self, lease: "Lease") -> None:
        self.in_flight -= 1
        if not lease.has_latency:
            self._awaited[lease.streams] -= 1
        if lease.outcome == "failed":
            self._failures += 1
        # The breaker has opened since, on what went wrong then: the late rest of it must not open it once more.
        is_late = not lease.is_probe and lease.openings != self.breaker.changes.get("open", 0)
        if is_late or lease.outcome == "ignored":
            self.breaker.ignore(lease.is_probe)
        elif lease.outcome == "failed":
            self.breaker.fail(lease.is_probe)
        else:
            self.breaker.succeed(lease.is_probe)


class Lease:
    """One request on a replica, to be left with `with` or `release`. What was told last before that is its outcome;
    nothing told, as when it was cancelled, says nothing about the replica."""

    __slots__ = ("_is_out", "_replica", "began_at", "has_latency", "is_probe", "openings", "outcome", "streams")

    def __init__(self, replica: Replica, streams: bool, is_probe: bool, began_at: float) -> None:
        self._replica = replica
        self.streams = streams
        self.is_probe = is_probe
        self.began_at = began_at
        self.openings = replica.breaker.changes.get("open", 0)
        self.outcome: Outcome = "ignored"
        self.has_latency = False
        self._is_out = True

    def first_token(self) -> None:
        """The stream's first token is here. Its time counts once."""
        self._note_latency()
        if self.is_probe and self._is_out:
            # Proof enough: all others would wait for the end of a stream of minutes.
            self._replica.breaker.succeed(is_probe=True)
            self.is_probe = False

    def succeed(self) -> None:
        self.outcome = "succeeded"
        if not self.streams:
            self._note_latency()

    def fail(self) -> None:
        self.outcome = "failed"

    def ignore(self) -> None:
        self.outcome = "ignored"

    def release(self) -> None:
        """May be called again, to no effect."""
        if self._is_out:
            self._is_out = False
            self._replica._release(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _note_latency(self) -> None:
        if self._is_out and not self.has_latency:
            self._replica._note_latency(self)
            self.has_latency = True
