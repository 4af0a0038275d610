"""Where the CPU time of a request goes, by step of its walk: `python -m tests.bench.walk [--streams] [--seconds 5]`.

The gateway, set up and loaded as in tests/bench/routers.py, runs in this process. Every millisecond of its CPU time a
signal looks at what is running, and counts it for the step of the innermost function that is the project's own; calls
into the kernel count for whoever makes them. The signals themselves cost some per cent, of every step alike.
"""

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

from app.gateway import Gateway
from app.logs import configure_logging
from app.settings import load_settings

from .http import AUTH, CLIENT_CORE, LIMITS, SERVER_CORE, WRK
from .routers import CONNECTIONS, EVENT_PAUSE_MS, MODEL, PATH, POOL, STREAMS, Bench, bench

SAMPLE_S = 0.001
ROOT = Path(__file__).parents[2]
# The first that a file's path begins with counts.
STEPS = {
    "app/connections.py": "the caller's connection",
    "app/exchange.py": "the answer's headers and form",
    "app/sse.py": "event stream to the caller",
    "app/logs.py": "log and metrics",
    "app/metrics.py": "log and metrics",
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


async def run(tools: Bench, streams: bool, seconds: int) -> tuple[Counter[str], float, int]:
    """Samples by step, seconds of CPU, and requests, or events."""
    folder, url = tools.folder, tools.upstream.url
    pools = "".join(POOL.format(name=name, url=url) for name in ("a", "b"))
    (folder / "walk.toml").write_text("[server]\nport = 0\n" + LIMITS + AUTH + MODEL + pools)
    configure_logging("json", "info", "error")
    gateway = Gateway(load_settings(folder / "walk.toml"))
    serving = asyncio.create_task(gateway.serve())
    await gateway.server.has_started.wait()
    gc.collect()
    gc.freeze()
    samples: Counter[str] = Counter()
    await finish(await load_of(tools, gateway.server.url, streams, 1))  # to warm up
    count, cpu_s = gateway.metrics.requests, time.process_time()
    signal.signal(signal.SIGPROF, lambda _, frame: samples.update([step_of(frame)]))
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    told = await finish(await load_of(tools, gateway.server.url, streams, seconds))
    signal.setitimer(signal.ITIMER_PROF, 0)
    cpu_s = time.process_time() - cpu_s
    count = json.loads(told)["events"] if streams else gateway.metrics.requests - count
    gateway.server.leave()
    await serving
    return samples, cpu_s, count


async def load_of(tools: Bench, url: str, streams: bool, seconds: int) -> asyncio.subprocess.Process:
    folder = tools.folder
    if streams:
        content = f"NUMBER-{time.time_ns()} [delay={EVENT_PAUSE_MS}]"
        body: dict[str, Any] = {"model": "mock", "temperature": 0, "stream": True}
        body["messages"] = [{"role": "user", "content": content}]
        (folder / "stream.json").write_text(json.dumps(body))
        tool, port = str(folder / "sse_load"), url.rpartition(":")[2]
        command = [tool, port, str(STREAMS), str(seconds), str(folder / "stream.json")]
        command.append(f"Authorization: Bearer {tools.token}")
    else:
        (folder / "bodies").write_text("\n".join(tools.whole) + "\n")
        (folder / "load.lua").write_text(WRK)
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(folder / "load.lua"), url + PATH]
    env = os.environ | {
        "BODIES": str(folder / "bodies"),
        "AUTH": f"Bearer {tools.token}",
        "UNIQUE": "1",
        "SALT": str(time.time_ns()),
    }
    command = ["taskset", "-c", str(CLIENT_CORE), *command]
    return await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)


async def finish(process: asyncio.subprocess.Process) -> str:
    out, _ = await process.communicate()
    return out.decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--seconds", type=int, default=5)
    arguments = parser.parse_args()
    with bench(arguments.seconds) as tools, tempfile.TemporaryFile("w") as log:
        os.sched_setaffinity(0, {SERVER_CORE})
        sys.stderr = log
        samples, cpu_s, count = uvloop.run(run(tools, arguments.streams, arguments.seconds))
        sys.stderr = sys.__stderr__
    each_us = cpu_s / count * 1e6
    print(f"{each_us:.1f} us of CPU for each of {count} {'events' if arguments.streams else 'requests'}")
    for step, number in samples.most_common():
        share = number / samples.total()
        print(f"{step:36} {share:6.1%} {share * each_us:8.1f} us")


if __name__ == "__main__":
    main()
