"""One answer of a server, between the connection that it comes by and who reads it."""

import asyncio
from collections.abc import Callable

from routing.errors import EngineError

from .content_coding import Decoder

MAX_ANSWER_BYTES = 64 * 1024 * 1024


class Response:
    """An answer as it comes. `headers` are those of KEPT, by their names in lower case."""

    __slots__ = (
        "_decoder",
        "_failure",
        "_is_enough",
        "_parts",
        "_read",
        "_size_bytes",
        "_waiter",
        "error",
        "headers",
        "is_over",
        "keep_alive",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.keep_alive = False
        self.is_over = False
        self.error: Exception | None = None
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._decoder: Decoder | None = None
        self._waiter: asyncio.Future[None] | None = None
        # Of a reader who is fed.
        self._read: Callable[[bytes], bool] | None = None
        self._is_enough = False
        self._failure: Exception | None = None

    # For the connection

    def decode(self) -> None:
        """Prepare for the body's coding (RFC 9110, section 8.4). Raises: EngineError."""
        coding = self.headers.get(b"content-encoding", b"identity").strip().lower()
        if coding not in (b"identity", b""):
            self._decoder = Decoder(coding)

    def add(self, data: bytes) -> None:
        """Raises: EngineError."""
        if self._decoder is not None:
            data = self._decoder.decode(data, MAX_ANSWER_BYTES - self._size_bytes + 1)
            if not data:
                return
        self._size_bytes += len(data)
        if self._size_bytes > MAX_ANSWER_BYTES:
            raise EngineError("The engine's answer is too large.")
        self._parts.append(data)

    def end(self, error: Exception | None) -> None:
        if error is None and self._decoder is not None and not self._decoder.is_whole:
            error = EngineError("The engine's answer ended early.")
        self.error = error
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def deliver(self) -> None:
        """Tell the reader what has come."""
        if self._read is None:
            self.wake()
        elif self._parts and not self._is_enough:
            parts = self._parts
            try:
                self._is_enough = not self._read(parts.pop() if len(parts) == 1 else self.take())
            except Exception as exc:  # which is for the one who waits
                self._failure = exc
                self._is_enough = True
            if self._is_enough:
                self.wake()

    # For the reader

    async def feed(self, read: Callable[[bytes], bool]) -> None:
        """Call `read` with the body, each part as it comes and not in a task, until it says that it has enough, or
        there is no more. Raises: EngineError, and what `read` does."""
        self._read = read
        self.deliver()
        while not (self._is_enough or self.is_over):
            await self.wait()
        error = self._failure if self._is_enough else self.error
        if error is not None:
            raise error

    def wait(self) -> "asyncio.Future[None]":
        """Done when there is more than there was."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        return waiter

    def take(self) -> bytes:
        """What has come of the body since the last call."""
        parts = self._parts
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return data
