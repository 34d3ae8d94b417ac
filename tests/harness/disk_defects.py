"""Disks slower than computing, or never, however busy the machine: vLLM plugins for test engines only."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path
from typing import Any

SECONDS = 2.0  # for each file


def slow_reads() -> None:
    """Let every file of a checkpoint directory take `SECONDS` to be read."""
    from engine_patches.disk.files import StateFiles

    read = StateFiles.read

    def slow(self: Any, key: bytes, into: memoryview) -> None:
        time.sleep(SECONDS)
        read(self, key, into)

    StateFiles.read = slow


def loads_always_pay() -> None:
    """Let everything be loaded that can be."""
    from engine_patches.disk.load_cost import LoadCost

    LoadCost.pays = lambda self, num_bytes, prefill_seconds: True


def every_other_load_pays() -> None:
    """Let one load be declined, the next one made, and so on."""
    from engine_patches.disk.load_cost import LoadCost

    pays = itertools.cycle((False, True))
    LoadCost.pays = lambda self, num_bytes, prefill_seconds: next(pays)


def full() -> None:
    """Let every file of a checkpoint directory find the disk full."""
    from engine_patches.disk.files import StateFiles

    def write(self: Any, path: Path, key: bytes, block: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    StateFiles._write = write
