"""The tier between vLLM's rows in host memory and the files: what a disk does wrong is a miss, and is counted once."""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from engine_patches.disk import files, tier
from engine_patches.disk.files import HEADER_BYTES, LOCK, SUFFIX, StateFiles
from engine_patches.disk.tier import CheckedFiles, _Done
from tests.harness import damaged_files
from tests.harness.waiting import wait_for

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

    def look(self) -> None:
        """At what is on disk, as every half minute."""
        for _ in range(2):  # it looks, and takes what was seen
            self.tier._next_refresh = time.monotonic()
            assert list(self.tier.get_finished_jobs()) == []
            self.tier.drain_jobs()

    def close(self) -> Any:
        self.tier.shutdown()


def told(log: Any) -> list[str]:
    """What the log says of the directory."""
    lines = [record.getMessage() for record in log.records]
    return [line for line in lines if "checkpoint directory" in line]


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


def test_what_another_worker_wrote_is_found_after_a_while(tmp_path: Path):
    mine, theirs = Tier(tmp_path), Tier(tmp_path)
    theirs.store(KEYS[:1])
    mine.look()
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
    (line,) = told(engine_log)
    assert "cannot be read" in line and len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 1
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


def test_a_start_beside_a_lock_that_is_held_says_so_and_reads_and_writes_once_it_is_free(
    tmp_path, monkeypatch, engine_log
):
    monkeypatch.setattr(files, "START_LOCK_SECONDS", 0.05)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    before = Tier(tmp_path)
    before.store(KEYS[:1])
    before.close()
    descriptor = os.open(tmp_path / LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    held = Tier(tmp_path)
    assert held.load(KEYS[:1]).success and not held.tier.takes_stores
    assert not held.store(KEYS[1:2]).success
    os.close(descriptor)
    assert held.store(KEYS[1:2]).success and held.tier.holds(KEYS[1])
    assert held.tier.take_counts()[0] == {"not_written": 2}
    (line,) = told(engine_log)
    assert "cannot be written to: another process holds" in line
    held.close()


@pytest.mark.parametrize("call", ["prepare", "keys", "read"])
def test_a_start_on_a_disk_that_hangs_goes_on_without_it(tmp_path: Path, monkeypatch, engine_log, call):
    before = Tier(tmp_path)
    before.store(KEYS[:1])
    before.close()
    ended = threading.Event()
    monkeypatch.setattr(tier, "START_SECONDS", 0.05)

    def hangs(*arguments: Any) -> None:
        ended.wait()
        raise OSError(5, "input/output error")

    monkeypatch.setattr(StateFiles, call, hangs)
    held = Tier(tmp_path)
    assert not held.tier.usable and not held.tier.holds(KEYS[0])
    (line,) = told(engine_log)
    assert "no answer" in line
    held.close()  # it waits for no thread of the start's
    ended.set()


def test_a_fifo_or_a_device_in_place_of_a_file_keeps_no_start_waiting(tmp_path: Path):
    root = tmp_path / "states"
    before = Tier(root)
    before.store(KEYS[:3])
    before.close()
    paths = sorted(root.rglob(f"*{SUFFIX}"))
    damaged_files.fifo(random.Random(1), paths[0], paths[1])
    damaged_files.link_to_zeros(random.Random(1), paths[1], paths[2])
    held = Tier(root)
    assert [held.tier.holds(key) for key in KEYS[:3]] == [False, False, True]
    assert set(held.load(KEYS[:3]).successful_keys) == {KEYS[2]}
    held.close()


def test_what_was_not_taken_is_not_offered_again_at_once(tmp_path: Path, monkeypatch):
    held = Tier(tmp_path)
    assert held.tier.takes_stores

    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.write", full)
        held.submit(KEYS[:2], 0, load=False)
        assert held.tier.is_written(KEYS[0]) and not held.tier.is_written(KEYS[2])
        held.tier.drain_jobs()
        list(held.tier.get_finished_jobs())
    assert not held.tier.is_written(KEYS[0]) and not held.tier.takes_stores
    monkeypatch.setattr(held.tier, "_no_stores_until", time.monotonic())
    assert held.tier.takes_stores
    held.close()


def test_a_worker_that_evicts_under_anothers_looks_is_no_error(tmp_path: Path, engine_log):
    """Each has room for four files of the six that both write."""
    bound = 4 * (ROW + HEADER_BYTES)
    mine, theirs = Tier(tmp_path, max_bytes=bound), Tier(tmp_path, max_bytes=bound)
    ended, rounds = threading.Event(), []

    def evict() -> None:
        while not ended.is_set():
            for start in (0, 2):
                theirs.store(KEYS[start : start + 4])
            rounds.append(1)

    thread = threading.Thread(target=evict)
    thread.start()
    wait_for(lambda: rounds)
    for _ in range(60):
        mine.look()
    ended.set()
    thread.join()
    assert mine.tier.take_counts()[0] == {} and told(engine_log) == [] and len(rounds) > 0
    mine.close()
    theirs.close()


def test_what_is_written_is_counted_in_bytes_and_known_to_be_there_until_it_is_taken(tmp_path: Path):
    held = Tier(tmp_path)
    assert held.tier.take_counts() == ({}, 0) and held.tier.bytes_held == 0
    held.store(KEYS[:2])
    assert held.tier.bytes_held == 2 * (ROW + HEADER_BYTES)
    assert held.tier.take_counts() == ({}, 2 * (ROW + HEADER_BYTES)) and held.tier.take_counts() == ({}, 0)
    assert held.store(KEYS[:1]).success and held.tier.take_counts() == ({}, 0), "it was there"
    assert held.tier.bytes_held == 2 * (ROW + HEADER_BYTES)
    held.close()


def test_what_made_room_for_others_is_no_longer_there(tmp_path: Path):
    held = Tier(tmp_path, max_bytes=2 * (ROW + HEADER_BYTES))
    held.store(KEYS[:1])
    held.store(KEYS[1:3])
    assert [held.tier.holds(key) for key in KEYS[:3]] == [False, True, True]
    assert held.tier.bytes_held == 2 * (ROW + HEADER_BYTES)
    held.close()


def test_a_job_names_a_row_for_each_key(tmp_path: Path):
    held = Tier(tmp_path)
    job = TransferJob(1, KEYS[:2], np.arange(3), False, SimpleNamespace())
    for submit in (held.tier.submit_store, held.tier.submit_load):
        with pytest.raises(ValueError, match="zip"):
            submit(job)
    held.close()


def test_what_a_load_takes_and_moves_is_told_and_learnt(tmp_path: Path, monkeypatch):
    held = Tier(tmp_path)
    held.store(KEYS[:3])
    began: list[Any] = []
    took: list[Any] = []
    ended: list[Any] = []
    monkeypatch.setattr(held.tier.cost, "load_began", lambda *given: began.append(given))
    monkeypatch.setattr(held.tier.cost, "load_took", lambda *given: took.append(given))
    monkeypatch.setattr(held.tier.cost, "load_ended", lambda job: ended.append(job))
    result = held.load(KEYS[:3])
    assert began == [(2, 3 * ROW)] and ended == [2]
    assert result.transfer_bytes == 3 * ROW and took == [(3 * ROW, result.transfer_time)]
    held.load(KEYS[4:5])
    assert began[1:] == [(3, ROW)] and ended == [2, 3] and len(took) == 1, "what was not there takes no time"
    assert held.store(KEYS[5:]).success and len(took) == 1 and len(began) == 2
    held.close()


def test_the_files_used_last_tell_how_fast_the_disk_is(tmp_path: Path, monkeypatch):
    first = Tier(tmp_path)
    first.store(KEYS)
    first.close()
    (damaged,) = tmp_path.rglob(KEYS[4].hex() + SUFFIX)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    for moment, key in enumerate(KEYS):
        (path,) = tmp_path.rglob(key.hex() + SUFFIX)
        os.utime(path, (moment, moment))
    seen: list[bytes] = []
    read = StateFiles.read

    def noting(self: Any, key: bytes, into: memoryview) -> None:
        seen.append(key)
        if key == KEYS[3]:
            raise FileNotFoundError
        read(self, key, into)

    monkeypatch.setattr(StateFiles, "read", noting)
    second = Tier(tmp_path)
    assert seen == KEYS[3:]
    assert second.tier.take_counts()[0] == {"checksum": 1} and not second.tier.holds(KEYS[4])
    assert second.tier.cost.pays(ROW, 3600), "one of them was read"
    second.close()


def test_each_kind_of_failure_is_said_once(tmp_path: Path, monkeypatch, engine_log):
    held = Tier(tmp_path)
    for error in (OSError(28, "full"), OSError(5, "broken"), files.NotOurs("open to others"), OSError(28, "full")):
        monkeypatch.setattr(StateFiles, "write", lambda *_, error=error: (_ for _ in ()).throw(error))
        assert not held.store(KEYS[:1]).success
    assert held.tier.take_counts() == ({"not_written": 4}, 0)
    lines = told(engine_log)
    assert ["cannot be written to" in line for line in lines] == [True, False] and "is not used: open" in lines[1]
    monkeypatch.setattr(StateFiles, "keys", lambda _: (_ for _ in ()).throw(OSError(5, "broken")))
    held.look()
    held.look()
    assert "cannot be read" in told(engine_log)[2] and len(told(engine_log)) == 3
    assert held.tier.take_counts()[0]["unreadable"] >= 1
    held.close()


def test_a_start_that_found_nothing_wrong_says_what_is_there(tmp_path: Path, engine_log):
    engine_log.set_level("INFO", "vllm.seamark")
    first = Tier(tmp_path)
    first.store(KEYS[:2])
    first.close()
    Tier(tmp_path).close()
    assert [line.split(":")[1].split()[0] for line in engine_log.messages] == ["0", "2"]


def test_an_engine_without_an_identity_makes_no_directory_and_says_nothing(tmp_path: Path, engine_log):
    engine_log.set_level("INFO", "vllm.seamark")
    held = Tier(tmp_path / "states", identity=b"")
    assert not held.tier.usable and not held.tier.takes_stores and not (tmp_path / "states").exists()
    assert not held.store(KEYS[:1]).success and held.tier.take_counts() == ({"not_written": 1}, 0)
    assert not held.tier.is_written(KEYS[0]) and engine_log.messages == []
    held.close()


def test_of_whole_requests_nothing_is_wanted(tmp_path: Path):
    held = Tier(tmp_path)
    assert held.tier.on_new_request(None) == RequestOffloadingContext()
    held.close()
