"""An engine whose recurrent layers run on the kernels for CUDA hits between blocks, and answers as vLLM alone."""

from __future__ import annotations

import pytest

from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT
from tests.bench.kernel_noise import ALONE, CELLS, PER_HEAD, prompts_of, run

BY_NAME = {cell.name: cell for cell in CELLS}


@pytest.mark.on_request
@pytest.mark.parametrize(("family", "unit"), [(NEMOTRON_H, 16), (QWEN3_NEXT, 64)])
def test_states_between_blocks_change_no_answer(family, unit):
    prompts = prompts_of(3 * PER_HEAD)[::PER_HEAD]  # of three heads
    right = run(family, "float32", BY_NAME[ALONE], prompts, 4)["answers"]
    found = run(family, "float32", BY_NAME[f"Seamark, unit {unit}"], prompts, 4)["answers"]
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in right]
    assert [first for _, first, _ in found] == pytest.approx([first for _, first, _ in right], abs=1e-3)
    assert {cached for *_, cached in right} == {0}
    # Each prompt is a head of its own here, of which `run` warms the first alone.
    assert found[0][2] == prompts[0].shared // unit * unit > 0
