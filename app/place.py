"""A worker's place among the workers of a gateway, and the word of the process that started it."""

import asyncio
import contextlib
import logging
import shutil
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from .server import Server  # not for the parent process, which needs none

logger = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many a worker is, counted from 0. `control` is the descriptor of a socket to the parent process,
    `listeners` are those of the sockets that each worker listens on, one an address, and `folder` is what they share.
    It travels as an option of the command line."""

    number: int
    workers: int
    control: int
    listeners: tuple[tuple[int, ...], ...]
    folder: str

    def dump(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def load(cls, text: str) -> "Place":
        document = orjson.loads(text)
        return cls(**document | {"listeners": tuple(map(tuple, document["listeners"]))})

    def about(self) -> dict[str, int]:
        """For who asks which process it was that answered."""
        return {"worker": self.number, "workers": self.workers}

    def metrics_socket(self, number: int) -> Path:
        return Path(self.folder) / f"{number}.sock"

    def metrics_file(self, number: int) -> Path:
        return Path(self.folder) / f"{number}.json"


class Orders:
    """Says when the server has started, and does what the parent says, a line each: `stop`, `hurry`, `cover N` and
    `uncover N` (listen for another worker, which is down). When the parent is gone, so is the server."""

    def __init__(self, place: Place, server: "Server") -> None:
        self._place = place
        self._server = server
        self._socket = socket.socket(fileno=place.control)

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._socket)
        try:
            await self._server.has_started.wait()
            with contextlib.suppress(ConnectionError):
                writer.write(b"up\n")
                while line := await reader.readline():
                    await self._obey(line.decode().split())
            logger.error("the parent process is gone; ending, too")
            await asyncio.to_thread(shutil.rmtree, self._place.folder, ignore_errors=True)
            self._server.leave()
        finally:
            writer.close()

    async def _obey(self, words: list[str]) -> None:
        match words:
            case ["stop"]:
                self._server.begin_drain("told by the parent process")
            case ["hurry"]:
                self._server.hurry()
            case ["cover", number]:
                await self._server.cover(self._place.listeners[int(number)])
            case ["uncover", number]:
                self._server.uncover(self._place.listeners[int(number)])
