"""A vLLM plugin: ends an engine's processes when the gateway that started them is gone.

A gateway that is killed (`kill -9`, out of memory) cannot stop its engines, and without this they would live on and
keep the accelerator's memory. vLLM calls `follow_parent` in each of its processes (entry point `vllm.general_plugins`).
"""

import multiprocessing
import os
import threading


def follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="headrace-follow-parent", daemon=True).start()
