"""From the `Authorization` header to the caller."""

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from .api_keys import ApiKeys
from .errors import AuthError, ExpiredToken, InvalidToken, MissingToken
from .principal import Principal
from .tokens import TokenVerifier

MAX_TOKEN_BYTES = 16384
MAX_REMEMBERED = 10_000  # verified tokens; about 1.5 KB each


class Remembered(NamedTuple):
    principal: Principal
    expires: float
    generation: int


class Authenticator:
    """Takes JWTs and API keys. A verified token is remembered by its digest, until it expires, a key is withdrawn, or
    others push it out; refused ones are not, so that strangers cost no memory. `results` counts how it went, by a
    closed list of words."""

    def __init__(
        self,
        verifier: TokenVerifier | None,
        api_keys: ApiKeys,
        max_remembered: int = MAX_REMEMBERED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._verifier = verifier
        self._api_keys = api_keys
        self._max_remembered = max_remembered
        self._clock = clock
        self._remembered: OrderedDict[bytes, Remembered] = OrderedDict()
        self.results: Counter[str] = Counter()

    async def authenticate(self, header: bytes | None) -> Principal:
        """The caller behind an `Authorization` header. Raises: Unauthenticated, KeysUnavailable."""
        try:
            token = bearer_token(header)
            digest = hashlib.sha256(token).digest()
            principal = self._known(digest) or await self._verify(token, digest)
        except AuthError as exc:
            self.results[_WORDS.get(type(exc), "unavailable")] += 1
            raise
        self.results["ok"] += 1
        return principal

    def recall(self, header: bytes | None) -> Principal | None:
        """The same for a token that is known already; None for every other."""
        try:
            digest = hashlib.sha256(bearer_token(header)).digest()
        except AuthError:
            return None
        principal = self._known(digest)
        if principal is not None:
            self.results["ok"] += 1
        return principal

    async def _verify(self, token: bytes, digest: bytes) -> Principal:
        if self._verifier is None:
            raise InvalidToken("no such API key, and no JWTs are taken")
        principal, expires = await self._verifier.verify(token)
        self._remembered[digest] = Remembered(principal, expires, self._verifier.keys.generation)
        if len(self._remembered) > self._max_remembered:
            self._remembered.popitem(last=False)
        return principal

    def _known(self, digest: bytes) -> Principal | None:
        return self._remembered_principal(digest) or self._api_keys.find(digest)

    def _remembered_principal(self, digest: bytes) -> Principal | None:
        known = self._remembered.get(digest)
        if known is None or self._verifier is None:
            return None
        if self._clock() >= known.expires or known.generation != self._verifier.keys.generation:
            return None
        self._remembered.move_to_end(digest)
        return known.principal

    @property
    def remembered(self) -> int:
        return len(self._remembered)


def bearer_token(header: bytes | None) -> bytes:
    """RFC 6750, section 2.1. Raises: MissingToken, InvalidToken."""
    scheme, _, token = (header or b"").partition(b" ")
    token = token.strip()
    if scheme.lower() != b"bearer" or not token:
        raise MissingToken
    if len(token) > MAX_TOKEN_BYTES:
        raise InvalidToken("it is too long")
    return token


class Everyone:
    """Lets everyone in as one and the same caller: authentication is off."""

    def __init__(self, principal: Principal) -> None:
        self._principal = principal
        self.results: Counter[str] = Counter()

    async def authenticate(self, header: bytes | None) -> Principal:
        return self.recall(header)

    def recall(self, header: bytes | None) -> Principal:
        self.results["ok"] += 1
        return self._principal


_WORDS = {MissingToken: "missing_token", InvalidToken: "invalid_token", ExpiredToken: "expired_token"}
