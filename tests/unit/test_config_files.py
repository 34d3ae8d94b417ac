"""Files an operator writes: complaints name setting, file and field, and never show a value."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from proxy.config_files import (
    MOST_BYTES,
    WatchedFile,
    WorkerEntry,
    base_url,
    read_file,
    read_model,
    read_secret,
    read_toml,
    read_workers,
    service_url,
    without_credentials,
    worker_url,
)
from proxy.errors import SettingsError


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int


@pytest.mark.parametrize("content", [b"count = ", b"\xff = 1", b"count: 1"])
def test_a_file_that_is_no_toml_is_refused_by_the_name_of_its_setting(tmp_path, content):
    path = tmp_path / "file.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=rf"^config: {path} is not TOML"):
        read_toml("config", path)


def test_a_file_nested_without_end_is_refused_by_the_name_of_its_setting(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text("a = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(SettingsError, match=rf"^api_keys: {path} is nested too deeply"):
        read_toml("api_keys", path)


@pytest.mark.parametrize(
    "content",
    [
        "count = " + "1" * 5000,  # more digits than Python reads
        "count = -" + "9" * 4301,
        "count = 0x" + "f" * 10**4 + "\ncount = 1" + "0" * 5000,
        "a" + ".a" * 2000 + " = 1",
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
        lambda path: path.symlink_to("/dev/tty"),
        lambda path: (fifo(path.with_name("pipe")), path.symlink_to("pipe")),
    ],
    ids=["FIFO", "socket", "folder", "device", "terminal", "link"],
)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path, make):
    path = tmp_path / "file"
    make(path)
    for read in (read_toml, read_secret):
        with pytest.raises(SettingsError, match=rf"^some_setting: {path} is no regular file"):
            read("some_setting", path)


def test_a_file_that_becomes_a_fifo_while_it_is_looked_at_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("count = 1")
    regular = path.stat()
    path.unlink()
    fifo(path)
    monkeypatch.setattr(Path, "stat", lambda self, **_: regular)
    with pytest.raises(SettingsError, match="no regular file"):
        read_toml("some_setting", path)


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


def test_a_file_that_is_not_there_is_refused_by_the_name_of_its_setting(tmp_path):
    for read in (read_toml, read_secret):
        with pytest.raises(SettingsError, match=r"^some_setting: .*nowhere cannot be read"):
            read("some_setting", tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content", ['count = "hunter2"\n', 'count = 1\ncuont = "hunter2"\n', '[hunter]\nx = "hunter2"']
)
def test_a_wrong_field_is_named_and_its_value_is_not_shown(tmp_path, content):
    path = tmp_path / "file.toml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"^api_keys: .*file.toml: (count|cuont|hunter)") as refused:
        read_model("api_keys", path, Model)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("coutn = 1", "count: it is missing; coutn: there is no such field; did you mean count?"),
        ("count = 1\nzzz = 1", "zzz: there is no such field"),
    ],
)
def test_a_field_that_is_missing_or_unknown_is_said_in_words_and_with_an_example(tmp_path, content, words):
    path = tmp_path / "file.toml"
    path.write_text(content)
    with pytest.raises(SettingsError) as refused:
        read_model("some_setting", path, Model, "count = 3")
    assert str(refused.value) == f"some_setting: {path}: {words}\nA correct entry:\ncount = 3"
    with pytest.raises(SettingsError, match=r"nowhere cannot be read .*\nA correct entry:\ncount = 3$"):
        read_model("some_setting", tmp_path / "nowhere", Model, "count = 3")


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


def test_a_watched_file_is_read_again_once_it_has_changed(tmp_path):
    path, reads = tmp_path / "file", []

    def read(path):
        reads.append(path.read_text())
        return reads[-1]

    path.write_text("first")
    watched = WatchedFile(path, read)
    assert (watched.value, watched.refresh(), reads) == ("first", False, ["first"])
    change(path, "other")  # as long as before
    assert (watched.refresh(), watched.value, watched.refresh()) == (True, "other", False)
    assert reads == ["first", "other"]


def test_a_watched_file_that_becomes_unusable_or_goes_keeps_its_value_and_says_so_once(tmp_path, caplog):
    path = tmp_path / "file.toml"
    path.write_text("count = 1")
    watched = WatchedFile(path, lambda path: read_model("some_setting", path, Model))
    change(path, "count = 'x'")
    assert [watched.refresh(), watched.refresh()] == [False, False] and not watched.is_current
    path.unlink()
    assert [watched.refresh(), watched.refresh()] == [False, False]
    assert watched.value.count == 1
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and all("some_setting" in each and "stays in force" in each for each in messages)
    change(path, "count = 2")
    assert watched.refresh() and watched.value.count == 2 and watched.is_current


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


def test_a_watched_file_that_is_unusable_from_the_first_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="some_setting"):
        WatchedFile(tmp_path / "nowhere", lambda path: read_model("some_setting", path, Model))


def test_workers_of_a_file_lose_their_v1_and_may_have_a_limit(tmp_path):
    path = tmp_path / "workers.toml"
    path.write_text('[[worker]]\nurl = "http://a:1/v1/"\n[[worker]]\nurl = " http://b "\nmax_inflight = 0\n')
    assert read_workers(path) == (("http://a:1", None), ("http://b", 0))
    path.write_text("")
    assert read_workers(path) == ()


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ('url = "localhost:8000"', "worker.0.url"),
        ('url = "http://a"\nmax_inflight = -1', "worker.0.max_inflight"),
        ('url = "http://a"\nmax_inflight = ' + "9" * 400, "worker.0.max_inflight"),
        ('url = "http://a"\nlimit = 1', "worker.0.limit"),
        ("max_inflight = 1", "worker.0.url"),
    ],
)
def test_a_wrong_worker_is_refused_by_its_field(tmp_path, entry, named):
    path = tmp_path / "workers.toml"
    path.write_text(f"[[worker]]\n{entry}\n")
    with pytest.raises(SettingsError, match=f"^workers_file: .*{named}"):
        read_workers(path)


@pytest.mark.parametrize("end", ["\nSEAMARK_API_KEYS=/tmp/k", "\r", "\tb", " b", "\x1b[2J", "\u2028b", "\x00"])
def test_an_address_with_a_line_of_its_own_in_it_is_none(end):
    with pytest.raises(ValueError, match="no spaces, line ends"):
        worker_url(f"http://a{end}/")
    with pytest.raises(ValueError, match="no spaces, line ends"):
        service_url(f"a{end}:8000")


def test_an_address_is_given_with_or_without_v1():
    assert {base_url(url) for url in ("http://a", "http://a/", "http://a/v1", "http://a/v1/")} == {"http://a"}
    assert worker_url("http://a/prefix/v1") == "http://a/prefix"
    with pytest.raises(ValueError, match="URL"):
        worker_url("nonsense")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:8000", ("http://host:8000", None)),
        ("http://host:8000/a", ("http://host:8000/a", None)),
        ("http://user:p%40ss@host:8000/a", ("http://host:8000/a", "user:p@ss")),
        ("https://user@[::1]:8000", ("https://[::1]:8000", "user:")),
    ],
)
def test_an_address_that_may_be_shown_has_no_credentials(url, shown):
    assert without_credentials(url) == shown


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("a:1", "http://a:1"),
        (" a.default.svc:8000 ", "http://a.default.svc:8000"),
        ("http://a:1", "http://a:1"),
        ("HTTP://a:1/", "HTTP://a:1"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_a_service_is_named_with_its_port(name, url):
    assert service_url(name) == url


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a", "NAME:PORT"),
        ("http://a", "NAME:PORT"),
        ("https://a:1", "https is not for addresses"),
        ("HTTPS://a:1", "https is not for addresses"),
        ("me:word@a:1", "no credentials"),
        ("a:99999", "URL|port"),
    ],
)
def test_a_service_that_is_no_name_with_a_port_is_refused(name, said):
    with pytest.raises(ValueError, match=said):
        service_url(name)


def test_a_file_may_be_as_large_as_the_bound(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as opened:
        opened.truncate(MOST_BYTES)
    assert len(read_file("some_setting", path)) == MOST_BYTES == 2**26


def test_a_workers_limit_has_a_bound(tmp_path):
    path = tmp_path / "workers.toml"
    path.write_text(f'[[worker]]\nurl = "http://a"\nmax_inflight = {2**31}\n')
    assert read_workers(path) == (("http://a", 2**31),)
    path.write_text(f'[[worker]]\nurl = "http://a"\nmax_inflight = {2**31 + 1}\n')
    with pytest.raises(SettingsError, match="max_inflight"):
        read_workers(path)


def test_what_is_in_force_stays_as_it_was_read(tmp_path):
    path = tmp_path / "workers.toml"
    path.write_text('[[worker]]\nurl = "http://a"\n')
    entry = WorkerEntry(url="http://a/v1")
    assert entry.url == "http://a" and entry.max_inflight is None
    with pytest.raises(ValueError, match="frozen"):
        entry.url = "http://b"  # type: ignore[misc]


def test_a_file_that_appears_where_none_was_is_read(tmp_path):
    path = tmp_path / "file"
    seen = []

    def read(path):
        seen.append(path.exists())
        return path.exists()

    watched = WatchedFile(path, read)
    assert not watched.value and not watched.refresh()
    path.write_text("x")
    assert watched.refresh() and watched.value and seen == [False, True]
    path.unlink()
    assert watched.refresh() and not watched.value
