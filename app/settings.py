"""The settings tree: preset, then file, then environment. Read once, and the only reader of the environment.

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
from typing import Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ENV_PREFIX = "HEADRACE__"
DEFAULT_FILE = Path("headrace.toml")
BUILTIN_MODEL = "builtin"
BUILTIN_MODEL_NAME = "SmolLM2-135M-Instruct"
SECRET_KEY = re.compile(r"(^|_)(token|secret|password|api_key)$", re.IGNORECASE)


class SettingsError(Exception):
    """The configuration cannot be used; the text is one clear line."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DrainSettings(Section):
    settle_s: float = Field(5.0, ge=0)
    """After SIGTERM, seconds in which new requests are still accepted, so that load balancers can notice."""
    drain_s: float = Field(120.0, ge=0)
    """Then, seconds that running requests have to finish before they are ended with an error."""


class ServerSettings(Section):
    host: str = "127.0.0.1"
    """Address to listen on. There is no authentication yet: on any other than loopback, everyone who reaches it may use
    the engines."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    backlog: int = Field(2048, ge=1)
    """Connections that the kernel holds until they are accepted (bounded by `net.core.somaxconn`)."""
    max_connections: int = Field(16384, ge=1)
    """Open connections. One more closes the longest idle one, or is refused with 503 when none is idle."""
    max_body_bytes: int = Field(10_000_000, ge=1)
    """Size of a request body; a larger one gets 413 before it is read."""
    max_header_bytes: int = Field(65536, ge=1024)
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
    tls_cert_file: Path | None = None
    """Certificate chain (PEM). With `tls_key_file`, the port speaks TLS."""
    tls_key_file: Path | None = None
    """Private key (PEM)."""
    drain: DrainSettings = DrainSettings()

    @model_validator(mode="after")
    def _tls_files_go_together(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together")
        return self


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


class PoolSettings(Section):
    name: str = Field(min_length=1)
    """Name in logs, metrics, and health."""
    engine: Literal["vllm", "scripted"]
    """`vllm`: an engine inside this process. `scripted`: fixed answers, for tests and demonstrations."""
    vllm: dict[str, Any] | None = None
    """Options of the engine, by vLLM's own names. `model = "builtin"` is the model that comes with Headrace."""
    scripted: ScriptedSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_options_are_there(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("engine") in ("vllm", "scripted"):
            return {data["engine"]: {}, **data}
        return data

    @model_validator(mode="after")
    def _only_its_own_options(self) -> Self:
        other = "vllm" if self.engine == "scripted" else "scripted"
        if getattr(self, other) is not None:
            raise ValueError(f"{other}: not for a pool with engine = {self.engine!r}")
        if self.vllm is not None and not self.vllm.get("model"):
            raise ValueError("a pool with engine = 'vllm' needs vllm.model")
        return self

    @property
    def model_name(self) -> str:
        """The name under which a pool is offered when no [[models]] says otherwise."""
        if self.vllm is None:
            return self.name
        served = self.vllm.get("served_model_name") or self.vllm["model"]
        name = served[0] if isinstance(served, list) else str(served)
        return BUILTIN_MODEL_NAME if name == BUILTIN_MODEL else name


class ModelSettings(Section):
    name: str = Field(min_length=1)
    """What callers put into `model`."""
    pool: str
    """The pool that answers."""


class MonitoringSettings(Section):
    log_format: Literal["json", "console"] = "json"
    """One JSON object a line, or lines for people."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the gateway's own lines."""
    engine_log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Of vLLM's lines."""


class Settings(Section):
    preset: Literal["development", "production"] = "production"
    """What the other defaults are for."""
    cache_dir: Path = Field(default_factory=lambda: default_cache_dir())
    """Where converted models are kept."""
    server: ServerSettings = ServerSettings()
    models: tuple[ModelSettings, ...] = ()
    """Names for callers. Without any, each pool is offered under the name of what it serves."""
    pools: tuple[PoolSettings, ...] = ()
    monitoring: MonitoringSettings = MonitoringSettings()

    @model_validator(mode="after")
    def _names_fit_together(self) -> Self:
        if not self.pools:
            raise ValueError("pools: at least one is needed")
        for what, names in (
            ("pools", [pool.name for pool in self.pools]),
            ("models", [model.name for model in self.offered_models()]),
        ):
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{what}: {sorted(twice)[0]!r} is there twice")
        pools = {pool.name for pool in self.pools}
        for model in self.models:
            if model.pool not in pools:
                raise ValueError(f"models: {model.name!r} names the pool {model.pool!r}, which is not configured")
        if unused := pools - {model.pool for model in self.offered_models()}:
            raise ValueError(f"pools: no model uses {sorted(unused)[0]!r}")
        return self

    def offered_models(self) -> tuple[ModelSettings, ...]:
        return self.models or tuple(ModelSettings(name=pool.model_name, pool=pool.name) for pool in self.pools)


PRESETS: dict[str, dict[str, Any]] = {
    "development": {
        "server": {"drain": {"settle_s": 0, "drain_s": 5}},
        "pools": [{"name": "local", "engine": "vllm", "vllm": {"model": BUILTIN_MODEL}}],
        "monitoring": {"log_format": "console", "engine_log_level": "error"},
    },
    "production": {},
}


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
    document = _merge(copy.deepcopy(PRESETS.get(chosen, {})), document) | {"preset": chosen}
    _overlay_environment(document, env)
    try:
        return Settings.model_validate(document)
    except ValidationError as exc:
        raise SettingsError(f"{source or 'settings'}: {_first_problem(exc)}") from exc


def dump_settings(settings: Settings) -> str:
    """The settings as TOML, secrets masked."""
    return tomli_w.dumps(_masked(settings.model_dump(mode="json", exclude_none=True)))


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


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
    error = exc.errors(include_url=False)[0]
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
    return "********" if isinstance(value, str) and SECRET_KEY.search(key) else value
