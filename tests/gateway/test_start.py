"""What a gateway says of itself and of its workers: in the log when it starts, and to clients while nobody serves."""

from __future__ import annotations

from typing import Any

import httpx

from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port
from proxy.fleet.pool import MOST_CAUSES
from proxy.version import version
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


async def something_else(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b'{"detail":"Not Found"}'})


def test_why_a_worker_does_not_answer_is_logged_once_and_told_to_clients(fleet, worker):
    worker.api_key = "sk-of-vllm"
    with serving(something_else) as other:
        causes = {worker.url: "wants a key: --worker-api-key-file FILE", other: "not vLLM: /health answers 404"}
        for _ in range(MOST_CAUSES - 1):
            causes[f"http://127.0.0.1:{free_port()}"] = "connection refused: nothing listens there"
        gateway = started(fleet, *(word for url in causes for word in ("--worker", url)), *PROBES)
        for url, words in causes.items():
            wait_for(lambda url=url: lines(gateway, f"worker {url[7:]} is down: "))
            (line,) = lines(gateway, f"worker {url[7:]} is down: ")
            assert words in line
        refused = [post(gateway, chat("Tide?")), *(httpx.get(gateway.url + path) for path in ("/ready", "/v1/models"))]
        assert len(lines(gateway, " is down: ")) == len(causes)
    for answer in refused:
        message = answer.json()["error"]["message"]
        assert answer.status_code == 503 and "may still be loading" not in message and "; and 1 more" in message
        assert all(url[7:] in message and words in message for url, words in list(causes.items())[:MOST_CAUSES])
    assert [answer.headers["retry-after"] for answer in refused[::2]] == ["2", "2"]


def started(fleet: Servers, *flags: str) -> Server:
    """A gateway before nobody that serves."""
    gateway = fleet.gateway(flags=flags)
    gateway.wait_until_ready("/health", seconds=30)
    return gateway


def test_a_gateway_that_is_its_own_worker_says_so(fleet, tmp_path):
    file = tmp_path / "workers.toml"
    file.write_text("")
    port = free_port()
    gateway = started(fleet, "--workers-file", str(file), "--admin-port", str(port), *PROBES)
    assert lines(gateway, f"there is no worker: {file} names none")
    for url in (gateway.url + "/v1", f"http://localhost:{port}"):
        file.write_text(f'[[worker]]\nurl = "{url}"\n')
        name = url.removeprefix("http://").removesuffix("/v1")
        wait_for(lambda name=name: lines(gateway, f"worker {name} is down: this is the gateway itself"))
    assert "the gateway itself: --worker must name a vLLM server" in post(gateway, chat("Tide?")).text


def test_a_gateway_behind_another_one_is_no_loop_and_named_what_it_is(fleet, worker):
    behind = start_gateway(fleet, worker)
    front = start_gateway(fleet, flags=("--worker", behind.url))
    (line,) = lines(front, " is up: ")
    assert "serves m; a Seamark gateway, not a worker" in line
    assert post(front, chat("Tide?")).status_code == 200
