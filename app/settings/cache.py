"""`[cache]` and `[singleflight]`: which answers are kept, where, for whom, and how long."""

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from .section import Section

REDIS_SCHEMES = (
    "redis",
    "rediss",
    "unix",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
)


class MemorySettings(Section):
    enabled: bool = True
    """Keep answers in this process."""
    capacity: int = Field(200_000, ge=1)
    """Answers kept in memory."""
    max_memory_bytes: int = Field(256 * 1024 * 1024, ge=1024)
    """Memory for them, with all that they cost besides their text."""
    eviction: Literal["lru", "lfu", "adaptive"] = "lru"
    """Which go first: `lru`, the longest unused; `lfu`, the least used; `adaptive`, as the traffic suggests (ARC)."""


class RedisSettings(Section):
    url: str | None = None
    """The Redis that replicas share: `redis://` or, with TLS, `rediss://`; `unix://`;
    `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE`; `redis+cluster://HOST:PORT,HOST:PORT` (`rediss+…` with TLS). Limits
    are counted there, and answers kept. Without it, each replica does so for itself."""
    password_file: Path | None = None
    """Its password, in place of one in the URL; read at each connection."""
    sentinel_password_file: Path | None = None
    """That of the Sentinels, where they ask for one."""
    ca_file: Path | None = None
    """Certificates (PEM) that sign Redis's own; the system's by default."""
    cert_file: Path | None = None
    """This gateway's certificate (PEM), where Redis asks for one."""
    key_file: Path | None = None
    """Its key (PEM)."""
    namespace: str = Field("headrace", pattern="^[A-Za-z0-9_.-]+$")
    """What keys in Redis begin with, so that several gateways can use one Redis."""

    @field_validator("url")
    @classmethod
    def _url_is_one_of_redis(cls, url: str | None) -> str | None:
        if url is None:
            return url
        parts = urlsplit(url)
        if parts.scheme not in REDIS_SCHEMES:
            raise ValueError(f"it begins with one of {', '.join(f'{scheme}://' for scheme in REDIS_SCHEMES)}")
        if parts.scheme.endswith("+sentinel") and not parts.path.strip("/"):
            raise ValueError("a URL of Sentinels ends with the name of the service: redis+sentinel://HOST:PORT/SERVICE")
        return url

    @model_validator(mode="after")
    def _tls_files_are_for_tls(self) -> Self:
        if any((self.ca_file, self.cert_file, self.key_file)) and not (self.url or "").startswith("rediss"):
            raise ValueError("ca_file, cert_file, and key_file are for TLS: a url that begins with rediss")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        return self


class DiskSettings(Section):
    path: Path | None = None
    """A folder for answers that outlive the process; without it none are kept on disk. One process uses it at once."""
    max_bytes: int = Field(10 * 1024 * 1024 * 1024, ge=4 * 1024 * 1024)
    """Size of its file; the oldest answers make room."""
    compression: Literal["zstd", "none"] = "zstd"
    """How answers lie there."""


class SingleflightSettings(Section):
    scope: Literal["process", "cluster", "off"] = "process"
    """Who runs identical requests in flight once: each process, all replicas together (through `cache.redis.url`), or
    nobody."""
    resume_s: float = Field(60.0, ge=0)
    """Seconds after its end in which a stream can be read on in with `Last-Event-ID`."""
    linger_s: float = Field(0.0, ge=0, le=600)
    """Seconds that an engine works on after the last reader has left, so that one that lost its connection finds the
    stream still running."""


class CacheSettings(Section):
    enabled: bool = True
    """Answer repeated requests from the cache."""
    policy: Literal["deterministic", "all", "opt-in"] = "deterministic"
    """What is cached: `deterministic`, requests with temperature 0 or a seed; `all`, sampled ones too; `opt-in`, those
    with temperature 0 or a seed that ask for it (`Cache-Control: max-age=…` or `only-if-cached`)."""
    scope: Literal["tenant", "subject", "shared"] = "tenant"
    """Who shares answers: callers of one tenant, nobody (each subject has its own), or everybody."""
    ttl_s: float = Field(3600.0, gt=0)
    """Seconds that an answer is good for; `models.cache_ttl_s` goes before it."""
    max_entry_bytes: int = Field(1_000_000, ge=1)
    """Size of an answer; a larger one is not kept."""
    time_budget_ms: float = Field(20.0, gt=0)
    """Milliseconds that a request may lose to Redis; then it goes on without."""
    warm_file: Path | None = None
    """Requests (JSON Lines) that are run once the gateway is ready."""
    warm_tenant: str | None = None
    """The tenant for which `warm_file` is run, where a line names none."""
    warm_requests_per_s: float = Field(10.0, gt=0)
    """How many of them a second, at most."""
    memory: MemorySettings = MemorySettings()
    redis: RedisSettings = RedisSettings()
    disk: DiskSettings = DiskSettings()

    @model_validator(mode="after")
    def _somebody_is_warmed(self) -> Self:
        if self.warm_file is not None and not self.enabled:
            raise ValueError("warm_file is for a cache that is enabled")
        return self
