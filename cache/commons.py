"""Flights that replicas share, through Redis.

A flight is led by one replica: the one whose claim was first. It keeps its claim and a sign of life by renewing them,
and writes the log of events to a Redis stream, which the others read. A leader that dies stops renewing, and those who
followed claim anew; who wins computes the same answer again, and goes on where the old log ended. When Redis cannot be
relied on, each replica has flights of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from .continuation import Continuation
from .errors import FlightAborted
from .flight import Flight, LogEvent, Work

R = TypeVar("R")

LEASE_MS = 1500
RENEW_S = 0.4
WATCH_MS = 600
FIRST_PAUSE_S, MOST_PAUSE_S = 0.005, 0.05  # between looks at a log in which nothing is new
MAX_EVENTS = 500  # of a log, read at a time
LEAST_KEPT_MS = 5000  # so that those who followed can read the end

# KEYS: leader, alive. ARGV: the flight, the lease's length in ms. Answers the flight that leads.
CLAIM = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], 1, 'PX', ARGV[2])
return ARGV[1]
"""

# KEYS: leader, alive, log, owners. ARGV: the flight, the lease's length in ms, how long the log is kept in ms.
RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
redis.call('SET', KEYS[2], 1, 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('PEXPIRE', KEYS[4], ARGV[3])
return 1
"""

# KEYS: log. ARGV: how long it is kept in ms, the number of entries before, the kind of the new ones, and those.
APPEND = """
for i = 4, #ARGV do redis.call('XADD', KEYS[1], '0-' .. (ARGV[2] + i - 3), ARGV[3], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""

# KEYS: leader, alive. ARGV: the flight.
RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
redis.call('DEL', KEYS[2])
return 1
"""

# KEYS: alive, log, watch. ARGV: how long a look counts in ms, the number of entries known, the most to answer.
# Answers whether the flight has a leader, and new entries.
READ = """
redis.call('SET', KEYS[3], 1, 'PX', ARGV[1])
local alive = redis.call('EXISTS', KEYS[1])
return {alive, redis.call('XRANGE', KEYS[2], '(0-' .. ARGV[2], '+', 'COUNT', ARGV[3])}
"""

WATCHED = "return redis.call('EXISTS', KEYS[1])"

# KEYS: owners. ARGV: how long they are kept in ms, the owners.
ADMIT = """
for i = 2, #ARGV do redis.call('SADD', KEYS[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""

# KEYS: log, owners. ARGV: the owner.
IS_READABLE = "return redis.call('EXISTS', KEYS[1]) * redis.call('SISMEMBER', KEYS[2], ARGV[1])"


class Redis(Protocol):
    """Runs scripts, in the order in which they come. None stands for an answer that cannot be had."""

    @property
    def is_up(self) -> bool: ...

    def submit(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> "asyncio.Future[Any]": ...

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any], timeout_s: float) -> Any: ...


@dataclass(frozen=True, slots=True)
class Codec(Generic[R]):
    """How what a flight came to travels."""

    pack: Callable[[R], bytes]
    unpack: Callable[[bytes], R]
    pack_error: Callable[[Exception], bytes]
    unpack_error: Callable[[bytes], Exception]


@dataclass(slots=True)
class Ended(Generic[R]):
    result: R | None
    error: Exception | None


class RedisCommons(Generic[R]):
    """Under `namespace`. A request waits `budget_s` at most to learn who leads. `resume_s`: how long logs are kept."""

    def __init__(self, redis: Redis, namespace: str, codec: Codec[R], budget_s: float, resume_s: float) -> None:
        self._redis = redis
        self._namespace = namespace
        self._codec = codec
        self._budget_s = budget_s
        self._kept_ms = max(int(resume_s * 1000), LEAST_KEPT_MS)

    async def fly(self, flight: Flight[R], work: Work[R]) -> R:
        while True:
            leader = await self._claim(flight) if flight.is_shared else flight.ref if self._redis.is_up else None
            if leader is None:
                return await work(flight)
            flight.source = leader
            if flight.owners:
                self._admit(flight, *flight.owners)
            if leader == flight.ref:
                return await self._lead(flight, work)
            ended = await self._follow(flight, leader)
            if ended is not None:
                return self._outcome(ended)

    async def is_watched(self, flight: Flight[R]) -> bool:
        if flight.source != flight.ref:
            return False
        keys = [self._key(flight.key, "watch", flight.ref)]
        return bool(await self._redis.evaluate(WATCHED, keys, (), self._budget_s))

    async def open(self, key: bytes, ref: bytes, owner: bytes) -> Work[R] | None:
        keys = [self._key(key, "log", ref), self._key(key, "owners", ref)]
        if not await self._redis.evaluate(IS_READABLE, keys, (owner,), self._budget_s):
            return None

        async def follow(flight: Flight[R]) -> R:
            ended = await self._follow(flight, ref)
            if ended is None:
                raise FlightAborted
            return self._outcome(ended)

        return follow

    def admit(self, flight: Flight[R], owner: bytes) -> None:
        if flight.source is not None:
            self._admit(flight, owner)

    def _admit(self, flight: Flight[R], *owners: bytes) -> None:
        assert flight.source is not None
        self._redis.submit(ADMIT, [self._key(flight.key, "owners", flight.source)], (self._kept_ms, *owners))

    async def _claim(self, flight: Flight[R]) -> bytes | None:
        """The flight that leads; None: Redis does not say."""
        keys = [self._key(flight.key, "leader"), self._key(flight.key, "alive", flight.ref)]
        answer = await self._redis.evaluate(CLAIM, keys, (flight.ref, LEASE_MS), self._budget_s)
        return answer if isinstance(answer, bytes) else None

    async def _lead(self, flight: Flight[R], work: Work[R]) -> R:
        writer = LogWriter(flight, self._redis, self._key(flight.key, "log", flight.ref), self._kept_ms)
        tasks = [asyncio.create_task(writer.run()), asyncio.create_task(self._renew(flight))]
        try:
            result = await work(flight)
        except Exception as exc:
            writer.end(b"error", self._codec.pack_error(exc))
            raise
        else:
            writer.end(b"end", self._codec.pack(result))
            return result
        finally:
            for task in tasks:
                task.cancel()
            leader, alive = self._key(flight.key, "leader"), self._key(flight.key, "alive", flight.ref)
            self._redis.submit(RELEASE, [leader, alive], (flight.ref,))

    async def _renew(self, flight: Flight[R]) -> None:
        keys = [self._key(flight.key, "leader")]
        keys += [self._key(flight.key, what, flight.ref) for what in ("alive", "log", "owners")]
        while True:
            self._redis.submit(RENEW, keys, (flight.ref, LEASE_MS, self._kept_ms + LEASE_MS))
            await asyncio.sleep(RENEW_S)

    async def _follow(self, flight: Flight[R], ref: bytes) -> Ended[R] | None:
        """Read another replica's log to its end; None: its leader is gone, or Redis is."""
        keys = [self._key(flight.key, what, ref) for what in ("alive", "log", "watch")]
        beyond = Continuation(event.data for event in flight.log) if flight.log else None
        known, pause_s = 0, FIRST_PAUSE_S
        while True:
            answer = await self._redis.evaluate(READ, keys, (WATCH_MS, known, MAX_EVENTS), self._budget_s)
            if answer is None and not self._redis.is_up:
                return None
            is_alive, entries = answer or (1, ())
            for _, (kind, payload) in entries:
                known += 1
                if kind == b"end":
                    return Ended(self._codec.unpack(payload), None)
                if kind == b"error":
                    return Ended(None, self._codec.unpack_error(payload))
                event = unpack_event(payload)
                data = event.data if beyond is None else beyond.next(event.data)
                if data is not None:
                    flight.append(data, event.name, event.tells_usage, event.id)
            flight.tell()
            if not is_alive and not entries:
                return None
            pause_s = FIRST_PAUSE_S if entries else min(pause_s * 1.5, MOST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _outcome(self, ended: Ended[R]) -> R:
        if ended.error is not None:
            raise ended.error
        assert ended.result is not None
        return ended.result

    def _key(self, key: bytes, what: str, ref: bytes = b"") -> str:
        """What stands in braces chooses the slot of a Redis Cluster: one for all of a flight."""
        base = f"{self._namespace}:flight:{{{key.hex()}}}:{what}"
        return f"{base}:{ref.decode()}" if ref else base


class LogWriter(Generic[R]):
    """Copies a flight's log to Redis, as it grows."""

    def __init__(self, flight: Flight[R], redis: Redis, key: str, kept_ms: int) -> None:
        self._flight = flight
        self._redis = redis
        self._key = key
        self._kept_ms = kept_ms
        self._written = 0

    async def run(self) -> None:
        while True:
            progress = self._flight.progress()
            self._write()
            await progress

    def end(self, kind: bytes, payload: bytes) -> None:
        self._write()
        self._redis.submit(APPEND, [self._key], (self._kept_ms, self._written, kind, payload))

    def _write(self) -> None:
        events = self._flight.log[self._written :]
        for start in range(0, len(events), MAX_EVENTS):  # a script's arguments have a bound
            packed = [pack_event(event) for event in events[start : start + MAX_EVENTS]]
            self._redis.submit(APPEND, [self._key], (self._kept_ms, self._written, b"event", *packed))
            self._written += len(packed)


def pack_event(event: LogEvent) -> bytes:
    return b"%b\n%b\n%d\n%b" % (event.id, (event.name or "").encode(), event.tells_usage, event.data)


def unpack_event(packed: bytes) -> LogEvent:
    id, name, tells_usage, data = packed.split(b"\n", 3)
    return LogEvent(id, data, name.decode() or None, tells_usage == b"1")
