"""Where the CPU time of a request goes, by step of its walk: `python -m tests.bench.walk [--streams] [--seconds 5]`.

The gateway, set up and loaded as in tests/bench/routers.py, runs in this process. Every millisecond of its CPU time a
signal looks at what is running, and counts it for the step of the innermost function that is the project's own; calls
into the kernel count for whoever makes them. The signals themselves cost some per cent, of every step alike.
"""

import argparse
import asyncio
import gc
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import uvloop

from app.gateway import Gateway
from app.logs import configure_logging
from app.settings import load_settings

from .http import SERVER_CORE, Server
from .routers import PATH, Bench, bench, config

SAMPLE_S = 0.001
ROOT = Path(__file__).parents[2]
# The first that a file's path begins with counts.
STEPS = {
    "app/connections.py": "the caller's connection",
    "app/exchange.py": "the answer's headers and form",
    "app/sse.py": "event stream to the caller",
    "app/logs.py": "log and metrics",
    "app/metrics/counts.py": "log and metrics",
    "auth/authenticator.py": "who is calling",
    "auth/": "limits",
    "app/door.py": "door and life of a request",
    "app/landing.py": "door and life of a request",
    "app/lifecycle.py": "door and life of a request",
    "app/interruption.py": "door and life of a request",
    "app/pipeline.py": "understanding the request",
    "app/bodies.py": "understanding the request",
    "routing/split.py": "choice of the variant",
    "routing/hashing.py": "choice of the variant",
    "routing/models.py": "choice of the variant",
    "cache/key.py": "cache key",
    "cache/flight.py": "flight",
    "cache/assembly.py": "putting a stream together",
    "cache/": "cache look-up and storing",
    "app/answers.py": "cache look-up and storing",
    "routing/": "admission, balancing, breaker",
    "app/engines/http": "the engine's connection",
    "app/engines/": "request and answer of the engine",
}


def step_of(frame: FrameType | None) -> str:
    """The step of the innermost function that belongs to one."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)):
            name = path[len(str(ROOT)) + 1 :]
            for start, step in STEPS.items():
                if name.startswith(start):
                    return step
        frame = frame.f_back
    return "event loop"


class Here(Server):
    """The gateway in this process."""

    def __init__(self, url: str) -> None:
        self.url, self.path = url, PATH

    def cpu_s(self) -> float:
        return time.process_time()


async def run(tools: Bench, streams: bool) -> tuple[Counter[str], float]:
    """Samples by step, and requests, or events, per second of CPU."""
    file = tools.folder / "walk.toml"
    file.write_text("[server]\nport = 0\n" + config(tools.upstream.url))
    configure_logging("json", "info", "error")
    gateway = Gateway(load_settings(file))
    serving = asyncio.create_task(gateway.serve())
    await gateway.server.has_started.wait()
    gc.collect()
    gc.freeze()
    samples: Counter[str] = Counter()
    measure = tools.events_per_cpu_s if streams else tools.requests_per_cpu_s
    server = Here(gateway.server.url)
    await asyncio.to_thread(measure, server)  # to warm up
    signal.signal(signal.SIGPROF, lambda _, frame: samples.update([step_of(frame)]))
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    per_cpu_s = await asyncio.to_thread(measure, server)
    signal.setitimer(signal.ITIMER_PROF, 0)
    gateway.server.leave()
    await serving
    return samples, per_cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--seconds", type=int, default=5)
    arguments = parser.parse_args()
    with bench(arguments.seconds) as tools, tempfile.TemporaryFile("w") as log:
        os.sched_setaffinity(0, {SERVER_CORE})
        sys.stderr = log
        samples, per_cpu_s = uvloop.run(run(tools, arguments.streams))
        sys.stderr = sys.__stderr__
    each_us = 1e6 / per_cpu_s
    print(f"{each_us:.1f} us of CPU for each {'event' if arguments.streams else 'request'}")
    for step, number in samples.most_common():
        share = number / samples.total()
        print(f"{step:36} {share:6.1%} {share * each_us:8.1f} us")


if __name__ == "__main__":
    main()
