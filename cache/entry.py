"""A stored answer, the key that it is stored under, and which keys a clearing takes away."""

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

# A key is the tag of the tenant, the tag of the model, and a digest of all that can change the answer. The tags let
# each tier find what belongs to a tenant or a model without a list of it.
TAG_BYTES = 8
DIGEST_BYTES = 32
KEY_BYTES = 2 * TAG_BYTES + DIGEST_BYTES

FORMAT = 1  # of an entry, as stored outside this process
_HEAD = struct.Struct(">BddIIB")


class Corrupt(Exception):
    """These bytes are not an entry."""


class Entry(NamedTuple):
    """A whole answer: `{"id":"`, then `id_prefix` and an id of each response's own, then `rest`.

    Times are in seconds since the epoch; `made_at` is when its computing began.
    """

    id_prefix: bytes
    rest: bytes
    prompt_tokens: int
    completion_tokens: int
    made_at: float
    expires_at: float

    def encode(self) -> bytes:
        numbers = (self.made_at, self.expires_at, self.prompt_tokens, self.completion_tokens)
        return _HEAD.pack(FORMAT, *numbers, len(self.id_prefix)) + self.id_prefix + self.rest


def decode(data: bytes) -> Entry:
    """Raises: Corrupt."""
    try:
        version, made_at, expires_at, prompt_tokens, completion_tokens, length = _HEAD.unpack_from(data)
    except struct.error:
        raise Corrupt from None
    start = _HEAD.size + length
    if version != FORMAT or len(data) <= start:
        raise Corrupt
    prefix, rest = bytes(data[_HEAD.size : start]), bytes(data[start:])
    return Entry(prefix, rest, prompt_tokens, completion_tokens, made_at, expires_at)


def tag(name: str) -> bytes:
    """What keys of a tenant or of a model have in common."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=TAG_BYTES).digest()


def tags_of(key: bytes) -> bytes:
    """The part that all keys of the same tenant and model have."""
    return key[: 2 * TAG_BYTES]


@dataclass(frozen=True, slots=True)
class Selection:
    """Keys that a clearing takes: all that have what is given here; without anything, every key."""

    tenant: bytes | None = None
    model: bytes | None = None
    key: bytes | None = None

    def __contains__(self, key: bytes) -> bool:
        return (
            (self.key is None or self.key == key)
            and (self.tenant is None or key.startswith(self.tenant))
            and (self.model is None or key[TAG_BYTES : 2 * TAG_BYTES] == self.model)
        )
