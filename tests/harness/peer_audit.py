"""Workers that take states from each other, or from a directory, without engines: each key and each block, checked.

Two cores of `scheduler_audit` with our connector: vLLM's scheduler, tiers, sessions and sockets are real. What NIXL
does is done by `copied_rows`, and what a worker does with its jobs is copying blocks to rows and back, some steps late:
a row holds the number of a record of what was in the block.

Run as `python -m tests.harness.peer_audit MODEL '{"seeds": [1], "chats": 40, "cores": [{}]}'`, since patching is per
process. Prints JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.tiering.p2p import manager as p2p
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from engine_patches import ledger
from engine_patches.disk.flags import ALL, PeerAddress, peer_flags, transfer_flags
from engine_patches.disk.load_cost import LoadCost, PeerCost
from engine_patches.patches import PATCHES
from proxy.commands.render_server import free_port
from tests.harness.copied_rows import CopiedRows
from tests.harness.scheduler_audit import Core

# Of the jobs that have begun, so many are done in one step.
DONE_SHARE = 0.4

RECORD_BYTES = 8

records: list[dict[Any, int]] = []  # what was in the blocks that were copied to rows


class PeerCore(Core):
    """One of two engine cores that take states from each other, or from what both have written."""

    def __init__(self, model: str, rows: int, directory: str | None = None, **options: Any) -> None:
        """`rows`: of host memory, at least; `directory`: of files, in place of peers."""
        self.port = free_port()
        self.has_peers = directory is None
        address = PeerAddress("127.0.0.1", self.port)
        (_, transfer) = peer_flags(address) if directory is None else transfer_flags(directory, keep=ALL)
        connector = json.loads(transfer)
        connector["engine_id"] = f"audit-{self.port}"
        extra = connector["kv_connector_extra_config"]
        extra["staging_rows"], extra["host_bytes"] = rows, 0
        super().__init__(model, connector=connector, **options)
        self.store = self.scheduler.connector.connector_scheduler
        self.tier = self.store.manager.secondary_tiers[0]
        self._rows = self.store.manager.primary_tier.get_kv_memoryview().cast("B")
        self._size = self.tier.block_size_bytes
        self.gone = False
        self.blocks_loaded = self.blocks_stored = 0
        self.loaded: set[str] = set()  # requests that began with rows of host memory
        self._jobs: dict[int, tuple[bool, Any]] = {}  # begun: whether it is a load, what
        self._done: list[int] = []
        self._received: set[str] = set()
        self._draw = random.Random(9)

    @property
    def source(self) -> dict[str, Any]:
        """What a request of the other core names this one with."""
        return {"remote_kv_source": {"remote_host": "127.0.0.1", "remote_port": self.port}}

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        left = self.scheduler.has_unfinished_requests() or self._queue or self._jobs or self._done
        return bool(left) and not self.gone

    def step(self) -> Any:
        """As without a connector; a job is done after the step that it came with, or some steps later."""
        if self.gone:
            return None
        output = self.scheduler.schedule()
        self._record_meanings()
        self._check_events()
        meta = output.kv_connector_metadata
        for number, job in meta.load_jobs.items():
            self._jobs[number] = True, job
        for number in meta.jobs_to_flush or ():
            self._finish(number)
        sampled = self._compute(output)
        for number, job in meta.store_jobs.items():
            self._jobs[number] = False, job
        self._check_keys()
        for number in [number for number in self._jobs if self._draw.random() < DONE_SHARE]:
            self._finish(number)
        self._queue.append((output, sampled))
        idle = not output.total_num_scheduled_tokens
        while self._queue and (idle or len(self._queue) > int(self.overlap)):
            self._report(*self._queue.pop(0))
        return output

    def _finish(self, number: int) -> None:
        if number not in self._jobs:
            return
        is_load, job = self._jobs.pop(number)
        blocks, rows = (job.dst_spec, job.src_spec) if is_load else (job.src_spec, job.dst_spec)
        for block, row in zip(blocks.block_ids.tolist(), rows.block_ids.tolist(), strict=True):
            place = slice(row * self._size, row * self._size + RECORD_BYTES)
            if is_load:
                self._contents[block] = dict(records[int.from_bytes(self._rows[place], "big")])
                self.blocks_loaded += 1
            else:
                self._rows[place] = len(records).to_bytes(RECORD_BYTES, "big")
                records.append(dict(self._contents.get(block, {})))
                self.blocks_stored += 1
        self._done.append(number)
        if is_load:
            self._received.add(job.req_id)
            self.loaded.add(job.req_id)

    def _report(self, output: Any, sampled: dict[str, list[int]]) -> None:
        output.seamark_planned_at = float("inf")  # what a stand-in's steps take teaches nothing
        names = list(output.num_scheduled_tokens)
        meta = OffloadingWorkerMetadata(dict.fromkeys(self._done, 1))
        done = KVConnectorOutput(finished_recving=self._received or None, kv_connector_worker_meta=meta)
        self._done, self._received = [], set()
        runner = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=done,
        )
        self.scheduler.update_from_output(output, runner)


def random_traffic(cores: tuple[PeerCore, PeerCore], seed: int, chats: int, end: str = "") -> None:
    """Chats on a few heads and later turns of them, on either core, most with the other one's address.

    `end`: after half of the chats the second core "dies", or "hangs" with its sockets open; the first goes on alone.
    """
    draw = random.Random(seed)
    heads = [[draw.randrange(1000) for _ in range(draw.choice((20, 70, 130, 250, 400)))] for _ in range(4)]
    begun: list[list[int]] = []

    def both(steps: int) -> None:
        for _ in range(steps):
            for core in cores:
                core.step()

    for number in range(chats):
        tokens = list(draw.choice(begun) if begun and draw.random() < 0.6 else draw.choice(heads))
        seams = [len(tokens)]
        for _ in range(draw.randrange(1, 3)):
            tokens += [draw.randrange(1000) for _ in range(draw.randrange(1, 70))]
            seams.append(len(tokens))
        begun.append(list(tokens))
        tokens += list(range(1, draw.randrange(1, 6)))  # words that ask for an answer
        hint = [seam for seam in seams if draw.random() < 0.8] or None
        salt, answer, name = draw.choice((None, None, "salt")), draw.choice((1, 3, 20)), f"{seed}-{number}"
        mine, other = draw.sample(cores, 2)
        if end and number == chats // 2:
            until_asked(*cores)
            cores[1].gone = True
            if end == "dies":
                cores[1].tier.shutdown()
        if cores[1].gone:
            mine, other = cores
        mine.request(name, tokens, hint, answer, salt, transfer=other.source if draw.random() < 0.8 else None)
        both(draw.randrange(1, 6))
        if draw.random() < 0.1 and name in mine.scheduler.requests:
            mine.abort(name)
    deadline = time.monotonic() + 120
    while any(core.busy for core in cores):
        both(1)
        if time.monotonic() > deadline:
            cores[0].errors.append(f"stuck: {[core.scheduler.get_request_counts() for core in cores]}")
            return
    # A tier's threads may be the last to let go of what a request stored, and a step has to learn of it.
    deadline = time.monotonic() + 10
    while any(core.blocks_in_use() and not core.gone for core in cores) and time.monotonic() < deadline:
        both(1)


def until_asked(mine: PeerCore, other: PeerCore) -> None:
    """Let a request of `mine` wait for the other core, which has begun to write and is not done."""
    tokens = list(range(400))
    other.request("before", tokens, [300], 5)  # one that ends at once stores nothing
    while other.busy or not other.blocks_stored:
        other.step()
        mine.step()
    other.tier._data.held = True
    mine.tier._resting.clear()
    mine.request("between", tokens, [300], transfer=other.source)
    deadline = time.monotonic() + 60
    while not other.tier._data.waiting:
        mine.step()
        other.step()
        if time.monotonic() > deadline:
            mine.errors.append("the other core is asked for nothing")
            return


def audited(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What is found with these arguments of the two cores.

    Tiers work in threads of their own, so how much is loaded depends on how busy the machine is: further seeds follow
    until there is `enough` of each count that it names.
    """
    found: dict[str, Any] = {"core": options, "errors": [], "loaded": 0, "stored": 0, "from_peers": 0, "hit_tokens": 0}
    enough, end = wanted.get("enough", {}), wanted.get("end", "")
    for seed in wanted["seeds"]:
        if enough and all(found[name] > least for name, least in enough.items()):
            break
        cores = PeerCore(model, **options), PeerCore(model, **options)
        random_traffic(cores, seed, wanted["chats"], end)
        found["lost"] = found.get("lost", 0) + len(cores[0].tier.lost)
        for core in cores:
            if core.blocks_in_use() and not core.gone:
                core.errors.append(f"{core.blocks_in_use()} blocks are held without a request")
            found["errors"] += [f"seed {seed}: {error}" for error in core.errors[:3]]
            found["loaded"] += core.blocks_loaded
            found["stored"] += core.blocks_stored
            found["from_peers"] += core.tier._data.copied if core.has_peers else 0
            found["hit_tokens"] += sum(core.hits.values())
            if core.has_peers:
                core.tier._data.held = False
            core._rows.release()
            core.store.manager.shutdown()
    return found


def main(model: str, argument: str) -> None:
    """`{"seeds": [..], "chats": n, "cores": [arguments of PeerCore, ...]}`, see `audited`.

    Optional are `"planted": [defects]`, `"end": "dies"`, and `"enough": {count: n}`.
    """
    wanted = json.loads(argument)
    init_none_hash(sha256)
    ledger.apply(PATCHES)
    p2p.NixlTransport = CopiedRows
    LoadCost.pays = lambda self, num_bytes, prefill_seconds: True
    patience = 0.5 if wanted.get("end") == "hangs" else 60.0
    PeerCost.patience = lambda self, prefill_seconds: patience
    if "rows" in wanted.get("planted", ()):
        _let_rows_be_others()
    found = [audited(model, wanted, options) for options in wanted["cores"]]
    print(json.dumps(found))


def _let_rows_be_others() -> None:
    """Let a peer write every row into the next one's place."""
    write = CopiedRows.write_blocks

    def shifted(self: CopiedRows, peer_id: str, local_idxs: Sequence[int], remote_idxs: Sequence[int]) -> int:
        return write(self, peer_id, local_idxs, [*remote_idxs[1:], remote_idxs[0]])

    CopiedRows.write_blocks = shifted


if __name__ == "__main__":
    main(*sys.argv[1:3])
