"""What a gateway is made of."""

from __future__ import annotations

from proxy.pipeline.gateway import Gateway
from proxy.settings import Settings


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
