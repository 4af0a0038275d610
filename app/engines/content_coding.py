"""Bodies in the content codings of RFC 9110, section 8.4.1: gzip, and deflate, which is zlib's format."""

import zlib

from routing.errors import EngineError

GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class Decoder:
    """Of one body."""

    __slots__ = ("_has_begun", "_zlib")

    def __init__(self, coding: bytes) -> None:
        """Raises: EngineError."""
        if coding.strip().lower() not in (b"gzip", b"x-gzip", b"deflate"):
            raise EngineError("The engine's answer has an unknown content coding.")
        self._zlib = zlib.decompressobj(GZIP_OR_ZLIB)
        self._has_begun = False

    @property
    def is_whole(self) -> bool:
        """Whether the body may end here; one without a byte may, too."""
        return self._zlib.eof or not self._has_begun

    def decode(self, data: bytes, most_bytes: int) -> bytes:
        """The data as it was, `most_bytes` of it at most: who gets so many has to stop there. Raises: EngineError."""
        self._has_begun = True
        parts = []
        try:
            while data and most_bytes > 0:
                if self._zlib.eof:  # of a gzip's member; another one may follow (RFC 1952, section 2.2)
                    self._zlib = zlib.decompressobj(GZIP_OR_ZLIB)
                parts.append(self._zlib.decompress(data, most_bytes))
                most_bytes -= len(parts[-1])
                data = self._zlib.unused_data
        except zlib.error as exc:
            raise EngineError("The engine's answer is not compressed as it says.") from exc
        return parts[0] if len(parts) == 1 else b"".join(parts)
