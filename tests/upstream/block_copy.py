"""`copy_kv_cache_blocks_inplace` copies one of two caches that start at one address, however wide the other one is.

Usage: python block_copy.py MODEL. Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import sys

import torch
from tiny_hybrid import FLAGS, answer, drawn, is_right, verdict, without_engine

BLOCKS, ATTENTION_PAGE, MAMBA_PAGE = 4, 100, 60  # the pages in floats; both start where a block starts

PROMPT, MATCH_UNIT = 200, 16  # tokens


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


def resend_is_right(model: str) -> bool:
    """One prompt twice with prefix caching, compared with an engine without."""
    from vllm import LLM

    prompt = drawn(PROMPT)
    right = answer(LLM(model, enable_prefix_caching=False, **FLAGS), prompt)
    caching = LLM(model, enable_prefix_caching=True, prefix_match_unit=MATCH_UNIT, **FLAGS)
    return all(is_right(f"{PROMPT} tokens sent {name}", answer(caching, prompt), right) for name in ("once", "again"))


def main(model: str) -> int:
    without_engine()
    return verdict(all([tail_is_copied(), resend_is_right(model)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
