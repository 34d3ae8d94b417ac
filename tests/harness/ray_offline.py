"""vLLM's class `LLM` on workers of Ray, as a batch job has it: no server, and nobody who collects reports.

Run as `python -m tests.harness.ray_offline MODEL`. Prints the tokens that a prompt finds of one before it.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.harness.bench_clients import fresh_tokens

FOUND = "tests: tokens found:"


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    options: Any = dict(dtype="float32", enforce_eager=True, max_model_len=2048, enable_prefix_caching=True)
    engine = LLM(model, distributed_executor_backend="ray", **options)
    wanted = SamplingParams(max_tokens=1, extra_args={"seamark_boundaries": [163]})
    head = fresh_tokens(163, "head")
    for tail in ("first", "second"):
        (answer,) = engine.generate([{"prompt_token_ids": [*head, *fresh_tokens(30, tail)]}], wanted)
    print(FOUND, answer.num_cached_tokens, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
