"""A directory of states that is not its worker's alone: what others made stays, and what others do stops nobody."""

from __future__ import annotations

import fcntl
import os
import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_patches.disk import files
from engine_patches.disk.files import HEADER_BYTES, LOCK, NotOurs, RefusedFile, StateFiles
from tests.harness import damaged_files
from tests.harness.damaged_files import strangers_files
from tests.harness.state_files import BLOCK, IDENTITY, block_of, directory, key_of, load, path_of, store

FILE = HEADER_BYTES + BLOCK


def with_strangers(folder: Path) -> tuple[Path, set[Path]]:
    """A directory with two states, and somebody's files in it, with names of every kind, the oldest of all."""
    root = folder / "states"
    store(directory(root), 1, 2)
    path, other = path_of(root, 1), path_of(root, 2)
    for put in (damaged_files.strange_names, damaged_files.linked_folders):
        put(random.Random(1), path, other)
    (root / LOCK).unlink()
    return root, strangers_files(folder)


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_what_others_have_in_the_directory_stays_as_it_is(tmp_path: Path, mode):
    root, there = with_strangers(tmp_path)
    root.chmod(mode)
    held = directory(root, max_bytes=3 * FILE)
    store(held, *range(3, 12))
    assert len(held.keys()) == 3 and strangers_files(tmp_path) == there and len(there) > 10
    assert stat.S_IMODE(root.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o702])
def test_a_directory_in_which_others_may_write_is_refused_in_words_and_stays_as_it_is(tmp_path: Path, mode):
    root, there = with_strangers(tmp_path)
    root.chmod(mode)
    held = StateFiles(root, IDENTITY, BLOCK, FILE)
    for call in (held.prepare, lambda: store(held, 1)):
        with pytest.raises(NotOurs, match=rf"{root} can be written to by others \(mode {mode:o}\): name one"):
            call()
    assert stat.S_IMODE(root.stat().st_mode) == mode and strangers_files(tmp_path) == there
    assert not (root / LOCK).exists()


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch):
    held = directory(tmp_path)
    store(held, 1)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NotOurs, match="belongs to another user"):
        held.prepare()
    with pytest.raises(RefusedFile) as refused:
        load(held, 1)
    assert refused.value.reason == files.UNREADABLE and not held.keys() and path_of(tmp_path, 1).exists()


@pytest.mark.parametrize("damage", [damaged_files.link_for_folder, damaged_files.open_to_a_group])
def test_a_folder_in_it_that_others_may_reach_is_refused(tmp_path: Path, damage):
    root = tmp_path / "states"
    store(directory(root), 1, 2)
    damage(random.Random(1), path_of(root, 1), path_of(root, 2))
    with pytest.raises(NotOurs):
        directory(root)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """As by another process."""
    descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_who_waits_for_the_lock_gives_up_says_so_and_reads_on(tmp_path: Path, monkeypatch):
    store(directory(tmp_path), 1)
    monkeypatch.setattr(files, "START_LOCK_SECONDS", 0.05)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    held = StateFiles(tmp_path, IDENTITY, BLOCK, 1 << 30)
    with locked(tmp_path):
        for call in (held.prepare, lambda: store(held, 2), lambda: store(held, 3)):
            with pytest.raises(TimeoutError, match=f"another process holds {tmp_path / LOCK}"):
                call()
        assert load(held, 1) == block_of(1) and list(held.keys()) == [key_of(1)]
    assert store(held, 2).stored == [key_of(2)]


@pytest.mark.parametrize("size", [1 << 40, 100 * FILE, 3 * FILE])
def test_a_file_with_holes_takes_what_is_allocated_for_it(tmp_path: Path, size):
    held = directory(tmp_path, max_bytes=4 * FILE)
    store(held, 1, 2, 3)
    sparse = held._path(key_of(9))
    sparse.touch(mode=0o600)
    os.truncate(sparse, size)
    assert store(held, 4).evicted == []
    assert all(load(held, number) == block_of(number) for number in (1, 2, 3, 4))


@pytest.mark.parametrize("ahead", [60.0, 70 * 365 * 86400.0])
def test_a_file_from_the_future_was_used_just_now(tmp_path: Path, ahead):
    held = directory(tmp_path)
    store(held, 1)
    now = path_of(tmp_path, 1).stat().st_mtime
    os.utime(path_of(tmp_path, 1), (now + ahead, now + ahead))
    store(held, 2)
    assert now <= path_of(tmp_path, 1).stat().st_mtime < now + ahead / 2


@pytest.mark.parametrize("damage", [damaged_files.lock_is_a_folder, damaged_files.lock_is_a_link])
def test_what_has_the_locks_name_and_is_none_is_refused_and_not_followed(tmp_path: Path, damage):
    root = tmp_path / "states"
    held = directory(root)
    store(held, 1, 2)
    damage(random.Random(1), path_of(root, 1), path_of(root, 2))
    for call in (held.prepare, lambda: store(held, 3)):
        with pytest.raises(OSError, match=r"Is a directory|symbolic link"):
            call()
    assert not (tmp_path / "not-made").exists() and load(held, 1) == block_of(1)
