"""Where an answer comes from: the cache, a flight under way, or an engine call that this request begins.

Whole and streamed requests share entries and flights. An engine works less for a whole answer, so one is asked for
when a whole request leads, unless a caller of the same tenant who streams is likely to join: then the engine is asked
for a stream, which is put together when it is over. A stream that joins a whole answer all the same gets it in the end.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from cache.assembly import Assembly, is_whole
from cache.continuation import Continuation
from cache.entry import Entry, tags_of
from cache.errors import NotInCache, StreamGone
from cache.flight import Flight, Flights, LogEvent, Seat
from cache.key import KeyMaker, Question, canonical
from cache.replay import replay
from cache.store import Hit, ResponseCache
from routing.engine import Call, Event, Tally, Usage
from routing.errors import EngineError
from routing.models import Model
from routing.split import Variant

from .cache_headers import CacheControl
from .logs import Access

OWNERS = 10_000
OFF = "off"
STREAMING_S = 600.0  # how long after a stream another one is likely
# What vLLM and OpenAI give with whole answers only.
WHOLE_ONLY = ("prompt_logprobs", "use_beam_search", "best_of", "return_token_ids", "return_tokens_as_token_ids")
ID = b'"id":"%b"'
WRITTEN_ID = re.compile(rb'\{"id":"([A-Za-z0-9]*-)[A-Za-z0-9_-]*"(?=,)')


@dataclass(slots=True)
class Wanted:
    """A request that was understood. `body` has neither nulls at its top nor anything of streaming; `obstacle` says why
    it is not answered from the cache."""

    operation: str
    model: Model
    variant: Variant
    body: dict[str, Any]
    stream: bool
    tells_usage: bool
    question: Question
    obstacle: str | None
    control: CacheControl
    last_event_id: bytes | None
    access: Access
    priority: int = 0
    affinity: bytes = b""
    trace: tuple[tuple[bytes, bytes], ...] = ()
    size_bytes: int = 0
    tally: Tally = field(default_factory=Tally)
    key: bytes | None = None  # once it was needed
    is_looked_up: bool = False


class Landed(NamedTuple):
    """What a flight came to. Without an entry or a body it was a stream for one request alone."""

    usage: Usage | None
    entry: Entry | None = None
    body: bytes | None = None
    is_stored: bool = False


Place = Seat[Landed]


class Answers:
    """`ttls_s` are those of models that have one of their own."""

    def __init__(
        self,
        keys: KeyMaker,
        cache: ResponseCache | None,
        flights: Flights[Landed],
        is_shared: bool,
        ttl_s: float,
        ttls_s: Mapping[str, float],
    ) -> None:
        self._keys = keys
        self._cache = cache
        self._flights = flights
        self._is_shared = is_shared
        self._ttl_s = ttl_s
        self.use_ttls(ttls_s)
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by outcome, and tier or reason
        self._streamed: dict[bytes, float] = {}  # when there was a stream, by the tags of tenant and model

    def use_ttls(self, ttls_s: Mapping[str, float]) -> None:
        """For answers from now on; those that are stored keep theirs."""
        self._ttls_s = dict(ttls_s)

    def obstacle(self, question: Question, control: CacheControl, options: Mapping[str, Any]) -> str | None:
        """Why a request is not answered from the cache; None: it can be. All but OFF are reasons against sharing a
        flight, too."""
        if control.no_store:
            return "no-store"
        if any(value for option, value in options.items() if option not in ("include_usage", "include_obfuscation")):
            return "stream options"
        return self._keys.obstacle(question) or (OFF if self._cache is None else None)

    def key(self, wanted: Wanted) -> bytes:
        """Of a request that can be answered from the cache."""
        if wanted.key is None:
            wanted.key = self._keys.key(wanted.question)
            wanted.access.did("key")
        return wanted.key

    def at_hand(self, key: bytes, wanted: Wanted | None = None) -> Hit | None:
        """What there is in memory; `note_hit` when it is used. For `wanted` this was the look-up, if there is no other
        tier."""
        if self._cache is None:
            return None
        is_final = wanted is not None and not self._cache.has_lower
        if wanted is not None:
            wanted.is_looked_up = is_final
        return self._cache.recall(key, is_final=is_final)

    async def look_up(self, wanted: Wanted) -> Hit | None:
        """A stored answer that will do; `note_hit` when it is used. A second look is one in memory alone."""
        is_resumed = wanted.last_event_id is not None and wanted.stream
        if self._cache is None or wanted.obstacle is not None or wanted.control.no_cache or is_resumed:
            return None
        if wanted.is_looked_up:
            return self._cache.recall(self.key(wanted), wanted.control.max_age_s, is_final=False)
        wanted.is_looked_up = True
        hit = await self._look_up(self.key(wanted), wanted.control.max_age_s)
        wanted.access.did("lookup")
        return hit

    async def look_for(self, key: bytes) -> Hit | None:
        """The same for a key that is known."""
        return await self._look_up(key, None)

    @property
    def has_lower(self) -> bool:
        """Whether looking up is more than a look into memory."""
        return self._cache is not None and self._cache.has_lower

    def note_hit(self, access: Access, hit: Hit) -> None:
        access.usage = Usage(hit.entry.prompt_tokens, hit.entry.completion_tokens)
        self._note(access, "hit", hit.tier)

    async def find(self, wanted: Wanted) -> Hit | Place:
        """Raises: NotInCache, StreamGone."""
        if wanted.last_event_id is not None and wanted.stream:
            return await self._resume(wanted)
        hit = await self.look_up(wanted)
        if hit is not None:
            self.note_hit(wanted.access, hit)
            return hit
        if wanted.control.only_if_cached:
            raise NotInCache
        return self.fly(wanted)

    def may_fly_at_once(self, wanted: Wanted) -> bool:
        """Whether all has been looked up that would be, so that `fly` may follow."""
        return wanted.obstacle is not None or wanted.is_looked_up

    def _may_share(self, wanted: Wanted) -> bool:
        """Whether identical requests in flight are one."""
        return self._is_shared and wanted.obstacle in (None, OFF)

    def _is_anybodys(self, wanted: Wanted) -> bool:
        """Whether the answer is one for all who share a key, and not this caller's alone."""
        return wanted.obstacle is None or self._may_share(wanted)

    def _flight_key(self, wanted: Wanted) -> bytes:
        """Empty for a flight that nobody else will look for."""
        if self._is_anybodys(wanted):
            return self.key(wanted)
        return self._keys.private_key(wanted.question) if wanted.stream else b""

    async def explain(self, wanted: Wanted) -> dict[str, Any]:
        """What `find` would do: from where the answer would come, or why not from the cache, and what the key is of."""
        question = wanted.question
        told: dict[str, Any] = {
            "cacheable": wanted.obstacle is None,
            "reason": wanted.obstacle,
            "operation": wanted.operation,
            "model": question.model,
            "variant": wanted.variant.name if wanted.model.has_variants else None,
            "revision": question.revision,
            "policy": self._keys.policy,
            "scope": self._keys.sharing,
            "fields": canonical(wanted.operation, wanted.body),
            "key": None,
            "tier": None,
            "age_s": None,
            "ttl_s": None,
            "in_flight": False,
        }
        if wanted.obstacle is None and self._cache is not None:
            key = self._keys.key(question)
            hit = None if wanted.control.no_cache else await self._cache.peek(key, wanted.control.max_age_s)
            told |= {"key": key.hex(), "in_flight": self._flights.is_open(key), "ttl_s": self._ttl(wanted)}
            if hit is not None:
                now = time.time()
                entry = hit.entry
                told |= {"tier": hit.tier, "age_s": int(now - entry.made_at), "ttl_s": int(entry.expires_at - now)}
        return told

    def _ttl(self, wanted: Wanted) -> float:
        return self._ttls_s.get(wanted.model.name, self._ttl_s)

    async def _look_up(self, key: bytes, max_age_s: float | None) -> Hit | None:
        assert self._cache is not None
        hit = self._cache.recall(key, max_age_s)
        if hit is not None or not self._cache.has_lower or self._flights.is_open(key):
            return hit
        # While the lower tiers were asked, a flight may have landed.
        return await self._cache.look_below(key, max_age_s) or self._cache.recall(key, max_age_s)

    def fly(self, wanted: Wanted) -> Place:
        """A place in the flight of such requests, in a new one if there is none."""
        key, is_shared, is_anew = self._flight_key(wanted), self._may_share(wanted), wanted.control.no_cache
        work = self._work if wanted.access.trace is None else self._traced_work
        seat = self._flights.join(key, partial(work, wanted, key, is_shared), is_shared, is_anew)
        if not seat.leads:
            self._note(wanted.access, "collapsed", "")
        elif wanted.obstacle is not None:
            self._note(wanted.access, "bypass", wanted.obstacle)
        else:
            self._note(wanted.access, "miss", "request" if is_anew else "")
        self._admit(wanted, seat)
        return seat

    async def _resume(self, wanted: Wanted) -> Hit | Place:
        """Read on in the stream of whichever variant it is: another one may be this request's by now."""
        others = [variant for variant in wanted.model.split.variants if variant is not wanted.variant]
        for variant in (wanted.variant, *others):
            question = wanted.question._replace(revision=variant.revision)
            try:
                source = await self._resume_in(replace(wanted, variant=variant, question=question, key=None))
            except StreamGone:
                continue
            if wanted.model.has_variants:
                wanted.access.variant = variant.name
            return source
        raise StreamGone

    async def _resume_in(self, wanted: Wanted) -> Hit | Place:
        """Raises: StreamGone."""
        assert wanted.last_event_id is not None
        key = self._flight_key(wanted)
        if wanted.last_event_id.startswith(b"h"):
            hit = await self._look_up(key, None) if wanted.obstacle is None else None
            if hit is None or replay_ref(hit.entry) != wanted.last_event_id.partition(b".")[0]:
                raise StreamGone
            self.note_hit(wanted.access, hit)
            return hit
        work = partial(self._work, wanted, key, True) if self._is_anybodys(wanted) else None
        seat = await self._flights.resume(key, wanted.last_event_id, owner_of(wanted.question), work)
        self._note(wanted.access, "resumed", "")
        self._admit(wanted, seat)
        return seat

    def _admit(self, wanted: Wanted, seat: Place) -> None:
        if wanted.stream:
            if len(self._streamed) >= OWNERS:
                self._streamed.clear()
            self._streamed[tags_of(seat.flight.key)] = time.monotonic()
            self._flights.admit(seat, owner_of(wanted.question))

    def _note(self, access: Access, outcome: str, detail: str) -> None:
        access.cache, access.cache_detail = outcome, detail or None
        self.outcomes[outcome, detail] += 1

    # In flight

    async def _traced_work(self, wanted: Wanted, key: bytes, is_shared: bool, flight: Flight[Landed]) -> Landed:
        trace = wanted.access.trace
        assert trace is not None
        with trace.calling(wanted.operation, wanted.model.name, wanted.body) as call:
            wanted.trace = call.headers
            try:
                landed = await self._work(wanted, key, is_shared, flight)
            finally:
                call.tried(wanted.tally)
            call.answered(landed.usage)
            return landed

    async def _work(self, wanted: Wanted, key: bytes, is_shared: bool, flight: Flight[Landed]) -> Landed:
        """Ask the engine, and store what it says. Raises: RoutingError, CacheError."""
        is_kept = wanted.obstacle is None
        body = wanted.body
        as_stream = wanted.stream or bool(flight.log) or (is_shared and self._may_be_streamed(wanted, key, flight))
        if as_stream:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        tally = wanted.tally
        call = Call(
            wanted.operation,
            wanted.model.name,
            body,
            wanted.access.request_id,
            tally,
            wanted.question.tenant,
            wanted.priority,
            wanted.affinity,
            wanted.trace,
            wanted.size_bytes,
        )
        began = time.monotonic()
        flight.cost = lambda: tally.prompt_tokens + tally.completion_tokens
        if as_stream:
            document, usage = await self._stream(wanted, call, flight, is_put_together=is_kept or is_shared)
        else:
            answer = await wanted.variant.engine.answer(call)
            usage = answer.usage
            if not is_kept and not is_shared:
                self._charge(flight, usage)
                self._offer_to_shadow(wanted, call, answer.body, began)
                return Landed(usage, body=answer.body)
            document = answer.document or orjson.loads(answer.body)
        self._charge(flight, usage)
        self._offer_to_shadow(wanted, call, document, began)
        if document is None:
            return Landed(usage)
        parts = split_id(document) if as_stream else cut_id(answer.body) or split_id(document)
        entry = self._entry(wanted, parts, usage, flight.began_at)
        if not flight.log and (flight.owners or flight.source is not None):
            for payload in replay(document, is_chat(wanted.operation)):
                flight.append(payload, tells_usage=is_usage_chunk(payload))
            flight.tell()
        limit = wanted.body.get("max_completion_tokens") or wanted.body.get("max_tokens")
        # What another pool or model answered in this one's place is not what the next caller should get.
        if is_kept and tally.fallback is None and self._cache is not None and is_whole(document, limit):
            return Landed(usage, entry, is_stored=self._cache.put(key, entry))
        return Landed(usage, entry)

    def _offer_to_shadow(self, wanted: Wanted, call: Call, answer: bytes | dict[str, Any] | None, began: float) -> None:
        shadow = wanted.model.shadow
        if shadow is None or shadow.variant.name == wanted.variant.name or call.tally.fallback is not None:
            return
        key = call.request_id.encode()
        if shadow.is_for(key):
            body = orjson.dumps(answer) if isinstance(answer, dict) else answer
            shadow.offer(key, call, body, time.monotonic() - began)

    def _may_be_streamed(self, wanted: Wanted, key: bytes, flight: Flight[Landed]) -> bool:
        streamed_at = self._streamed.get(tags_of(key))
        is_likely = streamed_at is not None and time.monotonic() - streamed_at < STREAMING_S
        if not flight.owners and not is_likely:
            return False
        return not any(wanted.body.get(name) for name in WHOLE_ONLY)

    async def _stream(
        self, wanted: Wanted, call: Call, flight: Flight[Landed], is_put_together: bool
    ) -> tuple[dict[str, Any] | None, Usage | None]:
        """Let the engine's events into the flight's log. Where the log has some of the same answer, from an engine call
        that ended early, only those that are beyond."""
        assembly = Assembly(is_chat(wanted.operation)) if is_put_together else None
        beyond = Continuation(event.data for event in flight.log) if flight.log else None
        usage: Usage | None = None

        def take(events: list[Event]) -> None:
            nonlocal usage
            for event in events:
                data = event.data if beyond is None else beyond.next(event.data)
                if data is not None:
                    flight.append(data, event.name, event.usage is not None)
                if event.usage is not None:
                    usage = event.usage
            flight.tell()
            if assembly is not None:
                put_together(assembly, events)

        await wanted.variant.engine.stream(call, take)
        return (None if assembly is None else assembly.document()), usage

    def _charge(self, flight: Flight[Landed], usage: Usage | None) -> None:
        if usage is not None:
            total = usage.prompt_tokens + usage.completion_tokens
            flight.cost = lambda: total

    def _entry(self, wanted: Wanted, parts: tuple[bytes, bytes], usage: Usage | None, made_at: float) -> Entry:
        prompt, completion = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        return Entry(*parts, prompt, completion, made_at, made_at + self._ttl(wanted))


def put_together(assembly: Assembly, events: list[Event]) -> None:
    """Raises: EngineError."""
    try:
        for event in events:
            if event.text is not None:
                assembly.add_text(event.text)
            else:
                assembly.add(event.data if event.document is None else event.document)
    except ValueError as exc:
        raise EngineError("The engine's stream has an unknown form.") from exc


def is_chat(operation: str) -> bool:
    return operation == "chat.completions"


def split_id(document: dict[str, Any]) -> tuple[bytes, bytes]:
    """What stands before the part of the id that differs (`chatcmpl-`), and the document after its id."""
    kind, dash, _ = str(document.get("id", "")).partition("-")
    rest = {name: value for name, value in document.items() if name != "id"}
    return (kind + dash).encode(), b"," + orjson.dumps(rest)[1:]


def cut_id(body: bytes) -> tuple[bytes, bytes] | None:
    """The same of a document that begins with its id, as engines write it, without writing it anew."""
    found = WRITTEN_ID.match(body)
    return None if found is None else (found[1], body[found.end() :])


def whole_body(entry: Entry) -> bytes:
    """The answer with an id of its own."""
    return b'{"id":"%b%b"%b' % (entry.id_prefix, new_id(), entry.rest)


def new_id() -> bytes:
    """Unlike all others, and not hard to guess: a read from the system's source of randomness takes its time."""
    return b"%032x" % random.getrandbits(128)


@lru_cache(OWNERS)
def _owner(tenant: str, subject: str) -> bytes:
    return blake2b(orjson.dumps([tenant, subject]), digest_size=16).digest()


def owner_of(question: Question) -> bytes:
    return _owner(question.tenant, question.subject)


def replay_ref(entry: Entry) -> bytes:
    """What ids of a stored answer's events begin with."""
    return b"h%x" % int(entry.made_at * 1000)


def is_usage_chunk(payload: bytes) -> bool:
    return b'"choices":[]' in payload


def replayed(entry: Entry, operation: str) -> list[LogEvent]:
    """The events of a stored answer, with an id of their own."""
    payloads = replay(orjson.loads(whole_body(entry)), is_chat(operation))
    ref = replay_ref(entry)
    return [
        LogEvent(b"%b.%d" % (ref, number), payload, tells_usage=is_usage_chunk(payload))
        for number, payload in enumerate(payloads)
    ]


class Renamer:
    """Gives the events of another request's stream an id of this one's."""

    def __init__(self) -> None:
        self._old: bytes | None = None
        self._new = b""

    def rename(self, data: bytes) -> bytes:
        if self._old is None:
            id = orjson.loads(data).get("id")
            if not isinstance(id, str):
                return data
            self._old = ID % id.encode()
            self._new = ID % (id.partition("-")[0].encode() + b"-" + new_id())
        return data.replace(self._old, self._new, 1)


def usage_in(data: bytes) -> Usage | None:
    document = orjson.loads(data).get("usage")
    if not document:
        return None
    details = document.get("prompt_tokens_details") or {}
    return Usage(document["prompt_tokens"], document.get("completion_tokens") or 0, details.get("cached_tokens"))
