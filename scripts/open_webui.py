"""Open WebUI in front of the gateway: installs it into a virtual environment of its own, starts it, and with `--check`
uses it in a real Chromium, as a person would. docs/front-ends.md says what that shows."""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import tomli_w
from playwright.sync_api import Locator, Page, sync_playwright
from prometheus_client.parser import text_string_to_metric_families

from app.settings import caller_token

VERSION = "0.12.4"
PYTHONS = (3, 11), (3, 12)  # those that this version runs on
TORCH = "torch==2.13.0+cpu"  # needed by it, and used for nothing here; from where scripts/install.sh has it
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 300
STEPS = 10  # in which a text has to grow before it is taken for a stream
STORY = "The water runs down the headrace and turns the wheel. " * 40

FRONT_END = {
    "WEBUI_AUTH": "False",  # one user, without a login; it listens on loopback only
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "ENABLE_PERSISTENT_CONFIG": "false",  # else the address of the gateway at the first start goes before these
    "ENABLE_OLLAMA_API": "false",
    "RAG_EMBEDDING_ENGINE": "openai",  # else it loads a model of its own
    # Requests that nobody asked for, of which each chat would make several.
    "ENABLE_TITLE_GENERATION": "false",
    "ENABLE_TAGS_GENERATION": "false",
    "ENABLE_FOLLOW_UP_GENERATION": "false",
    "ENABLE_AUTOCOMPLETE_GENERATION": "false",
    # 25 KB of them with every question, for whatever the model is.
    "DEFAULT_MODEL_METADATA": json.dumps({"capabilities": {"builtin_tools": False}}),
    # Left to the model, answers are drawn by chance, and such are not cached.
    "DEFAULT_MODEL_PARAMS": json.dumps({"temperature": 0}),
}


class Failure(Exception):
    """Something could not be started, or is not as it should be; the text is one clear line."""


class Gateway(NamedTuple):
    url: str
    token: str

    def models(self) -> list[str]:
        answer = httpx.get(f"{self.url}/v1/models", headers={"authorization": f"Bearer {self.token}"}, timeout=10)
        return [model["id"] for model in answer.raise_for_status().json()["data"]]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def in_flight(self) -> float:
        return self.metric("headrace_requests_in_flight")

    def disconnected(self) -> float:
        return self.metric("headrace_requests_total", outcome="disconnected")

    def answers(self, outcome: str) -> float:
        return self.metric("headrace_cache_answers_total", outcome=outcome)


def main() -> int:
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with contextlib.ExitStack() as stack:
            folder = (arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).absolute()
            install(folder / "venv")
            gateway = stack.enter_context(gateway_of(arguments, folder))
            url = stack.enter_context(open_webui(folder, gateway, arguments.port or free_port()))
            print(f"Open WebUI {VERSION} is at {url}, in front of the gateway at {gateway.url}", flush=True)
            if arguments.check:
                check(url, gateway)
            else:
                print("Ctrl-C stops it.", flush=True)
                signal.pause()
    except Failure as exc:
        print(f"open_webui: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=f"Open WebUI {VERSION} in front of the gateway.")
    top.add_argument("--folder", type=Path, help="where it is installed, 3 GB, and keeps its chats (a temporary one)")
    top.add_argument("--port", type=int, help="where it listens (a free one)")
    top.add_argument("--gateway", help="a running one, such as http://127.0.0.1:8000 (starts one)")
    top.add_argument("--token", help="what lets in there ($OPENAI_API_KEY)")
    top.add_argument(
        "--engine", choices=["builtin", "scripted"], default="builtin", help="of the gateway that is started (builtin)"
    )
    top.add_argument("--check", action="store_true", help="use it in Chromium, tell what is seen, and end")
    return top


def install(venv: Path) -> None:
    done = venv / f"open-webui-{VERSION}"
    if done.exists():
        return
    print(f"Installing Open WebUI {VERSION}", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    run(find_python(), "-m", "venv", str(venv))
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if sys.platform == "linux" and subprocess.run([*pip, TORCH], capture_output=True).returncode:
        run(*pip, "--extra-index-url", TORCH_INDEX, TORCH)
    run(*pip, f"open-webui=={VERSION}")
    done.touch()


def find_python() -> str:
    for command in (sys.executable, "python3.12", "python3.11"):
        with contextlib.suppress(OSError, ValueError):
            code = "import sys; print(*sys.version_info[:2])"
            found = subprocess.run([command, "-c", code], capture_output=True, text=True).stdout
            if tuple(map(int, found.split())) in PYTHONS:
                return command
    raise Failure("Open WebUI needs Python 3.11 or 3.12; none of them was found")


def run(*command: str) -> None:
    if subprocess.run(command).returncode:
        raise Failure(f"this failed: {' '.join(command)}")


@contextlib.contextmanager
def gateway_of(arguments: argparse.Namespace, folder: Path) -> Iterator[Gateway]:
    if arguments.gateway:
        token = arguments.token or caller_token()
        if not token:
            raise Failure("a running gateway needs --token or $OPENAI_API_KEY")
        gateway = Gateway(arguments.gateway.rstrip("/").removesuffix("/v1"), token)
        try:
            gateway.models()
        except httpx.HTTPError as exc:
            raise Failure(f"the gateway cannot be used: {exc}") from exc
        yield gateway
        return
    port = free_port()
    settings: dict[str, Any] = {"preset": "development", "server": {"port": port}, "monitoring": {"log_format": "json"}}
    if arguments.engine == "scripted":
        settings["pools"] = [{"name": "demo", "engine": "scripted", "scripted": {"text": STORY, "token_s": 0.05}}]
    config = folder / "headrace.toml"
    config.write_text(tomli_w.dumps(settings))
    headrace = [sys.executable, "-m", "app"]
    create = [*headrace, "token", "create", "--config", str(config), "--subject", "open-webui", "--ttl", "30d"]
    token = subprocess.run(create, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    serve = [*headrace, "serve", "--config", str(config)]
    url = f"http://127.0.0.1:{port}"
    with running("the gateway", serve, ROOT, {}, folder / "gateway.log", f"{url}/health/ready"):
        yield Gateway(url, token)


@contextlib.contextmanager
def open_webui(folder: Path, gateway: Gateway, port: int) -> Iterator[str]:
    """Its address, once it answers."""
    env = {
        **FRONT_END,
        "OPENAI_API_BASE_URL": f"{gateway.url}/v1",
        "OPENAI_API_KEY": gateway.token,
        "DATA_DIR": str(folder / "data"),
        "WEBUI_SECRET_KEY": secrets.token_urlsafe(32),
    }
    command = [str(folder / "venv" / "bin" / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running("Open WebUI", command, folder, env, folder / "open-webui.log", f"{url}/health"):
        yield url


@contextlib.contextmanager
def running(name: str, command: list[str], folder: Path, env: dict[str, str], log: Path, health: str) -> Iterator[None]:
    print(f"Starting {name}; its log is {log}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | env, stdout=output, stderr=output)
    try:

        def is_well() -> bool:
            if process.poll() is not None:
                raise Failure(f"{name} ended:\n{log.read_text()[-2000:]}")
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(health, timeout=5).status_code == 200
            return False

        until(is_well, START_TIMEOUT_S, f"{name} does not answer:\n{log}")
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(
    condition: Callable[[], bool], timeout_s: float, otherwise: str, pause: Callable[[float], None] = time.sleep
) -> float:
    """Return the seconds that it took. Raises Failure."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise Failure(otherwise)
        pause(0.05)
    return time.monotonic() - began


# What a person would do


def check(url: str, gateway: Gateway) -> None:
    """Use it in Chromium, and print what is seen. Nobody else may use the gateway meanwhile. Raises Failure."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise Failure("chromium is not installed; scripts/system_packages.sh installs it")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=chromium) as browser:
        page = browser.new_page()
        # The release notes, which a new user is shown once, at a time of their own.
        page.add_locator_handler(page.get_by_role("button", name="Okay, Let's Go!"), lambda button: button.click())
        chats = Chats(page, url, gateway)
        chats.check_models()
        chats.check_stream_and_stop()
        chats.check_cache()
    print("All is as it should be.")


class Chats:
    def __init__(self, page: Page, url: str, gateway: Gateway) -> None:
        self._page = page
        self._url = url
        self._gateway = gateway
        self._model = gateway.models()[0]

    def check_models(self) -> None:
        self._new_chat()
        self._menu.click()
        options = self._page.get_by_role("option")
        options.first.wait_for()
        offered = [option.get_attribute("data-value") or "" for option in options.all()]
        self._page.keyboard.press("Escape")
        expected = self._gateway.models()
        if sorted(offered) != sorted(expected):
            raise Failure(f"the menu offers {offered}, and /v1/models {expected}")
        print(f"models: the menu offers {', '.join(offered)}, as /v1/models does")

    def check_stream_and_stop(self) -> None:
        disconnected = self._gateway.disconnected()
        self._ask(f"Write a long story about a river and a mill, number {secrets.token_hex(4)}.")
        lengths: list[int] = []

        def has_grown() -> bool:
            length = len(self._text())
            if length > (lengths[-1] if lengths else 0):
                lengths.append(length)
            return len(lengths) > STEPS

        took_s = self._until(has_grown, 60, "the answer does not grow")
        if self._gateway.in_flight() != 1:
            raise Failure("the answer was over before it could be stopped")
        grown = f"in {len(lengths)} steps from {lengths[0]} to {lengths[-1]} characters, {took_s:.1f} s"
        print(f"stream: the answer grows {grown}, one request in flight")

        self._page.get_by_role("button", name="Stop", exact=True).click()
        took_s = self._until(lambda: self._gateway.in_flight() == 0, 5, "the request goes on after the stop")
        self._until(
            lambda: self._gateway.disconnected() == disconnected + 1, 5, "the request was not counted as disconnected"
        )
        self._is_over()
        text = self._text()
        self._page.wait_for_timeout(1000)
        if self._text() != text or len(text) < lengths[-1]:
            raise Failure("the text is not what it was when the answer was stopped")
        print(f"stop: nothing in flight {took_s:.2f} s after the click, disconnected; {len(text)} characters stay")

    def check_cache(self) -> None:
        question = f"What is the capital of France? Answer number {secrets.token_hex(4)}."
        texts = []
        for outcome in ("miss", "hit"):
            before = self._gateway.answers(outcome)
            self._new_chat()
            self._ask(question)
            self._is_over()
            texts.append(self._text())
            self._until(lambda: self._gateway.in_flight() == 0, 5, "the request goes on after the answer")
            if self._gateway.answers(outcome) != before + 1:
                raise Failure(f"the answer was no {outcome}")
        if texts[0] != texts[1] or not texts[0]:
            raise Failure(f"two answers to one question: {texts[0]!r} and {texts[1]!r}")
        print(f"cache: one question in two new chats, a miss and a hit, both answered {texts[0][:60]!r}")

    @property
    def _menu(self) -> Locator:
        return self._page.locator("#model-selector-model-button")

    def _new_chat(self) -> None:
        self._page.goto(f"{self._url}/?models={self._model}")
        self._menu.filter(has_text=self._model).wait_for()

    def _ask(self, question: str) -> None:
        self._page.locator("#chat-input").fill(question)
        self._page.keyboard.press("Enter")

    def _text(self) -> str:
        """Of the answer, as far as it has come."""
        answers = self._page.locator("#response-content-container")
        return answers.last.inner_text().strip() if answers.count() else ""

    def _is_over(self) -> None:
        self._page.get_by_role("button", name="Regenerate").wait_for(timeout=120_000)

    def _until(self, condition: Callable[[], bool], timeout_s: float, otherwise: str) -> float:
        """As until(), while the page goes on."""
        return until(condition, timeout_s, otherwise, lambda pause_s: self._page.wait_for_timeout(pause_s * 1000))


if __name__ == "__main__":
    sys.exit(main())
