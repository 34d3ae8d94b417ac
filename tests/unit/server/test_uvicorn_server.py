"""What the gateway's server relies on inside uvicorn's, and what it makes of signals and of its connections."""

from __future__ import annotations

import asyncio
import inspect
import signal
import socket
import tomllib
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.errors import SettingsError
from proxy.server import uvicorn_server
from proxy.server.uvicorn_server import GatewayServer, server_for
from proxy.settings import Settings
from tests.harness.waiting import until

ROOT = Path(__file__).parents[3]

FAMILIES = {socket.AF_INET6: "::1", socket.AF_INET: "127.0.0.1"}


# What is overridden, or called, with its parameters.
METHODS = {
    uvicorn.Server: "startup sockets, shutdown sockets, handle_exit sig frame, on_tick counter, capture_signals",
    HttpToolsProtocol: "connection_made transport, connection_lost exc, data_received data, on_message_begin, "
    "on_headers_complete, on_message_complete, on_response_complete, on_url url, on_header name value, "
    "resume_writing, send_400_response msg, timeout_keep_alive_handler",
}


def test_uvicorn_has_what_is_overridden_called_and_read_and_is_within_its_cap():
    for owner, methods in METHODS.items():
        for name, *parameters in map(str.split, methods.split(", ")):
            assert list(inspect.signature(getattr(owner, name)).parameters) == ["self", *parameters], name
    server = uvicorn.Server(uvicorn.Config("x", log_config=None))
    assert vars(server).keys() >= {"server_state", "should_exit", "force_exit", "_captured_signals"}
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = next(each for each in map(Requirement, dependencies) if each.name == "uvicorn")
    assert {each.operator for each in wanted.specifier} == {">=", "<"} and uvicorn.__version__ in wanted.specifier


class Files:
    """A gateway of which the server knows that it stops, and reads files."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_stopping = False
        self.read, self._error = 0, error
        self.settings = Settings(worker=("http://127.0.0.1:9",))
        self.pool = SimpleNamespace(workers=[1])

    def read_files(self):
        self.read += 1
        if self._error is not None:
            raise self._error


def server(gateway: Files, **settings) -> GatewayServer:
    return GatewayServer(
        uvicorn.Config("x", log_config=None), Settings(worker=("http://127.0.0.1:9",), **settings), gateway
    )


async def test_a_stop_has_its_delay_and_then_comes(monkeypatch):
    gateway = Files()
    made = server(gateway, stop_delay=5)
    now = began = 1000.0
    monkeypatch.setattr(uvicorn_server.time, "monotonic", lambda: now)
    made.handle_exit(signal.SIGTERM, None)
    assert not await made.on_tick(0) and gateway.is_stopping and made.server_state.is_stopping
    now += 4.9
    assert not await made.on_tick(0)
    now = began + 5.0  # its very end
    assert await made.on_tick(0) and made._captured_signals == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("signals", "delay"),
    [
        ((signal.SIGINT,), 5),
        ((signal.SIGTERM, signal.SIGTERM), 5),
        ((signal.SIGINT, signal.SIGTERM), 5),  # which ends already
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


def test_a_signal_to_read_files_is_taken_while_the_server_runs_and_left_to_others_afterwards():
    gateway, before = Files(), signal.getsignal(signal.SIGHUP)
    made = server(gateway)
    with suppress(ValueError), made.capture_signals():
        signal.raise_signal(signal.SIGHUP)
        assert asyncio.run(made.on_tick(0)) is False and gateway.read == 1
        raise ValueError("planned")
    assert signal.getsignal(signal.SIGHUP) is before


async def app(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("settings", "workers", "said", "unsaid"),
    [
        ({}, [1], ("base_url http://127.", "live page http://127."), ("API key", "shadow mode", "no worker")),
        ({"admin_port": 0}, [1], ("base_url",), ("live page",)),
        ({"shadow": True}, [1], ("shadow mode",), ()),
        ({"workers_dns": ("http://workers:8000",), "worker": ()}, [], ("base_url",), ("there is no worker",)),
    ],
)
async def test_a_server_says_where_it_is_reached_and_what_is_missing(caplog, settings, workers, said, unsaid):
    gateway = Files()
    gateway.settings = Settings(**{"worker": ("http://127.0.0.1:9",), **settings})
    gateway.pool.workers = workers
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None)
    made = GatewayServer(config, gateway.settings, gateway)
    with caplog.at_level("INFO", "seamark.gateway"):
        serving = asyncio.create_task(made.serve())
        await until(lambda: "base_url" in caplog.text)
        made.should_exit = True
        await serving
    assert [words for words in said if words not in caplog.text] == []
    assert [words for words in unsaid if words in caplog.text] == []


async def test_pages_have_a_server_of_their_own_for_as_long_as_the_gateway_runs(caplog):
    settings = Settings(worker=("http://127.0.0.1:9",), port=0, admin_port=0, host="127.0.0.1", admin_host="127.0.0.1")
    with caplog.at_level("INFO", "seamark.gateway"):
        made = server_for(settings, {"version": 1, "incremental": True})
        serving = asyncio.create_task(made.serve())
        await until(lambda: "live page" in caplog.text and "base_url" in caplog.text)
        (page,) = (line.rpartition(" ")[2] for line in caplog.text.splitlines() if "live page" in line)
        (base,) = (line.partition("base_url ")[2].split()[0] for line in caplog.text.splitlines() if "base_url" in line)
        async with httpx.AsyncClient() as client:
            answers = [await client.get(url) for url in (page, base.removesuffix("/v1") + "/ui", base + "/../health")]
            assert [answer.status_code for answer in answers] == [200, 404, 200]
            assert "date" not in answers[2].headers and "server" not in answers[2].headers
            made.should_exit = True
            await serving
            with pytest.raises(httpx.ConnectError):
                await client.get(page)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_port_that_is_had_is_bound_and_not_listened_at_yet(host):
    with ExitStack() as stack:
        sockets = [stack.enter_context(each) for each in uvicorn_server.bound("port", host, 0)]
        for each in sockets:
            assert each.getsockname()[1] and each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
            assert not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            # The other socket has IPv4.
            assert each.family == socket.AF_INET or each.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        found = {each.family for each in sockets}
        assert socket.AF_INET in found and (host or not socket.has_dualstack_ipv6() or socket.AF_INET6 in found)


def test_an_address_that_cannot_be_had_is_told_with_what_holds_it_if_something_does(monkeypatch):
    def refused(setting: str, host: str, port: int) -> str:
        with pytest.raises(SettingsError) as error:
            uvicorn_server.bound(setting, host, port)
        return str(error.value)

    monkeypatch.setattr(uvicorn_server, "holder_of", lambda host, port: f"somebody at {host}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refused("admin_port", "127.0.0.1", port)
        assert told.startswith(f"admin_port: nothing can listen on 127.0.0.1:{port} ") and "somebody at 127" in told
        assert "held by somebody at 127.0.0.1" in refused("port", "0.0.0.0", port)  # noqa: S104
        monkeypatch.setattr(uvicorn_server, "holder_of", lambda host, port: "")
        assert "held" not in refused("port", "127.0.0.1", port)
    monkeypatch.setattr(uvicorn_server, "holder_of", lambda host, port: pytest.fail("it was asked"))
    assert refused("port", "192.0.2.1", 8080).startswith("port: nothing can listen on 192.0.2.1:8080")

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "nothing can listen on elsewhere:8080 (not known)" in refused("port", "elsewhere", 8080)
