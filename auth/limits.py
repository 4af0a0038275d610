"""How much a caller may: requests and tokens a minute, and requests at once, for the tenant and for the subject.

Minutes are fixed windows: one begins with the first request that is counted in it, and what is left at its end is lost.
Tokens are charged when they are known, so the request that uses up the last one may go beyond.
"""

import itertools
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol
from urllib.parse import quote

from .errors import ConcurrencyLimitExceeded, LimitExceeded, RateLimitExceeded
from .local_counts import LocalCounts
from .plan import Plan, Slots, Standing, Verdict, Window, tightest
from .principal import Principal, Quota

PLANS = 10_000  # of recent callers, kept
CONCURRENCY_RETRY_S = 1.0  # nobody knows when a request ends


class SharedCounts(Protocol):
    """The counts of all replicas together."""

    async def take(self, plan: Plan, lease: str) -> Verdict | None:
        """Take all that the plan asks for, or nothing; without a lease, no slots. None: that cannot be told in time, so
        go by your own counts, and `settle` or `abandon` a lease as if it was taken."""
        ...

    async def settle(self, plan: Plan, lease: str, tokens: int) -> None:
        """Charge tokens, and give the slots back: now, or later when that cannot be now. Never fails."""
        ...

    def abandon(self, lease: str) -> None:
        """Give the slots back later."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits by default, and by tier. A token's own claims go before its tier, and limit its subject; the tier goes
    before the defaults."""

    tenant: Quota = field(default_factory=Quota)
    subject: Quota = field(default_factory=Quota)
    tiers: Mapping[str, tuple[Quota, Quota]] = field(default_factory=dict)

    def plan(self, principal: Principal) -> Plan:
        of_tenant, of_subject = self.tiers.get(principal.tier or "", (Quota(), Quota()))
        # One Redis Cluster slot for all keys of a tenant: what stands in braces chooses it.
        tenant = f"{{{quote(principal.tenant, safe='')}}}"
        subject = f"{tenant}:{quote(principal.subject, safe='')}"
        quotas = (
            ("tenant", tenant, of_tenant.or_else(self.tenant)),
            ("subject", subject, principal.quota.or_else(of_subject).or_else(self.subject)),
        )
        windows: list[Window] = []
        slots: list[Slots] = []
        for whose, key, quota in quotas:
            if quota.requests_per_minute is not None:
                windows.append(Window(f"{whose}:{key}:requests", "requests", quota.requests_per_minute, whose))
            if quota.tokens_per_minute is not None:
                windows.append(Window(f"{whose}:{key}:tokens", "tokens", quota.tokens_per_minute, whose))
            if quota.concurrent is not None:
                slots.append(Slots(f"{whose}:{key}:running", quota.concurrent, whose))
        return Plan(tuple(windows), tuple(slots))


class Limiter:
    """Counts by `shared` where there is one and it answers, else by this replica's own counts, which are always kept,
    so that they are right when they are needed."""

    def __init__(self, policy: Policy, shared: SharedCounts | None = None, window_s: int = 60) -> None:
        self.use(policy)
        self._shared = shared
        self._local = LocalCounts(window_s)
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        self.decisions: Counter[tuple[str, str]] = Counter()

    def use(self, policy: Policy) -> None:
        """Go by another one from now on. What was counted counts; requests under way end as they began."""
        self._plan = lru_cache(PLANS)(policy.plan)

    async def admit(self, principal: Principal, is_over: bool = False) -> "Admission":
        """Count a request; one whose answer is there already is over, and takes no slot.

        Raises: RateLimitExceeded, ConcurrencyLimitExceeded.
        """
        plan = self._plan(principal)
        if not plan.windows and not plan.slots:
            return Admission(self, plan, "", [])
        lease = ""
        verdict = None
        if self._shared is not None:
            # An id of the gateway's own: two requests may come with the same request id.
            lease = "" if is_over else f"{self._name}-{next(self._numbers)}"
            verdict = await self._shared.take(plan, lease)
        by = "local" if verdict is None else "shared"
        if verdict is None:
            verdict = self._local.take(plan, is_over)
            if self._shared is not None and not verdict.is_taken:
                self._shared.abandon(lease)
        elif verdict.is_taken:
            self._local.count(plan, is_over)
        if not verdict.is_taken:
            refusal = _refusal(verdict)
            self.decisions[refusal.kind, by] += 1
            raise refusal
        self.decisions["allowed", by] += 1
        return Admission(self, plan, lease, verdict.standings, is_over)

    @property
    def is_shared(self) -> bool:
        return self._shared is not None

    def admit_at_once(self, principal: Principal, is_over: bool) -> "Admission | None":
        """Count a request by this replica's own counts; of one that is over, nothing is to be settled. None: it has to
        be refused, which is left to be told, and counted, by `admit`."""
        plan = self._plan(principal)
        if not plan.windows and not plan.slots:
            return Admission(self, plan, "", [])
        verdict = self._local.take(plan, is_over)
        if not verdict.is_taken:
            return None
        self.decisions["allowed", "local"] += 1
        return Admission(self, plan, "", verdict.standings, is_settled=is_over)

    def settle_locally(self, plan: Plan, tokens: int) -> None:
        self._local.settle(plan, tokens)

    async def settle(self, plan: Plan, lease: str, tokens: int) -> None:
        self.settle_locally(plan, tokens)
        if self._shared is not None:
            await self._shared.settle(plan, lease, tokens)

    @property
    def running(self) -> int:
        """Slots in use by this replica's requests."""
        return self._local.running


class Admission:
    """What one request took; `settle` gives it back, once, whatever ended the request."""

    __slots__ = ("_is_settled", "_lease", "_limiter", "_plan", "_standings")

    def __init__(
        self, limiter: Limiter, plan: Plan, lease: str, standings: list[Standing], is_settled: bool = False
    ) -> None:
        self._limiter = limiter
        self._plan = plan
        self._lease = lease
        self._standings = standings
        self._is_settled = is_settled

    async def settle(self, tokens: int = 0) -> None:
        """Charge the tokens that the request cost, and free its slots. Only the first call counts."""
        if self._close(tokens):
            await self._limiter.settle(self._plan, self._lease, tokens)

    def settle_at_once(self, tokens: int) -> None:
        """The same for one of `admit_at_once`."""
        if self._close(tokens):
            self._limiter.settle_locally(self._plan, tokens)

    def _close(self, tokens: int) -> bool:
        """Whether there is something to settle."""
        if self._is_settled:
            return False
        self._is_settled = True
        if not self._plan.windows and not self._plan.slots:
            return False
        if tokens:
            for standing in self._standings:
                if standing.window.kind == "tokens":
                    standing.used += tokens
        return True

    def tightest(self) -> Sequence[Standing]:
        """For requests and for tokens, the window that will be used up first."""
        return tightest(self._standings)


def _refusal(verdict: Verdict) -> LimitExceeded:
    used_up = [standing for standing in verdict.standings if standing.is_used_up]
    if used_up:
        last = max(used_up, key=lambda standing: standing.reset_s)
        window = last.window
        retry_after_s = math.ceil(last.reset_s)
        return RateLimitExceeded(
            f"Rate limit reached for this {window.whose} on {window.kind} per minute: limit {window.limit}, used "
            f"{last.used}. Please try again in {retry_after_s}s.",
            window.kind,
            retry_after_s,
            verdict.standings,
        )
    assert verdict.full is not None
    return ConcurrencyLimitExceeded(
        f"As many requests of this {verdict.full.whose} are running as may: {verdict.full.limit}.",
        "concurrent",
        CONCURRENCY_RETRY_S,
        verdict.standings,
    )
