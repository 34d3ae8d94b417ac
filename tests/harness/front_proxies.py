"""nginx and HAProxy before a gateway, as deploy/ has them: with other addresses and without TLS."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"

NGINX = DEPLOY / "nginx" / "seamark.conf"

HAPROXY = DEPLOY / "haproxy" / "haproxy.cfg"

START_SECONDS = 30.0

# Of nginx as a whole; the file in deploy/ is for a folder that an installed nginx includes.
_AROUND = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/answers;
    include {folder}/seamark.conf;
}}
"""


def installed(program: str) -> str:
    """Path of the program. Raises `RuntimeError` where it is not installed."""
    found = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None:
        raise RuntimeError(f"{program} is not installed (Debian's packages nginx-light and haproxy)")
    return found


def nginx(servers: Servers, folder: Path, gateway: str) -> Server:
    """Start it before the server at the URL `gateway`; it ends with `servers`."""
    port = free_port()
    text = NGINX.read_text().replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
    (folder / "seamark.conf").write_text(_before(re.sub(r"(?m)^ *ssl_.*\n", "", text), gateway))
    user = "user root;" if os.geteuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(_AROUND.format(folder=folder, user=user))
    command = [installed("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(config)]
    return _ready(servers.start("nginx", port, command, {}))


def haproxy(servers: Servers, folder: Path, gateway: str) -> Server:
    """The same with HAProxy."""
    port = free_port()
    text = HAPROXY.read_text().replace("bind :443 ssl crt /etc/seamark/tls.pem", f"bind 127.0.0.1:{port}")
    config = folder / "haproxy.cfg"
    config.write_text(_before(text, gateway))
    return _ready(servers.start("haproxy", port, [installed("haproxy"), "-db", "-f", str(config)], {}))


FRONT_PROXIES: tuple[Callable[[Servers, Path, str], Server], ...] = (nginx, haproxy)


def _before(text: str, gateway: str) -> str:
    address = "127.0.0.1:8080"
    if text.count(address) != 1:
        raise ValueError(f"{address} should stand there once")
    return text.replace(address, gateway.removeprefix("http://"))


def _ready(server: Server) -> Server:
    server.wait_until_ready("/health", START_SECONDS)
    return server
