"""The rows between cache and disk: what is copied where, and that their name goes before anything that may hang."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering import spec as tiering

from engine_patches.disk.copies import CheckpointSpec, PlainCopies

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


@pytest.mark.parametrize("creator", [True, False])
def test_only_the_name_of_a_map_that_others_have_made_goes(tmp_path: Path, creator):
    path = tmp_path / "map"
    path.touch()
    spec = CheckpointSpec.__new__(CheckpointSpec)
    spec._scheduler_mmap = None
    spec._scheduler_mmap = SimpleNamespace(_creator=creator, mmap_path=os.fspath(path))
    assert path.exists() == creator
    spec._scheduler_mmap = SimpleNamespace(_creator=False, mmap_path=os.fspath(tmp_path / "gone"))


# Two tensors, of 8 and 4 bytes a block; the first cache group has layers in both, the second in the first one alone, of
# which it takes half.
PAGES = (8, 4)
PARTS = [[(0, 8), (1, 4)], [(0, 4)]]


class Region:
    """Rows in memory of their own, with room to spare in each."""

    def __init__(self, rows: int = 6) -> None:
        self.views: list[Any] = []
        self.rows, self.is_there = rows, True

    def create_next_worker_view(self, page_bytes: int) -> Any:
        self.views.append(torch.full((self.rows, page_bytes + 3), -1, dtype=torch.int8))
        return self.views[-1]

    def cleanup(self) -> None:
        self.is_there = False


def plain_copies(blocks: int = 5) -> tuple[PlainCopies, Region, list[Any]]:
    """A copier, its rows and its cache, whose block n holds n everywhere."""
    tensors = [torch.arange(blocks, dtype=torch.int8)[:, None].repeat(1, size) for size in PAGES]
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=t, page_size_bytes=size) for t, size in zip(tensors, PAGES, strict=True)],
        group_data_refs=[[SimpleNamespace(tensor_idx=n, page_size_bytes=size) for n, size in g] for g in PARTS],
    )
    region = Region()
    return PlainCopies(caches, region), region, tensors


def rows(*numbers: int) -> Any:
    return SimpleNamespace(chunk_ids=torch.tensor(numbers))


def test_rows_are_copied_to_the_blocks_of_each_group_and_nothing_else_is():
    copier, region, (wide, narrow) = plain_copies()
    for view in region.views:
        view[:] = torch.arange(10, 16, dtype=torch.int8)[:, None]
    assert copier.submit_load(8, rows(5, 2), GPULoadStoreSpec([0, 4], (1, 1), (0, 0)))
    assert wide.tolist() == [[15] * 8, [1] * 8, [2] * 8, [3] * 8, [12] * 4 + [4] * 4]
    assert narrow.tolist() == [[15] * 4, [1] * 4, [2] * 4, [3] * 4, [4] * 4]
    assert [(done.job_id, done.transfer_size) for done in copier.get_finished()] == [(8, 8 + 4 + 4)]
