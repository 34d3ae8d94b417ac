"""What can happen to a file of a checkpoint directory, without changing its name."""

from __future__ import annotations

import os
import random
from pathlib import Path

from engine_patches.disk.files import HEADER_BYTES


def flip(draw: random.Random, path: Path, other: Path) -> None:
    """A bit of it."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def flip_in_header(draw: random.Random, path: Path, other: Path) -> None:
    """A bit of its first page."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(HEADER_BYTES)] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(draw: random.Random, path: Path, other: Path) -> None:
    """Its end is missing."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def blank(draw: random.Random, path: Path, other: Path) -> None:
    """A page of it is zero."""
    content = bytearray(path.read_bytes())
    start = draw.randrange(HEADER_BYTES, len(content) - 4096)
    content[start : start + 4096] = bytes(4096)
    path.write_bytes(content)


def swap(draw: random.Random, path: Path, other: Path) -> None:
    """It has the contents of another file."""
    path.write_bytes(other.read_bytes())


def lengthen(draw: random.Random, path: Path, other: Path) -> None:
    """Something follows it."""
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 5000)))


def empty(draw: random.Random, path: Path, other: Path) -> None:
    """Nothing is left."""
    path.write_bytes(b"")


DAMAGES = (flip, flip_in_header, truncate, blank, swap, lengthen, empty)
