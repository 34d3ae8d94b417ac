"""The tier between vLLM's rows in host memory and the files: what a disk does wrong is a miss, and is counted once.

Also what engines do not share files over, and that the rows' name goes before anything that may hang.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.plugins
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering import spec as tiering
from vllm.v1.kv_offload.tiering.base import TransferJob

from engine_patches.disk import files, tier
from engine_patches.disk.connector import identity_of
from engine_patches.disk.files import HEADER_BYTES, LOCK, SUFFIX, StateFiles
from engine_patches.disk.tier import CheckedFiles, CheckpointSpec, _Done
from engine_patches.forward.loaded_weights import Weights
from tests.harness import damaged_files
from tests.harness.damaged_files import EVERYTHING, strangers_files

ROWS, ROW = 16, 8192

FILE = ROW + HEADER_BYTES

KEYS = [bytes([number]) * 36 for number in range(6)]


class Tier:
    """A tier over rows of its own, whose jobs are done when a call returns."""

    def __init__(self, root: Path, identity: bytes = b"i" * 32, max_bytes: int = 1 << 30) -> None:
        self.rows = np.zeros((ROWS, ROW), dtype=np.uint8)
        view = memoryview(self.rows)
        self.tier = CheckedFiles(SimpleNamespace(), view, "CheckedFiles", str(root), identity.hex(), max_bytes)
        self._number = 0

    def run(self, keys: list[bytes], first_row: int, load: bool) -> Any:
        self._number += 1
        job = TransferJob(self._number, keys, np.arange(first_row, first_row + len(keys)), load, SimpleNamespace())
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        assert load or all(map(self.tier.is_written, keys)) or not self.tier.usable
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self._number and not any(map(self.tier.is_written, keys))
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


Start = Callable[..., Tier]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Tiers over one directory, with files for `stored` from an earlier process; they are ended behind the test."""
    started: list[Tier] = []

    def begin(*stored: bytes, **how: Any) -> Tier:
        if stored:
            before = Tier(tmp_path)
            assert before.store(list(stored)).success
            before.tier.shutdown()
        started.append(Tier(tmp_path, **how))
        return started[-1]

    yield begin
    for each in started:
        each.tier.shutdown()


def told(log: Any) -> list[str]:
    """What the log says of the directory."""
    return [line for line in log.messages if "checkpoint directory" in line]


def path_of(root: Path, key: bytes) -> Path:
    (path,) = root.rglob(key.hex() + SUFFIX)
    return path


def fails(error: BaseException) -> Any:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise error

    return fail


FULL, BROKEN = OSError(28, "No space left on device"), OSError(5, "input/output error")


def test_of_a_load_the_files_that_are_right_are_taken_and_the_others_are_misses_from_then_on(start, tmp_path):
    held = start()
    held.store(KEYS[:3])
    path_of(tmp_path, KEYS[1]).write_bytes(path_of(tmp_path, KEYS[1]).read_bytes()[:-1] + b"x")
    result = held.load(KEYS[:3])
    assert not result.success and set(result.successful_keys) == {KEYS[0], KEYS[2]}
    assert [row[0] for row in (held.rows[8], held.rows[10])] == [KEYS[0][0], KEYS[2][0]]
    assert held.tier.lookup(KEYS[1], None) is LookupResult.MISS
    assert held.tier.take_counts()[0] == {"checksum": 1} and held.tier.take_counts()[0] == {}
    path_of(tmp_path, KEYS[0]).unlink()  # by another worker, which needed room
    assert held.load(KEYS[:1]).successful_keys is None
    assert not held.tier.holds(KEYS[0]) and held.tier.take_counts()[0] == {}


def test_what_is_pinned_does_not_make_room_for_others(start, tmp_path, monkeypatch):
    held = start(max_bytes=3 * FILE)
    held.store(KEYS[:3])
    for moment, key in enumerate(KEYS[:3]):
        os.utime(path_of(tmp_path, key), (moment, moment))
    held.tier.keys_in_use = lambda: [KEYS[0], KEYS[5]]
    monkeypatch.setattr(held.tier, "_probe", lambda: _Done())  # it reads files, too
    held.look()
    held.store(KEYS[3:4])
    assert [held.tier.holds(key) for key in KEYS] == [True, False, True, True, False, False]
    assert held.tier.bytes_held == 3 * FILE


@pytest.mark.parametrize("error", [PermissionError(1, "not permitted"), BROKEN])
@pytest.mark.parametrize("call", ["lstat", "mkdir", "flock"])
def test_a_directory_that_is_refused_stays_refused(start, tmp_path, monkeypatch, engine_log, error, call):
    """Whatever of it works later: another user's folder can be listed, and holds files that look right."""
    start(KEYS[0])
    with monkeypatch.context() as patched:
        patched.setattr(*(("fcntl.flock",) if call == "flock" else (Path, call)), fails(error))
        held = start()
    held.look()
    assert held.tier.lookup(KEYS[0], None) is LookupResult.MISS
    assert not held.tier.usable and not held.store(KEYS[1:2]).success
    assert held.tier.take_counts()[0] == {"unreadable": 1, "not_written": 1}
    (line,) = told(engine_log)
    assert "cannot be read" in line and len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 1


def test_a_full_disk_is_a_store_that_failed_leaves_no_half_file_and_is_left_alone_for_a_while(
    start, tmp_path, monkeypatch
):
    held = start()
    with monkeypatch.context() as patched:
        patched.setattr("os.write", fails(FULL))
        assert held.tier.takes_stores and not held.store(KEYS[:1]).success
    assert held.tier.take_counts()[0] == {"not_written": 1} and not held.tier.takes_stores
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]
    monkeypatch.setattr(held.tier, "_no_stores_until", time.monotonic())
    assert held.tier.takes_stores and held.store(KEYS[:1]).success and held.load(KEYS[:1]).success


def test_a_start_beside_a_lock_that_is_held_says_so_and_reads_and_writes_once_it_is_free(
    start, tmp_path, monkeypatch, engine_log
):
    monkeypatch.setattr(files, "START_LOCK_SECONDS", 0.05)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    start(KEYS[0])
    descriptor = os.open(tmp_path / LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    held = start()
    assert held.load(KEYS[:1]).success and not held.tier.takes_stores and not held.store(KEYS[1:2]).success
    os.close(descriptor)
    assert held.store(KEYS[1:2]).success and held.tier.holds(KEYS[1])
    assert held.tier.take_counts()[0] == {"not_written": 2}
    (line,) = told(engine_log)
    assert "cannot be written to: another process holds" in line


@pytest.mark.parametrize("call", ["prepare", "keys", "read"])
def test_a_start_on_a_disk_that_hangs_goes_on_without_it(start, monkeypatch, engine_log, call):
    start(KEYS[0])
    ended = threading.Event()
    monkeypatch.setattr(tier, "START_SECONDS", 0.05)
    monkeypatch.setattr(StateFiles, call, lambda *_: ended.wait() and fails(BROKEN)())
    held = start()
    assert not held.tier.usable and not held.tier.holds(KEYS[0])
    (line,) = told(engine_log)
    assert "no answer" in line
    held.tier.shutdown()  # it waits for no thread of the start's
    ended.set()


@pytest.mark.parametrize("damage", EVERYTHING.values(), ids=EVERYTHING)
def test_a_damage_costs_what_it_hit_and_is_healed_and_what_is_not_ours_stays(tmp_path, monkeypatch, engine_log, damage):
    """At the next start, and at the one after that."""
    monkeypatch.setattr(files, "START_LOCK_SECONDS", 0.05)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    root, keys = tmp_path / "states", KEYS[:3]
    before = Tier(root)
    before.store(keys)
    before.tier.shutdown()
    damage.apply(random.Random(3), path_of(root, keys[0]), path_of(root, keys[1]))
    strangers, mode = strangers_files(tmp_path), root.stat().st_mode if root.exists() else 0
    lost = {"": set(), "own": {keys[0]}, "all": set(keys)}[damage.lost]
    try:
        for healed in (False, True):
            held = Tier(root, max_bytes=6 * FILE)
            known = [key for key in keys if held.tier.holds(key)]
            result = held.load(known) if known else None
            found = known if result and result.success else list(result.successful_keys or () if result else ())
            assert set(keys) - set(found) == (set() if healed and damage.kept_again else lost)
            assert [held.rows[8 + known.index(key)][0] for key in found] == [key[0] for key in found]
            if missing := [key for key in keys if key not in found]:
                held.store(missing)
            held.tier.shutdown()
            assert bool(told(engine_log)) == damage.told
            engine_log.clear()
    finally:
        damaged_files.let_go()
    assert strangers_files(tmp_path) == strangers and mode in (0, root.stat().st_mode)
    assert not (tmp_path / "not-made").exists(), "a link in place of the lock is not followed"


def test_a_fifo_or_a_device_in_place_of_a_file_keeps_no_start_waiting(start, tmp_path):
    start(*KEYS[:3])
    paths = [path_of(tmp_path, key) for key in KEYS[:3]]
    damaged_files.OTHERS["a fifo"](random.Random(1), paths[0], paths[1])
    damaged_files.OTHERS["a link to a device"](random.Random(1), paths[1], paths[2])
    held = start()
    assert [held.tier.holds(key) for key in KEYS[:3]] == [False, False, True]
    assert set(held.load(KEYS[:3]).successful_keys) == {KEYS[2]}


def test_a_start_says_what_is_there_and_without_an_identity_makes_no_directory_and_says_nothing(
    start, tmp_path, engine_log
):
    engine_log.set_level("INFO", "vllm.seamark")
    held = Tier(tmp_path / "states", identity=b"")
    assert not held.tier.usable and not held.tier.takes_stores and not (tmp_path / "states").exists()
    assert not held.store(KEYS[:1]).success and held.tier.take_counts() == ({"not_written": 1}, 0)
    assert not held.tier.is_written(KEYS[0]) and engine_log.messages == []
    assert held.tier.on_new_request(None) == RequestOffloadingContext(), "of whole requests nothing is wanted"
    held.tier.shutdown()
    start(*KEYS[:2])
    assert [line.split(":")[1].split()[0] for line in engine_log.messages] == ["0", "2"]


class Stopped(BaseException):
    """What ends a start in the middle."""


def test_the_map_has_no_name_when_the_tiers_behind_it_are_made(monkeypatch):
    engine = f"seamark-test-{uuid.uuid4().hex}"
    workers = SharedOffloadRegion(engine, 2, 0, ROW, ROW)
    path, named = Path(workers.mmap_path), []

    def hangs(*arguments: Any) -> Any:
        named.append(path.exists())
        raise Stopped

    monkeypatch.setattr(tiering.SecondaryTierFactory, "create_secondary_tier", hangs)
    spec = CheckpointSpec.__new__(CheckpointSpec)
    spec._manager, spec.extra_config, spec.secondary_tier_configs, spec._engine_id = None, {}, [{}], engine
    spec.num_chunks, spec.kv_bytes_per_chunk, spec.cpu_page_size_per_worker = 2, ROW, ROW
    spec.eviction_policy, spec.cache_policy_module_path = "lru", None
    spec.kv_events_config = SimpleNamespace(enable_kv_cache_events=False)
    try:
        assert path.exists()
        with pytest.raises(Stopped):
            spec.get_manager()
        assert named == [False]
        spec._scheduler_mmap.base_tensor[5] = 7
        assert workers.base_tensor[5] == 7  # the memory is the same, whatever has become of its name
    finally:
        path.unlink(missing_ok=True)


def identity(
    model: Path, dtype: str = "float32", block: int = 64, weights: str = "w", backends: str = "", **arguments: Any
) -> bytes:
    """Of an engine with that model; `weights`: the name of what it has loaded."""
    attention = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=getattr(torch, dtype))
    states = MambaSpec(block_size=block, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    groups = [KVCacheGroupSpec(["m"], states), KVCacheGroupSpec(["a"], attention)]
    caches = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.plugins, "plugins_loaded", True)  # ours would patch vLLM for all tests of this process
        created = EngineArgs(
            model=str(model), dtype=dtype, enforce_eager=True, max_model_len=2048, **arguments
        ).create_engine_config()
    created.seamark_weights = Weights(weights, backends=backends)
    return identity_of(created, caches)


def test_each_difference_that_matters_makes_another_identity_and_no_other_does(model: Path, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    first = identity(copy)
    assert identity(copy) == identity(model) == first
    changes = (
        {"dtype": "bfloat16"},
        {"mamba_ssm_cache_dtype": "float16"},
        {"block": 128},
        {"weights": "others"},
        {"backends": "FlashInferBackend"},
        {"attention_backend": "TRITON_ATTN"},
    )
    found = {first, *(identity(copy, **change) for change in changes)}
    for amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        found.add(identity(copy))
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")  # the convolution's layout
    assert len({*found, identity(copy)}) == 3 + len(changes)


def test_an_engine_that_does_not_know_its_weights_has_no_identity(model: Path):
    assert identity(model, weights="") == b""  # with which a tier makes no directory
