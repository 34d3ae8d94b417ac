"""The lanes of `seamark gpu-check`, as a table: one model in one configuration each, the most valuable first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches.gpu_check.drawn_models import FLASH_NEXT, KIMI_LINEAR, NEMOTRON, QWEN
from engine_patches.gpu_check.job import LaneJob

BUDGET = 2048  # tokens that a step computes where prompts are not to be in one piece
MTP = '{"method": "mtp", "num_speculative_tokens": 3}'
RUNNER, KERNELS = "model runner", "kernels of prompts"  # of which a lane takes the other one

# Small enough to find room beside a server that is running on the same GPU.
ARGUMENTS: Mapping[str, Any] = {
    **{"skip_tokenizer_init": True, "load_format": "dummy", "mamba_ssm_cache_dtype": "float32", "max_num_seqs": 16},
    **{"max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.03},
}


class Lane(NamedTuple):
    """One model in one configuration, and what is asked beyond exactness and passes."""

    family: str  # of the tiny model; for a user's own, its name
    dtype: str | None = None  # None: as the flags say
    eager: bool = False
    timed: bool = False  # speed beside vLLM alone
    other: str | None = None  # `RUNNER` or `KERNELS`: the one that vLLM did not choose in the family's first lane
    block_copy: bool = False  # ask vLLM alone whether its copy of a partial block loses something here
    drafts: str | None = None  # JSON of vLLM's --speculative-config
    few: bool = False  # fewer questions
    on_cpu: bool = False
    wants_gpu: bool = False  # has no kernels for a CPU, where it is not run
    own_model: bool = False
    flags: Sequence[str] = ()  # of vLLM

    @property
    def name(self) -> str:
        """The lane's name in the report."""
        mode = None if self.own_model or self.on_cpu else "eager" if self.eager else "compiled"
        name = " ".join(filter(None, [self.family, self.dtype, mode]))
        if self.other:
            name += f", other {self.other}"
        if self.drafts is not None:
            drafts = json.loads(self.drafts)
            name += f", drafts ({drafts.get('method', '?')}, {drafts.get('num_speculative_tokens', '?')})"
        return name

    def job(self, model: Path | str, alone: bool = False) -> LaneJob:
        """What an engine of this lane does, `alone` or with the patches."""
        arguments: dict[str, Any] = {"model": str(model), "enable_prefix_caching": True}
        if self.drafts is not None:
            arguments["speculative_config"] = json.loads(self.drafts)
        if self.block_copy:
            arguments["prefix_match_unit"] = 16
        if not self.own_model:
            longest = 4096 if self.on_cpu else 8192
            arguments |= {**ARGUMENTS, "max_model_len": longest, "dtype": self.dtype, "enforce_eager": self.eager}
        budget = None if self.own_model else BUDGET
        return LaneJob(arguments, self.flags, alone, None, self.own_model, self.few, budget, self.timed)


LANES = {
    "cuda": (
        # As users run them: half precision, compiled, with CUDA graphs, model runner and kernels by vLLM's own choice.
        Lane(NEMOTRON, "bfloat16", timed=True),
        Lane(QWEN, "bfloat16", timed=True),
        Lane(QWEN, "bfloat16", timed=True, other=KERNELS),
        Lane(NEMOTRON, "bfloat16", other=RUNNER),
        Lane(NEMOTRON, "bfloat16", eager=True, block_copy=True),
        # Embeddings of n-grams on the GPU.
        Lane(FLASH_NEXT, "bfloat16", few=True, flags=("--engram-config", '{"cpu_offload": false}')),
        Lane(KIMI_LINEAR, "bfloat16", few=True),
    ),
    "cpu": (
        Lane(NEMOTRON, "float32", eager=True, timed=True, on_cpu=True),
        Lane(QWEN, "bfloat16", eager=True, few=True, on_cpu=True),
        Lane(FLASH_NEXT, on_cpu=True, wants_gpu=True),
        Lane(KIMI_LINEAR, on_cpu=True, wants_gpu=True),
    ),
}

QUICK = {"cuda": 2, "cpu": 1}  # lanes that --quick runs


def lanes_of(device: str, quick: bool, flags: Sequence[str] = ()) -> list[Lane]:
    """The lanes with tiny models on `cpu` or `cuda`, each with these flags of vLLM."""
    lanes = [lane._replace(flags=(*lane.flags, *flags)) for lane in LANES[device]]
    return [lane._replace(few=True) for lane in lanes[: QUICK[device]]] if quick else lanes
