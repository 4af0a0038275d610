"""What can go wrong with answers that are shared. No HTTP here: app/errors.py translates."""


class CacheError(Exception):
    """Base of this package's errors. Its text is shown to callers."""


class NotInCache(CacheError):
    """The caller wanted a stored answer or none, and there is none."""

    def __init__(self) -> None:
        super().__init__("The answer is not in the cache, and the request says only-if-cached.")


class StreamGone(CacheError):
    """The stream that the caller wants to read on in is not there, not theirs, or over for too long."""

    def __init__(self) -> None:
        super().__init__(
            "There is no stream of yours that could be read on from this Last-Event-ID; send the request without it."
        )


class FlightAborted(Exception):
    """Nobody waited for the flight any more, or the gateway is on its way out."""


class Diverged(CacheError):
    """An answer that should be the same as one that was begun before is another one."""

    def __init__(self) -> None:
        super().__init__("The answer could not be continued as it began.")
