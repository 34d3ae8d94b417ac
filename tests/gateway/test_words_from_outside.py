"""What a worker says of itself, and a client of itself, moves no terminal's cursor: in logs, pages, and what commands
print."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import httpx
import pytest

from proxy.commands import boundary, doctor, setup
from tests.harness.gateways import chat, post, start_gateway
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.waiting import wait_for

EVIL = "\x1b[2J\x1b[1;1Hwill hit\x9b31m\u202e"

FORGED = "\n2026-11-25 23:00:00,000 INFO seamark.gateway forged"


@pytest.fixture
def worker():
    with recording_worker(version="0.3.0" + EVIL, connector="C" + EVIL, refused="why" + EVIL) as started:
        started.models = ("m", "evil" + EVIL, "evil" + FORGED)
        yield started


def is_clean(text: str) -> bool:
    return "forged" not in text and all(line.isprintable() for line in text.splitlines())


def test_the_gateways_log_and_pages(fleet, worker: RecordingWorker):
    gateway = start_gateway(fleet, worker)
    odd = {"user-agent": b"evil\x9b2J/1", "x-request-id": b"r1\x9b2J"}
    post(gateway, {**chat("Tide?"), "model": "evil" + EVIL + FORGED}, headers=odd)
    assert post(gateway, chat("Tide?")).status_code == 200
    wait_for(lambda: "is up: serves m" in gateway.log.read_text())
    assert is_clean(gateway.log.read_text())
    for page in ("/metrics", "/seamark/status", "/seamark/live", "/v1/models", "/seamark/prefixes"):
        assert is_clean(httpx.get(gateway.url + page).text), page


@pytest.mark.parametrize("way", ["pip", "kubernetes"])
def test_what_the_doctor_prints(worker: RecordingWorker, capsys, way):
    doctor.main(["--worker", worker.url, "--runs-as", way])
    printed = capsys.readouterr().out
    assert is_clean(printed) and r"why\x1b[2J" in printed and "serves m" in printed


def test_what_setup_and_boundary_print(worker: RecordingWorker, tmp_path, capsys):
    with redirect_stdout(io.StringIO()) as printed:
        assert setup._found(setup.running([int(worker.url.rpartition(":")[2])]), "") == (worker.url,)
    assert printed.getvalue() == f"Found: {worker.url} serves m\n"
    request = tmp_path / "chat.json"
    request.write_text('{"model": "another", "messages": [{"role": "user", "content": "x"}]}')
    assert boundary.main(["--worker", worker.url, str(request)]) == 2
    assert is_clean(capsys.readouterr().err)
