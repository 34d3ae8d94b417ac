"""What `seamark doctor` says of real servers; all else that it says: `tests/unit/commands/test_doctor.py`."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from proxy.commands import doctor
from tests.harness.api_keys import entry, secret
from tests.harness.gateways import start_gateway
from tests.harness.recording_worker import recording_worker
from tests.harness.threaded_server import serving


class Told(NamedTuple):
    status: int
    verdict: str  # the first line
    text: str


@pytest.fixture
def examined(capsys) -> Callable[..., Told]:
    """`examined(url, *flags)`: what the doctor prints."""

    def examined(url: str, *flags: str) -> Told:
        status = doctor.main(["--worker", url, *flags])
        out, err = capsys.readouterr()
        assert not err
        return Told(status, out.splitlines()[0], out)

    return examined


@pytest.fixture
def key(tmp_path) -> Path:
    path = tmp_path / "key"
    path.write_text("right\n")
    return path


def test_a_patched_worker_will_hit(worker, examined):
    told = examined(worker.url)
    assert told.status == 0 and told.verdict == f"will hit: {worker.url} serves m"
    assert "WRONG" not in told.text and "the cure" not in told.text
    assert "takes tools" in told.text and "--tool-call-parser" not in told.text


@pytest.mark.parametrize("spelt", ["{}", "{}/", "{}/v1", "{}/v1/", "http://{}/v1", "HTTP://{}"])
def test_a_url_is_understood_without_a_scheme_and_with_v1(worker, examined, spelt):
    told = examined(spelt.format(worker.url.removeprefix("http://")))
    assert told.status == 0 and told.verdict.startswith("will hit"), told.text


def test_a_worker_without_the_plugin_cannot_hit_and_the_last_lines_are_the_cure(examined):
    with recording_worker(patched=False, more_metrics='vllm:cache_config_info{block_size="2096"} 1.0\n') as worker:
        told = examined(worker.url, "--runs-as", "pip")
    assert told.status == 1 and told.verdict.startswith("cannot hit: the plugin is not in this vLLM")
    assert "whole blocks of 2,096 tokens" in told.verdict
    install, start = told.text.splitlines()[-2:]
    assert "pip install --no-deps" in install and f"--port {worker.url.rpartition(':')[2]}" in start


def test_a_wrong_key_is_told_from_none(worker, examined, key):
    worker.api_key = "right"
    none = examined(worker.url)
    assert none.status == 1 and none.verdict.startswith("not reachable: ")
    assert "wants an API key" in none.verdict and "--worker-api-key-file" in none.verdict
    assert examined(worker.url, "--worker-api-key-file", str(key)).status == 0
    key.write_text("wrong")
    wrong = examined(worker.url, "--worker-api-key-file", str(key))
    assert wrong.status == 1 and "refuses the key" in wrong.verdict and "wants an API key" not in wrong.text
    assert "wrong" not in wrong.text.replace("WRONG", "")


@contextmanager
def mute() -> Iterator[str]:
    """The URL of a server that takes connections, and closes each with a line that is no HTTP."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x15\x03\x01 this is no HTTP\r\n\r\n")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("127.0.0.1:9", "connection refused"),
        ("http://127.0.0.1:9/v1", "connection refused"),
        ("http://nowhere.invalid:8000", "host name is not known"),
        ("127.0.0.1", "the URL has no port"),
        ("ftp://127.0.0.1:8000", "no URL of http"),
        ("http://[", "http://[ is no URL"),
    ],
)
def test_a_worker_that_is_not_there_is_not_reachable_for_a_cause(examined, url, cause):
    if cause == "the URL has no port":
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 80)) == 0:
                pytest.skip("something listens on port 80 here")
    told = examined(url)
    assert told.status == 1 and told.verdict.startswith("not reachable: ") and cause in told.verdict


def test_what_speaks_no_http_or_no_tls_is_told(worker, examined):
    with mute() as url:
        assert "does not speak HTTP" in examined(url).verdict
    assert "TLS fails" in examined(worker.url.replace("http:", "https:")).verdict


def test_what_is_no_vllm_is_not_reachable(examined):
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"[]"})

    with serving(other) as url:
        told = examined(url)
    assert told.status == 1 and told.verdict.startswith("not reachable: ") and "is not vLLM" in told.verdict


def test_a_password_in_a_url_is_not_shown(worker, examined):
    for url in (worker.url, "http://127.0.0.1:9", "http://["):
        assert "sesame" not in examined(url.replace("http://", "http://ann:sesame@")).text


def test_a_gateway_is_no_worker_and_names_those_it_has(fleet, worker, examined):
    gateway = start_gateway(fleet, worker)
    told = examined(gateway.url)
    assert told.status == 1 and told.verdict == f"a gateway, not a worker: {gateway.url}"
    assert f"--worker {worker.url}" in told.text


def test_a_gateway_with_keys_is_known_without_one(fleet, worker, examined, tmp_path):
    keys, key = tmp_path / "keys.toml", tmp_path / "admin"
    keys.write_text(entry("ann", admin=True))
    key.write_text(secret("ann"))
    gateway = start_gateway(fleet, worker, flags=("--api-keys", str(keys)))
    assert examined(gateway.url).verdict == f"a gateway, not a worker: {gateway.url}"
    none = examined(worker.url, "--gateway", gateway.url)
    assert none.status == 1 and none.verdict.startswith("not reachable: the gateway")
    assert "wants an API key" in none.verdict and "--gateway-key-file" in none.verdict
    asked = examined(worker.url, "--gateway", gateway.url, "--gateway-key-file", str(key))
    assert asked.status == 0 and re.search(r"lost in \d+ minutes", asked.text)
    key.write_text("wrong")
    wrong = examined(worker.url, "--gateway", gateway.url, "--gateway-key-file", str(key))
    assert wrong.status == 1 and "refuses the key" in wrong.verdict


def test_a_gateway_that_is_away_fails_for_a_cause(worker, examined):
    told = examined(worker.url, "--gateway", "127.0.0.1:9")
    assert told.status == 1 and told.verdict == (
        "not reachable: no gateway answers at http://127.0.0.1:9: connection refused: nothing listens there, or not yet"
    )
    assert "ok    patches are live" in told.text


def test_a_gateway_that_is_none_fails_and_what_is_wrong_with_the_worker_stays_the_verdict(worker, examined):
    worker.status = 404
    told = examined(worker.url, "--gateway", worker.url)
    assert told.status == 1 and told.verdict.startswith("cannot hit: ") and "does not show /seamark/status" in told.text
