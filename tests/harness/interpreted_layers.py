"""Recurrent layers as a GPU runs them, with the plugin's patches, in Triton's interpreter: `python -m` prints JSON.

vLLM's own metadata builders, its own layers' code and its own kernels; no engine, no model, no weights but random ones.
A step has a row that decodes, a fresh prompt and one that goes on behind a state, in two cache groups. What is printed
for each case says how far each written state is from that of a step that ends there, and each output from that of a
step in which nothing is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from tests.harness import triton_interpreter

triton_interpreter.start()

import torch  # noqa: E402
import vllm.forward_context  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import MambaSpec  # noqa: E402

from engine_patches.forward import layers, scan_states, segments, step_writes  # noqa: E402

BLOCK, BLOCKS, CHUNK = 64, 40, 64

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

PREFIX = "mixer"


def config(aligned: bool) -> Any:
    """As much of vLLM's configuration as its builders read."""
    return SimpleNamespace(
        speculative_config=None,
        num_speculative_tokens=0,
        use_v2_model_runner=aligned,
        additional_config=None,
        num_hash_lookahead_tokens=0,
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, max_cudagraph_capture_size=8, static_forward_context={}
        ),
        cache_config=SimpleNamespace(
            use_replayssm=False,
            replayssm_buffer_len=0,
            mamba_cache_mode="align",
            block_size=BLOCK,
            mamba_block_size=BLOCK,
            prefix_match_unit=None,
            hash_block_size=16,
            cache_hit_alignment_tokens=16,
        ),
        mamba_config=SimpleNamespace(backend=None),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512, async_scheduling=True),
        model_config=SimpleNamespace(
            get_mamba_chunk_size=lambda: CHUNK,
            hf_text_config=SimpleNamespace(linear_key_head_dim=64, linear_value_head_dim=64),
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def bare(layer: type, **attributes: Any) -> Any:
    """A layer without weights or configuration, with what its core reads."""
    made = object.__new__(layer)
    nn.Module.__init__(made)
    made.__dict__.update(prefix=PREFIX, tp_size=1, activation="silu", **attributes)
    return made


class Mamba2:
    """`MambaMixer2.conv_ssm_forward`: the states come from a whole scan."""

    HEADS, DIM, STATE, GROUPS, WIDTH = 2, 16, 16, 1, 4

    kind = MambaAttentionBackendEnum.MAMBA2

    build, build_of_group = staticmethod(scan_states.plan_scan_states), staticmethod(scan_states.states_of_group)

    plan = scan_states.SCAN_STATES

    def __init__(self, dtype: torch.dtype, states: torch.dtype) -> None:
        from vllm.model_executor.layers.mamba import mamba_mixer2 as module
        from vllm.model_executor.layers.mamba.ops import mamba_ssm
        from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

        module.selective_state_update = mamba_ssm.selective_state_update
        scan = module.mamba_chunk_scan_combined_varlen
        module.mamba_chunk_scan_combined_varlen = scan_states.scan_with_states(getattr(scan, "whole", scan))
        module.mamba_chunk_scan_combined_varlen.whole = getattr(scan, "whole", scan)
        inner = self.HEADS * self.DIM
        parts = [inner, self.GROUPS * self.STATE, self.GROUPS * self.STATE]
        generator = torch.Generator().manual_seed(1)
        self.layer = bare(
            module.MambaMixer2,
            tped_intermediate_size=inner,
            tped_conv_size=sum(parts),
            tped_dt_size=self.HEADS,
            num_spec=0,
            cache_config=SimpleNamespace(),
            use_replayssm=False,
            mamba_config=SimpleNamespace(backend=None),
            conv_weights=(random(generator, sum(parts), self.WIDTH) / 2).to(dtype),
            conv1d=SimpleNamespace(bias=random(generator, sum(parts)).to(dtype)),
            A=-torch.exp(random(generator, self.HEADS)),
            D=random(generator, self.HEADS).to(dtype),
            dt_bias=(random(generator, self.HEADS) - 3).to(dtype),
            num_heads=self.HEADS,
            head_dim=self.DIM,
            n_groups=self.GROUPS,
            ssm_state_size=self.STATE,
            conv_kernel_size=self.WIDTH,
            is_blackwell=False,
            _updates_replayssm_trackers=True,
            model_config=None,
            split_hidden_states_B_C_fn=lambda tensor: torch.split(tensor, parts, dim=-1),
        )
        self.dtype, self.features, self.out = dtype, [(inner + sum(parts) + self.HEADS,)], (inner,)
        self.shapes = ((self.WIDTH - 1, sum(parts)), (self.HEADS, self.DIM, self.STATE))
        self.dtypes = (dtype, states)
        self.builder = Mamba2AttentionMetadataBuilder
        self.core = module.MambaMixer2.conv_ssm_forward
        self.patched = layers.mamba2_with_states(self.core)

    def run(self, core: Callable[..., Any], inputs: Sequence[Tensor], out: Tensor) -> None:
        core(self.layer, inputs[0], out)


class Delta:
    """`QwenGatedDeltaNetAttention._forward_core`: segment by segment."""

    KEYS, VALUES, KEY_DIM, VALUE_DIM, WIDTH = 1, 2, 64, 64, 4

    kind = MambaAttentionBackendEnum.GDN_ATTN

    build, build_of_group = staticmethod(segments.plan_segments), staticmethod(segments.plan_segments_of_group)

    plan = segments.SEGMENTS

    def __init__(self, dtype: torch.dtype, states: torch.dtype) -> None:
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module
        from vllm.third_party.flash_linear_attention.ops import chunk_gated_delta_rule
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

        triton_interpreter.rebind("vllm.third_party.flash_linear_attention.ops")
        keys, values = self.KEYS * self.KEY_DIM, self.VALUES * self.VALUE_DIM
        channels = 2 * keys + values
        generator = torch.Generator().manual_seed(1)
        self.layer = bare(
            module.QwenGatedDeltaNetAttention,
            enable_packed_recurrent_decode=True,
            conv1d=SimpleNamespace(weight=(random(generator, channels, 1, self.WIDTH) / 2).to(dtype), bias=None),
            A_log=torch.log(torch.rand(self.VALUES, generator=generator) * 0.02),
            dt_bias=random(generator, self.VALUES),
            num_k_heads=self.KEYS,
            num_v_heads=self.VALUES,
            head_k_dim=self.KEY_DIM,
            head_v_dim=self.VALUE_DIM,
            key_dim=keys,
            value_dim=values,
            chunk_gated_delta_rule=lambda aiter_prefill_metadata=None, **options: chunk_gated_delta_rule(**options),
            _exports_checkpoints=False,
        )
        self.dtype, self.out = dtype, (self.VALUES, self.VALUE_DIM)
        self.features = [(channels,), (self.VALUES,), (self.VALUES,)]
        self.shapes = ((self.WIDTH - 1, channels), (self.VALUES, self.VALUE_DIM, self.KEY_DIM))
        self.dtypes = (dtype, states)
        self.builder = GDNAttentionMetadataBuilder
        self.core = module.QwenGatedDeltaNetAttention._forward_core
        self.patched = layers.gdn_in_segments(self.core)

    def run(self, core: Callable[..., Any], inputs: Sequence[Tensor], out: Tensor) -> None:
        with torch.no_grad():
            core(self.layer, mixed_qkv=inputs[0], b=inputs[1], a=inputs[2], core_attn_out=out)


Mixer = Mamba2 | Delta

FAMILIES: Mapping[str, type[Mixer]] = {"mamba2": Mamba2, "gdn": Delta}


class Row(NamedTuple):
    """One request's part of a step, in tokens; a block for each 64 tokens of it, for each cache group."""

    name: str
    computed: int
    tokens: int
    blocks: tuple[tuple[int, ...], tuple[int, ...]]


class Cache:
    """Two cache groups of one layer, and the steps that run on them."""

    def __init__(self, mixer: Mixer, aligned: bool) -> None:
        self.mixer = mixer
        self.aligned = aligned  # model runner V2 computes each row's block and hands it over
        pairs = list(zip(mixer.shapes, mixer.dtypes, strict=True))
        self.groups = [tuple(torch.zeros(BLOCKS, *shape, dtype=dtype) for shape, dtype in pairs) for _ in range(2)]
        spec = MambaSpec(
            block_size=BLOCK,
            shapes=mixer.shapes,
            dtypes=mixer.dtypes,
            mamba_type=mixer.kind,
            mamba_cache_mode="align",
        )
        device = torch.device("cpu")
        self.builders = [mixer.builder(spec, [f"layer{group}"], config(aligned), device) for group in range(2)]

    def copy(self) -> Cache:
        other = Cache(self.mixer, self.aligned)
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            for source, target in zip(mine, theirs, strict=True):
                target.copy_(source)
        return other

    def state(self, group: int, block: int) -> list[Tensor]:
        return [tensor[block].clone() for tensor in self.groups[group]]

    def step(
        self, rows: Sequence[Row], inputs: Sequence[Tensor], writes: Mapping[str, Sequence[step_writes.Write]] = {}
    ) -> list[Tensor]:
        """The layer's output, by group, (tokens, ...). Without `writes` vLLM runs alone."""
        lengths = torch.tensor([row.tokens for row in rows], dtype=torch.int32)
        starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        ends = torch.tensor([row.computed + row.tokens for row in rows], dtype=torch.int32)
        tables = [torch.tensor([list(row.blocks[group]) for row in rows], dtype=torch.int32) for group in range(2)]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=ends,
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(rows),
            num_actual_tokens=int(lengths.sum()),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=tables[0],
            slot_mapping=torch.zeros(1),
            is_prefilling=torch.tensor([row.name != "decodes" for row in rows]),
        )
        if self.aligned:
            for builder, table in zip(self.builders, tables, strict=True):
                last = [row_blocks[(end - 1) // BLOCK] for row_blocks, end in zip(table.tolist(), ends, strict=True)]
                builder.mamba_aligned_state_indices = torch.tensor(last, dtype=torch.int32)[:, None]
        groups = {"layer0": 0, "layer1": 1}
        step = step_writes.Step(writes, groups, [row.name for row in rows]) if writes else None
        build, take_over = self.mixer.builder.build, self.mixer.builder.update_block_table
        if writes:
            build, take_over = self.mixer.build(build), self.mixer.build_of_group(take_over)
        with mock.patch.object(step_writes, "_step", step):
            made = [build(self.builders[0], 0, common)]
            if self.aligned or self.builders[1].supports_update_block_table:
                made.append(take_over(self.builders[1], made[0], tables[1], None))
            else:
                made.append(build(self.builders[1], 0, common.replace(block_table_tensor=tables[1])))
        outputs = []
        for metadata, cache in zip(made, self.groups, strict=True):
            assert not writes or hasattr(metadata, self.mixer.plan)
            self.mixer.layer.__dict__["kv_cache"] = cache
            out = torch.zeros(len(inputs[0]), *self.mixer.out, dtype=self.mixer.dtype)
            context = SimpleNamespace(attn_metadata={PREFIX: metadata})
            with mock.patch.object(vllm.forward_context, "_forward_context", context):
                own = [tensor.clone() for tensor in inputs]  # some kernels write into their inputs
                self.mixer.run(self.mixer.patched if writes else self.mixer.core, own, out)
            outputs.append(out)
        return outputs


DECODES = Row("decodes", 40, 1, ((1, 2), (3, 4)))

FRESH = Row("fresh", 0, 100, ((5, 6), (7, 8)))

RESUMED = Row("resumed", 32, 70, ((9, 10), (11, 12)))

# Offsets into a row's tokens: inside a kernel's chunk, at its end, the last but one token, and so near the row's start
# that a part of the convolution's state is older.
OFFSETS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "mamba2": {"fresh": [48, 64, 100], "resumed": [2, 32, 69]},
    "gdn": {"fresh": [48, 64], "resumed": [32, 69]},
}


@dataclass(frozen=True)
class Case:
    """What runs: family, dtype of the layer and of its states, whose metadata, and a planted defect."""

    family: str
    dtype: str = "float32"
    states: str = "float32"
    aligned: bool = False
    defect: str = ""


def part(tensors: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    return [tensor[begin:end] for tensor in tensors]


def joined(*of_rows: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(tensors) for tensors in zip(*of_rows, strict=True)]


def largest(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def shown(case: Case) -> dict[str, Any]:
    """Run a case. Errors are the largest absolute differences; `size` is the largest absolute value beside them."""
    mixer = FAMILIES[case.family](DTYPES[case.dtype], DTYPES[case.states])
    generator = torch.Generator().manual_seed(7)

    def inputs(tokens: int) -> list[Tensor]:
        return [random(generator, tokens, *shape).to(mixer.dtype) for shape in mixer.features]

    before = Cache(mixer, case.aligned)
    before.step([Row("decodes", 0, 40, DECODES.blocks)], inputs(40))
    before.step([Row("resumed", 0, 32, RESUMED.blocks)], inputs(32))
    for group, tensors in enumerate(before.groups):  # the copy that precedes a step whose running block is another
        for tensor in tensors:
            tensor[RESUMED.blocks[group][1]] = tensor[RESUMED.blocks[group][0]]
    rows = [DECODES, FRESH, RESUMED]
    tokens = {row.name: inputs(row.tokens) for row in rows}
    every = joined(*tokens.values())
    whole, cut = before.copy(), before.copy()
    expected = whole.step(rows, every)
    places = [(row, offset) for row in rows[1:] for offset in OFFSETS[case.family][row.name]]
    blocks = {place: {0: 13 + 2 * number, 1: 14 + 2 * number} for number, place in enumerate(places)}
    writes: dict[str, list[step_writes.Write]] = {}
    for (row, offset), targets in blocks.items():
        writes.setdefault(row.name, []).append(step_writes.Write(offset, targets))
    with DEFECTS[case.defect]():
        found = cut.step(rows, every, writes)
    states = []
    for (row, offset), targets in blocks.items():
        # Segments begin where the one before ended, a whole scan at the row's start.
        begins = [0] if case.family == "mamba2" else [0, *(at for at in OFFSETS[case.family][row.name] if at < offset)]
        alone = before.copy()
        here = ((row.blocks[0][1],) * 2, (row.blocks[1][1],) * 2)
        for begin, end in zip(begins, [*begins[1:], offset], strict=True):
            alone.step([Row(row.name, row.computed + begin, end - begin, here)], part(tokens[row.name], begin, end))
        for group in range(2):
            wanted, kept = alone.state(group, here[group][0]), cut.state(group, targets[group])
            conv, state = map(largest, kept, wanted)
            size = float(wanted[1].float().abs().max())
            states.append({"row": row.name, "offset": offset, "conv": conv, "state": state, "size": size})
    running = [
        largest(kept, wanted)
        for group in range(2)
        for row, column in zip(rows, (0, 1, 1), strict=True)
        for kept, wanted in zip(
            cut.state(group, row.blocks[group][column]), whole.state(group, row.blocks[group][column]), strict=True
        )
    ]
    outputs = [largest(*pair) for pair in zip(found, expected, strict=True)]
    return {"states": states, "outputs": outputs, "running": running, "size": float(expected[0].float().abs().max())}


@contextmanager
def sound() -> Iterator[None]:
    yield


@contextmanager
def early_state() -> Iterator[None]:
    """Every state is that of sixteen tokens before, or of one token where there are none."""
    original = step_writes.Step.writes_by_row

    def writes_by_row(self: Any, num_rows: int) -> Any:
        found = original(self, num_rows)
        return {row: [write._replace(offset=max(write.offset - 16, 1)) for write in of] for row, of in found.items()}

    with mock.patch.object(step_writes.Step, "writes_by_row", writes_by_row):
        yield


@contextmanager
def without_a_part() -> Iterator[None]:
    """The tokens between the end of a chunk and the state are left out, or a segment's state."""
    with (
        mock.patch.object(scan_states._Tails, "states", lambda self, scan, states, inputs, options: states),
        mock.patch.object(segments.Segment, "keep_states", return_value=None),
    ):
        yield


@contextmanager
def shifted_rows() -> Iterator[None]:
    """Running blocks are taken from the row beside."""
    running, planned = segments.running_blocks, scan_states._planned

    def of_other_rows(metadata: Any, *args: Any) -> Any:
        plan = planned(metadata, *args)
        plan.rows.copy_((plan.rows + 1) % metadata.num_prefills)
        return plan

    with (
        mock.patch.object(segments, "running_blocks", lambda metadata: running(metadata).roll(1)),
        mock.patch.object(scan_states, "_planned", of_other_rows),
    ):
        yield


@contextmanager
def rounded_states() -> Iterator[None]:
    """States pass through bfloat16 on their way into a cache of float32."""
    keep, scan = segments.Segment.keep_states, scan_states.ScanStates.scan

    def keep_states(self: Any, cache: Any) -> None:
        keep(self, cache)
        if self.targets is not None:
            cache[1][self.targets] = cache[1][self.targets].bfloat16().to(cache[1].dtype)

    def rounded(self: Any, original: Any, ssm_state: Any, inputs: Any, options: Any) -> Any:
        final = scan(self, original, ssm_state, inputs, options)
        ssm_state[self.blocks] = ssm_state[self.blocks].bfloat16().to(ssm_state.dtype)
        return final

    with (
        mock.patch.object(segments.Segment, "keep_states", keep_states),
        mock.patch.object(scan_states.ScanStates, "scan", rounded),
    ):
        yield


DEFECTS = {
    "": sound,
    "a state one unit early": early_state,
    "a part left out": without_a_part,
    "another row's running block": shifted_rows,
    "states rounded to bfloat16": rounded_states,
}


if __name__ == "__main__":
    print(json.dumps([shown(Case(**case)) for case in json.loads(sys.argv[1])]))
