"""How finely prefixes are matched and states are placed, by model and setting."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.scheduler.match_unit import default_to_fine_unit, expected, kernel_chunk, state_alignment


def config(unit: int | None = None, block: int = 384, hybrid: bool = True, **changes: Any) -> SimpleNamespace:
    """What the functions read of vLLM's configuration."""
    model = SimpleNamespace(
        is_hybrid=hybrid,
        is_attention_free=False,
        hf_text_config=SimpleNamespace(model_type=changes.pop("model_type", "nemotron_h")),
        get_mamba_chunk_size=lambda: changes.get("chunk", 256),
    )
    cache = SimpleNamespace(
        prefix_match_unit=unit,
        block_size=block,
        enable_prefix_caching=changes.pop("caching", True),
        mamba_cache_mode="align",
    )
    drafts, drop = changes.pop("drafts", 0), changes.pop("drop", False)
    connector = changes.pop("connector", None)
    return SimpleNamespace(
        cache_config=cache,
        model_config=model,
        num_speculative_tokens=drafts,
        speculative_config=drafting("mtp" if drop else "ngram", drop) if drafts else None,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, distributed_executor_backend="mp"
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        kv_transfer_config=SimpleNamespace(kv_connector=connector) if connector else None,
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )


def drafting(method: str, drop: bool) -> SimpleNamespace:
    """What is read of vLLM's configuration of drafts."""
    return SimpleNamespace(method=method, use_multi_module_mtp=lambda: False, use_eagle_block_drop=lambda: drop)


class Recurrent(SimpleNamespace):
    """A `MambaSpec`, as far as it is read."""

    def __init__(self, name: str) -> None:
        super().__init__(mamba_type=SimpleNamespace(name=name), prefix_cacheable=True, tokens_per_state=-1)


MAMBA1, MAMBA2, GDN = Recurrent("MAMBA1"), Recurrent("MAMBA2"), Recurrent("GDN_ATTN")


@pytest.mark.parametrize(
    ("vllm_config", "unit"),
    [
        (config(), 16),
        (config(unit=48), 48),
        (config(hybrid=False, block=32), 32),
        (config(drafts=2, block=528), 16),
        (config(model_type="qwen3_next"), 64),
        (config(model_type="qwen3_5_moe"), 64),
        (config(model_type="qwen3_next", block=528), 64),
        (config(model_type="qwen3_next", unit=16), 64),
        (config(connector="NixlPushConnector"), 16),
        (config(connector="DecodeBenchConnector", block=528), 528),
    ],
)
def test_the_unit_before_the_engine_has_reported_its_own(vllm_config, unit):
    assert expected(vllm_config) == unit


def test_the_unit_beside_drafts_is_fine_unless_nobody_wants_hints_there(monkeypatch, resolve):
    assert [expected(config(drafts=3)), expected(config(drafts=3, drop=True))] == [16, 16]
    assert expected(config(drafts=3, drop=True, model_type="qwen3_next")) == 64
    monkeypatch.setenv("SEAMARK_DRAFTS", "0")
    assert expected(config(drafts=2, block=528)) == 528
    assert resolve(groups(ATTENTION, MAMBA2), config(drafts=1)) == (384, 384)


def test_the_chunk_of_each_kernel():
    assert [kernel_chunk(spec, config()) for spec in (MAMBA1, MAMBA2, GDN)] == [1, 256, 64]
    assert kernel_chunk(MAMBA2, config(chunk=None)) == 1


@pytest.fixture
def resolve(monkeypatch) -> Callable[..., Any]:
    """The replacement, over a stand-in for vLLM's function that refuses a unit that does not divide the block."""
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", SimpleNamespace(MambaSpec=Recurrent))
    monkeypatch.delenv("SEAMARK_CHUNK_ENDS", raising=False)

    def original(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int]:
        cache = vllm_config.cache_config
        unit = cache.prefix_match_unit or cache.block_size
        if cache.block_size % unit:
            raise ValueError(f"{unit} does not divide {cache.block_size}")
        return cache.block_size, unit

    return default_to_fine_unit(original)


def groups(*specs: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def attention(tokens: int = 1, prefix_cacheable: bool = True) -> SimpleNamespace:
    """The spec of an attention layer that has an entry for so many tokens."""
    return SimpleNamespace(prefix_cacheable=prefix_cacheable, tokens_per_state=tokens)


ATTENTION = attention()


@pytest.mark.parametrize(
    ("spec", "block", "unit"), [(MAMBA2, 384, 16), (GDN, 384, 64), (GDN, 528, 16), (MAMBA2, 100, 100)]
)
def test_a_hybrid_gets_the_finest_unit_that_divides_its_blocks(resolve, spec, block, unit):
    vllm_config = config(block=block)
    assert resolve(groups(ATTENTION, spec), vllm_config) == (block, unit)
    assert vllm_config.cache_config.prefix_match_unit == (unit if unit < block else None)


@pytest.mark.parametrize(("connector", "unit"), [("NixlPushConnector", 16), ("DecodeBenchConnector", 384)])
def test_blocks_stay_vllms_own_where_a_connector_keeps_hints_from_being_used(resolve, connector, unit):
    assert resolve(groups(ATTENTION, MAMBA2), config(connector=connector)) == (384, unit)


@pytest.mark.parametrize(("drop", "unit"), [(False, 64), (True, 16)])
def test_a_delta_net_has_a_fine_unit_if_one_is_taken_off_each_match(resolve, drop, unit):
    vllm_config = config(drafts=3, drop=drop)
    assert resolve(groups(ATTENTION, GDN), vllm_config) == (384, unit)
    assert state_alignment([GDN], vllm_config, unit) == 64


@pytest.mark.parametrize(
    ("vllm_config", "specs", "unit"),
    [
        (config(unit=192), (ATTENTION, MAMBA2), 192),
        (config(caching=False), (ATTENTION, MAMBA2), 384),
        (config(), (ATTENTION, ATTENTION), 384),
        (config(), (MAMBA2,), 384),
    ],
)
def test_everything_else_keeps_vllms_unit(resolve, vllm_config, specs, unit):
    before = vllm_config.cache_config.prefix_match_unit
    assert resolve(groups(*specs), vllm_config) == (384, unit)
    assert vllm_config.cache_config.prefix_match_unit == before
