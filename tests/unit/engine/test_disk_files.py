"""Files of states are believed only whole: whatever happens to one, nothing wrong is loaded, and it is counted."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_patches.disk import files
from engine_patches.disk.files import HEADER_BYTES, TEMPORARY, RefusedFile
from tests.harness.damaged_files import DAMAGES
from tests.harness.state_files import (
    BLOCK,
    IDENTITY,
    OTHER_IDENTITY,
    block_of,
    directory,
    key_of,
    load,
    path_of,
    store,
    total,
)


def of_another_model(draw: random.Random, path: Path, other: Path) -> None:
    root = path.parents[1] / "elsewhere"
    number = next(number for number in range(8) if key_of(number).hex() == path.stem)
    store(directory(root, OTHER_IDENTITY), number)
    shutil.copy(path_of(root, number), path)


KINDS = (*DAMAGES, of_another_model)


@pytest.mark.parametrize("corrupt", KINDS)
def test_no_corrupted_file_is_loaded_and_each_is_refused_and_removed(tmp_path: Path, corrupt: Callable[..., None]):
    for seed in range(25):
        draw = random.Random(seed)
        root = tmp_path / str(seed)
        held = directory(root)
        store(held, *range(8))
        target = draw.randrange(8)
        path = path_of(root, target)
        corrupt(draw, path, path_of(root, (target + 3) % 8))
        with pytest.raises(RefusedFile) as refused:
            load(held, target)
        assert refused.value.reason in files.REASONS
        assert not path.exists()
        assert all(load(held, number) == block_of(number) for number in range(8) if number != target)


def test_what_is_there_is_not_written_twice(tmp_path: Path):
    held = directory(tmp_path)
    store(held, 1)
    again = store(directory(tmp_path), 1)
    assert again.stored == [key_of(1)] and again.num_bytes == 0


def test_the_file_not_used_for_longest_goes_first_whoever_wrote_it(tmp_path: Path):
    room = 4 * (HEADER_BYTES + BLOCK)
    mine, theirs = directory(tmp_path, IDENTITY, room), directory(tmp_path, OTHER_IDENTITY, room)
    for moment, (held, number) in enumerate([(mine, 0), (theirs, 1), (mine, 2), (mine, 3)]):
        store(held, number)
        os.utime(path_of(tmp_path, number), (moment, moment))
    assert load(mine, 0) == block_of(0)  # used just now
    assert store(mine, 4).evicted == [] and not theirs.keys()  # the other identity's went
    assert store(mine, 5).evicted == [key_of(2)]
    assert set(mine.keys()) == {key_of(number) for number in (0, 3, 4, 5)} and total(tmp_path) <= room


def test_a_bound_below_one_file_keeps_none(tmp_path: Path):
    held = directory(tmp_path, max_bytes=BLOCK)
    assert store(held, 1).stored == [] and total(tmp_path) == 0


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path):
    store(directory(tmp_path), *range(6))
    directory(tmp_path, max_bytes=3 * (HEADER_BYTES + BLOCK))
    assert total(tmp_path) == 3 * (HEADER_BYTES + BLOCK)


def test_what_a_killed_writer_left_is_removed_at_the_next_start_and_the_next_write(tmp_path: Path):
    held = directory(tmp_path)
    store(held, 1)
    left = path_of(tmp_path, 1).with_name(f"99-1{TEMPORARY}")
    left.write_bytes(b"half")
    directory(tmp_path)
    assert not left.exists()
    left.write_bytes(b"half")
    store(held, 2)
    assert not left.exists() and load(held, 2) == block_of(2)


def test_writing_reading_refusing_and_looking_leave_no_descriptor_open(tmp_path: Path):
    held = directory(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    store(held, *range(20))
    for number in range(20):
        assert load(held, number) == block_of(number)
    for number in range(10):
        path_of(tmp_path, number).write_bytes(b"short" if number % 2 else b"x" * held.file_bytes)
        with pytest.raises(RefusedFile):
            load(held, number)
    assert len(held.keys()) == 10 and len(os.listdir("/proc/self/fd")) == before


def test_a_write_that_fails_leaves_no_descriptor_and_no_file(tmp_path: Path, monkeypatch):
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    held = directory(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("os.write", full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            store(held, 1)
    assert len(os.listdir("/proc/self/fd")) == before and not list(tmp_path.rglob(f"*{TEMPORARY}"))


def test_keys_come_in_the_order_of_their_last_use(tmp_path: Path):
    held = directory(tmp_path)
    store(held, 1, 2, 3)
    for number, moment in ((1, 5), (2, 3), (3, 4)):
        os.utime(path_of(tmp_path, number), (moment, moment))
    assert list(held.keys()) == [key_of(2), key_of(3), key_of(1)]
    held.touch([key_of(9), key_of(2)])
    assert list(held.keys()) == [key_of(3), key_of(1), key_of(2)]
    load(held, 3)
    assert list(held.keys())[-1] in {key_of(2), key_of(3)} and next(iter(held.keys())) == key_of(1)


# Places in a file's header, and the reason for which another value there is refused.
FIELDS = {
    "the format's mark": (0, files.FORMAT),
    "its version": (7, files.FORMAT),
    "the identity": (8, files.IDENTITY),
    "the block's length": (40, files.FORMAT),
    "the key": (48, files.KEY),
    "the key's length": (112, files.KEY),
    "room that nothing fills": (2000, files.CHECKSUM),
    "the checksum": (HEADER_BYTES - 1, files.CHECKSUM),
    "the block": (HEADER_BYTES, files.CHECKSUM),
}


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_a_file_is_looked_at_and_names_the_reason(tmp_path: Path, field):
    place, reason = FIELDS[field]
    held = directory(tmp_path)
    store(held, 1)
    path = path_of(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(RefusedFile, match=f"^{reason}$") as refused:
        load(held, 1)
    assert refused.value.reason == reason and not path.exists()


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path: Path, monkeypatch):
    held = directory(tmp_path)
    store(held, 1)
    path, readv = path_of(tmp_path, 1), os.readv

    def shortens(descriptor: int, into: list[memoryview]) -> int:
        os.truncate(path, HEADER_BYTES + 100)
        return readv(descriptor, into)

    monkeypatch.setattr("os.readv", shortens)
    with pytest.raises(RefusedFile) as refused:
        load(held, 1)
    assert refused.value.reason == files.LENGTH


def test_where_nothing_fits_what_comes_later_is_not_tried(tmp_path: Path):
    held = directory(tmp_path, max_bytes=HEADER_BYTES + BLOCK - 1)
    written = store(held, 1, 2)
    assert written == ([], [], 0) and list(held.keys()) == []


def test_a_write_over_what_is_no_file_goes_on_with_the_next_key(tmp_path: Path):
    held = directory(tmp_path)
    store(held, 1)
    path = path_of(tmp_path, 1)
    path.unlink()
    path.symlink_to("/nowhere")
    written = store(held, 1, 2, 3)
    assert written.stored == [key_of(2), key_of(3)] and written.num_bytes == 2 * held.file_bytes
