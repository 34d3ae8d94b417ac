"""What a gateway and the commands say of themselves and of real workers, whatever those call themselves."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stdout
from typing import Any

import httpx
import pytest

from proxy.bench.harness.servers import Server, Servers
from proxy.commands import boundary, doctor, setup
from proxy.commands.render_server import free_port
from proxy.fleet.pool import MOST_CAUSES
from proxy.version import version
from tests.harness.api_keys import secret
from tests.harness.gateways import chat, post, start_gateway
from tests.harness.recording_worker import RecordingWorker, recording_worker, serving
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


def test_a_gateway_is_no_worker_and_tells_its_losses_to_an_operators_key(fleet, worker, capsys, keys, tmp_path):
    key = tmp_path / "admin"
    gateway = start_gateway(fleet, worker, flags=("--api-keys", str(keys)))
    beside = (worker.url, "--gateway", gateway.url)
    with_key = (*beside, "--gateway-key-file", str(key))
    for given, words, expected, flags in (
        ("", f"^a gateway, not a worker: {gateway.url}\n", 1, (gateway.url,)),
        ("", "wants an API key.*--gateway-key-file", 1, beside),
        (secret("root"), r"lost in \d+ minutes", 0, with_key),
        ("wrong", "refuses the key", 1, with_key),
    ):
        key.write_text(given)
        assert doctor.main(["--worker", *flags]) == expected
        assert re.search(words, capsys.readouterr().out, re.S), words


EVIL = "\x1b[2J\x1b[1;1Hwill hit\x9b31m\u202e"

FORGED = "\n2026-11-25 23:00:00,000 INFO seamark.gateway forged"


@pytest.fixture
def evil():
    with recording_worker(version="0.3.0" + EVIL, connector="C" + EVIL, refused="why" + EVIL) as started:
        started.models = ("m", "evil" + EVIL, "evil" + FORGED)
        yield started


def is_clean(text: str) -> bool:
    return "forged" not in text and all(line.isprintable() for line in text.splitlines())


def test_the_gateways_log_and_pages(fleet, evil: RecordingWorker):
    gateway = start_gateway(fleet, evil)
    odd = {"user-agent": b"evil\x9b2J/1", "x-request-id": b"r1\x9b2J"}
    post(gateway, {**chat("Tide?"), "model": "evil" + EVIL + FORGED}, headers=odd)
    assert post(gateway, chat("Tide?")).status_code == 200
    wait_for(lambda: "is up: serves m" in gateway.log.read_text())
    assert is_clean(gateway.log.read_text())
    for page in ("/metrics", "/seamark/status", "/seamark/live", "/v1/models", "/seamark/prefixes"):
        assert is_clean(httpx.get(gateway.url + page).text), page


@pytest.mark.parametrize("way", ["pip", "kubernetes"])
def test_what_the_doctor_prints(evil: RecordingWorker, capsys, way):
    doctor.main(["--worker", evil.url, "--runs-as", way])
    printed = capsys.readouterr().out
    assert is_clean(printed) and r"why\x1b[2J" in printed and "serves m" in printed


def test_what_setup_and_boundary_print(evil: RecordingWorker, tmp_path, capsys):
    with redirect_stdout(io.StringIO()) as printed:
        assert setup._found(setup.running([int(evil.url.rpartition(":")[2])]), "") == (evil.url,)
    assert printed.getvalue() == f"Found: {evil.url} serves m\n"
    request = tmp_path / "chat.json"
    request.write_text('{"model": "another", "messages": [{"role": "user", "content": "x"}]}')
    assert boundary.main(["--worker", evil.url, str(request)]) == 2
    assert is_clean(capsys.readouterr().err)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("module", ["redis", "opentelemetry"])
def test_what_is_not_asked_for_is_not_imported(module):
    done = python("-c", f"import sys, proxy.server.app; print([name for name in sys.modules if '{module}' in name])")
    assert done.stdout.strip() == "[]"


def test_the_process_that_tries_drafts_runs_by_itself_and_leaves_nothing_in_the_output():
    done = python("-m", "proxy.commands.draft_trial", "--worker", "http://127.0.0.1:9", "--parent", "-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
