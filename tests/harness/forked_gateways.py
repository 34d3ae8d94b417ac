"""Gateways in processes forked from one that has imported everything: they start in a third of the time."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxy.bench.harness.servers import Server, Servers

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["proxy.cli", "proxy.server.app", "proxy.server.uvicorn_server", "proxy.commands.serve"])


class ForkedProcess:
    """As much of `subprocess.Popen` as servers need."""

    def __init__(self, command: Sequence[str], log: Path, constants: Mapping[str, Any]) -> None:
        settings = {name: value for name, value in os.environ.items() if not name.startswith("SEAMARK_")}
        about = (list(command), str(log), settings, dict(constants))
        self._process = _FORKS.Process(target=_serve, args=about, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status once there is one."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("seamark", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """To the process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


class GatewayForks(Servers):
    """Servers whose gateways are forks. `constants` replaces module constants in those that start next: their times."""

    # By their full names. A busy machine alone may exceed the defaults.
    PATIENCE: Mapping[str, float] = {
        "proxy.pipeline.prompt_reader.DATE_SECONDS": 30.0,
        "proxy.fleet.pool.FACTS_SECONDS": 30.0,
    }

    def __init__(self, folder: Path) -> None:
        """Logs go into `folder`."""
        super().__init__(folder)
        self.constants: dict[str, Any] = dict(self.PATIENCE)

    def _start(self, name: str, port: int, arguments: Sequence[str], environment: Mapping[str, str]) -> Server:
        if name != "gateway":
            return super()._start(name, port, arguments, environment)
        _, _, *command = arguments  # after `-m proxy.cli`
        log = self._folder / f"{name}-{port}.log"
        server = Server(name, f"http://127.0.0.1:{port}", log, ForkedProcess(command, log, self.constants))
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
