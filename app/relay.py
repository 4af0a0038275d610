"""How what a flight came to travels between replicas."""

from typing import Any

import orjson

from cache.commons import Codec
from cache.entry import decode
from routing.engine import Usage

from .answers import Landed
from .errors import Failure, Relayed, describe


def pack(landed: Landed) -> bytes:
    usage = None if landed.usage is None else landed.usage._asdict()
    entry = b"" if landed.entry is None else landed.entry.encode()
    return orjson.dumps({"usage": usage, "is_stored": landed.is_stored}) + b"\n" + entry


def unpack(packed: bytes) -> Landed:
    head, _, entry = packed.partition(b"\n")
    told: dict[str, Any] = orjson.loads(head)
    usage = None if told["usage"] is None else Usage(**told["usage"])
    return Landed(usage, decode(entry) if entry else None, is_stored=told["is_stored"])


def pack_error(exc: Exception) -> bytes:
    return orjson.dumps(describe(exc))


def unpack_error(packed: bytes) -> Exception:
    return Relayed(Failure(**orjson.loads(packed)))


CODEC = Codec(pack, unpack, pack_error, unpack_error)
