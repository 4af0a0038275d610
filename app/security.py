"""Who may come in, built from the settings; and the tokens and keys that the command line makes."""

import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import jwt

from auth.api_keys import ApiKeys
from auth.authenticator import Authenticator, Everyone
from auth.errors import AuthConfigError
from auth.jwks import KeySet
from auth.keys import Keys, StaticKey, VerificationKey, public_key, secret_key
from auth.limits import Policy
from auth.principal import ClaimNames, ClaimsReader, Principal, Quota
from auth.provider import Provider
from auth.tokens import TokenVerifier

from .operations import OPERATIONS
from .settings import AuthSettings, JwtSettings, LimitSettings, QuotaSettings, Settings, SettingsError

SCOPES = frozenset({"inference", "cache:read", "cache:admin", "routing:read", "routing:admin", "routing:choose"})
assert {operation.scope for operation in OPERATIONS.values()} <= SCOPES
SECRET_BYTES = 48


def make_authenticator(auth: AuthSettings, keys: Keys | None) -> Authenticator | Everyone:
    """`keys` are those of `make_keys`."""
    if auth.mode == "off":
        return Everyone(Principal("anonymous", "anonymous", SCOPES))
    settings = auth.jwt
    verifier = None
    if keys is not None:
        reader = ClaimsReader(ClaimNames(**settings.claims.model_dump()), frozenset(auth.default_scopes))
        issuer = None if settings.allow_any_issuer and not settings.issuer else settings.issuer
        verifier = TokenVerifier(
            keys, settings.allowed_algorithms, reader, issuer, settings.audience, settings.leeway_s
        )
    principals = {
        bytes.fromhex(key.sha256): Principal(
            subject=key.subject,
            tenant=key.tenant or key.subject,
            scopes=frozenset(key.scopes),
            models=None if key.models is None or "*" in key.models else key.models,
            priority=key.priority,
            tier=key.tier,
        )
        for key in auth.api_keys
    }
    return Authenticator(verifier, ApiKeys(principals))


def make_keys(auth: AuthSettings) -> Keys | None:
    """What tokens are verified with; None when no JWTs are taken. Raises: SettingsError."""
    settings = auth.jwt
    if auth.mode == "off" or not settings.has_keys:
        return None
    if settings.jwks_url is not None or settings.is_discovered:
        provider = Provider(settings.allowed_algorithms, settings.jwks_url, settings.issuer)
        return KeySet(provider.fetch, settings.jwks_refresh_s)
    try:
        return StaticKey(_static_key(settings))
    except AuthConfigError as exc:
        raise SettingsError(f"auth.jwt: {exc}") from exc


def _static_key(settings: JwtSettings) -> VerificationKey:
    if settings.public_key_file is not None:
        return public_key(settings.public_key_file, settings.allowed_algorithms)
    return secret_key(read_secret(settings), settings.allowed_algorithms)


def read_secret(settings: JwtSettings) -> bytes:
    """Raises: AuthConfigError."""
    if settings.secret is not None:
        return settings.secret.encode()
    assert settings.secret_file is not None
    try:
        return settings.secret_file.read_bytes().rstrip(b"\r\n")
    except OSError as exc:
        raise AuthConfigError(f"{settings.secret_file}: {exc.strerror or exc}") from exc


def make_policy(limits: LimitSettings) -> Policy:
    def quota(settings: QuotaSettings) -> Quota:
        return Quota(settings.requests_per_minute, settings.tokens_per_minute, settings.concurrent)

    tiers = {tier.name: (quota(tier.tenant), quota(tier.subject)) for tier in limits.tiers}
    return Policy(quota(limits.tenant), quota(limits.subject), tiers)


def prepare_development_secret(settings: Settings) -> None:
    """Make the secret of the preset `development`, unless it is there already. Raises: SettingsError."""
    path = settings.development_secret_file
    if settings.auth.mode == "off" or settings.auth.jwt.secret_file != path or path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, and for this user only; of two at once, the first one's stays.
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as exc:
        raise SettingsError(f"{path}: {exc.strerror or exc}") from exc


def create_token(
    settings: Settings,
    subject: str,
    tenant: str | None = None,
    scopes: Sequence[str] = ("inference",),
    models: Sequence[str] = (),
    ttl_s: float = 3600,
    tier: str | None = None,
    priority: int | None = None,
) -> str:
    """Sign a token that this gateway takes. Raises: SettingsError, where only the provider can sign."""
    auth, own = settings.auth, settings.auth.jwt
    if auth.mode == "off":
        raise SettingsError("auth.mode is 'off': no token is needed")
    if not own.is_secret:
        raise SettingsError("tokens are made with auth.jwt.secret or secret_file; here only the provider can make them")
    try:
        key = secret_key(read_secret(own), own.allowed_algorithms)
    except AuthConfigError as exc:
        raise SettingsError(f"auth.jwt: {exc}") from exc
    now = int(time.time())
    claims: dict[str, Any] = {"iat": now, "exp": now + int(ttl_s)}
    if own.issuer:
        claims["iss"] = own.issuer
    if own.audience:
        claims["aud"] = own.audience[0]
    names = own.claims
    facts: dict[str, Any] = {
        names.subject: subject,
        names.tenant: tenant,
        names.scope: list(scopes) if "." in names.scope else " ".join(scopes),
        names.models: list(models) or None,
        names.tier: tier,
        names.priority: priority,
    }
    for name, value in facts.items():
        if name and value is not None:
            _set_claim(claims, name, value)
    return jwt.encode(claims, key.material, algorithm=own.allowed_algorithms[0])


def _set_claim(claims: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = [name] if "://" in name else name.split(".")
    for parent in parents:
        claims = claims.setdefault(parent, {})
    claims[last] = value


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
