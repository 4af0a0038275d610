"""The table of operations: every POST endpoint that an engine answers is one row."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """`name` is its label in logs and metrics; `input` the field that holds what it works on; `is_batch` says that a
    list in that field may stand for several inputs, each with an answer of its own; `scope` what a caller needs."""

    name: str
    path: str
    input: str
    streams: bool
    is_batch: bool = False
    scope: str = "inference"


OPERATIONS = {
    operation.path: operation
    for operation in (
        Operation("chat.completions", "/v1/chat/completions", input="messages", streams=True),
        Operation("completions", "/v1/completions", input="prompt", streams=True, is_batch=True),
    )
}
