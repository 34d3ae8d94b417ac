"""One engine core without an engine: vLLM's own scheduler and cache manager, and every cache key checked after a step.

A key whose block holds another prefix than it promises is a wrong answer to come.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    make_block_hash_with_group_id,
    resolve_dcp_kv_block_size,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine_patches import settings
from engine_patches.footprint import OWN
from engine_patches.forward.layers import promise
from engine_patches.forward.loaded_weights import Weights
from engine_patches.scheduler.states import CacheCleared, StateEvicted, StateStored
from tests.harness.kv_event_index import KvEventIndex
from tests.harness.modelled_worker import BLOCK, UNIT, Worker, prefixes

ATTENTION = 1  # its first cache group; 0 and 2 are recurrent

# What each audit counts, so that one that does nothing is seen; a worker's model counts more.
KV_EVENTS = ("announced", "withdrawn", "missing")
COUNTED = ("unkept", "unkept_hits", "hit_tokens", "written", "evicted", *KV_EVENTS, "resets", "ended_late")

WEIGHTS = Weights("loaded", "", "whole", "sampled")


class Core:
    """One engine core without an engine, and the model of its worker."""

    def __init__(
        self,
        model: str,
        blocks: int = 200,
        budget: int = 256,
        worker: Worker | None = None,
        *,
        writes_in_forward: bool = True,
        export: bool = True,
        overlap: bool = False,
        policy: str = "fcfs",
        running: int = 6,
        attention_groups: int = 1,
        window: int = 0,
        index: int = 0,
        block: int = BLOCK,
        unit: int = UNIT,
        recurrent_groups: int = 2,
        speculative: dict[str, Any] | None = None,
        kv_events: str | None = None,
        pins: float | None = None,
        connector: dict[str, Any] | None = None,
        weights: Weights = WEIGHTS,
        stages: int = 1,
        context_ranks: int = 1,
        longest: int = 6144,
    ) -> None:
        """`writes_in_forward`: the worker promises to write states inside a pass; `export`: its backend can do so once,
        at the tail, as vLLM asks for it; `overlap`: the next step is planned before the last one's tokens are known.
        `attention_groups`: 0 for a model that has recurrent layers alone; `window`: of its attention layers, in tokens.
        `index`: tokens that its attention's index has one key for, beside a ring of raw keys; such a model has a
        convolution, too, in a recurrent group of its own. `unit`: the match unit, at most a block.
        `speculative`, `connector`: as vLLM's `--speculative-config` and `--kv-transfer-config`. Steps can be audited in
        blocks of `BLOCK` tokens.
        `kv_events`: what its KV events announce (`SEAMARK_KV_EVENTS`), which are audited then; None: events are off.
        `pins`: the share of the cache that pins may hold; None: the default.
        `stages`: workers that compute a step one after the other, each some of the layers (pipeline parallel), so that
        so many steps are under way, and one more with `overlap`.
        `context_ranks`: workers to which the rows of an attention block are dealt out (decode context parallel), each
        with `block` of them. States are whole on each.
        `longest`: tokens of a request.
        """
        config = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=longest,
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
        config.parallel_config.pipeline_parallel_size = stages
        config.parallel_config.decode_context_parallel_size = context_ranks
        config.seamark_weights = weights
        if connector:  # a CPU's configuration plans no step ahead
            config.scheduler_config.async_scheduling = overlap

        def state(**more: Any) -> MambaSpec:
            spec = MambaSpec(
                block_size=block,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=speculative["num_speculative_tokens"] if speculative else 0,
                num_prefill_checkpoint_blocks=int(export),
                prefill_checkpoint_alignment=1 if export else None,
                **more,
            )
            if writes_in_forward:
                promise(spec)
            return spec

        rows = dict(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
        attention = SlidingWindowSpec(**rows, sliding_window=window) if window else FullAttentionSpec(**rows)
        layers: dict[str, Any] = {"m0": state()}
        if attention_groups:
            layers |= {"a0": attention, "m1": state()}
            layers |= {f"a{number}": attention for number in range(1, attention_groups)}
            layers |= {f"m{number}": state() for number in range(2, recurrent_groups)}
        if index:
            layers["a index"] = MLAAttentionSpec(**rows, tokens_per_state=index)
            layers["ring"] = CircularBufferSpec(**rows, head_size_v=0)
            layers["m ngrams"] = state(mamba_type=MambaAttentionBackendEnum.SHORT_CONV)
        groups = [KVCacheGroupSpec([name], spec) for name, spec in layers.items()]
        self.unit, self.index_tokens = unit, index or 1
        self.recurrent, self.attention, self.keyless = (
            [number for number, name in enumerate(layers) if name.startswith(kind)] for kind in ("m", "a", "ring")
        )
        self.windows = dict.fromkeys(self.attention, window) if window else {}  # in tokens, by group
        self.worker = worker or Worker()
        self.worker.core = self
        self.worker.place_layers(groups)
        # Tokens of a block, by group. Which rank has a row, and where, follows from its place among them.
        self.spans = [resolve_dcp_kv_block_size(group.kv_cache_spec, context_ranks) for group in groups]
        self.export, self.policy = export, policy
        self.overlap, self._under_way = overlap, stages + overlap  # steps, at most
        if kv_events:
            os.environ[settings.KV_EVENTS] = kv_events
        if pins is not None:
            os.environ[settings.PIN_SHARE] = str(pins)
        self.scheduler: Any = (AsyncScheduler if overlap else Scheduler)(
            config,
            KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            StructuredOutputManager(config),
            block_size=math.lcm(*self.spans),
            hash_block_size=unit,
            log_stats=False,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        ahead = getattr(config, "num_hash_lookahead_tokens", 0)  # from vLLM 0.33 on
        self.hasher = get_request_block_hasher(unit, sha256, **({"num_hash_lookahead_tokens": ahead} if ahead else {}))
        self.errors: list[str] = []
        self.counts = Counter(dict.fromkeys((*COUNTED, *self.worker.counted), 0))
        self.chunk_ends: dict[str, list[int]] = {}  # by request
        self.written: dict[str, list[int]] = {}  # positions of its states
        self.hits: dict[str, int] = {}  # tokens each request started with, when first admitted
        self.stored: dict[str, tuple[Any, int]] = {}  # by name, states that events say can be found: hashes, position
        self.ever: dict[str, Request] = {}
        announced = max(self.spans) if kv_events == settings.BLOCKS else unit  # tokens, of an attention block or a unit
        self.index = KvEventIndex(announced) if kv_events else None
        self._last_held: set[int] = set()
        if kv_events:
            self.scheduler.kv_event_publisher = self
        self._meant: dict[bytes, tuple[int, int]] = {}  # block hash -> prefix, its length
        self.unkept: set[str] = set()  # requests of which nothing may be found
        self._kept: set[bytes] = set()  # block hashes of all others
        self._recorded: Counter[str] = Counter()  # hashes of each request whose meaning is known
        self._planned: deque[Any] = deque()  # steps that are not computed
        self._computed: deque[tuple[Any, dict[str, list[int]]]] = deque()  # those that the scheduler does not know yet
        self.worker.start()

    def request(
        self,
        name: str,
        tokens: Sequence[int],
        hint: object = None,
        max_tokens: int = 1,
        salt: str | None = None,
        priority: int = 0,
        transfer: dict[str, Any] | None = None,
        pin: int | None = None,
        extra: Mapping[str, Any] = {},
        stop: bool = False,
        trial: bool | None = None,
    ) -> Request:
        """`transfer`: its `kv_transfer_params`. `pin`, `extra`: as the gateway asks for it. `stop`: a 0 ends it, which
        the scheduler does not know before it is told. `trial`: the engine asks it itself, and whether it leaves states
        on trial."""
        extra = dict(extra) if hint is None else {**extra, "seamark_boundaries": hint}
        if pin is not None:
            extra["seamark_pin"] = pin
        if transfer is not None:
            extra["kv_transfer_params"] = transfer
        parameters = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[0] * stop, extra_args=extra or None
        )
        request = Request(
            name, list(tokens), parameters, None, block_hasher=self.hasher, cache_salt=salt, priority=priority
        )
        if trial is not None:
            setattr(request, OWN, trial)
        if extra.get("seamark_keep") in ("no", "private"):
            self.unkept.add(name)
        self.worker.tokens[name] = list(tokens)
        self.ever[name] = request
        self._record_meanings()
        self.scheduler.add_request(request)
        del self.worker.tokens[name][request.num_prompt_tokens :]  # one that prefills for another engine computes fewer
        return request

    def run(self, most: int = 2000) -> None:
        """Step until all requests are over."""
        self._step_while(lambda: self.scheduler.has_unfinished_requests() or self._computed, most)

    def drain(self, most: int = 4000) -> None:
        """Step until nothing is under way."""
        self._step_while(lambda: self.busy, most)

    def _step_while(self, condition: Callable[[], Any], most: int) -> None:
        for _ in range(most):
            if not condition():
                return
            self.step()
        self.errors.append(f"stuck: {self.scheduler.get_request_counts()} running and waiting")

    @property
    def waiting(self) -> int:
        """Requests that are not begun."""
        return len(self.scheduler.waiting)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        steps = self._planned or self._computed
        return bool(self.scheduler.has_unfinished_requests() or steps or self.worker.busy)

    def step(self) -> Any:
        """Plan a step, compute it, check every key, and report back what was sampled.

        An engine that plans ahead computes, or reports, as many steps behind the plan of the next as are under way.
        """
        self.worker.before_step()
        output = self.scheduler.schedule()
        self.worker.planned(output)
        self._record_meanings()
        self._check_events()
        behind = self._under_way - 1 if output.total_num_scheduled_tokens else 0
        self._planned.append(output)
        while len(self._planned) > (behind if self.worker.late else 0):
            planned = self._planned.popleft()
            self._computed.append((planned, self.worker.compute(planned)))
        if not self._planned:
            self._check_keys()
            self._check_unkept()
        self.worker.computed()
        while len(self._computed) > (0 if self.worker.late else behind):
            self._report(*self._computed.popleft())
        return output

    def abort(self, name: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self) -> bool:
        """Try to empty the cache, in vain while a block is used."""
        emptied = bool(self.scheduler.reset_prefix_cache())
        self.counts["resets"] += emptied
        return emptied

    def forget_sampled(self, name: str) -> None:
        """What the running step samples for a request will be dropped."""
        self.worker.tokens[name] = list(self.scheduler.requests[name].all_token_ids)

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

    def first_read(self, group: int, start: int) -> int:
        """The first position that an attention group reads for what comes behind `start`."""
        return max(start - self.windows[group] + 1, 0) if group in self.windows else 0

    @property
    def plugin(self) -> dict[str, Any]:
        """What the plugin is set to."""
        checkpoints = self.scheduler.seamark
        return {
            "enabled": checkpoints.states is not None,
            "inside_pass": checkpoints.writes_in_forward,
            "on_trial": checkpoints.drafts.state == "trial",
            "refused": checkpoints.refusal.cause if checkpoints.refusal is not None else None,
            "ignored": dict(checkpoints.counters.counts.ignored),
        }

    def _found(self, block_hashes: Any, most: int) -> int:
        # By a prompt that shares no more than it takes: a longer one may enter a group by a later key.
        drop = self.scheduler.seamark.grid.drop
        hashes = list(block_hashes)[: (most + drop) // self.unit]
        coordinator = self.scheduler.kv_cache_manager.coordinator
        if not drop or hasattr(kv_cache_coordinator, "eagle_proof_margin"):
            return coordinator.find_longest_cache_hit(hashes, most)[1]
        # vLLM 0.31 looks for a head's rows, too, no further than it is asked to. So whoever finds a state there reaches
        # a unit further in all groups; of those without a head's rows no more is promised than in newer versions.
        found = coordinator.find_longest_cache_hit(hashes, most + drop)[1]
        lengths, groups = coordinator.find_longest_cache_hit_per_group(hashes, most)[1], coordinator.attention_groups
        return min([found, *(lengths[group.group_ids[0]] for group in groups if not group.use_eagle)])

    def _record_meanings(self) -> None:
        kept = (each for name, each in self.ever.items() if name not in self.unkept)
        self._kept.update(*(each.block_hashes for each in kept if self.unkept or not each.is_finished()))
        if not self.worker.judges_keys:
            return
        for name, request in self.ever.items():  # a last step is cached under hashes of a request that is gone by then
            tokens, first = self.worker.tokens[name], self._recorded[name]
            new = request.block_hashes[first : len(tokens) // self.unit]
            names = prefixes(tokens) if new else []
            for length, block_hash in zip(itertools.count((first + 1) * self.unit, self.unit), new, strict=False):
                self._meant[bytes(block_hash)] = names[length], length
            self._recorded[name] += len(new)

    def _check_events(self) -> None:
        """vLLM's own lookup finds the states that events say can be found, and no state that they say was evicted."""
        states = self.scheduler.seamark.states
        for _, event in states.events.take() if states is not None and self.worker.judges_keys else ():
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
                    self.counts["evicted"] += 1
                    if self._found(*self.stored[state]) == self.stored.pop(state)[1]:
                        self.errors.append("a state is reported as evicted, and is found")
                case CacheCleared():
                    self.stored.clear()
        for hashes, position in self.stored.values():
            if self._found(hashes, position) != position:
                self.errors.append(f"a state at {position} is reported as stored, and is not found")

    def publish(self, batch: Any) -> None:
        """As vLLM's publisher of KV events."""
        for event in batch.events:
            self.index.apply(msgspec.to_builtins(event))

    def _check_kv_events(self) -> None:
        """An index built from KV events holds what leads to a state that vLLM's own lookup finds, and nothing else."""
        if self.index is None:
            return
        resumable: set[int] = set()
        for request in self.ever.values():
            found = self._found(request.block_hashes, len(request.block_hashes) * self.unit)
            resumable.update(self.index.keys(request.all_token_ids[:found], request.cache_salt))
        held = self.index.held
        if held - resumable:
            self.errors.append(f"{len(held - resumable)} blocks are announced that lead to no state")
        self.errors += [f"KV events: {surprise}" for surprise in self.index.surprises]
        self.index.surprises.clear()
        self.counts["missing"] += len(resumable - held)
        self.counts["announced"] += len(held - self._last_held)
        self.counts["withdrawn"] += len(self._last_held - held)
        self._last_held = set(held)

    def _check_keys(self) -> None:
        """Every key must lead to blocks that hold what it promises."""
        keys = self.pool.cached_block_hash_to_block._cache if self.worker.judges_keys else {}
        for key, entry in keys.items():
            wanted, length = self._meant[bytes(get_block_hash(key))]
            group = get_group_id(key)
            if group in self.keyless:
                self.errors.append("a ring has a key, and is each request's own")
            slot = (length - 1) % self.spans[group] if group in self.attention else "state"
            blocks = blocks_of(entry)
            if group in self.windows:
                rows = range(slot + 1)
                if any(row not in self.worker.contents.get(block.block_id, {}) for block in blocks for row in rows):
                    self.errors.append(f"key of {length} tokens in group {group} leads to rows that nobody computed")
            for block in blocks:
                if self.worker.contents.get(block.block_id, {}).get(slot) != wanted:
                    self.errors.append(f"key of {length} tokens in group {group} leads to a wrong block")

    def _check_unkept(self) -> None:
        """Nothing of a request that is not kept is cached, stored, learnt or waited for, unless another one has it."""
        if not self.unkept:
            return
        checkpoints = self.scheduler.seamark
        places: dict[str, Iterable[bytes]] = {
            "cached": map(get_block_hash, self.pool.cached_block_hash_to_block._cache),
            "seen": checkpoints.seen._hashes,
            "missed": checkpoints.outcomes._misses,
            "parted": checkpoints.expected_junctions._parted,
            "a turn's end": [*checkpoints.turn_value._ends, *checkpoints.turn_value._judged],
            "expected": checkpoints.gate._expected if checkpoints.gate is not None else (),
            "stored": [key[:-4] for key in getattr(self.worker, "written", ())],
        }
        for place, hashes in places.items():
            left = sum(bytes(each) not in self._kept for each in hashes)
            self.errors += [f"{left} prefixes of what is not kept are {place}"] * bool(left)
        self.counts["unkept"] = len(self.unkept)

    def _report(self, output: Any, sampled: dict[str, list[int]]) -> None:
        output.seamark_planned_at = float("inf")  # what a stand-in's steps take teaches nothing
        names = list(output.num_scheduled_tokens)
        runner = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=self.worker.connector_output(),
        )
        known = [self.ever[name].status for name in names if name in self.ever]
        self.counts["ended_late"] += known.count(RequestStatus.FINISHED_STOPPED)  # a step before
        answers = self.scheduler.update_from_output(output, runner)
        self._check_kv_events()
        self._record_meanings()
        self.worker.reported(output, answers)


def blocks_of(entry: Any) -> list[KVCacheBlock]:
    """Those of a key in vLLM's map of cached blocks."""
    return [entry] if isinstance(entry, KVCacheBlock) else list(entry.values())
