"""Other gateways to be measured beside ours, each in an environment of its own, before one worker.

Each runs as its makers ship it: the default policy (cache-aware for both routers), one process, no line per request.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp
import uvloop
from aiohttp import web

from proxy.bench.harness.servers import CACHE, Server, Servers, free_port
from tests.harness.mock_worker import MODEL


class Peer(NamedTuple):
    """A gateway from the package index."""

    name: str
    package: str  # with its version, and extras
    command: str  # a script of its environment; {port}, {metrics} (a port), {worker} (its URL), {config} (a file)
    config: str = ""  # of {worker}
    environment: Mapping[str, str] = {}
    health: str = "/health"  # answers 200 once it serves


VLLM_ROUTER = "vllm-router"

PEERS = (
    Peer(
        VLLM_ROUTER,
        "vllm-router==0.1.17",
        "vllm-router --host 127.0.0.1 --port {port} --prometheus-port {metrics} --worker-urls {worker} "
        "--log-level warning",
    ),
    Peer(
        "smg",
        "smg==1.13.0",
        "smg launch --host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 --prometheus-port {metrics} "
        "--worker-urls {worker} --log-level warn",
    ),
    Peer(
        "litellm",
        "litellm[proxy]==1.106.0",
        "litellm --config {config} --host 127.0.0.1 --port {port} --telemetry False",
        # It listens on the loopback address alone; a key would only add to its cost.
        "general_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n"
        f"model_list:\n- model_name: {MODEL}\n"
        f"  litellm_params: {{{{model: openai/{MODEL}, api_base: '{{worker}}/v1', api_key: none}}}}\n",
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        "/health/liveliness",
    ),
)


def start(servers: Servers, peer: Peer, worker: str, folder: Path, say: Callable[[str], None]) -> Server | str:
    """Install a peer if need be, and start it before the worker at that URL; or why that failed."""
    try:
        scripts = environment_of(peer, say) / "bin"
        config, port = folder / f"{peer.name}.yaml", free_port()
        config.write_text(peer.config.format(worker=worker))
        command = peer.command.format(port=port, metrics=free_port(), worker=worker, config=config)
        script, *arguments = command.split()
        server = servers.start(peer.name, port, [str(scripts / script), *arguments], peer.environment)
        server.wait_until_ready(peer.health, 90.0)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        say(f"{peer.name} is left out: {error}")
        return str(error).splitlines()[0]
    return server


def environment_of(peer: Peer, say: Callable[[str], None]) -> Path:
    """The folder of the peer's virtual environment; one for each, so that none decides what another gets."""
    version = hashlib.sha256(f"{peer.package} {sys.version}".encode()).hexdigest()[:12]
    folder = (CACHE / f"peer-{peer.name}-{version}").resolve()  # its scripts name it
    done = folder / "installed"
    if not done.exists():
        say(f"installing {peer.package} in {folder}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*install, peer.package], check=True, timeout=900.0)
        done.touch()
    return folder


def start_bare(servers: Servers, url: str) -> Server:
    """`bare_proxy` before the worker at `url`."""
    port = free_port()
    return servers.start("bare", port, [sys.executable, "-m", "tests.bench.peers", str(port), url], {})


async def bare_proxy(worker: str) -> web.Application:
    """Does nothing but pass on, in aiohttp: what any gateway in Python takes. It answers `/health` itself."""
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)

    async def pass_on(request: web.Request) -> web.StreamResponse:
        headers = {"content-type": "application/json"}
        async with session.post(worker + request.path_qs, data=await request.read(), headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def taken(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    app = web.Application(client_max_size=2**26)
    app.add_routes([web.get("/health", taken), web.post("/{path:.*}", pass_on)])
    return app


if __name__ == "__main__":
    uvloop.install()
    web.run_app(bare_proxy(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), access_log=None)
