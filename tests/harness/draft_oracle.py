"""An oracle for engines of tests: it makes the drafts of a random head right with a given probability.

A random head is hardly ever right, so that no row would ever go on from a later state than its first. The head runs all
the same and writes its rows. Each draft is then replaced by the token that is going to come, until the first that shall
not be right: that one and those behind it stay the head's own.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Prompts with the tokens that are going to follow them.
Right = Mapping[tuple[int, ...], Sequence[int]]


def agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first drafts are the same."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))


class Oracle:
    """Knows what follows each prompt. The same prompt and place, the same drafts."""

    def __init__(self, right: Right, probability: float) -> None:
        self._right, self._probability = right, probability

    def draft(self, prompt: Sequence[int], generated: int, own: Sequence[int]) -> list[int]:
        """Drafts behind so many `generated` tokens of an answer, as many as the head's `own`."""
        coming = self._right.get(tuple(prompt), ())[generated : generated + len(own)]
        draw = random.Random(hash((tuple(prompt), generated)))  # of integers: the same in every process
        good = 0
        while good < len(coming) and draw.random() < self._probability:
            good += 1
        return [*coming[:good], *own[good:]]

    @contextlib.contextmanager
    def speaks(self, runner: Any, requests: Mapping[str, Any]) -> Iterator[None]:
        """Inside this context the model runner's drafts are the oracle's; `requests`: the scheduler's, by their id."""
        if hasattr(runner, "speculator"):  # model runner V2
            owner, name = runner.speculator, "propose"
            replaced = self._on_v2(owner.propose, requests)
        else:
            owner, name = runner, "propose_draft_token_ids"
            replaced = self._on_v1(runner, owner.propose_draft_token_ids)
        setattr(owner, name, replaced)
        try:
            yield
        finally:
            delattr(owner, name)

    def _on_v1(self, runner: Any, propose: Any) -> Any:
        def proposed(scheduled: Any, sampled: Any, *args: Any, **more: Any) -> Any:
            import torch

            drafts = propose(scheduled, sampled, *args, **more)
            rows = drafts if isinstance(drafts, list) else drafts.tolist()
            appended = isinstance(sampled, list)  # vLLM has put the sampled tokens into the request already
            counts = [0] * len(rows) if appended else [sum(t != -1 for t in row) for row in sampled.tolist()]
            for row, name in enumerate(runner.input_batch.req_ids):
                request = runner.requests[name]
                prompt = request.prompt_token_ids
                if request.num_computed_tokens + scheduled.num_scheduled_tokens[name] >= len(prompt):
                    rows[row] = self.draft(prompt, len(request.output_token_ids) + counts[row], rows[row])
            return rows if isinstance(drafts, list) else torch.tensor(rows, dtype=drafts.dtype, device=drafts.device)

        return proposed

    def _on_v2(self, propose: Any, requests: Mapping[str, Any]) -> Any:
        signature = inspect.signature(propose)

        def proposed(*args: Any, **more: Any) -> Any:
            drafts = propose(*args, **more)
            given = signature.bind(*args, **more).arguments
            batch = given["input_batch"]
            rows, sampled, rejected = drafts.tolist(), given["num_sampled"].tolist(), given["num_rejected"].tolist()
            lengths = batch.seq_lens[: batch.num_reqs].tolist()  # with the rows of rejected drafts
            for row, name in enumerate(batch.req_ids[: batch.num_reqs]):
                request = requests.get(name)
                if request is not None and sampled[row]:
                    prompt = request.prompt_token_ids
                    generated = lengths[row] - rejected[row] + 1 - len(prompt)
                    rows[row] = self.draft(prompt, generated, rows[row])
            return drafts.copy_(drafts.new_tensor(rows))

        return proposed
