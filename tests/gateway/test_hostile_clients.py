"""Broken and ambiguous requests break nothing, nor behind nginx and HAProxy; a short run of attacks."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import httptools
import httpx
import pytest

from proxy.bench.harness.servers import Server, Servers, free_port
from tests.bench import attacks, fuzz_framing
from tests.bench.fuzz import GATEWAY_FLAGS, Run, fuzz, render
from tests.bench.fuzz_cases import REFUSED, Case, case, name_of
from tests.bench.fuzz_framing import SMUGGLED, ambiguous, inner
from tests.harness.gateways import CHAT, GatewayForks, chat, post, start_gateway
from tests.harness.raw_http import Connection, Cut, request
from tests.harness.raw_worker import started
from tests.harness.recording_worker import RecordingWorker, respond, serving, whole_body
from tests.harness.waiting import wait_for


@pytest.mark.parametrize("cases", [200, pytest.param(2000, marks=pytest.mark.thorough)])
async def test_nothing_breaks_at_broken_requests(tmp_path, cases):
    with GatewayForks(tmp_path) as fleet:
        rare = next(number for number in itertools.count() if case(1, number).kind == "at a limit")
        result = await fuzz(fleet, seed=1, seconds=0, only=sorted({*range(cases), rare}))
    assert result.held, render(result)
    kinds = {"well framed", "pipelined", "ambiguous", "odd", "mutated", "half", "at a limit"}
    assert kinds <= set(result.kinds)
    assert min(result.reached, result.statuses[200]) > cases / 2 and result.statuses[400] > cases / 20


async def test_no_ambiguous_request_gets_past_the_gateway(raw, tmp_path):
    with GatewayForks(tmp_path) as fleet:
        run = Run(await started(fleet.gateway(raw, flags=GATEWAY_FLAGS)), raw, 0)
        for number, wrong in enumerate(fuzz_framing.ambiguous("")):
            data = fuzz_framing.ambiguous(name_of(0, number))[wrong]
            assert await run.judged(Case(number, wrong, REFUSED, [data])) == "", wrong
        assert await run.left_behind() == []
        assert not raw.seen.keys() - {"last"}


BODY = json.dumps(chat("Tide?")).encode()

HIDDEN = b"GET %b HTTP/1.1\r\nhost: w\r\n\r\n" % SMUGGLED

# By which a client could make a server behind the gateway see another framing, or another protocol.
FIELDS = {
    "upgrade": {"connection": "upgrade", "upgrade": "h2c", "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA"},
    "upgrade unnamed": {"upgrade": "websocket"},
    "websocket": {"connection": "keep-alive, Upgrade", "upgrade": "websocket", "sec-websocket-key": "x"},
    "te": {"te": "trailers, chunked"},
    "trailer": {"trailer": "content-length"},
    "keep-alive": {"connection": "close, content-length", "keep-alive": "timeout=1"},
    "expect": {"expect": "100-continue"},
    "proxy": {"proxy-connection": "keep-alive", "proxy-authorization": "Basic x"},
    "names like framing": {"x-transfer-encoding": "chunked", "content_length": "0", "transfer_encoding": "chunked"},
}

HOP_BY_HOP = {b"upgrade", b"te", b"trailer", b"transfer-encoding", b"keep-alive", b"expect", b"proxy-authorization"}


class Reader:
    """What vLLM's server makes of bytes: uvicorn reads with this parser."""

    def __init__(self) -> None:
        self.targets: list[bytes] = []
        self.body = b""
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.targets.append(url)

    def on_body(self, body: bytes) -> None:
        self.body += body


async def test_a_worker_reads_one_request_with_one_length_and_no_other_protocol(raw, tmp_path):
    reached = 0
    with GatewayForks(tmp_path) as fleet:
        gateway = await started(fleet.gateway(raw))
        for case in itertools.product(FIELDS.values(), ("POST", "DELETE", "GET"), (BODY, HIDDEN, b"")):
            fields, method, body = case
            connection = await Connection.open(gateway)
            await connection.send(request(method, CHAT, {"x-mock-id": "one", **fields}, body))
            await connection.response()
            connection.close()
            for number, seen in enumerate(raw.pop("one"), 1):
                assert number == 1 and not seen.headers.keys() & HOP_BY_HOP, case
                assert b"upgrade" not in seen.headers.get(b"connection", b"").lower(), case
                sent = b"".join(b"%b: %b\r\n" % field for field in seen.headers.items())
                read = Reader()
                read.parser.feed_data(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (seen.method, seen.target, sent, seen.body))
                assert not read.parser.should_upgrade(), case
                assert (read.targets, read.body) == ([CHAT.encode()], seen.body), case
                reached += 1
    assert not raw.malformed and reached > len(FIELDS) * 9 / 2


@pytest.mark.thorough
async def test_honest_streams_survive_all_kinds_of_attacks(tmp_path):
    with GatewayForks(tmp_path) as fleet:
        found = await attacks.run(fleet, attackers=8, seconds=12.0)
    # How long they waited depends on the machine.
    found = dataclasses.replace(found, health_p99=0.0, late_most=0.0)
    quiet = dataclasses.replace(found, failed=0, health_failed=0, files_after=found.files_before, log=[])
    assert attacks.complaints(quiet, found, per_second=0.0) == []
    assert found.frames > 0 and sum(found.attacks.values()) > 0


ECHO = "/v1/echo"

OFFERED = "offered"  # by this name goes a request that stands in a body

# The files of deploy/: with other addresses and without TLS.

DEPLOY = Path(__file__).parents[2] / "deploy"

NGINX = DEPLOY / "nginx" / "seamark.conf"

HAPROXY = DEPLOY / "haproxy" / "haproxy.cfg"

# Of nginx as a whole; the file in deploy/ is for a folder that an installed nginx includes.
AROUND = """
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
    """Path of the program, of Debian's packages nginx-light and haproxy."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin") or program


def front(program: str, servers: Servers, folder: Path, gateway: Server) -> Server:
    """nginx or HAProxy before the gateway, started; it ends with `servers`."""
    port = free_port()
    text = (NGINX if program == "nginx" else HAPROXY).read_text()
    text, places = re.subn(r"127\.0\.0\.1:8080", gateway.url.removeprefix("http://"), text)
    assert places == 1
    if program == "nginx":
        text = re.sub(r"(?m)^ *ssl_.*\n", "", text.replace("listen 443 ssl;", f"listen 127.0.0.1:{port};"))
        (folder / "seamark.conf").write_text(text)
        text = AROUND.format(folder=folder, user="user root;" if os.geteuid() == 0 else "")
        flags = ["-p", str(folder), "-e", "stderr", "-c"]
    else:
        text = text.replace("bind :443 ssl crt /etc/seamark/tls.pem", f"bind 127.0.0.1:{port}")
        flags = ["-db", "-f"]
    config = folder / f"{program}.conf"
    config.write_text(text)
    server = servers.start(program, port, [installed(program), *flags, str(config)], {})
    server.wait_until_ready("/health", 30)
    return server


PROXIES = pytest.mark.parametrize("program", ["nginx", "haproxy"])


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
        return await respond(send, answer)


def ways_to_smuggle() -> list[list[bytes]]:
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
    ways = ways_to_smuggle()

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


@pytest.mark.parametrize("victims", [50, pytest.param(1000, marks=pytest.mark.thorough)])
@PROXIES
async def test_nobody_gets_anothers_answer(fleet, tmp_path, program, victims):
    worker = EchoWorker()
    with serving(worker, http="h11") as worker.url:
        gateway = await asyncio.to_thread(start_gateway, fleet, worker)
        server = await asyncio.to_thread(front, program, fleet, tmp_path, gateway)
        assert await wrong_answers(server, victims) == []
        assert OFFERED not in worker.requests


@PROXIES
def test_a_stream_arrives_event_by_event_and_a_client_that_leaves_frees_the_worker(fleet, worker, tmp_path, program):
    server = front(program, fleet, tmp_path, start_gateway(fleet, worker))
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
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as client:
        client.sendall(request("POST", CHAT, {"content-type": "application/json"}, BODY))
        wait_for(lambda: len(worker.requests) == 3)
    assert worker.gone.wait(30)


@PROXIES
def test_pages_for_operators_are_hidden_however_their_paths_are_written(fleet, worker, tmp_path, program):
    server = front(program, fleet, tmp_path, start_gateway(fleet, worker))
    for page in ("/ui", "/metrics", "/seamark/status", "/seamark/requests/%zz"):
        ways = {page, page[0] + f"%{ord(page[1]):02X}" + page[2:], page[0] + page[1:].replace("/", "%2f")}
        ways |= {way + end for way in ways for end in ("/", "%2F", "?a", "%")}
        ways |= {way.replace("%", "%25") for way in ways}
        for way in ways:
            client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
            client.request("GET", way)
            assert client.getresponse().status in (400, 404), way
            client.close()
    assert httpx.get(server.url + "/v1/models?a=%zz").status_code == 200


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
