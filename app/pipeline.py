"""The walk of a request, in the order of its steps; it knows nothing of HTTP but two headers' meaning."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from auth.authenticator import Authenticator, Everyone
from auth.limits import Admission, Limiter
from auth.principal import Principal
from cache.flight import LogEvent, seated
from cache.key import Question
from cache.store import Hit
from routing.engine import Usage
from routing.models import Model, Models
from routing.split import Variant, sticky_key

from .answers import Answers, Landed, Place, Renamer, Wanted, replayed, usage_in
from .bodies import parse
from .cache_headers import SILENT, CacheControl
from .errors import InvalidRequest
from .exchange import TRACEPARENT, Asked, Exchange, Known
from .logs import Access
from .metrics.counts import Counts, Seconds
from .operations import Operation

MAX_KNOWN = 10_000
CHOOSE = "routing:choose"
MAX_TRACESTATE_BYTES = 512

Headers = Mapping[bytes, bytes]


class Caller(NamedTuple):
    """Somebody who may make one request now, and what that took of their limits."""

    principal: Principal
    admission: Admission


class Reader(Protocol):
    """Who reads a stream for a caller."""

    async def read(self, seat: Place, for_caller: Callable[[list[LogEvent]], list[LogEvent]]) -> None:
        """Return at the end of the flight. What goes to the caller is what `for_caller` makes of the flight's events.
        Raises what ended the flight."""
        ...


class Pipeline:
    def __init__(
        self,
        authenticator: Authenticator | Everyone,
        limiter: Limiter,
        models: Models,
        answers: Answers,
        max_choices: int,
        counts: Counts,
    ) -> None:
        self._authenticator = authenticator
        self._limiter = limiter
        self._models = models
        self._answers = answers
        self._max_choices = max_choices
        self._counts = counts
        # A request that is the same to the byte is not read again.
        self._known: dict[Asked, Known] = {}
        self._known_of = models.generation

    async def admit(self, operation: Operation, exchange: Exchange, hit: Hit | None = None) -> Caller:
        """Let the caller in for one request, which is counted until its admission is settled; one that was answered by
        a hit is over already.

        Raises: Unauthenticated, KeysUnavailable, InsufficientScope, LimitExceeded.
        """
        principal, access = exchange.principal, exchange.access
        if principal is None:
            principal = await self._authenticator.authenticate(exchange.headers.get(b"authorization"))
            access.did("auth")
        access.tenant, access.subject = principal.tenant, principal.subject
        principal.check_scope(operation.scope)
        admission = exchange.admission = await self._limiter.admit(principal, is_over=hit is not None)
        access.did("limit")
        return Caller(principal, admission)

    def find_at_once(self, operation: Operation, exchange: Exchange, body: bytes) -> Hit | None:
        """The walk as far as a stored answer, which the caller is charged for; None: something would have to be waited
        for, or be refused. Then nothing is charged, and the exchange has what is known. Raises: as `prepare`."""
        access = exchange.access
        principal = exchange.principal = self._authenticator.recall(exchange.headers.get(b"authorization"))
        if principal is None or operation.scope not in principal.scopes:
            return None
        access.did("auth")
        generation = self._models.generation
        asked = exchange.asked = (
            generation,
            operation.name,
            principal.tenant,
            principal.subject,
            principal.models,
            exchange.headers.get(b"x-session-id"),
            digest(body),
        )
        if self._known_of != generation:
            self._known_of = generation
            self._known.clear()
        known = exchange.known = self._known.get(asked)
        hit = None
        if known is not None:
            access.model, access.variant = known.model, known.variant
            access.did("key")
            hit = self._answers.at_hand(known.key)
            access.did("lookup")
        if hit is None and (known is None or not self._answers.has_lower):
            wanted = self.understand(operation, exchange, body, principal, SILENT)
            if wanted.stream or wanted.obstacle is not None:
                return None
            hit = self._answers.at_hand(self._answers.key(wanted), wanted)
            access.did("lookup")
        exchange.hit = hit
        if hit is None or self._limiter.is_shared or exchange.takes_a_thread(hit.entry.rest):
            return None
        exchange.admission = self._limiter.admit_at_once(principal, is_over=True)
        if exchange.admission is None:
            return None
        access.did("limit")
        access.tenant, access.subject = principal.tenant, principal.subject
        self.use(exchange, hit)
        return hit

    def fly_at_once(self, exchange: Exchange) -> tuple[Caller, Place] | None:
        """The walk on from there, for a whole answer that is to be waited for, in a place to be left. None: before that
        something else would have to be waited for, or be refused."""
        wanted, principal = exchange.wanted, exchange.principal
        if wanted is None or principal is None or wanted.stream or exchange.hit is not None or self._limiter.is_shared:
            return None
        if not self._answers.may_fly_at_once(wanted):
            return None
        admission = exchange.admission = self._limiter.admit_at_once(principal, is_over=False)
        if admission is None:
            return None
        access = exchange.access
        access.did("limit")
        access.tenant, access.subject = principal.tenant, principal.subject
        return Caller(principal, admission), self._answers.fly(wanted)

    def land_at_once(self, wanted: Wanted, caller: Caller, place: Place) -> None:
        """Account for what that came to, once it is over and went well."""
        landed = place.flight.result
        assert landed is not None
        wanted.access.waited(wanted.tally, place.leads)
        wanted.access.usage = landed.usage
        caller.admission.settle_at_once(self._bill(wanted, place))
        place.leave()

    async def look_up(self, exchange: Exchange) -> Hit | None:
        """A stored answer, before the caller is let in, to a request that `find_at_once` has seen."""
        known, wanted = exchange.known, exchange.wanted
        if exchange.hit is not None:
            return exchange.hit
        if wanted is not None:
            return None if wanted.is_looked_up else await self._answers.look_up(wanted)
        if known is None:
            return None
        hit = await self._answers.look_for(known.key)
        exchange.access.did("lookup")
        return hit

    def use(self, exchange: Exchange, hit: Hit) -> None:
        """Take what was looked up for the answer, and remember the request."""
        asked, wanted = exchange.asked, exchange.wanted
        if exchange.known is None and asked is not None and wanted is not None and is_memorable(wanted):
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[asked] = Known(self._answers.key(wanted), wanted.model.name, wanted.access.variant)
        self._answers.note_hit(exchange.access, hit)

    def understand(
        self,
        operation: Operation,
        exchange: Exchange,
        body: bytes,
        principal: Principal,
        control: CacheControl,
    ) -> Wanted:
        """Raises: as `prepare`."""
        if exchange.wanted is None:
            wanted = self.prepare(operation, parse(body), principal, control, exchange.headers, exchange.access)
            exchange.access.did("route")
            wanted.size_bytes = len(body)
            known, asked = exchange.known, exchange.asked
            if known is not None and asked is not None and asked[0] == self._models.generation:
                wanted.key, wanted.is_looked_up = known.key, True
            exchange.wanted = wanted
        return exchange.wanted

    def prepare(
        self,
        operation: Operation,
        document: Any,
        principal: Principal,
        control: CacheControl,
        headers: Headers,
        access: Access,
    ) -> Wanted:
        """Understand the request, without waiting for anything.

        Raises: InvalidRequest, ModelNotAllowed, ModelNotFound, VariantNotFound, InsufficientScope.
        """
        if not isinstance(document, dict):
            raise InvalidRequest("The body must be a JSON object.")
        # As in OpenAI's API, a null stands for a field left out.
        body = {key: value for key, value in document.items() if value is not None}
        name = body.get("model")
        if not isinstance(name, str):
            raise InvalidRequest("`model` must be given, as a string.", "model")
        stream = body.pop("stream", False)
        if not isinstance(stream, bool):
            raise InvalidRequest("`stream` must be true or false.", "stream")
        self._check_choices(operation, body)
        principal.check_model(name, exists=name in self._models)
        model = self._models.find(name)
        access.model, access.stream = model.name, stream
        variant = self._choose_variant(model, principal, headers, access.request_id)
        if model.has_variants:
            access.variant = variant.name
        options = body.pop("stream_options", {})
        if not isinstance(options, dict):
            raise InvalidRequest("`stream_options` must be an object.", "stream_options")
        question = Question(
            operation.name, body, model.name, variant.revision, principal.tenant, principal.subject, control.asks
        )
        obstacle = self._answers.obstacle(question, control, options)
        # The gateway counts tokens; a caller who did not ask for the usage event does not see it.
        tells_usage = bool(options.get("include_usage"))
        return Wanted(
            operation.name,
            model,
            variant,
            body,
            stream,
            tells_usage,
            question,
            obstacle,
            control,
            headers.get(b"last-event-id"),
            access,
            principal.priority,
            b"" if variant.hash_by is None else affinity_of(variant.hash_by, principal, headers),
            trace_of(headers) if b"traceparent" in headers else (),
        )

    def _choose_variant(self, model: Model, principal: Principal, headers: Headers, request_id: str) -> Variant:
        """Raises: InsufficientScope, VariantNotFound."""
        asked = headers.get(b"x-headrace-variant")
        if asked is not None:
            principal.check_scope(CHOOSE)
            return model.split.named(asked.decode("latin-1"))
        if not model.has_variants:
            return model.split.choose(b"")
        session = headers.get(b"x-session-id")
        return model.split.choose(
            lambda: sticky_key(
                model.sticky_by,
                model.name,
                principal.tenant,
                principal.subject,
                None if session is None else session.decode("latin-1"),
                request_id,
            )
        )

    def _check_choices(self, operation: Operation, body: dict[str, Any]) -> None:
        """Raise InvalidRequest unless input and `n` are there and within bounds: an engine would work on `n: 16384` for
        minutes."""
        inputs = body.get(operation.input)
        if inputs is None or inputs == []:
            raise InvalidRequest(f"`{operation.input}` must be given, and not be empty.", operation.input)
        n = body.get("n", 1)
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidRequest("`n` must be a whole number from 1.", "n")
        is_several = operation.is_batch and isinstance(inputs, list) and not isinstance(inputs[0], int)
        choices = n * len(inputs) if is_several else n
        if choices > self._max_choices:
            raise InvalidRequest(f"The request asks for {choices} answers; {self._max_choices} are allowed.", "n")

    async def find(self, wanted: Wanted) -> Hit | Place:
        """A stored answer, or a place in a flight, which has to be left. Raises: NotInCache, StreamGone."""
        return await self._answers.find(wanted)

    async def explain(self, wanted: Wanted) -> dict[str, Any]:
        """What the request would do, without doing it."""
        return await self._answers.explain(wanted)

    async def wait(self, wanted: Wanted, place: Place) -> Landed:
        """What the flight came to, for nobody's account. Raises: RoutingError, CacheError."""
        with seated(place):
            landed = await place.result()
            assert landed is not None
            return landed

    async def answer(self, wanted: Wanted, caller: Caller, place: Place) -> Landed:
        """What the flight came to. Raises: RoutingError, CacheError."""
        try:
            landed = await place.result()
            assert landed is not None
            wanted.access.usage = landed.usage
            return landed
        finally:
            wanted.access.waited(wanted.tally, place.leads)
            try:
                await self._settle(wanted, caller, place)
            finally:
                place.leave()

    async def replay(self, wanted: Wanted, caller: Caller, hit: Hit) -> list[LogEvent]:
        """All events of a stored answer."""
        events = replayed(hit.entry, wanted.operation)
        wanted.access.first_token = time.perf_counter()
        events = self._for_caller(wanted, None, after(events, wanted.last_event_id))
        await caller.admission.settle()
        return events

    async def stream(self, wanted: Wanted, caller: Caller, place: Place, reader: Reader) -> None:
        """Let the reader have the events as they come. Raises: RoutingError, CacheError."""
        between_tokens = self._counts.of(wanted.access).between_tokens
        for_caller = partial(self._next, wanted, place.leads, between_tokens, None if place.leads else Renamer())
        with seated(place):
            try:
                await reader.read(place, for_caller)
            finally:
                if wanted.access.first_token is None:
                    wanted.access.waited(wanted.tally, place.leads)
                await self._settle(wanted, caller, place)

    def _next(
        self, wanted: Wanted, leads: bool, between_tokens: Seconds, renamer: Renamer | None, events: list[LogEvent]
    ) -> list[LogEvent]:
        """Note the time of what comes up, and make of it what goes to the caller."""
        access, now = wanted.access, time.perf_counter()
        if access.first_token is None:
            access.first_token = now
            access.waited(wanted.tally, leads)
        else:
            between_tokens.observe(now - access.last_token)
        access.last_token = now
        if renamer is None and len(events) == 1 and not events[0].tells_usage:
            return events
        return self._for_caller(wanted, renamer, events)

    def _for_caller(self, wanted: Wanted, renamer: Renamer | None, events: list[LogEvent]) -> list[LogEvent]:
        """Note what the log says of the usage, and leave out what the caller did not ask for."""
        access = wanted.access
        if events[0].tells_usage if len(events) == 1 else any(event.tells_usage for event in events):
            access.usage = next(usage_in(event.data) for event in events if event.tells_usage)
            if not wanted.tells_usage:
                events = [event for event in events if not event.tells_usage]
        if renamer is None:
            return events
        return [event._replace(data=renamer.rename(event.data)) for event in events]

    async def _settle(self, wanted: Wanted, caller: Caller, place: Place) -> None:
        """Charge the caller, before the last byte leaves: who has read it may call again at once."""
        await caller.admission.settle(self._bill(wanted, place))

    def _bill(self, wanted: Wanted, place: Place) -> int:
        """What an engine did is charged once: to the one who waits longest, and when that one leaves, the rest to the
        next."""
        due = place.flight.bill() if place.pays else 0
        tally, access = wanted.tally, wanted.access
        access.replica, access.retries, access.fallback = tally.replica, tally.retries, tally.fallback
        if access.usage is None and tally.prompt_tokens + tally.completion_tokens:
            access.usage = Usage(tally.prompt_tokens, tally.completion_tokens)
        return due


def is_memorable(wanted: Wanted) -> bool:
    """Whether the same bytes mean the same: not where each request is dealt a variant anew."""
    return not wanted.stream and not (wanted.model.has_variants and wanted.model.sticky_by == "request")


def affinity_of(hash_by: str, principal: Principal, headers: Headers) -> bytes:
    """What keeps this caller's calls together on a replica; empty: nothing does."""
    tenant = principal.tenant.encode(errors="surrogatepass")
    if hash_by == "tenant":
        return tenant
    if hash_by != "session":
        return headers.get(hash_by.lower().encode(), b"")
    session = headers.get(b"x-session-id")
    if session is None:
        session = principal.subject.encode(errors="surrogatepass")
    return b"%d:%b%b" % (len(tenant), tenant, session)


def trace_of(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    """The caller's W3C trace context, to be sent on; empty if it is none."""
    parent, state = headers[b"traceparent"], headers.get(b"tracestate", b"")
    if not TRACEPARENT.fullmatch(parent):
        return ()
    if not state or len(state) > MAX_TRACESTATE_BYTES:
        return ((b"traceparent", parent),)
    return (b"traceparent", parent), (b"tracestate", state)


def digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()


def after(events: list[LogEvent], event_id: bytes | None) -> list[LogEvent]:
    """The events after this one."""
    if event_id is None:
        return events
    place = next((place for place, event in enumerate(events) if event.id == event_id), -1)
    return events[place + 1 :]
