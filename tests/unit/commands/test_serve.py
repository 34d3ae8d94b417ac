"""`seamark serve` around the server: what it says and checks before, and what its exit status means."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.commands import serve
from proxy.server import descriptors, memory, uvicorn_server


class Server:
    """uvicorn's."""

    def __init__(self) -> None:
        self.started = True
        self.ran: list[Any] = []

    def run(self, sockets: Any) -> None:
        self.ran.append(sockets)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    made.settings = []
    monkeypatch.setattr(serve.os, "environ", {})
    monkeypatch.setattr(uvicorn_server, "server_for", lambda settings, logging: made.settings.append(settings) or made)
    monkeypatch.setattr(uvicorn_server, "bound", lambda setting, host, port: [(setting, host, port)])
    monkeypatch.setattr(descriptors, "raise_limit", lambda: None)
    monkeypatch.setattr(memory, "give_large_blocks_back", lambda: None)
    monkeypatch.setattr(memory, "fitted", lambda settings: settings)
    thresholds = gc.get_threshold()
    yield made
    gc.set_threshold(*thresholds)
    gc.unfreeze()


WORKER = ["--worker", "http://a:1"]


def test_settings_that_are_wrong_start_nothing(server, capsys):
    assert serve.main([]) == serve.main([*WORKER, "--port", "x"]) == 2
    missing, wrong = capsys.readouterr().err.splitlines()
    assert missing.startswith("seamark serve: worker: none is given") and wrong.startswith("seamark serve: port: ")
    assert not server.ran


def test_a_variable_that_nothing_reads_is_named(server, monkeypatch, capsys):
    monkeypatch.setattr(serve.os, "environ", {"SEAMARK_PROT": "1", "SEAMARK_WORKER": "http://b:1"})
    assert serve.main([]) == 0 and server.settings[0].worker == ("http://b:1",)
    assert "SEAMARK_PROT is ignored" in capsys.readouterr().err


def test_less_memory_than_the_settings_want_is_said_with_what_is_taken(server, monkeypatch, capsys):
    monkeypatch.setattr(memory, "fitted", lambda settings: settings.model_copy(update={"memory_bytes": 5}))
    assert serve.main(WORKER) == 0 and server.settings[0].memory_bytes == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert "this process may not have the memory of the settings: " in line and "memory_bytes is 5" in line
