"""Other gateways to be measured beside ours, each in an environment of its own, before one worker.

Each runs as its makers ship it: the default policy (cache-aware for both routers), one process, no line per request.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from proxy.bench.harness.servers import CACHE, Server, Servers
from proxy.commands.render_server import free_port
from tests.harness.mock_worker import MODEL

INSTALL_SECONDS = 900.0

START_SECONDS = 90.0


class Command(NamedTuple):
    """How a peer is started."""

    arguments: Sequence[str]  # the first: a script of its environment
    environment: Mapping[str, str] = {}


@dataclass(frozen=True)
class Peer:
    """A gateway from the package index."""

    name: str
    package: str  # with its version, and extras
    command: Callable[[int, Sequence[str], Path], Command]  # of a port, the workers' URLs, a folder for its files
    health: str = "/health"  # answers 200 once it serves


class Started(NamedTuple):
    """A peer that serves, or why it does not."""

    peer: Peer
    server: Server | None
    failure: str = ""


def _vllm_router(port: int, workers: Sequence[str], folder: Path) -> Command:
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return Command(["vllm-router", *where, "--worker-urls", *workers, "--log-level", "warning"])


def _smg(port: int, workers: Sequence[str], folder: Path) -> Command:
    where = ["--host", "127.0.0.1", "--port", str(port)]
    where += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return Command(["smg", "launch", *where, "--worker-urls", *workers, "--log-level", "warn"])


def _litellm(port: int, workers: Sequence[str], folder: Path) -> Command:
    config = folder / "litellm.yaml"  # JSON is YAML
    models = [{"model": f"openai/{MODEL}", "api_base": worker + "/v1", "api_key": "none"} for worker in workers]
    # It listens on the loopback address alone; a key would only add to its cost.
    settings = {"general_settings": {"dangerously_permit_weak_or_unset_master_key": True}}
    settings |= {"model_list": [{"model_name": MODEL, "litellm_params": model} for model in models]}
    config.write_text(json.dumps(settings))
    flags = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    return Command(["litellm", *flags], {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"})


VLLM_ROUTER = "vllm-router"

PEERS = (
    Peer(VLLM_ROUTER, "vllm-router==0.1.17", _vllm_router),
    Peer("smg", "smg==1.13.0", _smg),
    Peer("litellm", "litellm[proxy]==1.106.0", _litellm, "/health/liveliness"),
)


def start(servers: Servers, peer: Peer, workers: Sequence[str], folder: Path, say: Callable[[str], None]) -> Started:
    """Install a peer if need be, and start it before the workers at these URLs. A failure is returned, not raised."""
    try:
        scripts = environment_of(peer, say) / "bin"
        port = free_port()
        (script, *arguments), environment = peer.command(port, workers, folder)
        server = servers.start(peer.name, port, [str(scripts / script), *arguments], environment)
        server.wait_until_ready(peer.health, START_SECONDS)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        say(f"{peer.name} is left out: {error}")
        return Started(peer, None, str(error).splitlines()[0])
    return Started(peer, server)


def environment_of(peer: Peer, say: Callable[[str], None]) -> Path:
    """The folder of the peer's virtual environment; one for each, so that none decides what another gets."""
    version = hashlib.sha256(f"{peer.package} {sys.version}".encode()).hexdigest()[:12]
    folder = (CACHE / f"peer-{peer.name}-{version}").resolve()  # its scripts name it
    done = folder / "installed"
    if not done.exists():
        say(f"installing {peer.package} in {folder}")
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        python = str(folder / "bin" / "python")
        _run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", peer.package])
        done.touch()
    return folder


def _run(command: Sequence[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if ended.returncode:
        last = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f"{' '.join(command[1:3])} ended with {ended.returncode}: {' '.join(last)}")


def start_bare(servers: Servers, url: str) -> Server:
    """A proxy before the worker at `url` that does nothing but pass on; it answers `/health`."""
    port = free_port()
    return servers.start("bare", port, [sys.executable, "-m", "tests.bench.bare_proxy", str(port), url], {})
