"""`copy_kv_cache_blocks_inplace` copies one of two caches that start at one address, however wide the other one is.

First on two bare tensors, then on a hybrid model that gets one prompt twice and resumes inside a block.
Usage: python block_copy.py MODEL. Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import os
import random
import sys

import torch

BLOCKS, ATTENTION_PAGE, MAMBA_PAGE = 4, 100, 60  # the pages in floats; both start where a block starts

PROMPT, NEW, MATCH_UNIT = 200, 24, 16  # tokens

BOUND = 1e-3  # of a logprob


def tail_is_copied() -> bool:
    """Two layers of one allocation; a Mamba and an attention cache are views of the first."""
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    memory = torch.arange(2.0 * BLOCKS * ATTENTION_PAGE)
    attention = memory[: BLOCKS * ATTENTION_PAGE].view(BLOCKS, ATTENTION_PAGE)
    mamba = attention[:, :MAMBA_PAGE]
    copy_kv_cache_blocks_inplace([mamba, attention], BLOCKS, [(0, 2)])
    copied = int((attention[2] == attention[0]).sum())
    print(f"two tensors: expected all {ATTENTION_PAGE} numbers of the attention page copied, saw {copied}")
    return copied == ATTENTION_PAGE


def answer(llm, prompt: list[int]) -> tuple[int, list[int], list[float]]:
    """Cached prompt tokens, greedy tokens, their logprobs."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
    tokens = list(request.outputs[0].token_ids)
    logprobs = [step[token].logprob for step, token in zip(request.outputs[0].logprobs, tokens, strict=True)]
    return request.num_cached_tokens, tokens, logprobs


def resend_is_right(model: str) -> bool:
    """One prompt twice with prefix caching, compared with an engine without."""
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
    prompt = [draw.randrange(3, 4096) for _ in range(PROMPT)]
    _, right_tokens, right_logprobs = answer(LLM(model, enable_prefix_caching=False, **flags), prompt)
    caching = LLM(model, enable_prefix_caching=True, prefix_match_unit=MATCH_UNIT, **flags)
    right = True
    for name in ("sent once", "sent again"):
        cached, tokens, logprobs = answer(caching, prompt)
        same = next((n for n in range(NEW) if tokens[n] != right_tokens[n]), NEW)
        error = max(abs(a - b) for a, b in zip(logprobs[: same + 1], right_logprobs, strict=False))
        print(
            f"{PROMPT} tokens {name}, {cached} cached: expected the {NEW} tokens of an engine without prefix caching, "
            f"saw the first {same} of them, logprobs off by {error:.1e}"
        )
        right = right and same == NEW and error < BOUND
    return right


def main(model: str) -> int:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    cured = all([tail_is_copied(), resend_is_right(model)])
    print("no defect" if cured else "defect present")
    return 0 if cured else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
