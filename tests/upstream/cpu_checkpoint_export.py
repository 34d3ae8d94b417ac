"""On a CPU, Mamba2 promises to export a state from inside a forward pass, and its scan returns final states only.

Usage: python cpu_checkpoint_export.py MODEL. Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import os
import sys
import traceback

from tiny_hybrid import FLAGS, answer, drawn, is_right, quiet, verdict

PROMPT = 600  # tokens; a block of tiny_hybrid.py's model has 384


def main(model: str) -> int:
    quiet()
    from vllm import LLM

    prompt = drawn(PROMPT)
    right = answer(LLM(model, enable_prefix_caching=False, **FLAGS), prompt)
    caching = LLM(model, enable_prefix_caching=True, **FLAGS)
    try:
        return verdict(all(is_right(f"{PROMPT} tokens", answer(caching, prompt), right) for _ in range(2)))
    except IndexError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"saw IndexError in {os.path.basename(where.filename)}:{where.name}: {error}")
        return verdict(False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
