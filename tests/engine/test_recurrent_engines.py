"""Models that `seamark model` does not write: hits where they are owed, and answers as without a cache."""

from __future__ import annotations

import pytest

from tests.harness.recurrent_engines import FAMILIES, MAMBA2_ALONE, SHORT_CONVOLUTIONS
from tests.harness.scheduler_process import run_apart


@pytest.mark.parametrize("name", [SHORT_CONVOLUTIONS, pytest.param(MAMBA2_ALONE, marks=pytest.mark.thorough)])
def test_states_are_found_by_the_second_prompt_and_change_no_answer(name):
    """A model of recurrent layers alone keeps them at the ends of whole blocks, short convolutions inside the pass."""
    (found,) = run_apart("recurrent_engines", name)
    assert found["refused"] is None and found["wrong"] == 0 < found["compared"], found
    assert (found["unit"] == found["block"]) is (name == MAMBA2_ALONE)
    assert found["writes_in_forward"]
    for length, hits in found["hits"].items():
        owed = int(length) // found["unit"] * found["unit"]
        assert owed and hits == [0] + [owed] * (len(FAMILIES[name].own) - 1), found
