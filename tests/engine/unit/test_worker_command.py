"""`seamark worker` with the installed vLLM; all that it decides before: `tests/unit/engine/test_worker_command.py`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from engine_patches.commands.worker import main


@pytest.mark.parametrize("spelt", [["--port", "{}"], ["--port=1", "--port={}"], ["--config", "{}"]])
def test_a_port_that_is_taken_is_named_with_what_holds_it(monkeypatch, capsys, tmp_path, spelt):
    from vllm.entrypoints.cli import main as cli

    monkeypatch.setattr(cli, "importlib", cli.importlib)
    monkeypatch.setattr(sys, "argv", ["python"])
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        monkeypatch.setattr(cli, "main", lambda: socket.create_server(("127.0.0.1", int(port))))
        (tmp_path / "vllm.yaml").write_text(f"port: {port}\n")
        value = tmp_path / "vllm.yaml" if spelt[0] == "--config" else port
        assert main(["m", *(part.format(value) for part in spelt)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"seamark worker: port {port} is held by process {os.getpid()} (")


@pytest.mark.thorough  # so it is here
def test_a_model_that_cannot_be_had_costs_a_line():
    command = [sys.executable, "-m", "proxy.cli", "worker", "nobody/has-this-model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "seamark worker: the model is neither here nor to be had: " in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
