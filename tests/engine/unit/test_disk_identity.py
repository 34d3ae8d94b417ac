"""What engines do not share files over."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.plugins
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from engine_patches.disk.identity import identity_of
from engine_patches.forward.loaded_weights import Weights


def identity(model: Path, dtype: str = "float32", block: int = 64, weights: str = "w", **arguments: Any) -> bytes:
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


def test_an_engine_that_does_not_know_its_weights_has_no_identity(model):
    assert identity(model, weights="") == b""  # with which a tier makes no directory: test_disk_tier.py
