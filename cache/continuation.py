"""Reading on in an answer that is computed anew, after an engine or a replica died in the middle of it."""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from .errors import Diverged

# Of a delta or a choice, these grow with each chunk; others are said once.
GROWING = frozenset({"content", "reasoning_content", "reasoning", "refusal", "text", "arguments", "input"})


class Continuation:
    """Of a stream that begins anew, what is beyond `payloads`, those of the same answer that were delivered before.

    Where chunks begin and end may differ between the two. What was delivered is known by how far each text has come.
    """

    def __init__(self, payloads: Iterable[bytes]) -> None:
        self._delivered: dict[tuple[Any, ...], Any] = {}
        self._again: dict[tuple[Any, ...], int] = {}
        self._head: dict[str, Any] = {}
        for payload in payloads:
            chunk = orjson.loads(payload)
            self._head = self._head or {name: chunk[name] for name in ("id", "created") if name in chunk}
            for choice in chunk.get("choices", ()):
                _note((choice.get("index"),), choice, self._delivered)

    def next(self, data: bytes) -> bytes | None:
        """What is new in this chunk of the new stream; None: nothing. Raises: Diverged."""
        if not self._head:
            return data
        chunk = orjson.loads(data)
        choices = []
        for choice in chunk.get("choices", ()):
            rest = self._beyond((choice.get("index"),), choice)
            if rest:
                body: dict[str, Any] = {"delta": {}} if "delta" in choice else {"text": ""}
                choices.append({"index": choice.get("index"), **body, "finish_reason": None, **rest})
        if not choices and chunk.get("usage") is None:
            return None
        return orjson.dumps({**chunk, **self._head, "choices": choices})

    def _beyond(self, path: tuple[Any, ...], part: Mapping[str, Any]) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        for name, value in part.items():
            place = (*path, name)
            if name == "index" or value is None:
                continue
            if name == "tool_calls":
                calls = [(call.get("index", 0), self._beyond((*place, call.get("index", 0)), call)) for call in value]
                new: Any = [{"index": index, **call} for index, call in calls if call]
            elif isinstance(value, dict):
                new = self._beyond(place, value)
            elif _is_growing(place, value):
                new = self._cut(place, value)
            else:
                new = None if place in self._delivered else value
            if new or new == 0:
                rest[name] = new
        return rest

    def _cut(self, place: tuple[Any, ...], value: Any) -> Any:
        """What of a text or a list was not delivered."""
        delivered = self._delivered.get(place)
        if delivered is None:
            return value
        start = self._again.get(place, 0)
        self._again[place] = start + len(value)
        same = delivered[start : start + len(value)]
        if isinstance(value, str) and value[: len(same)] != same:
            raise Diverged
        return value[max(0, len(delivered) - start) :]


def _note(path: tuple[Any, ...], part: Mapping[str, Any], seen: dict[tuple[Any, ...], Any]) -> None:
    """Keep each value of a chunk by its place: what grows with all that came of it."""
    for name, value in part.items():
        place = (*path, name)
        if name == "index" or value is None:
            continue
        if name == "tool_calls":
            for call in value:
                _note((*place, call.get("index", 0)), call, seen)
        elif isinstance(value, dict):
            _note(place, value, seen)
        elif _is_growing(place, value):
            seen[place] = seen[place] + value if place in seen else value
        else:
            seen[place] = value


def _is_growing(place: tuple[Any, ...], value: Any) -> bool:
    return place[-1] in GROWING if isinstance(value, str) else isinstance(value, list) and "logprobs" in place
