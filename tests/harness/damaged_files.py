"""What can happen to a checkpoint directory, and what that may cost."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import socket
from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path
from typing import NamedTuple

from engine_patches.disk.files import HEADER_BYTES, LOCK, StateFiles

Apply = Callable[[random.Random, Path, Path], object]  # to a state's file, and another one beside it

FUTURE, PAST = 4e9, 1.0  # seconds since the epoch

STRANGERS = "a stranger's"  # what their files hold


def _holding(content: Callable[[random.Random, bytes, bytes], bytes]) -> Apply:
    """A file has other contents, by its own and those of another one."""
    return lambda draw, path, other: path.write_bytes(content(draw, path.read_bytes(), other.read_bytes()))


def _flipped(draw: random.Random, content: bytes, most: int) -> bytes:
    place, bit = draw.randrange(most), 1 << draw.randrange(8)
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def _holes(draw: random.Random, path: Path, other: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


# What leaves a file that is refused, and removed.
FILES: dict[str, Apply] = {
    "a bit": _holding(lambda draw, own, other: _flipped(draw, own, len(own))),
    "a bit of the header": _holding(lambda draw, own, other: _flipped(draw, own, HEADER_BYTES)),
    "the end is missing": _holding(lambda draw, own, other: own[: draw.randrange(len(own))]),
    "another file": _holding(lambda draw, own, other: other),
    "something follows": _holding(lambda draw, own, other: own + draw.randbytes(draw.randrange(1, 5000))),
    # Of another cache group, or of another prompt.
    "another state behind the header": _holding(lambda draw, own, other: own[:HEADER_BYTES] + other[HEADER_BYTES:]),
    "holes": _holes,
    "a terabyte of holes": lambda draw, path, other: os.truncate(path, 1 << 40),
}


def _instead(put: Callable[[Path, Path], object]) -> Apply:
    """Something else has a state's name."""

    def apply(draw: random.Random, path: Path, other: Path) -> None:
        path.unlink()
        put(path, other)

    return apply


def _listen(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:  # of a path's characters a hundred at most
        listener.bind(path.name)


def _moved_behind_a_link(draw: random.Random, path: Path, other: Path) -> None:
    elsewhere = path.parents[1] / "moved"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


# What has a state's name and is none of ours, and stays.
OTHERS: dict[str, Apply] = {
    "a link to nothing": _instead(lambda path, other: path.symlink_to("/nowhere")),
    "a link to itself": _instead(lambda path, other: path.symlink_to(path.name)),
    "a link to another": _instead(lambda path, other: path.symlink_to(other.name)),
    "a link to a device": _instead(lambda path, other: path.symlink_to("/dev/zero")),
    "a link to where it lies": _moved_behind_a_link,
    "a fifo": _instead(lambda path, other: os.mkfifo(path)),
    "a socket": _instead(lambda path, other: _listen(path)),
}


def gone(draw: random.Random, path: Path, other: Path) -> None:
    path.unlink()


def folder(draw: random.Random, path: Path, other: Path) -> None:
    """With something in it, and another one has the name of a file under way."""
    path.unlink()
    (path / "inside").mkdir(parents=True)
    path.with_name("98-1.tmp").mkdir()


def strange_names(draw: random.Random, path: Path, other: Path) -> None:
    """Files that are not ours, with names that are nearly so."""
    near = ("zz.state", "aa.state", "ab cd.state", "upload.tmp", f"{path.name}.bak", path.name.upper())
    _put(path.parents[1] / "their-app", "upload.tmp", "1-1.tmp", "game.state", path.name)
    _put(path.parent, *near)
    with open(os.fsencode(path.parent) + b"/\xff\xfe.state", "wb"):
        pass


def _put(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(STRANGERS)
        os.utime(folder / name, (PAST, PAST))


def left_by_the_killed(draw: random.Random, path: Path, other: Path) -> None:
    """A writer was killed in the middle of a file, and another one before its first byte."""
    path.with_name("99999-1.tmp").write_bytes(path.read_bytes()[:5000])
    path.with_name("1-7.tmp").touch()


def linked_folders(draw: random.Random, path: Path, other: Path) -> None:
    """A link with the name of another identity leads to somebody's files."""
    elsewhere = path.parents[2] / "elsewhere"
    _put(elsewhere, "1-1.tmp", "save.state", path.name)
    (path.parents[1] / ("fedcba9876543210" * 2)).symlink_to(elsewhere)


def file_for_folder(draw: random.Random, path: Path, other: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text(STRANGERS)


def link_for_folder(draw: random.Random, path: Path, other: Path) -> None:
    path.parent.rename(path.parents[2] / "moved-folder")
    path.parent.symlink_to(path.parents[2] / "moved-folder")


def _for_lock(put: Callable[[Path], object]) -> Apply:
    """Something else has the lock's name."""

    def apply(draw: random.Random, path: Path, other: Path) -> None:
        lock = path.parents[1] / LOCK
        lock.unlink(missing_ok=True)
        put(lock)

    return apply


def lock_is_held(draw: random.Random, path: Path, other: Path) -> None:
    """Somebody who is stopped, or whose disk hangs, holds the lock until `let_go`."""
    _held.append(os.open(path.parents[1] / LOCK, os.O_CREAT | os.O_RDWR))
    fcntl.flock(_held[-1], fcntl.LOCK_EX)


def no_room(draw: random.Random, path: Path, other: Path) -> None:
    """It is gone, and the disk is full until `let_go`. In this process."""
    path.unlink()
    _plant("_write", errno.ENOSPC)


def read_only(draw: random.Random, path: Path, other: Path) -> None:
    """The disk was mounted again, for reading alone, until `let_go`. In this process."""
    _plant("_locked", errno.EROFS)


def _plant(method: str, error: int) -> None:
    def fails(*arguments: object) -> None:
        raise OSError(error, os.strerror(error))

    _planted.append((method, getattr(StateFiles, method)))
    setattr(StateFiles, method, fails)


_held: list[int] = []  # descriptors

_planted: list[tuple[str, object]] = []  # names of methods, and what they were


def let_go() -> None:
    """No lock is held any more, and the disk is as it was."""
    while _held:
        os.close(_held.pop())
    while _planted:
        setattr(StateFiles, *_planted.pop())


class Damage(NamedTuple):
    """Something that happens, as a start finds it."""

    apply: Apply
    lost: str  # what is computed again: nothing, the file's "own", or "all"
    kept_again: bool = True  # what was lost: not where something that is not ours has its name, or all is refused
    told: bool = False  # in a line of the log


EVERYTHING: dict[str, Damage] = {
    **{name: Damage(apply, "own") for name, apply in FILES.items()},
    **{name: Damage(apply, "own", False) for name, apply in OTHERS.items()},
    "a folder": Damage(folder, "own", False),
    "gone": Damage(gone, "own"),
    "from the future": Damage(lambda draw, path, other: os.utime(path, (FUTURE, FUTURE)), ""),
    "strange names": Damage(strange_names, ""),
    "left by the killed": Damage(left_by_the_killed, ""),
    "linked folders": Damage(linked_folders, ""),
    "the lock is a fifo": Damage(_for_lock(os.mkfifo), ""),
    "the lock is held": Damage(lock_is_held, "", told=True),
    "no room": Damage(no_room, "own", False, told=True),
    "no directory": Damage(lambda draw, path, other: shutil.rmtree(path.parents[1]), "all"),
    "a file for the folder": Damage(file_for_folder, "all", False, told=True),
    "a link for the folder": Damage(link_for_folder, "all", False, told=True),
    "open to a group": Damage(lambda draw, path, other: path.parent.chmod(0o770), "all", False, told=True),
    "the lock is a folder": Damage(_for_lock(Path.mkdir), "all", False, told=True),
    "the lock is a link": Damage(
        _for_lock(lambda lock: lock.symlink_to(lock.parents[1] / "not-made")), "all", False, told=True
    ),
    "read only": Damage(read_only, "all", False, told=True),
}


def strangers_files(folder: Path) -> set[Path]:
    """Files that are not ours and are as they were made."""
    found = set()
    for each in folder.rglob("*"):
        with suppress(OSError, UnicodeError):
            if each.is_file() and each.stat().st_size < 100 and each.read_text() == STRANGERS:
                found.add(each)
    return found
