"""Reads the settings: preset, then file, then environment.

A key that nobody reads is a mistake, so unknown keys stop the start; so do invalid values, in one line each.
"""

import copy
import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import tomli_w
from pydantic import ValidationError

from .auth import KEY_SOURCES
from .routing import BUILTIN_MODEL
from .tree import DEVELOPMENT_SECRET, Settings, default_cache_dir

ENV_PREFIX = "HEADRACE__"
DEFAULT_FILE = Path("headrace.toml")
MASK = "********"
SECRET_KEY = re.compile(r"(^|_)(token|secret|password|api_key)$", re.IGNORECASE)


class SettingsError(Exception):
    """The configuration cannot be used; the text is one clear line."""


PRESETS: dict[str, dict[str, Any]] = {
    "development": {
        "server": {"drain": {"settle_s": 0, "drain_s": 5}},
        "auth": {"jwt": {"issuer": "headrace-development", "audience": "headrace"}},
        "pools": [{"name": "local", "engine": "vllm", "vllm": {"model": BUILTIN_MODEL}}],
        "monitoring": {"log_format": "console", "engine_log_level": "error"},
    },
    "production": {},
}


def caller_token() -> str | None:
    """The token of whoever uses the command line as a client, where OpenAI's tools look for it."""
    return os.environ.get("OPENAI_API_KEY")


def load_settings(
    file: Path | None = None, preset: str | None = None, env: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings. `file` None means headrace.toml where there is one; `preset` is the one used when neither file
    nor environment names one.

    Raises: SettingsError.
    """
    env = os.environ if env is None else env
    source = file or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    document = _read_toml(source) if source else {}
    chosen = env.get(f"{ENV_PREFIX}PRESET") or document.get("preset") or preset or "production"
    defaults = PRESETS.get(chosen, {}) if isinstance(chosen, str) else {}  # else Settings will say so
    document = _merge(copy.deepcopy(defaults), document) | {"preset": chosen}
    _overlay_environment(document, env)
    if chosen == "development":
        _use_development_secret(document)
    try:
        return Settings.model_validate(document)
    except ValidationError as exc:
        raise SettingsError(f"{source or 'settings'}: {_first_problem(exc)}") from exc


def _use_development_secret(document: dict[str, Any]) -> None:
    """Where nothing else says who may come in, a secret of this machine's does."""
    auth = document.get("auth")
    jwt = auth.get("jwt") if isinstance(auth, dict) else None
    if not isinstance(auth, dict) or not isinstance(jwt, dict):
        return  # of a wrong type: Settings will say so
    has_keys = any(name in jwt for name in KEY_SOURCES) or "://" in str(jwt.get("issuer"))
    if auth.get("mode") != "off" and not has_keys:
        jwt["secret_file"] = str(Path(document.get("cache_dir") or default_cache_dir()) / DEVELOPMENT_SECRET)


def dump_settings(settings: Settings) -> str:
    """The settings as TOML, secrets masked."""
    return tomli_w.dumps(_masked(settings.model_dump(mode="json", exclude_none=True)))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SettingsError(f"{path}: {exc.strerror or exc}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{path}: not TOML: {exc}") from exc


def _overlay_environment(document: dict[str, Any], env: Mapping[str, str]) -> None:
    """Set `HEADRACE__SERVER__PORT=1` and `HEADRACE__POOLS__0__NAME=x` in the document. A value that begins with `[` or
    `{` is JSON; other values become what the setting's type makes of them."""
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX):
            continue
        *parents, last = variable.removeprefix(ENV_PREFIX).lower().split("__")
        text = env[variable]
        try:
            value = json.loads(text) if text[:1] in ("[", "{") else text
            place: Any = document
            for part, following in zip(parents, [*parents, last][1:], strict=True):
                place = _child(place, part, [] if following.isdigit() else {})
            if isinstance(place, list):
                _child(place, last, value)
                place[int(last)] = value
            else:
                place[last] = value
        except (ValueError, TypeError, IndexError) as exc:
            raise SettingsError(f"environment: {variable}: {exc}") from exc


def _child(place: Any, part: str, new: Any) -> Any:
    if isinstance(place, dict):
        return place.setdefault(part, new)
    if not isinstance(place, list):
        raise TypeError(f"nothing can stand below {part!r}")
    index = int(part)
    if index == len(place):
        place.append(new)
    return place[index]


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _first_problem(exc: ValidationError) -> str:
    errors = exc.errors(include_url=False)
    # A key that is misspelt may be why something else is missing.
    error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(error["loc"][-1]), _keys_beside(error["loc"]), n=1)
        return f"{where}: unknown key" + (f" (did you mean {close[0]!r}?)" if close else "")
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    section: Any = Settings
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        section = next((arg for arg in getattr(annotation, "__args__", ()) if isinstance(arg, type)), annotation)
    return list(section.model_fields) if hasattr(section, "model_fields") else []


def _masked(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _masked(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, key) for item in value]
    if not isinstance(value, str):
        return value
    if SECRET_KEY.search(key):
        return MASK
    parts = urlsplit(value) if "://" in value and "@" in value else None
    if parts is not None and parts.password is not None:
        where = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{parts.username}:{MASK}@{where}"))
    return value
