"""Tokens, keys, and the secret of the preset `development`, from the command line."""

import re
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jwt
import pytest

from app.cli import main
from app.security import create_token, digest_of, prepare_development_secret
from app.settings import SettingsError, dump_settings, load_settings

from .conftest import make_settings, serving
from .tokens import AUDIENCE, ISSUER, JWT_SETTINGS, OTHER_RSA_KEY, RSA_KEY, SECRET, bearer, pem_of

POOL = '[[pools]]\nname = "demo"\nengine = "scripted"\n'
JWT = f'[auth.jwt]\nsecret = "{SECRET}"\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\n'


def configured(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    return ["--config", str(file)]


async def test_created_token_says_what_was_asked_and_lets_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--subject", "ann", "--tenant", "acme", "--scope", "inference", "--scope", "cache:read"]
    options += ["--model", "dem*", "--model", "x", "--ttl", "15m", "--tier", "gold", "--priority", "3"]
    assert main(["token", "create", *configured(tmp_path, JWT + POOL), *options]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    claims = jwt.decode(printed.strip(), SECRET, ["HS256"], audience=AUDIENCE, issuer=ISSUER)
    assert claims.pop("exp") - claims.pop("iat") == 900
    assert claims == {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "ann",
        "tenant": "acme",
        "scope": "inference cache:read",
        "models": ["dem*", "x"],
        "tier": "gold",
        "priority": 3,
    }
    async with serving(auth={"jwt": JWT_SETTINGS}) as client:
        assert (await client.post(headers=bearer(printed.strip()))).status_code == 200


async def test_created_token_uses_the_configured_claims() -> None:
    names = {"subject": "client_id", "scope": "realm_access.roles", "tenant": "https://example.com/org"}
    auth = {"jwt": {**JWT_SETTINGS, "claims": names}}
    made = create_token(make_settings(auth=auth), "bot", tenant="acme")
    claims = jwt.decode(made, SECRET, ["HS256"], audience=AUDIENCE)
    assert (claims["client_id"], claims["realm_access"]) == ("bot", {"roles": ["inference"]})
    assert claims["https://example.com/org"] == "acme"
    async with serving(auth=auth) as client:
        assert (await client.post(headers=bearer(made))).status_code == 200


@pytest.mark.parametrize(("ttl", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("12h", 43200), ("30d", 2592000)])
def test_lifetimes_have_units(tmp_path: Path, capsys: pytest.CaptureFixture[str], ttl: str, seconds: int) -> None:
    assert main(["token", "create", *configured(tmp_path, JWT + POOL), "--subject", "a", "--ttl", ttl]) == 0
    claims = jwt.decode(capsys.readouterr().out.strip(), options={"verify_signature": False})
    assert claims["exp"] - claims["iat"] == seconds


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (JWT + POOL, ["--ttl", "soon"], "not a time"),
        (JWT + POOL, ["--ttl", "0"], "not a time"),
        (JWT + POOL, ["--scope", "everything"], "invalid choice"),
        ('[auth]\nmode = "off"\n' + POOL, [], "no token is needed"),
        (f'[auth.jwt]\nissuer = "{ISSUER}"\naudience = "a"\n' + POOL, [], "only the provider can make them"),
        (JWT.replace(SECRET, "short") + POOL, [], "the secret has 5 bytes"),
    ],
)
def test_what_cannot_be_signed_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], message: str
) -> None:
    try:
        code = main(["token", "create", *configured(tmp_path, text), "--subject", "a", *options])
    except SystemExit as exc:  # argparse's own refusals
        code = exc.code
    assert code in (1, 2)
    assert message in capsys.readouterr().err


async def test_created_key_is_shown_once_with_what_to_configure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "create", "--subject", "bot", "--tenant", "acme", "--model", "demo"]) == 0
    printed = capsys.readouterr().out
    key = re.search(r"shown this once: (hr-[A-Za-z0-9_-]{43})$", printed, re.MULTILINE).group(1)
    document = tomllib.loads(printed)
    assert printed.count(key) == 1
    assert document["auth"]["api_keys"][0]["sha256"] == digest_of(key)
    async with serving(**document) as client:
        assert (await client.post(headers=bearer(key))).status_code == 200
    assert main(["key", "create", "--subject", "bot"]) == 0
    assert key not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (JWT.replace(SECRET, "x" * 31), "the secret has 31 bytes; HS256 needs 32"),
        (JWT.replace(SECRET, "x" * 63) + 'algorithms = ["HS256", "HS512"]\n', "HS256, HS512 needs 64"),
        (JWT.replace(f'secret = "{SECRET}"', 'secret_file = "/nowhere/secret"'), "/nowhere/secret: No such file"),
        (JWT.replace(f'secret = "{SECRET}"', 'public_key_file = "/nowhere/key"'), "/nowhere/key: No such file"),
        (JWT.replace(f'secret = "{SECRET}"', 'public_key_file = "FOLDER/nonsense"'), "not a public key"),
        (JWT.replace(f'secret = "{SECRET}"', 'public_key_file = "FOLDER/private"'), "not a public key"),
        (
            JWT.replace(f'secret = "{SECRET}"', 'algorithms = ["ES256"]\npublic_key_file = "FOLDER/public"'),
            "fits none of the algorithms ES256",
        ),
    ],
)
def test_keys_that_cannot_be_used_are_found_by_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "nonsense").write_text("nonsense")
    (tmp_path / "private").write_bytes(b"-----BEGIN PRIVATE KEY-----\n" + pem_of(RSA_KEY)[27:])
    (tmp_path / "public").write_bytes(pem_of(OTHER_RSA_KEY))
    arguments = configured(tmp_path, text.replace("FOLDER", str(tmp_path)) + POOL)
    assert main(["config", "check", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_secrets_are_masked_when_settings_are_shown(tmp_path: Path) -> None:
    env = {
        "HEADRACE__AUTH__JWT__SECRET": "canary-secret-" + "x" * 40,
        "HEADRACE__CACHE__REDIS__URL": "redis://user:canary-password@redis.example:6379/0",
    }
    file = tmp_path / "headrace.toml"
    file.write_text(f'[auth.jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\n' + POOL)
    settings = load_settings(file, None, env)
    shown = dump_settings(settings)
    assert "canary" not in shown
    assert "redis://user:********@redis.example:6379/0" in shown
    assert settings.auth.jwt.secret == env["HEADRACE__AUTH__JWT__SECRET"]


def development(tmp_path: Path, **env: str) -> Any:
    return load_settings(None, "development", {"HEADRACE__CACHE_DIR": str(tmp_path / "cache"), **env})


def test_development_secret_is_made_once_for_this_user_only(tmp_path: Path) -> None:
    settings = development(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: prepare_development_secret(settings), range(8)))
    (secret,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    before = secret.read_text()
    assert len(before.strip()) == 64
    prepare_development_secret(settings)
    assert secret.read_text() == before
    assert jwt.decode(create_token(settings, "a"), before.strip(), ["HS256"], audience="headrace")["sub"] == "a"


def test_development_needs_no_secret_where_something_else_says_who_may_come_in(tmp_path: Path) -> None:
    for env in (
        {"HEADRACE__AUTH__MODE": "off"},
        {"HEADRACE__AUTH__JWT__SECRET": SECRET},
        {"HEADRACE__AUTH__JWT__ISSUER": "https://issuer.example"},
    ):
        settings = development(tmp_path, **env)
        prepare_development_secret(settings)
        assert settings.auth.jwt.secret_file is None, env
    assert not (tmp_path / "cache").exists()
    (tmp_path / "blocked").write_text("a file where a folder is needed")
    settings = development(tmp_path, HEADRACE__CACHE_DIR=str(tmp_path / "blocked"))
    with pytest.raises(SettingsError, match="blocked"):
        prepare_development_secret(settings)


def test_production_has_no_secret_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nobody could get in"):
        load_settings(Path(configured(tmp_path, POOL)[1]), None, {})
