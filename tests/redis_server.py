"""A real Redis on a free port, which tests may stop, freeze, and bring back."""

import asyncio
import contextlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 10


def free_port() -> int:
    """A port below those that the kernel gives to clients: to try such a one until somebody listens can connect the
    socket to itself."""
    while True:
        port = random.randrange(12_000, 22_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class RedisServer:
    def __init__(self, *options: str, tls: bool = False) -> None:
        self.port = free_port()
        self._options = options
        self._port_option = ["--port", "0", "--tls-port"] if tls else ["--port"]
        self._is_tls = tls
        self.url = f"redi{'ss' if tls else 's'}://127.0.0.1:{self.port}/0"
        self._folder = Path(tempfile.gettempdir()) / f"redis-{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty."""
        # A replica writes its master's data there, and a server loads what it finds.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        command = ["redis-server", *self._port_option, str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._folder), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server does not start"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                if self._is_tls:
                    return True
                connection.sendall(b"PING\r\n")
                return connection.recv(10).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def freeze(self) -> None:
        """As if it hung: connections stay open, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server(*options: str, tls: bool = False) -> Iterator[RedisServer]:
    server = RedisServer(*options, tls=tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class SlowProxy:
    """Passes bytes on to a port of loopback, each piece of an answer `delay_s` late."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._target = port

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_answer: bool) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    if is_answer and self.delay_s:
                        await asyncio.sleep(self.delay_s)
                    sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, upstream_writer, False), pump(upstream_reader, writer, True))


@asynccontextmanager
async def slow_proxy(port: int) -> AsyncIterator[tuple[SlowProxy, str]]:
    """The proxy, and the Redis URL under which it listens."""
    proxy = SlowProxy(port)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    try:
        yield proxy, f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()


@contextmanager
def redis_cluster(masters: int = 3) -> Iterator[str]:
    """Masters that share the slots; the URL for the gateway."""
    with ExitStack() as stack:
        servers = []
        for _ in range(masters):
            # The nodes' bus listens 10,000 above.
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            servers.append(stack.enter_context(redis_server(*options)))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", "0", "--cluster-yes"]
        subprocess.run(create, check=True, stdout=subprocess.DEVNULL, timeout=START_TIMEOUT_S)
        for server in servers:
            wait_until(lambda port=server.port: "cluster_state:ok" in ask(port, "cluster", "info"))
        yield f"redis+cluster://{','.join(addresses)}"


@dataclass
class Sentinels:
    """A master with a replica, and Sentinels that watch them."""

    url: str
    master: RedisServer
    replica: RedisServer

    def has_failed_over(self) -> bool:
        return "role:master" in ask(self.replica.port, "info", "replication")


@contextmanager
def redis_sentinels() -> Iterator[Sentinels]:
    with ExitStack() as stack:
        master = stack.enter_context(redis_server())
        replica = stack.enter_context(redis_server("--replicaof", "127.0.0.1", str(master.port)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [free_port() for _ in range(3)]
        for port in ports:
            config = folder / f"{port}.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor gw 127.0.0.1 {master.port} 2\n"
                "sentinel down-after-milliseconds gw 500\nsentinel failover-timeout gw 2000\n"
            )
            command = ["redis-server", str(config), "--sentinel"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        wait_until(lambda: ask(ports[0], "sentinel", "ckquorum", "gw").startswith("OK"))
        wait_until(lambda: "master_link_status:up" in ask(replica.port, "info", "replication"))
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield Sentinels(f"redis+sentinel://{addresses}/gw", master, replica)


def ask(port: int, *command: str) -> str:
    done = subprocess.run(["redis-cli", "-p", str(port), *command], capture_output=True, text=True, timeout=5)
    return done.stdout


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "Redis does not get ready"
        time.sleep(0.05)
