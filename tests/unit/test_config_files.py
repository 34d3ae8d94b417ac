"""Files an operator writes: complaints name setting, file and field, and never show a value."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from proxy.config_files import MOST_BYTES, WatchedFile, read_model, read_secret, read_toml, service_url, worker_url
from proxy.errors import SettingsError


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int


@pytest.mark.parametrize(
    "content",
    [
        "count = " + "1" * 5000,  # more digits than Python reads
        "a" + ".a" * 2000 + " = 1",
        "a = " + "[" * 5000 + "]" * 5000,
    ],
)
def test_whatever_a_reader_raises_the_file_is_refused_in_one_line_without_its_content(tmp_path, content):
    path = tmp_path / "file.toml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=rf"^api_keys: {path}") as refused:
        read_model("api_keys", path, Model)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def fifo(path: Path) -> None:
    os.mkfifo(path)


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        fifo,
        socket_at,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: (fifo(path.with_name("pipe")), path.symlink_to("pipe")),
    ],
    ids=["FIFO", "socket", "folder", "device", "link"],
)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path, make):
    path = tmp_path / "file"
    make(path)
    for read in (read_toml, read_secret):
        with pytest.raises(SettingsError, match=rf"^some_setting: {path} is no regular file"):
            read("some_setting", path)


def test_a_link_to_a_file_is_read_and_one_that_is_too_large_or_has_no_path_is_not(tmp_path):
    path = tmp_path / "link"
    (tmp_path / "file").write_text("count = 1")
    path.symlink_to("file")
    assert read_toml("some_setting", path) == {"count": 1}
    with (tmp_path / "file").open("ab") as opened:
        opened.truncate(MOST_BYTES + 1)
    with pytest.raises(SettingsError, match="more than"):
        read_toml("some_setting", path)
    with pytest.raises(SettingsError, match="some_setting"):
        read_toml("some_setting", Path("a\0b"))


def test_a_secret_loses_its_line_end_and_must_not_be_empty_or_binary(tmp_path):
    path = tmp_path / "secret"
    path.write_text("  hunter2\n")
    assert read_secret("secret_file", path) == "hunter2"
    for content in (b" \n", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match=r"^secret_file: "):
            read_secret("secret_file", path)


def change(path, content):
    """The content replaced at another time than before: file systems' clocks may be coarse."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(content)
    os.utime(path, ns=(before + 10**9, before + 10**9))


@pytest.mark.parametrize("error", [ValueError("hunter2"), RecursionError(), MemoryError(), KeyError("hunter2")])
def test_whatever_its_reader_raises_a_watched_file_counts_as_not_read(tmp_path, caplog, error):
    path = tmp_path / "file.toml"
    path.write_text("count = 1")
    failures = []

    def read(path):
        if "2" in path.read_text():
            raise error
        return 1

    watched = WatchedFile(path, read)
    watched.failed = lambda: failures.append(1)
    change(path, "count = 2")
    assert [watched.refresh(), watched.refresh()] == [False, False]
    assert not watched.is_current and watched.value == 1 and failures == [1]
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "stays in force" in record.getMessage()
    assert "hunter2" not in caplog.text and "\n" not in record.getMessage()
    with pytest.raises(SettingsError, match="cannot be used"):
        WatchedFile(path, read)


def test_a_watched_file_that_is_replaced_by_a_fifo_stops_nothing(tmp_path, caplog):
    path = tmp_path / "file.toml"
    path.write_text("count = 1")
    watched = WatchedFile(path, lambda path: read_model("some_setting", path, Model))
    path.unlink()
    fifo(path)
    assert not watched.refresh() and not watched.is_current and watched.value.count == 1
    assert "no regular file" in caplog.text


@pytest.mark.parametrize("end", ["\nSEAMARK_API_KEYS=/tmp/k", "\r", "\tb", " b", "\x1b[2J", "\u2028b", "\x00"])
def test_an_address_with_a_line_of_its_own_in_it_is_none(end):
    with pytest.raises(ValueError, match="no spaces, line ends"):
        worker_url(f"http://a{end}/")
    with pytest.raises(ValueError, match="no spaces, line ends"):
        service_url(f"a{end}:8000")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("http://a", "NAME:PORT"),
        ("https://a:1", "https is not for addresses"),
        ("me:word@a:1", "no credentials"),
        ("a:99999", "URL|port"),
    ],
)
def test_a_service_that_is_no_name_with_a_port_is_refused(name, said):
    with pytest.raises(ValueError, match=said):
        service_url(name)
