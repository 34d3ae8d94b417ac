"""What holds a port is told by its process and by its answers, as far as either says anything."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from proxy.server import port_holder
from proxy.server.port_holder import holder_of


def table(*rows: tuple[str, str, int]) -> str:
    """As /proc/net/tcp: address, state and inode of each socket."""
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    lines = [
        f"   {number}: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000  1000        0 {inode} 1 0"
        for number, (local, state, inode) in enumerate(rows)
    ]
    return "\n".join([head, *lines]) + "\n"


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """Another /proc, in which process 42 (`other`) has socket 7."""
    (tmp_path / "net").mkdir()
    (tmp_path / "42" / "fd").mkdir(parents=True)
    (tmp_path / "42" / "comm").write_text("other\n")
    (tmp_path / "42" / "fd" / "3").symlink_to("socket:[7]")
    (tmp_path / "41" / "fd").mkdir(parents=True)
    (tmp_path / "41" / "fd" / "1").symlink_to("socket:[8]")
    monkeypatch.setattr(
        port_holder, "Path", lambda first, *more: Path(str(first).replace("/proc", str(tmp_path)), *more)
    )
    monkeypatch.setattr(port_holder, "_server_at", lambda host, port: "")
    return tmp_path


def test_the_process_that_listens_is_named(monkeypatch):
    monkeypatch.setattr(port_holder, "_server_at", lambda host, port: "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        mine = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"
        assert holder_of("127.0.0.1", port) == mine
    assert holder_of("127.0.0.1", port) == ""


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (("tcp", "0100007F:1F90", "0A", 7), "process 42 (other)"),
        (("tcp6", "00000000000000000000000000000000:1F90", "0A", 7), "process 42 (other)"),
        (("tcp", "0100007F:1F90", "01", 7), ""),  # a connection
        (("tcp", "0100007F:1F91", "0A", 7), ""),
        (("tcp", "0100007F:1F90", "0A", 9), ""),  # of a process that cannot be seen
        (("tcp", "0100007F:1F90", "0A", 8), ""),  # of one that has ended meanwhile
    ],
)
def test_who_listens_stands_in_either_table(proc, row, found):
    name, *socket_of_it = row
    (proc / "net" / name).write_text(table(("0100007F:0001", "0A", 8), socket_of_it))
    assert holder_of("127.0.0.1", 8080) == found


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

    monkeypatch.setattr(port_holder, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(port_holder, "_process_at", lambda port: "process 42 (other)")
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        told = await asyncio.to_thread(holder_of, "127.0.0.1", port)
    assert told == ", ".join(filter(None, ("process 42 (other)", found)))


@pytest.mark.parametrize("host", ["no host at all", "127.0.0.1"])
def test_where_nothing_answers_nothing_is_told(monkeypatch, host):
    monkeypatch.setattr(port_holder, "_process_at", lambda port: "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert holder_of(host, free.getsockname()[1]) == ""
