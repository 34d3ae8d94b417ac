"""vLLM's host memory between cache and disk: as it is on a GPU, and with plain copies on a CPU, which it leaves out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

_PAGE = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT


class PlainCopies(OffloadingWorker):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Copies blocks of a cache in host memory to rows of host memory and back, each before its call returns."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._cache = [each.tensor for each in kv_caches.tensors]
        self._rows = [region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors]
        self._parts = kv_caches.group_data_refs  # by cache group: the tensors that hold its layers
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Collection[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._cache, self._rows = [], []
        self._region.cleanup()

    def _copy(self, job_id: int, blocks: Any, rows: Any, *, is_store: bool) -> bool:
        began, num_bytes = time.perf_counter(), 0
        pairs = zip(blocks.block_ids.tolist(), rows.chunk_ids.tolist(), strict=True)
        for parts, size in zip(self._parts, blocks.group_sizes, strict=True):
            for (block, row), part in itertools.product(itertools.islice(pairs, size), parts):
                in_cache = self._cache[part.tensor_idx][block, : part.page_size_bytes]
                in_row = self._rows[part.tensor_idx][row, : part.page_size_bytes]
                source, target = (in_cache, in_row) if is_store else (in_row, in_cache)
                target.copy_(source)
                num_bytes += part.page_size_bytes
        self._done.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - began))
        return True


class CheckpointSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Rows of host memory, as many as `staging_rows` says, between the cache and a directory."""

    def __init__(self, config: Any) -> None:
        # vLLM takes bytes, and makes of them rows of one block of every worker.
        row = -(-config.worker_kv_bytes_per_block * config.parallel.world_size // _PAGE) * _PAGE
        config.extra_config["cpu_bytes_to_use"] = config.extra_config["staging_rows"] * row
        super().__init__(config)
        self._copies: PlainCopies | None = None

    @property
    def _scheduler_mmap(self) -> Any:
        """vLLM's: the scheduler's view of the rows, which it opens before it makes the tiers behind them."""
        return self._region

    @_scheduler_mmap.setter
    def _scheduler_mmap(self, region: Any) -> None:
        self._region = region
        # All workers have mapped the file by now. Without a name it goes with the last of them, however that ends, and
        # whatever a tier does at its start; vLLM's own removal does not survive SIGKILL.
        if region is not None and not region._creator:
            with suppress(FileNotFoundError):
                Path(region.mmap_path).unlink()

    def get_worker(self, kv_caches: Any) -> Any:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._copies is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copies = PlainCopies(kv_caches, region)
        return self._copies
