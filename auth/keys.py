"""Keys that tokens are verified with, and which algorithms each may serve.

The algorithm is chosen by the configuration and the key, never by the token (RFC 8725, section 3.1): a key serves the
allowed algorithms of its own kind, so that a public key never becomes an HMAC secret.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from cryptography.x509 import load_pem_x509_certificate

from .errors import AuthConfigError

HMAC_BYTES = {"HS256": 32, "HS384": 48, "HS512": 64}  # the least that RFC 7518, section 3.2, allows
RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512", "secp256k1": "ES256K"}
EDDSA = frozenset({"EdDSA"})
PUBLIC = RSA | set(CURVES.values()) | EDDSA
MIN_RSA_BITS = 2048  # RFC 7518, section 3.3


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """`material` is what PyJWT takes; `algorithms` the ones that this key may verify; `fingerprint` tells it from
    others in a set."""

    material: Any
    algorithms: frozenset[str]
    kid: str | None = None
    fingerprint: str = ""


class Keys(Protocol):
    """Where a verifier finds its keys. `generation` grows when a key that was there may be gone."""

    @property
    def generation(self) -> int: ...

    @property
    def is_ready(self) -> bool:
        """Whether there are any keys."""
        ...

    def find(self, kid: str | None, algorithm: str) -> VerificationKey | None: ...

    async def seek(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        """Look again where keys come from, for one that `find` does not know."""
        ...


class StaticKey:
    """One key for every token, whatever its `kid`."""

    generation = 0
    is_ready = True

    def __init__(self, key: VerificationKey) -> None:
        self._key = key

    def find(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        return self._key if algorithm in self._key.algorithms else None

    async def seek(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        return None


def secret_key(secret: bytes, allowed: Iterable[str]) -> VerificationKey:
    """Raises: AuthConfigError, for a secret that is shorter than the algorithm's hash."""
    needed = max(HMAC_BYTES[algorithm] for algorithm in allowed)
    if len(secret) < needed:
        raise AuthConfigError(f"the secret has {len(secret)} bytes; {', '.join(allowed)} needs {needed}")
    return VerificationKey(secret, frozenset(allowed))


def public_key(path: Path, allowed: Iterable[str]) -> VerificationKey:
    """Load a PEM public key, or the one of a PEM certificate. Raises: AuthConfigError."""
    try:
        data = path.read_bytes()
        material = load_pem_x509_certificate(data).public_key() if b"CERTIFICATE" in data else load_pem_public_key(data)
    except OSError as exc:
        raise AuthConfigError(f"{path}: {exc.strerror or exc}") from exc
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise AuthConfigError(f"{path}: not a public key in PEM form") from exc
    algorithms = algorithms_of(material) & set(allowed)
    if not algorithms:
        raise AuthConfigError(f"{path}: this key fits none of the algorithms {', '.join(allowed)}")
    return VerificationKey(material, algorithms)


def algorithms_of(material: Any) -> frozenset[str]:
    """What a public key can verify; nothing, if it is too weak or of an unknown kind."""
    if isinstance(material, rsa.RSAPublicKey):
        return RSA if material.key_size >= MIN_RSA_BITS else frozenset()
    if isinstance(material, ec.EllipticCurvePublicKey):
        return frozenset(CURVES[name] for name in {material.curve.name} & set(CURVES))
    return EDDSA if isinstance(material, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey) else frozenset()
