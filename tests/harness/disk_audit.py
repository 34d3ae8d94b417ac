"""States on disk by vLLM's own offloading scheduler, without an engine: each key and each block read is checked.

A core of `scheduler_audit` that is given a checkpoint directory, lives several times on it, and sees the same prompts
each time. Its worker is vLLM's own, but what copies is a model: a block and its row in host memory are copied at any
time after the step that names them was planned, as late as vLLM allows. Meanwhile files are damaged and swapped,
clients leave, and the cache is emptied.

Run as `python -m tests.harness.disk_audit MODEL '{"seeds": [1], "chats": 40, "cores": [{}]}'`, since patching is per
process. Prints JSON.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from engine_patches import ledger
from engine_patches.disk import connector, files
from engine_patches.disk.connector import StateScheduler
from engine_patches.disk.files import SUFFIX, StateFiles
from engine_patches.disk.flags import ALL, transfer_flags
from engine_patches.disk.load_cost import LoadCost
from engine_patches.patches import PATCHES
from tests.harness.scheduler_audit import Core, random_traffic

LIVES = 3

# Of the copies that wait, so many are made in one step; and so many loads before the steps that still run.
COPY_SHARE, EARLY_SHARE = 0.4, 0.5

# Of all steps, so many see their disk jobs done; a file damaged; the cache emptied, in vain while it is used.
DISK_SHARE, DAMAGE_SHARE, RESET_SHARE = 0.5, 0.2, 0.01

# Of all steps, so many see what the other core of a directory has written; a disk hang, and answer again.
REFRESH_SHARE, HANG_SHARE, ANSWER_SHARE = 0.1, 0.2, 0.02

PATIENCE = 0.05  # seconds for a disk that hangs

PATIENT_STEPS = 4000  # for what is under way at the end


class LateCopies(OffloadingWorker):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Between a core's modelled blocks and the rows of its tier, whenever `draw` says."""

    def __init__(self, contents: dict[int, dict[Any, int]], rows: memoryview, row_bytes: int, draw: random.Random):
        self.blocks_loaded = 0
        self._contents, self._rows, self._row_bytes, self._draw = contents, rows, row_bytes, draw
        self._waiting: dict[int, Callable[[], None]] = {}
        self._done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """vLLM's."""
        self._waiting[job_id] = lambda: self._store(src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """vLLM's."""
        self._waiting[job_id] = lambda: self.load(src_spec, dst_spec)
        return True

    def get_finished(self) -> list[Any]:
        """vLLM's; some of what waits is copied now."""
        self._copy([job for job in self._waiting if self._draw.random() < COPY_SHARE])
        done, self._done = self._done, []
        return [TransferResult(job, True, 1, 1.0) for job in done]

    def wait(self, job_ids: Collection[int]) -> None:
        """vLLM's: copied when it returns."""
        self._copy([job for job in self._waiting if job in job_ids])

    def shutdown(self) -> None:
        """vLLM's."""

    @property
    def busy(self) -> bool:
        """Whether anything waits."""
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


class DiskCore(Core):
    """An engine core with a checkpoint directory."""

    def __init__(
        self, model: str, root: Path, draw: random.Random, *, rows: int = 60, files_bound: int = 400, **options: Any
    ) -> None:
        """`rows`: of host memory; `files_bound`: files that the directory may hold."""
        transfer = json.loads(transfer_flags(str(root), files_bound * (4096 + files.HEADER_BYTES), ALL)[1])
        transfer["kv_connector_extra_config"]["staging_rows"] = rows
        super().__init__(model, connector=transfer, **options)
        self._root, self._draw = root, draw
        self._states: Any = self.scheduler.connector.connector_scheduler
        tier = self._tier = self._states._tier
        self.copies = LateCopies(self._contents, tier._rows, tier.block_size_bytes, draw)
        self._worker = OffloadingConnectorWorker(
            SimpleNamespace(replicated_layout=False), self.scheduler.vllm_config, self.scheduler.kv_cache_config
        )
        self._worker.worker = self.copies
        self._uncomputed: deque[Any] = deque()  # steps that were planned
        self._outputs: deque[KVConnectorOutput] = deque()  # of steps that were computed
        self.refused: Counter[str] = Counter()
        self.resets = 0
        self.taken = self.given_up = 0  # see the cores below

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        left = (self._queue, self._uncomputed, self._states._stored_from, self._states._offers, self.copies.busy)
        return bool(self.scheduler.has_unfinished_requests() or any(left))

    def step(self) -> Any:
        """As without a directory; a core that plans ahead computes each step after the next one is planned."""
        self._disturb()
        output = self.scheduler.schedule()
        self._record_meanings()
        self._check_events()
        for job in output.kv_connector_metadata.load_jobs.values():
            if self.overlap and self._draw.random() < EARLY_SHARE:
                self.copies.load(job.src_spec, job.dst_spec)
        self._uncomputed.append(output)
        idle = not output.total_num_scheduled_tokens
        while len(self._uncomputed) > int(self.overlap and not idle):
            planned = self._uncomputed.popleft()
            self._queue.append((planned, self._compute(planned)))
        if not self._uncomputed:
            self._check_keys()
        while self._queue:
            self._report(*self._queue.pop(0))
        return output

    def empty(self) -> None:
        """Empty the cache as soon as no request runs, whatever is still being stored."""
        for _ in range(PATIENT_STEPS):
            if not self.scheduler.has_unfinished_requests() and self.scheduler.reset_prefix_cache():
                self.resets += 1
                return
            self.step()
        self.errors.append("the cache cannot be emptied")

    def end(self) -> None:
        """Step until nothing is under way, and let go of the directory."""
        for _ in range(PATIENT_STEPS):
            if not self.busy:
                break
            self.step()
        else:
            self.errors.append(f"stuck: {self.scheduler.get_request_counts()} running and waiting")
        if self.blocks_in_use():
            self.errors.append(f"{self.blocks_in_use()} blocks are held without a request")
        self._states.shutdown()

    def _disturb(self) -> None:
        if self._draw.random() < DISK_SHARE:
            self._tier.drain_jobs()
        if self._draw.random() < DAMAGE_SHARE:
            damage(self._root, self._draw)
        if self._draw.random() < RESET_SHARE:
            self.scheduler.reset_prefix_cache()

    def _compute(self, output: Any) -> dict[str, list[int]]:
        meta = output.kv_connector_metadata
        self._worker.handle_preemptions(meta)
        self._worker.start_kv_transfers(meta)
        sampled = super()._compute(output)
        self._worker.prepare_store_kv(meta)
        _, received = self._worker.get_finished(output.finished_req_ids)
        told = self._worker.build_connector_worker_meta()
        self._outputs.append(KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=told))
        return sampled

    def _report(self, output: Any, sampled: dict[str, list[int]]) -> None:
        output.seamark_planned_at = float("inf")  # what a stand-in's steps take teaches nothing
        names = list(output.num_scheduled_tokens)
        runner = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=self._outputs.popleft(),
        )
        self.scheduler.update_from_output(output, runner)
        counts = self.scheduler.seamark.counters.take()
        self.refused.update(counts.files_refused)


class SharingCore(DiskCore):
    """One of two engine cores on a directory. It lets the other one step, too, and gives it half of its requests."""

    def __init__(self, model: str, root: Path, draw: random.Random, **options: Any) -> None:
        """As of `DiskCore`, for both."""
        super().__init__(model, root, draw, **options)
        self._other = DiskCore(model, root, draw, **options)
        self._count_taken(self, self._other)
        self._count_taken(self._other, self)

    @property
    def busy(self) -> bool:
        """Whether anything is under way at either."""
        return super().busy or self._other.busy

    def request(self, *arguments: Any, **more: Any) -> Any:
        """As of any core."""
        if self._draw.random() < 0.5:
            self._other.request(*arguments, **more)
        return super().request(*arguments, **more)

    def step(self) -> Any:
        """Each core looks now and then at what the other one has written, which takes a worker half a minute."""
        for core in (self, self._other):
            if self._draw.random() < REFRESH_SHARE:
                core._tier._next_refresh = 0.0
        self._other.step()
        return super().step()

    def end(self) -> None:
        """Of both."""
        super().end()
        self._other.end()
        self.errors += [f"the other core: {error}" for error in self._other.errors]

    def _count_taken(self, reader: DiskCore, writer: DiskCore) -> None:
        """Count in `taken` what one core reads that the other one, living, has written."""
        written: set[bytes] = set()
        write, read = writer._tier._files._write, reader._tier._files.read

        def noting(path: Path, key: bytes, block: memoryview) -> None:
            write(path, key, block)
            written.add(key)

        def counting(key: bytes, into: memoryview) -> None:
            read(key, into)
            self.taken += key in written

        writer._tier._files._write, reader._tier._files.read = noting, counting


class HangingCore(DiskCore):
    """An engine core whose disk gives nothing back for most of the time, and which waits for less than usual."""

    def __init__(self, model: str, root: Path, draw: random.Random, **options: Any) -> None:
        """As of `DiskCore`."""
        super().__init__(model, root, draw, **options)
        connector.PATIENCE = PATIENCE
        self._hangs = True
        self._answers = threading.Event()
        read, forget, states = self._tier._files.read, self._states._forget, self._states

        def late(key: bytes, into: memoryview) -> None:
            self._answers.wait()
            read(key, into)

        def counting(request: Any) -> None:
            self.given_up += request.request_id in states._gave_up
            forget(request)

        self._tier._files.read, states._forget = late, counting

    def step(self) -> Any:
        """Without haste where nothing can be computed."""
        output = super().step()
        if not output.total_num_scheduled_tokens:
            time.sleep(0.001)
        return output

    def empty(self) -> None:
        """The cache is emptied once no load runs, so the disk has to answer."""
        self._hangs = False
        self._answers.set()
        super().empty()

    def _disturb(self) -> None:
        if self._hangs and self._draw.random() < HANG_SHARE:
            self._answers.clear()
        elif self._draw.random() < ANSWER_SHARE:
            self._answers.set()


KINDS = {"alone": DiskCore, "sharing": SharingCore, "hanging": HangingCore}


def damage(root: Path, draw: random.Random) -> None:
    """Something that happens to files: a bit, a length, one in place of another, one gone."""
    paths = sorted(root.rglob(f"*{SUFFIX}"))
    if len(paths) < 2:
        return
    path, other = draw.sample(paths, 2)
    try:
        content = bytearray(path.read_bytes())
        match draw.randrange(4):
            case 0:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
                path.write_bytes(content)
            case 1:
                path.write_bytes(content[: draw.randrange(len(content))])
            case 2:
                path.write_bytes(other.read_bytes())
            case _:
                path.unlink()
    except (FileNotFoundError, ValueError):  # the tier was faster, or it is empty already
        pass


def audited(model: str, seeds: Sequence[int], chats: int, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """What is found with cores of a kind, and these arguments of theirs."""
    found: dict[str, Any] = {"core": options, "errors": [], "loaded": 0, "hit_tokens": 0, "refused": 0, "resets": 0}
    found |= {"taken": 0, "given_up": 0}
    for seed in seeds:
        draw = random.Random(-seed)
        with tempfile.TemporaryDirectory(prefix="seamark-audit-") as name:
            for life in range(LIVES):
                core = KINDS[kind](model, Path(name), draw, **options)
                try:
                    random_traffic(core, seed, chats)
                    core.empty()
                    random_traffic(core, seed + 1000 * (life + 1), chats // 4)
                    core.end()
                except AssertionError as error:  # vLLM's own, of what no engine survives
                    core.errors.append(f"the engine dies: {error}")
                found["errors"] += [f"seed {seed}, life {life}: {error}" for error in core.errors[:3]]
                found["loaded"] += core.copies.blocks_loaded
                found["hit_tokens"] += sum(core.hits.values())
                found["refused"] += sum(core.refused.values())
                found["resets"] += core.resets
                found["taken"] += core.taken
                found["given_up"] += core.given_up
                found["inside_pass"] = core.scheduler.seamark.writes_in_forward
    return found


def _plant(defect: str) -> None:
    if defect == "at once":
        build = StateScheduler._build_partial_tail_store_jobs

        def freed(self: Any, scheduler_output: Any) -> dict[int, Any]:
            jobs: dict[int, Any] = build(self, scheduler_output)
            for job in jobs:
                self._pool.free_blocks(self._stored_from.pop(job))
            return jobs

        StateScheduler._build_partial_tail_store_jobs = freed
    elif defect == "unchecked":

        def read(self: Any, path: Path, key: bytes, into: memoryview) -> None:
            content = path.read_bytes()[files.HEADER_BYTES :]
            into[: len(content)] = content

        StateFiles._read = read
    else:
        raise ValueError(defect)


def main(model: str, argument: str) -> None:
    """`{"seeds": [..], "chats": n, "kind": "alone", "planted": [..], "cores": [arguments of `DiskCore`, ...]}`.

    Of `KINDS`; of `planted`, "at once" frees blocks before they are stored; "unchecked" believes every file.
    """
    wanted = json.loads(argument)
    init_none_hash(sha256)
    ledger.apply(PATCHES)
    LoadCost.pays = lambda *_: True  # type: ignore[method-assign]  # a stand-in's steps take no time
    for defect in wanted.get("planted", ()):
        _plant(defect)
    seeds, chats, kind = wanted["seeds"], wanted["chats"], wanted.get("kind", "alone")
    print(json.dumps([audited(model, seeds, chats, kind, options) for options in wanted["cores"]]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
