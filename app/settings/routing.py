"""`[[models]]`, `[[pools]]`, and `[admission]`: what callers can name, what answers, and how much of it at once."""

from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from .section import Section

BUILTIN_MODEL = "builtin"
BUILTIN_MODEL_NAME = "SmolLM2-135M-Instruct"
ENGINES = ("vllm", "remote", "scripted")

Cause = Literal["unavailable", "overloaded", "timeout", "error", "context_length"]


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


class RemoteSettings(Section):
    urls: tuple[str, ...] = ()
    """The servers' roots, such as `http://gpu-1:8000`; a `/v1` at the end is left out. Each is a replica."""
    dns: str | None = None
    """In place of `urls`: a root whose host stands for many servers. Each address that it resolves to is a replica, as
    of a headless service in Kubernetes."""
    resolve_every_s: float = Field(5.0, gt=0)
    """Seconds between two looks at `dns`."""
    api_key: str | None = None
    """The servers' own key; the caller's token is never passed on."""
    api_key_file: Path | None = None
    """A file with the key, in place of it; read at the start and at each reload."""
    model: str | None = None
    """The servers' name for the model; by default the one that the caller used."""
    ca_file: Path | None = None
    """Certificates (PEM) that sign the servers' own; the system's by default."""
    connect_timeout_s: float = Field(5.0, gt=0)
    """Seconds for a connection."""
    first_byte_timeout_s: float = Field(300.0, gt=0)
    """Seconds until an answer begins: a stream with its first event, a whole answer when it has been generated."""
    chunk_timeout_s: float = Field(60.0, gt=0)
    """Seconds without a byte of an answer that has begun."""
    total_timeout_s: float = Field(1800.0, gt=0)
    """Seconds for an answer from its request to its end."""
    probe_path: str = Field("/health", pattern="^/")
    """What is asked for to see whether a server is well: status 200 says so."""
    probe_every_s: float = Field(2.0, gt=0)
    """Seconds between two probes."""
    probe_timeout_s: float = Field(2.0, gt=0)
    """Seconds for a probe."""
    probe_failures: int = Field(2, ge=1)
    """Failed probes in a row after which a server is down. One that is answered brings it back."""

    @field_validator("urls", "dns")
    @classmethod
    def _roots_are_roots(cls, value: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        for url in (value,) if isinstance(value, str) else value or ():
            parts = urlsplit(url)
            if (
                parts.scheme not in ("http", "https")
                or not parts.hostname
                or parts.query
                or parts.fragment
                or parts.port == 0  # of one that is no port, this tells
            ):
                raise ValueError(f"{url!r} is not the root of a server, such as http://host:8000")
            if parts.username is not None:
                raise ValueError("a key stands in api_key, not in a URL")
        return value

    @model_validator(mode="after")
    def _servers_are_named_once(self) -> Self:
        if bool(self.urls) == (self.dns is not None):
            raise ValueError("either urls or dns says where the servers are")
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("api_key and api_key_file exclude each other")
        return self


class BreakerSettings(Section):
    failures: int = Field(5, ge=1)
    """Failures in a row after which a replica gets no more requests for a while."""
    error_rate: float = Field(0.5, gt=0, le=1)
    """The same after this share of failures, of `min_requests` at least, in `window_s`."""
    min_requests: int = Field(20, ge=1)
    """Requests in the window before its share counts."""
    window_s: float = Field(30.0, gt=0)
    """Seconds that are looked back."""
    open_s: float = Field(5.0, gt=0)
    """Seconds until one request is let through as a test; doubled each time that it fails."""
    max_open_s: float = Field(60.0, gt=0)
    """What they are doubled to at most."""


class AdmissionSettings(Section):
    max_in_flight: int | None = Field(1024, ge=1)
    """Requests that a pool works on at once; more wait in its queue."""
    max_queue: int = Field(1000, ge=0)
    """Requests that wait. One more is refused with 503, unless it goes before another by its priority."""
    max_queue_bytes: int = Field(64 * 1024 * 1024, ge=0)
    """What their bodies take together."""
    queue_timeout_s: float = Field(30.0, gt=0)
    """Seconds that a request waits before it is refused with 503."""


class SpillOverSettings(Section):
    pool: str
    """The pool that takes what is too much."""
    above: int = Field(8, ge=0)
    """More requests than this in the engine's own queue: new ones go to the other pool."""
    until: int = Field(0, ge=0)
    """As few as this: new ones stay here again."""


class PoolSettings(Section):
    name: str = Field(min_length=1)
    """Name in logs, metrics, and health."""
    engine: Literal["vllm", "remote", "scripted"]
    """`vllm`: an engine inside this process. `remote`: servers with OpenAI's API. `scripted`: fixed answers, for tests
    and demonstrations."""
    vllm: dict[str, Any] | None = None
    """Options of the engine, by vLLM's own names. `model = "builtin"` is the model that comes with Headrace."""
    remote: RemoteSettings | None = None
    scripted: ScriptedSettings | None = None
    balance: Literal["round_robin", "least_in_flight", "p2c_peak_ewma", "consistent_hash", "prefix"] = "p2c_peak_ewma"
    """Which replica answers: each in turn; the one with the fewest requests; the quicker and less busy one of two that
    are drawn; always the same for one session, tenant, or header; the one that has seen the longest part of the
    prompt."""
    hash_by: str = Field("session", min_length=1)
    """What `consistent_hash` goes by: `session` (`X-Session-ID`; without one, the subject), `tenant`, or the name of a
    header."""
    imbalance: float = Field(1.25, gt=1)
    """How many times the mean load a replica may get by `consistent_hash` and `prefix`."""
    prefix_tree_bytes: int = Field(16 * 1024 * 1024, ge=65536)
    """Memory for the prompts' beginnings that `prefix` knows."""
    ready_wait_s: float = Field(5.0, ge=0)
    """Seconds that a request waits for a replica when none can be asked; then 503."""
    max_retries: int = Field(2, ge=0)
    """Further replicas that a request is sent to when one fails before its first byte."""
    retry_budget: float = Field(0.2, ge=0, le=1)
    """Retries of all requests, as a share of them."""
    breaker: BreakerSettings = BreakerSettings()
    admission: AdmissionSettings | None = None
    """This pool's own, in place of `[admission]`."""
    spill_over: SpillOverSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_options_are_there(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("engine") in ("vllm", "scripted"):
            return {data["engine"]: {}, **data}
        return data

    @model_validator(mode="after")
    def _only_its_own_options(self) -> Self:
        for other in ENGINES:
            if other != self.engine and getattr(self, other) is not None:
                raise ValueError(f"{other}: not for a pool with engine = {self.engine!r}")
        if self.vllm is not None and not self.vllm.get("model"):
            raise ValueError("a pool with engine = 'vllm' needs vllm.model")
        if self.engine == "remote" and self.remote is None:
            raise ValueError("a pool with engine = 'remote' needs remote.urls or remote.dns")
        return self

    @property
    def model_name(self) -> str:
        """The name under which a pool is offered when no [[models]] says otherwise."""
        if self.remote is not None:
            return self.remote.model or self.name
        if self.vllm is None:
            return self.name
        served = self.vllm.get("served_model_name") or self.vllm["model"]
        name = served[0] if isinstance(served, list) else str(served)
        return BUILTIN_MODEL_NAME if name == BUILTIN_MODEL else name


class VariantSettings(Section):
    name: str = Field(min_length=1, pattern="^[A-Za-z0-9._-]+$")
    """Name in answers, logs, and metrics."""
    pool: str
    """The pool that answers."""
    weight: float = Field(1.0, ge=0)
    """Its share, in proportion to those of the others. One with 0 is reached by name alone, or as a shadow."""
    revision: str = ""
    """As `models.revision`, of this variant."""


class GuardrailSettings(Section):
    variant: str
    """The canary. It is measured against the others, and gets no more requests when it breaks a rule."""
    max_error_rate: float | None = Field(None, ge=0, le=1)
    """Share of failed requests that it may have."""
    max_ttft_ratio: float | None = Field(None, gt=0)
    """Its median time to the first token, as a multiple of the others'."""
    min_requests: int = Field(50, ge=1)
    """Requests in the window before a rule counts."""
    window_s: float = Field(300.0, gt=0)
    """Seconds that are looked back."""
    steps: tuple[float, ...] = ()
    """Percent of the requests that it gets, one after the other; without any, its weight stays."""
    step_s: float = Field(600.0, gt=0)
    """Seconds of a step."""

    @model_validator(mode="after")
    def _steps_go_up(self) -> Self:
        if list(self.steps) != sorted(set(self.steps)) or any(not 0 < step <= 100 for step in self.steps):
            raise ValueError("steps: percents above 0 up to 100, each greater than the one before")
        return self


class ShadowSettings(Section):
    variant: str
    """The variant that gets a copy of other variants' requests; nobody gets its answers."""
    share: float = Field(1.0, gt=0, le=1)
    """Of the requests."""
    max_in_flight: int = Field(4, ge=1)
    """Copies at once; beyond it none are sent."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds for a copy."""


class FallbackSettings(Section):
    pool: str | None = None
    """A pool that answers in place of the model's own."""
    model: str | None = None
    """Or a model whose pool does. Such answers are not cached."""
    on: tuple[Cause, ...] = ("unavailable", "overloaded", "timeout", "error")
    """When: no replica can be asked; queue or engine are full; a timeout; the engine failed; the prompt is too long."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.pool is None) == (self.model is None):
            raise ValueError("either pool or model")
        return self


class ModelSettings(Section):
    name: str = Field(min_length=1)
    """What callers put into `model`."""
    pool: str | None = None
    """The pool that answers."""
    variants: tuple[VariantSettings, ...] = ()
    """In place of `pool`: several that share the requests."""
    sticky_by: Literal["subject", "tenant", "session", "request"] = "subject"
    """Who stays with a variant: a tenant's subject, a tenant, a session (`X-Session-ID`; without one, the subject), or
    nobody, each request by its id."""
    guardrails: GuardrailSettings | None = None
    shadow: ShadowSettings | None = None
    fallback: tuple[FallbackSettings, ...] = ()
    """Who answers when the model's own pool does not, in this order."""
    revision: str = ""
    """Of what stands behind the name: another one leaves the answers cached so far behind. A change of the pool's
    options does so by itself."""
    cache_ttl_s: float | None = Field(None, gt=0)
    """Seconds that this model's answers are good for."""

    @model_validator(mode="after")
    def _variants_fit_together(self) -> Self:
        if (self.pool is None) == (not self.variants):
            raise ValueError("either pool or variants says what answers")
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError("variants: a name is there twice")
        if self.variants and not any(variant.weight for variant in self.variants):
            raise ValueError("variants: at least one weight must be above 0")
        for what, rules in (("guardrails", self.guardrails), ("shadow", self.shadow)):
            if rules is not None and rules.variant not in names:
                raise ValueError(f"{what}: there is no variant {rules.variant!r}")
        if self.guardrails is not None and len(names) < 2:
            raise ValueError("guardrails: a canary needs another variant beside it")
        return self

    @property
    def pools(self) -> tuple[str, ...]:
        """Those of its variants."""
        return (self.pool,) if self.pool is not None else tuple(variant.pool for variant in self.variants)
