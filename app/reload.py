"""Reads the settings again while the gateway runs, and goes by them from one moment to the next, or not at all.

A file that cannot be used changes nothing. It is tried again for as long as it is so, since what was missing may have
been another file, such as that of a key; but it is told only once.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from auth.limits import Limiter
from routing.errors import EngineConfigError

from .answers import Answers
from .lifecycle import Lifecycle
from .routes import Routes
from .security import make_policy
from .settings import LimitSettings, Section, Settings, SettingsError, SettingsSource

logger = logging.getLogger("headrace")

SETTLE_S = 0.1  # a file that changes within it is being written still
CHANGEABLE = frozenset({"models", "pools", "admission", "limits"})


@dataclass(frozen=True, slots=True)
class ReloadStatus:
    """`last_error`: why the settings that were read last are not in force; None: they are. `loaded_at`: since when
    (UNIX time) those in force are; `results` counts reloads by `ok` and `refused`."""

    last_error: str | None
    loaded_at: float
    results: Counter[str]


class Reloading:
    """Looks at the settings' file every `every_s` seconds (0: never), and whenever it is told to."""

    def __init__(
        self,
        source: SettingsSource,
        settings: Settings,
        routes: Routes,
        limiter: Limiter,
        answers: Answers,
        lifecycle: Lifecycle,
    ) -> None:
        self._source = source
        self._routes = routes
        self._limiter = limiter
        self._answers = answers
        self._lifecycle = lifecycle
        self._every_s = settings.server.reload_every_s
        self._is_told = asyncio.Event()
        # Mutable state, changed by `reload` only.
        self._settings = settings
        self._last_error: str | None = None
        self._loaded_at = time.time()
        self._results = Counter(ok=0, refused=0)

    def status(self) -> ReloadStatus:
        return ReloadStatus(self._last_error, self._loaded_at, self._results.copy())

    def now(self) -> None:
        """Read the settings at once, whether the file has changed or not."""
        self._is_told.set()

    async def run(self) -> None:
        while True:
            is_told = await self._wait()
            if is_told or await self._is_worth_it():
                await self.reload(is_told)

    async def reload(self, is_told: bool = True) -> None:
        """Swap the settings, or keep those in force; the latter for the same reason as before is news only to someone
        who has asked for it."""
        old = self._settings
        try:
            settings = await asyncio.to_thread(self._source.load)
            if (name := fixed_difference(old, settings)) is not None:
                raise SettingsError(f"{name} has changed, which needs a restart")
            policy = make_policy(settings.limits)
            prepared = await self._routes.prepare(settings)
        except (SettingsError, EngineConfigError) as exc:
            if is_told or not self._source.has_changed(await asyncio.to_thread(self._source.digest)):
                self._refuse(str(exc), is_told)  # else it is being written just now, and the next look is another
        except Exception as exc:  # what is written into a file is not to end the gateway
            self._refuse(f"unexpected {type(exc).__qualname__}", is_told, exc)
        else:
            # Nothing fails or waits from here on.
            self._routes.adopt(prepared, self._lifecycle.snapshot)
            self._limiter.use(policy)
            self._answers.use_ttls(settings.cache_ttls_s())
            self._settings = settings
            self._last_error = None
            self._loaded_at = time.time()
            self._results["ok"] += 1
            logger.info("settings reloaded: %s", "; ".join(differences(old, settings)) or "nothing has changed")

    def _refuse(self, error: str, is_told: bool, exc: Exception | None = None) -> None:
        if error == self._last_error and not is_told:
            return
        self._last_error = error
        self._results["refused"] += 1
        logger.error("settings refused, the old ones stay in force: %s", error, exc_info=exc)

    async def _wait(self) -> bool:
        """Until it is time to look; whether that is because it was told so."""
        try:
            async with asyncio.timeout(self._every_s or None):
                await self._is_told.wait()
        except TimeoutError:
            return False
        self._is_told.clear()
        return True

    async def _is_worth_it(self) -> bool:
        """Whether the file has another content, which nobody is writing at just now, or could not be used before."""
        digest = await asyncio.to_thread(self._source.digest)
        if not self._source.has_changed(digest):
            return self._last_error is not None
        await asyncio.sleep(SETTLE_S)
        return await asyncio.to_thread(self._source.digest) == digest


def fixed_difference(old: Settings, new: Settings) -> str | None:
    """The first setting that is another and cannot change while the gateway runs."""
    quotas = LimitSettings.model_fields.keys() - {"time_budget_ms"}
    return first_difference(old, new, CHANGEABLE) or first_difference(old.limits, new.limits, quotas, "limits.")


def first_difference(old: Section, new: Section, apart_from: Iterable[str] = (), prefix: str = "") -> str | None:
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if name in apart_from or before == after:
            continue
        if isinstance(before, Section) and isinstance(after, Section):
            return first_difference(before, after, prefix=f"{prefix}{name}.")
        return f"{prefix}{name}"
    return None


def differences(old: Settings, new: Settings) -> list[str]:
    """What has changed, in words."""
    told = []
    for what, before, after in (
        ("models", old.offered_models(), new.offered_models()),
        ("pools", old.pools, new.pools),
    ):
        told += differences_by_name(what, {item.name: item for item in before}, {item.name: item for item in after})
    return told + [f"{name} changed" for name in ("admission", "limits") if getattr(old, name) != getattr(new, name)]


def differences_by_name(what: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    kinds = {
        "added": [name for name in after if name not in before],
        "removed": [name for name in before if name not in after],
        "changed": [name for name in after if name in before and after[name] != before[name]],
    }
    return [f"{what} {kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
