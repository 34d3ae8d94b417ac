"""Ports for servers of commands: below those that the system gives to connections, and free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proxy.commands import render_server
from proxy.commands.render_server import free_port


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int]]]:
    """`bound(is_taken)`: the addresses that were tried, of a machine on which so many ports are taken."""

    def bound(is_taken: Callable[[int], bool]) -> list[tuple[str, int]]:
        tried: list[tuple[str, int]] = []

        class Socket:
            def __enter__(self) -> Socket:
                return self

            def __exit__(self, *error: Any) -> None:
                """It is closed."""

            def bind(self, address: tuple[str, int]) -> None:
                tried.append(address)
                if is_taken(address[1]):
                    raise OSError("taken")

        monkeypatch.setattr(render_server.socket, "socket", Socket)
        return tried

    return bound


def test_a_port_is_one_that_can_be_bound_on_this_machine_alone(bound):
    tried = bound(lambda port: len(tried) < 3)
    port = free_port()
    assert len(tried) == 3 and tried[-1] == ("127.0.0.1", port)
    assert all(15_000 <= each < 32_000 for _, each in tried) and len(set(tried)) == 3


def test_where_all_are_taken_that_is_said(bound):
    tried = bound(lambda port: True)
    with pytest.raises(OSError, match="None of 100 loopback ports"):
        free_port()
    assert len(set(tried)) == 100
