"""What the errors of OpenAI-compatible servers mean here, whatever their form."""

import email.utils
import time
from contextlib import suppress
from typing import Any

import orjson

from routing.errors import (
    ContextLengthExceeded,
    EngineError,
    EngineOverloaded,
    EngineRefused,
    EngineUnreachable,
    RequestRejected,
    RoutingError,
    UnsupportedOperation,
)

from .http_response import Response

# Of an error's `param` (vLLM) and `code` (OpenAI) when the prompt is too long.
TOO_LONG = ("input_tokens", "input_text", "context_length_exceeded")
MOST_MESSAGE_CHARS = 500
VLLM_ASIDE = " (parameter="  # with the parameter's value after it, in vLLM's own words for itself
# Of a server that has too much to do: when it does not say when to come back, and the most that it is believed.
DEFAULT_RETRY_S, MOST_RETRY_S = 1.0, 3600.0


def refusal(response: Response, body: bytes) -> RoutingError:
    """What a status other than 200 means to the caller."""
    document: Any = None
    with suppress(orjson.JSONDecodeError):
        document = orjson.loads(body)
    error = document.get("error") if type(document) is dict else None
    if type(error) is str:  # as of Text Generation Inference, and of Ollama
        error = {"message": error}
    elif error is None and type(document) is dict and document.get("object") == "error":  # as of vLLM before 0.10
        error = document
    after_s = retry_after_s(response.headers.get(b"retry-after"))
    return meaning(response.status, error if type(error) is dict else {}, after_s)


def refusal_in(error: Any) -> RoutingError:
    """What an error object means that came with a status of 200."""
    if type(error) is not dict:
        return EngineError("The engine failed at this request.")
    code = error.get("code")
    return meaning(code if type(code) is int else 500, error, None)


def meaning(status: int, error: dict[str, Any], after_s: float | None) -> RoutingError:
    """The first case that fits counts."""
    param, code = error.get("param"), error.get("code")
    field = None if param is None else str(param)
    message = str(error.get("message") or "The engine refuses this request.")
    message = message.partition(VLLM_ASIDE)[0][:MOST_MESSAGE_CHARS]
    if status == 429 or (status == 503 and after_s is not None):
        return EngineOverloaded(DEFAULT_RETRY_S if after_s is None else after_s)
    if status == 503:
        return EngineUnreachable("The engine cannot take requests now.")
    if status == 504:
        return EngineError("The engine's server gave up waiting.")
    if status == 408:
        return EngineRefused("The engine's server gave up waiting.")
    if param in TOO_LONG or code in TOO_LONG:
        return ContextLengthExceeded(message, field)
    if status in (401, 403, 407):
        return EngineRefused("The engine does not accept the gateway's credentials.")
    if status in (404, 405, 501):
        if param == "model" or code == "model_not_found":
            return EngineRefused("The engine does not know the model that the gateway asks for.")
        return UnsupportedOperation("The engine behind this model has no such operation.")
    if 400 <= status < 500:
        return RequestRejected(message, field)
    return EngineError("The engine failed at this request.")


def retry_after_s(value: bytes | None) -> float | None:
    """Seconds from now (RFC 9110, section 10.2.3); None for what is not understood."""
    if value is None:
        return None
    value = value.strip()
    if value.isdigit():
        return min(float(value), MOST_RETRY_S)
    with suppress(ValueError, TypeError, OverflowError):
        in_s = email.utils.parsedate_to_datetime(value.decode("latin-1")).timestamp() - time.time()
        return min(max(0.0, in_s), MOST_RETRY_S)
    return None
