"""vLLM's AsyncLLMEngine inside this process, behind vLLM's own serving layer.

The serving layer brings chat templates, tool parsing, structured output, logprobs, and multimodal input; what leaves it
is passed on as it is. What is used of vLLM stands in `CONTRACT`, and tests/test_vllm_contract.py holds it against the
installed version.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import ValidationError

from routing.engine import Answer, Call, Event, Load, Take, Usage
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
from .vllm_options import BUILTIN_DEFAULTS, first_line, parse_options, set_environment

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine

logger = logging.getLogger("headrace")

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
    "vllm.v1.engine.async_llm:AsyncLLM.generate(prompt, sampling_params, request_id, trace_headers)",
    "vllm.v1.engine.async_llm:AsyncLLM.get_supported_tasks()",
    "vllm.v1.engine.async_llm:AsyncLLM.is_sleeping()",
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown(timeout)",
    "vllm.v1.engine.async_llm:AsyncLLM.errored",
    "vllm.outputs:RequestOutput(prompt_token_ids, outputs)",
    "vllm.outputs:CompletionOutput(token_ids)",
    "vllm.sampling_params:RequestOutputKind.DELTA",
    "vllm.v1.metrics.loggers:StatLoggerBase.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
    "vllm.v1.metrics.stats:SchedulerStats.num_running_reqs",
    "vllm.v1.metrics.stats:SchedulerStats.num_waiting_reqs",
    "vllm.v1.metrics.stats:SchedulerStats.kv_cache_usage",
    "vllm.v1.metrics.stats:SchedulerStats.prefix_cache_stats",
    "vllm.v1.metrics.stats:SchedulerStats.spec_decoding_stats",
    "vllm.v1.metrics.stats:PrefixCacheStats.queries",
    "vllm.v1.metrics.stats:PrefixCacheStats.hits",
    "vllm.v1.metrics.stats:IterationStats",
    "vllm.v1.spec_decode.metrics:SpecDecodingStats.num_draft_tokens",
    "vllm.v1.spec_decode.metrics:SpecDecodingStats.num_accepted_tokens",
)

SHUTDOWN_TIMEOUT_S = 10.0

T = TypeVar("T")

# A trace context that says: not sampled (W3C Trace Context, section 3.2.2.5).
UNTRACED = ((b"traceparent", b"00-%032x-%016x-00" % (1, 1)),)
# The call that this context works for: the serving layer starts its generators in it, and tasks for several prompts.
CALL: ContextVar[Call | None] = ContextVar("CALL", default=None)


class EmbeddedEngine:
    """`options` are vLLM's, by vLLM's names; `names` the model names it answers to, the first of which vLLM knows.
    `traces_url` is an OTLP/HTTP receiver of its spans, where the options name none."""

    def __init__(
        self,
        options: Mapping[str, Any],
        names: list[str],
        cache_dir: Path,
        is_builtin: bool,
        log_config: Mapping[str, Any],
        traces_url: str | None = None,
    ) -> None:
        self._is_traced = traces_url is not None and "otlp_traces_endpoint" not in options
        self._options = dict(options) | ({"otlp_traces_endpoint": traces_url} if self._is_traced else {})
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
        finally:
            # While it loads, vLLM turns all logging off and then to what it was: two engines that start at once can
            # leave it off for good.
            logging.disable(logging.NOTSET)

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
        self.load.idle()
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

    async def stream(self, call: Call, take: Take) -> None:
        is_whole = False
        async with aclosing(await self._ask(call)) as frames:
            async for frame in frames:
                data = frame[6:-2].encode()
                if data == b"[DONE]":
                    is_whole = True
                elif data.startswith(b'{"error"'):
                    raise self._in_band_error(data, call)
                elif b'"choices":[]' in data:  # a string would have its quotation marks escaped
                    take([Event(self._renamed(data, call), usage=usage_of(orjson.loads(data).get("usage")))])
                else:
                    take([Event(self._renamed(data, call))])
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
        set_environment(self._log_config, traces_by_http=self._is_traced)
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
        try:
            # Ours is the only stat logger: a second engine's default one would unregister the first one's metrics.
            return tallying_engine(self._is_traced).from_vllm_config(
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
        CALL.set(call)
        # A request id of the caller's own could clash with another's inside the engine.
        body = {key: value for key, value in call.body.items() if key != "request_id"} | {"model": self._names[0]}
        try:
            request = request_class.model_validate(body)
        except (AttributeError, LookupError) as exc:
            # vLLM has validators that look into a field before its type was checked.
            raise RequestRejected("A field of the request has a wrong type.") from exc
        except Exception as exc:
            raise self._translated(exc, call) from exc
        try:
            response = await method(request, None)
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


def tallying_engine(is_traced: bool) -> type[Any]:
    """vLLM's engine, which also counts each call's tokens as they come: the serving layer tells them at the end only,
    and a call that is cut short has none. If it `is_traced` by the gateway, then only the calls that the gateway traces
    are: vLLM would begin a trace for each of the others."""
    from vllm import AsyncLLMEngine
    from vllm.sampling_params import RequestOutputKind

    class TallyingEngine(AsyncLLMEngine):  # type: ignore[misc]
        async def generate(
            self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
        ) -> AsyncGenerator[Any, None]:
            call = CALL.get()
            if call is None:
                async for output in super().generate(prompt, sampling_params, request_id, **options):
                    yield output
                return
            if self.observability_config.otlp_traces_endpoint is not None and (call.trace or is_traced):
                options["trace_headers"] = {name.decode(): value.decode() for name, value in call.trace or UNTRACED}
            outputs = super().generate(prompt, sampling_params, request_id, **options)
            tally = call.tally
            # The prompt counts from here on, since the engine works on it before there is any output.
            prompt_tokens = len(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, dict) else 0
            tally.prompt_tokens += prompt_tokens
            is_delta = sampling_params.output_kind == RequestOutputKind.DELTA
            async with aclosing(outputs):
                async for output in outputs:
                    if is_delta:
                        tally.completion_tokens += sum(len(part.token_ids) for part in output.outputs)
                    yield output

    return TallyingEngine


def load_logger(load: Load) -> Callable[..., Any]:
    """A stat logger for vLLM that keeps `load` up to date, over all data-parallel ranks."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    ranks: dict[int, Any] = {}  # what each has last said of itself

    class LoadLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                ranks[engine_idx] = scheduler_stats
                load.running = sum(rank.num_running_reqs for rank in ranks.values())
                load.waiting = sum(rank.num_waiting_reqs for rank in ranks.values())
                load.kv_cache_usage = fmean(rank.kv_cache_usage for rank in ranks.values())
                prefixes, drafts = scheduler_stats.prefix_cache_stats, scheduler_stats.spec_decoding_stats
                if prefixes is not None:
                    load.prefix_queries += prefixes.queries
                    load.prefix_hits += prefixes.hits
                if drafts is not None:
                    load.draft_tokens += drafts.num_draft_tokens
                    load.accepted_tokens += drafts.num_accepted_tokens
            if iteration_stats is not None:
                load.preemptions += iteration_stats.num_preempted_reqs

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
