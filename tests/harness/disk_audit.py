"""States on disk by vLLM's own offloading scheduler, without an engine: each key and each block read is checked.

A core with a checkpoint directory lives several times on it, and sees the same prompts each time. Its worker is vLLM's
own, but what copies is a model: a block and its row in host memory are copied at any time after the step that names
them was planned, as late as vLLM allows. So is a disk: what is handed to its threads is done in any later step.
Meanwhile files are damaged and swapped, clients leave, and the cache is emptied.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput

from engine_patches.disk import connector, files
from engine_patches.disk.connector import StateScheduler
from engine_patches.disk.files import SUFFIX, StateFiles
from engine_patches.kv_connectors import ALL, transfer_flags
from tests.harness import damaged_files, engine_plugins
from tests.harness.audit import Scene, random_traffic
from tests.harness.audited_core import Core
from tests.harness.modelled_worker import Worker

LIVES = 3

# Of the copies that wait, so many are made in one step; and so many loads before the steps that still run; of what the
# disk's threads have to do, so much.
COPY_SHARE, EARLY_SHARE, TASK_SHARE = 0.4, 0.5, 0.3

# Of all steps, so many see all of that done; a file damaged; the cache emptied, in vain while it is used; what another
# core of a directory has written; a disk hang, and answer again.
DISK_SHARE, DAMAGE_SHARE, RESET_SHARE, REFRESH_SHARE, HANG_SHARE, ANSWER_SHARE = 0.5, 0.2, 0.01, 0.1, 0.2, 0.02

PATIENCE = 20.0  # steps for a disk that hangs

DAMAGES = (*(damaged_files.FILES[name] for name in ("a bit", "the end is missing", "another file")), damaged_files.gone)

FILE_BYTES = 4096 + files.HEADER_BYTES  # of a modelled block: less than a page


class Tasks:
    """A pool of threads that has none: what it is given is done when it is told to, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[None], Callable[[], None]]] = deque()

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """As an executor's."""
        self._waiting.append((Future(), task))
        return self._waiting[-1][0]

    def do(self, share: float, draw: random.Random) -> None:
        """Some of what waits."""
        while self._waiting and draw.random() < share:
            future, task = self._waiting.popleft()
            task()
            future.set_result(None)

    def shutdown(self, wait: bool = True) -> None:
        """As an executor's."""
        self.do(1.0, random.Random(0))


class LateCopies(OffloadingWorker):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Between a core's modelled blocks and the rows of its tier, whenever `draw` says."""

    def __init__(self, contents: dict[int, dict[Any, int]], rows: memoryview, row_bytes: int, draw: random.Random):
        self.blocks_loaded = 0
        self._contents, self._rows, self._row_bytes, self._draw = contents, rows, row_bytes, draw
        self._waiting: dict[int, Callable[[], None]] = {}
        self._done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._waiting[job_id] = lambda: self._store(src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._waiting[job_id] = lambda: self.load(src_spec, dst_spec)
        return True

    def get_finished(self) -> list[Any]:
        """Some of what waits is copied now."""
        self._copy([job for job in self._waiting if self._draw.random() < COPY_SHARE])
        done, self._done = self._done, []
        return [TransferResult(job, True, 1, 1.0) for job in done]

    def wait(self, job_ids: Collection[int]) -> None:
        self._copy([job for job in self._waiting if job in job_ids])

    def shutdown(self) -> None: ...

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._done)

    def load(self, src_spec: Any, dst_spec: Any) -> None:
        """Rows into blocks."""
        for block, row in _pairs(dst_spec, src_spec):
            self._contents[block] = self._content_of(row)
            self.blocks_loaded += 1

    def _store(self, src_spec: Any, dst_spec: Any) -> None:
        for block, row in _pairs(src_spec, dst_spec):
            written = json.dumps(list(self._contents.get(block, {}).items())).encode()
            self._rows[row * self._row_bytes : (row + 1) * self._row_bytes] = written.ljust(self._row_bytes)

    def _content_of(self, row: int) -> dict[Any, int]:
        try:
            return dict(json.loads(bytes(self._rows[row * self._row_bytes : (row + 1) * self._row_bytes])))
        except ValueError:  # nobody wrote it, or a damaged file was believed
            return {}

    def _copy(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            self._waiting.pop(job)()
            self._done.append(job)


def _pairs(blocks: Any, rows: Any) -> list[tuple[int, int]]:
    return list(zip(blocks.block_ids.tolist(), rows.chunk_ids.tolist(), strict=True))


class DiskWorker(Worker):
    """Of an engine with a checkpoint directory."""

    late = True

    counted = ("loaded", "files_refused", "taken", "given_up")

    peer: DiskWorker | None = None  # of another engine on the directory

    def __init__(self, root: Path, draw: random.Random, *, hang_share: float = 0.0) -> None:
        super().__init__()
        self._root, self._draw, self._hang_share = root, draw, hang_share
        self._hangs = False
        self._steps = 0
        self._outputs: deque[KVConnectorOutput] = deque()  # of steps that were computed
        self.written: set[bytes] = set()  # keys

    def start(self) -> None:
        scheduler = self.core.scheduler
        self._states: Any = scheduler.connector.connector_scheduler
        self.tier = self._states._tier
        self._readers, self._writer = self.tier._readers, self.tier._writer = Tasks(), Tasks()
        self._copies = LateCopies(self.contents, self.tier._rows, self.tier.block_size_bytes, self._draw)
        replicated = SimpleNamespace(replicated_layout=False)
        self._offloading = OffloadingConnectorWorker(replicated, scheduler.vllm_config, scheduler.kv_cache_config)
        self._offloading.worker = self._copies
        connector.time = SimpleNamespace(monotonic=lambda: self._steps)  # type: ignore[assignment]
        self._watch()

    def _watch(self) -> None:
        """Count what is read of another engine's, and what is given up."""
        store, states = self.tier._files, self._states
        write, read, forget = store._write, store.read, states._forget

        def noting(path: Path, key: bytes, block: memoryview) -> None:
            write(path, key, block)
            _used_now(path)
            self.written.add(key)

        def counting(key: bytes, into: memoryview) -> None:
            read(key, into)
            _used_now(store._path(key))
            self.core.counts["taken"] += self.peer is not None and key in self.peer.written

        def forgetting(request: Any) -> None:
            self.core.counts["given_up"] += request.request_id in states._gave_up
            forget(request)

        store._write, store.read, states._forget = noting, counting, forgetting

    @property
    def busy(self) -> bool:
        return bool(self._states._stored_from or self._states._offers or self._copies.busy)

    def before_step(self) -> None:
        self._steps += 1
        looks = self.peer is not None and self._draw.random() < REFRESH_SHARE
        self.tier._next_refresh = 0.0 if looks else float("inf")
        self._work_on_disk()
        if self._draw.random() < DAMAGE_SHARE:
            damage(self._root, self._draw)
        if self._draw.random() < RESET_SHARE:
            self.core.scheduler.reset_prefix_cache()

    def _work_on_disk(self) -> None:
        if self._draw.random() < self._hang_share:
            self._hangs = True
        elif self._draw.random() < ANSWER_SHARE:
            self._hangs = False
        share = 1.0 if self._draw.random() < DISK_SHARE else TASK_SHARE
        self._writer.do(share, self._draw)
        if not self._hangs:
            self._readers.do(share, self._draw)

    def planned(self, output: Any) -> None:
        for job in output.kv_connector_metadata.load_jobs.values():
            if self.core.overlap and self._draw.random() < EARLY_SHARE:
                self._copies.load(job.src_spec, job.dst_spec)

    def compute(self, output: Any) -> dict[str, list[int]]:
        meta = output.kv_connector_metadata
        self._offloading.handle_preemptions(meta)
        self._offloading.start_kv_transfers(meta)
        sampled = super().compute(output)
        self._offloading.prepare_store_kv(meta)
        _, received = self._offloading.get_finished(output.finished_req_ids)
        told = self._offloading.build_connector_worker_meta()
        self._outputs.append(KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=told))
        return sampled

    def connector_output(self) -> KVConnectorOutput:
        return self._outputs.popleft()

    def reported(self, output: Any, answers: Any) -> None:
        self.core.counts["files_refused"] += sum(self.core.scheduler.seamark.counters.take().files_refused.values())

    def answer(self) -> None:
        """The disk hangs no more."""
        self._hangs, self._hang_share = False, 0.0

    def close(self) -> None:
        self.core.counts["loaded"] += self._copies.blocks_loaded
        self._states.shutdown()


class SharingWorker(DiskWorker):
    """Of an engine that lets another one on its directory step, too."""

    peer: DiskWorker

    @property
    def busy(self) -> bool:
        return super().busy or self.peer.core.busy

    def before_step(self) -> None:
        self.peer.core.step()
        super().before_step()


class SharingCore(Core):
    """One that gives half of its requests to another one, too."""

    def request(self, *arguments: Any, **more: Any) -> Any:
        """As of any core."""
        if self.worker._draw.random() < 0.5:
            self.worker.peer.core.request(*arguments, **more)
        return super().request(*arguments, **more)


_uses = itertools.count(1)


def _used_now(path: Path) -> None:
    """Times of files count their uses here: a clock's ticks are too coarse to tell them apart."""
    number = next(_uses)
    with suppress(FileNotFoundError):
        os.utime(path, ns=(number, number))


def damage(root: Path, draw: random.Random) -> None:
    """Something that happens to files: a bit, a length, one in place of another, one gone."""
    paths = sorted(root.rglob(f"*{SUFFIX}"))
    if len(paths) > 1:
        path, other = draw.sample(paths, 2)
        with suppress(FileNotFoundError, ValueError):  # it is empty already, or gone now
            draw.choice(DAMAGES)(draw, path, other)
            _used_now(path)


def free_at_once() -> None:
    """Free blocks before they are stored."""
    build = StateScheduler._build_partial_tail_store_jobs

    def freed(self: Any, scheduler_output: Any) -> dict[int, Any]:
        jobs: dict[int, Any] = build(self, scheduler_output)
        for job in jobs:
            self._pool.free_blocks(self._stored_from.pop(job))
        return jobs

    StateScheduler._build_partial_tail_store_jobs = freed


def believe_unread() -> None:
    """Believe every file."""

    def read(self: Any, path: Path, key: bytes, into: memoryview) -> None:
        content = path.read_bytes()[files.HEADER_BYTES :]
        into[: len(content)] = content

    StateFiles._read = read


DEFECTS = {"at once": free_at_once, "unchecked": believe_unread}


def connector_of(root: Path, rows: int, files_bound: int) -> dict[str, Any]:
    """Of a `Core`: `rows` of host memory before a directory of at most so many files."""
    transfer: dict[str, Any] = json.loads(transfer_flags(str(root), files_bound * FILE_BYTES, ALL)[1])
    transfer["kv_connector_extra_config"]["staging_rows"] = rows
    connector.PATIENCE = PATIENCE
    return transfer


def cores(
    model: str, kind: str, root: Path, draw: random.Random, rows: int = 60, files_bound: int = 400, **options: Any
) -> list[Core]:
    """Of a `kind`: "alone", "sharing" the directory, before a "hanging" disk; the one that gets the traffic first.

    `rows`: of host memory; `files_bound`: files that the directory may hold; `options`: of `Core`.
    """
    options["connector"] = connector_of(root, rows, files_bound)
    if kind != "sharing":
        return [Core(model, worker=DiskWorker(root, draw, hang_share=HANG_SHARE * (kind == "hanging")), **options)]
    one, other = SharingWorker(root, draw), DiskWorker(root, draw)
    one.peer, other.peer = other, one
    return [SharingCore(model, worker=one, **options), Core(model, worker=other, **options)]


def play(core: Core, seed: int, life: int, chats: int) -> None:
    """Traffic; then the cache is emptied as soon as no request runs, whatever is still being stored; and more."""
    random_traffic(core, seed, chats)
    core.worker.answer()  # the cache cannot be emptied while a load runs
    for _ in range(4000):
        if not core.scheduler.has_unfinished_requests() and core.reset():
            break
        core.step()
    else:
        core.errors.append("the cache cannot be emptied")
    random_traffic(core, seed + 1000 * (life + 1), chats // 4)
    core.drain()


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`wanted["kind"]` and `options`: see `cores`."""
    engine_plugins.loads_always_pay()  # a stand-in's steps take no time
    for seed in wanted["seeds"]:
        draw = random.Random(-seed)
        with tempfile.TemporaryDirectory(prefix="seamark-audit-") as name:
            for life in range(LIVES):
                made = cores(model, wanted.get("kind", "alone"), Path(name), draw, **options)
                yield Scene(f"seed {seed}, life {life}", made, partial(play, made[0], seed, life, wanted["chats"]))
