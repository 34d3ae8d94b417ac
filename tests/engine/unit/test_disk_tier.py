"""The tier between vLLM's rows in host memory and the files: what a disk does wrong is a miss, and is counted once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import TransferJob

from engine_patches.disk.files import HEADER_BYTES, SUFFIX, StateFiles
from engine_patches.disk.tier import CheckedFiles, _Done

ROWS, ROW = 16, 8192

KEYS = [bytes([number]) * 36 for number in range(6)]


class Tier:
    """A tier over rows of its own, whose jobs are done when a call returns."""

    def __init__(self, root: Path, identity: bytes = b"i" * 32, max_bytes: int = 1 << 30) -> None:
        self.rows = np.zeros((ROWS, ROW), dtype=np.uint8)
        view = memoryview(self.rows)
        self.tier = CheckedFiles(SimpleNamespace(), view, "CheckedFiles", str(root), identity.hex(), max_bytes)
        self._number = 0

    def submit(self, keys: list[bytes], first_row: int, load: bool) -> None:
        self._number += 1
        job = TransferJob(self._number, keys, np.arange(first_row, first_row + len(keys)), load, SimpleNamespace())
        (self.tier.submit_load if load else self.tier.submit_store)(job)

    def run(self, keys: list[bytes], first_row: int, load: bool) -> Any:
        self.submit(keys, first_row, load)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self._number
        return result

    def store(self, keys: list[bytes]) -> Any:
        for row, key in enumerate(keys):
            self.rows[row] = key[0]
        return self.run(keys, 0, load=False)

    def load(self, keys: list[bytes]) -> Any:
        return self.run(keys, 8, load=True)

    def close(self) -> Any:
        self.tier.shutdown()


def test_a_restarted_tier_knows_at_once_what_is_there_and_loads_it(tmp_path: Path):
    first = Tier(tmp_path)
    assert first.store(KEYS[:3]).success
    first.close()
    second = Tier(tmp_path)
    assert second.tier.lookup(KEYS[2], None) is LookupResult.HIT
    assert second.tier.lookup(KEYS[3], None) is LookupResult.MISS
    assert second.load(KEYS[:3]).success
    assert [second.rows[8 + number][5] for number in range(3)] == [0, 1, 2]
    assert second.tier.take_counts()[0] == {}
    second.close()


def test_of_a_load_the_files_that_are_right_are_taken_and_the_others_are_misses_from_then_on(tmp_path: Path):
    held = Tier(tmp_path)
    held.store(KEYS[:3])
    (path,) = tmp_path.rglob(KEYS[1].hex() + SUFFIX)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    result = held.load(KEYS[:3])
    assert not result.success and set(result.successful_keys) == {KEYS[0], KEYS[2]}
    assert held.tier.lookup(KEYS[1], None) is LookupResult.MISS
    assert held.tier.take_counts()[0] == {"checksum": 1} and held.tier.take_counts()[0] == {}
    held.close()


def test_a_file_that_another_worker_had_to_remove_is_a_miss_and_nobodys_fault(tmp_path: Path):
    held = Tier(tmp_path)
    held.store(KEYS[:2])
    for path in tmp_path.rglob(f"*{SUFFIX}"):
        path.unlink()
    result = held.load(KEYS[:2])
    assert not result.success and result.successful_keys is None
    assert not held.tier.holds(KEYS[0]) and held.tier.take_counts()[0] == {}
    held.close()


def test_what_another_worker_wrote_is_found_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mine, theirs = Tier(tmp_path), Tier(tmp_path)
    theirs.store(KEYS[:1])
    monkeypatch.setattr(mine.tier, "_next_refresh", time.monotonic())
    for _ in range(2):  # it looks, and takes what was seen
        assert list(mine.tier.get_finished_jobs()) == []
        mine.tier.drain_jobs()
    assert mine.tier.holds(KEYS[0])
    mine.close()
    theirs.close()


def test_what_is_pinned_does_not_make_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held = Tier(tmp_path, max_bytes=3 * (ROW + HEADER_BYTES))
    held.store(KEYS[:3])
    for moment, key in enumerate(KEYS[:3]):
        (path,) = tmp_path.rglob(key.hex() + SUFFIX)
        os.utime(path, (moment, moment))
    held.tier.keys_in_use = lambda: [KEYS[0], KEYS[5]]
    monkeypatch.setattr(held.tier, "_probe", lambda: _Done())  # it reads files, too
    monkeypatch.setattr(held.tier, "_next_refresh", time.monotonic())
    list(held.tier.get_finished_jobs())
    held.tier.drain_jobs()
    held.store(KEYS[3:4])
    assert [held.tier.holds(key) for key in KEYS] == [True, False, True, True, False, False]
    held.close()


@pytest.mark.parametrize("error", [PermissionError(1, "not permitted"), OSError(5, "input/output error")])
@pytest.mark.parametrize("call", ["lstat", "mkdir", "flock"])
def test_a_directory_that_is_refused_stays_refused(tmp_path: Path, monkeypatch, engine_log, error, call):
    """Whatever of it works later: another user's folder can be listed, and holds files that look right."""
    before = Tier(tmp_path)
    assert before.store(KEYS[:1]).success
    before.close()

    def fails(*arguments: Any, **more: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock" if call == "flock" else Path, *(() if call == "flock" else (call,)), fails)
        held = Tier(tmp_path)
    for _ in range(2):
        monkeypatch.setattr(held.tier, "_next_refresh", time.monotonic())
        list(held.tier.get_finished_jobs())
        held.tier.drain_jobs()
        assert held.tier.lookup(KEYS[0], None) is LookupResult.MISS
    assert not held.tier.usable and not held.store(KEYS[1:2]).success
    assert held.tier.take_counts()[0] == {"unreadable": 1, "not_written": 1}
    (told,) = [record.getMessage() for record in engine_log.records if "checkpoint directory" in record.getMessage()]
    assert "cannot be read" in told and len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 1
    held.close()


def test_a_full_disk_is_a_store_that_failed_and_leaves_no_half_file(tmp_path: Path, monkeypatch):
    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    held = Tier(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("os.write", full)
        assert not held.store(KEYS[:1]).success
    assert held.tier.take_counts()[0] == {"not_written": 1}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]
    assert held.store(KEYS[:1]).success and held.load(KEYS[:1]).success
    held.close()


def test_how_fast_the_disk_is_is_known_before_the_first_request(tmp_path: Path, monkeypatch):
    first = Tier(tmp_path)
    first.store(KEYS[:2])
    first.close()
    read = StateFiles.read

    def slow(self: Any, key: bytes, into: memoryview) -> None:
        time.sleep(0.1)
        read(self, key, into)

    monkeypatch.setattr(StateFiles, "read", slow)
    second = Tier(tmp_path)
    assert not second.tier.cost.pays(ROW, 0.09) and second.tier.cost.pays(ROW, 3600)
    second.close()


def test_a_load_that_hangs_keeps_others_from_the_disk_until_it_ends(tmp_path: Path, monkeypatch):
    held = Tier(tmp_path)
    held.store(KEYS[:1])
    held.load(KEYS[:1])
    assert held.tier.cost.pays(ROW, 3600)
    ended, read = threading.Event(), StateFiles.read

    def hangs(self: Any, key: bytes, into: memoryview) -> None:
        ended.wait()
        read(self, key, into)

    monkeypatch.setattr(StateFiles, "read", hangs)
    held.submit(KEYS[:1], 8, load=True)
    while held.tier.cost.pays(ROW, 0.2):
        time.sleep(0.01)
    ended.set()
    held.tier.drain_jobs()
    list(held.tier.get_finished_jobs())
    assert held.tier.cost.pays(ROW, 3600)
    held.close()
