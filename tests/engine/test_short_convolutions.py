"""A model that `seamark model` does not write: short convolutions hit where they are owed, with the right states."""

from __future__ import annotations

import pytest

from tests.harness.scheduler_process import run_apart
from tests.harness.short_convolutions import HEAD, OWN


@pytest.mark.thorough
def test_states_are_found_by_the_second_prompt_and_are_those_of_a_prompt_that_was_cut_there():
    found = run_apart("short_convolutions")
    assert found["refused"] is None and found["writes_in_forward"], found
    assert found["wrong"] == 0 < found["compared"], found
    owed = HEAD // found["unit"] * found["unit"]
    assert found["hits"] == [0] + [owed] * (len(OWN) - 1), found
