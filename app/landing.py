"""A request that waits for a flight without a task of its own: most whole answers need nothing else."""

from typing import Protocol

from starlette.types import Receive

from .answers import Place
from .connections import Line
from .exchange import Exchange
from .lifecycle import Running
from .logs import log_failure
from .pipeline import Caller


class Ground(Protocol):
    """Where answers leave from."""

    def land(self, exchange: Exchange, caller: Caller, place: Place, line: Line) -> bool:
        """Send the answer of a flight that went well, and account for it; False: not like this."""
        ...

    async def see_landing(
        self, exchange: Exchange, caller: Caller, place: Place, running: Running, receive: Receive
    ) -> None:
        """The same by a task, whatever the flight comes to."""
        ...


class Landing:
    """Hands over to a task when the flight fails, the caller leaves, or the gateway ends the request."""

    __slots__ = ("_caller", "_exchange", "_ground", "_is_over", "_line", "_place", "_receive", "_running")

    def __init__(
        self,
        ground: Ground,
        exchange: Exchange,
        caller: Caller,
        place: Place,
        running: Running,
        receive: Receive,
        line: Line,
    ) -> None:
        self._ground = ground
        self._exchange = exchange
        self._caller = caller
        self._place = place
        self._running = running
        self._receive = receive
        self._line = line
        self._is_over = False

    def wait(self) -> None:
        """The flight must not be over."""
        self._running.begin()
        self._place.flight.when_over(self._land)
        self._running.when_stopped(self._hand_over)
        self._line.when_gone(self._hand_over)

    def _land(self) -> None:
        if self._is_over:
            return
        try:
            has_landed = self._place.flight.error is None and self._ground.land(
                self._exchange, self._caller, self._place, self._line
            )
        except Exception as exc:  # this is called by the flight, which is not to fail for it
            log_failure(self._exchange.access, exc)
            has_landed = False
        if has_landed:
            self._let_go()
            self._running.finish()
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        self._let_go()
        self._line.spawn(self._see())

    def _let_go(self) -> None:
        self._is_over = True
        self._running.when_stopped(None)
        self._line.when_gone(None)

    async def _see(self) -> None:
        try:
            await self._ground.see_landing(self._exchange, self._caller, self._place, self._running, self._receive)
        finally:
            self._running.finish()
