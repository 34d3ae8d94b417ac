"""A step of one recurrent layer as a GPU runs it: vLLM's metadata builders and kernels, the plugin's patches.

The process is prepared by `tests.harness.triton_interpreter`. `Bench` has two cache groups with a layer each, so that
one takes over the metadata of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from engine_patches.footprint import RUNNING
from engine_patches.forward.layers import BUILDERS, GDN_BUILDER, MAMBA2_BUILDER, gdn_in_segments, mamba2_with_states
from engine_patches.forward.segments import take_states_over
from engine_patches.forward.step_writes import Step, Write
from engine_patches.ledger import resolve
from tests.harness import triton_interpreter

BLOCK = 64  # tokens

BLOCKS = 24

CHUNK = 64  # tokens of a chunk of the kernels

GROUPS = (0, 1)

LAYERS = {"layer0": 0, "layer1": 1}  # with their cache groups

Tensors = tuple[torch.Tensor, ...]


class Row(NamedTuple):
    """A request's part of a step, lengths in tokens."""

    name: str
    computed: int
    new: int
    tables: tuple[Sequence[int], Sequence[int]]  # block tables by cache group, of equal lengths in a step
    prefills: bool = True  # the tokens are of the prompt


class Mamba2:
    """`MambaMixer2` between its projections, on its Triton kernels; weights drawn from a seed."""

    builder, kind = MAMBA2_BUILDER, "MAMBA2"
    heads, head_size, state_size, width = 2, 16, 16, 4

    def __init__(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        """`cache_dtype`: of the recurrent part of a state. The convolution's has the model's `dtype`."""
        from vllm.model_executor.layers.mamba import mamba_mixer2 as module
        from vllm.model_executor.layers.mamba.ops import mamba_ssm

        inner = self.heads * self.head_size
        conv = inner + 2 * self.state_size
        # Chosen by platform when vLLM starts: here the kernel.
        module.selective_state_update = lambda *args, **kwargs: mamba_ssm.selective_state_update(*args, **kwargs)
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.layer = object.__new__(module.MambaMixer2)
        nn.Module.__init__(self.layer)
        vars(self.layer).update(
            prefix="layer0",
            tped_intermediate_size=inner,
            tped_conv_size=conv,
            tped_dt_size=self.heads,
            num_spec=0,
            cache_config=SimpleNamespace(),
            use_replayssm=False,
            _updates_replayssm_trackers=True,
            conv_weights=(drawn(conv, self.width) / 2).to(dtype),
            conv1d=SimpleNamespace(bias=drawn(conv).to(dtype)),
            activation="silu",
            A=-torch.exp(drawn(self.heads)),
            D=drawn(self.heads).to(dtype),
            dt_bias=(drawn(self.heads) - 3).to(dtype),
            num_heads=self.heads,
            tp_size=1,
            head_dim=self.head_size,
            n_groups=1,
            ssm_state_size=self.state_size,
            conv_kernel_size=self.width,
            is_blackwell=False,
            model_config=None,
            mamba_config=SimpleNamespace(backend=None),
            split_hidden_states_B_C_fn=lambda tensor: torch.split(
                tensor, [inner, self.state_size, self.state_size], dim=-1
            ),
        )
        self.dtype, self.dtypes = dtype, (dtype, cache_dtype)
        self.shapes = ((self.width - 1, conv), (self.heads, self.head_size, self.state_size))
        self.output_shape: tuple[int, ...] = (inner,)
        self._projected = inner + conv + self.heads

    def inputs(self, tokens: int, generator: torch.Generator) -> Tensors:
        """Random inputs of so many tokens."""
        return (torch.randn(tokens, self._projected, generator=generator).to(self.dtype),)

    def run(self, inputs: Tensors, output: torch.Tensor, patched: bool) -> None:
        """The layer's part of a step; fills `output`, (tokens, *output_shape)."""
        own = type(self.layer).conv_ssm_forward
        (mamba2_with_states(own) if patched else own)(self.layer, inputs[0], output)


class GatedDelta:
    """The core of `QwenGatedDeltaNetAttention` on FLA's Triton kernels, which take no float32 inputs."""

    builder, kind = GDN_BUILDER, "GDN_ATTN"
    key_heads, value_heads, head_size, width = 1, 2, 64, 4

    def __init__(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        """As `Mamba2`."""
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module
        from vllm.third_party.flash_linear_attention.ops import chunk_gated_delta_rule

        triton_interpreter.bind_late()
        key, value = self.key_heads * self.head_size, self.value_heads * self.head_size
        conv = 2 * key + value
        generator = torch.Generator().manual_seed(1)
        self.layer = object.__new__(module.QwenGatedDeltaNetAttention)
        nn.Module.__init__(self.layer)
        weight = torch.randn(conv, 1, self.width, generator=generator) / 2
        vars(self.layer).update(
            prefix="layer0",
            enable_packed_recurrent_decode=True,
            conv1d=SimpleNamespace(weight=weight.to(dtype), bias=None),
            activation="silu",
            dt_bias=torch.randn(self.value_heads, generator=generator),
            # Heads that remember hundreds of tokens: a lost state shows.
            A_log=torch.log(torch.rand(self.value_heads, generator=generator) * 0.02),
            num_k_heads=self.key_heads,
            num_v_heads=self.value_heads,
            tp_size=1,
            head_k_dim=self.head_size,
            head_v_dim=self.head_size,
            key_dim=key,
            value_dim=value,
            # Left out: what only the kernels of another vendor take.
            chunk_gated_delta_rule=lambda aiter_prefill_metadata=None, **options: chunk_gated_delta_rule(**options),
            _exports_checkpoints=False,
        )
        self.dtype, self.dtypes = dtype, (dtype, cache_dtype)
        self.shapes = ((self.width - 1, conv), (self.value_heads, self.head_size, self.head_size))
        self.output_shape: tuple[int, ...] = (self.value_heads, self.head_size)
        self._conv = conv

    def inputs(self, tokens: int, generator: torch.Generator) -> Tensors:
        """Random inputs of so many tokens."""
        widths = (self._conv, self.value_heads, self.value_heads)
        return tuple(torch.randn(tokens, width, generator=generator).to(self.dtype) for width in widths)

    def run(self, inputs: Tensors, output: torch.Tensor, patched: bool) -> None:
        """The layer's part of a step; fills `output`, (tokens, *output_shape)."""
        own = type(self.layer)._forward_core
        core = gdn_in_segments(own) if patched else own
        with torch.no_grad():
            core(self.layer, mixed_qkv=inputs[0], b=inputs[1], a=inputs[2], core_attn_out=output)


FAMILIES = {"mamba2": Mamba2, "gdn": GatedDelta}


def config(v2: bool) -> Any:
    """What metadata builders read of vLLM's configuration."""
    from vllm.config.compilation import CUDAGraphMode

    return SimpleNamespace(
        speculative_config=None,
        num_speculative_tokens=0,
        num_hash_lookahead_tokens=0,
        use_v2_model_runner=v2,
        additional_config=None,
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


class Bench:
    """A layer's caches by cache group, (BLOCKS, *shape) each, and the steps that run on them.

    `v2`: the metadata of model runner V2, which hands a delta net the blocks of running states beside the block tables.
    """

    def __init__(self, mixer: Any, v2: bool = False) -> None:
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
        from vllm.v1.kv_cache_interface import MambaSpec

        self.mixer, self.v2 = mixer, v2
        pairs = list(zip(mixer.shapes, mixer.dtypes, strict=True))
        self.caches = [tuple(torch.zeros(BLOCKS, *shape, dtype=dtype) for shape, dtype in pairs) for _ in GROUPS]
        spec = MambaSpec(
            block_size=BLOCK,
            shapes=mixer.shapes,
            dtypes=mixer.dtypes,
            mamba_type=MambaAttentionBackendEnum[mixer.kind],
            mamba_cache_mode="align",
        )
        builder = resolve(mixer.builder).value
        self._builders = [builder(spec, [name], config(v2), torch.device("cpu")) for name in LAYERS]
        if v2 and isinstance(mixer, GatedDelta):  # vLLM: if the device is one of CUDA's
            for each in self._builders:
                each.supports_update_block_table, each.mamba_aligned_state_indices = True, None

    def copy_of(self, other: Bench) -> Bench:
        """Take over the caches of another one."""
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            for to, source in zip(mine, theirs, strict=True):
                to.copy_(source)
        return self

    def state(self, group: int, block: int) -> Tensors:
        """The state in a block: the convolution's part, and the recurrent one."""
        return tuple(cache[block].clone() for cache in self.caches[group])

    def step(
        self,
        rows: Sequence[Row],
        inputs: Tensors,
        writes: Mapping[str, Sequence[tuple[int, Mapping[int, int]]]] | None = None,
        groups: Sequence[int] = GROUPS,
        shifted: bool = False,
    ) -> list[torch.Tensor]:
        """Run a step and return the outputs of the layers of `groups`, (tokens, *output_shape).

        `inputs`: of the rows' new tokens, in order. `writes`: by row, (tokens of the row before the state, block by
        cache group); None runs vLLM's own functions without patches. `shifted`: a defect, running states are looked up
        one column of the block tables too far, with a delta net's aligned indices one row.
        """
        patched = writes is not None
        if writes is not None:
            of_rows = {name: [Write(*write) for write in of_row] for name, of_row in writes.items()}
            RUNNING.step = Step(of_rows, LAYERS, [row.name for row in rows])
        try:
            metadata = self._metadata(rows, patched, shifted)
            outputs = [self._run(group, metadata[group], inputs, patched) for group in groups]
            if RUNNING.step is not None:
                RUNNING.step.check()
        finally:
            RUNNING.step = None
        return outputs

    def _run(self, group: int, metadata: Any, inputs: Tensors, patched: bool) -> torch.Tensor:
        from vllm import forward_context

        name = f"layer{group}"
        vars(self.mixer.layer).update(kv_cache=self.caches[group], prefix=name)
        output = torch.zeros(len(inputs[0]), *self.mixer.output_shape, dtype=self.mixer.dtype)
        forward_context._forward_context = SimpleNamespace(attn_metadata={name: metadata})
        own = tuple(tensor.clone() for tensor in inputs)  # the convolution of single tokens writes into its input
        self.mixer.run(own, output, patched)
        return output

    def _metadata(self, rows: Sequence[Row], patched: bool, shifted: bool) -> list[Any]:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        builder = type(self._builders[0])
        build, take_over = builder.build, builder.update_block_table
        if patched:
            build, take_over = BUILDERS[self.mixer.builder](build), take_states_over(take_over)
        lengths = [row.new for row in rows]
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        seq_lens = torch.tensor([row.computed + row.new for row in rows], dtype=torch.int32)
        tables = [torch.tensor([row.tables[group] for row in rows], dtype=torch.int32) for group in GROUPS]
        if shifted and not self.v2:
            tables = [table.roll(-1, 1) for table in tables]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(rows),
            num_actual_tokens=sum(lengths),
            max_query_len=max(lengths),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=tables[0],
            slot_mapping=torch.zeros(1),
            is_prefilling=torch.tensor([row.prefills for row in rows]),
        )
        if self.v2:
            columns = (seq_lens - 1).long() // BLOCK
            for builder, table in zip(self._builders, tables, strict=True):
                if hasattr(builder, "mamba_aligned_state_indices"):  # a delta net's, as vLLM asks
                    builder.mamba_aligned_state_indices = table.gather(1, columns[:, None]).roll(int(shifted), 0)
        first = build(self._builders[0], 0, common)
        if self._builders[1].supports_update_block_table:
            return [first, take_over(self._builders[1], first, tables[1], None)]
        return [first, build(self._builders[1], 0, common.replace(block_table_tensor=tables[1]))]
