"""Keys and entries for tests of the cache."""

import hashlib
import time

from cache.entry import Entry, tag


def key_of(number: int | str, tenant: str = "acme", model: str = "demo") -> bytes:
    return tag(tenant) + tag(model) + hashlib.sha256(str(number).encode()).digest()


def entry_of(text: bytes = b"x", ttl_s: float = 60.0, made_at: float | None = None) -> Entry:
    made_at = time.time() if made_at is None else made_at
    return Entry(b"chatcmpl-", b',"text":"%b"}' % text, 3, 5, made_at, made_at + ttl_s)
