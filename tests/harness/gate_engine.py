"""An engine that drafts well, as a plugin of vLLM, with a fault planted by `SEAMARK_TEST_FAULT`.

A random head is never right. So once a prompt was answered, drafts behind it are what came then, each right with a
given probability until the first that is not. `ROWS_LOST`: not behind a hit, as if the head had no rows there.
"""

from __future__ import annotations

import functools
import os
import random
from typing import Any

from tests.harness import draft_defects, draft_engines, draft_kernels

VARIABLE = "SEAMARK_TEST_FAULT"

ROWS_LOST = "the head has no rows behind a hit"

PROBABILITY = 0.7


def register() -> None:
    """The plugin."""
    draft_kernels.install()
    fault = os.environ.get(VARIABLE, "")
    _remember(drafts_behind_hits=fault != ROWS_LOST)
    if fault and fault != ROWS_LOST:
        draft_defects.plant(fault)


def _remember(*, drafts_behind_hits: bool) -> None:
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    known: dict[tuple[int, ...], list[int]] = {}  # by prompt, it with its longest answer
    hits: set[str] = set()  # requests
    propose, update = GPUModelRunner.propose_draft_token_ids, GPUModelRunner._update_states

    @functools.wraps(update)  # whose source Seamark reads
    def update_states(self: Any, output: Any, *args: Any, **options: Any) -> Any:
        hits.difference_update(output.finished_req_ids)
        hits.update(new.req_id for new in output.scheduled_new_reqs if new.num_computed_tokens)
        return update(self, output, *args, **options)

    @functools.wraps(propose)
    def propose_draft_token_ids(self: Any, output: Any, sampled: Any, *args: Any, **options: Any) -> Any:
        drafts = propose(self, output, sampled, *args, **options)
        rows = drafts if isinstance(drafts, list) else drafts.tolist()
        for row, name, prompt, tokens in draft_engines.answering(self, output, sampled):
            before = known.setdefault(tuple(prompt), [])
            ahead = before[len(tokens) :] if before[: len(tokens)] == tokens else []
            if len(tokens) > len(before):
                known[tuple(prompt)] = tokens
            draw, good = random.Random(len(tokens)), 0
            while good < min(draft_engines.DRAFTS, len(ahead)) and draw.random() < PROBABILITY:
                good += 1
            if not drafts_behind_hits and name in hits:
                good = 0
            rows[row] = ([*ahead[:good], *rows[row][good:]] + [0] * draft_engines.DRAFTS)[: draft_engines.DRAFTS]
        return rows if isinstance(drafts, list) else torch.tensor(rows, dtype=drafts.dtype)

    GPUModelRunner._update_states, GPUModelRunner.propose_draft_token_ids = update_states, propose_draft_token_ids
