"""Files of states are believed only whole: whatever happens to one, nothing wrong is loaded, and it is counted."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_patches.disk import files
from engine_patches.disk.files import HEADER_BYTES, SUFFIX, TEMPORARY, RefusedFile, StateFiles
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

FILE = HEADER_BYTES + BLOCK

IDENTITIES = st.sampled_from([IDENTITY, IDENTITY, OTHER_IDENTITY])

NUMBERS = st.integers(0, 5)

Key = tuple[bytes, int]  # identity and number


class Directory(RuleBasedStateMachine):
    """Workers of two models share a directory in which files are damaged. The model: who was used when, and is how."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "states"
        self.workers: dict[bytes, StateFiles] = {}
        self.used: dict[Key, int] = {}  # when
        self.damaged: dict[Key, str] = {}  # how
        self.now = 0
        self.descriptors = len(os.listdir("/proc/self/fd"))

    def teardown(self) -> None:
        self.folder.cleanup()

    def path(self, key: Key) -> Path:
        return self.root / key[0].hex()[:32] / (key_of(key[1]).hex() + SUFFIX)

    def use(self, key: Key) -> None:
        """By a clock of our own: the system's is too coarse."""
        self.now += 1
        self.used[key] = self.now
        os.utime(self.path(key), (self.now, self.now), follow_symlinks=False)

    def forget(self, key: Key) -> None:
        self.used.pop(key, None)
        self.damaged.pop(key, None)

    def make_room(self, wanted: int) -> list[Key]:
        """Those that had to go."""
        gone = []
        for key in sorted(self.used, key=self.used.__getitem__):
            taken = sum(0 if self.damaged.get(each) == "emptied" else FILE for each in self.used)
            if taken + wanted <= self.bound:
                break
            self.forget(key)
            gone.append(key)
        return gone

    @initialize(bound=st.just(4 * FILE))
    def begins(self, bound: int) -> None:
        self.starts(bound)

    @rule(bound=st.sampled_from([FILE - 1, 2 * FILE, 4 * FILE, 4 * FILE]))
    def starts(self, bound: int) -> None:
        self.bound = bound
        self.make_room(0)
        for identity in (IDENTITY, OTHER_IDENTITY):
            self.workers[identity] = directory(self.root, identity, bound)
        assert not list(self.root.rglob(f"*{TEMPORARY}"))

    @rule(identity=IDENTITIES, numbers=st.lists(NUMBERS, min_size=1, max_size=2, unique=True))
    def writes(self, identity: bytes, numbers: list[int]) -> None:
        stored, evicted, written = [], [], []
        for key in ((identity, number) for number in numbers):
            if self.damaged.get(key) == "a link":
                continue  # something else has its name
            if self.damaged.get(key) == "emptied":
                self.forget(key)
            if key not in self.used:
                evicted += [number for of, number in self.make_room(FILE) if of == identity]
                if self.bound < FILE:
                    break
                self.now += 1
                self.used[key] = self.now + 1000  # just now
                written.append(key)
            stored.append(key[1])
        found = store(self.workers[identity], *numbers)
        assert found.stored == [key_of(number) for number in stored]
        assert found.evicted == [key_of(number) for number in evicted] and found.num_bytes == FILE * len(written)
        for key in written:
            self.use(key)
        assert not list(self.root.rglob(f"*{TEMPORARY}"))
        assert total(self.root) <= self.bound + FILE * sum(how == "a link" for how in self.damaged.values())

    @rule(identity=IDENTITIES, number=NUMBERS)
    def reads(self, identity: bytes, number: int) -> None:
        key = identity, number
        if key in self.damaged:
            with pytest.raises(RefusedFile):
                load(self.workers[identity], number)
            if self.damaged[key] != "a link":  # which is not ours
                self.forget(key)
        elif key not in self.used:
            with pytest.raises(FileNotFoundError):
                load(self.workers[identity], number)
        else:
            before = self.path(key).stat().st_mtime
            assert load(self.workers[identity], number) == block_of(number)
            assert self.path(key).stat().st_mtime > before
            self.use(key)

    @rule(identity=IDENTITIES, numbers=st.sets(NUMBERS, max_size=2))
    def touches(self, identity: bytes, numbers: set[int]) -> None:
        self.workers[identity].touch(map(key_of, sorted(numbers)))
        for key in ((identity, number) for number in sorted(numbers)):
            if key in self.used:
                assert self.path(key).stat().st_mtime > 1e6
                self.use(key)

    @precondition(lambda self: self.used.keys() - self.damaged.keys())
    @rule(data=st.data(), how=st.sampled_from(["a bit", "emptied", "a link", "removed"]))
    def is_damaged(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.used.keys() - self.damaged.keys())))
        path, when = self.path(key), self.used[key]
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, FILE - 1))] ^= 1
        if how == "a bit":
            path.write_bytes(content)
        elif how == "emptied":
            os.truncate(path, 0)
        else:
            path.unlink()
            self.forget(key)
        if how == "a link":
            path.symlink_to("/nowhere")
        if how != "removed":
            self.damaged[key] = how
        if key in self.used:
            os.utime(path, (when, when))

    @rule(identity=IDENTITIES)
    def a_writer_is_killed(self, identity: bytes) -> None:
        (self.root / identity.hex()[:32] / f"99-1{TEMPORARY}").write_bytes(b"half")

    @invariant()
    def each_worker_lists_its_own_by_their_last_use(self) -> None:
        for identity, worker in self.workers.items():
            ours = sorted((when, number) for (of, number), when in self.used.items() if of == identity)
            assert list(worker.keys()) == [key_of(number) for _, number in ours]
        assert len(os.listdir("/proc/self/fd")) == self.descriptors


Directory.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestDirectory = Directory.TestCase


def of_another_model(draw: random.Random, path: Path, other: Path) -> None:
    root = path.parents[1] / "elsewhere"
    number = next(number for number in range(8) if key_of(number).hex() == path.stem)
    store(directory(root, OTHER_IDENTITY), number)
    shutil.copy(path_of(root, number), path)


@pytest.mark.parametrize("corrupt", [*DAMAGES, of_another_model])
def test_no_corrupted_file_is_loaded_and_each_is_refused_and_removed(tmp_path: Path, corrupt: Callable[..., None]):
    for seed in range(25):
        draw, root = random.Random(seed), tmp_path / str(seed)
        held = directory(root)
        store(held, *range(8))
        target = draw.randrange(8)
        path = path_of(root, target)
        corrupt(draw, path, path_of(root, (target + 3) % 8))
        with pytest.raises(RefusedFile) as refused:
            load(held, target)
        assert refused.value.reason in files.REASONS and not path.exists()
        assert all(load(held, number) == block_of(number) for number in range(8) if number != target)


def test_states_are_for_this_user_alone_and_written_whole_a_little_at_a_time(tmp_path: Path, monkeypatch):
    write, readv = os.write, os.readv
    monkeypatch.setattr("os.write", lambda descriptor, part: write(descriptor, part[:1000]))
    monkeypatch.setattr("os.readv", lambda descriptor, into: readv(descriptor, [into[0][:1000]]))
    held = directory(tmp_path / "made")
    store(held, 1)
    assert load(held, 1) == block_of(1)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "made").rglob("*"))


def test_a_write_that_fails_leaves_no_descriptor_and_no_file(tmp_path: Path, monkeypatch):
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    held = directory(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("os.write", full)
    with pytest.raises(OSError, match="No space"):
        store(held, 1)
    assert len(os.listdir("/proc/self/fd")) == before and not list(tmp_path.rglob(f"*{TEMPORARY}"))


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (0, files.FORMAT),  # the format's mark
        (7, files.FORMAT),  # its version
        (8, files.IDENTITY),
        (40, files.FORMAT),  # the block's length
        (48, files.KEY),
        (112, files.KEY),  # its length
        (2000, files.CHECKSUM),  # room that nothing fills
        (HEADER_BYTES - 1, files.CHECKSUM),
        (HEADER_BYTES, files.CHECKSUM),
    ],
)
def test_each_field_of_a_file_is_looked_at_and_names_the_reason(tmp_path: Path, place, reason):
    held = directory(tmp_path)
    store(held, 1)
    path = path_of(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(RefusedFile, match=f"^{reason}$"):
        load(held, 1)
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 5, FILE - 1, FILE + 1, 1 << 40])
def test_a_file_that_has_not_our_length_is_refused_and_written_anew(tmp_path: Path, length):
    held = directory(tmp_path, max_bytes=2 * FILE)
    store(held, 1, 2)
    os.truncate(path_of(tmp_path, 1), length)
    written = store(held, 1)
    assert written.num_bytes == FILE and written.evicted == []
    assert load(held, 1) == block_of(1) and load(held, 2) == block_of(2)
    os.truncate(path_of(tmp_path, 1), length)
    with pytest.raises(RefusedFile, match=f"^{files.LENGTH}$"):
        load(held, 1)
    with pytest.raises(RefusedFile, match=f"^{files.LENGTH}$"):  # nor does a block go into other room
        held.read(key_of(2), memoryview(bytearray(BLOCK + 1)))


def shortens(path: Path, descriptor: int) -> None:
    os.truncate(path, HEADER_BYTES + 100)


def fails(path: Path, descriptor: int) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("happens", "reads", "reason"),
    [(shortens, 0, files.LENGTH), (fails, 0, files.UNREADABLE), (fails, 1, files.UNREADABLE)],
)
def test_what_happens_to_a_file_while_it_is_read_has_it_refused_and_written_anew(
    tmp_path: Path, monkeypatch, happens, reads, reason
):
    held = directory(tmp_path)
    store(held, 1)
    path, readv, before = path_of(tmp_path, 1), os.readv, []

    def read(descriptor: int, into: list[memoryview]) -> int:
        before.append(descriptor)
        if len(before) > reads:
            happens(path, descriptor)
        return readv(descriptor, into)

    with monkeypatch.context() as patched:
        patched.setattr("os.readv", read)
        with pytest.raises(RefusedFile, match=f"^{reason}$"):
            load(held, 1)
    assert store(held, 1).num_bytes == FILE and load(held, 1) == block_of(1)
