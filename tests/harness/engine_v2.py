"""A whole engine on model runner V2, a GPU's default, on a CPU: the runner's Triton kernels in Triton's interpreter.

Run by `tests.harness.versions.interpreted` as `engine_v2 MODEL MODE TRAFFIC [RIGHT]`, with the plugin (`seamark`) and
asynchronous scheduling, or as a `reference`: runner V1, no prefix caching. The recurrent layers run on vLLM's kernels
for CPUs. The plugin's two questions whether this is a GPU are answered as on one. With `RIGHT`, what a reference has
answered (JSON: pairs of a prompt and its answer), the engine drafts by MTP, and an oracle makes some drafts right.
Prints JSON: for each prompt its tokens, their log probabilities, and the tokens it found in the cache; the class of the
runner and of the scheduler; how many rows had how many right drafts.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tests.harness import async_scheduling, draft_kernels, triton_interpreter
from tests.harness.draft_oracle import Oracle
from tests.harness.engines import CPU_PROCESS

ANSWER = 6  # tokens

PREFIXES, EDGE = "prefixes", "edge"

DRAFTS = 3  # for each token

EDGE_ANSWER = 26  # tokens, across the edge of a block of 384

Wave = list[tuple[list[int], list[int]]]  # prompts that are asked at once, with their hints


def waves(traffic: str) -> list[Wave]:
    """What is asked: prompts that share prefixes, or one whose answer crosses the edge of a block."""
    draw = random.Random(5)

    def drawn(length: int) -> list[int]:
        return [draw.randrange(100, 4000) for _ in range(length)]

    if traffic == EDGE:
        return [[(drawn(378), [370])]]
    one, two = drawn(90), drawn(161)
    return [
        [(one, [48, 64])],
        [([*one[:50], *drawn(4)], [48])],
        [([*one[:70], *drawn(3)], [64])],
        [(two, [100, 160])],  # the last piece is one token
        [(two, [160]), ([*one[:64], *drawn(3)], [64])],  # two hits in one step
        [([*two[:100], *drawn(30)], [96, 128]), ([*one[:66], *drawn(20)], [64, 80])],
    ]


# Tokens that each of the prompts that share prefixes finds in the cache; with drafts a unit less.
OWED = (0, 48, 64, 0, 160, 64, 96, 64)


def as_on_a_gpu() -> None:
    """Have the plugin's patches for GPUs apply in this process."""
    from engine_patches import families, patches
    from engine_patches.forward import layers

    v2 = {"worker-steps-v2", "worker-batch-v2"}
    rows = tuple(row for row in patches.PATCHES if row.name in v2)
    assert {row.name for row in rows} == v2
    for row in rows:
        object.__setattr__(row, "on", None)  # frozen
    layers._is_configured = lambda known, config: known.kind == families.MAMBA2


def _oracle(core: Any, right: Sequence[Any]) -> AbstractContextManager[None]:
    runner = core.model_executor.driver_worker.worker.model_runner
    known = {tuple(prompt): answer for prompt, answer in right}
    return Oracle(known, 0.7).speaks(runner, core.scheduler.requests) if right else nullcontext()


def main(model: str, mode: str, traffic: str, right: str = "[]") -> None:
    patched, answered = mode == "seamark", json.loads(right)
    os.environ |= {
        "SEAMARK_DRAFTS": "1",
        "SEAMARK_ENGINE": "1" if patched else "reference",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(patched)),
        **CPU_PROCESS,
        "VLLM_CPU_CI_ENV": "1",
    }
    del os.environ["VLLM_PLUGINS"]
    triton_interpreter.admit_triton()
    if patched:
        as_on_a_gpu()
        async_scheduling.register()
        if answered:
            draft_kernels.install((draft_kernels.CONVOLUTION, draft_kernels.STATE_UPDATE))
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
        speculative_config={"method": "mtp", "num_speculative_tokens": DRAFTS} if answered else None,
    )
    core = engine.llm_engine.engine_core.engine_core
    take = core.scheduler.update_from_output
    accepted: Counter[int] = Counter()

    def watched(scheduled: Any, output: Any, *args: Any, **options: Any) -> Any:
        for name in scheduled.scheduled_spec_decode_tokens:
            accepted[len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1] += 1
        return take(scheduled, output, *args, **options)

    core.scheduler.update_from_output = watched
    answers: list[Any] = []

    def ask(wave: Wave, length: int) -> None:
        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=length,
                logprobs=1,
                ignore_eos=True,
                detokenize=False,
                extra_args={"seamark_boundaries": hint},
            )
            for _, hint in wave
        ]
        found = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in wave], parameters, use_tqdm=False)
        for (prompt, _), request in zip(wave, found, strict=True):
            output = request.outputs[0]
            tokens, cached = list(output.token_ids), request.num_cached_tokens or 0
            logprobs = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
            answers.append({"prompt": prompt, "tokens": tokens, "logprobs": logprobs, "cached": cached})

    with _oracle(core, answered):
        for wave in waves(traffic):
            ask(wave, EDGE_ANSWER if traffic == EDGE else ANSWER)
        if traffic == EDGE:  # the turn behind it
            ask([(answers[0]["prompt"] + answers[0]["tokens"], [])], ANSWER)
    runner = type(core.model_executor.driver_worker.worker.model_runner)
    print(
        json.dumps(
            {
                "answers": answers,
                "accepted": {str(count): times for count, times in accepted.items()},
                "runner": [each.__module__ for each in runner.__mro__],
                "scheduler": type(core.scheduler).__name__,
                "writes_in_forward": patched and core.scheduler.seamark.writes_in_forward,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
