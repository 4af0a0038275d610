"""What is counted of requests as they end, in plain numbers: this is in the path of every one of them.

prometheus_client's own counters and histograms take a lock and a microsecond or two at each observation; these are for
one event loop.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from routing.engine import Usage

from ..logs import Access

# In seconds. Of whole requests: from a cache hit to a long generation.
REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5, 10)
GATEWAY_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)

SAVED_BY = {"hit": "saved_by_cache", "collapsed": "saved_by_singleflight", "resumed": "saved_by_singleflight"}
OTHER_TENANTS = "other"
LIMITED = frozenset({"rate_limit_exceeded", "concurrency_limit_exceeded"})  # as app/errors.py calls them


class Seconds:
    """A histogram's counts, the last of which is of all beyond the greatest bound."""

    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: Sequence[float] = REQUEST_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds


class Requests:
    """Of one operation's requests for one variant of a model."""

    __slots__ = ("between_tokens", "duration", "fallbacks", "gateway", "outcomes", "tokens", "ttft")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.duration = Seconds()
        self.gateway = Seconds(GATEWAY_S)
        self.ttft = Seconds()
        self.between_tokens = Seconds(BETWEEN_TOKENS_S)


class Tenant:
    """Of one tenant's requests."""

    __slots__ = ("outcomes", "tokens")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0


class Counts:
    """Of this process. `max_tenants` are told apart, those that come first; the rest is counted together."""

    def __init__(self, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        # Mutable state, changed by `record` and what it calls, and by the readers of streams.
        self.total = 0
        self.failed = 0
        self.requests: dict[tuple[str | None, str | None, str | None], Requests] = {}
        self.tenants: dict[str, Tenant] = {}
        self._hits = 0
        self._hits_s = 0.0

    def of(self, access: Access) -> Requests:
        """What such requests are counted in. A model that is not configured has none of its own."""
        label = (access.operation, access.model, access.variant)
        counts = self.requests.get(label)
        if counts is None:
            counts = self.requests[label] = Requests()
        return counts

    def record(self, access: Access) -> None:
        """Count a request that has ended."""
        outcome, usage, duration_s = access.outcome, access.usage, access.duration_s
        self.total += 1
        self.failed += outcome == "error"
        counts = self.of(access)
        counts.outcomes[outcome] += 1
        counts.duration.observe(duration_s)
        counts.gateway.observe(access.gateway_s)
        if access.fallback is not None:
            counts.fallbacks[access.fallback] += 1
        if access.first_token is not None:
            counts.ttft.observe(access.first_token - access.started)
        if access.cache == "hit":
            self._hits += 1
            self._hits_s += duration_s
        saved_by = None if access.cache is None else SAVED_BY.get(access.cache)
        if usage is not None:
            self._count_tokens(counts.tokens, usage, saved_by)
        if access.tenant is not None and self._max_tenants:
            tenant = self.tenants.get(access.tenant) or self._tenant(access.tenant)
            tenant.outcomes["limited" if access.error in LIMITED else outcome] += 1
            if usage is not None and saved_by is None:
                tenant.tokens += usage.prompt_tokens + usage.completion_tokens

    def hit_time_us(self) -> float | None:
        """Mean time of a request that was answered from the cache."""
        return round(self._hits_s / self._hits * 1e6, 1) if self._hits else None

    def saved_share(self) -> float | None:
        """Of all tokens of prompts and answers, how many no engine worked on."""
        totals: Counter[str] = Counter()
        for counts in self.requests.values():
            totals.update(counts.tokens)
        saved = sum(totals[kind] for kind in SAVED_BY.values())
        everything = saved + totals["prompt"] + totals["completion"]
        return round(saved / everything, 4) if everything else None

    def _count_tokens(self, tokens: "Counter[str]", usage: Usage, saved_by: str | None) -> None:
        if saved_by is not None:
            tokens[saved_by] += usage.prompt_tokens + usage.completion_tokens
            return
        tokens["prompt"] += usage.prompt_tokens
        tokens["completion"] += usage.completion_tokens
        tokens["cached"] += usage.cached_tokens or 0

    def _tenant(self, name: str) -> Tenant:
        if len(self.tenants) >= self._max_tenants:
            name = OTHER_TENANTS
        return self.tenants.setdefault(name, Tenant())
