"""Request bodies: JSON, within bounds."""

from typing import Any

import orjson

from .errors import InvalidJSON, InvalidRequest

MAX_DEPTH = 100  # of a body; tool schemas stay far below it


def parse(body: bytes) -> Any:
    """Decode JSON. Raises: InvalidJSON, also for NaN, for text that is not UTF-8, and for nesting beyond MAX_DEPTH."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InvalidJSON(f"The body is not JSON: {exc.msg} (line {exc.lineno}, column {exc.colno}).") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and depth_exceeds(document, MAX_DEPTH):
        raise InvalidRequest(f"The body is nested more than {MAX_DEPTH} deep.")
    return document


def depth_exceeds(document: Any, limit: int) -> bool:
    """Whether lists and objects stand more than `limit` deep in each other; found without recursion."""
    level = [document]
    for _ in range(limit + 1):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
