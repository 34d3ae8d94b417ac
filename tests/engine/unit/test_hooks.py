"""What the scheduler says of a model's states when it starts."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from engine_patches.scheduler.hooks import warn_of_narrow_states


def spec(states: torch.dtype) -> MambaSpec:
    """Of a layer that keeps its convolution's inputs in bfloat16, and the state itself in `states`."""
    return MambaSpec(block_size=64, shapes=((1,), (1,)), dtypes=(torch.bfloat16, states))


@pytest.mark.parametrize(
    ("states", "named"),
    [
        ([torch.float32], None),
        ([torch.float32, torch.bfloat16, torch.bfloat16], "kept in bfloat16:"),
        ([torch.float16, torch.bfloat16], "kept in bfloat16, float16:"),
    ],
)
def test_states_that_are_rounded_are_named_once_with_the_flag_that_keeps_them_whole(engine_log, states, named):
    warn_of_narrow_states([spec(each) for each in states])
    assert len(engine_log.messages) == (named is not None)
    for line in engine_log.messages:
        assert named in line and "--mamba-ssm-cache-dtype float32" in line


def test_states_that_are_rounded_at_random_on_purpose_are_named_with_that_flag_and_no_advice(engine_log):
    engine_log.set_level("INFO", "vllm.seamark")
    warn_of_narrow_states([spec(torch.float16)], at_random=True)
    (line,) = engine_log.messages
    assert "float16" in line and "--enable-mamba-cache-stochastic-rounding" in line and "float32" not in line
