"""The GPUs of this machine, as NVML (NVIDIA's management library) tells of them; none where it has no driver.

NVML's calls block, for milliseconds mostly, and for ever when a driver hangs. So they are made in a thread, once every
few seconds, and nobody else waits for it: not a request, nor the end of the process.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

logger = logging.getLogger("headrace")

T = TypeVar("T")

EVERY_S = 5.0
TIMEOUT_S = 10.0
# Those of NVML's clock event reasons that tell of trouble; idle clocks and the power cap are part of normal work.
SLOWDOWNS = {
    "hardware": "nvmlClocksEventReasonHwSlowdown",
    "hardware_heat": "nvmlClocksEventReasonHwThermalSlowdown",
    "hardware_power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
    "heat": "nvmlClocksEventReasonSwThermalSlowdown",
}


class NoGpu(Exception):
    """There is no driver, so there is nothing to tell of."""


class GpuError(Exception):
    """A driver that cannot be asked, or a GPU that does not answer; the text says why, for people."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a GPU is at. None: this one does not tell. `utilization_percent` is the share of the time, since NVML's last
    look of up to a second, in which a kernel ran; `uncorrected_ecc_errors` are those since the driver was loaded;
    `slowed_by` names what holds its clock down now, apart from the power cap."""

    name: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization_percent: int | None
    temperature_c: int | None
    uncorrected_ecc_errors: int | None
    slowed_by: tuple[str, ...]

    @property
    def trouble(self) -> str | None:
        if self.uncorrected_ecc_errors:
            return f"{self.uncorrected_ecc_errors} uncorrected memory errors since the driver was loaded"
        return f"slowed down by {', '.join(self.slowed_by)}" if self.slowed_by else None


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """`latency_ms`: how long the last look at it took. `reading` None: there was none yet. `index` None: this is about
    the driver, and the GPUs behind it are not known."""

    index: int | None
    status: Literal["ok", "degraded", "down"]
    latency_ms: float | None
    last_error: str | None
    reading: Reading | None


class Driver(Protocol):
    """Every method may block."""

    def count(self) -> int:
        """How many GPUs there are, numbered from 0. Raises: NoGpu, GpuError."""
        ...

    def read(self, index: int) -> Reading:
        """Raises: GpuError."""
        ...


class Nvml:
    """`module` is pynvml, or what has its functions, constants, and errors; None: pynvml, loaded when it is needed."""

    def __init__(self, module: Any = None) -> None:
        self._module = module
        self._is_open = False

    def count(self) -> int:
        nvml = self._loaded()
        try:
            if not self._is_open:
                nvml.nvmlInit()
                self._is_open = True
            return int(nvml.nvmlDeviceGetCount())
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as exc:
            raise NoGpu from exc
        except nvml.NVMLError as exc:
            self._close()  # the next look begins anew
            raise GpuError(str(exc)) from exc

    def read(self, index: int) -> Reading:
        nvml = self._loaded()
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = self._if_told(nvml.nvmlDeviceGetMemoryInfo, gpu)
            rates = self._if_told(nvml.nvmlDeviceGetUtilizationRates, gpu)
            uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
            reasons = self._if_told(nvml.nvmlDeviceGetCurrentClocksEventReasons, gpu) or 0
            return Reading(
                name=nvml.nvmlDeviceGetName(gpu),
                memory_used_bytes=None if memory is None else memory.used,
                memory_total_bytes=None if memory is None else memory.total,
                utilization_percent=None if rates is None else rates.gpu,
                temperature_c=self._if_told(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
                uncorrected_ecc_errors=self._if_told(nvml.nvmlDeviceGetTotalEccErrors, gpu, *uncorrected),
                slowed_by=tuple(name for name, bit in SLOWDOWNS.items() if reasons & getattr(nvml, bit)),
            )
        except nvml.NVMLError as exc:
            raise GpuError(str(exc)) from exc

    def _loaded(self) -> Any:
        if self._module is None:
            import pynvml  # takes 40 ms, so in the thread

            self._module = pynvml
        return self._module

    def _if_told(self, ask: Callable[..., T], *arguments: Any) -> T | None:
        """None: this GPU, its driver, or its owner does not tell. MIG and consumer cards lack some of it all."""
        nvml = self._module
        try:
            return ask(*arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
            return None

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            with suppress(self._module.NVMLError):
                self._module.nvmlShutdown()


class Gpus:
    """Looks at them every `every_s` seconds, as long as it runs. One look at a time: while a driver keeps one waiting
    for more than `timeout_s`, what was known of its GPUs stands, but as down."""

    def __init__(self, driver: Driver | None = None, every_s: float = EVERY_S, timeout_s: float = TIMEOUT_S) -> None:
        self._driver = driver or Nvml()
        self._every_s = every_s
        self._timeout_s = timeout_s
        # Mutable state, changed by `_note` only.
        self._known: tuple[GpuStatus, ...] = ()

    def status(self) -> tuple[GpuStatus, ...]:
        """As of the last look, which is waited for by nobody; empty where there is no GPU, or no look is over yet."""
        return self._known

    async def run(self) -> None:
        """Until cancelled, or until there turns out to be no driver."""
        while True:
            look = in_own_thread(self._look)
            try:
                while not look.done():
                    await asyncio.wait([look], timeout=self._timeout_s)
                    if not look.done():
                        self._note_all_down(f"NVML has not answered within {self._timeout_s:g} s")
            finally:
                look.cancel()
            try:
                self._note(look.result())
            except NoGpu:
                return
            except Exception as exc:
                self._note_all_down(words_for(exc))
            await asyncio.sleep(self._every_s)

    def _look(self) -> list[GpuStatus]:
        """In the thread. Raises: NoGpu, GpuError."""
        return [self._look_at(index) for index in range(self._driver.count())]

    def _look_at(self, index: int) -> GpuStatus:
        began = time.perf_counter()
        try:
            reading = self._driver.read(index)
        except Exception as exc:
            last = next((known for known in self._known if known.index == index), None)
            return down(GpuStatus(index, "ok", None, None, None) if last is None else last, words_for(exc))
        latency_ms = round((time.perf_counter() - began) * 1000, 3)
        return GpuStatus(index, "degraded" if reading.trouble else "ok", latency_ms, reading.trouble, reading)

    def _note_all_down(self, error: str) -> None:
        known = self._known or (GpuStatus(None, "ok", None, None, None),)
        self._note([down(gpu, error) for gpu in known])

    def _note(self, gpus: list[GpuStatus]) -> None:
        before = {gpu.index: gpu.status for gpu in self._known}
        self._known = tuple(gpus)
        for gpu in gpus:
            name = "driver" if gpu.index is None else gpu.index
            was_down = before.get(gpu.index) == "down"
            if gpu.status == "down" and not was_down:
                logger.warning("gpu %s: %s", name, gpu.last_error)
            elif gpu.status != "down" and was_down:
                logger.info("gpu %s: answers again", name)


def down(gpu: GpuStatus, error: str) -> GpuStatus:
    return GpuStatus(gpu.index, "down", gpu.latency_ms, error, gpu.reading)


def words_for(exc: Exception) -> str:
    """GpuError, or whatever else comes out of a foreign library: none of it is to end the gateway."""
    return str(exc) if isinstance(exc, GpuError) else f"unexpected {type(exc).__qualname__}"


def in_own_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Have it done by a thread that, unlike an executor's, the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(set_result: Callable[[], None]) -> None:
        if not result.done():
            set_result()

    def run() -> None:
        try:
            told = partial(result.set_result, work())
        except Exception as exc:
            told = partial(result.set_exception, exc)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, told)

    threading.Thread(target=run, name="gpu", daemon=True).start()
    return result
