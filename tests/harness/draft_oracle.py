"""An oracle for engines of tests: it makes the drafts of a random head right with a given probability.

A random head is hardly ever right, so that no row would ever go on from a later state than its first. The head runs
all the same and writes its rows, and what it proposes itself is kept. Each draft is then replaced by the token that is
going to come, until the first that shall not be right: that one and those behind it stay the head's own.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

DRAFTS = 3  # for each token


def replace_on_v1(draft: Callable[[str, Sequence[int], list[int], list[int]], list[int]]) -> None:
    """Speak for the head of each engine with a model runner V1 in this process.

    `draft`: of the request, its prompt, its tokens up to now, and the head's own drafts.
    """
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.propose_draft_token_ids

    @functools.wraps(original)
    def propose_draft_token_ids(runner: Any, output: Any, sampled: Any, *args: Any, **more: Any) -> Any:
        drafts = original(runner, output, sampled, *args, **more)
        rows = drafts if isinstance(drafts, list) else drafts.tolist()
        for row, name, prompt, tokens in _answering(runner, output, sampled):
            rows[row] = draft(name, prompt, tokens, list(rows[row]))
        return rows if isinstance(drafts, list) else torch.tensor(rows, dtype=drafts.dtype)

    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


def _answering(runner: Any, output: Any, sampled: Any) -> Iterator[tuple[int, str, list[int], list[int]]]:
    """Of a step, each row whose prompt is computed: its number, the request, prompt and tokens."""
    told = sampled if isinstance(sampled, list) else sampled.tolist()
    for row, name in enumerate(runner.input_batch.req_ids):
        request = runner.requests[name]
        prompt = request.prompt_token_ids
        if request.num_computed_tokens + output.num_scheduled_tokens[name] < len(prompt):
            continue  # a chunk of a prompt
        tokens = [*prompt, *request.output_token_ids]
        if not isinstance(sampled, list):  # else vLLM has appended them already
            tokens += [token for token in told[row] if token != -1]
        yield row, name, prompt, tokens


class Oracle:
    """Replaces drafts, and keeps the head's own."""

    def __init__(
        self, right: Sequence[Sequence[int]], probability: float, cold: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """`right`: prompts with their answers. `cold`: what the head proposed on its own rows; None: no matter."""
        self._right, self._probability, self._cold = right, probability, cold
        self.proposed: dict[str, list[int]] = {}  # the head's own drafts behind a beginning of what is right

    def install(self) -> None:
        """For each engine with a model runner V1 in this process."""
        replace_on_v1(lambda name, prompt, tokens, own: self._draft(tokens, own))

    def install_on_v2(self, runner: Any, requests: Mapping[str, Any]) -> None:
        """For a model runner V2; `requests`: the scheduler's."""
        propose = runner.speculator.propose
        signature = inspect.signature(propose)

        def proposed(*args: Any, **more: Any) -> Any:
            drafts = propose(*args, **more)
            given = signature.bind(*args, **more).arguments
            batch = given["input_batch"]
            rows, sampled, rejected = drafts.tolist(), given["num_sampled"].tolist(), given["num_rejected"].tolist()
            lengths = batch.seq_lens[: batch.num_reqs].tolist()  # with the rows of rejected drafts
            for row, name in enumerate(batch.req_ids[: batch.num_reqs]):
                if name in requests and sampled[row]:
                    prompt = list(requests[name].prompt_token_ids)
                    answered = next((right for right in self._right if [*right[: len(prompt)]] == prompt), prompt)
                    rows[row] = self._draft([*answered[: lengths[row] - rejected[row] + 1]], rows[row])
            return drafts.copy_(drafts.new_tensor(rows))

        runner.speculator.propose = proposed

    def _draft(self, known: list[int], own: list[int]) -> list[int]:
        key = str(hash(tuple(known)))
        if own:
            self.proposed[key] = own
        draw = random.Random(key)
        ahead = next((right[len(known) :] for right in self._right if list(right[: len(known)]) == known), [])
        drafts, good = len(own) or DRAFTS, 0
        while good < min(drafts, len(ahead)) and draw.random() < self._probability:
            if self._cold is not None and key in self._cold and own[good] != self._cold[key][good]:
                break
            good += 1
        # vLLM's convolution for CPUs takes only rows with all of their drafts.
        return ([*ahead[:good], *own[good:]] + [0] * drafts)[:drafts]
