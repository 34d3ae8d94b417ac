"""How a kernel is run over chunks of rows, and which state is kept of which chunk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_patches.footprint import RUNNING
from engine_patches.forward.cpu_scan import kernel_in_runs, kernel_runs, plan_cpu_scan, scan_in_runs
from engine_patches.forward.step_writes import PrefillRow, Write


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


def test_the_kernel_is_given_its_part_of_everything_and_each_chunks_state_is_told():
    given: list[Any] = []

    def kernel(out: Any, states: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, starts: Any) -> None:
        parts = [each.tolist() for each in (out, x, dt, B, C)] + [None if z is None else z.tolist()]
        given.append((parts, A, D, starts.tolist()))
        states += 1

    runs = kernel_runs([0, 2, 5, 6], [0, 1, 1])
    kept: list[Any] = []
    by_token = [torch.arange(6) * factor for factor in (1, 2, 3, 4, 5)]
    states = torch.tensor([10.0, 20.0])
    for z in (torch.arange(6) * 6, None):
        given.clear()
        kept.clear()
        patched = kernel_in_runs(kernel)

        def scan(z: Any = z, patched: Any = patched) -> str:
            out, x, dt, B, C = by_token
            patched(out, states, x, dt, "A", B, C, "D", z, "all starts")
            return "scanned"

        assert scan_in_runs(scan, runs, lambda chunk, state: kept.append((chunk, float(state)))) == "scanned"
        factors = (1, 2, 3, 4, 5, 6)
        assert given == [
            ([[token * factor for token in range(start, end)] if z is not None or factor != 6 else None
              for factor in factors], "A", "D", starts)
            for start, end, starts in ((0, 5, [0, 2, 5]), (5, 6, [0, 1]))
        ]  # fmt: skip
        first = 0 if z is not None else 1
        assert kept == [(0, 11.0 + first), (1, 21.0 + 2 * first), (2, 22.0 + 2 * first)]
        assert RUNNING.kernel is None


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


GROUPS = {"layers.0": 0, "layers.1": 1}


def test_chunks_end_where_states_are_wanted_and_where_rows_do():
    rows = [
        PrefillRow(0, 0, 6, [Write(2, {0: 10}), Write(6, {0: 11})]),
        PrefillRow(6, 5, 4, []),
        PrefillRow(10, 3, 5, [Write(4, {0: 12})]),
    ]
    plan = plan_cpu_scan(rows, GROUPS)
    tokens = [(run.tokens.start, run.tokens.stop, run.rows.start, run.rows.stop) for run in plan.runs]
    assert tokens == [(0, 2, 0, 1), (2, 14, 0, 3), (14, 15, 2, 3)]
    assert dict(plan.kept) == {
        0: (0, 0, 2, False, {0: 10}),
        1: (0, 0, 6, False, {0: 11}),
        3: (2, 10, 14, True, {0: 12}),
    }


WIDTH, CHANNELS = 3, 2


@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5])
def test_a_convolutions_state_is_its_last_inputs_wherever_they_are(resumed, offset):
    """Of two prompts the second one; the first has five tokens, and a state of the other cache group is in block 7."""
    rows = [PrefillRow(0, 0, 5, []), PrefillRow(5, 8 * resumed, 5, [Write(offset, {0: 7, 1: 6})])]
    plan = plan_cpu_scan(rows, GROUPS)
    metadata = SimpleNamespace(state_indices_tensor_p=torch.tensor([2, 3]))
    inputs = torch.arange(20.0).view(10, CHANNELS) + 1
    conv_state = -torch.arange(10 * CHANNELS * WIDTH, dtype=torch.float32).view(10, CHANNELS, WIDTH) - 1
    before = conv_state.clone()
    states = plan.of_group(metadata, "layers.1")
    states.keep_conv(inputs, conv_state)
    older = before[3] if resumed else torch.zeros(CHANNELS, WIDTH)
    expected = torch.cat([older, inputs[5 : 5 + offset].T], 1)[:, -WIDTH:]
    assert torch.equal(conv_state[6], expected)
    conv_state[6] = before[6]
    assert torch.equal(conv_state, before), "no other block is touched"


def test_each_cache_group_keeps_the_states_of_a_scan_in_blocks_of_its_own():
    plan = plan_cpu_scan([PrefillRow(0, 0, 4, [Write(2, {0: 7, 1: 6})])], GROUPS)
    metadata = SimpleNamespace(state_indices_tensor_p=torch.tensor([2]))

    def scan(x: Any, *, scale: int) -> str:
        def kernel(out: Any, states: Any, x: Any, *_: Any) -> None:
            states += x.sum() * scale

        states = torch.zeros(1)
        kernel_in_runs(kernel)(x, states, x, x, None, x, x, None, None, None)
        return f"the last state is {float(states)}"

    for layer, block in (("layers.0", 7), ("layers.1", 6)):
        ssm_state = torch.zeros(10)
        told = plan.of_group(metadata, layer).scan(scan, ssm_state, [torch.arange(4.0)], {"scale": 10})
        assert told == "the last state is 60.0"
        assert ssm_state.tolist() == [10.0 if each == block else 0.0 for each in range(10)]
