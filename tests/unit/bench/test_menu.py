"""What `seamark bench` says if what it starts does not come up."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from proxy.bench import menu
from proxy.bench.harness.servers import Server, Servers


def test_a_server_that_ends_is_told_with_the_end_of_its_log_and_no_traceback(tmp_path, monkeypatch, capsys):
    def benchmark(argv: list[str]) -> int:
        log = tmp_path / "engine.log"
        log.write_text("ValueError: no such model\n")
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
        process.wait()
        Server("seamark", "http://127.0.0.1:9", log, process).wait_until_ready()
        return 0

    module = SimpleNamespace(main=benchmark)
    monkeypatch.setattr(menu, "importlib", SimpleNamespace(import_module=lambda name: module))
    assert menu.main(["demo"]) == 1
    assert capsys.readouterr().err == "seamark bench: seamark ended with 7:\nValueError: no such model\n"


def test_where_the_gateway_lacks_a_library_none_is_started(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "proxy.server.uvicorn_server", None)
    with Servers(tmp_path) as servers:
        with pytest.raises(ModuleNotFoundError):
            servers.gateway()
        assert not servers.started
