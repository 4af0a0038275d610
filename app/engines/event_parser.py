"""Server-sent events as they come off a connection, in every form that the standard allows: WHATWG HTML, section 9.2.6,
"Interpreting an event stream"."""

from routing.errors import EngineError

MAX_EVENT_BYTES = 16 * 1024 * 1024
BOM = b"\xef\xbb\xbf"
TOO_LARGE = "The engine sent an event that is too large."


# Data and name.
ParsedEvent = tuple[bytes, str | None]


class EventParser:
    def __init__(self) -> None:
        # Mutable state: what has come of an event that is not whole, its lines ended by LF alone; and what has come of
        # it since, of one that is long, so that it is not copied with each part of it.
        self._rest = b""
        self._more: list[bytes] = []
        self._size_bytes = 0
        self._ends_with_cr = False
        self._is_begun = False

    def feed(self, data: bytes) -> list[ParsedEvent]:
        """The events that are whole now. Raises: EngineError, for one that never ends."""
        if data.startswith(b"data: ") and self._is_begun and not (self._rest or self._ends_with_cr):
            end = len(data) - 2
            if data.find(b"\n") == end and data.endswith(b"\n") and b"\r" not in data:
                return [(data[6:end], None)]  # as most parts are
        if not self._is_begun:
            data = self._without_bom(data)
        if b"\r" in data or self._ends_with_cr:
            data = self._with_lf(data)
        if self._rest:
            if not (b"\n\n" in data or (data.startswith(b"\n") and self._is_after_lf())):
                self._put_by(data)
                return []
            data = b"".join([self._rest, *self._more, data])
            self._more.clear()
            self._size_bytes = 0
        *blocks, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EngineError(TOO_LARGE)
        events: list[ParsedEvent] = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append((block[6:], None))
            elif (event := interpret(block)) is not None:
                events.append(event)
        return events

    def _is_after_lf(self) -> bool:
        return (self._more[-1] if self._more else self._rest).endswith(b"\n")

    def _put_by(self, data: bytes) -> None:
        """Raises: EngineError."""
        if data:
            self._more.append(data)
        self._size_bytes += len(data)
        if len(self._rest) + self._size_bytes > MAX_EVENT_BYTES:
            raise EngineError(TOO_LARGE)

    def _without_bom(self, data: bytes) -> bytes:
        data = self._rest + data
        self._rest = b""
        if len(data) < len(BOM) and BOM.startswith(data):
            self._rest = data
            return b""
        self._is_begun = True
        return data.removeprefix(BOM)

    def _with_lf(self, data: bytes) -> bytes:
        if self._ends_with_cr and data:
            data = data.removeprefix(b"\n")  # of a CRLF whose halves came apart
            self._ends_with_cr = False
        self._ends_with_cr = data.endswith(b"\r") or (self._ends_with_cr and not data)
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def interpret(block: bytes) -> ParsedEvent | None:
    """The lines between two blank ones; None: comments and fields that carry nothing."""
    lines: list[bytes] = []
    name = None
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace") or None
    return (b"\n".join(lines), name) if lines else None
