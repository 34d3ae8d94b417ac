"""What a gateway says of itself and of its workers: in the log when it starts, and to clients while nobody serves."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port
from proxy.version import version
from tests.harness.api_keys import entry
from tests.harness.gateways import chat, post, start_gateway
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.threaded_server import serving
from tests.harness.waiting import wait_for

PROBES = ("--health-interval", "0.1")


def lines(gateway: Server, part: str) -> list[str]:
    """Lines of its log that hold `part`."""
    return [line for line in gateway.log.read_text().splitlines() if part in line]


def test_a_start_names_version_addresses_and_each_worker_with_what_it_runs(fleet, worker):
    with recording_worker(patched=False, models=("n",)) as bare:
        gateway = start_gateway(fleet, worker, bare)
        wait_for(lambda: len(lines(gateway, " is up: ")) == 2)
    (start,) = lines(gateway, "base_url")
    assert f"Seamark {version()}" in start
    assert f"base_url {gateway.url}/v1 " in start and f"live page {gateway.url}/ui" in start
    (patched,), (unpatched,) = lines(gateway, f"worker {name_of(worker)} "), lines(gateway, f"worker {name_of(bare)} ")
    assert "serves m; vLLM 0.32.0; patched (Seamark 0.3.0, match unit 16 tokens)" in patched
    assert "serves n; vLLM 0.32.0; not patched" in unpatched and f"seamark doctor --worker {bare.url}" in unpatched


def name_of(worker: RecordingWorker) -> str:
    return worker.url.removeprefix("http://")


def test_pages_at_the_admin_port_are_announced_there(fleet, worker):
    port = free_port()
    gateway = start_gateway(fleet, worker, flags=("--admin-port", str(port)))
    wait_for(lambda: lines(gateway, "live page"))
    (page,) = lines(gateway, "live page")
    assert f"live page http://127.0.0.1:{port}/ui" in page and gateway.url not in page


def test_a_port_that_is_taken_costs_a_line(fleet):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for setting in ("port", "admin_port"):
            flags = (f"--{setting.replace('_', '-')}", str(port))
            gateway = fleet.gateway(flags=("--worker", "http://127.0.0.1:9", *flags))
            assert gateway.process.wait(30) == 2
            (line,) = gateway.log.read_text().splitlines()
            assert f"{setting}: nothing can listen on 127.0.0.1:{port} (Address already in use)" in line
            assert f"held by process {os.getpid()} (" in line


def test_a_restart_beside_what_holds_its_port_names_that(fleet, worker):
    gateway = start_gateway(fleet, worker)
    for held, what in ((gateway.url, "a Seamark gateway"), (worker.url, "vLLM 0.32.0")):
        second = fleet.gateway(worker, flags=("--port", held.rpartition(":")[2]))
        assert second.process.wait(30) == 2
        (line,) = second.log.read_text().splitlines()
        assert what in line and "held by process " in line


class Place(NamedTuple):
    """Where the gateway looks for a worker, and how often it has looked."""

    url: str
    probes: Callable[[], int]


@contextlib.contextmanager
def answering(answers: dict[str, tuple[int, bytes]], key: str = "") -> Iterator[Place]:
    """A server that answers some paths, and others with 404; paths under /v1 only to who has the `key`."""
    probes = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal probes
        path = scope["path"]
        probes += path == "/health"
        status, body = answers.get(path, (404, b'{"detail":"Not Found"}'))
        if key and path.startswith("/v1/") and dict(scope["headers"]).get(b"authorization") != f"Bearer {key}".encode():
            status, body = 401, b'{"error":"Unauthorized"}'
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    with serving(app) as url:
        yield Place(url, lambda: probes)


@contextlib.contextmanager
def listening(greeting: bytes | None) -> Iterator[Place]:
    """A server that says `greeting` to whoever connects, and closes; with None it says nothing and stays."""
    server = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):  # the server is closed
            while True:
                client, _ = server.accept()
                accepted.append(client)
                if greeting is not None:
                    client.recv(65536)
                    client.sendall(greeting)
                    client.close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield Place(f"http://127.0.0.1:{server.getsockname()[1]}", lambda: len(accepted))
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
        for client in accepted:
            client.close()


VLLM = {
    "/health": (200, b""),
    "/metrics": (200, b"process_start_time_seconds 1.7e+09\n"),
    "/v1/models": (200, b'{"object":"list","data":[{"id":"m"}]}'),
}

CAUSES = {
    "key": (lambda: answering(VLLM, key="sk-of-vllm"), "wants a key: --worker-api-key-file FILE"),
    "not vLLM": (lambda: answering({}), "not vLLM: /health answers 404"),
    "no models": (lambda: answering({**VLLM, "/v1/models": (200, b"{}")}), "not vLLM: /v1/models lists no models"),
    "sick": (lambda: answering({**VLLM, "/health": (503, b"")}), "not well: /health answers 503"),
    "metrics": (lambda: answering({**VLLM, "/metrics": (200, b"process_start_time_seconds x\n")}), "not vLLM: its /m"),
    "silent": (lambda: listening(None), "no answer within 0.3 s"),
    "no HTTP": (lambda: listening(b"220 mail.example ESMTP\r\n"), "does not speak HTTP"),
    "closes": (lambda: listening(b""), "closes the connection without an answer"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_why_a_worker_does_not_answer_is_logged_once_and_told_to_clients(fleet, cause):
    if cause == "silent":
        fleet.constants["proxy.fleet.probe.PROBE_TIMEOUT"] = 0.3
    place, words = CAUSES[cause]
    with place() as found:
        gateway = started(fleet, "--worker", found.url, *PROBES)
        wait_for(lambda: lines(gateway, " is down: "))
        refused = post(gateway, chat("Tide?"))
        seen = found.probes()
        wait_for(lambda: found.probes() >= seen + 3)
        (line,) = lines(gateway, " is down: ")
    assert found.url.removeprefix("http://") in line and words in line
    assert refused.status_code == 503 and words in refused.json()["error"]["message"]
    assert "may still be loading" not in refused.text


def started(fleet: Servers, *flags: str) -> Server:
    """A gateway before nobody that serves."""
    gateway = fleet.gateway(flags=flags)
    gateway.wait_until_ready("/health", seconds=30)
    return gateway


def test_a_refused_connection_is_told_wherever_a_client_asks(fleet):
    port = free_port()
    gateway = started(fleet, "--worker", f"http://127.0.0.1:{port}", *PROBES)
    wait_for(lambda: lines(gateway, f"worker 127.0.0.1:{port} is down: connection refused: nothing listens there"))
    asked = [post(gateway, chat("Tide?")), *(httpx.get(gateway.url + path) for path in ("/ready", "/v1/models"))]
    for answer in asked:
        message = answer.json()["error"]["message"]
        assert answer.status_code == 503 and f"Worker 127.0.0.1:{port}: connection refused" in message


def test_a_key_that_is_refused_is_told_from_none(fleet, tmp_path):
    key = tmp_path / "key"
    key.write_text("sk-wrong\n")
    with answering(VLLM, key="sk-of-vllm") as place:
        gateway = started(fleet, "--worker", place.url, "--worker-api-key-file", str(key), *PROBES)
        wait_for(lambda: lines(gateway, " is down: refuses the key in --worker-api-key-file"))
        with_password = started(fleet, "--worker", place.url.replace("//", "//me:sesame@"), *PROBES)
        wait_for(lambda: lines(with_password, " is down: refuses the user and password in its URL"))
        assert "sesame" not in with_password.log.read_text()
        key.write_text("sk-of-vllm\n")
        known = start_gateway(fleet, flags=("--worker", place.url, "--worker-api-key-file", str(key)))
        assert lines(known, " is up: ") and not lines(known, " is down: ")


def workers_file(path: Path, url: str) -> Path:
    path.write_text(f'[[worker]]\nurl = "{url}"\n')
    return path


def test_a_gateway_that_is_its_own_worker_says_so(fleet, tmp_path):
    file = tmp_path / "workers.toml"
    file.write_text("")
    port = free_port()
    gateway = started(fleet, "--workers-file", str(file), "--admin-port", str(port), *PROBES)
    assert lines(gateway, f"there is no worker: {file} names none")
    for url in (gateway.url + "/v1", f"http://localhost:{port}"):
        workers_file(file, url)
        name = url.removeprefix("http://").removesuffix("/v1")
        wait_for(lambda name=name: lines(gateway, f"worker {name} is down: this is the gateway itself"))
    assert "the gateway itself: --worker must name a vLLM server" in post(gateway, chat("Tide?")).text


def test_a_gateway_behind_another_one_is_no_loop_and_named_what_it_is(fleet, worker):
    behind = start_gateway(fleet, worker)
    front = start_gateway(fleet, flags=("--worker", behind.url))
    (line,) = lines(front, " is up: ")
    assert "serves m; a Seamark gateway, not a worker" in line
    assert post(front, chat("Tide?")).status_code == 200


def test_the_root_leads_to_the_page_with_and_without_keys(fleet, worker, tmp_path):
    (tmp_path / "keys.toml").write_text(entry("ann"))
    for flags in ((), ("--api-keys", str(tmp_path / "keys.toml"))):
        gateway = fleet.gateway(worker, flags=flags)
        gateway.wait_until_ready("/health", seconds=30)
        followed = httpx.get(gateway.url + "/", follow_redirects=True)
        assert followed.status_code == 200 and str(followed.url) == gateway.url + "/ui"
        assert followed.headers["content-type"].startswith("text/html")


def test_the_root_leads_to_the_page_at_the_admin_port_alone(fleet, worker):
    port = free_port()
    gateway = start_gateway(fleet, worker, flags=("--admin-port", str(port)))
    own = f"http://127.0.0.1:{port}"
    assert str(httpx.get(own, follow_redirects=True).url) == own + "/ui"
    refused = httpx.get(gateway.url)
    assert refused.status_code == 404 and "admin port" in refused.json()["error"]["message"]
    refused = httpx.post(own + "/v1/chat/completions", json=chat("Tide?"))
    assert refused.status_code == 404 and "clients use the gateway's port" in refused.json()["error"]["message"]


WITHOUT_V1 = (
    "/chat/completions",
    "/completions",
    "/responses",
    "/responses/resp_1",
    "/embeddings",
    "/models",
    "/messages",
    "/messages/count_tokens",
)


def test_a_path_without_v1_is_answered_with_the_cure_in_the_words_of_its_api(fleet, worker):
    gateway = start_gateway(fleet, worker)
    for path in WITHOUT_V1:
        for answer in (httpx.get(gateway.url + path), post(gateway, chat("Tide?"), path)):
            error = answer.json()["error"]
            assert answer.status_code == 404 and f"Did you mean /v1{path}? base_url ends in /v1." in error["message"]
            assert answer.json().get("type") == ("error" if path.startswith("/messages") else None)
            assert error["type"] == ("not_found_error" if path.startswith("/messages") else "invalid_request_error")
    answer = post(gateway, chat("Tide?"), "/v1/v1/messages")
    assert answer.status_code == 404 and answer.json()["type"] == "error"
    assert "Did you mean /v1/messages? base_url must not end in /v1" in answer.json()["error"]["message"]
    assert not worker.requests
    assert post(gateway, chat("Tide?"), "/v1/rerank").status_code == 200  # what we do not know is the worker's
