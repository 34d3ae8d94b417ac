"""The port of a worker by its flags, and what holds one that is taken."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine_patches.commands.port import why_taken


class Denied(Exception):
    """Of `psutil`."""


def connection(port: int, pid: int | None, status: str = "LISTEN") -> SimpleNamespace:
    return SimpleNamespace(laddr=SimpleNamespace(port=port), pid=pid, status=status)


@pytest.mark.parametrize(
    ("connections", "holder"),
    [
        ([connection(8000, 5)], "process 5 (p5)"),
        ([connection(8001, 4), connection(8000, 5), connection(80, 6)], "process 5 (p5)"),
        ([connection(8000, None)], "another process"),
        ([connection(8000, 5, "ESTABLISHED")], "another process"),
        ([connection(8001, 5)], "another process"),
        (Denied(), "another process"),
    ],
)
def test_what_holds_a_port_is_named_if_that_can_be_seen(connections, holder, monkeypatch):
    def listed(kind: str) -> Any:
        assert kind == "tcp"
        if isinstance(connections, Exception):
            raise connections
        return connections

    psutil = ModuleType("psutil")
    psutil.CONN_LISTEN, psutil.Error, psutil.net_connections = "LISTEN", Denied, listed
    psutil.Process = lambda pid: SimpleNamespace(name=lambda: f"p{pid}")
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    assert why_taken("8000") == f"port 8000 is held by {holder}; --port N takes another"
