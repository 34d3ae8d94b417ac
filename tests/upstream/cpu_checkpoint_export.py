"""On a CPU, Mamba2 promises to export a state from inside a forward pass, and its scan returns final states only.

With prefix caching any prompt longer than a cache block then kills the engine with an IndexError.
Usage: python cpu_checkpoint_export.py MODEL. Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import os
import random
import sys
import traceback

PROMPT, NEW = 600, 24  # tokens; a block of tiny_hybrid.py's model has 384

BOUND = 1e-3  # of a logprob


def answer(llm, prompt: list[int]) -> tuple[int, list[int], list[float]]:
    """Cached prompt tokens, greedy tokens, their logprobs."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
    tokens = list(request.outputs[0].token_ids)
    logprobs = [step[token].logprob for step, token in zip(request.outputs[0].logprobs, tokens, strict=True)]
    return request.num_cached_tokens, tokens, logprobs


def main(model: str) -> int:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
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
    prompt = [draw.randrange(3, 4096) for _ in range(PROMPT)]
    _, right_tokens, right_logprobs = answer(LLM(model, enable_prefix_caching=False, **flags), prompt)
    caching = LLM(model, enable_prefix_caching=True, **flags)
    cured = True
    for name in ("sent once", "sent again"):
        print(f"{PROMPT} tokens {name}: expected the {NEW} tokens of an engine without prefix caching", end=", ")
        try:
            cached, tokens, logprobs = answer(caching, prompt)
        except IndexError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"saw IndexError in {os.path.basename(where.filename)}:{where.name}: {error}")
            cured = False
            break
        same = next((n for n in range(NEW) if tokens[n] != right_tokens[n]), NEW)
        error = max(abs(a - b) for a, b in zip(logprobs[: same + 1], right_logprobs, strict=False))
        print(f"saw the first {same} of them with {cached} cached, logprobs off by {error:.1e}")
        cured = cured and same == NEW and error < BOUND
    print("no defect" if cured else "defect present")
    return 0 if cured else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
