"""An engine that drafts well, as a plugin of vLLM, with a fault planted by `SEAMARK_TEST_FAULT`.

A random head is never right. So once a prompt was answered, drafts behind it are what came then, each right with a
given probability until the first that is not. `ROWS_LOST`: not behind a hit, as if the head had no rows there.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from typing import Any

from engine_patches.trial import own_requests
from tests.harness import draft_defects, draft_kernels
from tests.harness.draft_oracle import DRAFTS, replace_on_v1

VARIABLE = "SEAMARK_TEST_FAULT"

SOON = "SEAMARK_TEST_SOON"  # set: an engine that is never idle is tried beside its clients at once, without rests

ROWS_LOST = "the head has no rows behind a hit"

PROBABILITY = 0.7


def register() -> None:
    """The plugin."""
    draft_kernels.install()
    if os.environ.get(SOON):
        own_requests.OVERDUE_SECONDS = own_requests.REST_BESIDE = 0.0
    fault = os.environ.get(VARIABLE, "")
    _remember(drafts_behind_hits=fault != ROWS_LOST)
    if fault and fault != ROWS_LOST:
        draft_defects.plant(fault)


def _remember(*, drafts_behind_hits: bool) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    known: dict[tuple[int, ...], list[int]] = {}  # by prompt, it with its longest answer
    hits: set[str] = set()  # requests
    update = GPUModelRunner._update_states

    @functools.wraps(update)  # whose source Seamark reads
    def update_states(self: Any, output: Any, *args: Any, **options: Any) -> Any:
        hits.difference_update(output.finished_req_ids)
        hits.update(new.req_id for new in output.scheduled_new_reqs if new.num_computed_tokens)
        return update(self, output, *args, **options)

    def draft(name: str, prompt: Sequence[int], tokens: list[int], own: list[int]) -> list[int]:
        before = known.setdefault(tuple(prompt), [])
        ahead = before[len(tokens) :] if before[: len(tokens)] == tokens else []
        if len(tokens) > len(before):
            known[tuple(prompt)] = tokens
        draw, good = random.Random(len(tokens)), 0
        while good < min(DRAFTS, len(ahead)) and draw.random() < PROBABILITY:
            good += 1
        if not drafts_behind_hits and name in hits:
            good = 0
        return ([*ahead[:good], *own[good:]] + [0] * DRAFTS)[:DRAFTS]

    GPUModelRunner._update_states = update_states
    replace_on_v1(draft)
