"""`[server]`: the port, and the limits of a connection."""

import re
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from .section import Section, is_loopback


class DrainSettings(Section):
    settle_s: float = Field(5.0, ge=0)
    """After SIGTERM, seconds in which new requests are still accepted, so that load balancers can notice."""
    drain_s: float = Field(120.0, ge=0)
    """Then, seconds that running requests have to finish before they are ended with an error."""


class ServerSettings(Section):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    workers: int = Field(1, ge=1, le=256)
    """Processes that share the port, one for each core that the gateway may use. More than one count limits in
    `cache.redis.url`; each has a memory cache of its own, and its part of what `[admission]` says."""
    backlog: int = Field(2048, ge=1)
    """Connections that the kernel holds until they are accepted (bounded by `net.core.somaxconn`)."""
    max_connections: int = Field(16384, ge=1)
    """Open connections of a worker. One more closes the longest idle one, or is refused with 503 when none is idle."""
    max_body_bytes: int = Field(10_000_000, ge=1)
    """Size of a request body; a larger one gets 413 before it is read."""
    max_header_bytes: int = Field(131072, ge=1024)
    """Size of a request's line and headers together; more gets 431."""
    header_timeout_s: float = Field(5.0, gt=0)
    """Seconds for a request's line and headers to arrive whole (and for a TLS handshake); else 408."""
    body_timeout_s: float = Field(5.0, gt=0)
    """Seconds without a byte of a body before 408."""
    send_timeout_s: float = Field(60.0, gt=0)
    """Seconds that a client may leave its answer unread before its connection is dropped."""
    keep_alive_s: float = Field(75.0, gt=0)
    """Seconds that an idle connection is kept; longer than the idle time of the load balancer in front."""
    ping_s: float = Field(15.0, gt=0)
    """Seconds of silence in a stream before a comment is sent to keep proxies from closing it."""
    max_choices: int = Field(128, ge=1)
    """Answers that one request may ask for: `n` times the number of prompts."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the gateway from a browser, such as `https://chat.example.com`; `*` is every one."""
    tls_cert_file: Path | None = None
    """Certificate chain (PEM). With `tls_key_file`, the port speaks TLS."""
    tls_key_file: Path | None = None
    """Private key (PEM)."""
    reload_every_s: float = Field(2.0, ge=0)
    """Seconds between two looks at the settings file, which is read again when it has changed; 0: only at SIGHUP."""
    drain: DrainSettings = DrainSettings()

    @model_validator(mode="after")
    def _tls_files_go_together(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together")
        return self

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(f"{origin!r} is not an origin: scheme, host, and port, with nothing after them")
        return origins

    @property
    def is_on_loopback(self) -> bool:
        return self.host == "localhost" or is_loopback(self.host)
