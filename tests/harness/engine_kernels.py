"""A whole engine whose Mamba2 layers run vLLM's kernels for CUDA, in Triton's interpreter, on a CPU.

Run by `tests.harness.versions.interpreted` as `engine_kernels MODEL MODE WANTED`, with `MODE` as of SEAMARK_ENGINE.
`WANTED` is JSON: `prompts` that are asked one after the other, each `[tokens, hint]`; `answer`, the tokens of each
answer; `flags` of vLLM and variables of the `environment`. Prints JSON: of each prompt the answer's tokens,
their log probabilities, and the tokens found in the cache; and how often each kernel ran.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from typing import Any
from unittest import mock

from tests.harness import triton_interpreter

OPS = "vllm.model_executor.layers.mamba.ops"

CPU_CURES = ("cpu-checkpoint-scan", "cpu-checkpoint-store")  # of vLLM's scan for CPUs, which does not run here


def _import_kernels() -> None:
    """vLLM's ops replace themselves on a CPU when they are imported: here they stay those for CUDA."""
    from vllm.platforms import current_platform

    with mock.patch.object(type(current_platform), "is_cpu", return_value=False):
        for name in ("causal_conv1d", "mamba_ssm", "ssd_combined"):
            importlib.import_module(f"{OPS}.{name}")
        dispatch = importlib.import_module(f"{OPS}.ssu_dispatch")
    choose = dispatch.initialize_mamba_ssu_backend

    def initialize(*args: Any, **options: Any) -> None:
        with mock.patch.object(type(current_platform), "is_cpu", return_value=False):
            choose(*args, **options)

    dispatch.initialize_mamba_ssu_backend = initialize


def _plan_as_on_a_gpu() -> None:
    from vllm.platforms import current_platform

    from engine_patches import patches
    from engine_patches.forward import scan_states

    rows = [row for row in patches.PATCHES if row.name in CPU_CURES]
    assert len(rows) == len(CPU_CURES)
    for row in rows:
        object.__setattr__(row, "applies", lambda: False)  # frozen
    plan = scan_states._planned

    def planned(*args: Any) -> Any:
        with mock.patch.object(type(current_platform), "is_cpu", return_value=False):
            return plan(*args)

    scan_states._planned = planned


def _counted(module: Any, name: str, runs: Counter[str]) -> None:
    kernel = getattr(module, name)
    assert "cpu" not in kernel.__module__, kernel.__module__

    def counting(*args: Any, **options: Any) -> Any:
        runs[name] += 1
        return kernel(*args, **options)

    setattr(module, name, counting)


def main(model: str, mode: str, wanted: str) -> None:
    work = json.loads(wanted)
    os.environ |= {
        "SEAMARK_ENGINE": mode,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_CI_ENV": "1",
        **work["environment"],
    }
    del os.environ["VLLM_PLUGINS"]
    triton_interpreter.admit_triton()
    _import_kernels()
    _plan_as_on_a_gpu()
    runs: Counter[str] = Counter()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.mamba import mamba_mixer2

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        **work["flags"],
    )
    for name in ("causal_conv1d_fn", "causal_conv1d_update", "mamba_chunk_scan_combined_varlen"):
        _counted(mamba_mixer2, name, runs)
    answers: list[Any] = []
    for prompt, hint in work["prompts"]:
        parameters = SamplingParams(
            temperature=0,
            max_tokens=work["answer"],
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
            extra_args={"seamark_boundaries": hint} if hint else None,
        )
        (request,) = engine.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        output = request.outputs[0]
        tokens = list(output.token_ids)
        logprobs = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
        answers.append({"tokens": tokens, "logprobs": logprobs, "cached": request.num_cached_tokens or 0})
    dispatch = importlib.import_module(f"{OPS}.ssu_dispatch")
    print(json.dumps({"answers": answers, "runs": runs, "update": dispatch._mamba_ssu_backend.name}))


if __name__ == "__main__":
    main(*sys.argv[1:])
