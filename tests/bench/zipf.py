"""What the cache is worth in front of a real engine, and what it costs where it is of no use.

    python -m tests.bench.zipf [--requests 600] [--questions 200] [--tokens 8] [--rounds 3]

Two gateways, each with the built-in model embedded, one with the cache and one without, are asked the same questions in
the same order, four at a time, one gateway after the other. First their popularity follows Zipf's law with exponent
1.1; then no question comes twice, in several rounds.
"""

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

import httpx
import psutil

from .embedded import MODEL, server

AT_ONCE = 4
EXPONENT = 1.1
OFF = "[cache]\nenabled = false\n[singleflight]\nscope = 'off'"


async def ask(http: httpx.AsyncClient, question: str, tokens: int) -> tuple[str, float]:
    """What the cache says, and seconds."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": tokens}
    started = time.perf_counter()
    answer = await http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.headers["cache-status"], time.perf_counter() - started


async def load(url: str, questions: list[str], tokens: int) -> list[tuple[str, float]]:
    places = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:

        async def one(question: str) -> tuple[str, float]:
            async with places:
                return await ask(http, question, tokens)

        return list(await asyncio.gather(*(one(question) for question in questions)))


def cpu_s(name: str) -> float:
    """What a gateway and its engine have used so far."""
    total = 0.0
    for process in psutil.Process().children():
        if f"{name}.toml" in " ".join(process.cmdline()):
            for member in (process, *process.children(recursive=True)):
                times = member.cpu_times()
                total += times.user + times.system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    weights = [1 / rank**EXPONENT for rank in range(1, arguments.questions + 1)]
    drawn = Random(1).choices(range(arguments.questions), weights, k=arguments.requests)
    asked = [f"Question {number}: where does the water of the mill run to?" for number in drawn]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        urls = {
            name: stack.enter_context(server(name, Path(folder), settings))
            for name, settings in (("on", ""), ("off", OFF))
        }
        for url in urls.values():
            asyncio.run(load(url, [f"Warm {number}" for number in range(8)], arguments.tokens))
        means = {}
        for name, url in urls.items():
            results = asyncio.run(load(url, asked, arguments.tokens))
            means[name] = statistics.mean(seconds for _, seconds in results)
            for kind in ("; hit", "collapsed", "; stored", "bypass"):
                times = [seconds * 1000 for told, seconds in results if kind in told]
                if times:
                    mean, median = statistics.mean(times), statistics.median(times)
                    print(
                        f"cache {name:3} {kind:10} {len(times):4} mean {mean:8.2f} ms, median {median:8.2f} ms",
                        flush=True,
                    )
            print(f"cache {name:3} mean of all {means[name] * 1000:.2f} ms", flush=True)
        print(f"mean latency {1 - means['on'] / means['off']:.1%} lower")
        ratios = []
        for number in range(arguments.rounds):
            rates = {}
            for name in list(urls)[:: 1 if number % 2 else -1]:
                unique = [f"{number}.{place}: where does the water of the mill run to?" for place in range(100)]
                before = cpu_s(name)
                asyncio.run(load(urls[name], unique, arguments.tokens))
                rates[name] = len(unique) / (cpu_s(name) - before)
            ratios.append(rates["on"] / rates["off"])
            print(f"all miss, requests per CPU-second: on {rates['on']:.2f}, off {rates['off']:.2f}", flush=True)
        print(f"all miss, on / off: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
