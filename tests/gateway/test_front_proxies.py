"""Behind nginx and HAProxy, on shared connections: nobody gets another's answer, streams and aborts work."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port
from tests.bench.fuzz_framing import SMUGGLED, ambiguous, inner
from tests.harness.gateways import CHAT, chat, post, start_gateway
from tests.harness.raw_http import Connection, Cut, request
from tests.harness.recording_worker import RecordingWorker, serving, whole_body

VICTIMS = pytest.mark.parametrize("victims", [50, pytest.param(1000, marks=pytest.mark.thorough)])

ECHO = "/v1/echo"

OFFERED = "offered"  # by this name goes a request that stands in a body

# The files of deploy/: with other addresses and without TLS.

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


class EchoWorker(RecordingWorker):
    """Answers with what it was sent. What was smuggled takes a moment: until a victim is on the same connection."""

    async def __call__(self, scope, receive, send) -> None:
        path = scope["path"]
        if scope["type"] != "http" or not path.startswith((ECHO, SMUGGLED.decode())):
            return await super().__call__(scope, receive, send)
        body = await whole_body(receive)
        if path.startswith(SMUGGLED.decode()):
            self.requests.append(dict(scope["headers"])[b"x-mock-id"].decode())
            await asyncio.sleep(0.2)
        answer = json.dumps({"path": path, "body": body.decode("latin-1")}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})
        return None


@contextmanager
def echo_worker(http: str) -> Iterator[EchoWorker]:
    """Under uvicorn with `http` (h11 or httptools), in a thread."""
    worker = EchoWorker(url="")
    with serving(worker, http=http) as worker.url:
        yield worker


def attacks() -> list[list[bytes]]:
    """In pieces: requests that readers could frame differently; offers of another protocol with a request as body."""
    made = [[data.replace(CHAT.encode(), ECHO.encode())] for data in ambiguous("framing").values()]
    hidden = inner(OFFERED)
    # More than is read at once: wherever a reader that drops what came with the head goes on, it finds a request.
    large = b"\r\n" * 2**18 + hidden
    for protocol in ("h2c", "websocket", "TLS/1.0"):
        for options in ("upgrade", "Upgrade, HTTP2-Settings", "keep-alive, upgrade"):
            offer = {"connection": options, "upgrade": protocol, "http2-settings": "AAMAAABk"}
            for method, body in (("POST", hidden), ("POST", large), ("GET", hidden), ("PUT", large)):
                whole = request(method, ECHO, offer, body)
                made += [[whole], [whole[: -len(body)], body]]
            chunked = request("PUT", ECHO, {**offer, "transfer-encoding": "chunked"})
            made.append([chunked, b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large)])
    whole = request("POST", ECHO, {"expect": "100-continue"}, hidden)
    made.append([whole[: -len(hidden)], hidden])
    return made


async def attack(server: Server, pieces: list[bytes]) -> None:
    """Send them, and leave when nothing more comes."""
    connection = await Connection.open(server)
    try:
        for piece in pieces:
            await connection.send(piece)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(0.05):
            while True:
                await connection.some()
    except (TimeoutError, Cut, ConnectionError):
        pass
    finally:
        connection.close()


async def wrong_answers(server: Server, most: int) -> list[str]:
    """What `most` victims got that was not theirs, with attacks all the time on the connections behind `server`."""
    wrong: list[str] = []
    ways = attacks()

    async def victims(count: int, name: str) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            for number in range(count):
                asked = f"{name}-{number}"
                answer = await client.post(ECHO, content=asked)
                if answer.status_code != 200 or answer.json() != {"path": ECHO, "body": asked}:
                    wrong.append(f"{asked}: {answer.status_code} {answer.text[:200]}")

    async def attackers(first: int) -> None:
        number = first
        while not done.is_set():
            await attack(server, ways[number % len(ways)])
            number += 2

    done = asyncio.Event()
    attacking = [asyncio.create_task(attackers(first)) for first in range(2)]
    await asyncio.gather(*(victims(most // 10, f"victim-{each}") for each in range(10)))
    await asyncio.gather(*(attack(server, data) for data in ways))  # each of them at least once
    await victims(20, "last")
    done.set()
    await asyncio.gather(*attacking)
    return wrong


@VICTIMS
@pytest.mark.parametrize("front", FRONT_PROXIES)
async def test_nobody_gets_anothers_answer(fleet, tmp_path, front, victims):
    with echo_worker("h11") as worker:
        gateway = await asyncio.to_thread(start_gateway, fleet, worker)
        server = await asyncio.to_thread(front, fleet, tmp_path, gateway.url)
        assert await wrong_answers(server, victims) == []
        assert OFFERED not in worker.requests


@pytest.mark.parametrize("front", FRONT_PROXIES)
def test_a_stream_arrives_event_by_event_and_a_client_that_leaves_frees_the_worker(fleet, worker, tmp_path, front):
    server = front(fleet, tmp_path, start_gateway(fleet, worker).url)
    asked = chat("Tide?", stream=True, stream_options={"include_usage": True})
    assert post(server, asked).content == worker.answers[-1]
    worker.pause_after = 2
    worker.pause.set()
    with httpx.stream("POST", server.url + CHAT, json=asked, timeout=120) as answer:
        received = b""
        for piece in answer.iter_raw():
            received += piece
            if received.count(b"\n\n") == worker.pause_after:  # although no other event follows
                break
    assert worker.gone.wait(30)
    worker.gone.clear()
    worker.hold.set()  # before its answer, too
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json=chat("Tide?"), timeout=httpx.Timeout(30, read=0.5))
    assert worker.gone.wait(30)


def test_the_files_are_valid_as_they_are(tmp_path):
    key, certificate, both = (tmp_path / name for name in ("tls.key", "tls.crt", "tls.pem"))
    made = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", *made], check=True, capture_output=True)
    both.write_text(key.read_text() + certificate.read_text())
    (tmp_path / "seamark.conf").write_text(NGINX.read_text().replace("/etc/seamark", str(tmp_path)))
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{ include {tmp_path}/seamark.conf; }}"
    )
    (tmp_path / "haproxy.cfg").write_text(HAPROXY.read_text().replace("/etc/seamark", str(tmp_path)))
    for command in (["nginx", "-t", "-e", "stderr", "-c"], ["haproxy", "-c", "-f"]):
        name = command[0] + (".conf" if command[0] == "nginx" else ".cfg")
        done = subprocess.run([installed(command[0]), *command[1:], tmp_path / name], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
