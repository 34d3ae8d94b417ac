"""A container engine of the test's own, in namespaces of its own: it ends with them.

The machine's network, firewall and processes never see it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.deploy.tools import Unavailable, run

START_SECONDS = 300.0

# What the namespaces keep from the machine, looked at before and after.
WATCHED = ("/proc/sys/net/ipv4/ip_forward", "/proc/net/dev", "/proc/net/route", "/proc/net/ip_tables_names")


def machine_state() -> dict[str, object]:
    """What a container engine would change of this machine: forwarding, interfaces, routes, firewall tables."""
    state: dict[str, object] = {}
    for name in WATCHED:
        path = Path(name)
        lines = path.read_text().splitlines() if path.exists() else []
        state[name] = sorted(line.split(":")[0].strip() if name.endswith("dev") else line for line in lines)
    state["cgroups"] = sorted(str(group) for root in _cgroup_roots() for group in root.glob("seamark-deploy-*"))
    return state


def _cgroup_roots() -> list[Path]:
    """Where hierarchies of control groups begin: one place, or one for each controller."""
    top = Path("/sys/fs/cgroup")
    return [top, *(path for path in top.iterdir() if path.is_dir() and not path.is_symlink())]


def remove_cgroups(name: str) -> None:
    """Control groups are no part of a namespace, and a daemon leaves them behind, empty."""
    for group in (root / name for root in _cgroup_roots()):
        if group.is_dir():
            for inner in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                inner.rmdir()
            group.rmdir()


def within_namespaces(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `python -m module arguments` with its own network, mounts and process ids; all of it ends when that does."""
    spaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.run([*spaces, sys.executable, "-m", module, *arguments], env=dict(environment)).returncode


def wait_for(what: str, seconds: float, look: Callable[[], object]) -> object:
    """The first answer of `look` that is true. Raises `AssertionError` naming `what` after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        if found := look():
            return found
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.3)


class Engine:
    """A dockerd and its client. Only inside the namespaces of `within_namespaces`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._host = f"unix://{folder}/docker.sock"
        self._daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises `Unavailable` with the end of its log if it does not come up."""
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        log = self._folder / "dockerd.log"
        command = ["dockerd", "--host", self._host, "--pidfile", str(self._folder / "docker.pid")]
        command += ["--cgroup-parent", f"/{self._folder.name}"]
        command += ["--data-root", str(self._folder / "data"), "--exec-root", str(self._folder / "exec")]
        with log.open("wb") as output:
            self._daemon = subprocess.Popen(command, stdout=output, stderr=output)
        end = time.monotonic() + START_SECONDS
        while subprocess.run(self._docker("version"), capture_output=True).returncode:
            if self._daemon.poll() is not None or time.monotonic() > end:
                raise Unavailable(f"dockerd does not run here: {log.read_text(errors='replace')[-900:]}")
            time.sleep(0.3)

    def stop(self) -> None:
        """End the daemon and wait for it."""
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait(300)

    def _docker(self, *words: str | Path) -> list[str]:
        return ["docker", "--host", self._host, *map(str, words)]

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment in which a client asks this engine."""
        return {"DOCKER_HOST": self._host}

    def docker(self, *words: str | Path, **options) -> str:
        """Output of a command of the client. Raises `Failed`."""
        return run(self._docker(*words), **options)

    def fails(self, *words: str | Path) -> str:
        """The complaint of a command that has to fail. Raises `AssertionError` if it succeeds."""
        done = subprocess.run(self._docker(*words), capture_output=True, text=True)
        assert done.returncode, f"it should have failed: {' '.join(map(str, words))}"
        return done.stderr + done.stdout


def compose(engine: Engine, words: Sequence[str | Path], environment: Mapping[str, str] = {}) -> Callable[..., str]:
    """What runs Compose by `words` with more words behind, and returns its output. That raises `Failed`."""
    known = {**os.environ, **engine.variables, **environment}
    return lambda *more: run([*words, *more], env=known)
