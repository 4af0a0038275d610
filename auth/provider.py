"""Fetches a provider's keys: from a JWKS address (RFC 7517), found by OpenID Connect discovery where only the issuer is
known. The only module that speaks HTTP to a provider."""

import hashlib
from collections.abc import Iterable
from typing import Any

import aiohttp
import jwt
import orjson

from .jwks import KeyFetchError
from .keys import PUBLIC, VerificationKey, algorithms_of

FETCH_TIMEOUT_S = 5.0
MAX_DOCUMENT_BYTES = 262_144
MAX_KEYS = 100
MAX_REDIRECTS = 3


class Provider:
    """One of `jwks_url` and `issuer` is needed."""

    def __init__(
        self, algorithms: Iterable[str], jwks_url: str | None, issuer: str | None, timeout_s: float = FETCH_TIMEOUT_S
    ) -> None:
        self._allowed = frozenset(algorithms) & PUBLIC
        self._jwks_url = jwks_url
        self._issuer = issuer
        self._timeout_s = timeout_s

    async def fetch(self) -> list[VerificationKey]:
        """The provider's keys of today. Raises: KeyFetchError."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
                url = self._jwks_url or await self._discover(session)
                document = await read_json(session, url)
        except (aiohttp.ClientError, OSError) as exc:  # TimeoutError is an OSError
            raise KeyFetchError(type(exc).__name__) from exc
        except ValueError as exc:
            raise KeyFetchError("the provider's answer is not JSON") from exc
        return parse_jwks(document, self._allowed)

    async def _discover(self, session: aiohttp.ClientSession) -> str:
        """OpenID Connect Discovery 1.0, section 4."""
        assert self._issuer is not None
        document = await read_json(session, self._issuer.rstrip("/") + "/.well-known/openid-configuration")
        if not isinstance(document, dict) or document.get("issuer") != self._issuer:
            raise KeyFetchError("the provider's discovery document names another issuer")
        url = document.get("jwks_uri")
        if not isinstance(url, str) or (self._issuer.startswith("https:") and not url.startswith("https:")):
            raise KeyFetchError("the provider's discovery document has no safe jwks_uri")
        return url


async def read_json(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url, max_redirects=MAX_REDIRECTS, headers={"accept": "application/json"}) as response:
        if response.status != 200:
            raise KeyFetchError(f"the provider answered {response.status}")
        if url.startswith("https:") and response.url.scheme != "https":
            raise KeyFetchError("the provider redirects to plain HTTP")
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > MAX_DOCUMENT_BYTES:
                raise KeyFetchError(f"the provider's answer is larger than {MAX_DOCUMENT_BYTES} bytes")
        return orjson.loads(data)


def parse_jwks(document: Any, allowed: frozenset[str]) -> list[VerificationKey]:
    """The keys of a set that can verify signatures of the allowed algorithms; others are passed over (RFC 7517,
    section 5). A set without any is taken for a fault of the provider's.

    Raises: KeyFetchError.
    """
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise KeyFetchError("the provider's answer is not a key set")
    if len(entries) > MAX_KEYS:
        raise KeyFetchError(f"the provider's set has more than {MAX_KEYS} keys")
    keys = [key for entry in entries if (key := parse_key(entry, allowed)) is not None]
    if not keys:
        raise KeyFetchError("the provider's set has no key for the allowed algorithms")
    return keys


def parse_key(entry: Any, allowed: frozenset[str]) -> VerificationKey | None:
    if not isinstance(entry, dict) or entry.get("kty") == "oct" or entry.get("use", "sig") != "sig":
        return None
    operations, kid = entry.get("key_ops", ["verify"]), entry.get("kid")
    if not isinstance(operations, list) or "verify" not in operations or not isinstance(kid, str | None):
        return None
    public = {name: value for name, value in entry.items() if name not in ("d", "p", "q", "dp", "dq", "qi", "alg")}
    try:
        material = jwt.PyJWK(public).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    algorithms = algorithms_of(material) & allowed
    if "alg" in entry:
        algorithms &= {entry["alg"]}
    if not algorithms:
        return None
    fingerprint = hashlib.sha256(orjson.dumps(public, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return VerificationKey(material, frozenset(algorithms), kid, fingerprint)
