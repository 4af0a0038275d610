"""What can go wrong between the gateway and an engine. No HTTP here: app/errors.py translates."""


class RoutingError(Exception):
    """Base of this package's errors. Its text is shown to callers: no path, no prompt, no trace in it."""


# The caller's fault


class ModelNotFound(RoutingError):
    """No configured model has this name."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} does not exist.")
        self.model = model


class RequestRejected(RoutingError):
    """The engine refuses this request, and would again. `param` names the field, `None` when it is not one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(RequestRejected):
    """The prompt does not fit the model's context."""


class UnsupportedOperation(RoutingError):
    """The engine behind this model has no such operation."""


# The engine's fault


class EngineError(RoutingError):
    """The engine failed at this request; the next one may work."""


class EngineRefused(EngineError):
    """The engine does not do what the gateway asks of it, whatever the request is. Another one may, and this one is
    well."""


class EngineDied(EngineError):
    """The engine is gone, and every request with it."""


class EngineTimeout(EngineError):
    """The engine took too long. `phase` is what did: connect, first_byte, between_chunks, or total."""

    def __init__(self, phase: str, limit_s: float) -> None:
        what = {
            "connect": "could not be connected to",
            "first_byte": "did not begin to answer",
            "between_chunks": "stopped in the middle of its answer",
            "total": "did not end its answer",
        }
        super().__init__(f"The engine {what[phase]} within {limit_s:g} s.")
        self.phase = phase


class EngineUnreachable(EngineError):
    """No connection to the engine could be made; `retry_after_s` is a guess."""

    retry_after_s = 1.0


class EngineOverloaded(EngineError):
    """The engine has too much to do, as it says itself. `retry_after_s` is its own word, or None."""

    def __init__(self, retry_after_s: float | None) -> None:
        super().__init__("The engine behind this model has too much to do.")
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    """The engine cannot take requests now; `retry_after_s` is the best guess of when it will."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineConfigError(RoutingError):
    """The engine's settings are wrong: starting it again cannot help."""
