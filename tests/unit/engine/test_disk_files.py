"""Files of states are believed only whole: whatever happens to one, nothing wrong is loaded, and it is counted."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_patches.disk import files
from engine_patches.disk.files import HEADER_BYTES, SUFFIX, TEMPORARY, RefusedFile, StateFiles
from tests.harness import damaged_files
from tests.harness.damaged_files import DAMAGES
from tests.harness.state_files import BLOCK, IDENTITY, OTHER_IDENTITY, block_of, directory, key_of, load, path_of, store

FILE = HEADER_BYTES + BLOCK

IDENTITIES = st.sampled_from([IDENTITY, IDENTITY, OTHER_IDENTITY])

NUMBERS = st.integers(0, 5)

Key = tuple[bytes, int]  # identity and number

# What leaves a file that is refused and removed, and what has a file's name, is none of ours, and stays.
KINDS = (*DAMAGES, damaged_files.holes, damaged_files.huge, damaged_files.shuffle_pages, damaged_files.begin_as_another)

FILES = {each.__name__: each for each in KINDS}

OTHERS = {
    each.__name__: each
    for each in (
        *(damaged_files.dangling_link, damaged_files.link_to_itself, damaged_files.link_to_another),
        *(damaged_files.link_to_zeros, damaged_files.moved_behind_a_link, damaged_files.fifo, damaged_files.listening),
    )
}


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

    def taken_by(self, key: Key, seen_by: bytes) -> int:
        """Of another's file, and of one that has not our length, what is allocated."""
        if key not in self.damaged:
            return FILE
        status = self.path(key).lstat()
        is_ours = key[0] == seen_by and status.st_size == FILE
        return FILE if is_ours else min(status.st_size, status.st_blocks * 512)

    def make_room(self, wanted: int, seen_by: bytes) -> list[Key]:
        """Those that had to go."""
        gone = []
        for key in sorted(self.used, key=self.used.__getitem__):
            taken = sum(self.taken_by(each, seen_by) for each in self.used)
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
        for identity in (IDENTITY, OTHER_IDENTITY):
            self.make_room(0, identity)
            self.workers[identity] = directory(self.root, identity, bound)
        assert not list(self.root.rglob(f"*{TEMPORARY}"))

    @rule(identity=IDENTITIES, numbers=st.lists(NUMBERS, min_size=1, max_size=2, unique=True))
    def writes(self, identity: bytes, numbers: list[int]) -> None:
        stored, evicted, written = [], [], []
        for key in ((identity, number) for number in numbers):
            if self.damaged.get(key) in OTHERS:
                continue  # something else has its name
            if key in self.damaged and self.path(key).lstat().st_size != FILE:
                self.forget(key)  # it is written anew
            if key not in self.used:
                evicted += [number for of, number in self.make_room(FILE, identity) if of == identity]
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
        assert sum(self.taken_by(key, identity) for key in self.used) <= self.bound or not written

    @rule(identity=IDENTITIES, number=NUMBERS)
    def reads(self, identity: bytes, number: int) -> None:
        key = identity, number
        if key in self.damaged:
            with pytest.raises(RefusedFile) as refused:
                load(self.workers[identity], number)
            assert refused.value.reason in files.REASONS and os.path.lexists(self.path(key)) == (
                self.damaged[key] in OTHERS
            )
            if self.damaged[key] in FILES:
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

    def whole(self) -> list[Key]:
        return sorted(self.used.keys() - self.damaged.keys())

    @precondition(lambda self: len(self.whole()) > 1)
    @rule(data=st.data(), how=st.sampled_from([*FILES, *OTHERS, "removed"]), seed=st.integers(0, 99))
    def is_damaged(self, data: st.DataObject, how: str, seed: int) -> None:
        key, other = data.draw(st.permutations(self.whole()))[:2]
        path, when = self.path(key), self.used[key]
        {**FILES, **OTHERS, "removed": damaged_files.gone}[how](random.Random(seed), path, self.path(other))
        if how in FILES:
            os.utime(path, (when, when))
        else:
            self.forget(key)
        if how != "removed":
            self.damaged[key] = how

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


def test_states_are_for_this_user_alone_and_written_whole_a_little_at_a_time(tmp_path: Path, monkeypatch):
    write, readv = os.write, os.readv
    monkeypatch.setattr("os.write", lambda descriptor, part: write(descriptor, part[:1000]))
    monkeypatch.setattr("os.readv", lambda descriptor, into: readv(descriptor, [into[0][:1000]]))
    held = directory(tmp_path / "made")
    store(held, 1)
    assert load(held, 1) == block_of(1)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "made").rglob("*"))


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
