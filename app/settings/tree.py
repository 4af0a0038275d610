"""The settings as a whole, and the sections that have no module of their own."""

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from .auth import AuthSettings, LimitSettings
from .cache import CacheSettings, SingleflightSettings
from .monitoring import MonitoringSettings
from .routing import AdmissionSettings, ModelSettings, PoolSettings
from .section import Section
from .server import ServerSettings

DEVELOPMENT_SECRET = "development-secret"


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
    admission: AdmissionSettings = AdmissionSettings()
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
        self._check_pools()
        if self.singleflight.scope == "cluster" and self.cache.redis.url is None:
            raise ValueError("singleflight.scope: 'cluster' needs cache.redis.url")
        return self

    def _check_pools(self) -> None:
        """Raise ValueError unless each pool that is named exists, and each that exists is named."""
        pools = {pool.name for pool in self.pools}
        models = {model.name for model in self.offered_models()}
        named = [(f"models: {model.name!r}", name) for model in self.offered_models() for name in model.pools]
        for model in self.models:
            for fallback in model.fallback:
                if fallback.pool is not None:
                    named.append((f"models: the fallback of {model.name!r}", fallback.pool))
                elif fallback.model not in models - {model.name}:
                    raise ValueError(
                        f"models: the fallback of {model.name!r} names the model {fallback.model!r}, which is no other "
                        "configured one"
                    )
        named += [(f"pools: {pool.name!r}", pool.spill_over.pool) for pool in self.pools if pool.spill_over]
        for who, name in named:
            if name not in pools:
                raise ValueError(f"{who} names the pool {name!r}, which is not configured")
        if unused := pools - {name for _, name in named}:
            raise ValueError(f"pools: no model uses {sorted(unused)[0]!r}")
        for pool in self.pools:
            if pool.spill_over is not None and pool.spill_over.pool == pool.name:
                raise ValueError(f"pools: {pool.name!r} spills over into itself")

    @model_validator(mode="after")
    def _open_doors_face_inwards(self) -> Self:
        if self.auth.mode == "off" and not (self.server.is_on_loopback or self.auth.allow_insecure):
            raise ValueError(
                f"auth.mode: 'off' is for loopback; on {self.server.host} everybody could use the engines "
                "(auth.allow_insecure = true allows it)"
            )
        return self

    @model_validator(mode="after")
    def _workers_share_all_they_have_to(self) -> Self:
        if self.server.workers == 1:
            return self
        for pool in self.pools:
            if pool.engine == "vllm":
                raise ValueError(
                    f"server.workers: each worker would load the model of the pool {pool.name!r}; above 1 is for pools "
                    "of servers (engine = 'remote')"
                )
        if self.cache.disk.path is not None:
            raise ValueError("server.workers: above 1 excludes cache.disk.path, which one process uses at once")
        if self.cache.redis.url is None:
            raise ValueError("server.workers: above 1 needs cache.redis.url, where they count limits together")
        return self

    @property
    def development_secret_file(self) -> Path:
        return self.cache_dir / DEVELOPMENT_SECRET

    def cache_ttls_s(self) -> dict[str, float]:
        """Of the models that have one of their own."""
        return {model.name: model.cache_ttl_s for model in self.models if model.cache_ttl_s is not None}

    def offered_models(self) -> tuple[ModelSettings, ...]:
        return self.models or tuple(ModelSettings(name=pool.model_name, pool=pool.name) for pool in self.pools)


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
