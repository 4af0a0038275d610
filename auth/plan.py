"""What limits a caller, and how it stands."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["requests", "tokens"]


class Window(NamedTuple):
    """So many requests or tokens a minute, counted under `key`."""

    key: str
    kind: Kind
    limit: int
    whose: str


class Slots(NamedTuple):
    """So many requests at once, counted under `key`."""

    key: str
    limit: int
    whose: str


class Plan(NamedTuple):
    """All that limits one caller."""

    windows: tuple[Window, ...]
    slots: tuple[Slots, ...]


@dataclass(slots=True)
class Standing:
    """How a window stands: used so far, and when it begins anew, by the monotonic clock."""

    window: Window
    used: int
    resets_at: float

    @property
    def reset_s(self) -> float:
        """Seconds until then."""
        return max(0.0, self.resets_at - time.monotonic())

    @property
    def remaining(self) -> int:
        return max(0, self.window.limit - self.used)

    @property
    def is_used_up(self) -> bool:
        return self.used >= self.window.limit


class Verdict(NamedTuple):
    """`is_taken`: a request was counted in each window, and a slot taken. Otherwise nothing was, and `full` are the
    slots that were all in use, if that was the reason."""

    is_taken: bool
    standings: list[Standing]
    full: Slots | None


def tightest(standings: Sequence[Standing]) -> Sequence[Standing]:
    if len(standings) < 2 or (len(standings) == 2 and standings[0].window.kind != standings[1].window.kind):
        return standings
    found: dict[Kind, Standing] = {}
    for standing in standings:
        other = found.get(standing.window.kind)
        if other is None or standing.remaining < other.remaining:
            found[standing.window.kind] = standing
    return list(found.values())
