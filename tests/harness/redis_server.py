"""A Redis server of one's own, to be frozen, filled and killed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import redis

from proxy.commands.render_server import free_port

START_SECONDS = 10.0


class RedisServer:
    """A started server that keeps nothing on disk. Raises `RuntimeError` where Redis is not installed."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, after a `kill` again and empty, on the same port."""
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("redis-server is not installed")
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp"]
        self._process = subprocess.Popen(
            [program, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError("redis-server did not start")
            time.sleep(0.02)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def freeze(self) -> None:
        """From now on connections are accepted and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on."""
        self._process.send_signal(signal.SIGCONT)

    def fill(self) -> None:
        """From now on there is no room for another write, and nothing is evicted."""
        with redis.Redis.from_url(self.url) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)

    def make_room(self) -> None:
        """As much as anybody wants."""
        with redis.Redis.from_url(self.url) as client:
            client.config_set("maxmemory", 0)

    def kill(self) -> None:
        """End it at once, frozen or not."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server that ends at the end, in whatever state it is."""
    server = RedisServer()
    try:
        yield server
    finally:
        server.kill()
