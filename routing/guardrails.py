"""Guardrails: a canary takes more traffic step by step while it does as well as the stable variant, or none at all.

Requests of a sliding window are counted in a ring of slots, as Hystrix does (HystrixRollingNumber), so that one more
costs the same few steps however many there were. Times to the first token go into bins of equal ratio, as in DDSketch
(C. Masson, J. E. Rim, H. K. Lee: DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error Guarantees.
VLDB 2019), and medians are compared: one slow request cannot move them.

A promotion is the last word, as with Argo Rollouts and Flagger: whoever is promoted is not watched any more, since the
variant that it could be compared with has no traffic.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

SLOTS = 30  # the window is this many slots, the one being filled included
FASTEST_S = 1e-4  # what is faster or slower than these is counted as they are
SLOWEST_S = 3600.0
BIN_RATIO = 1.02  # a median is within 1 % of the true one
BINS_PER_E = 1 / math.log(BIN_RATIO)
BINS = int(math.log(SLOWEST_S / FASTEST_S) * BINS_PER_E) + 1
SIGNIFICANT_Z = 3.0  # standard errors: with two, one of six long outages behind both was blamed on the canary

State = Literal["watching", "stepping", "promoted", "rolled_back"]


@dataclass(frozen=True, slots=True)
class GuardrailRules:
    """When a canary is to go. A limit that is None is not looked at. `steps` are percent of the traffic; without any
    the weights are as configured. Nothing is decided on less than `min_requests` in `window_s`.

    Raises: ValueError.
    """

    variant: str
    max_error_rate: float | None
    max_ttft_ratio: float | None
    min_requests: int = 50
    window_s: float = 300.0
    steps: tuple[float, ...] = ()
    step_s: float = 600.0

    def __post_init__(self) -> None:
        if list(self.steps) != sorted(set(self.steps)) or not all(0 < step <= 100 for step in self.steps):
            raise ValueError("steps must rise, from more than 0 to at most 100 percent")
        if self.min_requests < 1 or self.window_s <= 0:
            raise ValueError("min_requests and window_s must be positive")


@dataclass(frozen=True, slots=True)
class SideStatus:
    """One side's requests in the window; None: there are none to tell from."""

    requests: int
    errors: int
    error_rate: float | None
    ttft_median_s: float | None


@dataclass(frozen=True, slots=True)
class GuardrailStatus:
    """`share` of the canary from 0 to 1, None: as its weight says. `step` counts from 0, and after a rollback is where
    it happened; `since_s`: how long ago the state or the step began."""

    state: State
    share: float | None
    step: int | None
    reason: str | None
    canary: SideStatus
    stable: SideStatus
    since_s: float


# Old and new state; the same one twice when only the step is another.
OnChange = Callable[[State, State], None]


class Guardrail:
    """Is told of each finished request, and decides in `evaluate`.

    The canary is rolled back when in the window
    1. its error rate is over the limit, and worse than the stable variant's: an outage behind both is not its fault.
    2. its median time to the first token is more than so many times the stable variant's.
    It stays so until `reset`.
    """

    def __init__(
        self, rules: GuardrailRules, clock: Callable[[], float] = time.monotonic, on_change: OnChange | None = None
    ) -> None:
        self.rules = rules
        self.on_change = on_change
        self._clock = clock
        self._slot_s = rules.window_s / SLOTS
        # Mutable state, of which others only read what is public; changed by `_enter`. `generation` grows with each
        # change of `share`.
        self.state, self.step = self._start()
        self.share = self._share()
        self.reason: str | None = None
        self.generation = 0
        self._since = clock()
        self._seen_in_step = 0
        # And what was recorded; changed by `record` and `_turn`.
        self._canary, self._stable = _Side(), _Side()
        self._slot = int(self._since / self._slot_s)
        self._turns_at = (self._slot + 1) * self._slot_s

    def record(self, variant_is_canary: bool, is_error: bool, ttft_s: float | None) -> None:
        """Count a finished request; `ttft_s` is None where there was no first token to wait for."""
        now = self._clock()
        if now >= self._turns_at:
            self._turn(now)
        if variant_is_canary:
            self._seen_in_step += 1
            self._canary.add(is_error, ttft_s)
        else:
            self._stable.add(is_error, ttft_s)

    def evaluate(self) -> None:
        """Go back or on if it is time to; takes a few µs at most, so that it may follow each `record`."""
        if self.state in ("promoted", "rolled_back"):
            return
        now = self._clock()
        if now >= self._turns_at:
            self._turn(now)
        if (reason := self._broken_rule()) is not None:
            self._enter("rolled_back", self.step, reason)
        elif self.step is not None and self._is_step_over(now):
            if self.step + 1 < len(self.rules.steps):
                self._enter("stepping", self.step + 1)
            else:
                self._enter("promoted", self.step)

    def reset(self) -> None:
        """Begin anew: nothing is remembered, and a canary with steps is at the first one."""
        self._canary, self._stable = _Side(), _Side()
        self._enter(*self._start())

    def status(self) -> GuardrailStatus:
        now = self._clock()
        if now >= self._turns_at:
            self._turn(now)
        return GuardrailStatus(
            state=self.state,
            share=self.share,
            step=self.step,
            reason=self.reason,
            canary=self._canary.status(),
            stable=self._stable.status(),
            since_s=now - self._since,
        )

    def _start(self) -> tuple[State, int | None]:
        return ("stepping", 0) if self.rules.steps else ("watching", None)

    def _share(self) -> float | None:
        if self.state == "rolled_back":
            return 0.0
        return None if self.step is None else self.rules.steps[self.step] / 100

    def _enter(self, state: State, step: int | None, reason: str | None = None) -> None:
        old_state, old_step, old_share = self.state, self.step, self.share
        self.state, self.step, self.reason = state, step, reason
        self.share = self._share()
        self.generation += self.share != old_share
        self._since, self._seen_in_step = self._clock(), 0
        if self.on_change is not None and (state, step) != (old_state, old_step):
            self.on_change(old_state, state)

    def _is_step_over(self, now: float) -> bool:
        return now - self._since >= self.rules.step_s and self._seen_in_step >= self.rules.min_requests

    def _broken_rule(self) -> str | None:
        """The rule that the canary breaks, in words."""
        if self._canary.requests < self.rules.min_requests:
            return None
        return self._too_many_errors() or self._too_slow()

    def _too_many_errors(self) -> str | None:
        canary, stable, limit = self._canary, self._stable, self.rules.max_error_rate
        if limit is None or canary.error_rate <= limit or not self._is_worse(canary, stable):
            return None
        reason = f"error rate {canary.error_rate:.2g} over {limit:g} in {canary.requests} requests"
        if stable.requests == 0:
            return f"{reason}, the stable variant had none"
        return f"{reason}, the stable variant's is {stable.error_rate:.2g}"

    def _is_worse(self, canary: "_Side", stable: "_Side") -> bool:
        """Whether the canary fails more often, and by more than chance would have it in an outage behind both.

        The test is that of two proportions with a pooled variance (NIST/SEMATECH e-Handbook of Statistical Methods,
        7.3.3). While the stable variant has few requests, its rate is taken as it is, since with the doubt that it
        deserves a canary that has nearly all the traffic would hardly ever be stopped.
        """
        if stable.requests == 0:
            return True
        pooled = (canary.errors + stable.errors) / (canary.requests + stable.requests)
        doubt = 1 / canary.requests
        if stable.requests >= self.rules.min_requests:
            doubt += 1 / stable.requests
        return canary.error_rate - stable.error_rate > SIGNIFICANT_Z * math.sqrt(pooled * (1 - pooled) * doubt)

    def _too_slow(self) -> str | None:
        canary, stable, limit = self._canary.ttft, self._stable.ttft, self.rules.max_ttft_ratio
        if limit is None or min(canary.count, stable.count) < self.rules.min_requests:
            return None
        slow_s, usual_s = canary.median(), stable.median()
        if slow_s <= limit * usual_s:
            return None
        return (
            f"median time to first token {slow_s:.3g} s in {canary.count} requests is {slow_s / usual_s:.3g} times the "
            f"stable variant's of {usual_s:.3g} s, over {limit:g}"
        )

    def _turn(self, now: float) -> None:
        """Go on to the slot of this time; those that it takes the places of are forgotten."""
        slot = int(now / self._slot_s)
        for _ in range(min(slot - self._slot, SLOTS)):
            self._canary.turn()
            self._stable.turn()
        self._slot = slot
        self._turns_at = (slot + 1) * self._slot_s


class _Slot:
    __slots__ = ("bins", "errors", "requests")

    def __init__(self) -> None:
        self.requests = self.errors = 0
        self.bins: dict[int, int] = {}


class _Side:
    """One variant's requests: the slots, and their sums, so that neither adding nor looking walks the ring."""

    __slots__ = ("errors", "requests", "slot", "slots", "ttft")

    def __init__(self) -> None:
        self.slots = deque(_Slot() for _ in range(SLOTS))
        self.slot = self.slots[-1]  # the one being filled
        self.requests = self.errors = 0
        self.ttft = _Median()

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    def add(self, is_error: bool, ttft_s: float | None) -> None:
        slot = self.slot
        slot.requests += 1
        self.requests += 1
        if is_error:
            slot.errors += 1
            self.errors += 1
        if ttft_s is not None:
            bin = bin_of(ttft_s)
            slot.bins[bin] = slot.bins.get(bin, 0) + 1
            self.ttft.add(bin, 1)

    def turn(self) -> None:
        old = self.slots.popleft()
        self.requests -= old.requests
        self.errors -= old.errors
        for bin, count in old.bins.items():
            self.ttft.add(bin, -count)
        self.slot = _Slot()
        self.slots.append(self.slot)

    def status(self) -> SideStatus:
        return SideStatus(
            requests=self.requests,
            errors=self.errors,
            error_rate=self.error_rate if self.requests else None,
            ttft_median_s=self.ttft.median() if self.ttft.count else None,
        )


class _Median:
    """The median of what is in the bins. It looks for it from where it was last, which is near."""

    __slots__ = ("_below", "_bins", "_place", "count")

    def __init__(self) -> None:
        self.count = 0
        self._bins = [0] * BINS
        self._place = 0
        self._below = 0  # how many are in bins before the place

    def add(self, bin: int, count: int) -> None:
        self.count += count
        self._bins[bin] += count
        if bin < self._place:
            self._below += count

    def median(self) -> float:
        """In seconds; the lower one of two. There must be something in the bins."""
        bins, place, below = self._bins, self._place, self._below
        rank = (self.count - 1) // 2
        while below > rank:
            place -= 1
            below -= bins[place]
        while below + bins[place] <= rank:
            below += bins[place]
            place += 1
        self._place, self._below = place, below
        return FASTEST_S * math.exp((place + 0.5) / BINS_PER_E)


def bin_of(seconds: float) -> int:
    if seconds <= FASTEST_S:
        return 0
    return min(int(math.log(seconds / FASTEST_S) * BINS_PER_E), BINS - 1)
