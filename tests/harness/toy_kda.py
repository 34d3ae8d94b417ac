"""A narrow hybrid of vLLM's own layers of KDA and of plain attention: a CPU has no MLA with a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

NAME = "ToyKdaForCausalLM"


def normed(x: Any) -> Any:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class PlainAttention(nn.Module):
    """Without positions, as the attention of these models."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.widths = [heads * size, kv_heads * size, kv_heads * size]
        self.qkv = QKVParallelLinear(config.hidden_size, size, heads, kv_heads, bias=False, prefix=f"{prefix}.qkv")
        self.o = RowParallelLinear(heads * size, config.hidden_size, bias=False, prefix=f"{prefix}.o")
        self.attn = Attention(
            heads,
            size,
            size**-0.5,
            num_kv_heads=kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, hidden_states: Any, positions: Any) -> Any:
        return self.o(self.attn(*self.qkv(hidden_states)[0].split(self.widths, -1)))[0]


class Layer(nn.Module):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        is_kda = config.is_kda_layer(int(prefix.rsplit(".", 1)[1]))
        mixer = KimiGatedDeltaNetAttention if is_kda else PlainAttention
        self.mixer = mixer(config, vllm_config, f"{prefix}.mixer")
        width = config.intermediate_size
        self.up = MergedColumnParallelLinear(config.hidden_size, [width] * 2, bias=False, prefix=f"{prefix}.up")
        self.down = RowParallelLinear(width, config.hidden_size, bias=False, prefix=f"{prefix}.down")

    def forward(self, x: Any, positions: Any) -> Any:
        x = x + self.mixer(hidden_states=normed(x), positions=positions)
        gate, up = self.up(normed(x))[0].chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)[0]


class Body(nn.Module):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        names = [f"{prefix}.layers.{number}" for number in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(Layer(config, vllm_config, name) for name in names)

    def forward(self, input_ids: Any, positions: Any) -> Any:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        return normed(x)


class ToyKdaForCausalLM(nn.Module, HasInnerState, IsHybrid):  # type: ignore[misc]
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.model = Body(config, vllm_config, "model")
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Any) -> Any:
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None, **_: Any
    ) -> Any:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Any) -> Any:
        return self.logits_processor(self.lm_head, hidden_states)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        return MambaStateDtypeCalculator.kda_state_dtype(
            vllm_config.model_config.dtype, vllm_config.cache_config.mamba_cache_dtype
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        config = vllm_config.model_config.hf_text_config.linear_attn_config
        return MambaStateShapeCalculator.kda_state_shape(
            vllm_config.parallel_config.tensor_parallel_size,
            config["num_heads"],
            config["head_dim"],
            conv_kernel_size=config["short_conv_kernel_size"],
            num_spec=vllm_config.num_speculative_tokens,
        )

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return MambaStateCopyFuncCalculator.kda_state_copy_func()


def config() -> dict[str, Any]:
    """Two layers of KDA around one of attention."""
    return {
        "architectures": [NAME],
        "model_type": "kimi_linear",
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
        "num_experts": None,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "head_dim": 32,
            "num_heads": 1,
            "short_conv_kernel_size": 4,
        },
    }
