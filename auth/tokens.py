"""Verifies JSON Web Tokens with PyJWT (RFC 7519, RFC 8725)."""

import binascii
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import jwt
import orjson
from jwt.types import Options

from .errors import ExpiredToken, InvalidToken, KeysUnavailable
from .keys import Keys, VerificationKey
from .principal import ClaimsReader, Principal


class TokenVerifier:
    """`issuer` None and an empty `audience` take any; what is checked must be in the token, and so must `exp`."""

    def __init__(
        self,
        keys: Keys,
        algorithms: Iterable[str],
        reader: ClaimsReader,
        issuer: str | None,
        audience: Sequence[str],
        leeway_s: float,
    ) -> None:
        self.keys = keys
        self._algorithms = frozenset(algorithms)
        self._reader = reader
        self._issuer = issuer
        self._audience = list(audience) or None
        self._leeway_s = leeway_s
        self._options: Options = {
            "require": ["exp", *(["iss"] if issuer else []), *(["aud"] if audience else [])],
            "verify_iss": issuer is not None,
            "verify_aud": bool(audience),
        }

    async def verify(self, token: bytes) -> tuple[Principal, float]:
        """Return the caller, and when the token expires (seconds of the epoch).

        Raises: ExpiredToken, InvalidToken, KeysUnavailable.
        """
        if token.count(b".") != 2:
            raise InvalidToken("not three segments")
        kid, algorithm = read_header(token.partition(b".")[0])
        if algorithm not in self._algorithms:
            raise InvalidToken("its algorithm is not allowed")
        key = self.keys.find(kid, algorithm) or await self.keys.seek(kid, algorithm)
        if key is None:
            if not self.keys.is_ready:
                raise KeysUnavailable(retry_after_s=1.0)
            raise InvalidToken("no key for its kid and algorithm")
        claims = self._decode(token, key)
        expires = claims["exp"]
        if not isinstance(expires, int | float):
            raise InvalidToken("exp is not a number")
        return self._reader.principal(claims), expires

    def _decode(self, token: bytes, key: VerificationKey) -> dict[str, Any]:
        try:
            return jwt.decode(
                token,
                key.material,
                algorithms=list(key.algorithms),
                options=self._options,
                audience=self._audience,
                issuer=self._issuer,
                leeway=self._leeway_s,
            )
        except jwt.ExpiredSignatureError:
            raise ExpiredToken from None
        except jwt.PyJWTError as exc:
            # Its text may quote the token.
            raise InvalidToken(type(exc).__name__) from None


@lru_cache(maxsize=64)
def read_header(segment: bytes) -> tuple[str | None, str]:
    """The key id and the algorithm that a token claims, to choose a key by. All tokens that a provider signs with one
    key have the same header. Raises: InvalidToken."""
    try:
        header = orjson.loads(binascii.a2b_base64(segment.translate(_URL_SAFE) + b"=" * (-len(segment) % 4)))
        kid, algorithm = header.get("kid"), header["alg"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidToken("its header is not one") from None
    if not isinstance(algorithm, str) or not (kid is None or isinstance(kid, str)):
        raise InvalidToken("its header has a wrong type")
    return kid, algorithm


_URL_SAFE = bytes.maketrans(b"-_", b"+/")
