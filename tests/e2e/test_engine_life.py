"""Real engines that are killed, restarted, drained, and misconfigured."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from .conftest import MODEL, QUESTION, Process, gateway_process, wait_for

LONG = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}


def statuses(process: Process) -> dict[str, str]:
    return {
        name: part.get("state", part["status"])
        for name, part in process.http.get("/health").json()["components"].items()
    }


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_killed_engine_is_noticed_told_and_started_again_then_drained_without_leftovers(tmp_path: Path) -> None:
    drain = "[server]\ndrain = { settle_s = 1, drain_s = 60 }\n"
    with gateway_process(tmp_path, drain) as process, process.openai() as client:
        process.wait_until_ready()
        assert "engine local: ready after" in process.log.read_text()

        # Its process is killed under a stream.
        stream = client.completions.create(model=MODEL, prompt="One", stream=True, **LONG)
        next(iter(stream))
        core = next(item for item in process.engine_processes() if "EngineCore" in item.name())
        core.kill()
        killed = time.monotonic()
        with pytest.raises(openai.APIError) as cut:
            list(stream)
        assert cut.value.code == "engine_unavailable"
        wait_for(lambda: statuses(process)["engine:local"] != "ready", 5, "shown in health within 5 s")
        assert time.monotonic() - killed < 5
        assert process.http.get("/health/ready").status_code == 503
        response = process.http.post("/v1/chat/completions", json={"model": MODEL, "messages": QUESTION})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert 1 <= int(response.headers["retry-after"]) < 120
        process.wait_until_ready(120)
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert process.metric('headrace_engine_restarts_total{pool="local"}') == 1

        # And so is the one that computes, while nobody asks.
        worker = next(item for item in process.engine_processes() if "Worker" in item.name())
        worker.kill()
        wait_for(lambda: statuses(process)["engine:local"] != "ready", 5, "noticed while idle")
        process.wait_until_ready(120)

        # SIGTERM: the running stream finishes, and nothing stays behind.
        engine_processes = process.engine_processes()
        assert engine_processes
        with ThreadPoolExecutor() as pool:
            options = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
            usage = {"stream_options": {"include_usage": True}}
            stream = client.completions.create(model=MODEL, prompt="One", stream=True, **options, **usage)
            next(iter(stream))
            rest = pool.submit(list, stream)
            process.popen.send_signal(signal.SIGTERM)
            assert rest.result()[-1].usage.completion_tokens == 100
        assert process.popen.wait(30) == 0
        assert all(is_gone(item) for item in engine_processes)
        assert "Traceback" not in process.log.read_text().rpartition("stopping (SIGTERM)")[2]


def test_engine_processes_follow_a_killed_gateway_and_a_stop_during_the_start_is_clean(tmp_path: Path) -> None:
    with gateway_process(tmp_path) as process:
        process.wait_until_ready()
        engine_processes = process.engine_processes()
        assert len(engine_processes) >= 2
        process.popen.kill()
        wait_for(lambda: all(is_gone(item) for item in engine_processes), 5, "they ended")
    with gateway_process(tmp_path) as process:
        wait_for(lambda: bool(process.log.exists() and "listening on" in process.log.read_text()), 20, "it listens")
        assert process.http.get("/health/live").status_code == 200
        assert process.http.get("/health/ready").status_code == 503
        assert process.http.get("/health").json()["status"] == "starting"
        response = process.http.post("/v1/chat/completions", json={"model": MODEL, "messages": QUESTION})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        wait_for(lambda: bool(process.engine_processes()), 60, "the engine's process starts")
        engine_processes = process.engine_processes()
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(30) == 0
        assert all(is_gone(item) for item in engine_processes)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "max_modle_len = 100",
            "max_modle_len: not an option of vLLM's that a pool can have (did you mean 'max_model_len'?)",
        ),
        ("port = 1", "port: not an option"),
        ("enable_log_requests = true", "enable_log_requests: not an option"),
        ('dtype = "float33"', "dtype"),
        ('max_model_len = "many"', "max-model-len"),
        ("max_model_len = 10000000", "max_model_len"),
        ('tool_call_parser = "nope"', "nope"),
    ],
)
def test_wrong_option_stops_the_start_with_one_clear_line(tmp_path: Path, option: str, message: str) -> None:
    config = f'[[pools]]\nname = "p"\nengine = "vllm"\n[pools.vllm]\nmodel = "builtin"\n{option}\n'
    with gateway_process(tmp_path, config) as process:
        assert process.popen.wait(90) == 1
        last = process.log.read_text().strip().splitlines()[-1]
        assert last.startswith("headrace: ")
        assert message in last
        assert "Traceback" not in process.log.read_text()


def test_model_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with gateway_process(tmp_path, HEADRACE__POOLS__0__VLLM__MODEL=str(tmp_path / "nothing")) as process:
        assert process.popen.wait(90) == 1
        assert "nothing" in process.log.read_text().strip().splitlines()[-1]


def test_config_check_knows_vllms_options(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    options = 'dtype = "float32"\nmax_model_len = 512\nenable_prefix_caching = false\nhf_overrides = {a = 1}\n'
    for more, code in (("", 0), ("dtipe = 1", 1)):
        pool = f'[[pools]]\nname = "p"\nengine = "vllm"\n[pools.vllm]\nmodel = "x"\n{options}{more}\n'
        file.write_text(f'[auth]\nmode = "off"\n{pool}')
        command = [sys.executable, "-m", "app", "config", "check", "--config", str(file)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == code, result.stderr
    assert "did you mean 'dtype'?" in result.stderr


def fetch(cache: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "app", "model", "fetch"]
    return subprocess.Popen(
        command,
        env=os.environ | {"HEADRACE__CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_interrupted_fetch_of_the_model_leaves_nothing_half_made(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for sig in (signal.SIGTERM, signal.SIGKILL):
        process = fetch(tmp_path)
        wait_for(lambda: any(models.glob(".partial-*/whole/*")), 120, "it converts")
        process.send_signal(sig)
        process.communicate()
        assert process.returncode != 0
        assert [path for path in models.iterdir() if not path.name.startswith(".")] == []
    both = [fetch(tmp_path), fetch(tmp_path)]  # the second one waits for the first
    outputs = [process.communicate(timeout=200)[0].strip() for process in both]
    assert outputs == [str(models / MODEL)] * 2
    assert sorted(path.name for path in models.iterdir()) == [".lock", MODEL]
    assert (models / MODEL / "model.safetensors").stat().st_size > 260_000_000
    assert "converting" not in fetch(tmp_path).communicate()[1]
