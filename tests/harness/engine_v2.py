"""A whole engine on model runner V2, a GPU's default, on a CPU: the runner's Triton kernels in Triton's interpreter.

Run by `tests.harness.versions.interpreted` as `engine_v2 MODEL MODE`, with the plugin (`seamark`) and asynchronous
scheduling, or as a `reference`: runner V1, no prefix caching. The recurrent layers run on vLLM's kernels for CPUs. The
plugin's two questions whether this is a GPU are answered as on one. Prints JSON: for each prompt its tokens, their
log probabilities, and the tokens it found in the cache; and the class of the runner and of the scheduler.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

from tests.harness import async_scheduling, triton_interpreter

ANSWER = 6  # tokens


def waves() -> list[list[tuple[list[int], list[int]]]]:
    """Prompts that are asked at once, with their hints."""
    draw = random.Random(5)

    def drawn(length: int) -> list[int]:
        return [draw.randrange(100, 4000) for _ in range(length)]

    one, two = drawn(90), drawn(161)
    return [
        [(one, [48, 64])],
        [([*one[:50], *drawn(4)], [48])],
        [([*one[:70], *drawn(3)], [64])],
        [(two, [100, 160])],  # the last piece is one token
        [(two, [160]), ([*one[:64], *drawn(3)], [64])],  # two hits in one step
        [([*two[:100], *drawn(30)], [96, 128]), ([*one[:66], *drawn(20)], [64, 80])],
    ]


# Tokens that each prompt of `waves` finds in the cache.
OWED = (0, 48, 64, 0, 160, 64, 96, 64)


def _as_on_a_gpu() -> None:
    from engine_patches import patches
    from engine_patches.forward import layers

    v2 = {"worker-steps-v2", "worker-batch-v2"}
    rows = tuple(row for row in patches.PATCHES if row.name in v2)
    assert {row.name for row in rows} == v2
    for row in rows:
        object.__setattr__(row, "applies", lambda: True)  # frozen
    layers._writes_in_forward = lambda layer, config: layers._is_a(layers.MAMBA2, layer)


def main(model: str, mode: str) -> None:
    patched = mode == "seamark"
    os.environ |= {
        "SEAMARK_ENGINE": "1" if patched else "reference",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(patched)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_CI_ENV": "1",
    }
    del os.environ["VLLM_PLUGINS"]
    triton_interpreter.admit_triton()
    if patched:
        _as_on_a_gpu()
        async_scheduling.register()
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        dtype="float32",
        enable_prefix_caching=patched,
        async_scheduling=patched,
    )
    core = engine.llm_engine.engine_core.engine_core
    answers: list[Any] = []
    for wave in waves():
        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=ANSWER,
                logprobs=1,
                ignore_eos=True,
                detokenize=False,
                extra_args={"seamark_boundaries": hint},
            )
            for _, hint in wave
        ]
        found = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in wave], parameters, use_tqdm=False)
        for request in found:
            output = request.outputs[0]
            tokens = list(output.token_ids)
            logprobs = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
            answers.append({"tokens": tokens, "logprobs": logprobs, "cached": request.num_cached_tokens or 0})
    runner = type(core.model_executor.driver_worker.worker.model_runner)
    print(
        json.dumps(
            {
                "answers": answers,
                "runner": [each.__module__ for each in runner.__mro__],
                "scheduler": type(core.scheduler).__name__,
                "writes_in_forward": patched and core.scheduler.seamark.writes_in_forward,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
