"""Tokens for tests: good ones, and every kind of bad one."""

import base64
import hashlib
import hmac
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

SECRET = "a secret of tests, which is long enough for each of the three hashes, 64 bytes"
ISSUER = "https://issuer.example"
AUDIENCE = "headrace"
JWT_SETTINGS = {"secret": SECRET, "issuer": ISSUER, "audience": AUDIENCE}

RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
PRIVATE_KEYS: dict[str, Any] = {
    **dict.fromkeys(["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"], RSA_KEY),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "ES384": ec.generate_private_key(ec.SECP384R1()),
    "ES512": ec.generate_private_key(ec.SECP521R1()),
    "ES256K": ec.generate_private_key(ec.SECP256K1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}


def claims(**more: Any) -> dict[str, Any]:
    now = int(time.time())
    good = {"sub": "ann", "iss": ISSUER, "aud": AUDIENCE, "exp": now + 300, "scope": "inference", **more}
    return {name: value for name, value in good.items() if value is not None}


def token(key: Any = SECRET, algorithm: str = "HS256", kid: str | None = None, **more: Any) -> str:
    """A good token, but for what `more` changes; None takes a claim away."""
    return jwt.encode(claims(**more), key, algorithm, headers={"kid": kid} if kid else None)


def by_hand(header: dict[str, Any], payload: Any, key: bytes = b"") -> str:
    """Signed with HMAC, whatever the header says: what PyJWT would not sign."""

    def part(value: Any) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    head = part(header) + b"." + part(payload)
    signature = hmac.new(key, head, hashlib.sha256).digest() if key else b""
    return (head + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


def pem_of(private_key: Any) -> bytes:
    return private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def bearer(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}
