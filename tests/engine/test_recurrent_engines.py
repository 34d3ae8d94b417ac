"""A model of recurrent layers alone: states are kept at the ends of whole cache blocks, and answers are right."""

from __future__ import annotations

from tests.harness.recurrent_engines import OWN
from tests.harness.scheduler_process import run_apart


def test_a_state_of_a_whole_block_is_found_by_the_second_prompt():
    for found in run_apart("recurrent_engines"):
        assert found["refused"] is None and found["unit"] == found["block"], found
        assert found["wrong"] == 0, found
        for length, hits in found["hits"].items():
            owed = int(length) // found["unit"] * found["unit"]
            assert owed and hits == [0] + [owed] * (len(OWN) - 1), found
