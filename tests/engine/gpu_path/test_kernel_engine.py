"""An engine whose recurrent layers run on the kernels for CUDA hits between blocks, and answers as vLLM alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from proxy.bench.harness.client import fresh_tokens
from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT
from tests.harness.versions import interpreted

SECONDS = 3600.0  # that an engine may take, on a busy machine


class Prompt(NamedTuple):
    head: list[int]
    own: list[int]


PROMPTS = tuple(
    Prompt(fresh_tokens(head, "head", number), fresh_tokens(own, "own", 0))
    for number, (head, own) in enumerate(((116, 24), (101, 15), (184, 26)))
)


def answers(folder: Path, family: str, unit: int | None) -> list[Any]:
    """Of an engine of its own, four tokens each: of Seamark with this match unit, or of vLLM alone without a cache.

    Seamark has been sent the head of the first prompt before.
    """
    first = PROMPTS[0].head
    wanted = {
        "prompts": [(head + own, [len(head)] if unit else []) for head, own in PROMPTS],
        "warm": [(first + fresh_tokens(20, "warm", 0), [len(first)])] if unit else [],
        "tokens": 4,
        "options": {"enable_prefix_caching": unit is not None, "prefix_match_unit": unit},
        "environment": {"SEAMARK_CHUNK_ENDS": "0"} if unit else {},
    }
    file = folder / "wanted.json"
    file.write_text(json.dumps(wanted))
    mode = "1" if unit else "reference"
    found = interpreted("kernel_engine", family, mode, str(file), seconds=SECONDS)
    assert found["writes_in_forward"] is (unit is not None)
    return list(found["answers"])


@pytest.mark.on_request
@pytest.mark.parametrize(("family", "unit"), [(NEMOTRON_H, 16), (QWEN3_NEXT, 64)])
def test_states_between_blocks_change_no_answer(tmp_path: Path, family: str, unit: int):
    right, found = answers(tmp_path, family, None), answers(tmp_path, family, unit)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in right]
    assert [first for _, first, _ in found] == pytest.approx([first for _, first, _ in right], abs=1e-3)
    assert {cached for *_, cached in right} == {0}
    assert found[0][2] == len(PROMPTS[0].head) // unit * unit > 0
