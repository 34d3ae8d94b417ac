"""A worker's tiers without an engine, whose steps are taken by hand: vLLM's rows in host memory and our tier of peers.

Run as `python -m tests.harness.peer_worker IDENTITY KEYS VALUE`: a worker that holds so many of `KEYS`, each byte of
their rows `VALUE`, and goes on stepping. Prints its port once it does.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from proxy.commands.render_server import free_port

ROWS, ROW = 16, 4096

KEYS = [bytes([number]) * 36 for number in range(1, 9)]

SAME, OTHER = "aa" * 32, "bb" * 32  # identities

numbers = itertools.count()


class Worker:
    """A worker's tiers, whose steps are taken by hand."""

    def __init__(self, identity: str = SAME) -> None:
        self.port = free_port()
        self.rows = np.zeros((ROWS, ROW), dtype=np.int8)
        view = memoryview(self.rows)
        region = SimpleNamespace(create_kv_memoryview=lambda: view, cleanup=lambda: None)
        self.primary = CPUPrimaryTierOffloadingManager(num_chunks=ROWS, mmap_region=region)
        config = {"type": "PeerStates", "module_path": "engine_patches.disk.peers", "identity": identity}
        place = {"host": "127.0.0.1", "port": self.port}
        self.tier = SecondaryTierFactory.create_secondary_tier(config | place, view, _spec())
        self.manager = TieringOffloadingManager(self.primary, [self.tier])

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=set(), preempted_req_ids=set()))

    def request(self, peer: Worker | None = None, **more: Any) -> ReqContext:
        source = {"remote_host": "127.0.0.1", "remote_port": peer.port, **more} if peer else None
        context = ReqContext(f"request-{next(numbers)}", {"remote_kv_source": source} if source else None)
        self.manager.on_new_request(context)
        return context

    def store(self, keys: Sequence[bytes], value: int) -> None:
        context = self.request()
        rows = self.manager.prepare_store(keys, context)
        assert rows is not None
        for row in rows.store_spec.chunk_ids.tolist():
            self.rows[row] = value
        self.manager.complete_store(rows.keys_to_store, context)
        self.manager.on_request_finished(context)

    def row(self, key: bytes) -> int:
        return int(self.rows[self.primary._policy.get(key).chunk_id][7])


def _spec() -> Any:
    parallel = SimpleNamespace(
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        rank=0,
        is_parallelism_agnostic=False,
        data_parallel_index=0,
    )
    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=["a"])],
        parallel=parallel,
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout=None,
        model=SimpleNamespace(name="model", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16),
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


def until(said: Callable[[], Any], *workers: Worker, seconds: float = 60) -> Any:
    """What `said` returns once that is true, while the workers step."""
    deadline = time.monotonic() + seconds
    while not (answer := said()):
        assert time.monotonic() < deadline
        for each in workers:
            each.step()
        time.sleep(0.001)
    return answer


def loaded(b: Worker, context: ReqContext, keys: Sequence[bytes], *others: Worker) -> bool:
    """Whether all keys are in host memory in the end, after the request's peer was asked."""
    until(lambda: b.tier.ask(keys, context, 60), b, *others)
    if not all(b.tier.holds(key, context) for key in keys):
        return False

    def over() -> Any:
        results = {b.manager.lookup(key, context) for key in keys}
        return results if LookupResult.HIT_PENDING not in results else None

    return until(over, b, *others) == {LookupResult.HIT}


def main(identity: str, keys: str, value: str) -> None:
    """Serve until killed."""
    worker = Worker(identity)
    worker.store(KEYS[: int(keys)], int(value))
    print(worker.port, flush=True)
    while True:
        worker.step()
        time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:4])
