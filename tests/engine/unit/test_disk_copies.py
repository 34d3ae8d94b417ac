"""The rows between cache and disk: what is copied where, and that their name goes before anything that may hang."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering import spec as tiering

from engine_patches.disk.copies import CheckpointSpec

ROWS, ROW = 2, 4096


class Stopped(BaseException):
    """What ends a start in the middle."""


def test_the_map_has_no_name_when_the_tiers_behind_it_are_made(monkeypatch):
    engine = f"seamark-test-{uuid.uuid4().hex}"
    workers = SharedOffloadRegion(engine, ROWS, 0, ROW, ROW)
    path, named = Path(workers.mmap_path), []

    def hangs(*arguments: Any) -> Any:
        named.append(path.exists())
        raise Stopped

    monkeypatch.setattr(tiering.SecondaryTierFactory, "create_secondary_tier", hangs)
    spec = CheckpointSpec.__new__(CheckpointSpec)
    spec._manager, spec.extra_config, spec.secondary_tier_configs, spec._engine_id = None, {}, [{}], engine
    spec.num_chunks, spec.kv_bytes_per_chunk, spec.cpu_page_size_per_worker = ROWS, ROW, ROW
    spec.eviction_policy, spec.cache_policy_module_path = "lru", None
    spec.kv_events_config = SimpleNamespace(enable_kv_cache_events=False)
    try:
        assert path.exists()
        with pytest.raises(Stopped):
            spec.get_manager()
        assert named == [False]
        spec._scheduler_mmap.base_tensor[5] = 7
        assert workers.base_tensor[5] == 7  # the memory is the same, whatever has become of its name
    finally:
        path.unlink(missing_ok=True)
