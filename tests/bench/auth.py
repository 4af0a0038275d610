"""What it costs to know the caller: the first and the second use of a token, against PyJWT's own decode.

    python tests/bench/auth.py [--rounds 7] [--tokens 2000]

Per algorithm and round, the same tokens are verified by `jwt.decode` (its key prepared beforehand, the same checks) and
by the gateway's authenticator, in turns of 50, so that whatever else the machine does strikes both; then once more by
the authenticator, which remembers them. Printed: microseconds of CPU a token and ratios, medians of the rounds.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import jwt

from auth.api_keys import ApiKeys
from auth.authenticator import Authenticator
from auth.keys import StaticKey, VerificationKey, secret_key
from auth.principal import ClaimNames, ClaimsReader
from auth.tokens import TokenVerifier
from tests.tokens import AUDIENCE, ISSUER, PRIVATE_KEYS, SECRET, token

OPTIONS = {"require": ["exp", "iss", "aud"]}
CHUNK = 50
CLAIMS = {"tenant": "acme", "scope": "inference cache:read", "models": ["qwen*"], "tier": "gold"}


async def cpu_us(tokens: list[Any], use: Callable[[Any], Awaitable[Any]]) -> float:
    started = time.process_time()
    for item in tokens:
        await use(item)
    return (time.process_time() - started) / len(tokens) * 1e6


async def measure(algorithm: str, count: int) -> tuple[float, float, float]:
    signing = PRIVATE_KEYS.get(algorithm, SECRET)
    material = SECRET.encode() if algorithm.startswith("HS") else signing.public_key()
    key = (
        secret_key(material, [algorithm])
        if algorithm.startswith("HS")
        else VerificationKey(material, frozenset({algorithm}))
    )
    tokens = [token(signing, algorithm, sub=f"user-{number}", **CLAIMS) for number in range(count)]
    headers = [f"Bearer {item}".encode() for item in tokens]
    reader = ClaimsReader(ClaimNames(), frozenset())
    verifier = TokenVerifier(StaticKey(key), [algorithm], reader, ISSUER, [AUDIENCE], 10)
    authenticator = Authenticator(verifier, ApiKeys({}))

    async def decode(item: str) -> None:
        jwt.decode(item, material, [algorithm], options=OPTIONS, audience=AUDIENCE, issuer=ISSUER, leeway=10)

    decoding = first = 0.0
    for start in range(0, count, CHUNK):
        decoding += await cpu_us(tokens[start : start + CHUNK], decode)
        first += await cpu_us(headers[start : start + CHUNK], authenticator.authenticate)
    chunks = len(range(0, count, CHUNK))
    return decoding / chunks, first / chunks, await cpu_us(headers, authenticator.authenticate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    print("algorithm  jwt.decode   first use  (ratio)   second use   [us of CPU]")
    for algorithm in ("HS256", "RS256", "ES256", "EdDSA"):
        rounds = [asyncio.run(measure(algorithm, arguments.tokens)) for _ in range(arguments.rounds)]
        decode, first, second = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(row[1] / row[0] for row in rounds)
        print(f"{algorithm:9}  {decode:10.1f}  {first:10.1f}  {ratio:6.2f}x  {second:11.2f}")


if __name__ == "__main__":
    main()
