"""Builds what the settings say of models and pools, and swaps it when they change."""

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from routing.admission import Admission
from routing.balance import make_balancer
from routing.breaker import Breaker
from routing.detours import Fallback, SpillOver, Watched, WithFallbacks
from routing.engine import Answerer, Engine
from routing.errors import EngineConfigError
from routing.guardrails import Guardrail, GuardrailRules, State
from routing.models import Model, Models
from routing.pool import Pool, RetryBudget
from routing.radix import PrefixTree
from routing.replica import Replica
from routing.shadow import Shadow
from routing.split import Split, Variant

from .crew import Crew
from .engines.discovery import Discovery
from .engines.scripted import Script, ScriptedEngine
from .engines.supervisor import SupervisedEngine
from .logs import logging_config
from .settings import (
    BUILTIN_MODEL,
    ModelSettings,
    PoolSettings,
    Settings,
    SettingsError,
    VariantSettings,
)

logger = logging.getLogger("headrace")


# Of an engine in this process: its supervisor knows better than its answers.
NEVER_OPENS = partial(Breaker, failures=sys.maxsize, min_requests=sys.maxsize)
LOOK_S = 1.0
DRAINED_LOOK_S = 0.1
START_S = 5.0  # for a new engine of this process; only scripted ones come while it runs

Snapshot = Callable[[], Callable[[], bool]]


class PoolUnit:
    """A pool with who looks after its replicas: the supervisor of the engine in this process, or the discovery of
    servers elsewhere."""

    def __init__(self, settings: PoolSettings, pool: Pool, part: SupervisedEngine | Discovery) -> None:
        self.settings = settings
        self.identity = identity(settings)
        self.pool = pool
        self.part = part

    @property
    def name(self) -> str:
        return self.settings.name

    def waiting(self) -> int:
        """Requests in the engines' own queues."""
        return self.part.load.waiting if isinstance(self.part, SupervisedEngine) else 0


class Retirement:
    """Lets a pool that is no longer configured finish what it works on, then dismisses who looks after it. What it
    works on is more than what is in it: a request that has begun may still come, also from a fallback's other side."""

    def __init__(self, unit: PoolUnit, crew: Crew, snapshot: Snapshot) -> None:
        self._unit = unit
        self._crew = crew
        self._snapshot = snapshot

    async def run(self) -> None:
        await asyncio.sleep(DRAINED_LOOK_S)  # what was understood before the swap runs by then
        is_awaited = self._snapshot()
        while is_awaited() or self._has_work():  # noqa: ASYNC110 - to tell would cost each request something
            await asyncio.sleep(DRAINED_LOOK_S)
        self._crew.dismiss(self._unit.part)
        logger.info("pool %s: what was under way before the reload is done", self._unit.name)

    def _has_work(self) -> bool:
        stats = self._unit.pool.admission.stats()
        return stats.in_flight + stats.waiting > 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that `Routes.adopt` needs, so that it cannot fail. `has_changes`: whether anything is not as it is now."""

    settings: Settings
    units: Mapping[str, PoolUnit]
    models: Mapping[str, Model]
    has_changes: bool


class Routes:
    """`models` is what callers can name, `pools` what answers. `given` replaces the engines of pools by name, for
    tests."""

    def __init__(self, settings: Settings, crew: Crew, given: Mapping[str, Engine]) -> None:
        self._crew = crew
        self._given = given
        # Mutable state, changed by `adopt` only.
        self._settings = settings
        self.pools: Mapping[str, PoolUnit] = {pool.name: self._make_unit(pool, settings) for pool in settings.pools}
        self._guardrails: dict[str, Guardrail] = {}
        models = self._make_models(settings, self.pools)
        self.models = Models(models)
        self._adopt(models)
        for unit in self.pools.values():
            crew.add(unit.part)

    @property
    def supervised(self) -> list[SupervisedEngine]:
        return [unit.part for unit in self.pools.values() if isinstance(unit.part, SupervisedEngine)]

    @property
    def is_ready(self) -> bool:
        return any(unit.pool.is_ready for unit in self.pools.values())

    async def run(self) -> None:
        """Look at the guardrails, also when no requests come, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for guardrail in self._guardrails.values():
                guardrail.evaluate()

    async def prepare(self, settings: Settings) -> Prepared:
        """Build and start what these settings need, beside what there is. Raises: SettingsError, EngineConfigError."""
        prepared = await asyncio.to_thread(self._build, settings)  # certificates and keys are read
        new = [unit for name, unit in prepared.units.items() if self.pools.get(name) is not unit]
        for unit in new:
            self._crew.add(unit.part)
        try:
            async with asyncio.timeout(START_S):
                for unit in new:
                    if isinstance(unit.part, SupervisedEngine):
                        await unit.part.has_started.wait()
        except TimeoutError:
            for unit in new:
                self._crew.dismiss(unit.part)
            raise EngineConfigError(f"pools: a new engine has not started within {START_S:g} s") from None
        return prepared

    def adopt(self, prepared: Prepared, snapshot: Snapshot) -> None:
        """Swap models, variants, weights, and pools, all at once; requests under way, of which `snapshot` tells, go on
        as they began."""
        if not prepared.has_changes:
            return
        old_units, self.pools = self.pools, prepared.units
        old_shadows = [model.shadow for model in self.models if model.shadow is not None]
        old_settings, self._settings = self._settings, prepared.settings
        self.models.replace(prepared.models)
        self._adopt(prepared.models)
        for pool in prepared.settings.pools:
            unit = self.pools[pool.name]
            bounds = bounds_of(pool, prepared.settings)
            if bounds != bounds_of(unit.settings, old_settings):
                unit.pool.admission.resize(*bounds)
            unit.settings = pool
        for name, unit in old_units.items():
            if self.pools.get(name) is not unit:
                self._crew.add(Retirement(unit, self._crew, snapshot))
        for shadow in old_shadows:
            self._crew.dismiss(shadow)

    def _build(self, settings: Settings) -> Prepared:
        """Raises: SettingsError, EngineConfigError."""
        units = {pool.name: self._unit_for(pool, settings) for pool in settings.pools}
        sections = ("models", "pools", "admission")
        has_changes = units != self.pools or any(
            getattr(settings, section) != getattr(self._settings, section) for section in sections
        )
        return Prepared(settings, units, self._make_models(settings, units), has_changes)

    def _adopt(self, models: Mapping[str, Model]) -> None:
        self._guardrails = {model.name: model.guardrail for model in models.values() if model.guardrail is not None}
        for model in models.values():
            if model.shadow is not None:
                self._crew.add(model.shadow)

    def _unit_for(self, pool: PoolSettings, settings: Settings) -> PoolUnit:
        """The pool as it is, if what answers is the same. Raises: SettingsError, EngineConfigError."""
        old = self.pools.get(pool.name)
        if old is not None and old.identity == identity(pool):
            return old
        if pool.engine == "vllm" or (old is not None and old.settings.engine == "vllm"):
            what = f"{pool.name!r} is new" if old is None else f"the options of {pool.name!r} have changed"
            raise SettingsError(f"pools: {what}, which needs a restart for an engine in this process")
        return self._make_unit(pool, settings)

    def _make_unit(self, settings: PoolSettings, whole: Settings) -> PoolUnit:
        """Raises: EngineConfigError."""
        tree = PrefixTree(settings.prefix_tree_bytes) if settings.balance == "prefix" else None
        pool = Pool(
            settings.name,
            make_balancer(settings.balance, settings.imbalance, tree),
            Admission(*bounds_of(settings, whole)),
            RetryBudget(settings.retry_budget),
            settings.ready_wait_s if settings.remote is not None else 0.0,
            settings.max_retries,
        )
        if settings.remote is not None:
            return PoolUnit(settings, pool, Discovery(pool, settings.remote, partial(make_breaker, settings)))
        engine = self._given.get(settings.name) or make_engine(settings, whole)
        supervised = SupervisedEngine(settings.name, engine)
        pool.use([Replica(supervised, NEVER_OPENS())])
        return PoolUnit(settings, pool, supervised)

    def _make_models(self, settings: Settings, units: Mapping[str, PoolUnit]) -> dict[str, Model]:
        fronts = {name: make_front(unit, settings, units) for name, unit in units.items()}
        offered = {model.name: model for model in settings.offered_models()}
        pools = {pool.name: pool for pool in settings.pools}
        return {model.name: self._make_model(model, offered, pools, fronts) for model in offered.values()}

    def _make_model(
        self,
        model: ModelSettings,
        offered: Mapping[str, ModelSettings],
        pools: Mapping[str, PoolSettings],
        fronts: Mapping[str, Answerer],
    ) -> Model:
        guardrail = self._guardrail_of(model)
        fallbacks = [
            Fallback(name, fronts[name], frozenset(fallback.on), fallback.model)
            for fallback in model.fallback
            for name in [fallback.pool or offered[fallback.model or ""].pools[0]]
        ]
        variants = []
        for variant in model.variants or (VariantSettings(name=model.pool or "", pool=model.pool or ""),):
            engine = fronts[variant.pool]
            if guardrail is not None:
                is_canary = variant.name == guardrail.rules.variant
                engine = Watched(engine, partial(judge, guardrail, is_canary))
            if fallbacks:
                engine = WithFallbacks(engine, fallbacks)
            pool = pools[variant.pool]
            hash_by = pool.hash_by if pool.balance == "consistent_hash" else None
            revision = revision_of(model, variant, pool)
            variants.append(Variant(variant.name, variant.pool, variant.weight, engine, revision, hash_by))
        split = Split(variants, guardrail)
        shadow = None
        if model.shadow is not None:
            options = model.shadow
            plain = next(variant for variant in variants if variant.name == options.variant)
            shadow = Shadow(
                replace(plain, engine=fronts[plain.pool]), options.share, options.max_in_flight, options.timeout_s
            )
        return Model(model.name, split, model.sticky_by, bool(model.variants), guardrail, shadow)

    def _guardrail_of(self, model: ModelSettings) -> Guardrail | None:
        """The one that watches already, if its rules are the same: what it has decided stands."""
        options = model.guardrails
        if options is None:
            return None
        rules = GuardrailRules(
            options.variant,
            options.max_error_rate,
            options.max_ttft_ratio,
            options.min_requests,
            options.window_s,
            options.steps,
            options.step_s,
        )
        old = self._guardrails.get(model.name)
        if old is not None and old.rules == rules:
            return old
        guardrail = Guardrail(rules)
        guardrail.on_change = partial(self._note_change, model.name, guardrail)
        return guardrail

    def _note_change(self, model: str, guardrail: Guardrail, old: State, new: State) -> None:
        self.models.generation += 1
        tell_change(model, guardrail, old, new)


def judge(guardrail: Guardrail, is_canary: bool, is_error: bool, ttft_s: float | None) -> None:
    """Count a request, and see at once what it changes: a canary that fails is not to fail for a second more."""
    guardrail.record(is_canary, is_error, ttft_s)
    guardrail.evaluate()


def tell_change(model: str, guardrail: Guardrail, old: State, new: State) -> None:
    canary = guardrail.rules.variant
    if new == "rolled_back":
        logger.error("model %s: the canary %s is rolled back: %s", model, canary, guardrail.reason)
    else:
        share = "its weight" if guardrail.share is None else f"{guardrail.share:.0%}"
        logger.info("model %s: the canary %s is %s, with %s of the requests", model, canary, new, share)


def identity(pool: PoolSettings) -> dict[str, Any]:
    """What must stay the same for a pool to go on as it is: its options, and what its files hold."""
    if pool.engine == "vllm":
        return pool.model_dump(include={"engine", "vllm"})
    files = () if pool.remote is None else (pool.remote.api_key_file, pool.remote.ca_file)
    return pool.model_dump(exclude={"admission", "spill_over"}) | {"files": [digest_of(file) for file in files]}


def digest_of(file: Path | None) -> bytes | None:
    """None for what cannot be read: whoever needs it will say so."""
    try:
        return None if file is None else blake2b(file.read_bytes()).digest()
    except OSError:
        return None


def bounds_of(pool: PoolSettings, settings: Settings) -> tuple[int | None, int, int, float]:
    """As Admission takes them: this worker's part."""
    bounds = pool.admission or settings.admission

    def part(whole: int) -> int:
        return math.ceil(whole / settings.server.workers)

    in_flight = None if bounds.max_in_flight is None else part(bounds.max_in_flight)
    return in_flight, part(bounds.max_queue), part(bounds.max_queue_bytes), bounds.queue_timeout_s


def make_breaker(pool: PoolSettings) -> Breaker:
    options = pool.breaker
    return Breaker(
        options.failures,
        options.error_rate,
        options.min_requests,
        options.window_s,
        options.open_s,
        max(options.open_s, options.max_open_s),
    )


def make_front(unit: PoolUnit, settings: Settings, units: Mapping[str, PoolUnit]) -> Answerer:
    """The pool, with what it spills over into."""
    options = next(pool.spill_over for pool in settings.pools if pool.name == unit.name)
    if options is None:
        return unit.pool
    return SpillOver(unit.pool, units[options.pool].pool, unit.waiting, options.above, options.until)


def make_engine(pool: PoolSettings, settings: Settings) -> Engine:
    if pool.scripted is not None:
        script = pool.scripted
        return ScriptedEngine(
            Script(script.text, script.first_token_s, script.token_s, script.error_after), script.max_model_len
        )
    from .engines.embedded import EmbeddedEngine

    options = pool.vllm or {}
    monitoring = settings.monitoring
    return EmbeddedEngine(
        options,
        names=[model.name for model in settings.offered_models() if pool.name in model.pools] or [pool.model_name],
        cache_dir=settings.cache_dir,
        is_builtin=options["model"] == BUILTIN_MODEL,
        log_config=logging_config(monitoring.log_format, monitoring.log_level, monitoring.engine_log_level),
        traces_url=monitoring.tracing.traces_url,
    )


def revision_of(model: ModelSettings, variant: VariantSettings, pool: PoolSettings) -> str:
    """Differs whenever the settings of what answers do. Where servers are is not one of them, but what they are called
    is: another pool's may be others."""
    options = pool.model_dump(mode="json", include={"name": True, "engine": True, "vllm": True, "scripted": True})
    options["model"] = pool.remote.model if pool.remote is not None else None
    options["variant"] = variant.name
    digest = blake2b(orjson.dumps(options, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
    return f"{digest}:{model.revision}:{variant.revision}"
