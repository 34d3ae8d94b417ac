"""What the server relies on inside uvicorn's, what it makes of signals, and of the port, memory and log that it has."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import resource
import signal
import socket
import tomllib
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
import uvicorn
from packaging.requirements import Requirement

from proxy import printable
from proxy.errors import SettingsError
from proxy.printable import LINES, MOST_MESSAGES, PERIOD_SECONDS, LogLimit
from proxy.server import process_limits, uvicorn_server
from proxy.server.process_limits import BOUNDS, SHARE, fitted, most_connections, raise_descriptor_limit, room
from proxy.server.uvicorn_server import GatewayServer, holder_of, server_for
from proxy.settings import Settings
from tests.harness.waiting import until

ROOT = Path(__file__).parents[3]


# What is overridden, with its parameters.
METHODS = "startup sockets, shutdown sockets, handle_exit sig frame, on_tick counter, capture_signals"


def test_uvicorn_has_what_is_overridden_called_and_read_and_is_within_its_cap():
    for name, *parameters in map(str.split, METHODS.split(", ")):
        assert list(inspect.signature(getattr(uvicorn.Server, name)).parameters) == ["self", *parameters], name
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

    def read_files(self):
        self.read += 1
        if self._error is not None:
            raise self._error


def server(gateway: Files, **settings) -> GatewayServer:
    settings = Settings(worker=("http://127.0.0.1:9",), **settings)
    return GatewayServer(uvicorn.Config("x", log_config=None), settings, gateway)


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


async def test_who_insists_has_requests_and_gateway_ended_at_once_and_is_told_once():
    made = server(Files())
    made.lifespan, request = AsyncMock(), asyncio.create_task(asyncio.Event().wait())
    made.server_state.tasks.add(request)
    for _ in range(3):
        made.handle_exit(signal.SIGINT, None)
    made.servers = []
    await made.shutdown()
    made.lifespan.shutdown.assert_awaited_once()
    assert request.cancelling() and made._captured_signals == [signal.SIGINT]


@pytest.mark.parametrize("error", [None, RecursionError("nested too deep")])
async def test_files_are_read_once_for_a_signal_and_whatever_they_hold_ends_nothing(error):
    gateway = Files(error)
    made = server(gateway)
    assert not await made.on_tick(0) and gateway.read == 0
    made._read_files_soon(signal.SIGHUP, None)
    assert not await made.on_tick(0) and not await made.on_tick(1) and gateway.read == 1


def test_where_a_name_has_an_address_of_a_family_that_is_off_the_other_is_listened_at(monkeypatch):
    families = {socket.AF_INET6: "::1", socket.AF_INET: "127.0.0.1"}
    both = [(family, socket.SOCK_STREAM, 0, "", (host, 0)) for family, host in families.items()]
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


@pytest.mark.parametrize("host", ["127.0.0.1", "", "::"])
def test_a_port_that_is_had_is_bound_and_not_listened_at_yet(host):
    with ExitStack() as stack:
        sockets = [stack.enter_context(each) for each in uvicorn_server.bound("port", host, 0)]
        for each in sockets:
            assert each.getsockname()[1] and each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
            assert not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if each.family == socket.AF_INET6:  # alone it takes IPv4, too; else the other socket has that
                assert each.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == (not host)
        assert len({each.family for each in sockets}) == (2 if not host and socket.has_dualstack_ipv6() else 1)


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


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_process_that_listens_is_named_and_no_other_that_has_a_connection(monkeypatch, host):
    monkeypatch.setattr(uvicorn_server, "_server_at", lambda host, port: "")
    with (
        suppress(OSError),
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as it,
    ):
        port = it.getsockname()[1]
        with socket.create_connection((host, port)) as other:
            mine = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"
            assert holder_of(host, port) == mine and holder_of(host, other.getsockname()[1]) == ""
    assert holder_of(host, port) == ""


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({"/health": '{"gateway": "g"}', "/version": '{"version": "0.33.0"}'}, "a Seamark gateway"),
        ({"/health": "", "/version": '{"version": "0.33.0"}'}, "vLLM 0.33.0"),
        ({"/health": "{}", "/version": "{}"}, ""),
        ({}, ""),
    ],
)
async def test_a_server_is_told_by_its_answers(monkeypatch, answers, found):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        body = answers.get(path, "nothing").encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    monkeypatch.setattr(uvicorn_server, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(uvicorn_server, "_process_at", lambda port: "process 42 (other)")
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        told = await asyncio.to_thread(holder_of, "127.0.0.1", port)
    assert told == ", ".join(filter(None, ("process 42 (other)", found)))


@pytest.mark.parametrize(
    ("limit", "wanted", "most"),
    [
        (256, 0, 96),
        (256, 1, 1),
        (256, 1000, 96),
        (resource.RLIM_INFINITY, 10, 10),
    ],
)
def test_as_many_clients_as_have_two_descriptors_each(monkeypatch, limit, wanted, most):
    monkeypatch.setattr(process_limits.resource, "getrlimit", lambda which: (limit, limit))
    assert most_connections(wanted) == most


def test_the_soft_limit_is_raised_to_the_hard_one_where_that_is_allowed(monkeypatch):
    limits = [(256, 4096)]
    monkeypatch.setattr(process_limits.resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(process_limits.resource, "setrlimit", lambda which, wanted: limits.append(wanted))
    raise_descriptor_limit()
    assert limits[-1] == (4096, 4096)

    limits.append((256, 4096))
    monkeypatch.setattr(process_limits.resource, "setrlimit", Mock(side_effect=OSError))
    raise_descriptor_limit()


def record(message: str, *args: object, name: str = "uvicorn.error", level: int = logging.WARNING):
    return logging.LogRecord(name, level, "", 0, message, args, None)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(printable.time, "monotonic", lambda: now[0])
    return now


def test_a_few_lines_of_a_message_pass_and_the_next_period_says_how_many_did_not(clock):
    limit = LogLimit()
    assert [limit.filter(record("from %s", number)) for number in range(LINES + 7)] == [True] * LINES + [False] * 7
    assert limit.filter(record("another"))
    clock[0] += PERIOD_SECONDS
    again = record("from %s", 3)
    assert limit.filter(again) and again.getMessage() == "from 3 (7 more of these were left out)"
    assert limit.filter(record("from %s", 4))


def test_a_message_that_is_known_costs_no_other_its_count(clock):
    limit = LogLimit()
    for number in range(MOST_MESSAGES):
        assert all(limit.filter(record(f"{number}")) for _ in range(LINES))
    assert not limit.filter(record("0"))
    clock[0] += PERIOD_SECONDS
    assert limit.filter(record("0"))
    clock[0] -= 1
    assert not limit.filter(record("1"))  # its period is not over
    for number in range(2 * MOST_MESSAGES):
        assert limit.filter(record(f"other {number}")) and len(limit._periods) <= MOST_MESSAGES


@pytest.mark.parametrize(
    ("name", "level", "is_limited"),
    [
        ("uvicorn", logging.WARNING, True),
        ("uvicornx", logging.WARNING, False),
        ("uvicorn.error", logging.WARNING - 1, False),
    ],
)
def test_warnings_and_worse_of_uvicorn_are_limited(clock, name, level, is_limited):
    limit = LogLimit()
    passed = [limit.filter(record("x", name=name, level=level)) for _ in range(LINES + 1)]
    assert passed == [True] * LINES + [not is_limited]


MIB = 2**20


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Sets the limits of a process of 300 MiB, 60 of them resident; in MiB, None for no limit."""

    def set_to(address_space: int | None, group: int | str) -> None:
        pages = MIB // resource.getpagesize()
        (tmp_path / "statm").write_text(f"{300 * pages} {60 * pages} 1 1 0 1 0")
        (tmp_path / "group").write_text(f"{group * MIB if isinstance(group, int) else group}\n")
        for name in ("RESERVED_BYTES", "LOADED_BYTES"):
            monkeypatch.setattr(process_limits, name, 0)
        monkeypatch.setattr(process_limits, "PROCESS", tmp_path / "statm")
        monkeypatch.setattr(process_limits, "GROUP_LIMITS", (tmp_path / "group", tmp_path / "none"))
        soft = resource.RLIM_INFINITY if address_space is None else address_space * MIB
        monkeypatch.setattr(process_limits.resource, "getrlimit", lambda which: (soft, soft))

    return set_to


@pytest.mark.parametrize(
    ("address_space", "group", "left"),
    [(None, "max", None), (512, "max", 212), (None, 512, 452), (512, 512, 212), (1024, 512, 452), (200, "max", 0)],
)
def test_what_is_left_is_the_least_that_any_limit_leaves(limits, address_space, group, left):
    limits(address_space, group)
    assert room() == (left if left is None else left * MIB)
    process_limits.PROCESS.unlink()  # without a way to know nothing changes
    assert room() is None


def test_bounds_that_do_not_fit_are_made_smaller_in_proportion(limits):
    limits(512, "max")
    found = fitted(Settings(max_bodies_bytes=600 * MIB, memory_bytes=300 * MIB, text_bytes=100 * MIB))
    assert sum(getattr(found, name) for name in BOUNDS) == pytest.approx(212 * MIB * SHARE, rel=0.01)
    assert found.max_bodies_bytes == pytest.approx(2 * found.memory_bytes, rel=0.01)
    assert found.max_body_bytes == found.max_bodies_bytes and found.max_connections == 212
    limits(200, "max")  # nothing is left
    found = fitted(Settings())
    assert [getattr(found, name) for name in (*BOUNDS, "max_body_bytes", "max_connections")] == [1] * 5
    assert fitted(Settings(text_bytes=0)).text_bytes == 0
    limits(340, "max")  # 40 MiB are left, and bounds get a quarter
    exactly = Settings(max_bodies_bytes=5 * MIB, memory_bytes=4 * MIB, text_bytes=MIB, max_body_bytes=MIB)
    assert fitted(exactly) is exactly
    found = fitted(exactly.model_copy(update={"text_bytes": MIB + 100}))
    assert found != exactly and found.max_body_bytes == MIB and found.max_connections == 40


def test_large_blocks_are_asked_to_be_given_back_where_the_allocator_can(monkeypatch):
    asked = []
    libc = SimpleNamespace(mallopt=lambda what, size: asked.append((what, size)))
    monkeypatch.setattr(process_limits.ctypes, "CDLL", lambda name: libc)
    process_limits.give_large_blocks_back()
    assert asked == [(-3, MIB)]  # M_MMAP_THRESHOLD
    monkeypatch.setattr(process_limits.ctypes, "CDLL", lambda name: object())
    process_limits.give_large_blocks_back()
    assert len(asked) == 1
