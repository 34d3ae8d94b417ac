"""What a gateway is made of."""

from __future__ import annotations

import pytest

from proxy.errors import SettingsError
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
