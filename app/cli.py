"""The command `headrace`."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import uvloop

from routing.errors import EngineConfigError

from . import __version__
from .builtin_model import FetchError, fetch
from .logs import configure_logging
from .settings import Settings, SettingsError, dump_settings, load_settings

if TYPE_CHECKING:
    from .gateway import Gateway

logger = logging.getLogger("headrace")

EXAMPLE = """
Headrace is ready at {url} with the model {model}.

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "temperature": 0, "stream": true,
    "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  question = [{{"role": "user", "content": "What is the capital of France?"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=question, temperature=0, stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

Ctrl-C stops it.
"""


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except (SettingsError, EngineConfigError, FetchError) as exc:
        print(f"headrace: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="headrace", description="The gateway in front of vLLM engines.")
    top.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(
        where: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, help: str
    ) -> argparse.ArgumentParser:
        command = where.add_parser(name, help=help, description=help)
        command.add_argument(
            "--config", type=Path, help="the settings file (default: headrace.toml where there is one)"
        )
        command.add_argument("--preset", choices=["development", "production"], help="used when the file names none")
        return command

    add(commands, "serve", "start the gateway").set_defaults(command=serve)
    config = commands.add_parser("config", help="look at the settings").add_subparsers(required=True, metavar="WHAT")
    add(config, "check", "check the settings, vLLM's options included").set_defaults(command=check_config)
    add(config, "show", "print the settings in force, secrets masked").set_defaults(command=show_config)
    model = commands.add_parser("model", help="the built-in model").add_subparsers(required=True, metavar="WHAT")
    add(model, "fetch", "prepare the built-in model in the cache folder").set_defaults(command=fetch_model)
    return top


def serve(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments.config, arguments.preset)
    _configure_logging(settings)
    from .gateway import Gateway  # the other commands do without, and are quicker for it

    if settings.server.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("there is no authentication: who reaches %s may use the engines", settings.server.host)

    async def run() -> None:
        gateway = Gateway(settings)
        async with asyncio.TaskGroup() as group:
            guide = group.create_task(_guide(gateway, settings))
            try:
                await gateway.serve()
            finally:
                guide.cancel()

    try:
        uvloop.run(run())
    except* (SettingsError, EngineConfigError) as group:
        raise group.exceptions[0] from None
    logger.info("stopped")
    return 0


async def _guide(gateway: "Gateway", settings: Settings) -> None:
    """Say where to knock, as soon as somebody is at home."""
    await gateway.server.has_started.wait()
    url = gateway.server.url
    logger.info("listening on %s", url)
    await asyncio.wait(
        [asyncio.create_task(engine.has_started.wait()) for engine in gateway.engines.values()],
        return_when=asyncio.FIRST_COMPLETED,
    )
    if settings.preset == "development":
        print(EXAMPLE.format(url=url, model=settings.offered_models()[0].name), flush=True)


def check_config(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments.config, arguments.preset)
    for pool in settings.pools:
        if pool.vllm is not None:
            from .engines.vllm_options import parse_options

            parse_options(pool.vllm, [pool.model_name])
    print("The settings are good.")
    return 0


def show_config(arguments: argparse.Namespace) -> int:
    print(dump_settings(load_settings(arguments.config, arguments.preset)), end="")
    return 0


def fetch_model(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments.config, arguments.preset or "development")
    _configure_logging(settings)
    print(fetch(settings.cache_dir))
    return 0


def _configure_logging(settings: Settings) -> None:
    monitoring = settings.monitoring
    configure_logging(monitoring.log_format, monitoring.log_level, monitoring.engine_log_level)


def _exit_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)  # runs the clean-up of whatever is under way, which the default does not
