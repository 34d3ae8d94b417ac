"""The lanes of `seamark gpu-check`, as a table: one model in one configuration each, the most valuable first.

In each, an engine with the patches is held to one without a cache: answers, hits, planted defects and forward passes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches.gpu_check.drawn_models import FLASH_NEXT, KIMI_LINEAR
from engine_patches.gpu_check.job import LaneJob
from engine_patches.gpu_check.questions import PARALLEL

MAX_LENGTH = 4096  # tokens of a prompt and its answer

BUDGET = 2048  # tokens that an engine with a cache computes in a step

MTP = '{"method": "mtp", "num_speculative_tokens": 3}'

NEMOTRON, QWEN = "nemotron_h", "qwen3_next"

NO_WEIGHTS = ("--load-format", "dummy")

OF_FLASH_NEXT = (*NO_WEIGHTS, "--engram-config", '{"cpu_offload": false}')  # embeddings of n-grams on the GPU

# Small enough to find room beside a server that is running on the same GPU.
ARGUMENTS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": MAX_LENGTH,
    "max_num_seqs": 16,
    # Room for all that is asked at once: without a cache nothing keeps a step's end on a chunk's end, so that the
    # reference must not cut a prompt. The same for all engines, so that they share what is compiled.
    "max_num_batched_tokens": PARALLEL * MAX_LENGTH,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.03,
    "mamba_ssm_cache_dtype": "float32",
}


class Lane(NamedTuple):
    """One model in one configuration, and what is asked beyond exactness and passes."""

    family: str  # of the tiny model; for a user's own, its name
    dtype: str | None = None  # None: as the flags say
    eager: bool = False
    timed: bool = False  # speed beside vLLM alone
    other_runner: bool = False  # the model runner that vLLM does not choose; held to the lane with the one it does
    block_copy: bool = False  # ask vLLM alone whether its copy of a partial block loses something here
    drafts: str | None = None  # JSON of vLLM's --speculative-config: vLLM alone with them, then Seamark beside it
    few: bool = False  # fewer cases
    on_cpu: bool = False
    wants_gpu: bool = False  # has no kernels for a CPU, where it is not run
    own_model: bool = False
    flags: Sequence[str] = ()  # of vLLM

    @property
    def name(self) -> str:
        """The lane's name in the report."""
        mode = None if self.own_model or self.on_cpu else "eager" if self.eager else "compiled"
        name = " ".join(filter(None, [self.family, self.dtype, mode]))
        if self.other_runner:
            name += ", other model runner"
        if self.drafts is not None:
            drafts = json.loads(self.drafts)
            name += f", drafts ({drafts.get('method', '?')}, {drafts.get('num_speculative_tokens', '?')})"
        return name

    def job(self, model: Path | str, prefix_caching: bool, drafting: bool = True) -> LaneJob:
        """What an engine of this lane does, as far as all of them do the same."""
        own: dict[str, Any] = {"model": str(model), "enable_prefix_caching": prefix_caching}
        if self.drafts is not None and drafting:
            own["speculative_config"] = json.loads(self.drafts)
        if self.own_model:
            return LaneJob(own, self.flags, own_model=True, quick=self.few)
        arguments = {**ARGUMENTS, "dtype": self.dtype, "enforce_eager": self.eager, **own}
        return LaneJob(arguments, self.flags, quick=self.few, budget=BUDGET if prefix_caching else None)


LANES = {
    "cuda": (
        # As users run them: half precision, compiled, with CUDA graphs, model runner and kernels by vLLM's own choice.
        Lane(NEMOTRON, "bfloat16", timed=True),
        Lane(QWEN, "bfloat16", timed=True),
        Lane(NEMOTRON, "bfloat16", other_runner=True),
        Lane(NEMOTRON, "bfloat16", eager=True, block_copy=True),
        Lane(FLASH_NEXT, "bfloat16", few=True, flags=OF_FLASH_NEXT),
        Lane(KIMI_LINEAR, "bfloat16", few=True, flags=NO_WEIGHTS),
        Lane(QWEN, "bfloat16", timed=True, drafts=MTP, few=True),
        # vLLM 0.33 keeps a layer of this family's head in float32, and fails in bfloat16.
        Lane(NEMOTRON, "float32", eager=True, drafts=MTP, few=True),
        # Beside runner V1's asynchronous scheduler hints are refused.
        Lane(
            NEMOTRON, "float32", eager=True, drafts=MTP, few=True, other_runner=True, flags=("--no-async-scheduling",)
        ),
    ),
    "cpu": (
        Lane(NEMOTRON, "float32", eager=True, timed=True, block_copy=True, on_cpu=True),
        Lane(QWEN, "bfloat16", eager=True, few=True, on_cpu=True),
        Lane(NEMOTRON, "float32", eager=True, drafts=MTP, few=True, on_cpu=True),
        Lane(FLASH_NEXT, on_cpu=True, wants_gpu=True),
        Lane(KIMI_LINEAR, on_cpu=True, wants_gpu=True),
    ),
}

QUICK = {"cuda": 2, "cpu": 1}  # lanes that --quick runs


def lanes_of(device: str, quick: bool, flags: Sequence[str] = ()) -> list[Lane]:
    """The lanes with tiny models on `cpu` or `cuda`, each with these flags of vLLM."""
    lanes = [lane._replace(flags=(*lane.flags, *flags)) for lane in LANES[device]]
    return [lane._replace(few=True, block_copy=False) for lane in lanes[: QUICK[device]]] if quick else lanes
