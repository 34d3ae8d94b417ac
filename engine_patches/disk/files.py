"""Files of cache blocks, one for each key, believed only if every byte of them is right; and what loading them takes.

A file is a header of 4,096 bytes and a block's bytes. The header names the key and the identity of what computed the
block (model, weights, layout, versions), and a checksum covers both parts. What does not fit is removed and counted.

Several processes may write to one directory. To write or remove, a process holds a lock on it, which the system takes
back from one that is killed; so a temporary file seen by the lock's holder will never be finished.

A directory may hold other things, too. Only what these processes have made is read, moved or removed: regular files of
this user's whose names are ours in full, in folders of this user's. No link is followed below the directory, and where
another user may write nothing is trusted at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import stat
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HEADER_BYTES = 4096  # a page, so that the block's bytes begin on one

_MAGIC = b"SEAMARK\x01"
_FIELDS = struct.Struct("<8s32sQ64sH")  # magic, identity, bytes of the block, key, bytes of the key
_DIGEST_BYTES = 16

# Part of the identity.
CHECKSUM_NAME: str
_checksum: Callable[[memoryview], Any]
try:
    import xxhash
except ImportError:  # vLLM does not bring it, and this takes four times as long
    CHECKSUM_NAME, _checksum = "blake2b", partial(hashlib.blake2b, digest_size=_DIGEST_BYTES)
else:
    CHECKSUM_NAME, _checksum = "xxh3_128", xxhash.xxh3_128

SUFFIX = ".state"
TEMPORARY = ".tmp"
LOCK = ".lock"

# In full: of the folder of an identity, of a file in it (a hash of at least 16 bytes, and its cache group), and of one
# that is being written.
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_STATE_NAME = re.compile(rf"(?:[0-9a-f]{{2}}){{20,64}}{re.escape(SUFFIX)}")
_TEMPORARY_NAME = re.compile(rf"\d+-\d+{re.escape(TEMPORARY)}")

# How long a start, and a write, waits for the lock, and how often it is asked for meanwhile. Seconds.
START_LOCK_SECONDS, LOCK_SECONDS, LOCK_POLL_SECONDS = 4.0, 20.0, 0.01

_BLOCK_BYTES = 512  # what the system counts allocated bytes in

# Loads remembered: enough for a median, few enough to follow a disk that others keep busy.
WINDOW = 32

# Until the engine knows its own: what a prompt token takes on a fast GPU, so that a slow disk is not waited for.
ASSUMED_TOKEN_SECONDS = 1e-4

# Why a file is not believed, or could not be written.
LENGTH, FORMAT, IDENTITY, KEY, CHECKSUM = "length", "format", "identity", "key", "checksum"
UNREADABLE, NOT_WRITTEN = "unreadable", "not_written"
REASONS = (LENGTH, FORMAT, IDENTITY, KEY, CHECKSUM, UNREADABLE, NOT_WRITTEN)


class RefusedFile(Exception):
    """A file that must not be used, for one of `REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotOurs(PermissionError):
    """A directory in which others may write; its text says what to do."""


class Written(NamedTuple):
    stored: list[bytes]  # keys that have a file now
    evicted: list[bytes]  # keys of this identity whose files had to go
    num_bytes: int  # written


class _Held(NamedTuple):
    last_use: int  # nanoseconds
    length: int  # as it appears
    num_bytes: int  # that it takes


class StateFiles:
    """The files of one identity in a directory that others may share. Sizes in bytes."""

    def __init__(self, root: Path, identity: bytes, block_bytes: int, max_bytes: int) -> None:
        """`identity`: 32 bytes; `max_bytes`: of all files under `root`, of any identity."""
        self._root = root
        self._identity = identity
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._folder = root / identity.hex()[:32]
        self._number = 0
        self._stuck: set[str] = set()  # names of refused files that could not be removed: a disk for reading alone
        self._patience = LOCK_SECONDS

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self._block_bytes

    def prepare(self) -> None:
        """Make the directory, for this user alone, and remove what killed writers left.

        Raises `NotOurs` and other `OSError`; `TimeoutError` if it may be read and somebody holds its lock.
        """
        self._make_folders()
        with self._locked(START_LOCK_SECONDS):
            self._make_room(self._scan(), 0)

    def keys(self) -> dict[bytes, None]:
        """Keys that have a file, the ones used last at the end; none in a directory that is gone. Raises `OSError`."""
        found = [
            (status.st_mtime_ns, name)
            for name, status in _files_in(self._folder)
            if _STATE_NAME.fullmatch(name) and name not in self._stuck
        ]
        return {_key_in(name): None for _, name in sorted(found)}

    def touch(self, keys: Iterable[bytes]) -> None:
        """The files of these keys, if there are any, were used just now."""
        for key in keys:
            with suppress(OSError):
                os.utime(self._path(key), follow_symlinks=False)

    def write(self, blocks: Mapping[bytes, memoryview]) -> Written:
        """Give each key a file with its block, in place of files that were not used for longer.

        A key whose name something else has gets none. Raises `NotOurs` and other `OSError`. Once it has waited for the
        lock in vain, it asks for it once, until it gets it.
        """
        written, number = Written([], [], 0), self._number
        self._make_folders()
        patience, self._patience = self._patience, 0.0
        with self._locked(patience):
            self._patience = LOCK_SECONDS
            held = self._scan()
            for key, block in blocks.items():
                path = self._path(key)
                if path in held:
                    if held[path].length == self.file_bytes and path.name not in self._stuck:
                        written.stored.append(key)
                        continue
                    del held[path]  # it was damaged, and is written anew
                elif os.path.lexists(path):
                    continue
                gone = self._make_room(held, self.file_bytes)
                written.evicted.extend(gone)
                if sum(each.num_bytes for each in held.values()) + self.file_bytes > self._max_bytes:
                    break  # the bound is less than one file
                self._write(path, key, block)
                self._stuck.discard(path.name)
                held[path] = _Held(os.stat(path).st_mtime_ns, self.file_bytes, self.file_bytes)
                written.stored.append(key)
        return written._replace(num_bytes=(self._number - number) * self.file_bytes)

    def read(self, key: bytes, into: memoryview) -> None:
        """Fill `into` with the block of `key`. What it holds after an error means nothing.

        Raises `RefusedFile` if the file is not to be believed, and removes it if it is one of ours; `FileNotFoundError`
        if there is none.
        """
        path = self._path(key)
        try:
            self._read(path, key, into)
        except RefusedFile:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                self._stuck.add(path.name)
            raise
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RefusedFile(UNREADABLE) from error
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)

    def _read(self, path: Path, key: bytes, into: memoryview) -> None:
        header = bytearray(HEADER_BYTES)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would be waited for
        try:
            status = os.fstat(descriptor)
            if not _is_our_file(status):
                raise PermissionError(f"{path} is no file of this user's")
            if status.st_size != self.file_bytes or len(into) != self._block_bytes:
                raise RefusedFile(LENGTH)
            try:
                whole = _fill(descriptor, memoryview(header)) and _fill(descriptor, into)
            except OSError as error:  # a bad sector
                raise RefusedFile(UNREADABLE) from error
            if not whole:
                raise RefusedFile(LENGTH)  # it became shorter meanwhile
        finally:
            os.close(descriptor)
        magic, identity, length, padded, key_bytes = _FIELDS.unpack_from(header)
        if magic != _MAGIC or length != self._block_bytes:
            raise RefusedFile(FORMAT)
        if identity != self._identity:
            raise RefusedFile(IDENTITY)
        if padded[:key_bytes] != key:
            raise RefusedFile(KEY)
        if _digest(header, into) != bytes(header[-_DIGEST_BYTES:]):
            raise RefusedFile(CHECKSUM)

    def _write(self, path: Path, key: bytes, block: memoryview) -> None:
        header = bytearray(HEADER_BYTES)
        _FIELDS.pack_into(header, 0, _MAGIC, self._identity, self._block_bytes, key, len(key))
        header[-_DIGEST_BYTES:] = _digest(header, block)
        self._number += 1
        temporary = self._folder / f"{os.getpid()}-{self._number}{TEMPORARY}"
        try:
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                for part in (memoryview(header), block):
                    while part:
                        part = part[os.write(descriptor, part) :]
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _make_room(self, held: dict[Path, _Held], wanted: int) -> list[bytes]:
        """Remove files, the ones not used for longest first, until `wanted` bytes fit; keys of this identity's."""
        used = sum(each.num_bytes for each in held.values())
        evicted = []
        for path, each in sorted(held.items(), key=lambda item: item[1]):
            if used + wanted <= self._max_bytes:
                break
            with suppress(FileNotFoundError):
                path.unlink()
            del held[path]
            used -= each.num_bytes
            if path.parent == self._folder:
                evicted.append(_key_in(path.name))
        return evicted

    def _make_folders(self) -> None:
        """Make what is missing of them. Raises `NotOurs` if others may write to what is there."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.mkdir(exist_ok=True, mode=0o700)
        # Where the operator's name for it leads is the operator's choice.
        for path, status in ((self._root, self._root.stat()), (self._folder, self._folder.lstat())):
            if fault := _fault_of(status):
                raise NotOurs(f"{path} {fault}: name one that is this user's alone, or that does not exist yet")

    def _scan(self) -> dict[Path, _Held]:
        """Every state under the root, of any identity. Removes temporary files: the lock is held."""
        held: dict[Path, _Held] = {}
        for folder in _folders_in(self._root):
            for name, status in _files_in(folder):
                path = folder / name
                if _TEMPORARY_NAME.fullmatch(name):
                    path.unlink(missing_ok=True)
                elif _STATE_NAME.fullmatch(name):
                    taken = self.file_bytes
                    if folder != self._folder or status.st_size != self.file_bytes:
                        # One with holes is as large as it likes to appear.
                        taken = min(status.st_size, status.st_blocks * _BLOCK_BYTES)
                    held[path] = _Held(_last_use(path, status), status.st_size, taken)
        return held

    @contextmanager
    def _locked(self, seconds: float) -> Iterator[None]:
        """Hold the lock. Raises `TimeoutError` after so many seconds."""
        path = self._root / LOCK
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            until = time.monotonic() + seconds
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() >= until:
                    raise TimeoutError(f"another process holds {path}")
                time.sleep(LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{SUFFIX}"


def _digest(header: bytearray, block: memoryview) -> bytes:
    """Checksum of a header, without its last bytes, and a block."""
    digest = _checksum(memoryview(header)[:-_DIGEST_BYTES])
    digest.update(block)
    return bytes(digest.digest())


def _fill(descriptor: int, into: memoryview) -> bool:
    while into:
        count = os.readv(descriptor, [into])
        if not count:
            return False
        into = into[count:]
    return True


def _files_in(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """This user's regular files in a folder, with their names. What others remove meanwhile is left out."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if _is_our_file(status):
                    yield entry.name, status


def _folders_in(root: Path) -> Iterator[Path]:
    """The folders of identities, this user's."""
    with os.scandir(root) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if _FOLDER_NAME.fullmatch(entry.name) and not _fault_of(entry.stat(follow_symlinks=False)):
                    yield Path(entry.path)


def _is_our_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _fault_of(status: os.stat_result) -> str:
    """Why a folder is not this user's, or why somebody else can put or move something there; "" if neither is so."""
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    mode = stat.S_IMODE(status.st_mode)
    return f"can be written to by others (mode {mode:o})" if mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def _last_use(path: Path, status: os.stat_result) -> int:
    """When a file was used last, in nanoseconds. One from the future, of a clock that went wrong, is used just now."""
    if status.st_mtime_ns > time.time_ns():
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)
    return status.st_mtime_ns


def _key_in(name: str) -> bytes:
    return bytes.fromhex(name.removesuffix(SUFFIX))


class LoadCost:
    """What a load takes, a fixed part and seconds for each byte: learnt from loads, and from those that do not finish.

    Times in seconds.
    """

    def __init__(self) -> None:
        self._loads: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._due: dict[int, float] = {}  # job -> when it should be done

    def load_began(self, job: int, num_bytes: int) -> None:
        fixed, per_byte = self._learnt() if self._loads else (0.0, 0.0)
        self._due[job] = time.monotonic() + fixed + per_byte * num_bytes

    def load_ended(self, job: int) -> None:
        """It is done, or failed; nothing happens for other jobs."""
        self._due.pop(job, None)

    def load_took(self, num_bytes: int, seconds: float) -> None:
        """A load of `num_bytes` was done after `seconds`, waiting included."""
        if num_bytes > 0 and seconds > 0:
            self._loads.append((num_bytes, seconds))

    def seconds(self, num_bytes: int) -> float:
        """What a load of so many bytes is going to take; 0 for none, endless until a load was measured."""
        if not num_bytes:
            return 0.0
        if not self._loads:
            return math.inf
        fixed, per_byte = self._learnt()
        # A disk that is late with one load by so much, or hangs, will be as late with another.
        late = max(time.monotonic() - min(self._due.values()), 0.0) if self._due else 0.0
        return fixed + per_byte * num_bytes + late

    def pays(self, num_bytes: int, prefill_seconds: float) -> bool:
        """Whether loading so many bytes takes less time than the prefill that it saves."""
        return self.seconds(num_bytes) < prefill_seconds

    def _learnt(self) -> tuple[float, float]:
        # The slope between small and large loads; where all are of one size, the fixed part cannot be told apart.
        loads = sorted(self._loads)
        half = len(loads) // 2
        small, large = loads[: half or 1], loads[half:]
        small_bytes, large_bytes = (statistics.median(size for size, _ in each) for each in (small, large))
        small_time, large_time = (statistics.median(time for _, time in each) for each in (small, large))
        if large_bytes < 2 * small_bytes:
            return 0.0, statistics.median(time / size for size, time in loads)
        per_byte = max(large_time - small_time, 0.0) / (large_bytes - small_bytes)
        return max(small_time - per_byte * small_bytes, 0.0), per_byte
