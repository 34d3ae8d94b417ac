"""Windows of draft heads: whose a cache group is, and when rows are computed again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request

from engine_patches.scheduler import draft_windows
from engine_patches.scheduler.draft_windows import ENOUGH_STEPS, Acceptance, DraftWindows, leave_out, left_out_spec
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.request_state import RequestState
from engine_patches.scheduler.step_time import ENOUGH, StepTime

ROWS = dict(block_size=64, num_kv_heads=1, head_size=1, dtype=torch.float32)

WINDOW = SlidingWindowSpec(**ROWS, sliding_window=100)

STATES = MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")

TARGET = ["model.layers.3.self_attn.attn"]

LAYERS = 48  # of the target


def cache(*groups: tuple[list[str], Any], states: bool = True) -> KVCacheConfig:
    """Of a model with these attention groups, and recurrent layers if there are `states`."""
    made = [KVCacheGroupSpec(names, spec) for names, spec in groups]
    made += [KVCacheGroupSpec(["model.layers.0.mixer"], STATES)] if states else []
    return KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=made)


def left_out(config: KVCacheConfig, drafts: object = object()) -> list[bool]:
    """Of each group, whether the lookup passes over it."""
    model = SimpleNamespace(get_num_layers=lambda _: LAYERS)
    leave_out(config, SimpleNamespace(speculative_config=drafts, model_config=model, parallel_config=None))
    return [not group.kv_cache_spec.prefix_cacheable for group in config.kv_cache_groups]


@pytest.fixture(autouse=True)
def patched(monkeypatch) -> None:
    monkeypatch.setattr(draft_windows, "can_be_left_out", lambda: True)


def of_a_head(spec: Any = WINDOW) -> Any:
    """The spec as vLLM 0.33 marks it."""
    return replace(spec, is_draft=True) if hasattr(spec, "is_draft") else spec


@pytest.mark.parametrize(
    "names",
    [[f"model.layers.{LAYERS}.self_attn.attn"], ["mtp.layers.0.self_attn.attn", f"model.layers.{LAYERS + 4}.attn"]],
)
def test_a_head_s_own_window_is_left_out_of_the_lookup(names):
    config = cache((TARGET, FullAttentionSpec(**ROWS)), (names, of_a_head()))
    assert left_out(config) == [False, True, False]
    spec = config.kv_cache_groups[1].kv_cache_spec
    assert spec.sliding_window == 100 and spec.page_size_bytes == WINDOW.page_size_bytes
    assert left_out(config) == [False, True, False]  # asked again


@pytest.mark.parametrize(
    ("names", "spec"),
    [
        (TARGET, of_a_head()),  # whatever the mark says: one that is shared has the first layer's
        ([*TARGET, f"model.layers.{LAYERS}.self_attn.attn"], of_a_head()),
        (["model.decoder.attn"], of_a_head()),
        (["mtp.layers.0.attn"], FullAttentionSpec(**ROWS)),
    ],
    ids=["the target's", "shared with the target", "whose, is not known", "no window"],
)
def test_no_row_that_the_target_reads_is_left_out(names, spec):
    assert not any(left_out(cache((names, spec))))


def test_nothing_is_left_out_where_zeros_would_be_somebody_s_rows_or_vllm_needs_no_help(monkeypatch):
    window = (["mtp.layers.0.attn"], of_a_head())
    assert not any(left_out(cache(window, states=False)))  # new blocks are not zeroed
    assert not any(left_out(cache(window), drafts=None))
    monkeypatch.setattr(SlidingWindowManager, "supports_fine_grained_hash_lookup", True)
    assert not any(left_out(cache(window)))
    monkeypatch.undo()
    monkeypatch.setattr(draft_windows, "can_be_left_out", lambda: False)
    assert not any(left_out(cache(window)))


def test_an_answer_on_zeros_takes_the_more_steps_the_more_rows_are_missing():
    acceptance = Acceptance()
    lost = [acceptance.steps_lost(missing, 1000, 400) for missing in (0, 10, 100, 400, 1000)]
    assert lost[0] == 0 and lost == sorted(lost) and lost[-1] > 20
    assert acceptance.steps_lost(1000, 1000, 0) == 0


def test_what_zeros_cost_is_learnt_from_steps():
    acceptance = Acceptance()
    assumed = acceptance.loss
    acceptance.add(True, ENOUGH_STEPS, 2 * ENOUGH_STEPS)
    acceptance.add(False, ENOUGH_STEPS - 1, ENOUGH_STEPS)
    assert acceptance.loss == assumed
    acceptance.add(False, 1, 0)
    assert acceptance.loss == pytest.approx(1.0, abs=0.01)
    acceptance.add(False, 10 * ENOUGH_STEPS, 30 * ENOUGH_STEPS)
    assert acceptance.loss == 0  # zeros cost nothing here


def manager_of(pool: BlockPool) -> SlidingWindowManager:
    """Of a window that is left out."""
    return SlidingWindowManager(
        left_out_spec()(**ROWS, sliding_window=100),
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=64,
    )


@pytest.mark.parametrize(
    ("behind", "answer", "tokens", "pays"),
    [
        (5, 400, 50, True),
        (5, 400, 50_000, False),
        (5, 1, 50, False),  # one token has no draft to lose
        (200, 400, 1, False),  # the prompt goes on for longer than the window
    ],
)
def test_rows_are_computed_again_where_that_is_faster_than_drafting_worse(behind, answer, tokens, pays):
    pool = BlockPool(4, enable_caching=True, hash_block_size=16)
    manager = manager_of(pool)
    step_time, hit = StepTime(), 4000
    windows = DraftWindows(pool, Grid(16, 16), [manager], step_time)
    request = SimpleNamespace(num_tokens=hit + behind, max_tokens=answer)
    assert windows._pays(request, hit, tokens)  # while no times are known
    for _ in range(ENOUGH):  # a pass costs as much as 800 tokens
        step_time.step_took(1, 0.0801)
        step_time.step_took(1000, 0.18)
    assert windows._pays(request, hit, tokens) == pays


def requests_of_the_same_tokens() -> dict[str, Request]:
    """By what tells each from the first one."""
    image = MultiModalFeatureSpec(None, "image", "of a boat", PlaceholderRange(offset=20, length=10))
    more: dict[str, dict[str, Any]] = {
        "": {},
        "nothing": {},
        "a salt": {"cache_salt": "other"},
        "an adapter": {"lora_request": LoRARequest("adapter", 1, "/nowhere")},
        "an image": {"mm_features": [image]},
    }
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    parameters = SamplingParams(max_tokens=1)
    return {
        name: Request(name or "first", list(range(300)), parameters, None, block_hasher=hasher, **options)
        for name, options in more.items()
    }


def test_another_salt_adapter_or_image_finds_no_row():
    pool = BlockPool(12, enable_caching=True, hash_block_size=16)
    manager = manager_of(pool)
    windows = DraftWindows(pool, Grid(16, 16), [manager], StepTime())
    requests = requests_of_the_same_tokens()
    manager.allocate_new_blocks("first", 300, 300)
    windows.keep(requests[""], RequestState(), [208, 256])
    finds = {name for name, request in requests.items() if windows.keys_at(request, 208)}
    assert finds == {"", "nothing"} == {name for name, request in requests.items() if windows.keys_at(request, 256)}
    assert not windows.keys_at(requests[""], 176)  # rows are there, and no key of that place
