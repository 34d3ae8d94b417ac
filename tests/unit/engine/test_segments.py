"""How a step is cut at the states it writes: which tokens run together, in which order, and what is written then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine_patches.forward.segments import _levels
from engine_patches.forward.step_writes import Write


class Numbers(list[int]):
    """A tensor on the CPU, as far as it is read."""

    def tolist(self) -> list[int]:
        return list(self)


def batch(*rows: tuple[int, int]) -> Any:
    """What vLLM tells a backend about rows given as (tokens computed before, tokens of the chunk)."""
    starts = [sum(chunk for _, chunk in rows[:number]) for number in range(len(rows) + 1)]
    seq_lens = Numbers(before + chunk for before, chunk in rows)
    return SimpleNamespace(num_reqs=len(rows), query_start_loc_cpu=Numbers(starts), seq_lens_cpu_upper_bound=seq_lens)


FIRST, SECOND = {0: 7}, {0: 8}  # blocks by cache group


def test_a_state_at_the_end_of_a_chunk_needs_no_cut():
    (level,) = _levels(batch((0, 10), (32, 1)), {0: [Write(10, FIRST)]})
    assert level.whole and level.writes == [(0, FIRST)]


def test_each_row_is_cut_at_its_own_states():
    levels = _levels(batch((0, 10), (16, 6)), {0: [Write(4, FIRST), Write(10, SECOND)]})
    assert [level.whole for level in levels] == [False, False]
    first, second = levels
    assert (first.rows, first.begins, first.lengths, first.ends) == ([0, 1], [0, 10], [4, 6], [4, 22])
    assert (second.rows, second.begins, second.lengths, second.ends) == ([0], [4], [6], [10])
    assert (first.writes, second.writes) == ([(0, FIRST)], [(0, SECOND)])


def test_two_states_at_one_position_are_written_after_one_run():
    first, second = _levels(batch((0, 8)), {0: [Write(5, FIRST), Write(5, SECOND)]})
    assert first.writes == [(0, FIRST), (0, SECOND)] and second.writes == []


def test_single_tokens_behind_a_state_come_first_and_a_prompts_first_token_does_not():
    """Backends expect the rows that are like a step of decoding before all others."""
    first, second = _levels(batch((0, 6), (0, 1), (40, 1), (20, 6)), {0: [Write(5, FIRST)], 3: [Write(1, SECOND)]})
    assert (first.rows, first.lengths) == ([2, 3, 0, 1], [1, 1, 5, 1])
    assert (second.rows, second.begins, second.ends) == ([0, 3], [5, 9], [6, 26])


def test_a_single_token_that_is_left_of_a_new_prompt_has_a_state_before_it():
    _, second = _levels(batch((20, 9), (0, 2)), {0: [Write(2, FIRST)], 1: [Write(1, SECOND)]})
    assert (second.rows, second.begins, second.lengths) == ([1, 0], [10, 2], [1, 7])


def test_rows_of_padding_run_nowhere():
    first, second = _levels(batch((0, 0), (0, 4), (0, 0)), {1: [Write(2, FIRST)]})
    assert first.rows == second.rows == [1]
