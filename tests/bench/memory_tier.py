"""How much memory the memory tier takes, against what it says.

    python -m tests.bench.memory_tier

For each eviction, in a process of its own: 200,000 answers of 1 KB, into a tier that just holds them, then a million
puts of 200 to 4,000 bytes. Printed: entries, bytes by the tier's own count, growth of resident memory, and its ratio to
`max_memory_bytes`. Then the time of a hit.
"""

import multiprocessing
import os
import random
import time
import timeit
from typing import Any

import psutil

from cache.entry import Entry
from cache.memory import MemoryTier

ENTRIES = 200_000
MAX_BYTES = 320 * 1024 * 1024
CHURN = 1_000_000


def entry(size: int) -> Entry:
    now = time.time()
    return Entry(b"chatcmpl-", os.urandom(8) * (size // 8), 1000, 3000, now, now + 3600)


def measure(eviction: Any) -> None:
    process = psutil.Process()
    tier = MemoryTier(ENTRIES, MAX_BYTES, eviction)
    before = process.memory_info().rss

    def show(what: str) -> None:
        stats, growth = tier.stats(), process.memory_info().rss - before
        counted = f"{stats.entries:8} {stats.size_bytes or 0:12}"
        print(f"{eviction:10} {what:8} {counted} {growth:12} {growth / MAX_BYTES:6.2f}", flush=True)

    for _ in range(ENTRIES):
        tier.put(os.urandom(48), entry(1000))
    show("filled")
    growth = process.memory_info().rss - before
    print(f"{'':10} besides objects: {(growth - ENTRIES * objects_of()) / ENTRIES:.0f} bytes an entry")
    for _ in range(CHURN):
        tier.put(os.urandom(48), entry(random.randint(200, 4000)))
    show("churned")
    key = os.urandom(48)
    tier.put(key, entry(1000))
    print(f"{'':10} a hit takes {timeit.timeit(lambda: tier.get_nowait(key), number=200_000) * 5000:.0f} ns")


def objects_of() -> int:
    tier = MemoryTier(1, MAX_BYTES, "lru")
    return tier._size_of(entry(1000)) - tier._overhead_bytes


def main() -> None:
    print(f"max_memory_bytes is {MAX_BYTES}")
    print(f"{'eviction':10} {'':8} {'entries':>8} {'counted':>12} {'resident':>12}  ratio")
    context = multiprocessing.get_context("spawn")
    for eviction in ("lru", "lfu", "adaptive"):
        process = context.Process(target=measure, args=(eviction,))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
