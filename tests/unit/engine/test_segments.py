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


def test_rows_of_padding_run_nowhere():
    first, second = _levels(batch((0, 0), (0, 4), (0, 0)), {1: [Write(2, FIRST)]})
    assert first.rows == second.rows == [1]
