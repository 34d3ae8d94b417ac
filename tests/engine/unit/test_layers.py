"""States are written inside a pass only if every worker and every layer does so."""

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from engine_patches.forward.layers import WRITES_IN_FORWARD, require_promise_of_all


def recurrent(promised: bool) -> MambaSpec:
    spec = MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,))
    if promised:
        object.__setattr__(spec, WRITES_IN_FORWARD, True)
    return spec


def promised_after(*of_workers: dict) -> list[bool]:
    get_kv_cache_specs = require_promise_of_all(lambda self: list(of_workers))
    found = get_kv_cache_specs(None)
    return [
        getattr(spec, WRITES_IN_FORWARD, False)
        for specs in found
        for spec in specs.values()
        if isinstance(spec, MambaSpec)
    ]


def test_a_promise_of_all_holds():
    attention = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=1, dtype=torch.float32)
    assert promised_after({"m": recurrent(True), "a": attention}, {"m": recurrent(True)}) == [True, True]


def test_one_worker_or_layer_without_it_takes_it_from_all():
    assert promised_after({"m": recurrent(True)}, {"m": recurrent(False)}) == [False, False]
    assert promised_after({"m": recurrent(True), "k": recurrent(False)}) == [False, False]
    assert promised_after({"m": recurrent(False)}) == [False]
