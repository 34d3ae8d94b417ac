"""A directory of drawn states: what its files hold follows from their numbers."""

from __future__ import annotations

import random
from pathlib import Path

from engine_patches.disk.files import SUFFIX, StateFiles, Written

BLOCK = 20_480  # bytes

IDENTITY, OTHER_IDENTITY = b"i" * 32, b"j" * 32

PLENTY = 1 << 30  # bytes


def key_of(number: int) -> bytes:
    """A hash, and a cache group."""
    return random.Random(number).randbytes(32) + (number % 3).to_bytes(4, "big")


def block_of(number: int) -> bytes:
    """What is stored under its key."""
    return random.Random(-1 - number).randbytes(BLOCK)


def directory(root: Path, identity: bytes = IDENTITY, max_bytes: int = PLENTY) -> StateFiles:
    """One that is ready."""
    found = StateFiles(root, identity, BLOCK, max_bytes)
    found.prepare()
    return found


def store(held: StateFiles, *numbers: int) -> Written:
    """Write these."""
    return held.write({key_of(number): memoryview(block_of(number)) for number in numbers})


def load(held: StateFiles, number: int) -> bytes:
    """What is read under its key."""
    into = bytearray(BLOCK)
    held.read(key_of(number), memoryview(into))
    return bytes(into)


def path_of(root: Path, number: int) -> Path:
    """The file of a number, of any identity."""
    (found,) = root.rglob(key_of(number).hex() + SUFFIX)
    return found


def total(root: Path) -> int:
    """Bytes of all states."""
    return sum(path.stat().st_size for path in root.rglob(f"*{SUFFIX}"))
