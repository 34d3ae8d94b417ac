"""The CPU time of a server, read from outside.

Linux keeps it in nanoseconds for each process, threads that have ended included; `/proc/PID/stat` has it only in ticks
of 10 ms. It is read through the process's clock, so the server does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from pathlib import Path

POLL_SECONDS = 0.004

QUIET_SECONDS = 0.0003  # of CPU time in one poll; an idle server uses less

SETTLE_SECONDS = 10.0


class CpuTime:
    """The CPU time of the process `pid` and of its descendants at this moment, a server that is ready."""

    def __init__(self, pid: int) -> None:
        self._pids = family(pid)
        self._clocks = [_clock(process) for process in self._pids]

    def seconds(self) -> float:
        """CPU seconds so far, user and system. Raises `OSError` when one of the processes has ended."""
        return sum(map(time.clock_gettime_ns, self._clocks)) / 1e9

    async def settled(self) -> float:
        """The same once the server has finished what it does after an answer. Raises `TimeoutError` if it never has."""
        deadline = time.monotonic() + SETTLE_SECONDS
        before = self.seconds()
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            now = self.seconds()
            # On a crowded machine a server that waits for a processor looks quiet too.
            if now - before < QUIET_SECONDS and not any(map(_is_runnable, self._pids)):
                return now
            before = now
        raise TimeoutError("the server never came to rest")


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                children[_stat(folder)[1]].append(int(folder.name))
    found = [pid]
    for process in found:
        found += children[process]
    return found


def open_files(pid: int) -> int:
    """File descriptors, sockets included, of a process and its descendants."""
    count = 0
    for process in family(pid):
        with contextlib.suppress(OSError):  # it has just ended
            count += len(os.listdir(f"/proc/{process}/fd"))
    return count


def _stat(folder: Path) -> tuple[str, int]:
    """The state ("R": running, or ready to), and the parent's id."""
    # The name in brackets may hold anything; state and parent come after its end.
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def _is_runnable(pid: int) -> bool:
    """Whether a thread of the process runs or waits for a processor."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if _stat(thread)[0] == "R":
                return True
    return False


def _clock(pid: int) -> int:
    """The clock id of another process's CPU time, as clock_getcpuclockid(3) makes it."""
    return (~pid << 3) | 2
