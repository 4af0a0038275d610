"""The workers of a gateway, as they tell each other what they have counted, so that each can tell of all.

Each listens on a socket in the folder that they share, and answers with its counts. Before anybody is told of counts
they are written to a file, as they are every few seconds and at the end: whoever takes a worker's place goes on from
there, and no counter that was told goes back.
"""

import asyncio
import contextlib
import itertools
import logging
import os
from pathlib import Path
from threading import Lock

from .metrics import Metrics, of_workers, text_of
from .metrics.summed import Family, counted, decode, encode, together
from .place import Place

logger = logging.getLogger("headrace")

KEEP_S = 2.0
ANSWER_S = 1.0


class Peers:
    """Those of the worker at `place`. To be made before it counts anything."""

    def __init__(self, place: Place, metrics: Metrics) -> None:
        self._place = place
        self._metrics = metrics
        self._others = [number for number in range(place.workers) if number != place.number]
        self._past = read_counted(place.metrics_file(place.number))  # of those who had this place before
        self._numbers = itertools.count(1)
        # Mutable state: the number of the counts that were written last, changed by `_write` only, which threads run.
        self._writing = Lock()
        self._written = 0

    async def run(self) -> None:
        server = await asyncio.start_unix_server(self._answer, self._place.metrics_socket(self._place.number))
        try:
            while True:
                await self._keep()
                await asyncio.sleep(KEEP_S)
        finally:
            server.close()
            self._write(self._counts(), next(self._numbers))

    async def text(self) -> bytes:
        """What all workers have counted; of one that does not answer, what it wrote last."""
        answers = dict(zip(self._others, await asyncio.gather(*map(self._ask, self._others)), strict=True))
        answered = [await self._keep(), *(answer for answer in answers.values() if answer is not None)]
        written = [
            await asyncio.to_thread(read_counted, self._place.metrics_file(number))
            for number, answer in answers.items()
            if answer is None
        ]
        return text_of([*together([*answered, *written]), of_workers(self._place.workers, len(answered))])

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(encode(await self._keep()))
            await writer.drain()
        writer.close()

    async def _ask(self, number: int) -> list[Family] | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._place.metrics_socket(number))
                try:
                    return decode(await reader.read())
                finally:
                    writer.close()
        except (OSError, ValueError):  # it is down, late, or died while it answered
            return None

    async def _keep(self) -> list[Family]:
        """Write the counts, so that they are not lost with this process; return them."""
        counts = self._counts()
        await asyncio.to_thread(self._write, counts, next(self._numbers))
        return counts

    def _counts(self) -> list[Family]:
        return together([self._past, self._metrics.families()])

    def _write(self, counts: list[Family], number: int) -> None:
        file = self._place.metrics_file(self._place.number)
        draft = file.with_suffix(".new")
        with self._writing:
            if number < self._written:
                return
            self._written = number
            try:
                draft.write_bytes(encode(counted(counts)))
                os.replace(draft, file)
            except OSError as exc:
                logger.warning("what was counted cannot be kept for a restart: %s", exc.strerror or exc)


def read_counted(file: Path) -> list[Family]:
    """What a worker wrote of what it had counted."""
    try:
        return decode(file.read_bytes())
    except FileNotFoundError:
        return []
