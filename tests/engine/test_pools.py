"""What `seamark worker --explain` reckons of a pool before the start is what vLLM makes of it, whatever the flags."""

from __future__ import annotations

import json

import pytest

from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT, generated_model
from tests.harness.scheduler_process import run_apart

SHORT = ("--max-model-len", "8192")

# Family and flags; vLLM refuses those in `TOO_LONG`.
POOLS = {
    "as it is": (NEMOTRON_H, SHORT),
    "as it is, delta nets": (QWEN3_NEXT, SHORT),
    "without caching": (NEMOTRON_H, ("--no-enable-prefix-caching", *SHORT)),
    "without caching, delta nets": (QWEN3_NEXT, ("--no-enable-prefix-caching", *SHORT)),
    "longer blocks": (NEMOTRON_H, ("--block-size", "512", *SHORT)),
    "rounded states": (NEMOTRON_H, ("--mamba-ssm-cache-dtype", "float16", *SHORT)),
    "a memory that is no whole number of blocks": (QWEN3_NEXT, ("--kv-cache-memory-bytes", "99999999")),
    "half of the heads": (NEMOTRON_H, ("--tensor-parallel-size", "2", *SHORT)),
    "as long as fits": (NEMOTRON_H, ("--max-model-len", "-1", "--num-gpu-blocks-override", "40")),
    "just one request": (QWEN3_NEXT, ("--num-gpu-blocks-override", "29", *SHORT)),
    "a block too few": (QWEN3_NEXT, ("--num-gpu-blocks-override", "28", *SHORT)),
    "the model's own length": (NEMOTRON_H, ("--num-gpu-blocks-override", "60")),
}

TOO_LONG = {"a block too few", "the model's own length"}


@pytest.mark.thorough
def test_blocks_and_what_a_request_takes_of_them_are_those_of_a_core_with_the_models_own_layers():
    commands = [[str(generated_model(print, family)), *flags] for family, flags in POOLS.values()]
    told = dict(zip(POOLS, run_apart("measured_pools", json.dumps(commands), "start"), strict=True))
    print(*told.items(), sep="\n")
    refused = {name for name, (_, _, measured) in told.items() if isinstance(measured, str)}
    assert refused == {name for name, (_, fits, _) in told.items() if fits} == TOO_LONG
    for name, (reckoned, fits, measured) in told.items():
        assert f"maximum model length is {fits}." in measured if fits else measured == reckoned, name
