"""vLLM's own scheduler and cache manager, driven without an engine, and every cache key checked after every step.

The worker is a model of what a real one does to blocks, fed with nothing but the messages a real one gets: copies
first, then attention rows and recurrent states, then the states that a step was asked to write. Each block remembers
which prefix its contents stand for; a key whose block holds another prefix is a wrong answer to come.

Run as `python -m tests.harness.scheduler_audit MODEL '{"seeds": [1], "chats": 9, "cores": [{}]}'`, since patching is
per process. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine_patches import ledger, settings
from engine_patches.footprint import WRITES
from engine_patches.forward.layers import promise
from engine_patches.forward.loaded_weights import Weights
from engine_patches.patches import PATCHES
from engine_patches.scheduler.state_events import CacheCleared, StateEvicted, StateStored
from tests.harness.kv_event_index import KvEventIndex

BLOCK, UNIT = 64, 16  # tokens

ATTENTION = 1  # its first cache group; 0 and 2 are recurrent

RECURRENT = (0, 2)

LONGEST = 4096  # tokens

WEIGHTS = Weights("loaded", "", "whole", "sampled")


def prefix(tokens: Sequence[int], length: int) -> int:
    """Names the contents that the first `length` tokens lead to."""
    return hash(tuple(tokens[:length]))


class Core:
    """One engine core without an engine."""

    def __init__(
        self,
        model: str,
        blocks: int = 200,
        budget: int = 256,
        *,
        writes_in_forward: bool = True,
        export: bool = True,
        overlap: bool = False,
        policy: str = "fcfs",
        running: int = 6,
        attention_groups: int = 1,
        window: int = 0,
        block: int = BLOCK,
        unit: int = UNIT,
        speculative: dict[str, Any] | None = None,
        kv_events: str | None = None,
        connector: dict[str, Any] | None = None,
        weights: Weights = WEIGHTS,
    ) -> None:
        """`writes_in_forward`: the worker promises to write states inside a pass; `export`: its backend can do so once,
        at the tail, as vLLM asks for it; `overlap`: the next step is planned before the last one's tokens are known.
        `attention_groups`: 0 for a model that has recurrent layers alone; `window`: of its attention layers, in tokens.
        `unit`: the match unit, at most a block.
        `speculative`, `connector`: as vLLM's `--speculative-config` and `--kv-transfer-config`. Steps can be audited in
        blocks of `BLOCK` tokens.
        `kv_events`: what its KV events announce (`SEAMARK_KV_EVENTS`), which are audited then; None: events are off.
        """
        config = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=LONGEST,
            max_num_seqs=running,
            max_num_batched_tokens=budget,
            enable_prefix_caching=True,
            scheduling_policy=policy,
            async_scheduling=overlap,
            speculative_config=speculative,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if kv_events else None,
            kv_transfer_config=KVTransferConfig(**connector) if connector else None,
        ).create_engine_config()
        config.cache_config.block_size = config.cache_config.mamba_block_size = block
        config.cache_config.prefix_match_unit = unit
        config.cache_config.num_gpu_blocks = blocks
        config.seamark_weights = weights
        if connector:  # a CPU's configuration plans no step ahead
            config.scheduler_config.async_scheduling = overlap
        recurrent = dict(
            block_size=block,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=speculative["num_speculative_tokens"] if speculative else 0,
            num_prefill_checkpoint_blocks=int(export),
            prefill_checkpoint_alignment=1 if export else None,
        )
        rows = dict(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
        attention = SlidingWindowSpec(**rows, sliding_window=window) if window else FullAttentionSpec(**rows)
        states = [MambaSpec(**recurrent), MambaSpec(**recurrent)]
        for spec in states if writes_in_forward else ():
            promise(spec)
        groups = [
            KVCacheGroupSpec(["m0"], states[0]),
            KVCacheGroupSpec(["a"], attention),
            KVCacheGroupSpec(["m1"], states[1]),
        ]
        self.window = window or LONGEST
        self.unit, self.recurrent, self.attention = unit, RECURRENT, [ATTENTION]
        for number in range(1, attention_groups):
            self.attention.append(len(groups))
            groups.append(KVCacheGroupSpec([f"a{number}"], attention))
        if not attention_groups:
            del groups[1:]
            self.recurrent, self.attention = (0,), []
        self._place_draft_head(groups)
        self.export, self.overlap, self.policy = export, overlap, policy
        if kv_events:
            os.environ[settings.KV_EVENTS] = kv_events
        self.scheduler: Any = (AsyncScheduler if overlap else Scheduler)(
            config,
            KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            StructuredOutputManager(config),
            block_size=block,
            hash_block_size=unit,
            log_stats=False,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        ahead = getattr(config, "num_hash_lookahead_tokens", 0)  # from vLLM 0.33 on
        self.hasher = get_request_block_hasher(unit, sha256, **({"num_hash_lookahead_tokens": ahead} if ahead else {}))
        self.errors: list[str] = []
        self.chunk_ends: dict[str, list[int]] = {}  # by request
        self.written: dict[str, list[int]] = {}  # positions of its states
        self.hits: dict[str, int] = {}  # tokens each request started with, when first admitted
        self.stored: dict[str, tuple[Any, int]] = {}  # by name, states that events say can be found: hashes, position
        self.evicted = 0  # events that say that one can no longer be found
        self._announced_size = block if kv_events == settings.BLOCKS else unit
        self.index = KvEventIndex(self._announced_size) if kv_events else None
        self.announced = self.withdrawn = 0  # blocks, by KV events
        self.missing = 0  # blocks that lead to a state and are not announced, at most
        self._ever: list[Request] = []
        self._last_held: set[int] = set()
        if kv_events:
            self.scheduler.kv_event_publisher = self
        self._contents: dict[int, dict[Any, int]] = {}  # block id -> attention row, or "state" -> prefix
        self._meant: dict[bytes, tuple[int, int]] = {}  # block hash -> prefix, its length
        self._tables: dict[str, list[list[int]]] = {}  # the worker's block tables
        self._tokens: dict[str, list[int]] = {}  # the worker's tokens
        self._state_index: dict[str, int] = {}
        self._queue: list[tuple[Any, dict[str, list[int]]]] = []  # steps whose outputs the scheduler does not know yet

    def _place_draft_head(self, groups: list[KVCacheGroupSpec]) -> None:
        """Say in which cache groups a draft head has its rows."""

    def request(
        self,
        name: str,
        tokens: Sequence[int],
        hint: object = None,
        max_tokens: int = 1,
        salt: str | None = None,
        priority: int = 0,
        transfer: dict[str, Any] | None = None,
    ) -> Request:
        """Add a request. `transfer`: its `kv_transfer_params`."""
        extra = {} if hint is None else {"seamark_boundaries": hint}
        if transfer is not None:
            extra["kv_transfer_params"] = transfer
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        request = Request(
            name, list(tokens), parameters, None, block_hasher=self.hasher, cache_salt=salt, priority=priority
        )
        self._tokens[name] = list(tokens)
        self._ever.append(request)
        self.scheduler.add_request(request)
        del self._tokens[name][request.num_prompt_tokens :]  # one that prefills for another engine computes fewer
        return request

    def run(self, most: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most):
            if not self.scheduler.has_unfinished_requests() and not self._queue:
                return
            self.step()
        self.errors.append(f"stuck: {self.scheduler.get_request_counts()} running and waiting")

    def step(self) -> Any:
        """Plan a step, compute it, check every key, and report back what was sampled."""
        output = self.scheduler.schedule()
        self._record_meanings()
        self._check_events()
        sampled = self._compute(output)
        self._check_keys()
        idle = not output.total_num_scheduled_tokens
        if not idle:
            self._queue.append((output, sampled))
        if self._queue and (idle or len(self._queue) > int(self.overlap)):
            self._report(*self._queue.pop(0))
        return output

    def abort(self, name: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def forget_sampled(self, name: str) -> None:
        """What the running step samples for a request will be dropped."""
        self._tokens[name] = list(self.scheduler.requests[name].all_token_ids)

    def keys(self, request: Request, group: int) -> list[int]:
        """Positions (tokens) at which a cache group can be entered with the prefix of `request`."""
        cached = self.pool.cached_block_hash_to_block
        return [
            number * self.unit
            for number, block_hash in enumerate(request.block_hashes, 1)
            if cached.get_one_block(make_block_hash_with_group_id(block_hash, group)) is not None
        ]

    def blocks_in_use(self) -> int:
        """Blocks that are held; none once all requests are done."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def _record_meanings(self) -> None:
        for request in self.scheduler.requests.values():
            tokens = self._tokens[request.request_id]
            for number, block_hash in enumerate(request.block_hashes, 1):
                self._meant[bytes(block_hash)] = (prefix(tokens, number * self.unit), number * self.unit)

    def _check_events(self) -> None:
        """vLLM's own lookup finds the states that events say can be found, and no state that they say was evicted."""
        states = self.scheduler.seamark.states
        for _, event in states.events.take() if states is not None else ():
            match event:
                case StateStored(name, end, states):
                    request = self.scheduler.requests[name]
                    for position, state in states:
                        if position > end:
                            self.errors.append(f"{name} is reported at {position}, planned to {end}")
                        if state:
                            self.stored[state] = (list(request.block_hashes), position)
                        elif self._found(request.block_hashes, position) == position:
                            self.errors.append(f"{name} is found at {position}, and not reported")
                case StateEvicted(state):
                    self.evicted += 1
                    if self._found(*self.stored[state]) == self.stored.pop(state)[1]:
                        self.errors.append("a state is reported as evicted, and is found")
                case CacheCleared():
                    self.stored.clear()
        for hashes, position in self.stored.values():
            if self._found(hashes, position) != position:
                self.errors.append(f"a state at {position} is reported as stored, and is not found")

    def publish(self, batch: Any) -> None:
        """As vLLM's publisher of KV events."""
        if self.index is None:
            return
        for event in batch.events:
            self.index.apply(msgspec.to_builtins(event))

    def _check_kv_events(self) -> None:
        """An index built from KV events holds what leads to a state that vLLM's own lookup finds, and nothing else."""
        if self.index is None:
            return
        resumable: set[int] = set()
        for request in self._ever:
            found = self._found(request.block_hashes, len(request.block_hashes) * self.unit)
            resumable.update(self.index.keys(request.all_token_ids[:found], request.cache_salt))
        held = self.index.held
        if held - resumable:
            self.errors.append(f"{len(held - resumable)} blocks are announced that lead to no state")
        self.errors += [f"KV events: {surprise}" for surprise in self.index.surprises]
        self.index.surprises.clear()
        self.missing = max(self.missing, len(resumable - held))
        self.announced += len(held - self._last_held)
        self.withdrawn += len(self._last_held - held)
        self._last_held = set(held)

    def _found(self, block_hashes: Any, most: int) -> int:
        return self.scheduler.kv_cache_manager.coordinator.find_longest_cache_hit(block_hashes, most)[1]

    def _compute(self, output: Any) -> dict[str, list[int]]:
        """What the worker does to blocks in one step; the tokens it samples for each request."""
        starts = self._receive(output)
        sampled: dict[str, list[int]] = {}
        writes = getattr(output, WRITES, None)
        for name, count in output.num_scheduled_tokens.items():
            start, end = starts[name], starts[name] + count
            self._move_states(name, start, end)
            self._compute_request(name, start, end, writes)
            sampled[name] = [prefix(self._tokens[name], end) % 3] if end == len(self._tokens[name]) else []
        for name, tokens in sampled.items():
            self._tokens[name] += tokens
        return sampled

    def _receive(self, output: Any) -> dict[str, int]:
        """What a step says of requests and blocks, before it is computed; the token from which each request runs."""
        for name in output.finished_req_ids:
            self._tables.pop(name, None)
            self._state_index.pop(name, None)
        copies = output.kv_cache_block_copies or []
        self._contents.update([(copy[1], dict(self._contents.get(copy[0], {}))) for copy in copies])
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self._state_index.pop(new.req_id, None)
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            starts[name] = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(ids) for ids in blocks]
                self._state_index.pop(name, None)
            elif blocks is not None:
                for table, ids in zip(self._tables[name], blocks, strict=True):
                    table.extend(ids)
        return starts

    def _move_states(self, name: str, start: int, end: int) -> None:
        """The running state moves into the block of the chunk's end, before the pass."""
        before = self._state_index.get(name, (start - 1) // BLOCK if start else -1)
        after = self._state_index[name] = cdiv(end, BLOCK) - 1
        if before not in (-1, after):
            for group in self.recurrent:
                table = self._tables[name][group]
                self._contents[table[after]] = dict(self._contents.get(table[before], {}))

    def _compute_request(self, name: str, start: int, end: int, writes: Any) -> None:
        tokens = self._tokens[name]
        self.chunk_ends.setdefault(name, []).append(end)
        for group in self.attention:
            rows = self._tables[name][group]
            for position in range(max(start - self.window + 1, 0), start):
                found = self._contents.get(rows[position // BLOCK], {}).get(position % BLOCK)
                if found != prefix(tokens, position + 1):
                    self.errors.append(f"{name} reads someone else's keys at {position}")
                    break
            for position in range(start, end):
                self._contents.setdefault(rows[position // BLOCK], {})[position % BLOCK] = prefix(tokens, position + 1)
        asked = (writes or {}).get(name, ())
        self.written.setdefault(name, []).extend(start + write.offset for write in asked)
        for group in self.recurrent:
            table = self._tables[name][group]
            running = table[cdiv(end, BLOCK) - 1]
            if start and self._contents.get(running, {}).get("state") != prefix(tokens, start):
                self.errors.append(f"{name} resumes at {start} from a wrong state")
            for write in asked:
                self._contents[write.blocks[group]] = {"state": prefix(tokens, start + write.offset)}
            position = get_mamba_prefill_checkpoint_position(end, self.unit, False)
            column = cdiv(end, BLOCK) - 2
            if (
                writes is None
                and self.export
                and is_mamba_prefill_checkpoint_valid(start, end, position, self.unit, BLOCK, 1)
                and column < len(table)
                and table[column]
            ):
                self._contents[table[column]] = {"state": prefix(tokens, position)}
            self._contents[running] = {"state": prefix(tokens, end)}

    def _check_keys(self) -> None:
        """Every key must lead to blocks that hold what it promises."""
        for key, entry in self.pool.cached_block_hash_to_block._cache.items():
            wanted, length = self._meant[bytes(get_block_hash(key))]
            group = get_group_id(key)
            slot = (length - 1) % BLOCK if group in self.attention else "state"
            for block in [entry] if isinstance(entry, KVCacheBlock) else entry.values():
                if self._contents.get(block.block_id, {}).get(slot) != wanted:
                    self.errors.append(f"key of {length} tokens in group {group} leads to a wrong block")

    def _report(self, output: Any, sampled: dict[str, list[int]]) -> None:
        output.seamark_planned_at = float("inf")  # what a stand-in's steps take teaches nothing
        names = list(output.num_scheduled_tokens)
        runner = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
        )
        self.scheduler.update_from_output(output, runner)
        self._check_kv_events()


def random_entry(draw: random.Random, tokens: Sequence[int], position: int) -> object:
    """A hint's entry that names `position`, or an occurrence of the same tokens elsewhere, or nothing."""
    pattern = ",".join(map(str, tokens[max(position - draw.randrange(1, 9), 0) : position]))
    return draw.choice(
        (
            position,
            position - len(tokens),
            f"first:{pattern}",
            f"last:{pattern}",
            f"last-{draw.randrange(3)}:{pattern}",
            "last:1000",
            "elsewhere",
        )
    )


def random_traffic(
    core: Core, seed: int, chats: int, outputs: Sequence[int] = (1, 3, 20), longest_turn: int = 0
) -> None:
    """Chats on a few heads, with hints at their seams, at random places, or none; some are aborted at any phase.

    `outputs`: numbers of tokens that may be generated. `longest_turn`: chats may go on from an earlier one with its
    answer, if both have at most so many tokens.
    """
    draw, draw_entry = random.Random(seed), random.Random(seed)
    lengths = (20, 33, 64, 70, 100, 130, 163, 250, 300, 400)
    heads = [[draw.randrange(1000) for _ in range(draw.choice(lengths))] for _ in range(4)]
    begun: list[Request] = []
    for number in range(chats):
        tokens = list(draw.choice(heads))
        answered = [request for request in begun if request.is_finished() and request.num_tokens <= longest_turn]
        if answered and draw.random() < 0.5:
            tokens = list(draw.choice(answered).all_token_ids)
        if draw.random() < 0.3:
            tokens = tokens[: draw.randrange(10, len(tokens) + 1)]
        seams = [len(tokens)]
        for _ in range(draw.randrange(1, 4)):
            tokens += [draw.randrange(3) for _ in range(draw.randrange(1, 90))]
            seams.append(len(tokens))
        hint: object = sorted({seam for seam in seams if draw.random() < 0.7})
        if draw.random() < 0.2:
            hint = sorted(draw.sample(range(1, len(tokens) + 1), min(len(tokens), 5)))
        elif hint and draw_entry.random() < 0.5:
            hint = [random_entry(draw_entry, tokens, seam) for seam in seams]
        begun.append(
            core.request(
                f"{seed}-{number}",
                tokens,
                hint if hint and draw.random() < 0.8 else None,
                max_tokens=draw.choice(outputs),
                salt=draw.choice((None, None, "salt")),
                priority=draw.randrange(3),
            )
        )
        while len(core.scheduler.waiting) > 3:
            core.step()
            for name in list(core.scheduler.requests):
                if draw.random() < 0.02:
                    core.abort(name)
    core.run()


def main(model: str, argument: str) -> None:
    """`{"seeds": [..], "chats": n, "without": [names of patches], "cores": [arguments of Core, ...]}`."""
    wanted = json.loads(argument)
    init_none_hash(sha256)
    ledger.apply([patch for patch in PATCHES if patch.name not in wanted.get("without", ())])
    found = []
    for options in wanted["cores"]:
        errors, hit_tokens, evicted = [], 0, 0
        announced = withdrawn = missing = 0
        for seed in wanted["seeds"]:
            core = Core(model, **options)
            random_traffic(core, seed, wanted["chats"])
            if core.blocks_in_use():
                core.errors.append(f"{core.blocks_in_use()} blocks are held without a request")
            errors += [f"seed {seed}: {error}" for error in core.errors[:3]]
            hit_tokens += sum(core.hits.values())
            evicted += core.evicted
            announced, withdrawn = announced + core.announced, withdrawn + core.withdrawn
            missing = max(missing, core.missing)
        refusal = core.scheduler.seamark.refusal
        audited = {"core": options, "errors": errors, "hit_tokens": hit_tokens, "evicted": evicted}
        audited["refused"] = refusal.cause if refusal is not None else None
        found.append({**audited, "announced": announced, "withdrawn": withdrawn, "missing": missing})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:3])
