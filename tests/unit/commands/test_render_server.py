"""Ports for servers of commands: below those that the system gives to connections, and free."""

from __future__ import annotations

import socket

import pytest

from proxy.commands import render_server
from proxy.commands.render_server import free_port


@pytest.mark.parametrize("taken", [0, 3, 1000])
def test_a_port_is_one_that_can_be_bound_on_this_machine_alone_or_it_is_said_that_all_are_taken(taken, monkeypatch):
    tried: list[tuple[str, int]] = []

    class Socket(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            tried.append(address)
            if len(tried) <= taken:
                raise OSError("taken")
            super().bind(address)

    monkeypatch.setattr(render_server.socket, "socket", Socket)
    if taken < 100:
        assert ("127.0.0.1", free_port()) == tried[-1]
    else:
        with pytest.raises(OSError, match="None of 100 loopback ports"):
            free_port()
    assert len({*tried}) == len(tried) and all(15_000 <= port < 32_000 for _, port in tried)
