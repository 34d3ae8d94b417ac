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
from engine_patches.scheduler.draft_windows import HEALED, HELD, ZEROED, DraftWindows
from engine_patches.scheduler.planner import Grid, RequestState
from engine_patches.scheduler.step_time import ENOUGH, StepTime

ROWS = dict(block_size=64, num_kv_heads=1, head_size=1, dtype=torch.float32)

WINDOW = SlidingWindowSpec(**ROWS, sliding_window=100)

TARGET = ["model.layers.3.self_attn.attn"]

LAYERS = 48  # of the target


def cache(*groups: tuple[list[str], Any], states: bool = True) -> KVCacheConfig:
    """Of a model with these attention groups, and recurrent layers if there are `states`."""
    made = [KVCacheGroupSpec(names, spec) for names, spec in groups]
    if states:
        mamba = MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
        made.append(KVCacheGroupSpec(["model.layers.0.mixer"], mamba))
    return KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=made)


def left_out(config: KVCacheConfig, drafts: object = object()) -> list[bool]:
    """Of each group, whether the lookup passes over it."""
    model = SimpleNamespace(get_num_layers=lambda _: LAYERS)
    draft_windows.leave_out(
        config, SimpleNamespace(speculative_config=drafts, model_config=model, parallel_config=None)
    )
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


def test_nothing_is_left_out_where_zeros_would_be_somebody_s_rows_or_vllm_asks_all_groups(monkeypatch):
    window = (["mtp.layers.0.attn"], of_a_head())
    assert not any(left_out(cache(window, states=False)))  # new blocks are not zeroed
    assert not any(left_out(cache(window), drafts=None))
    monkeypatch.setattr(draft_windows, "can_be_left_out", lambda: False)
    assert not any(left_out(cache(window)))


class Hits:
    """A cache in which a request of 400 tokens has states at some places, and its head's rows at some of these."""

    def __init__(self, states: tuple[int, ...], rows: tuple[int, ...]) -> None:
        self.pool = BlockPool(40, enable_caching=True, hash_block_size=16)
        manager = SlidingWindowManager(
            draft_windows.left_out_spec()(**ROWS, sliding_window=100),
            block_pool=self.pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=64,
        )
        self.step_time = StepTime()
        self.windows = DraftWindows(self.pool, Grid(16, 16), [manager], self.step_time)
        init_none_hash(sha256)
        self.request = self.another("first")
        manager.allocate_new_blocks("first", 400, 400)
        self.blocks = list(manager.req_to_blocks["first"])
        self.windows.keep(self.request, RequestState(), rows)
        self.states, self.state = states, RequestState()
        keys = SimpleNamespace(state_key=lambda request, position: b"%d" % position, attention=())
        self.checkpoints = SimpleNamespace(
            state_of=lambda request: self.state,
            states=SimpleNamespace(keys=keys, unwritten={}, windows=self.windows),
            drafts=SimpleNamespace(admits=lambda request: True),
        )
        self.cache = SimpleNamespace(
            seamark=self.checkpoints,
            _null_block=self.pool.null_block,
            empty_kv_cache_blocks="none",
            coordinator=SimpleNamespace(find_longest_cache_hit=self._longest),
            create_kv_cache_blocks=lambda computed: computed,
        )

    def another(self, name: str, **options: Any) -> Request:
        """A request of the same tokens."""
        hasher = get_request_block_hasher(16, sha256)
        return Request(name, list(range(400)), SamplingParams(max_tokens=200), None, block_hasher=hasher, **options)

    def _longest(self, hashes: Any, at_most: int) -> tuple[Any, int, int]:
        hit = max((state for state in self.states if state <= at_most), default=0)
        return SimpleNamespace(blocks=[[]]), hit, 0

    def found(self, ours: bool = True) -> tuple[Any, int, Any]:
        """The blocks of the head's rows, the hit, and what became of the window."""
        longest = self._longest(None, 399)
        self.checkpoints.drafts.admits = lambda request: ours
        blocks, hit, _ = draft_windows.put_rows_into_hits(lambda *_: longest)(self.cache, self.request)
        return blocks if blocks == "none" else blocks.blocks[0], hit, self.state.window


@pytest.mark.parametrize(
    ("states", "rows", "ours", "blocks", "found"),
    [
        ((208, 320), (208, 320), True, ["null", "null", "null", 3, 4], (320, HELD, 0, 0)),
        ((208,), (208,), True, ["null", 1, 2, 3], (208, HELD, 0, 0)),  # rows up to a place inside a block
        ((), (), True, [], (0, "", 0, 0)),
        ((96, 320), (), True, [], (96, HEALED, 320, 96)),  # given up for a shorter one that makes the rows anew
        ((96, 320), (96,), True, [0, 1], (96, HEALED, 320, 0)),  # which has its own
        # What vLLM alone lets resume is resumed where rows are held, and nowhere else.
        ((96, 208, 320), (208,), False, ["null", 1, 2, 3], (208, "", 0, 0)),
        ((96, 320), (), False, [], (0, "", 0, 0)),
        ((208, 272, 320), (208,), False, ["null", 1, 2, 3], (208, "", 0, 0)),
        ((96, 208, 272, 320), (96,), False, "none", (0, "", 0, 0)),  # no more than two shorter hits are looked up
    ],
)
def test_a_hit_takes_the_rows_that_are_held_over_or_gives_way_to_one_that_makes_them_anew(
    monkeypatch, states, rows, ours, blocks, found
):
    monkeypatch.setattr(draft_windows, "MAX_LOOKUPS", 2)
    hits = Hits(states, rows)
    hits.state.window, hits.state.heals, hits.state.drafts_from = HEALED, 7, 7  # of an earlier look
    told, hit, window = hits.found(ours)
    expected = [hits.pool.null_block if each == "null" else hits.blocks[each] for each in blocks if blocks != "none"]
    assert told == (blocks if blocks == "none" else expected)
    assert (hit, window) == found[:2] and (not ours or (hits.state.heals, hits.state.drafts_from) == found[2:])


def test_a_window_is_healed_once_and_again_when_it_was_found_and_lost(monkeypatch):
    hits = Hits((96, 320), ())

    def admitted(window: str, name: bytes = b"320") -> tuple[int, str]:
        """What is found once a request has begun so."""
        hits.state.window = window
        hits.windows.admitted(hits.state, name)
        return hits.found()[1:]

    assert hits.found()[1:] == (96, HEALED)
    assert admitted(HEALED) == (320, ZEROED) and hits.state.drafts_from == 320
    assert admitted(ZEROED) == (320, ZEROED), "it began on zeros: nothing is known anew"
    assert admitted(HELD) == (96, HEALED)
    assert admitted(HEALED) == (320, ZEROED)
    hits.windows.clear()
    assert hits.found()[1:] == (96, HEALED)
    hits.windows._healed.most = 1
    assert admitted(HEALED) == (320, ZEROED)
    assert admitted(HEALED, b"another") == (96, HEALED), "the one that was healed longest ago is forgotten"


def test_where_rows_cost_more_than_zeros_do_a_hit_is_kept_without_them():
    hits = Hits((96, 320), ())
    for _ in range(ENOUGH):  # a pass costs no more than a token
        hits.step_time.step_took(1, 0.001)
        hits.step_time.step_took(1000, 0.5)
    assert hits.found()[1:] == (320, ZEROED) and hits.state.drafts_from == 320


def test_rows_behind_zeros_or_before_what_is_there_get_no_key():
    hits = Hits((), ())
    kept = hits.windows.keep(hits.request, RequestState(drafts_from=193), [256, 320])
    assert list(kept) == [] and not hits.windows.keys_at(hits.request, 320)
    kept = hits.windows.keep(hits.request, RequestState(drafts_from=192), [256, 320, 464])
    assert list(kept) == [320] and not hits.windows.keys_at(hits.request, 256)
    assert [block.block_id for block, _ in kept[320]] == [block.block_id for block in hits.blocks[3:5]]
    assert tuple(key for _, key in kept[320]) == hits.windows.keys_at(hits.request, 320)


def test_another_salt_adapter_or_image_finds_no_row():
    hits = Hits((), (208, 256))
    for position in (208, 256):
        assert hits.windows.keys_at(hits.another("second"), position)
        for others in (
            {"cache_salt": "other"},
            {"lora_request": LoRARequest("adapter", 1, "/nowhere")},
            {"mm_features": [MultiModalFeatureSpec(None, "image", "a boat", PlaceholderRange(offset=20, length=10))]},
        ):
            assert not hits.windows.keys_at(hits.another("second", **others), position)
    assert not hits.windows.keys_at(hits.request, 176)  # rows are there, and no key of that place
