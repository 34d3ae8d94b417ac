"""What engines do not share files over; and that whatever is not believed is counted where a worker's metrics are."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.tiering.base import TransferJob

from engine_patches.disk.identity import identity_of
from engine_patches.disk.tier import CheckedFiles
from engine_patches.forward.loaded_weights import Weights
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.grid import Grid
from tests.harness.reports import collect

ROWS, ROW = 10, 8192

KEYS = [bytes([number]) * 36 for number in range(8)]


def identity(model: Path, dtype: str = "float32", block: int = 64, weights: str = "w", **arguments: Any) -> bytes:
    """Of an engine with that model; `weights`: the name of what it has loaded."""
    config = EngineArgs(model=str(model), dtype=dtype, enforce_eager=True, max_model_len=2048, **arguments)
    attention = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=getattr(torch, dtype))
    states = MambaSpec(block_size=block, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    groups = [KVCacheGroupSpec(["m"], states), KVCacheGroupSpec(["a"], attention)]
    caches = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
    created = config.create_engine_config()
    created.seamark_weights = Weights(weights)
    return identity_of(created, caches)


@pytest.fixture(scope="module")
def identities(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """By how the engine differs from the first one."""
    folder = tmp_path_factory.mktemp("models")
    copy = Path(shutil.copytree(model, folder / "model"))
    found = {"": identity(copy), "nothing": identity(copy), "its folder": identity(model)}
    found["the dtype"] = identity(copy, dtype="bfloat16")
    found["the states' dtype"] = identity(copy, mamba_ssm_cache_dtype="float16")
    found["the block size"] = identity(copy, block=128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
        found["the convolution's layout"] = identity(copy)
    found["the weights"] = identity(copy, weights="others")
    return found


OTHERS = ("the dtype", "the states' dtype", "the block size", "the convolution's layout", "the weights")


def test_each_difference_that_matters_makes_another_identity_and_no_other_does(identities):
    assert identities["nothing"] == identities["its folder"] == identities[""]
    assert len({identities[""], *(identities[other] for other in OTHERS)}) == 1 + len(OTHERS)


def test_an_engine_that_does_not_know_its_weights_uses_no_directory(model, tmp_path):
    assert identity(model, weights="") == b""
    engine = Engine(tmp_path / "states", b"")
    assert not engine.run(KEYS[:1], range(1), load=False).success and not (tmp_path / "states").exists()
    engine.tier.shutdown()


class Engine:
    """A tier, and the metrics of its worker."""

    def __init__(self, root: Path, identity: bytes) -> None:
        self.rows = np.zeros((ROWS, ROW), dtype=np.uint8)
        view = memoryview(self.rows)
        self.tier = CheckedFiles(SimpleNamespace(), view, "CheckedFiles", str(root), identity.hex(), 1 << 30)
        self._jobs = 0

    def run(self, keys: list[bytes], rows: range, load: bool) -> Any:
        self._jobs += 1
        job = TransferJob(self._jobs, keys, np.array(rows), load, SimpleNamespace())
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return result

    def store(self) -> None:
        for row, key in enumerate(KEYS):
            self.rows[row] = key[0] + 1
        assert self.run(KEYS, range(len(KEYS)), load=False).success

    def loads_right(self, number: int) -> bool:
        """Whether a key is loaded. Nothing wrong ever is."""
        loaded = self.run([KEYS[number]], range(8, 9), load=True).success
        assert not loaded or (self.rows[8] == number + 1).all()
        return bool(loaded)

    def tell(self) -> None:
        """As at the end of a step."""
        checkpoints = Checkpoints(Grid(16, 16), 384)
        checkpoints.counters.disk_used(*self.tier.take_counts(), self.tier.bytes_held)
        collect(checkpoints)
        self.tier.shutdown()
