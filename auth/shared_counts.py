"""What all replicas have let through, counted in Redis.

The windows are the fixed windows of limits (a counter that expires, begun by its first hit), under the same keys, so
that limits' own Redis storage can read them. That one takes a round trip for each hit, count, and expiry, though, and
cannot take all or nothing; so here a request's windows and slots are taken by one script, and settled by another.

A slot is a lease: a member of a sorted set, scored by when it ends. It is renewed while its request runs, so that the
slots of a replica that was killed come back by themselves.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from .plan import Plan, Slots, Standing, Verdict, Window

LEASE_S = 60.0
PLANS = 10_000  # of recent callers, kept
RETURN_S = 1.0  # how often leases are given back that could not be at once

# KEYS: windows, then slots. ARGV: the window's length in ms, the lease (empty: there has to be a free slot, but none is
# taken), its length in ms, the number of windows; then a limit for each key, and for each window what the request
# counts in it (0: only look).
# Answers: 1 if everything was taken, else 0; the place of the first full slots, else 0; count and ms left a window.
TAKE = """
local window_ms, lease, lease_ms, windows = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answer, room, full = {1, 0}, true, 0
for i = 1, windows do
  local count = tonumber(redis.call('GET', KEYS[i]) or 0)
  local left = redis.call('PTTL', KEYS[i])
  room = room and count < tonumber(ARGV[4 + i])
  answer[1 + 2 * i], answer[2 + 2 * i] = count, left < 0 and window_ms or left
end
for i = windows + 1, #KEYS do
  redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now)
  if full == 0 and redis.call('ZCARD', KEYS[i]) >= tonumber(ARGV[4 + i]) then full = i - windows end
end
if full > 0 or not room then
  answer[1], answer[2] = 0, full
  return answer
end
for i = 1, windows do
  local cost = tonumber(ARGV[4 + #KEYS + i])
  if cost > 0 then
    answer[1 + 2 * i] = redis.call('INCRBY', KEYS[i], cost)
    if redis.call('PTTL', KEYS[i]) < 0 then redis.call('PEXPIRE', KEYS[i], window_ms) end
  end
end
if lease == '' then return answer end
for i = windows + 1, #KEYS do
  redis.call('ZADD', KEYS[i], now + lease_ms, lease)
  redis.call('PEXPIRE', KEYS[i], 2 * lease_ms)
end
return answer
"""

# KEYS: windows of tokens, then slots. ARGV: the window's length in ms, the tokens, the number of windows, the lease.
SETTLE = """
for i = 1, tonumber(ARGV[3]) do
  redis.call('INCRBY', KEYS[i], ARGV[2])
  if redis.call('PTTL', KEYS[i]) < 0 then redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
end
for i = tonumber(ARGV[3]) + 1, #KEYS do redis.call('ZREM', KEYS[i], ARGV[4]) end
return 1
"""

# KEYS: slots. ARGV: the lease's length in ms; the lease.
RENEW = """
local clock = redis.call('TIME')
local ends = clock[1] * 1000 + math.floor(clock[2] / 1000) + ARGV[1]
for _, key in ipairs(KEYS) do
  redis.call('ZADD', key, ends, ARGV[2])
  redis.call('PEXPIRE', key, 2 * ARGV[1])
end
return 1
"""


class Redis(Protocol):
    """Runs scripts, in the order in which they come. None stands for an answer that cannot be had; the script may have
    run all the same."""

    @property
    def is_up(self) -> bool: ...

    def submit(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> "asyncio.Future[Any]": ...

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any], timeout_s: float) -> Any:
        """Submit, and wait so long for the answer."""
        ...

    async def wait(self, answer: "asyncio.Future[Any]", timeout_s: float) -> None:
        """Wait so long for what was submitted, and let it go on."""
        ...


class Held(NamedTuple):
    """A lease of a request that runs; how much of the request's time budget is left for giving it back; and whether
    Redis may know of it."""

    slots: tuple[Slots, ...]
    left_s: float
    is_known: bool


class RedisCounts:
    """Counts under `namespace`. A request loses `budget_s` to it at most, before and after it together. When Redis
    cannot be relied on, this replica goes by its own counts, rather than refuse everybody or nobody. `run` looks after
    the leases."""

    def __init__(
        self, redis: Redis, namespace: str, budget_s: float, window_s: int = 60, lease_s: float = LEASE_S
    ) -> None:
        self._redis = redis
        self._prefix = f"{namespace}:limits"
        self._budget_s = budget_s
        self._window_ms = window_s * 1000
        self._lease_ms = int(lease_s * 1000)
        self._taking = lru_cache(PLANS)(self._take_arguments)
        # Mutable state: leases of requests that run, and those that could not be given back yet, with their slots.
        self._held: dict[str, Held] = {}
        self._owed: dict[str, tuple[Slots, ...]] = {}

    async def take(self, plan: Plan, lease: str) -> Verdict | None:
        if not self._redis.is_up:
            self._hold(lease, Held(plan.slots, 0.0, is_known=False))
            return None
        started = time.monotonic()
        keys, windows, rest = self._taking(plan)
        try:
            arguments = (self._window_ms, lease, self._lease_ms, windows, *rest)
            answer = await self._redis.evaluate(TAKE, keys, arguments, self._budget_s)
        except BaseException:
            if lease:
                self._owed[lease] = plan.slots
            raise
        if answer is None:
            self._hold(lease, Held(plan.slots, 0.0, is_known=True))  # it may have been taken all the same
            return None
        is_taken, full, *counts = answer
        if is_taken:
            self._hold(lease, Held(plan.slots, self._budget_s - (time.monotonic() - started), True))
        pairs = zip(plan.windows, counts[::2], counts[1::2], strict=True)
        now = time.monotonic()
        standings = [Standing(window, used, now + left_ms / 1000) for window, used, left_ms in pairs]
        return Verdict(bool(is_taken), standings, plan.slots[full - 1] if full else None)

    def _hold(self, lease: str, held: Held) -> None:
        if lease:
            self._held[lease] = held

    def _take_arguments(self, plan: Plan) -> tuple[list[str], int, list[int]]:
        """Keys, the number of windows, and what follows it."""
        limiting: list[Window | Slots] = [*plan.windows, *plan.slots]
        limits = [item.limit for item in limiting]
        costs = [int(window.kind == "requests") for window in plan.windows]
        return [self._key(item) for item in limiting], len(plan.windows), limits + costs

    def abandon(self, lease: str) -> None:
        held = self._held.pop(lease, None)
        if held is not None and held.is_known and held.slots:
            self._owed[lease] = held.slots

    async def settle(self, plan: Plan, lease: str, tokens: int) -> None:
        left_s = self._held[lease].left_s
        self.abandon(lease)
        slots = self._owed.get(lease, ())
        windows = [window for window in plan.windows if window.kind == "tokens" and tokens]
        if slots or windows:
            settled = self._submit_settle(lease, windows, slots, tokens)
            if left_s > 0:
                await self._redis.wait(settled, left_s)

    def _submit_settle(
        self, lease: str, windows: Sequence[Window], slots: Sequence[Slots], tokens: int
    ) -> "asyncio.Future[Any]":
        keys = [*map(self._key, windows), *map(self._key, slots)]
        settled = self._redis.submit(SETTLE, keys, (self._window_ms, tokens, len(windows), lease))
        settled.add_done_callback(lambda done: done.result() is not None and self._owed.pop(lease, None))
        return settled

    async def run(self) -> None:
        """Renew the leases that are held, and give back those that could not be, until cancelled."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(RETURN_S)
            for lease, slots in list(self._owed.items()):
                self._submit_settle(lease, (), slots, 0)
            now = time.monotonic()
            if now - renewed > self._lease_ms / 3000 and await self._renew_all():
                renewed = now

    async def _renew_all(self) -> bool:
        """Tell Redis of every lease that is held, and whether that worked. Scripts run in order, so a lease that is
        given back later than this stays given back."""
        if not self._redis.is_up:
            return False
        renewals = []
        for lease, held in self._held.items():
            if held.slots:
                self._held[lease] = held._replace(is_known=True)
                keys = [self._key(item) for item in held.slots]
                renewals.append(self._redis.submit(RENEW, keys, (self._lease_ms, lease)))
        return None not in await asyncio.gather(*renewals)

    def _key(self, item: Window | Slots) -> str:
        return f"{self._prefix}:{item.key}"
