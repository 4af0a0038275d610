"""Writes the table of settings into README.md, between its two markers."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from app.settings import Section, Settings

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->\n"


def rows(section: type[Section], prefix: str = "") -> list[str]:
    found = []
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if below:
            found += rows(below[0], f"{prefix}{name}.")
        else:
            text = " ".join((field.description or "").split())
            found.append(f"| `{prefix}{name}` | {default_of(name, field)} | {text} |")
    return found


def default_of(name: str, field: Any) -> str:
    if name == "cache_dir":
        return "`~/.cache/headrace`"
    if field.default is PydanticUndefined:
        return "needed"
    if field.default is None or isinstance(field.default, BaseModel) or field.default in ((), {}):
        return ""
    return f"`{json.dumps(field.default, default=str)}`"


def main() -> None:
    head, _, rest = README.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    table = ["| setting | default | what it is |", "| --- | --- | --- |", *rows(Settings)]
    README.write_text(head + BEGIN + "\n".join(table) + "\n" + END + tail)


if __name__ == "__main__":
    main()
