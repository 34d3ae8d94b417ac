"""What the gateway's server relies on inside uvicorn's, and what it makes of signals and of its connections."""

from __future__ import annotations

import asyncio
import inspect
import signal
import socket
import time

import pytest
import uvicorn

from proxy.errors import SettingsError
from proxy.server import uvicorn_server
from proxy.server.uvicorn_server import GatewayServer
from proxy.settings import Settings

# Methods of the server that are overridden, with their parameters.
METHODS = {
    "startup": ["sockets"],
    "shutdown": ["sockets"],
    "handle_exit": ["sig", "frame"],
    "on_tick": ["counter"],
    "capture_signals": [],
}

FAMILIES = {socket.AF_INET6: "::1", socket.AF_INET: "127.0.0.1"}

# Attributes that are read or written.
ATTRIBUTES = {"server_state", "should_exit", "force_exit", "_captured_signals"}


@pytest.mark.parametrize("name", METHODS)
def test_uvicorn_has_the_method_that_is_overridden(name):
    assert list(inspect.signature(getattr(uvicorn.Server, name)).parameters) == ["self", *METHODS[name]]


def test_uvicorn_has_the_attributes_that_are_used():
    assert vars(uvicorn.Server(uvicorn.Config("x"))).keys() >= ATTRIBUTES


class Files:
    """A gateway of which the server knows that it stops, and reads files."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_stopping = False
        self.read, self._error = 0, error

    def read_files(self):
        self.read += 1
        if self._error is not None:
            raise self._error


def server(gateway: Files, **settings) -> GatewayServer:
    return GatewayServer(uvicorn.Config("x"), Settings(worker=("http://127.0.0.1:9",), **settings), gateway)


async def test_a_stop_has_its_delay_and_then_comes(monkeypatch):
    gateway = Files()
    made = server(gateway, stop_delay=5)
    now = time.monotonic()
    monkeypatch.setattr(uvicorn_server.time, "monotonic", lambda: now)
    made.handle_exit(signal.SIGTERM, None)
    assert not await made.on_tick(0) and gateway.is_stopping and made.server_state.is_stopping
    now += 4.9
    assert not await made.on_tick(0)
    now += 0.2
    assert await made.on_tick(0) and made._captured_signals == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("signals", "delay"),
    [
        ((signal.SIGINT,), 5),
        ((signal.SIGTERM, signal.SIGTERM), 5),
        ((signal.SIGTERM, signal.SIGINT), 5),
        ((signal.SIGTERM,), 0),
    ],
)
async def test_who_is_in_a_hurry_waits_for_no_delay(signals, delay):
    made = server(Files(), stop_delay=delay)
    for each in signals:
        made.handle_exit(each, None)
    assert await made.on_tick(0) and not made.force_exit and made._captured_signals == list(signals)


@pytest.mark.parametrize("error", [None, RecursionError("nested too deep")])
async def test_files_are_read_once_for_a_signal_and_whatever_they_hold_ends_nothing(error):
    gateway = Files(error)
    made = server(gateway)
    assert not await made.on_tick(0) and gateway.read == 0
    made._read_files_soon(signal.SIGHUP, None)
    assert not await made.on_tick(0) and not await made.on_tick(1) and gateway.read == 1


class Looked:
    """A connection that notes when it is looked at."""

    def __init__(self, looked: asyncio.Event) -> None:
        self._looked = looked

    def check(self, now: float) -> None:
        self._looked.set()


async def test_all_connections_are_looked_at_as_often_as_the_shortest_bound_needs():
    made = server(Files(), client_timeout=0.04)
    looked = asyncio.Event()
    made.server_state.connections.add(Looked(looked))
    checks = asyncio.create_task(made._check_clients())
    await looked.wait()
    checks.cancel()
    assert made._interval == 0.01 and server(Files())._interval == uvicorn_server.CHECK_SECONDS


def test_where_a_name_has_an_address_of_a_family_that_is_off_the_other_is_listened_at(monkeypatch):
    both = [(family, socket.SOCK_STREAM, 0, "", (host, 0)) for family, host in FAMILIES.items()]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    (only,) = uvicorn_server.bound("port", "localhost", 0)
    with only:
        assert only.family == socket.AF_INET
    both.pop()
    with pytest.raises(SettingsError, match="port: nothing can listen on localhost"):
        uvicorn_server.bound("port", "localhost", 0)
