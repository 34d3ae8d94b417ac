"""On a CPU, the block size of a hybrid is reset to 128 after its cache was built with longer blocks.

The scheduler then ends chunks at multiples of 128, and a state from the middle of a block is registered under the key
of the block's end. Every engine core in a process of its own does this (`EngineCoreProc._perform_handshakes`, so any
server). To spare that process, the script calls what the handshake calls; `--engine-process` takes the real way.
Usage: python cpu_block_size.py MODEL [--engine-process]. Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import os
import random
import sys

# Steps shorter than a block keep clear of another defect, see cpu_checkpoint_export.py.
FIRST, SECOND, STEP, NEW = 600, 385, 256, 24  # tokens; a block of tiny_hybrid.py's model has 384

BOUND = 1e-3  # of a logprob


def answer(llm, prompt: list[int]) -> tuple[int, list[int], list[float]]:
    """Cached prompt tokens, greedy tokens, their logprobs."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
    tokens = list(request.outputs[0].token_ids)
    logprobs = [step[token].logprob for step, token in zip(request.outputs[0].logprobs, tokens, strict=True)]
    return request.num_cached_tokens, tokens, logprobs


def main(model: str, engine_process: bool) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(engine_process))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    flags = dict(
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 28,
    )
    draw = random.Random(0)
    prompt = [draw.randrange(3, 4096) for _ in range(FIRST)]
    caching = LLM(model, enable_prefix_caching=True, max_num_batched_tokens=STEP, **flags)
    config = caching.llm_engine.vllm_config
    built_with = config.cache_config.block_size
    if not engine_process:
        config.__post_init__()
        print(f"block size: expected {built_with} as the cache was built, saw {config.cache_config.block_size}")
    answer(caching, prompt)
    cached, tokens, logprobs = answer(caching, prompt[:SECOND])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    _, right_tokens, right_logprobs = answer(LLM(model, enable_prefix_caching=False, **flags), prompt[:SECOND])
    same = next((n for n in range(NEW) if tokens[n] != right_tokens[n]), NEW)
    error = max(abs(a - b) for a, b in zip(logprobs[: same + 1], right_logprobs, strict=False))
    print(
        f"{SECOND} tokens, {cached} cached: expected the {NEW} tokens of an engine without prefix caching, "
        f"saw the first {same} of them, logprobs off by {error:.1e}"
    )
    cured = same == NEW and error < BOUND
    print("no defect" if cured else "defect present")
    return 0 if cured else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--engine-process" in sys.argv[2:]))
