"""Files of states are believed only whole: whatever happens to one, nothing wrong is loaded, and it is counted.

In a directory that is not its worker's alone what others made stays, and what others do stops nobody.
"""

from __future__ import annotations

import fcntl
import os
import random
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_patches.disk import files
from engine_patches.disk.files import HEADER_BYTES, LOCK, SUFFIX, TEMPORARY, NotOurs, RefusedFile, StateFiles, Written
from tests.harness import damaged_files
from tests.harness.damaged_files import FILES, OTHERS, strangers_files

BLOCK = 20_480  # bytes

FILE = HEADER_BYTES + BLOCK

IDENTITY, OTHER_IDENTITY = b"i" * 32, b"j" * 32

IDENTITIES = st.sampled_from([IDENTITY, IDENTITY, OTHER_IDENTITY])

NUMBERS = st.integers(0, 5)

Key = tuple[bytes, int]  # identity and number


def key_of(number: int) -> bytes:
    """A hash, and a cache group."""
    return random.Random(number).randbytes(32) + (number % 3).to_bytes(4, "big")


def block_of(number: int) -> bytes:
    """What is stored under its key."""
    return random.Random(-1 - number).randbytes(BLOCK)


def directory(root: Path, identity: bytes = IDENTITY, max_bytes: int = 1 << 30) -> StateFiles:
    found = StateFiles(root, identity, BLOCK, max_bytes)
    found.prepare()
    return found


def store(held: StateFiles, *numbers: int) -> Written:
    return held.write({key_of(number): memoryview(block_of(number)) for number in numbers})


def load(held: StateFiles, number: int) -> bytes:
    into = bytearray(BLOCK)
    held.read(key_of(number), memoryview(into))
    return bytes(into)


def path_of(root: Path, number: int) -> Path:
    (found,) = root.rglob(key_of(number).hex() + SUFFIX)
    return found


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
        *((0, files.FORMAT), (7, files.FORMAT), (40, files.FORMAT)),  # the mark, its version, the block's length
        *((8, files.IDENTITY), (48, files.KEY), (112, files.KEY)),  # the key, and its length
        *((2000, files.CHECKSUM), (HEADER_BYTES - 1, files.CHECKSUM), (HEADER_BYTES, files.CHECKSUM)),
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


@pytest.mark.parametrize(("broken", "reason"), [(None, files.LENGTH), (1, files.UNREADABLE), (2, files.UNREADABLE)])
def test_what_happens_to_a_file_while_it_is_read_has_it_refused_and_written_anew(
    tmp_path: Path, monkeypatch, broken, reason
):
    """It becomes shorter; or its first or its second read fails, as on a bad sector."""
    held = directory(tmp_path)
    store(held, 1)
    path, readv, reads = path_of(tmp_path, 1), os.readv, []

    def read(descriptor: int, into: list[memoryview]) -> int:
        reads.append(descriptor)
        if broken is None:
            os.truncate(path, HEADER_BYTES + 100)
        elif len(reads) >= broken:
            raise OSError(5, "Input/output error")
        return readv(descriptor, into)

    with monkeypatch.context() as patched:
        patched.setattr("os.readv", read)
        with pytest.raises(RefusedFile, match=f"^{reason}$"):
            load(held, 1)
    assert store(held, 1).num_bytes == FILE and load(held, 1) == block_of(1)


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


def test_who_waits_for_the_lock_gives_up_says_so_and_reads_on(tmp_path: Path, monkeypatch):
    store(directory(tmp_path), 1)
    monkeypatch.setattr(files, "START_LOCK_SECONDS", 0.05)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    held = StateFiles(tmp_path, IDENTITY, BLOCK, 1 << 30)
    with (tmp_path / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for call in (held.prepare, lambda: store(held, 2), lambda: store(held, 3)):
            with pytest.raises(TimeoutError, match=f"another process holds {tmp_path / LOCK}"):
                call()
        assert load(held, 1) == block_of(1) and list(held.keys()) == [key_of(1)]
    assert store(held, 2).stored == [key_of(2)]


@pytest.mark.parametrize("size", [1 << 40, 3 * FILE])
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
