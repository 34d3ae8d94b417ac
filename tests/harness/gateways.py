"""Gateways under a server of their own: in this process, or in one forked from one that has imported everything."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn

from proxy.bench.harness.servers import Server, Servers, free_port
from proxy.pipeline.gateway import Gateway
from proxy.server.uvicorn_server import server_for
from proxy.settings import Settings
from tests.harness.fake_engine import GENERATION, hint_of
from tests.harness.recording_worker import RecordingWorker

CHAT = "/v1/chat/completions"

SYSTEM = {"role": "system", "content": "You are a harbour pilot. " * 20}

SYSTEM_END = len(f"<system>{SYSTEM['content']}<user>")  # tokens, by the recording worker's count

# What a gateway says to the recording worker of a system prompt and a question: behind the opener of the last user
# message, and before the words that ask for an answer.
LAST_USER = "last:" + ",".join(str(ord(character)) for character in "<user>")

TURN_END = -len(GENERATION)


class OwnGateway(NamedTuple):
    """A started one."""

    url: str
    gateway: Gateway
    stop: Any  # call it to end the server before the test does


@contextlib.contextmanager
def own_gateway(*workers: RecordingWorker, **settings: Any) -> Iterator[OwnGateway]:
    """Before `workers`, which it looks at five times a second; without self-checks, unless `settings` want them."""
    settings = {"self_check_interval": 0, "health_interval": 0.2, "drain_timeout": 1, **settings}
    port = free_port()
    urls = tuple(worker.url for worker in workers)
    server: uvicorn.Server = server_for(
        Settings(worker=urls, port=port, **settings),
        {"version": 1, "disable_existing_loggers": False},
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the gateway did not start"
        thread.join(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join()

    try:
        yield OwnGateway(f"http://127.0.0.1:{port}", server.config.app.gateway, stop)
    finally:
        stop()


def start_gateway(servers: Servers, *workers: RecordingWorker, flags: tuple[str, ...] = ()) -> Server:
    server = servers.gateway(*workers, flags=flags)
    server.wait_until_ready("/ready", seconds=30)
    return server


def chat(question: str, **fields) -> dict:
    return {"model": "m", "messages": [dict(SYSTEM), {"role": "user", "content": question}], **fields}


def post(gateway: Server, body, path: str = CHAT, **options) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(gateway.url + path, content=content, timeout=30, **options)


def metric(gateway: Server, name: str) -> float:
    lines = httpx.get(gateway.url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and not line.startswith("#"))


def hint_at(worker: RecordingWorker) -> list[Any]:
    """The hint of the last request that came to `worker`."""
    return hint_of(json.loads(worker.requests[-1].body))


def compared(own: OwnGateway, checked: int, differs: int, hints_off: bool) -> None:
    """As if the self-check had come to this."""
    own.gateway.self_check.checked, own.gateway.self_check.differs = checked, differs
    own.gateway.pool.workers[0].hints_allowed = not hints_off


def knows_templates(gateway: Server) -> bool:
    """Whether it has learnt the chat templates of its workers."""
    workers = httpx.get(gateway.url + "/seamark/status").json()["workers"]
    return all(template["learnt"] for worker in workers for template in worker["templates"].values())


_FORKS = multiprocessing.get_context("forkserver")
# This module, too: a fork looks for `_serve` in it.
_FORKS.set_forkserver_preload(["proxy.cli", "proxy.server.uvicorn_server", "proxy.commands.serve", __name__])


class ForkedProcess(_FORKS.Process):
    """With as much of `subprocess.Popen` as servers need."""

    def __init__(self, command: Sequence[str], log: Path, constants: Mapping[str, Any]) -> None:
        settings = {name: value for name, value in os.environ.items() if not name.startswith("SEAMARK_")}
        super().__init__(target=_serve, args=(list(command), str(log), settings, dict(constants)), daemon=True)
        self.start()

    def poll(self) -> int | None:
        """The exit status once there is one."""
        return self.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("seamark", timeout or 0.0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """To the process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class GatewayForks(Servers):
    """Servers whose gateways are forks. `constants` replaces module constants in those that start next: their times."""

    # By their full names. A busy machine alone may exceed the defaults.
    PATIENCE: Mapping[str, float] = {
        "proxy.fleet.pool.FACTS_SECONDS": 30.0,
    }

    def __init__(self, folder: Path) -> None:
        """Logs go into `folder`."""
        super().__init__(folder)
        self.constants: dict[str, Any] = dict(self.PATIENCE)

    def start(self, name: str, port: int, command: Sequence[str], environment: Mapping[str, str]) -> Server:
        if name != "gateway":
            return super().start(name, port, command, environment)
        _, _, _, *arguments = command  # after `python -m proxy.cli`
        log = self._folder / f"{name}-{port}.log"
        server = Server(name, f"http://127.0.0.1:{port}", log, ForkedProcess(arguments, log, self.constants))
        self.started.append(server)
        return server


def _serve(command: list[str], log: str, environment: dict[str, str], constants: dict[str, Any]) -> None:
    """In the fork: be `seamark` with this command."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        owner = importlib.import_module(module)
        getattr(owner, constant)  # a name that has gone would change nothing
        setattr(owner, constant, value)
    from proxy.cli import main

    sys.argv = ["seamark", *command]
    sys.exit(main())
