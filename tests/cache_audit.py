"""Drives vLLM's own cache manager and chunk split with random chats, and checks every cache key after every step.

The worker is a model of what a real one does to blocks: copies first, then attention rows and recurrent states, then
the export from inside a pass (which only GPU backends have, so no CPU engine can show what goes wrong with it). Each
block remembers which prefix its contents stand for; a key whose block holds another prefix is a wrong answer to come.

Run as `python -m tests.cache_audit '{"export": true, ...}'`: patching is per process. Prints JSON.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.request import Request, RequestStatus

from engine_patches import ledger
from engine_patches.checkpoints import Checkpoints
from engine_patches.patches import PATCHES

BLOCK, UNIT = 64, 16  # tokens
ATTENTION = 1  # its group; 0 and 2 are recurrent
BUDGET = 256  # tokens per step
RUNNING, WAITING = 6, 3  # requests


def prefix(tokens: list[int], length: int) -> int:
    """Names the contents that the first `length` tokens lead to."""
    return hash(tuple(tokens[:length]))


class Audit:
    """One engine core without an engine."""

    def __init__(self, seed: int, export: bool, blocks: int) -> None:
        self.draw = random.Random(seed)
        self.export = export
        self.errors: list[str] = []
        self.hit_tokens = 0
        self.contents: dict[int, dict[Any, int]] = {}  # block id -> attention row, or "state" -> prefix
        self.meant: dict[bytes, tuple[int, int]] = {}  # block hash -> prefix, its length
        recurrent = dict(
            block_size=BLOCK,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=int(export),
            prefill_checkpoint_alignment=1 if export else None,
        )
        attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [
            KVCacheGroupSpec(["m0"], MambaSpec(**recurrent)),
            KVCacheGroupSpec(["a"], attention),
            KVCacheGroupSpec(["m1"], MambaSpec(**recurrent)),
        ]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=4096,
            max_in_flight_tokens=BUDGET,
            scheduler_block_size=BLOCK,
            hash_block_size=UNIT,
            enable_caching=True,
            log_stats=False,
        )
        self.managers = self.manager.coordinator.single_type_managers
        checkpoints = Checkpoints(match_unit=UNIT, block_size=BLOCK, enabled=True, recurrent_group=0)
        for manager in self.managers:
            manager.seamark = checkpoints
            if isinstance(manager, MambaManager):
                manager.shared_prefix_checkpoint = True
        self.scheduler = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            block_size=BLOCK,
            hash_block_size=UNIT,
            max_num_scheduled_tokens=BUDGET,
            use_eagle_block_drop=False,
            mamba_partial_cache_hit=True,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=export,
            mamba_prefill_checkpoint_alignment=1 if export else None,
            seamark=checkpoints,
        )
        self.hasher = get_request_block_hasher(UNIT, sha256)
        lengths = (20, 33, 64, 70, 100, 130, 163, 250, 300, 400)
        self.heads = [[self.draw.randrange(1000) for _ in range(self.draw.choice(lengths))] for _ in range(4)]

    def chat(self, number: int) -> Request:
        """A prompt on one of few heads, cut short at times, with hints at its seams, at random places, or none."""
        draw = self.draw
        tokens = list(draw.choice(self.heads))
        if draw.random() < 0.3:
            tokens = tokens[: draw.randrange(10, len(tokens) + 1)]
        seams = [len(tokens)]
        for _ in range(draw.randrange(1, 4)):
            tokens += [draw.randrange(3) for _ in range(draw.randrange(1, 90))]
            seams.append(len(tokens))
        hint = sorted({seam for seam in seams if draw.random() < 0.7})
        if draw.random() < 0.2:
            hint = sorted(draw.sample(range(1, len(tokens) + 1), min(len(tokens), 5)))
        extra = {"seamark_boundaries": hint} if hint and draw.random() < 0.8 else None
        parameters = SamplingParams(max_tokens=draw.choice((1, 3, 20)), extra_args=extra)
        return Request(f"r{number}", tokens, parameters, None, block_hasher=self.hasher)

    def request(self, name: str, tokens: list[int], hint: list[int]) -> Request:
        """A prompt with a hint, to be answered by one token."""
        extra = {"seamark_boundaries": hint} if hint else None
        parameters = SamplingParams(max_tokens=1, extra_args=extra)
        return Request(name, tokens, parameters, None, block_hasher=self.hasher)

    def race(self) -> None:
        """Two requests in one step, of which the first makes a private copy that the second must not take for filled.

        The state at 32 outlives the attention key at 32; then one request resumes at 48 and another could at 32.
        """
        head = list(range(100, 150))
        self.run_all([self.request("tail", head[:49], [])])
        hinted = self.request("hinted", [*head[:32], *[1] * 8], [32])
        self.run_all([hinted])
        key = make_block_hash_with_group_id(hinted.block_hashes[1], ATTENTION)
        block = self.manager.block_pool.cached_block_hash_to_block.get_one_block(key)
        self.manager.evict_blocks({block.block_id})
        resumes = self.request("resumes", [*head[:48], *[2] * 10], [32, 48])
        self.run_all([resumes, self.request("follows", [*head[:32], *[3] * 10], [32])])

    def run(self, chats: int) -> None:
        """Schedule, compute and check until `chats` random chats are done."""
        self.run_all([self.chat(number) for number in range(chats)])

    def run_all(self, requests: list[Request]) -> None:
        """Schedule, compute and check until all requests are done; a few wait at a time."""
        arriving = iter(requests)
        waiting: list[Request] = []
        running: list[Request] = []
        while True:
            waiting += itertools.islice(arriving, max(WAITING - len(waiting), 0))
            if not waiting and not running:
                return
            scheduled = self.schedule(waiting, running)
            if not scheduled:
                self.errors.append(f"stuck with {len(waiting)} waiting, {len(running)} running")
                return
            copies, retained = self.manager.take_kv_cache_block_copies()
            self.compute(scheduled, [(copy[0], copy[1]) for copy in copies])
            self.check_keys()
            self.manager.block_pool.free_blocks(retained)
            self.finish(scheduled, running)

    def schedule(self, waiting: list[Request], running: list[Request]) -> list[tuple[Request, int, int]]:
        """One step in vLLM's order: running requests, preempting the last; then waiting ones while they fit."""
        self.manager.new_step_starts()
        scheduled, budget, index = [], BUDGET, 0
        while index < len(running) and budget:
            request = running[index]
            count = self.split(request, min(request.num_tokens - request.num_computed_tokens, budget), 0)
            while count and self.manager.allocate_slots(request, count) is None:
                victim = running.pop()
                self.manager.free(victim)
                victim.status, victim.num_computed_tokens = RequestStatus.PREEMPTED, 0
                waiting.insert(0, victim)
                if victim is request:
                    return scheduled
            if count:
                scheduled.append((request, request.num_computed_tokens, count))
                budget -= count
            index += 1
        while waiting and budget and len(running) < RUNNING:
            request = waiting[0]
            blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
            count = self.split(request, min(request.num_tokens - hit, budget), hit)
            allocated = count and self.manager.allocate_slots(
                request,
                count,
                num_new_computed_tokens=hit,
                new_computed_blocks=blocks,
                full_sequence_must_fit=True,
                has_scheduled_reqs=bool(running),
            )
            if not allocated:
                break
            running.append(waiting.pop(0))
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, hit
            self.hit_tokens += hit
            scheduled.append((request, hit, count))
            budget -= count
        return scheduled

    def split(self, request: Request, count: int, hit: int) -> int:
        return Scheduler._mamba_block_aligned_split(self.scheduler, request, count, hit)

    def compute(self, scheduled: list[tuple[Request, int, int]], copies: list[tuple[int, int]]) -> None:
        """What the worker does to blocks in one step."""
        sources = [(target, dict(self.contents.get(source, {}))) for source, target in copies]
        self.contents.update(sources)
        for request, start, count in scheduled:
            tokens = list(request.all_token_ids)
            for number, block_hash in enumerate(request.block_hashes, 1):
                self.meant[bytes(block_hash)] = (prefix(tokens, number * UNIT), number * UNIT)
            for group, manager in enumerate(self.managers):
                blocks = manager.req_to_blocks[request.request_id]
                if group == ATTENTION:
                    for position in range(start, start + count):
                        rows = self.contents.setdefault(blocks[position // BLOCK].block_id, {})
                        rows[position % BLOCK] = prefix(tokens, position + 1)
                else:
                    self.scan(request.request_id, tokens, blocks, start, start + count)
        for request, start, _ in scheduled:
            tokens = list(request.all_token_ids)
            blocks = self.managers[ATTENTION].req_to_blocks[request.request_id]
            for position in range(start):
                row = self.contents.get(blocks[position // BLOCK].block_id, {}).get(position % BLOCK)
                if row != prefix(tokens, position + 1):
                    self.errors.append(f"{request.request_id} reads someone else's keys at {position}")
                    break

    def scan(self, name: str, tokens: list[int], blocks: list[KVCacheBlock], start: int, end: int) -> None:
        """A recurrent layer: resume from the block of `start`, leave the state in the block of `end`."""
        if start:
            block = blocks[(start - 1) // BLOCK]
            if self.contents.get(block.block_id, {}).get("state") != prefix(tokens, start):
                self.errors.append(f"{name} resumes at {start} from a wrong state")
        position = get_mamba_prefill_checkpoint_position(end, UNIT, False)
        if self.export and is_mamba_prefill_checkpoint_valid(start, end, position, UNIT, BLOCK, 1):
            block = blocks[cdiv(end, BLOCK) - 2]
            if not block.is_null:
                self.contents[block.block_id] = {"state": prefix(tokens, position)}
        self.contents[blocks[(end - 1) // BLOCK].block_id] = {"state": prefix(tokens, end)}

    def check_keys(self) -> None:
        """Every key must lead to blocks that hold what it promises."""
        for key, entry in self.manager.block_pool.cached_block_hash_to_block._cache.items():
            wanted, length = self.meant[bytes(get_block_hash(key))]
            group = get_group_id(key)
            slot = (length - 1) % BLOCK if group == ATTENTION else "state"
            for block in [entry] if isinstance(entry, KVCacheBlock) else entry.values():
                if self.contents.get(block.block_id, {}).get(slot) != wanted:
                    self.errors.append(f"key of {length} tokens in group {group} leads to a wrong block")

    def finish(self, scheduled: list[tuple[Request, int, int]], running: list[Request]) -> None:
        """Sample, end what is done, and abort a few at any phase."""
        for request, _, count in scheduled:
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(self.draw.randrange(3))
        for request in list(running):
            if request.num_output_tokens >= request.max_tokens or self.draw.random() < 0.02:
                running.remove(request)
                self.manager.free(request)


def main(argument: str) -> None:
    """`{"seeds": [..], "chats": n, "export": bool, "blocks": n, "without": [names of patches]}`."""
    wanted = json.loads(argument)
    init_none_hash(sha256)
    ledger.apply([patch for patch in PATCHES if patch.name not in wanted.get("without", ())])
    errors, hit_tokens = [], 0
    for seed in wanted["seeds"]:
        audit = Audit(seed, wanted["export"], wanted["blocks"])
        audit.race()
        audit.run(wanted["chats"])
        errors += [f"seed {seed}: {error}" for error in audit.errors[:3]]
        hit_tokens += audit.hit_tokens
    print(json.dumps({"errors": errors, "hit_tokens": hit_tokens}))


if __name__ == "__main__":
    main(sys.argv[1])
