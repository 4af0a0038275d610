"""The examples of the README and of the terminal, pasted as they are."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .conftest import MODEL, Process

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def run(command: list[str], **env: str) -> str:
    environment = os.environ | env
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment).stdout


def run_python(code: str, **env: str) -> str:
    return run([sys.executable, "-c", code], **env)


def run_shell(code: str, **env: str) -> str:
    return run(["bash", "-c", code], **env)


def moved(code: str, process: Process) -> str:
    """The example for the test's port."""
    assert "http://127.0.0.1:8000" in code
    return code.replace("http://127.0.0.1:8000", process.url)


def test_readme_examples_work_as_pasted(gateway: Process) -> None:
    python = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len([line for line in python.splitlines() if line]) == 5
    assert len(run_python(moved(python, gateway), OPENAI_API_KEY=gateway.token).split()) > 2
    curl = re.search(r"```sh\n(.*?)```", README, re.DOTALL).group(1)
    output = run_shell(moved(curl, gateway), OPENAI_API_KEY=gateway.token)
    assert output.endswith("data: [DONE]\n\n")
    assert '"content":' in output


def test_terminal_examples_work_as_pasted(gateway: Process) -> None:
    text = gateway.log.read_text()
    assert f"Headrace is ready at {gateway.url} with the model {MODEL}." in text
    curl = re.search(r"^  export OPENAI_API_KEY=.*?\n\n  curl .*?\n\n", text, re.DOTALL | re.MULTILINE).group(0)
    assert run_shell(textwrap.dedent(curl)).endswith("data: [DONE]\n\n")
    python = re.search(r"^  from openai .*?\n\n", text, re.DOTALL | re.MULTILINE).group(0)
    assert len(python.strip().splitlines()) == 5
    assert len(run_python(textwrap.dedent(python)).split()) > 2


@pytest.mark.parametrize("target", ["serve", "test"])
def test_make_installs_nothing_a_second_time(target: str) -> None:
    root = Path(__file__).parent.parent.parent
    plan = subprocess.run(["make", "--dry-run", target], cwd=root, capture_output=True, text=True, check=True)
    assert "install" not in plan.stdout
    assert "headrace model fetch" in plan.stdout
