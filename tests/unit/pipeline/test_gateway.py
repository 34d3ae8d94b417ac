"""What a gateway is made of."""

from __future__ import annotations

import sys
from unittest.mock import Mock

import pytest

from proxy.errors import SettingsError
from proxy.fleet.part import Change
from proxy.pipeline.gateway import Gateway
from proxy.settings import Settings
from tests.harness.api_keys import entry

NUMBER = "9" * 5000  # more digits than Python reads


@pytest.mark.parametrize(
    ("setting", "good", "bad"),
    [
        ("api_keys", entry("ann"), entry("bob") + f"max_inflight = {NUMBER}\n"),
        ("api_keys", entry("ann"), entry("bob") * 2),
        ("workers_file", "", f'[[worker]]\nurl = "http://127.0.0.1:9"\nmax_inflight = {NUMBER}\n'),
        ("workers_file", "", "a = " + "[" * 5000 + "]" * 5000),
        ("prefixes_file", "[]", '[{"name":"a","body":{"messages":[{}],"model":"m","seed":' + NUMBER + "}}]"),
    ],
)
async def test_a_file_that_its_reader_chokes_on_is_told_as_not_read_whichever_it_is(
    tmp_path, caplog, setting, good, bad
):
    """By a metric, and once by a line; a key that it would revoke is valid until that is mended."""
    path = tmp_path / "file"
    path.write_text(good)
    gateway = Gateway(Settings(worker=() if setting == "workers_file" else ("http://127.0.0.1:9",), **{setting: path}))
    value = gateway.metrics.registry.get_sample_value
    path.write_text(bad)
    for _ in range(2):
        gateway.read_files()
    assert value("seamark_file_current", {"setting": setting}) == 0.0
    assert value("seamark_config_reload_errors_total", {"file": setting}) == 1.0
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"{setting}: {path}") and "stays in force" in line and "\n" not in line and len(line) < 300
    path.write_text(good + "\n")
    gateway.read_files()
    assert value("seamark_file_current", {"setting": setting}) == 1.0
    others = {"api_keys", "workers_file", "prefixes_file"} - {setting}
    assert {value("seamark_file_current", {"setting": other}) for other in others} == {None}
    await gateway.stop()
    path.write_text(bad)
    with pytest.raises(SettingsError, match=f"^{setting}: "):
        Gateway(Settings(worker=("http://127.0.0.1:9",), **{setting: path}))


ONE = {"worker": ("http://127.0.0.1:9",)}


async def test_nothing_of_a_worker_whose_answers_differ_is_used():
    gateway = Gateway(Settings(**ONE))
    gateway.prefix_index.forget_all, gateway.shelf.tell = Mock(), Mock()
    (worker,) = gateway.pool.workers
    gateway._distrust(worker)
    gateway.prefix_index.forget_all.assert_called_once_with(worker.boot)
    gateway.shelf.tell.assert_called_once_with(worker, Change.DISTRUSTED)


def test_the_lack_of_opentelemetry_is_a_matter_of_the_setting(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "proxy.observability.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SettingsError, match="otlp_traces_endpoint"):
        Gateway(Settings(otlp_traces_endpoint="http://127.0.0.1:9", **ONE))
