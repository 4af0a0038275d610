"""The settings as a whole, and the sections that have no module of their own."""

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from .auth import AuthSettings, LimitSettings
from .cache import CacheSettings, SingleflightSettings
from .section import Section
from .server import ServerSettings

BUILTIN_MODEL = "builtin"
BUILTIN_MODEL_NAME = "SmolLM2-135M-Instruct"
DEVELOPMENT_SECRET = "development-secret"


class ScriptedSettings(Section):
    text: str = "The water runs down the headrace and turns the wheel."
    """What it answers to everything."""
    first_token_s: float = Field(0.0, ge=0)
    """Seconds before the first token."""
    token_s: float = Field(0.0, ge=0)
    """Seconds between tokens."""
    error_after: int | None = Field(None, ge=0)
    """Fail after so many tokens; 0 fails before the first."""
    max_model_len: int = Field(8192, ge=1)
    """Longest prompt, in words."""


class PoolSettings(Section):
    name: str = Field(min_length=1)
    """Name in logs, metrics, and health."""
    engine: Literal["vllm", "scripted"]
    """`vllm`: an engine inside this process. `scripted`: fixed answers, for tests and demonstrations."""
    vllm: dict[str, Any] | None = None
    """Options of the engine, by vLLM's own names. `model = "builtin"` is the model that comes with Headrace."""
    scripted: ScriptedSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_options_are_there(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("engine") in ("vllm", "scripted"):
            return {data["engine"]: {}, **data}
        return data

    @model_validator(mode="after")
    def _only_its_own_options(self) -> Self:
        other = "vllm" if self.engine == "scripted" else "scripted"
        if getattr(self, other) is not None:
            raise ValueError(f"{other}: not for a pool with engine = {self.engine!r}")
        if self.vllm is not None and not self.vllm.get("model"):
            raise ValueError("a pool with engine = 'vllm' needs vllm.model")
        return self

    @property
    def model_name(self) -> str:
        """The name under which a pool is offered when no [[models]] says otherwise."""
        if self.vllm is None:
            return self.name
        served = self.vllm.get("served_model_name") or self.vllm["model"]
        name = served[0] if isinstance(served, list) else str(served)
        return BUILTIN_MODEL_NAME if name == BUILTIN_MODEL else name


class ModelSettings(Section):
    name: str = Field(min_length=1)
    """What callers put into `model`."""
    pool: str
    """The pool that answers."""
    revision: str = ""
    """Of what stands behind the name: another one leaves the answers cached so far behind. A change of the pool's
    options does so by itself."""
    cache_ttl_s: float | None = Field(None, gt=0)
    """Seconds that this model's answers are good for."""


class MonitoringSettings(Section):
    log_format: Literal["json", "console"] = "json"
    """One JSON object a line, or lines for people."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the gateway's own lines."""
    engine_log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Of vLLM's lines."""


class Settings(Section):
    preset: Literal["development", "production"] = "production"
    """What the other defaults are for."""
    cache_dir: Path = Field(default_factory=lambda: default_cache_dir())
    """Where converted models are kept, and the secret of the preset `development`."""
    server: ServerSettings = ServerSettings()
    auth: AuthSettings
    limits: LimitSettings = LimitSettings()
    cache: CacheSettings = CacheSettings()
    singleflight: SingleflightSettings = SingleflightSettings()
    models: tuple[ModelSettings, ...] = ()
    """Names for callers. Without any, each pool is offered under the name of what it serves."""
    pools: tuple[PoolSettings, ...] = ()
    monitoring: MonitoringSettings = MonitoringSettings()

    @model_validator(mode="before")
    @classmethod
    def _authentication_is_never_left_out(cls, data: Any) -> Any:
        return {"auth": {}, **data} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _names_fit_together(self) -> Self:
        if not self.pools:
            raise ValueError("pools: at least one is needed")
        for what, names in (
            ("pools", [pool.name for pool in self.pools]),
            ("models", [model.name for model in self.offered_models()]),
        ):
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{what}: {sorted(twice)[0]!r} is there twice")
        pools = {pool.name for pool in self.pools}
        for model in self.models:
            if model.pool not in pools:
                raise ValueError(f"models: {model.name!r} names the pool {model.pool!r}, which is not configured")
        if self.singleflight.scope == "cluster" and self.cache.redis.url is None:
            raise ValueError("singleflight.scope: 'cluster' needs cache.redis.url")
        if unused := pools - {model.pool for model in self.offered_models()}:
            raise ValueError(f"pools: no model uses {sorted(unused)[0]!r}")
        return self

    @model_validator(mode="after")
    def _open_doors_face_inwards(self) -> Self:
        if self.auth.mode == "off" and not (self.server.is_on_loopback or self.auth.allow_insecure):
            raise ValueError(
                f"auth.mode: 'off' is for loopback; on {self.server.host} everybody could use the engines "
                "(auth.allow_insecure = true allows it)"
            )
        return self

    @property
    def development_secret_file(self) -> Path:
        return self.cache_dir / DEVELOPMENT_SECRET

    def offered_models(self) -> tuple[ModelSettings, ...]:
        return self.models or tuple(ModelSettings(name=pool.model_name, pool=pool.name) for pool in self.pools)


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
