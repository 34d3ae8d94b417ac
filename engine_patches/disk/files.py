"""Files of cache blocks, one for each key, that are believed only if every byte of them is.

A file is a header of 4,096 bytes and a block's bytes. The header names the key and the identity of what computed the
block (model, weights, layout, versions), and a checksum covers both parts. What does not fit is removed and counted.

Several processes may write to one directory. Whoever writes or removes holds a lock on it, which the system takes back
from a process that is killed; so any temporary file seen by the lock's holder is one that nobody is going to finish.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
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

# Why a file is not believed, or could not be written.
LENGTH, FORMAT, IDENTITY, KEY, CHECKSUM = "length", "format", "identity", "key", "checksum"
UNREADABLE, NOT_WRITTEN = "unreadable", "not_written"
REASONS = (LENGTH, FORMAT, IDENTITY, KEY, CHECKSUM, UNREADABLE, NOT_WRITTEN)


class RefusedFile(Exception):
    """A file that must not be used, for one of `REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Written(NamedTuple):
    """What a call of `write` has changed."""

    stored: list[bytes]  # keys that have a file now
    evicted: list[bytes]  # keys of this identity whose files had to go
    num_bytes: int  # written


class StateFiles:
    """The files of one identity in a directory that others may share. Sizes in bytes."""

    def __init__(self, root: Path, identity: bytes, block_bytes: int, max_bytes: int) -> None:
        """`identity`: 32 bytes; `max_bytes`: of all files under `root`, whoever wrote them."""
        self._root = root
        self._identity = identity
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._folder = root / identity.hex()[:32]
        self._number = 0

    @property
    def file_bytes(self) -> int:
        """Size of each file."""
        return HEADER_BYTES + self._block_bytes

    def prepare(self) -> None:
        """Make the directory, for this user alone, and remove what killed writers left. Raises `OSError`."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(PermissionError):  # somebody else's directory; the folder in it is ours
            self._root.chmod(0o700)
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._folder.chmod(0o700)
        with self._locked():
            self._make_room(self._scan(), 0)

    def keys(self) -> dict[bytes, None]:
        """Keys that have a file, the ones used last at the end. Raises `OSError`."""
        with os.scandir(self._folder) as entries:
            found = [(entry.stat().st_mtime_ns, entry.name) for entry in entries if entry.name.endswith(SUFFIX)]
        keys = (_key_in(name) for _, name in sorted(found))
        return {key: None for key in keys if key is not None}

    def touch(self, keys: Iterable[bytes]) -> None:
        """The files of these keys, if there are any, were used just now."""
        for key in keys:
            with suppress(OSError):
                os.utime(self._path(key))

    def write(self, blocks: Mapping[bytes, memoryview]) -> Written:
        """Give each key a file with its block, in place of files that were not used for longer. Raises `OSError`."""
        written = Written([], [], 0)
        num_bytes = 0
        with self._locked():
            held = self._scan()
            for key, block in blocks.items():
                path = self._path(key)
                if path in held:
                    written.stored.append(key)
                    continue
                gone = self._make_room(held, self.file_bytes)
                written.evicted.extend(gone)
                if sum(size for _, size in held.values()) + self.file_bytes > self._max_bytes:
                    break  # the bound is less than one file
                self._write(path, key, block)
                held[path] = (os.stat(path).st_mtime_ns, self.file_bytes)
                written.stored.append(key)
                num_bytes += self.file_bytes
        return written._replace(num_bytes=num_bytes)

    def read(self, key: bytes, into: memoryview) -> None:
        """Fill `into` with the block of `key`. What it holds after an error is nobody's.

        Raises `RefusedFile`, and removes the file, if it is not to be believed; `FileNotFoundError` if there is none.
        """
        path = self._path(key)
        try:
            self._read(path, key, into)
        except RefusedFile:
            with suppress(OSError):
                path.unlink()
            raise
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RefusedFile(UNREADABLE) from error
        with suppress(OSError):
            os.utime(path)

    def _read(self, path: Path, key: bytes, into: memoryview) -> None:
        header = bytearray(HEADER_BYTES)
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self.file_bytes or len(into) != self._block_bytes:
                raise RefusedFile(LENGTH)
            if not (_fill(file.fileno(), memoryview(header)) and _fill(file.fileno(), into)):
                raise RefusedFile(LENGTH)  # it became shorter meanwhile
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

    def _make_room(self, held: dict[Path, tuple[int, int]], wanted: int) -> list[bytes]:
        """Remove files, the ones not used for longest first, until `wanted` bytes fit; keys of this identity's."""
        used = sum(size for _, size in held.values())
        evicted = []
        for path, (_, size) in sorted(held.items(), key=lambda item: item[1]):
            if used + wanted <= self._max_bytes:
                break
            with suppress(FileNotFoundError):
                path.unlink()
            del held[path]
            used -= size
            key = _key_in(path.name)
            if path.parent == self._folder and key is not None:
                evicted.append(key)
        return evicted

    def _scan(self) -> dict[Path, tuple[int, int]]:
        """Every file under the root: time of its last use, size. Removes temporary ones: the lock is held."""
        held: dict[Path, tuple[int, int]] = {}
        for folder in self._root.iterdir():
            if not folder.is_dir():
                continue
            with suppress(PermissionError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # a reader has refused it
                        if entry.name.endswith(TEMPORARY):
                            os.unlink(entry.path)
                        elif entry.name.endswith(SUFFIX):
                            stat = entry.stat()
                            held[Path(entry.path)] = (stat.st_mtime_ns, stat.st_size)
        return held

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._root / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
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


def _key_in(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name.removesuffix(SUFFIX))
    except ValueError:
        return None
