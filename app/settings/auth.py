"""`[auth]` and `[limits]`: who may come in, and how much they may."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from .section import Section, is_safe_url

KEY_SOURCES = ("secret", "secret_file", "public_key_file", "jwks_url")


class ClaimSettings(Section):
    subject: str = Field("sub", min_length=1)
    """Who is calling. Like all of these, a claim's name, or a path into nested claims such as `realm_access.roles`."""
    tenant: str = "tenant"
    """On whose behalf; without this claim, the subject is its own tenant."""
    scope: str = "scope"
    """What for: a list, or words with spaces between."""
    models: str = "models"
    """Which models: names or globs; without this claim, all."""
    priority: str = "priority"
    """A whole number; the greater goes first."""
    tier: str = "tier"
    """The name of one of `limits.tiers`."""
    requests_per_minute: str = "limits.requests_per_minute"
    """A limit of the subject's own."""
    tokens_per_minute: str = "limits.tokens_per_minute"
    """A limit of the subject's own."""
    concurrent: str = "limits.concurrent"
    """A limit of the subject's own."""


Algorithm = Literal[
    "HS256",
    "HS384",
    "HS512",
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "ES256K",
    "EdDSA",
]


class JwtSettings(Section):
    algorithms: tuple[Algorithm, ...] = ()
    """Signatures that are accepted, whatever a token says. Without any: HS256 for a secret, RS256 otherwise."""
    secret: str | None = None
    """The secret of HS256, HS384, or HS512, as text of 32, 48, or 64 bytes at least."""
    secret_file: Path | None = None
    """A file with that secret; a line break at its end does not count."""
    public_key_file: Path | None = None
    """A public key or certificate (PEM) for the other algorithms."""
    jwks_url: str | None = None
    """Where the provider publishes its keys. With none of these four, `issuer` is a URL, and they are found from there
    (OpenID Connect discovery)."""
    jwks_refresh_s: float = Field(300.0, gt=0)
    """Seconds between two fetches of the provider's keys; a key id that is not known is looked for at once."""
    issuer: str | None = None
    """What `iss` must be."""
    audience: tuple[str, ...] = ()
    """What `aud` must be, or have in it: a name or a list of names."""
    allow_any_issuer: bool = False
    """Start without `issuer`, and do not look at `iss`."""
    allow_any_audience: bool = False
    """Start without `audience`, and do not look at `aud`: tokens for other applications of the issuer are taken."""
    leeway_s: float = Field(10.0, ge=0, le=300)
    """Seconds by which clocks may differ, for `exp`, `nbf`, and `iat`."""
    claims: ClaimSettings = ClaimSettings()

    @field_validator("audience", mode="before")
    @classmethod
    def _one_audience_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _keys_fit_algorithms(self) -> Self:
        if len(self._sources) > 1:
            raise ValueError(f"{self._sources[0]} and {self._sources[1]} exclude each other")
        if self.has_keys and not self.issuer and not self.allow_any_issuer:
            raise ValueError("issuer is needed (or allow_any_issuer = true)")
        if self.has_keys and not self.audience and not self.allow_any_audience:
            raise ValueError("audience is needed (or allow_any_audience = true)")
        for algorithm in self.algorithms:
            if algorithm.startswith("HS") != self.is_secret and self.has_keys:
                raise ValueError(
                    f"algorithms: {algorithm} is not for {'a secret' if self.is_secret else 'public keys'}"
                )
        return self

    @property
    def is_secret(self) -> bool:
        return self.secret is not None or self.secret_file is not None

    @property
    def is_discovered(self) -> bool:
        return not self._sources and self.issuer is not None and "://" in self.issuer

    @property
    def has_keys(self) -> bool:
        return self.is_discovered or bool(self._sources)

    @property
    def _sources(self) -> list[str]:
        return [name for name in KEY_SOURCES if getattr(self, name) is not None]

    @property
    def allowed_algorithms(self) -> tuple[str, ...]:
        return self.algorithms or (("HS256",) if self.is_secret else ("RS256",))


class ApiKeySettings(Section):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the key, in hexadecimal; `headrace key create` makes both."""
    subject: str = Field(min_length=1, max_length=256)
    """Who calls with it."""
    tenant: str | None = Field(None, min_length=1, max_length=256)
    """On whose behalf; left out, the subject is its own tenant."""
    scopes: tuple[str, ...] = ("inference",)
    """What for."""
    models: tuple[str, ...] | None = None
    """Which models: names or globs; left out, all."""
    priority: int = 0
    """The greater goes first."""
    tier: str | None = None
    """The name of one of `limits.tiers`."""


class AuthSettings(Section):
    mode: Literal["jwt", "off"] = "jwt"
    """`jwt`: a token or an API key is needed. `off`: everybody may do everything; on loopback only."""
    allow_insecure: bool = False
    """Allow `off` on other addresses than loopback, and keys fetched by plain HTTP from elsewhere."""
    default_scopes: tuple[str, ...] = ()
    """The scopes of a token that has no claim for them. Without any, such a token may do nothing."""
    jwt: JwtSettings = JwtSettings()
    api_keys: tuple[ApiKeySettings, ...] = ()

    @model_validator(mode="after")
    def _somebody_can_get_in(self) -> Self:
        if self.mode == "off":
            if self.api_keys or self.jwt.has_keys:
                raise ValueError("mode = 'off' leaves keys unused; take them or the mode away")
            return self
        if not self.jwt.has_keys and not self.api_keys:
            raise ValueError(
                "nobody could get in: jwt needs secret, secret_file, public_key_file, jwks_url, or an issuer whose "
                "keys can be discovered; or there are api_keys; or mode = 'off'"
            )
        digests = [key.sha256 for key in self.api_keys]
        if len(set(digests)) < len(digests):
            raise ValueError("api_keys: the same key is there twice")
        for url in (self.jwt.jwks_url, self.jwt.issuer if self.jwt.is_discovered else None):
            if url is not None and not (self.allow_insecure or is_safe_url(url)):
                raise ValueError(f"jwt: {url} is not https (allow_insecure = true takes it all the same)")
        return self


class QuotaSettings(Section):
    requests_per_minute: int | None = Field(None, ge=0)
    """Requests in a minute, refused ones not counted; left out, any number."""
    tokens_per_minute: int | None = Field(None, ge=0)
    """Tokens of prompts and answers in a minute, counted when they are known."""
    concurrent: int | None = Field(None, ge=0)
    """Requests at once."""


class TierSettings(Section):
    name: str = Field(min_length=1)
    """What a token's claim `tier` says."""
    tenant: QuotaSettings = QuotaSettings()
    subject: QuotaSettings = QuotaSettings()


class LimitSettings(Section):
    tenant: QuotaSettings = QuotaSettings()
    subject: QuotaSettings = QuotaSettings()
    tiers: tuple[TierSettings, ...] = ()
    time_budget_ms: float = Field(10.0, gt=0)
    """Milliseconds that a request may lose to counting in Redis; then it is counted by this replica alone."""

    @model_validator(mode="after")
    def _tiers_differ(self) -> Self:
        names = [tier.name for tier in self.tiers]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"tiers: {sorted(twice)[0]!r} is there twice")
        return self
