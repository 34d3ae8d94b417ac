"""States of convolutions wherever they lie in a step, and rows that verify drafts in a step that is cut."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import PleShortConvAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from engine_patches.footprint import RUNNING, SCAN_STATES, SEGMENTS
from engine_patches.forward import conv_states, segments
from engine_patches.forward.step_writes import Step, Write

WIDTH, CHANNELS = 9, 5

TARGETS = 40  # the first block that takes a state


class Drawn:
    """A step of some rows with states wanted at drawn offsets, and what their windows have to be."""

    def __init__(self, seed: int) -> None:
        first, decodes = 7, seed % 3  # block of the cache group; rows of one token before all others
        draw = random.Random(seed)
        rows = [(draw.choice([3, 40]), 1) for _ in range(decodes)]
        rows += [(draw.choice([0, 1, 5, 40]), draw.randrange(2, 30)) for _ in range(3)]
        self.starts = [0, *itertools.accumulate(tokens for _, tokens in rows)]
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(self.starts[-1], CHANNELS, generator=generator)
        self.state = torch.randn(80, CHANNELS, WIDTH + 2, generator=generator)  # with room for drafts behind
        self.decodes, self.num_rows = decodes, len(rows)
        self.writes: dict[str, list[Write]] = {}
        self.right: dict[int, Any] = {}
        for row, (before, tokens) in enumerate(rows):
            past = torch.randn(before, CHANNELS, generator=generator)
            window = torch.cat([torch.zeros(WIDTH, CHANNELS), past])[-WIDTH:]
            self.state[first + row, :, :WIDTH] = window.T if before else torch.randn(CHANNELS, WIDTH)
            if tokens == 1:
                continue
            offsets = sorted(draw.sample(range(1, tokens + 1), min(2, tokens)))
            for block, offset in enumerate(offsets, TARGETS + 2 * row):
                self.writes.setdefault(f"r{row}", []).append(Write(offset, {0: block, 1: block + 10}))
                seen = [torch.zeros(WIDTH, CHANNELS), past, self.inputs[self.starts[row] : self.starts[row] + offset]]
                self.right[block] = torch.cat(seen)[-WIDTH:].T
        self.common = SimpleNamespace(
            num_reqs=len(rows),
            query_start_loc=torch.tensor(self.starts),
            query_start_loc_cpu=torch.tensor(self.starts),
            seq_lens_cpu_upper_bound=torch.tensor([before + tokens for before, tokens in rows]),
        )
        self.blocks = torch.arange(first, first + len(rows))

    def step(self, group: int = 0) -> Step:
        return Step(self.writes, {"layers.0": group}, [f"r{row}" for row in range(self.num_rows)])

    def wrong(self, shift: int = 0) -> list[int]:
        of_block = self.state[:, :, :WIDTH]
        return [block for block, right in self.right.items() if not torch.equal(of_block[block + shift], right)]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(RUNNING, "step", None)


@pytest.mark.parametrize("seed", range(40))
def test_a_window_holds_the_inputs_before_its_position_at_any_offset(seed):
    drawn = Drawn(seed)
    metadata = SimpleNamespace(state_indices_tensor=drawn.blocks)
    RUNNING.step = drawn.step(group=seed % 2)
    build = conv_states.plan_ngram_states(lambda self, *_, **__: metadata)
    assert build(SimpleNamespace(layer_names=["layers.0"]), 0, drawn.common) is metadata
    ran: list[Any] = []
    run = conv_states.keep_ngram_states(lambda *given, **tensors: ran.append((*given, tensors)))
    layer = SimpleNamespace(conv_state_len=WIDTH, prefix="layers.0")
    tensors = {"inputs": drawn.inputs, "residual": "residual", "metadata": metadata, "conv_state": drawn.state}
    run(layer, **tensors)
    assert ran == [(layer, tensors)]
    assert drawn.right and drawn.wrong(shift=seed % 2 * 10) == []
    RUNNING.step.check()


def short_convolution(drawn: Drawn) -> Any:
    """The metadata of a step in which the first rows generate."""
    metadata = SimpleNamespace(
        num_prefills=drawn.num_rows - drawn.decodes,
        num_decodes=drawn.decodes,
        num_decode_tokens=drawn.decodes,
        state_indices_tensor_d=drawn.blocks[: drawn.decodes],
        state_indices_tensor_p=drawn.blocks[drawn.decodes :],
    )
    RUNNING.step = drawn.step()
    build = conv_states.plan_conv_states(lambda self, *_: metadata)
    return build(SimpleNamespace(layer_names=["layers.0"]), 0, drawn.common)


@pytest.mark.parametrize("seed", range(20))
def test_of_a_short_convolution_the_kernel_keeps_the_states_of_the_prompts_it_is_given(seed):
    drawn = Drawn(seed)
    states = getattr(short_convolution(drawn), SCAN_STATES)
    ran = []
    kernel = conv_states.keep_inputs(lambda *given, **options: ran.append((given, options)))
    inputs, weight = drawn.inputs[drawn.decodes :].T, torch.zeros(CHANNELS, WIDTH + 1)
    conv_states.run_convolution(lambda: kernel(inputs, weight, None, conv_states=drawn.state, activation=None), states)
    assert ran == [((inputs, weight, None, drawn.state), {"activation": None})]
    assert drawn.right and drawn.wrong() == [] and RUNNING.convolution is None


def test_a_layer_that_calls_no_kernel_is_an_error_and_leaves_nothing_behind():
    drawn = Drawn(1)
    states = getattr(short_convolution(drawn), SCAN_STATES)
    with pytest.raises(RuntimeError, match="no longer calls its kernel"):
        conv_states.run_convolution(lambda: None, states)
    assert RUNNING.convolution is None


DRAFTS, BLOCK = 3, 64  # tokens


class Row(NamedTuple):
    computed: int  # tokens before the step
    tokens: int
    accepted: int = 0  # of the step before; 0: it verifies no drafts
    writes: tuple[int, ...] = ()


# The last piece of a prompt is one token: a backend takes it for a step of generation.
VERIFIES, RESUMED, VERIFIES_TOO, FRESH, LAST = range(5)
ROWS = [Row(50, 4, 3), Row(64, 70, writes=(64,)), Row(90, 4, 2), Row(0, 40, writes=(20, 40)), Row(10, 1)]
ORDERS = [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [3, 4, 0, 1, 2], [1, 3, 4, 2, 0]]  # in a batch


def columns(row: int) -> list[int]:
    """The blocks of a row's states, one for each of its tokens."""
    return [10 * row + 1 + number for number in range(DRAFTS + 1)]


def builder_of(kind: type, order: list[int]) -> Any:
    """vLLM's, as it is on model runner V2, without an engine."""
    made = object.__new__(kind)
    mode = {"mamba_cache_mode": "align"}
    spec = MambaSpec(BLOCK, shapes=((1,),), dtypes=(torch.float32,), num_speculative_blocks=DRAFTS, **mode)
    made.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(**mode), use_v2_model_runner=True)
    made.kv_cache_spec, made.layer_names = spec, ["layers.0"]
    made.mamba_aligned_state_indices = torch.tensor([columns(row) for row in order], dtype=torch.int32)
    made.use_spec_decode, made.num_spec, made.spec_state_slots = True, DRAFTS, DRAFTS + 1
    made.use_recoverssm = made.use_full_cuda_graph = made.use_flashinfer_prefill = False
    made.gdn_prefill_backend, made.plan_flashinfer_checkpoints = "triton", False
    made.checkpoint_builder = SimpleNamespace(build=lambda *_: None)
    return made


def batch(order: list[int]) -> CommonAttentionMetadata:
    rows = [ROWS[row] for row in order]
    starts = torch.tensor([0, *itertools.accumulate(row.tokens for row in rows)], dtype=torch.int32)
    seq_lens = torch.tensor([row.computed + row.tokens for row in rows], dtype=torch.int32)
    tables = torch.zeros((len(rows), 8), dtype=torch.int32)
    for number, row in enumerate(order):
        first = (int(seq_lens[number]) - 1) // BLOCK
        tables[number, first : first + DRAFTS + 1] = torch.tensor(columns(row))
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(rows),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(row.tokens for row in rows),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=tables,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=torch.tensor([not row.accepted for row in rows]),
    )


class Ran(NamedTuple):
    """What a layer does in a segment with a row."""

    begin: int  # tokens of the row before it
    end: int
    blocks: list[int]
    accepted: int | None  # None: it verifies no drafts
    resumed: bool | None = None  # whether it goes on from a state; None: it does, as it verifies


def read(metadata: Any, tokens: list[tuple[int, int]]) -> dict[int, Ran]:
    """As the cores of KDA and of gated delta nets read it. `tokens`: of the segment, as (row, token of the row)."""
    spec, others = range(metadata.num_spec_decode_tokens), range(metadata.num_spec_decode_tokens, len(tokens))
    if (start := getattr(metadata, "spec_token_start", None)) is not None:
        spec = range(start, start + metadata.num_spec_decode_tokens)
        start = metadata.non_spec_token_start
        others = range(start, start + metadata.num_prefill_tokens + metadata.num_decode_tokens)
    elif metadata.num_spec_decodes:
        spec, others = metadata.spec_token_indx.tolist(), metadata.non_spec_token_indx.tolist()
    found: dict[int, Ran] = {}

    def add(run: list[tuple[int, int]], blocks: list[int], accepted: int | None, resumed: bool | None) -> None:
        ((row, begin), *_), (_, last) = run, run[-1]
        assert run == [(row, token) for token in range(begin, last + 1)]
        found[row] = Ran(begin, last + 1, blocks, accepted, resumed)

    if metadata.num_spec_decodes:
        bounds, accepted = metadata.spec_query_start_loc.tolist(), metadata.num_accepted_tokens.tolist()
        blocks_of = metadata.spec_state_indices_tensor.tolist()
        for (begin, end), blocks, count in zip(itertools.pairwise(bounds), blocks_of, accepted, strict=True):
            add([tokens[place] for place in spec[begin:end]], blocks, count, None)
    bounds = metadata.non_spec_query_start_loc.tolist()
    resumed = metadata.has_initial_state
    blocks_of = metadata.non_spec_state_indices_tensor.tolist()
    assert len(blocks_of) == len(bounds) - 1
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        goes_on = True if resumed is None else bool(resumed[number])
        add([tokens[place] for place in others[begin:end]], [blocks_of[number]], None, goes_on)
    return found


@pytest.fixture
def built(monkeypatch):
    def build(kind: type, plan: Any, order: list[int]) -> tuple[Any, CommonAttentionMetadata]:
        """The metadata of the step, by vLLM's builder and what `plan` makes of its `build`."""
        writes = {f"r{row}": [Write(at, {0: target(row, at)}) for at in ROWS[row].writes] for row in (RESUMED, FRESH)}
        monkeypatch.setattr(RUNNING, "step", Step(writes, {"layers.0": 0}, [f"r{row}" for row in order]))
        common = batch(order)
        drafts = torch.tensor([DRAFTS if ROWS[row].accepted else -1 for row in order])
        accepted = torch.tensor([max(ROWS[row].accepted, 1) for row in order], dtype=torch.int32)
        builder = builder_of(kind, order)
        options = {"num_accepted_tokens": accepted, "num_decode_draft_tokens_cpu": drafts}
        return plan(kind.build)(builder, 0, common, **options), common

    return build


def target(row: int, offset: int) -> int:
    """The block that takes a state."""
    return 100 * (row + 1) + offset


@pytest.fixture
def cut(built):
    def plan(kind: type, order: list[int]) -> list[dict[int, Ran]]:
        """What runs in each segment of the step, by row."""
        metadata, common = built(kind, segments.plan_segments, order)
        starts = common.query_start_loc_cpu.tolist()
        tokens = [(row, token) for row, start in zip(order, starts, strict=False) for token in range(ROWS[row].tokens)]
        ran = []
        for segment in getattr(metadata, SEGMENTS):
            places = torch.arange(len(tokens))[segment.tokens].tolist()
            ran.append(read(segment.metadata, [tokens[place] for place in places]))
            if segment.targets is not None:
                sources = [
                    columns(row)[0] for row in order for offset in ROWS[row].writes if ran[-1][row].end == offset
                ]
                assert sorted(segment.sources.tolist()) == sorted(sources)
        return ran

    return plan


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    "kind", [GDNAttentionMetadataBuilder, KimiK3KDAMetadataBuilder], ids=lambda kind: kind.__name__
)
def test_rows_that_verify_drafts_run_whole_in_the_first_segment_on_blocks_and_counts_of_their_own(cut, kind, order):
    first, second = cut(kind, order)
    running = {row: [columns(row)[0]] for row in range(len(ROWS))}
    assert first == {
        VERIFIES: Ran(0, 4, columns(VERIFIES), 3),
        VERIFIES_TOO: Ran(0, 4, columns(VERIFIES_TOO), 2),
        RESUMED: Ran(0, 64, running[RESUMED], None, True),
        FRESH: Ran(0, 20, running[FRESH], None, False),
        LAST: Ran(0, 1, running[LAST], None, True),
    }
    assert second == {
        RESUMED: Ran(64, 70, running[RESUMED], None, True),
        FRESH: Ran(20, 40, running[FRESH], None, True),
    }


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_beside_them_a_convolution_knows_the_blocks_and_the_inputs_of_the_others(built, order):
    metadata, common = built(PleShortConvAttentionMetadataBuilder, conv_states.plan_ngram_states, order)
    states = getattr(metadata, SCAN_STATES)
    starts = dict(zip(order, common.query_start_loc_cpu.tolist(), strict=False))
    windows = states.plan.windows
    told = (states.blocks, windows.starts, windows.ends, states.running, windows.resumed)
    assert sorted(zip(*(each.tolist() for each in told), strict=True)) == [
        (target(row, offset), starts[row], starts[row] + offset, columns(row)[0], row == RESUMED)
        for row in (RESUMED, FRESH)
        for offset in ROWS[row].writes
    ]


@pytest.mark.parametrize(
    ("drafts", "drafting"), [(None, []), (torch.tensor([-1, 0, 3]), [1, 2]), (torch.tensor([-1, 0, -1, 3]), [1])]
)
def test_rows_verify_drafts_if_vllm_counts_any_for_them_even_none(drafts, drafting):
    """The last one stands behind the step's three rows."""
    assert segments.drafting_rows({"num_decode_draft_tokens_cpu": drafts}, 3) == drafting
    assert segments.drafting_rows({}, 3) == []
