"""Gateway plus embedded engine against vLLM's own OpenAI server: same model, same options, same load, one run.

    python tests/bench/embedded.py [--rounds 5] [--chats 32] [--tokens 64]

Both servers run, warmed, and are loaded in turn with `--chats` streamed chats at once (the other is idle meanwhile), so
that whatever else the machine does strikes both. Printed: completed tokens per second and time to first token of each
round, and the ratios of their medians. Runs by hand, for some minutes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from app.builtin_model import fetch
from app.settings import default_cache_dir

MODEL = "bench"
OPTIONS = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 30}
START_TIMEOUT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(name: str, folder: Path, settings: str = "", kind: str = "headrace") -> Iterator[str]:
    """The URL of a server that is ready; `settings` are more of a gateway's."""
    port, path = free_port(), str(fetch(default_cache_dir()))
    if kind == "headrace":
        lines = [
            f"{key} = {json.dumps(value)}" for key, value in ({"model": path, "enforce_eager": True} | OPTIONS).items()
        ]
        config = folder / f"{name}.toml"
        config.write_text(
            f'[server]\nport = {port}\n[auth]\nmode = "off"\n[[models]]\nname = "{MODEL}"\npool = "p"\n'
            f'{settings}\n[[pools]]\nname = "p"\nengine = "vllm"\n[pools.vllm]\n' + "\n".join(lines)
        )
        command = [sys.executable, "-m", "app", "serve", "--config", str(config)]
        ready = f"http://127.0.0.1:{port}/health/ready"
    else:
        words = [word for key, value in OPTIONS.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--enforce-eager"]
        command += ["--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1", *words]
        ready = f"http://127.0.0.1:{port}/health"
    env = os.environ | {"VLLM_NO_USAGE_STATS": "1"}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(ready).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start:\n{(folder / f'{name}.log').read_text()[-3000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


async def chat(http: httpx.AsyncClient, number: int, tokens: int) -> tuple[float, int]:
    """Seconds to the first token, and tokens completed."""
    # The number stands first, so that no prefix is shared.
    message = {"role": "user", "content": f"{number}. Tell a story of a river, a mill, and number {number}."}
    body = {"model": MODEL, "messages": [message], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    started, first, completed = time.perf_counter(), 0.0, 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not first and '"content":"' in line:
                first = time.perf_counter() - started
            if '"choices":[]' in line:
                completed = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
    return first, completed


async def load(url: str, chats: int, tokens: int, offset: int) -> tuple[float, float]:
    """Tokens a second, and the median time to first token in seconds, of `chats` at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        started = time.perf_counter()
        results = await asyncio.gather(*(chat(http, offset + number, tokens) for number in range(chats)))
        took = time.perf_counter() - started
    return sum(completed for _, completed in results) / took, statistics.median(first for first, _ in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    rounds: dict[str, list[tuple[float, float]]] = {"vllm": [], "headrace": []}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(server(name, Path(folder), kind=name)) for name in rounds}
        for url in urls.values():
            asyncio.run(load(url, arguments.chats, 8, offset=10**6))  # warm
        for number in range(arguments.rounds):
            names = list(rounds) if number % 2 else list(rounds)[::-1]
            for name in names:
                result = asyncio.run(load(urls[name], arguments.chats, arguments.tokens, offset=number * 1000))
                rounds[name].append(result)
                print(
                    f"round {number + 1} {name:9}{result[0]:8.1f} tokens/s {result[1] * 1000:8.0f} ms to first",
                    flush=True,
                )
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in rounds.items()}
    for name, (rate, first) in medians.items():
        print(f"median  {name:9}{rate:8.1f} tokens/s {first * 1000:8.0f} ms to first")
    rate, first = (medians["headrace"][column] / medians["vllm"][column] for column in (0, 1))
    print(f"headrace / vllm: {rate:.3f} of its tokens/s, {first:.3f} times its time to first token")


if __name__ == "__main__":
    main()
