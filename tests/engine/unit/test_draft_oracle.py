"""The oracle of `seamark gpu-check`: right drafts as often as wished, on the rows of both model runners."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from engine_patches.gpu_check.draft_oracle import Oracle

PROMPT, COMING = (7, 8, 9), [1, 2, 3, 4, 5]

OWN = [70, 71, 72]


def test_an_oracle_that_is_always_right_says_what_comes():
    oracle = Oracle({PROMPT: COMING}, 1.0)
    assert oracle.draft(PROMPT, 1, OWN) == [2, 3, 4]
    assert oracle.draft(PROMPT, 4, OWN) == [5, 71, 72]  # behind the end the head speaks
    assert oracle.draft((7, 8), 1, OWN) == OWN
    assert Oracle({PROMPT: COMING}, 0.0).draft(PROMPT, 1, OWN) == OWN


def test_a_draft_is_right_only_as_far_as_the_head_proposes_what_it_proposed_without_a_cache():
    cold = Oracle({PROMPT: COMING}, 1.0)
    cold.draft(PROMPT, 1, OWN)
    oracle = Oracle({PROMPT: COMING}, 1.0, cold.proposed)
    assert oracle.draft(PROMPT, 1, OWN) == [2, 3, 4]
    assert oracle.draft(PROMPT, 1, [70, 60, 72]) == [2, 60, 72]
    assert oracle.draft(PROMPT, 1, [60, 71, 72]) == [60, 71, 72]
    assert oracle.draft(PROMPT, 2, [60, 71, 72]) == [3, 4, 5]  # of this place nothing is known
    assert list(oracle.proposed.values()) == [[60, 71, 72]] * 2


def test_every_number_of_right_drafts_occurs_and_the_same_place_has_the_same():
    oracle = Oracle({PROMPT: range(1000)}, 0.7)
    drafts = [oracle.draft(PROMPT, place, [-1] * 3) for place in range(900)]
    right = Counter(sum(token != -1 for token in each) for each in drafts)
    assert set(right) == {0, 1, 2, 3} and 0.3 < right[3] / 900 < 0.4  # 0.7 ** 3
    assert drafts == [Oracle({PROMPT: range(1000)}, 0.7).draft(PROMPT, place, [-1] * 3) for place in range(900)]


def test_on_runner_v1_a_chunk_of_a_prompt_keeps_the_heads_drafts():
    request = SimpleNamespace(prompt_token_ids=list(PROMPT), num_computed_tokens=0, output_token_ids=[1, 2])
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["one"]),
        requests={"one": request},
        propose_draft_token_ids=lambda *_: [list(OWN)],
    )
    with Oracle({PROMPT: COMING}, 1.0).speaks(runner, {}):
        propose: Any = runner.propose_draft_token_ids
        assert propose(SimpleNamespace(num_scheduled_tokens={"one": 2}), [[]]) == [OWN]
        assert propose(SimpleNamespace(num_scheduled_tokens={"one": 3}), [[1, 2]]) == [[3, 4, 5]]


def test_on_runner_v2_rejected_rows_do_not_count():

    class Speculator:
        def propose(self, input_batch: Any, num_sampled: Any, num_rejected: Any) -> Any:
            return torch.tensor([OWN, OWN])

    runner = SimpleNamespace(speculator=Speculator())
    requests = {"one": SimpleNamespace(prompt_token_ids=list(PROMPT))}
    batch = SimpleNamespace(req_ids=["one", "gone"], num_reqs=2, seq_lens=torch.tensor([7, 7, 0]))
    with Oracle({PROMPT: COMING}, 1.0).speaks(runner, requests):
        drafts = runner.speculator.propose(batch, torch.tensor([2, 1]), torch.tensor([3, 0]))
        assert drafts.tolist() == [[3, 4, 5], OWN]  # 3 of the prompt, 1 of the answer, 3 rejected; a second is sampled
    assert runner.speculator.propose(batch, None, None).tolist() == [OWN, OWN]
