"""The command `headrace`."""

import argparse
import asyncio
import gc
import logging
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import tomli_w
import uvloop

from auth.api_keys import new_key
from routing.errors import EngineConfigError

from . import __version__
from .builtin_model import FetchError, fetch
from .logs import configure_logging
from .place import Place
from .security import SCOPES, digest_of, make_keys, prepare_development_secret
from .security import create_token as sign_token
from .settings import Settings, SettingsError, SettingsSource, caller_token, dump_settings, load_settings
from .warm_command import WarmingError, warm
from .workers import Workers, own_command

if TYPE_CHECKING:
    from .gateway import Gateway

logger = logging.getLogger("headrace")

EXAMPLE = """
Headrace is ready at {url} with the model {model}.

  export OPENAI_API_KEY={token}

  curl -N {url}/v1/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" \\
    -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "temperature": 0, "stream": true,
    "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{token}")
  question = [{{"role": "user", "content": "What is the capital of France?"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=question, temperature=0, stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

The token is good for {days} days; `headrace token create --preset development` makes others. Ctrl-C stops it.
"""


DEVELOPMENT_TTL_S = 30 * 86400


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except (SettingsError, EngineConfigError, FetchError, WarmingError) as exc:
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

    start = add(commands, "serve", "start the gateway")
    start.add_argument("--place", type=Place.load, help=argparse.SUPPRESS)  # for workers
    start.set_defaults(command=serve)
    config = commands.add_parser("config", help="look at the settings").add_subparsers(required=True, metavar="WHAT")
    add(config, "check", "check the settings, vLLM's options included").set_defaults(command=check_config)
    add(config, "show", "print the settings in force, secrets masked").set_defaults(command=show_config)
    token = commands.add_parser("token", help="tokens for callers").add_subparsers(required=True, metavar="WHAT")
    create = add(token, "create", "sign a token with the configured secret, and print it")
    create.set_defaults(command=create_token)
    _add_principal(create)
    create.add_argument("--ttl", type=_seconds, default=3600, help="how long it is good: 90s, 15m, 12h, 30d (1h)")
    key = commands.add_parser("key", help="API keys for callers").add_subparsers(required=True, metavar="WHAT")
    create = key.add_parser("create", help="make an API key, print it once, and what to configure for it")
    create.set_defaults(command=create_key)
    _add_principal(create)
    cached = commands.add_parser("cache", help="the response cache").add_subparsers(required=True, metavar="WHAT")
    help = "have a running gateway answer a file's requests, so that the answers are cached"
    warming = cached.add_parser("warm", help=help, description=help)
    warming.set_defaults(command=warm_cache)
    warming.add_argument("file", type=Path, help="JSON Lines: bodies of requests, or OpenAI's batch format")
    warming.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway (http://127.0.0.1:8000)")
    warming.add_argument("--token", help="one with the scopes inference and cache:admin ($OPENAI_API_KEY)")
    warming.add_argument("--rate", type=_rate, help="requests a second (the gateway's cache.warm_requests_per_s)")
    model = commands.add_parser("model", help="the built-in model").add_subparsers(required=True, metavar="WHAT")
    add(model, "fetch", "prepare the built-in model in the cache folder").set_defaults(command=fetch_model)
    return top


def _add_principal(command: argparse.ArgumentParser) -> None:
    command.add_argument("--subject", required=True, help="who calls with it")
    command.add_argument("--tenant", help="on whose behalf (the subject's own)")
    command.add_argument("--scope", action="append", choices=sorted(SCOPES), help="what for; repeatable (inference)")
    command.add_argument("--model", action="append", help="a model's name or glob; repeatable (all)")
    command.add_argument("--tier", help="the name of one of limits.tiers")
    command.add_argument("--priority", type=int, help="the greater goes first")


def _seconds(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]*)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 15m, 12h, or 30d")
    return int(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return rate


def serve(arguments: argparse.Namespace) -> int:
    source = SettingsSource(arguments.config, arguments.preset)
    settings = source.load()
    _configure_logging(settings)
    if arguments.place is not None:
        server = settings.server.model_copy(update={"workers": arguments.place.workers})  # the file may have changed
        return _serve(settings.model_copy(update={"server": server}), source, arguments.place)
    prepare_development_secret(settings)
    if settings.auth.mode == "off":
        logger.warning("authentication is off: who reaches %s may use the engines", settings.server.host)
    return _serve(settings, source) if settings.server.workers == 1 else _serve_with_workers(settings)


def _serve_with_workers(settings: Settings) -> int:
    make_keys(settings.auth)  # what is wrong with them is told once

    def greet(url: str) -> None:
        logger.info("listening on %s with %d workers", url, settings.server.workers)
        _show_example(settings, url)

    code = asyncio.run(Workers(settings.server, [*own_command(), "--place"], greet).run())
    logger.info("stopped")
    return code


def _serve(settings: Settings, source: SettingsSource, place: Place | None = None) -> int:
    from .gateway import Gateway  # the other commands do without, and are quicker for it

    async def run() -> None:
        gateway = Gateway(settings, source=source, place=place)
        gateway.reload_on_hangup()
        async with asyncio.TaskGroup() as group:
            guide = group.create_task(_guide(gateway, settings, is_worker=place is not None))
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


async def _guide(gateway: "Gateway", settings: Settings, is_worker: bool) -> None:
    """Say where to knock, as soon as somebody is at home; of workers, their parent does."""
    await gateway.server.has_started.wait()
    url = gateway.server.url
    if not is_worker:
        logger.info("listening on %s", url)
    if starts := [asyncio.create_task(engine.has_started.wait()) for engine in gateway.engines.values()]:
        await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
    # What is there by now stays; the garbage collector need not walk over it again and again while requests wait.
    gc.collect()
    gc.freeze()
    if not is_worker:
        _show_example(settings, url)


def _show_example(settings: Settings, url: str) -> None:
    if settings.preset == "development":
        token = _example_token(settings)
        model = settings.offered_models()[0].name
        print(EXAMPLE.format(url=url, model=model, token=token, days=DEVELOPMENT_TTL_S // 86400), flush=True)


def _example_token(settings: Settings) -> str:
    try:
        return sign_token(settings, subject="developer", ttl_s=DEVELOPMENT_TTL_S)
    except SettingsError:
        return "none" if settings.auth.mode == "off" else "YOUR-TOKEN"


def check_config(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments.config, arguments.preset)
    for pool in settings.pools:
        if pool.vllm is not None:
            from .engines.vllm_options import parse_options

            parse_options(pool.vllm, [pool.model_name])
    make_keys(settings.auth)
    print("The settings are good.")
    return 0


def show_config(arguments: argparse.Namespace) -> int:
    print(dump_settings(load_settings(arguments.config, arguments.preset)), end="")
    return 0


def create_token(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments.config, arguments.preset)
    prepare_development_secret(settings)
    token = sign_token(
        settings,
        arguments.subject,
        tenant=arguments.tenant,
        scopes=arguments.scope or ["inference"],
        models=arguments.model or [],
        ttl_s=arguments.ttl,
        tier=arguments.tier,
        priority=arguments.priority,
    )
    print(token)
    return 0


def create_key(arguments: argparse.Namespace) -> int:
    key = new_key()
    entry = {
        "sha256": digest_of(key),
        "subject": arguments.subject,
        "tenant": arguments.tenant,
        "scopes": arguments.scope or ["inference"],
        "models": arguments.model,
        "tier": arguments.tier,
        "priority": arguments.priority,
    }
    print(f"# The key, shown this once: {key}\n# For headrace.toml:")
    print(tomli_w.dumps({"auth": {"api_keys": [{name: value for name, value in entry.items() if value is not None}]}}))
    return 0


def warm_cache(arguments: argparse.Namespace) -> int:
    progress = warm(arguments.file, arguments.url, arguments.token or caller_token() or "none", arguments.rate)
    return 1 if progress.failed else 0


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
