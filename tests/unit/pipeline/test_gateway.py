"""What a gateway is made of."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.errors import SettingsError
from proxy.fleet.part import Change, Part, Shelf
from proxy.pipeline.gateway import Gateway
from proxy.settings import Settings
from tests.harness.api_keys import entry


async def test_files_in_force_are_told_by_the_settings_that_name_them(tmp_path):
    path = tmp_path / "workers.toml"
    path.write_text("")
    gateway = Gateway(Settings(workers_file=path))

    def current(setting: str) -> float | None:
        return gateway.metrics.registry.get_sample_value("seamark_file_current", {"setting": setting})

    def errors() -> float | None:
        return gateway.metrics.registry.get_sample_value("seamark_config_reload_errors_total", {"file": "workers_file"})

    assert (current("workers_file"), current("api_keys")) == (1.0, None)
    assert errors() == 0.0
    for depth in (5000, 5001):
        path.write_text("a = " + "[" * depth + "]" * depth)
        gateway.pool.refresh()
        gateway.pool.refresh()  # unchanged since
        assert current("workers_file") == 0.0
    assert errors() == 2.0
    path.write_text('[[worker]]\nurl = "http://127.0.0.1:9"\n')
    gateway.pool.refresh()
    assert current("workers_file") == 1.0 and len(gateway.pool.workers) == 1 and errors() == 2.0
    await gateway.stop()


NUMBER = "9" * 5000  # more digits than Python reads


@pytest.mark.parametrize(
    ("setting", "good", "bad"),
    [
        ("api_keys", entry("ann"), entry("bob") + f"max_inflight = {NUMBER}\n"),
        ("api_keys", entry("ann"), entry("bob") + f"max_queued = -{NUMBER}\n"),
        ("api_keys", entry("ann"), entry("bob") * 2),
        ("workers_file", "", f'[[worker]]\nurl = "http://127.0.0.1:9"\nmax_inflight = {NUMBER}\n'),
        ("workers_file", "", f"a = 1e{NUMBER}\nb = {NUMBER}\n"),
        ("prefixes_file", "[]", '[{"name":"a","body":{"model":"m","messages":[{"content":NaN}]}}]'),
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
    await gateway.stop()
    with pytest.raises(SettingsError, match=f"^{setting}: "):
        Gateway(Settings(worker=("http://127.0.0.1:9",), **{setting: path}))


ONE = {"worker": ("http://127.0.0.1:9",)}


def parts_of(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[str]:
    """Names of what stands on the shelf of a gateway."""
    put: list[str] = []
    original = Shelf.put

    def noted(shelf: Shelf, part: Part) -> Part:
        put.append(part.name)
        return original(shelf, part)

    with monkeypatch.context() as patched:
        patched.setattr(Shelf, "put", noted)
        Gateway(Settings(**settings))
    return put


async def test_a_gateway_has_a_part_for_each_thing_that_is_wanted(monkeypatch):
    base = parts_of(monkeypatch, **ONE)
    assert len(set(base)) == len(base) == 6 and {"accounting", "pinned_prompts", "warm_up"} < set(base)
    more = {
        "response_cache": {"response_cache": 2**20},
        "redis_sync": {"redis": "redis://127.0.0.1:9"},
        "tracing": {"otlp_traces_endpoint": "http://127.0.0.1:9"},
    }
    for settings in more.values():
        assert len(parts_of(monkeypatch, **ONE, **settings)) == len(base) + 1, settings
    assert "response_cache" in parts_of(monkeypatch, **ONE, **more["response_cache"])
    found = parts_of(monkeypatch, workers_dns=("http://workers.invalid:8000",))
    assert len(found) == len(base) + 1 and "discovery" in found


async def test_nothing_of_a_worker_whose_answers_differ_is_used():
    gateway = Gateway(Settings(**ONE))
    gateway.prefix_index.forget_all, gateway.shelf.tell = Mock(), Mock()
    (worker,) = gateway.pool.workers
    gateway._distrust(worker)
    gateway.prefix_index.forget_all.assert_called_once_with(worker.boot)
    gateway.shelf.tell.assert_called_once_with(worker, Change.DISTRUSTED)


@pytest.mark.parametrize("lacking", ["opentelemetry", "another module"])
def test_only_the_lack_of_opentelemetry_is_a_matter_of_the_setting(monkeypatch, lacking):
    monkeypatch.delitem(sys.modules, "proxy.observability.tracing", raising=False)
    if lacking == "opentelemetry":
        for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "opentelemetry", None)
        with pytest.raises(SettingsError, match="otlp_traces_endpoint"):
            Gateway(Settings(otlp_traces_endpoint="http://127.0.0.1:9", **ONE))
    else:
        monkeypatch.setitem(sys.modules, "proxy.observability.tracing", None)
        with pytest.raises(ModuleNotFoundError):
            Gateway(Settings(otlp_traces_endpoint="http://127.0.0.1:9", **ONE))
