"""Workers that Ray starts on a CPU: vLLM plugins for test engines only, and a batch job.

vLLM places workers where Ray counts accelerators, and its CPU platform names none. Here a worker takes one of the GPUs
that a Ray without any is told to have.

`python -m tests.harness.ray_workers MODEL` is vLLM's class `LLM`, as a batch job has it: no server, and nobody who
collects reports. Prints the tokens that a prompt finds of one before it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from engine_patches.settings import PREFIX

SETTINGS = "tests: settings here:"  # in the output of each process that loads plugins
FOUND = "tests: tokens found:"


def platform() -> str:
    """The platform plugin: the name of a class."""
    return "tests.harness.ray_platform.CpuOfRay"


def say_settings() -> None:
    """The other plugin."""
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)]
    print(SETTINGS, *found, flush=True)


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    from tests.harness.bench_clients import fresh_tokens

    options: Any = dict(dtype="float32", enforce_eager=True, max_model_len=2048, enable_prefix_caching=True)
    engine = LLM(model, distributed_executor_backend="ray", **options)
    wanted = SamplingParams(max_tokens=1, extra_args={"seamark_boundaries": [163]})
    head = fresh_tokens(163, "head")
    for tail in ("first", "second"):
        (answer,) = engine.generate([{"prompt_token_ids": [*head, *fresh_tokens(30, tail)]}], wanted)
    print(FOUND, answer.num_cached_tokens, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
