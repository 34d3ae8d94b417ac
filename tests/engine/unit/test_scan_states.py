"""States read from a whole scan are those of a chunk that ends there; when cures of vLLM's own defects take hold."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm import forward_context
from vllm.model_executor.layers.mamba import mamba_utils

from engine_patches import upstream_fixes
from engine_patches.footprint import RUNNING, SCAN_STATES, SEGMENTS
from engine_patches.forward.layers import mamba2_with_states
from engine_patches.forward.scan_states import kernel_in_runs, plan_scan_states, scan_with_states
from engine_patches.forward.segments import take_states_over
from engine_patches.forward.step_writes import Step, Write
from engine_patches.ledger import ShapeMismatch

CHUNK = 8  # tokens

WIDTH = 3  # inputs that a convolution's state holds

CHANNELS, GATE, BLOCKS = 2, 1, 40


def kernel(out: Any, states: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, starts: Any) -> None:
    """vLLM's for CPUs, for the recurrence `state = state / 2 + x`, exact in float64; counts its calls."""
    calls.append(len(x))
    assert len(out) == len(x) == len(dt) == len(B) == len(C)
    for state, (begin, end) in zip(states, itertools.pairwise(starts.tolist()), strict=True):
        for token in range(begin, end):
            state.copy_(state / 2 + x[token].reshape(state.shape))
            out[token] = state.reshape(out[token].shape)


def scan_on_cpu(x: Any, dt: Any, A: Any, B: Any, C: Any, **options: Any) -> Any:
    """vLLM's scan for CPUs, which returns the last states only."""
    states = options["initial_states"].clone()
    kernel_in_runs(kernel)(options["out"], states, x, dt, A, B, C, None, None, options["cu_seqlens"])
    return put_into_slots(states, options)


def put_into_slots(final: Any, options: dict[str, Any]) -> Any:
    """What vLLM 0.33 may ask for in place of the last states themselves."""
    if (slots := options.get("final_states_out")) is None:
        return final
    slots[options["final_state_indices"]] = final
    return None


def scan(x: Any, dt: Any, A: Any, B: Any, C: Any, **options: Any) -> Any:
    """vLLM's other one for that recurrence, exact in float64; counts its calls."""
    calls.append(len(x))
    bounds, row_of = options["cu_chunk_seqlens"].tolist(), options["seq_idx"].tolist()
    initial = options["initial_states"]
    states, previous = [], None
    for begin, end, row in zip(bounds, bounds[1:], row_of, strict=False):
        if row != previous:
            state = torch.zeros(1, CHANNELS, 1, dtype=x.dtype) if initial is None else initial[row]
        previous = row
        for token in range(begin, end):
            state = state / 2 + x[token].reshape(1, CHANNELS, 1)
            options["out"][token] = state.reshape(options["out"][token].shape)
        states.append(state)
    all_states = torch.stack(states)
    if options["return_intermediate_states"]:
        assert "final_states_out" not in options  # as vLLM's
        return all_states
    return put_into_slots(all_states[options["last_chunk_indices"]], options)


calls: list[int] = []


class Layer:
    """A Mamba2 layer whose convolution passes its inputs on."""

    prefix, tped_intermediate_size, tped_conv_size, conv_kernel_size = "layers.0", GATE, CHANNELS, WIDTH + 1

    def __init__(self, blocks: dict[tuple[int, int], int], dim_first: bool, vllm_scan: Any) -> None:
        self.blocks, self.vllm_scan = blocks, vllm_scan  # blocks that take the states, by row and offset
        generator = torch.Generator().manual_seed(1)
        self.conv_state = torch.rand(BLOCKS, CHANNELS, WIDTH, generator=generator, dtype=torch.float64)
        self.ssm_state = torch.rand(BLOCKS, 1, CHANNELS, 1, generator=generator, dtype=torch.float64)
        self.kv_cache = (self.conv_state if dim_first else self.conv_state.transpose(1, 2), self.ssm_state)

    def conv_ssm_forward(self, projected_states: Any, output: Any) -> None:
        """As vLLM's: read the running states, run, write them. Decodes are left out."""
        metadata = self.metadata
        first = metadata.num_decode_tokens
        inputs = projected_states[first:, GATE : GATE + CHANNELS]
        blocks, resumed = metadata.state_indices_tensor_p, metadata.has_initial_states_p
        bounds = metadata.query_start_loc_p.tolist()
        for (begin, end), block, has_state in zip(itertools.pairwise(bounds), blocks, resumed, strict=True):
            old = self.conv_state[block] if has_state else torch.zeros(CHANNELS, WIDTH, dtype=torch.float64)
            self.conv_state[block] = torch.cat([old, inputs[begin:end].T], 1)[:, -WIDTH:]
        options = {
            "chunk_size": metadata.chunk_size,
            "cu_seqlens": metadata.query_start_loc_p,
            "cu_chunk_seqlens": metadata.cu_chunk_seqlen_p,
            "seq_idx": metadata.seq_idx_p,
            "last_chunk_indices": metadata.last_chunk_indices_p,
            "initial_states": torch.where(resumed[:, None, None, None], self.ssm_state[blocks], 0),
            "out": output[first:],
            "return_intermediate_states": False,
        }
        if self.vllm_scan is scan and not resumed.any():
            options["initial_states"] = None  # as vLLM has it on a GPU
        if metadata.writes_into_slots:
            options |= {"final_states_out": self.ssm_state, "final_state_indices": blocks}
        final = scan_with_states(self.vllm_scan)(inputs[:, None], inputs, None, inputs, inputs, **options)
        if not metadata.writes_into_slots:
            self.ssm_state[blocks] = final


Row = tuple[int, int]  # tokens computed before, tokens of the chunk


def metadata_of(rows: list[Row], decodes: int, slots: bool) -> Any:
    """What vLLM's backend makes of these prefills behind so many decodes: chunks end at multiples of their size."""
    bounds, seq_idx, last = [0], [], []
    for number, (computed, tokens) in enumerate(rows):
        done = 0
        while done < tokens:
            take = min(CHUNK - (computed + done) % CHUNK, tokens - done)
            done += take
            bounds.append(bounds[-1] + take)
            seq_idx.append(number)
        last.append(len(seq_idx) - 1)
    return SimpleNamespace(
        num_prefills=len(rows),
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_prefill_tokens=sum(tokens for _, tokens in rows),
        chunk_size=CHUNK,
        query_start_loc_p=torch.tensor([0, *itertools.accumulate(tokens for _, tokens in rows)]),
        cu_chunk_seqlen_p=torch.tensor(bounds),
        seq_idx_p=torch.tensor(seq_idx),
        last_chunk_indices_p=torch.tensor(last),
        state_indices_tensor_p=torch.arange(len(rows)),
        has_initial_states_p=torch.tensor([computed > 0 for computed, _ in rows]),
        writes_into_slots=slots,
    )


def planned(monkeypatch, rows: list[Row], writes: Any, decodes: int, metadata: Any) -> Any:
    """What the plugin makes of vLLM's `metadata` of a step with these rows behind some that decode."""
    lengths = [1] * decodes + [tokens for _, tokens in rows]
    monkeypatch.setattr(RUNNING, "step", Step(writes, {"layers.0": 0}, [str(n) for n in range(len(lengths))]))
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    common = SimpleNamespace(
        num_reqs=len(lengths),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens_cpu_upper_bound=torch.tensor([9] * decodes + [computed + tokens for computed, tokens in rows]),
    )
    return plan_scan_states(lambda *_: metadata)(SimpleNamespace(layer_names=["layers.0"]), 0, common)


def run(
    monkeypatch, rows: list[Row], writes: dict[int, list[int]], *, decodes=0, on_cpu=False, slots=False, dim_first=False
) -> Layer:
    """One step of a layer; rows and offsets of `writes` count the prefills only.

    `dim_first`: of the convolution's states in the cache, as NIXL needs them.
    """
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: dim_first)
    places = [(row, offset) for row, offsets in writes.items() for offset in offsets]
    layer = Layer({place: at for at, place in enumerate(places, 10)}, dim_first, scan_on_cpu if on_cpu else scan)
    of_rows: dict[str, list[Write]] = {}
    for (row, offset), block in layer.blocks.items():
        of_rows.setdefault(str(row + decodes), []).append(Write(offset, {0: block}))
    layer.metadata = planned(monkeypatch, rows, of_rows, decodes, metadata_of(rows, decodes, slots))
    context = SimpleNamespace(attn_metadata={"layers.0": layer.metadata})
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    generator = torch.Generator().manual_seed(2)
    count = decodes + sum(tokens for _, tokens in rows)
    tokens = torch.rand(count, GATE + CHANNELS, generator=generator, dtype=torch.float64)
    layer.output = torch.zeros(count, CHANNELS, dtype=torch.float64)
    calls.clear()
    mamba2_with_states(Layer.conv_ssm_forward)(layer, tokens, layer.output)
    return layer


# Rows that begin new, inside a chunk, at one's end, two tokens before one; states at chunk ends, inside, at the row's
# end, and so near its start that a part of the convolution's state is older.
ROWS = [(0, 30), (5, 20), (8, 17), (14, 12)]

WRITES = {0: [8, 9, 16, 30], 1: [1, 2, 3, 19], 2: [8], 3: [2, 12]}


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit by bit; the failure says what, and where it differs first."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


# The row whose states are looked at is the first in its step, so that its tokens are the same whatever its length.
STEPS = [
    *((ROWS[row:] + ROWS[:row], {(each - row) % len(ROWS): WRITES[each] for each in WRITES}) for row in range(4)),
    ([(0, 20), (0, 9)], {0: [2, 3, 8, 11], 1: [2, 9]}),  # new prompts alone: no state to begin with
]


@pytest.mark.parametrize("how", [*itertools.product([False, True], [False, True], [False, True], [0, 3])], ids=str)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_each_state_is_that_of_a_chunk_that_ends_there(monkeypatch, step, how):
    (rows, writes), of_step = step, dict(zip(("dim_first", "slots", "on_cpu", "decodes"), how, strict=True))
    layer = run(monkeypatch, rows, writes, **of_step)
    for offset in writes[0]:
        block = layer.blocks[0, offset]
        expected = run(monkeypatch, [(rows[0][0], offset), *rows[1:]], {}, **of_step)
        same(layer.conv_state[block], expected.conv_state[0], f"convolution's state after {offset} tokens")
        same(layer.ssm_state[block], expected.ssm_state[0], f"scan's state after {offset} tokens")


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_outputs_and_running_states_are_those_of_a_step_without_writes(monkeypatch, on_cpu, slots):
    written = run(monkeypatch, ROWS, WRITES, on_cpu=on_cpu, slots=slots)
    plain = run(monkeypatch, ROWS, {}, on_cpu=on_cpu, slots=slots)
    rows = len(ROWS)
    same(written.output, plain.output, "outputs")
    same(written.ssm_state[:rows], plain.ssm_state[:rows], "the scans' states")
    same(written.conv_state[:rows], plain.conv_state[:rows], "the convolutions' states")


def test_the_scan_is_not_cut_and_only_what_lies_inside_a_chunk_is_scanned_again(monkeypatch):
    whole = sum(tokens for _, tokens in ROWS)
    run(monkeypatch, ROWS, {0: [8, 16, 30], 2: [8]})
    assert calls == [whole]
    run(monkeypatch, ROWS, {0: [9], 1: [2, 13]})
    assert calls == [whole, 1 + 2 + 2]


def test_another_cache_group_takes_the_same_states_into_its_own_blocks(monkeypatch):
    layer = run(monkeypatch, ROWS[:1], {0: [9]})
    states = getattr(layer.metadata, SCAN_STATES)
    states.plan.group_of_layer["layers.1"] = 1
    states.plan.targets[0][1] = 33
    other = SimpleNamespace(state_indices_tensor_p=torch.tensor([7]))
    updated = take_states_over(lambda *_: other)(SimpleNamespace(layer_names=["layers.1"]), layer.metadata)
    of_other = getattr(updated, SCAN_STATES)
    assert (of_other.blocks.tolist(), of_other.running.tolist()) == ([33], [7])
    assert of_other.plan is states.plan


OTHERWISE = {
    "another number of chunks": ({"seq_idx_p": torch.zeros(9)}, {"1": 30}),
    "another number of decodes": ({"num_decodes": 2}, {"1": 30}),
    "no prefills": ({"num_prefills": 0, "num_decodes": 2}, {"1": 30}),
    "a state of a row that decodes": ({}, {"0": 1, "1": 30}),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_step_that_is_divided_otherwise_runs_in_segments(monkeypatch, how):
    """One token of a row that decodes, and a prompt of 30 tokens."""
    changes, ends = OTHERWISE[how]
    metadata = metadata_of([(0, 30)], 1, False)
    vars(metadata).update(state_indices_tensor_d=torch.tensor([7]), **changes)
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    made = planned(monkeypatch, [(0, 30)], {row: [Write(end, {0: 10})] for row, end in ends.items()}, 1, metadata)
    assert not hasattr(made, SCAN_STATES) and len(getattr(made, SEGMENTS)) == 1


PLATFORM_DEFAULT = 128


@pytest.mark.parametrize(
    ("before", "mode", "after"),
    [
        (384, "align", 384),
        (None, "align", PLATFORM_DEFAULT),  # nobody has chosen one yet
        (64, "align", PLATFORM_DEFAULT),
        (384, "none", PLATFORM_DEFAULT),
    ],
)
def test_an_enlarged_block_size_outlives_the_platforms_default(before, mode, after):
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=before, mamba_cache_mode=mode))

    def reset(cls, vllm_config):
        vllm_config.cache_config.block_size = PLATFORM_DEFAULT

    upstream_fixes.keep_enlarged_block_size(reset)(None, config)
    assert config.cache_config.block_size == after


HEADS, HEAD_SIZE, STATE_SIZE = 2, 4, 8

# Four rows, of chunks of so many tokens.
CHUNKS_OF_ROWS = [[5, 3, 9], [4], [7], [2, 6]]


@pytest.mark.parametrize("resumed", [False, True])
def test_the_cpus_scan_returns_the_state_at_each_chunks_end(resumed, monkeypatch):
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import _mamba_chunk_scan_combined_fwd_cpu as scan

    lengths = [sum(chunks) for chunks in CHUNKS_OF_ROWS]
    of_tokens = [(HEADS, HEAD_SIZE), (HEADS,), (1, STATE_SIZE), (1, STATE_SIZE)]
    x, dt, B, C = (torch.rand(sum(lengths), *shape) - 0.5 for shape in of_tokens)
    A = -torch.rand(HEADS)
    starts = [0, *itertools.accumulate(lengths)]
    initial = torch.rand(len(CHUNKS_OF_ROWS), HEADS, HEAD_SIZE, STATE_SIZE) if resumed else None
    how = {"D": torch.rand(HEADS), "dt_bias": torch.rand(HEADS), "dt_softplus": True, "state_dtype": torch.float32}
    calls = []
    kernel = ops.mamba_chunk_scan_fwd_cpu

    def counted(out, *args):
        calls.append(len(out))
        kernel(out, *args)

    monkeypatch.setattr(ops, "mamba_chunk_scan_fwd_cpu", kernel_in_runs(counted))

    def run(scan, part: slice, of_rows: slice, bounds: list[int], **options):
        out = torch.zeros(len(x[part]), HEADS, HEAD_SIZE)
        begun = None if initial is None else initial[of_rows]
        states = scan(
            x[part], dt[part], A, B[part], C[part], 8, out,
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32), initial_states=begun, **how, **options,
        )  # fmt: skip
        return states, out

    chunks = [length for row in CHUNKS_OF_ROWS for length in row]
    _, whole = run(scan, slice(None), slice(None), starts)
    calls.clear()
    states, out = run(
        upstream_fixes.states_at_chunk_ends(scan),
        slice(None),
        slice(None),
        starts,
        cu_chunk_seqlens=torch.tensor([0, *itertools.accumulate(chunks)]),
        seq_idx=torch.tensor([number for number, row in enumerate(CHUNKS_OF_ROWS) for _ in row]),
        return_intermediate_states=True,
    )
    assert calls == [5, 3, 9 + 4 + 7 + 2, 6]  # chunks of different rows run at once
    assert torch.allclose(out, whole, atol=1e-6)
    expected = []
    for number, row in enumerate(CHUNKS_OF_ROWS):
        for end in itertools.accumulate(row):
            part = slice(starts[number], starts[number] + end)
            expected.append(run(scan, part, slice(number, number + 1), [0, end])[0])
    assert torch.allclose(states, torch.cat(expected), atol=1e-6)


def test_a_scan_that_is_another_is_refused_and_one_that_is_not_asked_for_chunk_ends_is_vllms_own():
    def _mamba_chunk_scan_combined_fwd_cpu(x, *args, **options):
        return x, args, options

    scan = upstream_fixes.states_at_chunk_ends(_mamba_chunk_scan_combined_fwd_cpu)
    assert scan(1, 2, seq_idx=3) == (1, (2,), {"seq_idx": 3})
    assert scan(1, return_intermediate_states=False) == (1, (), {"return_intermediate_states": False})
    chunks = {"cu_chunk_seqlens": torch.tensor([0, 2, 3]), "seq_idx": torch.tensor([0, 0])}
    with pytest.raises(RuntimeError, match="no longer calls its kernel"):
        scan(torch.zeros(3), return_intermediate_states=True, **chunks)
    with pytest.raises(ShapeMismatch, match="the scan on a CPU is kernel_in_runs"):
        upstream_fixes.states_at_chunk_ends(kernel_in_runs)


def test_of_caches_at_one_address_the_largest_is_copied():
    small, large = (torch.zeros(size, dtype=torch.int8) for size in (2, 5))
    copy = upstream_fixes.copy_largest_view_first(lambda caches, *more: ([cache.nbytes for cache in caches], *more))
    assert copy((small, large, small), 7, ["a copy"]) == ([5, 2, 2], 7, ["a copy"])
    assert copy((small, large), 7, []) == ([], 7, []), "nothing is copied, nothing is sorted"


def test_a_checkpoint_is_exported_from_a_rows_own_tokens_and_chunk():
    """Of three rows the second asks for none."""
    checkpoint = SimpleNamespace(checkpoint_offsets=torch.tensor([4, 0, 3]), state_indices=torch.tensor([2, 0, 3]))
    x = torch.arange(20).expand(2, 20)  # by channel and token
    conv_state, ssm_state = torch.full((4, 2, 5), -1), torch.full((4, 1), -1)
    upstream_fixes.store_checkpoints_without_triton(None)(
        checkpoint,
        torch.tensor([1, 0, 2]),
        x,
        conv_state,
        torch.tensor([[10], [11], [12]]),
        ssm_state,
        torch.tensor([0, 6, 9, 20]),
        state_len=3,
    )
    untouched = [[-1] * 5] * 2
    assert conv_state.tolist() == [untouched, untouched, [[1, 2, 3, -1, -1]] * 2, [[9, 10, 11, -1, -1]] * 2]
    assert ssm_state.flatten().tolist() == [-1, -1, 11, 12]
