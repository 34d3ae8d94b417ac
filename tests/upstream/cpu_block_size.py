"""On a CPU, the block size of a hybrid is reset to 128 after its cache was built with longer blocks.

Every engine core in a process of its own does this (`EngineCoreProc._perform_handshakes`). To spare that process, the
script calls what the handshake calls; `--engine-process` takes the real way.
Usage: python cpu_block_size.py MODEL [--engine-process]. Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import os
import sys

from tiny_hybrid import FLAGS, answer, drawn, is_right, quiet, verdict

# Steps shorter than a block keep clear of another defect, see cpu_checkpoint_export.py.
FIRST, SECOND, STEP = 600, 385, 256  # tokens; a block of tiny_hybrid.py's model has 384


def main(model: str, engine_process: bool) -> int:
    quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(engine_process))
    from vllm import LLM

    prompt = drawn(FIRST)
    caching = LLM(model, enable_prefix_caching=True, max_num_batched_tokens=STEP, **FLAGS)
    config = caching.llm_engine.vllm_config
    built_with = config.cache_config.block_size
    if not engine_process:
        config.__post_init__()
        print(f"block size: expected {built_with} as the cache was built, saw {config.cache_config.block_size}")
    answer(caching, prompt)
    found = answer(caching, prompt[:SECOND])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    right = answer(LLM(model, enable_prefix_caching=False, **FLAGS), prompt[:SECOND])
    return verdict(is_right(f"{SECOND} tokens", found, right))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--engine-process" in sys.argv[2:]))
