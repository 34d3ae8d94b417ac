"""vLLM's host memory between cache and disk, and a tier of `StateFiles` behind it, known without asking a disk.

The tier's methods run on the scheduler's thread and only hand work over; its results come with `get_finished_jobs`.
Nothing that a disk does may reach the engine as an error: what cannot be read is a miss, what cannot be written is not
there.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingWorker, RequestOffloadingContext, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from engine_patches.disk.files import NOT_WRITTEN, UNREADABLE, LoadCost, NotOurs, RefusedFile, StateFiles
from engine_patches.settings import logger

READERS = 4  # threads

# Seconds between two looks at what other workers have written, and at how fast the disk is; and for which nothing is
# offered to a disk that has not taken something.
REFRESH_SECONDS = 30.0

# A start waits so long for the directory, its lock and the files that are read first: longer than for the lock alone.
START_SECONDS = 30.0

# Files read at the start and with each of those looks, so that no request has to find out that the disk is slow.
PROBES = 3

_PAGE = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT


class _Done(NamedTuple):
    """A finished task, as it comes back from its thread."""

    result: JobResult | None = None
    attempted: Iterable[bytes] = ()  # keys that were to be stored
    stored: Iterable[bytes] = ()
    gone: Sequence[bytes] = ()
    known: dict[bytes, None] | None = None  # all keys on disk; None: not looked
    reasons: Sequence[str] = ()  # of files that were refused
    written: int = 0  # bytes
    loads: tuple[tuple[int, float], ...] = ()  # bytes, seconds
    error: str = ""


class CheckedFiles(SecondaryTierManager):  # type: ignore[misc]  # vLLM is untyped to mypy
    """A directory of checked files behind vLLM's rows in host memory."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        identity: str,
        max_bytes: int,
        backpressure_detector: Any = None,
    ) -> None:
        """`identity`: hex of `connector.identity_of`, "" if unknown; `max_bytes`: of all files in `root_dir`."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.cost = LoadCost()
        self.refused: Counter[str] = Counter()  # files by reason, until `take_counts`
        self.bytes_written = 0  # until `take_counts`
        self.keys_in_use: Callable[[], Iterable[bytes]] = tuple  # whose files are not to make room for others
        self._files = StateFiles(Path(root_dir), bytes.fromhex(identity), self.block_size_bytes, max_bytes)
        self._rows = primary_kv_view.cast("B")
        self._index: dict[bytes, None] = {}
        self._being_written: Counter[bytes] = Counter()  # keys, by jobs
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, "seamark-disk-read")
        # One: writers wait for the directory's lock anyway, and what it reports comes in the order it happened in.
        self._writer = ThreadPoolExecutor(1, "seamark-disk-write")
        self._running: set[Future[None]] = set()
        self._warned: set[str] = set()
        self._next_refresh = time.monotonic() + REFRESH_SECONDS
        self._no_stores_until = 0.0
        # What is refused now stays refused: nobody could say what is in a directory that was not made sure of.
        self.usable = bool(identity) and self._open()
        if self.usable:
            logger.info("seamark: %d blocks of states in %s", len(self._index), root_dir)

    def holds(self, key: bytes) -> bool:
        """Whether there is a file for a key, as far as this process knows."""
        return key in self._index

    def is_written(self, key: bytes) -> bool:
        return key in self._being_written

    @property
    def takes_stores(self) -> bool:
        """Whether it is worth while to give it something: it is usable, and has not failed to take the last one."""
        return self.usable and time.monotonic() >= self._no_stores_until

    @property
    def bytes_held(self) -> int:
        return len(self._index) * self._files.file_bytes

    def take_counts(self) -> tuple[Counter[str], int]:
        """Files refused by reason, and bytes written, since the last call."""
        counts = self.refused, self.bytes_written
        self.refused, self.bytes_written = Counter(), 0
        return counts

    # What vLLM calls.

    def lookup(self, key: Any, req_context: Any) -> Any:
        return LookupResult.HIT if key in self._index else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def submit_store(self, job_metadata: Any) -> None:
        rows = self._rows_of(job_metadata)
        self._being_written.update(rows.keys())
        self._submit(self._writer, lambda: self._store(job_metadata.job_id, rows))

    def submit_load(self, job_metadata: Any) -> None:
        rows = self._rows_of(job_metadata)
        began = time.monotonic()
        self.cost.load_began(job_metadata.job_id, len(rows) * self.block_size_bytes)
        self._submit(self._readers, lambda: self._load(job_metadata.job_id, rows, began))

    def get_finished_jobs(self) -> Iterable[Any]:
        if self.usable and time.monotonic() >= self._next_refresh:
            self._next_refresh = time.monotonic() + REFRESH_SECONDS
            in_use = list(self.keys_in_use())
            self._submit(self._writer, lambda: self._refresh(in_use))
            self._submit(self._readers, self._probe)
        results = []
        with suppress(queue.Empty):
            while True:
                done = self._done.get_nowait()
                self._apply(done)
                if done.result is not None:
                    results.append(done.result)
        return results

    def drain_jobs(self) -> None:
        wait(self._running)

    def shutdown(self) -> None:
        """End the threads, which may still have something to write."""
        for pool in (self._writer, self._readers):
            pool.shutdown(wait=True)

    # What is done in threads, and what comes of it.

    def _rows_of(self, job: Any) -> dict[bytes, memoryview]:
        size, pairs = self.block_size_bytes, zip(job.keys, map(int, job.chunk_ids), strict=True)
        return {bytes(key): self._rows[chunk * size : (chunk + 1) * size] for key, chunk in pairs}

    def _submit(self, pool: ThreadPoolExecutor, task: Callable[[], _Done]) -> None:
        future = pool.submit(lambda: self._done.put(self._try(task)))
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    @staticmethod
    def _try(task: Callable[[], _Done]) -> _Done:
        try:
            return task()
        except OSError as error:
            return _failed(error, UNREADABLE)

    def _apply(self, done: _Done) -> None:
        if done.known is not None:
            self._index = done.known
        for key in done.gone:
            self._index.pop(key, None)
        self._index.update((key, None) for key in done.stored)
        self._being_written -= Counter(done.attempted)
        if NOT_WRITTEN in done.reasons:
            self._no_stores_until = time.monotonic() + REFRESH_SECONDS
        self.refused.update(done.reasons)
        self.bytes_written += done.written
        if done.result is not None:
            self.cost.load_ended(done.result.job_id)
        for num_bytes, seconds in done.loads:
            self.cost.load_took(num_bytes, seconds)
        kind = done.error.partition(":")[0]
        if kind and kind not in self._warned:
            self._warned.add(kind)
            logger.warning("seamark: the checkpoint directory %s; serving goes on without it", done.error)

    def _open(self) -> bool:
        """Whether the directory is, or could be made, this user's alone, and was read within `START_SECONDS`.

        In a thread that nobody waits for: a disk that hangs must not keep an engine from its start, or its end.
        """

        def prepare() -> _Done:
            busy = _Done()
            try:
                self._files.prepare()
            except TimeoutError as error:
                busy = _failed(error)
            probed = self._probe()
            reasons = (*busy.reasons, *probed.reasons)
            return probed._replace(known=self._files.keys(), reasons=reasons, error=busy.error)

        opened: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        threading.Thread(target=lambda: opened.put(self._try(prepare)), name="seamark-disk-open", daemon=True).start()
        try:
            done = opened.get(timeout=START_SECONDS)
        except queue.Empty:
            done = _Done(reasons=[UNREADABLE], error=f"cannot be read: no answer for {START_SECONDS:.0f} seconds")
        self._apply(done)
        return done.known is not None

    def _refresh(self, in_use: Iterable[bytes]) -> _Done:
        self._files.touch(in_use)
        return _Done(known=self._files.keys())

    def _probe(self) -> _Done:
        """Read the files used last, into nothing: how long does that take?"""
        row = memoryview(bytearray(self.block_size_bytes))
        done = [self._read({key: row}, time.monotonic()) for key in list(self._files.keys())[-PROBES:]]
        return _Done(
            gone=[key for each in done for key in each.gone],
            reasons=[reason for each in done for reason in each.reasons],
            loads=tuple(load for each in done for load in each.loads),
        )

    def _store(self, job_id: int, rows: dict[bytes, memoryview]) -> _Done:
        failed, keys = JobResult(job_id=job_id, success=False), tuple(rows)
        if not self.usable:
            return _Done(failed, keys, reasons=[NOT_WRITTEN])
        try:
            written = self._files.write(rows)
        except OSError as error:
            return _failed(error)._replace(result=failed, attempted=keys)
        done = JobResult(job_id=job_id, success=True, transfer_bytes=written.num_bytes)
        return _Done(done, keys, written.stored, written.evicted, written=written.num_bytes)

    def _load(self, job_id: int, rows: dict[bytes, memoryview], began: float) -> _Done:
        done = self._read(rows, began)
        num_bytes, seconds = done.loads[0] if done.loads else (0, time.monotonic() - began)
        result = JobResult(
            job_id=job_id,
            success=not done.gone,
            successful_keys=tuple(key for key in rows if key not in done.gone) or None,
            transfer_time=seconds,
            transfer_bytes=num_bytes,
        )
        return done._replace(result=result)

    def _read(self, rows: dict[bytes, memoryview], began: float) -> _Done:
        gone, reasons = [], []
        for key, row in rows.items():
            try:
                self._files.read(key, row)
            except FileNotFoundError:  # another worker needed the room
                gone.append(key)
            except RefusedFile as refused:
                gone.append(key)
                reasons.append(refused.reason)
        num_bytes = (len(rows) - len(gone)) * self.block_size_bytes
        loads = ((num_bytes, time.monotonic() - began),) if num_bytes else ()
        return _Done(gone=gone, reasons=reasons, loads=loads)


def _failed(error: OSError, reason: str = NOT_WRITTEN) -> _Done:
    words = "cannot be written to" if reason == NOT_WRITTEN else "cannot be read"
    return _Done(reasons=[reason], error=f"{'is not used' if isinstance(error, NotOurs) else words}: {error}")


class PlainCopies(OffloadingWorker):  # type: ignore[misc]  # vLLM is untyped to mypy
    """On a CPU, which vLLM leaves out: blocks are copied to rows and back, each before its call returns."""

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
