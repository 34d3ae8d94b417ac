"""The connector's half in the scheduler, between vLLM's own bookkeeping and a directory in memory.

What is offered to it, and what a request finds. That each block is given back and none is wrong: test_traffic.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.outputs import KVConnectorOutput

from engine_patches.disk import connector
from engine_patches.disk.connector import SeamarkConnector, StateScheduler
from engine_patches.footprint import LOCAL_HIT
from engine_patches.forward.loaded_weights import Weights
from engine_patches.kv_connectors import ALL
from engine_patches.scheduler.cache_keys import HeldKeys, key_at
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.planner import Grid
from engine_patches.scheduler.states import States

UNIT, BLOCK, BLOCKS = 16, 64, 60  # tokens, tokens, blocks

RECURRENT, ATTENTION = (0, 2), 1

ROW_BYTES = 1000

# That a prompt token takes: where it is known, and until it is. Seconds.
TOKEN_SECONDS, ASSUMED_TOKEN_SECONDS = 1.0, 1e-4

PATIENCE = 5.0  # seconds that a request waits for a load


class Disk:
    """The tier: what is on disk follows from its sets."""

    block_size_bytes, bytes_held = ROW_BYTES, 7 * ROW_BYTES

    def __init__(self) -> None:
        self.takes_stores = True
        self.on_disk: set[bytes] = set()
        self.seconds = 0.0  # of a load
        self.asked_for: list[int] = []  # bytes
        self.keys_in_use: Any = tuple
        self.cost = self

    def holds(self, key: bytes) -> bool:
        return key in self.on_disk

    def is_written(self, key: bytes) -> bool:
        return False

    def submit_store(self, keys: list[bytes]) -> None: ...

    def pays(self, num_bytes: int, prefill_seconds: float) -> bool:
        self.asked_for.append(num_bytes)
        return self.seconds < prefill_seconds

    def take_counts(self) -> tuple[dict[str, int], int]:
        return {"checksum": 2}, 3 * ROW_BYTES


class Rows:
    """vLLM's manager of host memory: a row for each key, which is ready once it was copied."""

    def __init__(self, disk: Disk) -> None:
        self.secondary_tiers = [disk]
        self.primary_tier = SimpleNamespace(_policy=self)
        self.ready: dict[bytes, bool] = {}
        self.looked_up: list[bytes] = []

    def get(self, key: bytes) -> Any:
        return SimpleNamespace(is_ready=self.ready[key]) if key in self.ready else None

    def lookup(self, key: bytes, context: Any) -> LookupResult:
        self.looked_up.append(key)
        (disk,) = self.secondary_tiers
        if key not in self.ready:
            if key not in disk.on_disk:
                return LookupResult.MISS
            self.ready[key] = False
            return LookupResult.RETRY
        return LookupResult.HIT if self.ready[key] else LookupResult.HIT_PENDING

    def come(self) -> None:
        """All that was asked for is there."""
        self.ready = dict.fromkeys(self.ready, True)

    def prepare_store(self, keys: list[bytes], context: Any) -> Any:
        new = [key for key in keys if key not in self.ready]
        self.ready.update(dict.fromkeys(new, False))
        return SimpleNamespace(keys_to_store=new, store_spec=f"{len(new)} rows")

    def complete_store(self, keys: set[bytes], context: Any) -> None:
        self.ready.update(dict.fromkeys(keys, True))

    def create_store_job(self, keys: list[bytes], context: Any) -> list[bytes]:
        return keys

    def on_new_request(self, context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, context: Any) -> None: ...

    def on_schedule_end(self, context: Any) -> None: ...


def caches() -> KVCacheConfig:
    states = MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec([name], spec) for name, spec in (("m", states), ("a", attention), ("n", states))]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def spec_of(manager: Any, keep: str | None) -> Any:
    """A vLLM `OffloadingSpec`."""
    return SimpleNamespace(
        config=SimpleNamespace(groups=[SimpleNamespace(group_id=each, tokens_per_block=BLOCK) for each in range(3)]),
        blocks_per_chunk=1,
        tokens_per_hash=UNIT,
        offload_prompt_only=False,
        extra_config={} if keep is None else {"keep": keep},
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
        get_manager=lambda: manager,
    )


CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
    speculative_config=None,
    parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
)


class Scene:
    """A connector that knows a scheduler's checkpoints, and its cache."""

    def __init__(self, keep: str | None = None, weights: str = "w", *, introduced: bool = True, **states: Any) -> None:
        init_none_hash(sha256)
        self.disk = Disk()
        self.rows = Rows(self.disk)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=UNIT)
        managers = [SimpleNamespace(kv_cache_group_id=group, block_size=BLOCK) for group in range(3)]
        attention = [managers[ATTENTION]] if states.pop("attention", True) else []
        keys = HeldKeys(self.pool, Grid(UNIT, UNIT), [managers[group] for group in RECURRENT], attention)
        self.states = States(keys, 20, **{"in_pass": True, **states})
        self.checkpoints = Checkpoints(Grid(UNIT, UNIT), BLOCK, self.states, weights=Weights(weights))
        self.scheduler = StateScheduler(spec_of(self.rows, keep), CONFIG, caches())
        if introduced:
            self.scheduler.introduce(self.checkpoints, self.pool)

    def request(self, name: str = "r", tokens: int = 200, prompt: int = 0, **more: Any) -> Any:
        hashes = [b"%03d,%02d" % (prompt, unit) * 5 for unit in range(tokens // UNIT)]
        parts = {"lora_request": None, "kv_transfer_params": None, "kv_hints": None, "skip_reading_prefix_cache": False}
        made = SimpleNamespace(
            request_id=name,
            block_hashes=hashes,
            num_prompt_tokens=tokens,
            num_tokens=tokens,
            is_finished=lambda: False,
            **{**parts, **more},
        )
        self.scheduler.on_new_request(made)
        return made

    def cache(self, request: Any, position: int) -> dict[bytes, Any]:
        """Let the request's state at a position be in the cache, with the rows before it; blocks by key."""
        keys = list(self.states.keys.keys_of(request, position))
        blocks = self.pool.get_new_blocks(len(keys))
        for key, block in zip(keys, blocks, strict=True):
            self.pool.cached_block_hash_to_block.insert(key, block)
        return dict(zip(keys, blocks, strict=True))

    def step(self) -> Any:
        """What a planned step has the worker do."""
        nothing = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        return self.scheduler.build_connector_meta(
            SimpleNamespace(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=nothing,
                preempted_req_ids=None,
                kv_cache_block_copies=None,
                finished_req_ids=set(),
            )
        )

    def done(self, *jobs: int) -> None:
        """The worker has done them."""
        told = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))

    def found(self, request: Any, local: int = 0, **more: Any) -> int | None:
        """Tokens past `local` that can be loaded."""
        count, _ = self.scheduler.get_num_new_matched_tokens(request, local, **more)
        return count

    def keys(self, request: Any, position: int) -> list[bytes]:
        return list(self.states.keys.keys_of(request, position))

    def on_disk(self, request: Any, *positions: int) -> None:
        """Let the request's states at these positions have files."""
        self.disk.on_disk.update(key for position in positions for key in self.keys(request, position))


def held(blocks: dict[bytes, Any]) -> set[int]:
    """How many hold each of these blocks."""
    return {block.ref_cnt for block in blocks.values()}


def test_when_the_cache_is_emptied_all_that_waits_is_let_go_and_nothing_is_stored_or_found():
    scene = Scene()
    request = scene.request()
    other = scene.request("other", prompt=1)
    blocks, copied = scene.cache(request, 144), scene.cache(other, 64)
    scene.scheduler.offer(other, 64)
    (job,) = scene.step().store_jobs
    scene.scheduler.offer(request, 144)
    for _ in range(2):
        scene.scheduler.close("a test")
        assert held(blocks) == {1} and held(copied) == {2}, "only what is being copied stays held"
    scene.done(job)
    assert held(copied) == {1}
    scene.on_disk(request, 144)
    scene.scheduler.offer(request, 144)
    assert scene.step().store_jobs == {} and scene.found(request) == 0


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        *(({"in_pass": False}, {}), ({"attention": False}, {})),  # chunks are cut for states; another cache group
        *(({"weights": ""}, {}), ({"introduced": False}, {})),  # weights, or checkpoints, that nobody knows
        *(({}, {"lora_request": "x"}), ({}, {"prompt_embeds": "x"})),
    ],
)
def test_where_states_cannot_be_kept_nothing_is_offered_or_found(options, asked):
    scene = Scene(ALL, **options)
    request = scene.request(**asked)
    blocks = scene.cache(request, 64)
    scene.scheduler.offer(request, 64)
    assert held(blocks) == {1} and scene.step().store_jobs == {}
    scene.on_disk(request, 64)
    assert (scene.states.store is None) == bool(options)
    if options:
        assert scene.found(request) == 0
        assert scene.disk.keys_in_use() == () and scene.checkpoints.counters.take().file_bytes == 0


@given(data=st.data())
def test_the_deepest_state_that_is_there_in_whole_is_found_within_what_the_step_has_room_for(data):
    """Against a loop over all positions; of rows that the request has already none is needed."""
    scene, tokens = Scene(), data.draw(st.sampled_from([12, 64, 80, 81, 144, 145, 200]))
    local, most = (
        data.draw(st.sampled_from([0, 64] if tokens > 64 else [0])),
        data.draw(st.sampled_from([None, 1, 63, 64, 79, 80, 144, 999])),
    )
    whole = scene.request("of all", 208)
    of_states = {end: scene.keys(whole, end) for end in data.draw(st.sets(st.sampled_from([16, 64, 80, 128, 144])))}
    lost = data.draw(st.sets(st.sampled_from(sorted({key for keys in of_states.values() for key in keys}) or [b""])))
    there = {key for keys in of_states.values() for key in keys} - lost
    in_memory = data.draw(st.sets(st.sampled_from(sorted(there)))) if there else set()
    scene.rows.ready.update(dict.fromkeys(in_memory, True))
    scene.disk.on_disk |= there - in_memory
    end = min(tokens - 1, local + most if most is not None else tokens)  # the prompt's last token is always computed
    expected, needed = 0, []
    for position in range(16, end + 1, 16):
        edges = {*range(local + BLOCK, position + 1, BLOCK), *[position] * bool(position % BLOCK)}
        keys = [key_at(whole, position, UNIT, group) for group in RECURRENT]
        keys += [key_at(whole, edge, UNIT, ATTENTION) for edge in edges]
        if position > local and there.issuperset(keys):
            expected, needed = position - local, keys
    request = scene.request(tokens=tokens)
    comes = not in_memory.issuperset(needed)
    assert scene.found(request, local, max_num_new_tokens=most) == (None if comes else expected)
    assert scene.disk.asked_for == [len(needed) * ROW_BYTES] * (expected > 0)
    scene.rows.come()
    assert scene.found(request, local, max_num_new_tokens=most) == expected


@pytest.mark.parametrize(
    ("known", "seconds", "pays"),
    [
        (True, 79.9 * TOKEN_SECONDS, True),  # of 144 tokens 80 are new
        (True, 80.1 * TOKEN_SECONDS, False),
        (False, 79 * ASSUMED_TOKEN_SECONDS, True),
        (False, 81 * ASSUMED_TOKEN_SECONDS, False),
    ],
)
def test_a_load_has_to_save_more_than_the_time_of_the_tokens_past_the_hit_and_is_counted_once(known, seconds, pays):
    scene = Scene()
    request = scene.request()
    scene.checkpoints.step_time = SimpleNamespace(known=known, seconds=lambda tokens: tokens * TOKEN_SECONDS)
    scene.on_disk(request, 80, 144)
    scene.disk.seconds = seconds
    setattr(request, LOCAL_HIT, 64)
    for _ in range(2):
        assert scene.found(request, 64) == (None if pays else 0)
    assert bool(scene.rows.looked_up) is pays and scene.checkpoints.counters.take().loads_declined == (not pays)


def test_a_load_that_does_not_come_is_given_up_until_the_request_or_its_promise_ends(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(connector, "time", SimpleNamespace(monotonic=lambda: clock.now))
    scene = Scene()
    request = scene.request()
    scene.on_disk(request, 80)
    assert scene.found(request) is None
    scene.scheduler.update_state_after_alloc(request, None, 0)
    clock.now += PATIENCE + 0.1
    assert scene.found(request) is None, "its patience begins anew"
    clock.now += PATIENCE + 0.1
    assert scene.found(request) == 0
    scene.rows.come()
    assert scene.found(request) == 0
    scene.scheduler.request_finished(request)
    assert scene.found(request) == 80


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
def test_a_schedulers_connector_knows_what_its_states_depend_on_and_a_workers_copies(monkeypatch, role):
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"secondary_tiers": [{"type": "CheckedFiles"}]}),
        model_config=SimpleNamespace(max_model_len=1000),
    )
    introduced: list[Any] = []
    scheduler = SimpleNamespace(introduce=lambda *parts: introduced.append(parts))
    monkeypatch.setattr(connector.KVConnectorBase_V1, "__init__", lambda self, *_: None)
    monkeypatch.setattr(connector, "identity_of", lambda *_: b"\x12" * 32)
    monkeypatch.setattr(connector, "build_offloading_config", lambda *_: "config")
    monkeypatch.setattr(connector.OffloadingSpecFactory, "create_spec", {"config": "spec"}.get)
    monkeypatch.setattr(connector, "StateScheduler", lambda spec, *_: {"spec": scheduler}[spec])
    monkeypatch.setattr(connector, "OffloadingConnectorWorker", lambda spec, *_: {"spec": "worker"}[spec])
    found, of_scheduler = SeamarkConnector(config, role, caches()), role is KVConnectorRole.SCHEDULER
    assert (found.connector_scheduler, found.connector_worker) == (
        (scheduler, None) if of_scheduler else (None, "worker")
    )
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert extra["secondary_tiers"] == [{"type": "CheckedFiles"} | ({"identity": "12" * 32} if of_scheduler else {})]
    # 1,000 tokens take 16 blocks in each group; two such prompts, and some more for states.
    assert extra["staging_rows"] == 2 * 16 + 4 * 3
    found.seamark_introduce("checkpoints", "pool")
    assert introduced == [("checkpoints", "pool")] * of_scheduler
