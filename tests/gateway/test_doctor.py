"""What `seamark doctor` says of real servers; all else that it says: `tests/unit/commands/test_doctor.py`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from proxy.commands import doctor
from tests.harness.api_keys import entry, secret
from tests.harness.gateways import start_gateway
from tests.harness.recording_worker import recording_worker


@pytest.fixture
def examined(capsys) -> Callable[..., tuple[int, str]]:
    """`examined(url, *flags)`: the exit status, and what the doctor prints."""

    def examined(url: str, *flags: str) -> tuple[int, str]:
        status = doctor.main(["--worker", url, *flags])
        out, err = capsys.readouterr()
        assert not err
        return status, out

    return examined


def test_a_worker_with_the_plugin_will_hit_and_one_without_is_told_the_cure(worker, examined):
    status, text = examined(worker.url)
    assert status == 0 and text.startswith(f"will hit: {worker.url} serves m\n") and "WRONG" not in text
    with recording_worker(patched=False, more_metrics='vllm:cache_config_info{block_size="2096"} 1.0\n') as plain:
        status, text = examined(plain.url, "--runs-as", "pip")
    assert status == 1 and text.startswith("cannot hit: the plugin is not in this vLLM")
    install, start = text.splitlines()[-2:]
    assert "pip install --no-deps" in install and f"--port {plain.url.rpartition(':')[2]}" in start


def test_a_gateway_is_no_worker_and_tells_its_losses_to_an_operators_key(fleet, worker, examined, tmp_path):
    keys, key = tmp_path / "keys.toml", tmp_path / "admin"
    keys.write_text(entry("ann", admin=True))
    gateway = start_gateway(fleet, worker, flags=("--api-keys", str(keys)))
    status, text = examined(gateway.url)
    assert status == 1 and text.startswith(f"a gateway, not a worker: {gateway.url}\n")
    status, text = examined(worker.url, "--gateway", gateway.url)
    assert status == 1 and "wants an API key" in text and "--gateway-key-file" in text
    for given, status, words in ((secret("ann"), 0, r"lost in \d+ minutes"), ("wrong", 1, "refuses the key")):
        key.write_text(given)
        found, text = examined(worker.url, "--gateway", gateway.url, "--gateway-key-file", str(key))
        assert found == status and re.search(words, text)
