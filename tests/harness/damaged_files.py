"""What can happen to a checkpoint directory, and what that may cost."""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engine_patches.disk.files import HEADER_BYTES, LOCK, SUFFIX, StateFiles

Apply = Callable[[random.Random, Path, Path], None]  # to a state's file, and another one beside it

FUTURE, PAST = 4e9, 1.0  # seconds since the epoch

STRANGERS = "a stranger's"  # what their files hold


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
    start = draw.randrange(HEADER_BYTES, len(content) - 4096 + 1)
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


def holes(draw: random.Random, path: Path, other: Path) -> None:
    """It is as long as it was, and nothing is allocated for it."""
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def huge(draw: random.Random, path: Path, other: Path) -> None:
    """It appears to take a terabyte, most of which are holes."""
    os.truncate(path, 1 << 40)


def shuffle_pages(draw: random.Random, path: Path, other: Path) -> None:
    """Its header comes last."""
    content = path.read_bytes()
    path.write_bytes(content[HEADER_BYTES:] + content[:HEADER_BYTES])


def begin_as_another(draw: random.Random, path: Path, other: Path) -> None:
    """Its header is right, and what follows is another state's: of another cache group, or of another prompt."""
    path.write_bytes(path.read_bytes()[:HEADER_BYTES] + other.read_bytes()[HEADER_BYTES:])


def gone(draw: random.Random, path: Path, other: Path) -> None:
    """It is not there."""
    path.unlink()


def renamed(draw: random.Random, path: Path, other: Path) -> None:
    """It has a name that is no key's."""
    path.rename(path.with_name(f"copy-of-{path.name}"))


def swap_names(draw: random.Random, path: Path, other: Path) -> None:
    """It and another one have each other's name."""
    path.rename(path.with_suffix(".x"))
    other.rename(path)
    path.with_suffix(".x").rename(other)


def dangling_link(draw: random.Random, path: Path, other: Path) -> None:
    """A link to nothing has its name."""
    path.unlink()
    path.symlink_to("/nowhere")


def link_to_itself(draw: random.Random, path: Path, other: Path) -> None:
    """A link to itself has its name."""
    path.unlink()
    path.symlink_to(path.name)


def link_to_another(draw: random.Random, path: Path, other: Path) -> None:
    """A link to another state has its name."""
    path.unlink()
    path.symlink_to(other.name)


def link_to_zeros(draw: random.Random, path: Path, other: Path) -> None:
    """A link to a device has its name."""
    path.unlink()
    path.symlink_to("/dev/zero")


def moved_behind_a_link(draw: random.Random, path: Path, other: Path) -> None:
    """It lies elsewhere, and a link leads there."""
    elsewhere = path.parents[1] / "moved"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def one_with_another(draw: random.Random, path: Path, other: Path) -> None:
    """It is the same file as another one, by a second name."""
    path.unlink()
    path.hardlink_to(other)


def folder(draw: random.Random, path: Path, other: Path) -> None:
    """A folder has its name, with something in it, and another one that of a file under way."""
    path.unlink()
    (path / "inside").mkdir(parents=True)
    path.with_name("98-1.tmp").mkdir()


def fifo(draw: random.Random, path: Path, other: Path) -> None:
    """Whoever opens it waits for a writer."""
    path.unlink()
    os.mkfifo(path)


def listening(draw: random.Random, path: Path, other: Path) -> None:
    """A socket has its name."""
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has a hundred characters at most
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def from_the_future(draw: random.Random, path: Path, other: Path) -> None:
    """A clock that went wrong has used it last."""
    os.utime(path, (FUTURE, FUTURE))


def from_the_past(draw: random.Random, path: Path, other: Path) -> None:
    """It was not used since 1970."""
    os.utime(path, (PAST, PAST))


def strange_names(draw: random.Random, path: Path, other: Path) -> None:
    """Files that are not ours, with names that are nearly so."""
    root = path.parents[1]
    (root / "their-app").mkdir()
    for name in ("upload.tmp", "1-1.tmp", "game.state", path.name):
        (root / "their-app" / name).write_text(STRANGERS)
        os.utime(root / "their-app" / name, (PAST, PAST))
    for name in ("zz.state", "aa.state", "ab cd.state", "upload.tmp", f"{path.name}.bak", path.name.upper()):
        path.with_name(name).write_text(STRANGERS)
        os.utime(path.with_name(name), (PAST, PAST))
    with open(os.fsencode(path.parent) + b"/\xff\xfe.state", "wb"):
        pass


def left_by_the_killed(draw: random.Random, path: Path, other: Path) -> None:
    """A writer was killed in the middle of a file, and another one before its first byte."""
    path.with_name("99999-1.tmp").write_bytes(path.read_bytes()[:5000])
    path.with_name("1-7.tmp").touch()


def another_model(draw: random.Random, path: Path, other: Path) -> None:
    """The folder of another identity lies beside, with files of the same names."""
    beside = path.parents[1] / ("0123456789abcdef" * 2)
    beside.mkdir(mode=0o700)
    (beside / path.name).write_bytes(other.read_bytes())
    with (beside / other.name).open("wb") as file:
        file.truncate(1 << 40)


def linked_folders(draw: random.Random, path: Path, other: Path) -> None:
    """A link with the name of another identity leads to somebody's files."""
    elsewhere = path.parents[2] / "elsewhere"
    elsewhere.mkdir()
    for name in ("1-1.tmp", "save.state", path.name):
        (elsewhere / name).write_text(STRANGERS)
        os.utime(elsewhere / name, (PAST, PAST))
    (path.parents[1] / ("fedcba9876543210" * 2)).symlink_to(elsewhere)


def no_files(draw: random.Random, path: Path, other: Path) -> None:
    """All states were removed."""
    for each in path.parent.glob(f"*{SUFFIX}"):
        each.unlink()


def no_folder(draw: random.Random, path: Path, other: Path) -> None:
    """All that was in the directory was removed."""
    remove(path.parents[1])
    path.parents[1].mkdir(mode=0o700)


def no_directory(draw: random.Random, path: Path, other: Path) -> None:
    """The directory itself was removed."""
    remove(path.parents[1])


def file_for_folder(draw: random.Random, path: Path, other: Path) -> None:
    """A file has the name of the folder."""
    remove(path.parent)
    path.parent.write_text(STRANGERS)


def link_for_folder(draw: random.Random, path: Path, other: Path) -> None:
    """The folder lies elsewhere, and a link leads there."""
    path.parent.rename(path.parents[2] / "moved-folder")
    path.parent.symlink_to(path.parents[2] / "moved-folder")


def open_to_all(draw: random.Random, path: Path, other: Path) -> None:
    """Everybody may write into the directory, as into /tmp."""
    path.parents[1].chmod(0o1777)


def open_to_a_group(draw: random.Random, path: Path, other: Path) -> None:
    """A group may write into the folder."""
    path.parent.chmod(0o770)


def lock_is_a_folder(draw: random.Random, path: Path, other: Path) -> None:
    """A folder has the lock's name."""
    lock = path.parents[1] / LOCK
    lock.unlink(missing_ok=True)
    lock.mkdir()


def lock_is_a_link(draw: random.Random, path: Path, other: Path) -> None:
    """A link has the lock's name."""
    lock = path.parents[1] / LOCK
    lock.unlink(missing_ok=True)
    lock.symlink_to(path.parents[2] / "not-made")


def lock_is_held(draw: random.Random, path: Path, other: Path) -> None:
    """Somebody who is stopped, or whose disk hangs, holds the lock until `let_go`."""
    hold_lock(path.parents[1])


def lock_is_a_fifo(draw: random.Random, path: Path, other: Path) -> None:
    """Nobody is at the other end of the lock."""
    lock = path.parents[1] / LOCK
    lock.unlink(missing_ok=True)
    os.mkfifo(lock)


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


def hold_lock(root: Path) -> None:
    """Of a directory, until `let_go`."""
    _held.append(os.open(root / LOCK, os.O_CREAT | os.O_RDWR))
    fcntl.flock(_held[-1], fcntl.LOCK_EX)


def let_go() -> None:
    """No lock is held any more, and the disk is as it was."""
    while _held:
        os.close(_held.pop())
    while _planted:
        setattr(StateFiles, *_planted.pop())


def remove(root: Path) -> None:
    """A folder with all that is in it."""
    for each in sorted(root.rglob("*"), reverse=True):
        if each.is_dir() and not each.is_symlink():
            each.rmdir()
        else:
            each.unlink()
    root.rmdir()


class Lost(enum.Enum):
    """What may be computed again because of it."""

    NOTHING = "nothing"
    ITS_OWN = "what the file was for"
    ALL = "everything, once"
    REFUSED = "everything, for such a directory is not used"


class Damage(NamedTuple):
    """Something that happens, as a start finds it."""

    apply: Apply
    lost: Lost
    kept_again: bool = True  # what was lost: not where something that is not ours has its name
    told: bool = False  # in a line of the log

    @property
    def name(self) -> str:
        """For people."""
        return getattr(self.apply, "__name__", "").replace("_", " ")


EVERYTHING = (
    *(Damage(apply, Lost.ITS_OWN) for apply in DAMAGES),
    *(Damage(apply, Lost.ITS_OWN) for apply in (holes, huge, shuffle_pages, begin_as_another)),
    *(Damage(apply, Lost.ITS_OWN) for apply in (swap_names, one_with_another)),
    *(Damage(apply, Lost.ITS_OWN) for apply in (gone, renamed)),
    *(Damage(apply, Lost.ITS_OWN, False) for apply in (dangling_link, link_to_itself, link_to_another, link_to_zeros)),
    *(Damage(apply, Lost.ITS_OWN, False) for apply in (moved_behind_a_link, folder, fifo, listening)),
    *(Damage(apply, Lost.NOTHING) for apply in (from_the_future, from_the_past, strange_names, left_by_the_killed)),
    *(Damage(apply, Lost.NOTHING) for apply in (another_model, linked_folders, lock_is_a_fifo)),
    Damage(lock_is_held, Lost.NOTHING, told=True),
    Damage(no_room, Lost.ITS_OWN, False, told=True),
    *(Damage(apply, Lost.ALL) for apply in (no_files, no_folder, no_directory)),
    *(
        Damage(apply, Lost.REFUSED, False, told=True)
        for apply in (
            *(file_for_folder, link_for_folder, open_to_all, open_to_a_group),
            *(lock_is_a_folder, lock_is_a_link, read_only),
        )
    ),
)


def strangers_files(folder: Path) -> set[Path]:
    """Files that are not ours and are as they were made."""
    found = set()
    for each in folder.rglob("*"):
        with suppress(OSError, UnicodeError):
            if each.is_file() and each.stat().st_size < 100 and each.read_text() == STRANGERS:
                found.add(each)
    return found
