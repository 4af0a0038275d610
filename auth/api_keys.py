"""Keys that are no JWTs: long random strings, of which only the SHA-256 is known here."""

import hmac
import secrets
from collections.abc import Mapping

from .principal import Principal

PREFIX = "hr-"
BUCKET_BYTES = 8


class ApiKeys:
    """Principals by the SHA-256 of their key.

    The look-up goes by the first bytes of the digest, and the rest is compared in constant time. A caller cannot choose
    the digest of a string, so what the look-up's time tells leads to no key.
    """

    def __init__(self, principals: Mapping[bytes, Principal]) -> None:
        self._buckets: dict[bytes, list[tuple[bytes, Principal]]] = {}
        for digest, principal in principals.items():
            self._buckets.setdefault(digest[:BUCKET_BYTES], []).append((digest, principal))

    def find(self, digest: bytes) -> Principal | None:
        found = None
        for known, principal in self._buckets.get(digest[:BUCKET_BYTES], ()):
            if hmac.compare_digest(known, digest):
                found = principal
        return found


def new_key() -> str:
    """A key with 256 bits of randomness."""
    return PREFIX + secrets.token_urlsafe(32)
