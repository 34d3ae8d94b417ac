"""How a kernel is run over chunks of rows, and which state is kept of which chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_patches.footprint import RUNNING
from engine_patches.forward.cpu_scan import kernel_in_runs, kernel_runs, scan_in_runs


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(RUNNING, "kernel", None)


@pytest.mark.parametrize(
    ("bounds", "row_of", "runs"),
    [
        ([0], [], []),
        ([0, 5], [0], [(0, 5, 0, 1, [0, 5], 0)]),
        ([0, 5, 9], [0, 1], [(0, 9, 0, 2, [0, 5, 9], 0)]),
        ([0, 5, 9], [0, 0], [(0, 5, 0, 1, [0, 5], 0), (5, 9, 0, 1, [0, 4], 1)]),
        (
            [0, 2, 5, 9, 10, 12],
            [0, 1, 1, 2, 2],
            [(0, 5, 0, 2, [0, 2, 5], 0), (5, 10, 1, 3, [0, 4, 5], 2), (10, 12, 2, 3, [0, 2], 4)],
        ),
    ],
)
def test_chunks_of_different_rows_run_at_once_and_those_of_one_row_one_after_the_other(bounds, row_of, runs):
    found = [
        (run.tokens.start, run.tokens.stop, run.rows.start, run.rows.stop, run.starts.tolist(), run.first_chunk)
        for run in kernel_runs(bounds, row_of)
    ]
    assert found == runs
    assert all(run.starts.dtype is torch.int32 for run in kernel_runs(bounds, row_of))


def test_a_kernel_that_is_called_twice_runs_in_runs_once():
    calls: list[Any] = []
    patched = kernel_in_runs(lambda *given: calls.append(given))
    runs = kernel_runs([0, 1, 2], [0, 0])

    def scan() -> None:
        for _ in range(2):
            tokens = torch.zeros(2)
            patched(tokens, torch.zeros(1), tokens, tokens, None, tokens, tokens, None, None, "all")

    scan_in_runs(scan, runs, lambda *_: None)
    assert len(calls) == 3 and calls[2][-1] == "all", "the second call is vLLM's own"


@pytest.mark.parametrize("error", [RuntimeError("planned"), KeyboardInterrupt()])
def test_a_scan_that_fails_leaves_nothing_behind(error):
    def scan() -> None:
        raise error

    with pytest.raises(type(error)):
        scan_in_runs(scan, kernel_runs([0, 1], [0]), lambda *_: None)
    assert RUNNING.kernel is None
