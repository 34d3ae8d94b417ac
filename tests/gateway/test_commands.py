"""The commands without an engine, with good and bad input."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from proxy.commands.doctor import _engine
from tests.harness.api_keys import entry, secret
from tests.harness.gateways import start_gateway


def seamark(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proxy.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9/v1"])
def test_doctor_without_a_server(url):
    done = seamark("doctor", "--worker", url)
    assert done.returncode == 1 and "no server answers" in done.stdout and "Traceback" not in done.stderr


def test_doctor_shows_a_key_where_one_is_wanted(fleet, worker, tmp_path):
    keys, key = tmp_path / "keys.toml", tmp_path / "key"
    keys.write_text(entry("vllm", admin=True))
    guarded = start_gateway(fleet, worker, flags=("--api-keys", str(keys)))
    done = seamark("doctor", "--worker", guarded.url)
    assert done.returncode == 1 and "wants an API key" in done.stdout and "--worker-api-key-file" in done.stdout
    key.write_text(secret("vllm") + "\n")
    done = seamark(
        *("doctor", "--worker", guarded.url, "--worker-api-key-file", str(key)),
        *("--gateway", guarded.url, "--gateway-key-file", str(key)),
    )
    assert "serves m" in done.stdout and re.search(r"lost in \d+ minutes", done.stdout)
    done = seamark("doctor", "--worker", guarded.url, "--worker-api-key-file", str(tmp_path / "none"))
    assert done.returncode == 2 and "worker_api_key_file" in done.stderr and "Traceback" not in done.stderr


def test_doctor_misses_the_feed_without_which_reasons_stay_unheard(worker):
    assert "the engine's decisions are reported" in seamark("doctor", "--worker", worker.url).stdout
    worker.has_feed = False
    done = seamark("doctor", "--worker", worker.url)
    assert done.returncode == 1 and "--middleware engine_patches.reporting.events_api.EventsEndpoint" in done.stdout


def test_doctor_asks_for_an_update_of_an_older_plugin(worker):
    assert "older than" not in seamark("doctor", "--worker", worker.url).stdout
    worker.version = "0.2.0"
    done = seamark("doctor", "--worker", worker.url)
    assert done.returncode == 1 and "older than 0.3" in done.stdout and "0.3 or later" in done.stdout


def test_the_cure_lets_a_worker_be_reached_from_where_it_is_asked_for():
    (finding,) = _engine(None, "m", "http://192.168.100.10:8000")
    assert "--host 0.0.0.0 --port 8000" in finding.cure
    (finding,) = _engine(None, "m", "http://127.0.0.1:8000")
    assert "--host" not in finding.cure


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("serve",), ("serve", "--worker", "nonsense")])
def test_a_wrong_command_line_exits_with_2_and_says_why(arguments):
    done = seamark(*arguments)
    assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr
