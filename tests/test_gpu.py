"""What is told of GPUs: by a scripted NVML, since the machines that run this mostly have none."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from app.gpu import GpuError, Gpus, NoGpu, Nvml, Reading

from .conftest import serving, until

GIB = 1024**3


class ScriptedNvml:
    """Has pynvml's errors and constants, and the functions that are used, with the arguments that those take. `answers`
    is by a function's name without its `nvmlDevice…Get`, an error or what it returns; `broken` is by GPU."""

    def __init__(self, count: int | Exception = 1, **answers: Any) -> None:
        self.count = count
        self.broken: dict[int, Exception] = {}
        self.gate = threading.Event()  # a driver that hangs has it cleared
        self.gate.set()
        self.inits = self.shutdowns = 0
        self.answers = {
            "Name": "NVIDIA H100",
            "MemoryInfo": SimpleNamespace(total=80 * GIB, free=50 * GIB, used=30 * GIB),
            "UtilizationRates": SimpleNamespace(gpu=97, memory=40),
            "Temperature": 61,
            "TotalEccErrors": 0,
            "CurrentClocksEventReasons": pynvml.nvmlClocksEventReasonSwPowerCap,
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        self.gate.wait()
        if isinstance(self.count, Exception):
            raise self.count
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        self.gate.wait()
        if isinstance(self.count, Exception):
            raise self.count
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index in self.broken:
            raise self.broken[index]
        return f"handle {index}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self._answer("Name")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self._answer("MemoryInfo")

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._answer("UtilizationRates")

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._answer("Temperature")

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return self._answer("TotalEccErrors")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self._answer("CurrentClocksEventReasons")

    def _answer(self, name: str) -> Any:
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


def error(code: str) -> Exception:
    return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))


@asynccontextmanager
async def looking(nvml: Any, timeout_s: float = 10.0) -> AsyncIterator[Gpus]:
    gpus = Gpus(Nvml(nvml), every_s=0.01, timeout_s=timeout_s)
    task = asyncio.create_task(gpus.run())
    try:
        yield gpus
    finally:
        task.cancel()
        await asyncio.wait([task])


def told(gpus: Gpus) -> list[tuple[int | None, str, str | None]]:
    return [(gpu.index, gpu.status, gpu.last_error) for gpu in gpus.status()]


def test_scripted_functions_are_those_of_the_real_library() -> None:
    ours = [name for name in vars(ScriptedNvml) if name.startswith("nvml")]
    assert len(ours) == 10
    assert all(callable(getattr(pynvml, name)) for name in ours)


def test_everything_that_a_gpu_tells_is_read() -> None:
    nvml = Nvml(ScriptedNvml(count=2))
    assert nvml.count() == 2
    assert nvml.read(1) == Reading("NVIDIA H100", 30 * GIB, 80 * GIB, 97, 61, 0, ())
    assert nvml.read(1).trouble is None


@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION"])
def test_what_a_gpu_does_not_tell_is_none(code: str) -> None:
    silent = ("MemoryInfo", "UtilizationRates", "Temperature", "TotalEccErrors", "CurrentClocksEventReasons")
    nvml = Nvml(ScriptedNvml(**{name: error(code) for name in silent}))
    assert nvml.count() == 1
    assert nvml.read(0) == Reading("NVIDIA H100", None, None, None, None, None, ())


def test_slowed_clocks_and_memory_errors_are_trouble() -> None:
    heat = pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    hot = Nvml(ScriptedNvml(CurrentClocksEventReasons=heat))
    assert hot.count() == 1
    assert hot.read(0).trouble == "slowed down by hardware, hardware_heat"
    broken = Nvml(ScriptedNvml(TotalEccErrors=3))
    assert broken.count() == 1
    assert broken.read(0).trouble == "3 uncorrected memory errors since the driver was loaded"


@pytest.mark.parametrize("code", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED"])
def test_no_library_and_no_driver_are_no_gpu(code: str) -> None:
    with pytest.raises(NoGpu):
        Nvml(ScriptedNvml(count=error(code))).count()


def test_driver_that_failed_is_opened_anew() -> None:
    nvml = ScriptedNvml()
    driver = Nvml(nvml)
    assert driver.count() == driver.count() == 1
    assert (nvml.inits, nvml.shutdowns) == (1, 0)
    nvml.count = error("UNKNOWN")
    with pytest.raises(GpuError, match="Unknown Error"):
        driver.count()
    nvml.count = 1
    assert driver.count() == 1
    assert (nvml.inits, nvml.shutdowns) == (2, 1)


async def test_lost_gpu_is_down_with_what_was_known_of_it_and_the_other_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "headrace")
    nvml = ScriptedNvml(count=2)
    async with looking(nvml) as gpus:
        await until(lambda: told(gpus) == [(0, "ok", None), (1, "ok", None)])
        nvml.broken[1] = error("GPU_IS_LOST")
        await until(lambda: told(gpus) == [(0, "ok", None), (1, "down", "GPU is lost")])
        assert gpus.status()[1].reading == gpus.status()[0].reading
        assert all(gpu.latency_ms is not None for gpu in gpus.status())
        nvml.broken.clear()
        await until(lambda: told(gpus) == [(0, "ok", None), (1, "ok", None)])
    assert caplog.messages == ["gpu 1: GPU is lost", "gpu 1: answers again"]  # each once, in many looks


async def test_driver_that_cannot_be_opened_is_down_until_it_can() -> None:
    nvml = ScriptedNvml(count=error("LIB_RM_VERSION_MISMATCH"))
    async with looking(nvml) as gpus:
        await until(lambda: told(gpus) == [(None, "down", "RM has detected an NVML/RM version mismatch.")])
        nvml.count = 1
        await until(lambda: told(gpus) == [(0, "ok", None)])


async def test_hanging_driver_holds_nobody_up_and_is_told_of() -> None:
    nvml = ScriptedNvml()

    def threads() -> int:
        return [thread.name for thread in threading.enumerate()].count("gpu")

    async with looking(nvml, timeout_s=0.05) as gpus:
        await until(lambda: told(gpus) == [(0, "ok", None)])
        nvml.gate.clear()
        await until(lambda: told(gpus) == [(0, "down", "NVML has not answered within 0.05 s")])
        await asyncio.sleep(0.2)
        assert threads() == 1  # not one more for each look that was due
        nvml.gate.set()
        await until(lambda: told(gpus) == [(0, "ok", None)])
        nvml.gate.clear()
        await until(lambda: told(gpus)[0][1] == "down")
    nvml.gate.set()  # the look ends after those who wanted it
    await until(lambda: threads() == 0)


async def test_surprise_of_the_library_does_not_end_the_gateway() -> None:
    nvml = ScriptedNvml(Name=UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    async with looking(nvml) as gpus:
        await until(lambda: told(gpus) == [(0, "down", "unexpected UnicodeDecodeError")])
        nvml.count = "many"  # type: ignore[assignment]
        await until(lambda: told(gpus) == [(0, "down", "unexpected ValueError")])


def has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has a GPU")
async def test_machine_without_a_driver_has_no_component_and_no_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "headrace")
    gpus = Gpus()
    async with asyncio.timeout(10):
        await gpus.run()  # ends, rather than looking for ever
    assert gpus.status() == ()
    assert caplog.messages == []
    async with serving() as client:
        body = (await client.http.get("/health")).json()
    assert (body["status"], list(body["components"])) == ("ok", ["engine:demo"])
