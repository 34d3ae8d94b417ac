"""Where this room meets vLLM's scheduler: match unit and set-up, states and hits counted, the cache emptied.

The match unit says how finely a prefix can be found again, in tokens. vLLM's default is the cache block, 500 to 8,000
tokens on a hybrid model. Pure-attention models keep their default, and so do engines that refuse hints.

A gated delta net is computed in chunks of 64 tokens from where a pass begins. A state taken inside a chunk is right,
but what follows is rounded differently than without the stop (measured in bfloat16 on a small model: 17 of 42 greedy
answers differ; on chunk ends 1 of 42). So the unit of such a model is the chunk. With a draft head vLLM takes a unit
off each match, so there the unit is fine, and states stay on chunk ends.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from engine_patches import families, kv_connectors, ledger, settings, speculation
from engine_patches.footprint import LOADED
from engine_patches.forward.layers import is_promised
from engine_patches.forward.loaded_weights import Weights
from engine_patches.kv_connectors import ConnectorLane
from engine_patches.ledger import Function, Patch, Shape, ours
from engine_patches.scheduler import draft_windows, not_kept, refusals, transfers
from engine_patches.scheduler.cache_keys import HeldKeys, keep_attention_keys
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.draft_windows import DraftWindows, left_out_spec
from engine_patches.scheduler.drafts import ON_TRIAL, DraftGate, is_own
from engine_patches.scheduler.fan_out import PrefillGate
from engine_patches.scheduler.planner import HINTED, LEARNED, TAIL, Grid, RequestState
from engine_patches.scheduler.refusals import NO_STATES, GroupRole, Refusal, refused, role_of
from engine_patches.scheduler.retention import LowBlocks
from engine_patches.scheduler.states import States
from engine_patches.scheduler.step_time import StepTime
from engine_patches.settings import logger

DEFAULT_UNIT = 16  # tokens

UNIT, BLOCK = 16, 64  # tokens, of the toy cache that is checked

# Methods of vLLM's workers that can be called from outside and only read.
LEAVE_WEIGHTS = ("compute_weight_checksums", "get_model_inspection", "synchronize_device")


def unit_of(vllm_config: Any) -> int:
    """The match unit of a hybrid with this configuration, before it has said so itself."""
    configured: int | None = vllm_config.cache_config.prefix_match_unit
    return configured or math.lcm(DEFAULT_UNIT, families.compression_in(vllm_config.model_config.hf_text_config))


def kernel_chunk(spec: Any, vllm_config: Any) -> int:
    """Tokens that the kernels of a recurrent layer compute at once, counted from the start of a pass; 1 if unknown."""
    if spec.mamba_type.name == families.MAMBA2.backend:
        return int(vllm_config.model_config.get_mamba_chunk_size() or 1)
    return max((kind.chunk for kind in families.KINDS if kind.backend == spec.mamba_type.name), default=1)


def state_alignment(specs: Sequence[Any], vllm_config: Any, match_unit: int) -> int:
    """States are placed on multiples of this many tokens; `specs` are those of the recurrent layers."""
    delta = any(spec.mamba_type.name == families.GDN.backend for spec in specs)
    if not settings.chunk_ends(default=delta):
        return match_unit
    return math.lcm(match_unit, *(kernel_chunk(spec, vllm_config) for spec in specs))


@Patch(
    "match-unit",
    f"{ledger.KV_CACHE_UTILS}:resolve_kv_cache_block_sizes",
    why="prefixes of hybrids are matched by blocks of 500 to 8,000 tokens unless the user asks for less",
    upstream="--prefix-match-unit",
    until="vLLM defaults to a fine unit for hybrids",
    mentions=("cache_config.prefix_match_unit", "raise ValueError"),
    rebind=("vllm.v1.engine.core",),
)
def default_to_fine_unit(kv_cache_config: Any, vllm_config: Any, *, original: Function) -> Any:
    """Replacement of `resolve_kv_cache_block_sizes`: if the user set nothing, hybrids get a fine unit.

    It is the finest that states are placed on, or `DEFAULT_UNIT` if that one does not divide the model's cache blocks.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    cache_config = vllm_config.cache_config
    refuses = refusals.by_configuration(vllm_config) is not None
    if not refuses:
        draft_windows.leave_out(kv_cache_config, vllm_config)
    coarse = original(kv_cache_config, vllm_config)
    groups = kv_cache_config.kv_cache_groups
    recurrent = [g.kv_cache_spec for g in groups if isinstance(g.kv_cache_spec, MambaSpec)]
    if cache_config.prefix_match_unit is not None or refuses or not recurrent or len(groups) < 2:
        return coarse
    units, compressed = {DEFAULT_UNIT}, refusals.compression(groups, vllm_config)
    if not speculation.drops(vllm_config):
        units.add(state_alignment(recurrent, vllm_config, DEFAULT_UNIT))
    for unit in sorted({math.lcm(each, *compressed) for each in units}, reverse=True):
        cache_config.prefix_match_unit = unit
        try:
            return original(kv_cache_config, vllm_config)
        except ValueError:  # the unit does not divide vLLM's blocks
            cache_config.prefix_match_unit = None
    return coarse


@Patch(
    "checkpoints-set-up",
    f"{ledger.SCHEDULER}.__init__",
    why="hints and states need one place that knows them, and states are kept between block edges too",
    until="vLLM takes checkpoint positions from requests (RFC vllm#55697)",
    mentions=(
        "self.hash_block_size = hash_block_size",
        "self.mamba_partial_cache_hit = (",
        "self.mamba_shared_prefix_checkpoint = (",
        "self.use_eagle_block_drop",
        "self.num_spec_tokens",
    ),
    relies_on=(Shape(f"{ledger.KV_CACHE_MANAGER}.__init__", mentions=("manager.shared_prefix_checkpoint",)),),
)
def set_up_checkpoints(self: Any, *args: Any, original: Function, **kwargs: Any) -> None:
    """Replacement of `Scheduler.__init__`: every scheduler and its cache managers share one `Checkpoints`."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    if refusals.by_configuration(given["vllm_config"]) is None:
        draft_windows.leave_out(given["kv_cache_config"], given["vllm_config"])
    original(self, *args, **kwargs)
    managers = self.kv_cache_manager.coordinator.single_type_managers
    recurrent = [manager for manager in managers if isinstance(manager, MambaManager)]
    refusal = _refusal(self, recurrent) if recurrent else None
    if refusal is not None:
        draft_windows.put_back(self)
        logger.warning("seamark: hints are refused, vLLM caches as it does alone: %s", refusal.cause)
    specs = [_group_of(self, manager).kv_cache_spec for manager in recurrent if refusal is None]
    connector = kv_connectors.decide(self.vllm_config) if specs else kv_connectors.WITHOUT
    in_pass = bool(specs) and connector.lane is ConnectorLane.INSIDE and all(map(is_promised, specs))
    self.seamark = checkpoints = Checkpoints(
        grid=_grid(self, specs if in_pass else ()),
        block_size=self.block_size,
        refusal=refusal,
        weights=Weights.of(self.vllm_config),
        verified=1 + self.num_spec_tokens,
        drafts=DraftGate.of(self.vllm_config, refusal) if recurrent else DraftGate(),
    )
    if specs:
        checkpoints.states = states = _states(self, recurrent, checkpoints.grid, in_pass)
        if windows := draft_windows.windows_among(managers):
            states.windows = DraftWindows(states.keys.pool, checkpoints.grid, windows, checkpoints.step_time)
        if in_pass and settings.fan_out():
            checkpoints.gate = PrefillGate(checkpoints.step_time, checkpoints.grid)
        _tell_vllm(self, recurrent, in_pass)
        warn_of_a_short_cache(self, specs)
        mamba = getattr(self.vllm_config, "mamba_config", None)
        warn_of_narrow_states(specs, at_random=bool(getattr(mamba, "enable_stochastic_rounding", False)))
        logger.info(
            "seamark: states are written %s, on multiples of %d tokens; match unit %d, cache block %d tokens%s%s",
            "inside the pass" if in_pass else "at the ends of chunks, one pass each",
            checkpoints.grid.alignment,
            checkpoints.grid.unit,
            checkpoints.block_size,
            f"; KV connector {', '.join(connector.names)}" if connector.names else "",
            f": {connector.reason}" if connector.reason else "",
        )
        if checkpoints.drafts.state == ON_TRIAL:
            told = f"until this engine's answers have agreed ({settings.DRAFTS}={settings.AUTO})"
            logger.info("seamark: beside drafts, hints are on trial: vLLM caches by itself %s", told)
        transfers.introduce(self, checkpoints, states)
        if (introduce := getattr(self.connector, "seamark_introduce", None)) is not None:  # our own
            introduce(checkpoints, states.keys.pool)
    not_kept.leave_out(self)
    checkpoints.low = LowBlocks(self)
    if checkpoints.states is not None:
        checkpoints.states.retention.low = checkpoints.low.keys
    for manager in (self.kv_cache_manager, *managers):
        manager.seamark = checkpoints


def _group_of(scheduler: Any, manager: Any) -> Any:
    return scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups[manager.kv_cache_group_id]


def _grid(scheduler: Any, written: Sequence[Any]) -> Grid:
    """Where states lie whose layers, by their specs `written`, write them inside a pass; else on any match unit."""
    unit = scheduler.hash_block_size
    alignment = state_alignment(written, scheduler.vllm_config, unit) if written else unit
    # vLLM 0.32 takes a unit off what a draft head may use; 0.33 has hashes that cover what the head reads instead.
    drop = unit if scheduler.use_eagle_block_drop else 0
    return Grid(unit, alignment, drop, drop or getattr(scheduler, "num_hash_lookahead_tokens", 0))


def _refusal(scheduler: Any, recurrent: Sequence[Any]) -> Refusal | None:
    """Why a scheduler with `recurrent` managers refuses hints; None if it does not, and has made sure that it can."""
    if (found := refusals.by_scheduler(scheduler, recurrent)) is not None:
        return found
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if fault := preflight(windows=bool(draft_windows.windows_among(managers))):
        return refused(NO_STATES, f"this vLLM's cache fails the preflight check: {fault}")
    if not ledger.rely_on_patches():
        return refused(NO_STATES, "the patches were taken back when a module of vLLM differed; the log says which")
    return None


def preflight(*, windows: bool = False) -> str:
    """How a toy cache of vLLM's own classes, and a head's `windows`, behave otherwise than relied on, or ""."""
    try:
        for what, found, wanted in itertools.chain(_cache_facts(), _window_facts() if windows else ()):
            if found != wanted:
                return f"{what}: {found!r}, expected {wanted!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _toy(name: str, units: int) -> Any:
    """As much of a vLLM `Request` of so many units as its cache looks at."""
    hashes = [bytes([number]) * 32 for number in range(1, units + 1)]
    tokens = [0] * units * UNIT
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, all_token_ids=tokens, mm_features=[], lora_request=None
    )


def _cache_facts() -> Iterator[tuple[str, Any, Any]]:
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    recurrent, attention = 0, 1  # cache groups
    pool = BlockPool(num_gpu_blocks=6, enable_caching=True, hash_block_size=UNIT)
    request = _toy("toy", 9)
    state = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    rows = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)

    def longest_hit(manager: Any, spec: Any, group: int) -> Any:
        common = dict(kv_cache_group_ids=[group], block_pool=pool, kv_cache_spec=spec, drop_eagle_block=False)
        return manager.find_longest_cache_hit(request.block_hashes, 9 * UNIT, alignment_tokens=UNIT, **common)[1]

    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(request, block, 3 * UNIT, recurrent, BLOCK)
    yield "a state inside a block is found at", longest_hit(MambaManager, state, recurrent), 3 * UNIT
    table = pool.get_new_blocks(2)
    manager = SimpleNamespace(
        req_to_blocks={"toy": table}, block_size=BLOCK, block_pool=pool, kv_cache_group_id=attention
    )
    keep_attention_keys(manager, request, [UNIT, 3 * UNIT])
    yield "attention rows inside a block are found at", longest_hit(FullAttentionManager, rows, attention), 3 * UNIT
    pool.cache_full_blocks(request, table, 0, 1, BLOCK, attention)
    keep_attention_keys(manager, request, [UNIT, 3 * UNIT, 5 * UNIT])
    for position in (1, 3, 4, 5):
        found = pool.get_cached_block(request.block_hashes[position - 1], [attention])
        yield f"the block of token {position * UNIT}", found, [table[0] if position <= 4 else table[1]]
    pool.free_blocks([block, *table])
    yield "a freed state is still found at", longest_hit(MambaManager, state, recurrent), 3 * UNIT
    pool.get_new_blocks(5)
    yield "an evicted state is found at", longest_hit(MambaManager, state, recurrent), 0
    yield "evicted attention rows are found at", longest_hit(FullAttentionManager, rows, attention), 0


def _window_facts() -> Iterator[tuple[str, Any, Any]]:
    """A request takes over a draft head's rows, or gets new blocks in their place, which are to be zeroed."""
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    request, hit, end = _toy("first", 15), 13 * UNIT, 15 * UNIT  # its window begins in the second of four blocks
    request.shared_prefix_boundary = 0
    pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=UNIT)
    spec = left_out_spec()(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=100)
    options = dict(enable_caching=True, kv_cache_group_id=0, scheduler_block_size=BLOCK, needs_kv_cache_zeroing=True)
    manager = SlidingWindowManager(spec, block_pool=pool, **options)
    windows = DraftWindows(pool, Grid(UNIT, UNIT), [manager], StepTime())

    def begins(name: str, table: list[Any]) -> list[Any]:
        manager.add_local_computed_blocks(name, table, hit, 0)
        new: list[Any] = manager.allocate_new_blocks(name, end, end)
        return new

    new = begins("first", [])
    yield "a window that is not held is", manager.req_to_blocks["first"], [pool.null_block, *new]
    yield "its blocks to zero are", manager.take_new_block_ids(), [block.block_id for block in new]
    manager.cache_blocks(request, end, replay_boundaries=[])
    yield "blocks of a window have keys", [block.block_hash for block in new], [None] * len(new)
    windows.keep(request, RequestState(), [hit])
    keys = windows.keys_at(request, hit)
    found = [pool.cached_block_hash_to_block.get_one_block(key) for key in keys]
    yield "the rows before a hit are found in", found, new
    new_for_second = begins("second", [pool.null_block, *new])
    yield "a hit takes over", manager.req_to_blocks["second"], [pool.null_block, *new[:2], *new_for_second]
    yield "a hit copies", manager.take_pending_cow_copies(), [(new[2], new_for_second[0])]


def warn_of_narrow_states(specs: Iterable[Any], *, at_random: bool = False) -> None:
    """Say so if recurrent layers keep states in fewer than 32 bits; `at_random`: and round them so while decoding."""
    narrow = sorted({str(spec.dtypes[-1]).removeprefix("torch.") for spec in specs if spec.dtypes[-1].itemsize < 4})
    if narrow and at_random:
        logger.info(
            "seamark: recurrent states are kept in %s and rounded at random in each step "
            "(--enable-mamba-cache-stochastic-rounding): no two answers of this engine are equal to the last digit, "
            "with or without a cache, and a check of them is held against that",
            ", ".join(narrow),
        )
    elif narrow:
        logger.warning(
            "seamark: recurrent states are kept in %s: an answer that resumes from one is rounded otherwise than one "
            "without a cache, with vLLM's own prefix caching too; --mamba-ssm-cache-dtype float32 avoids it",
            ", ".join(narrow),
        )


def _states(scheduler: Any, recurrent: Sequence[Any], grid: Grid, in_pass: bool) -> States:
    manager, usable = scheduler.kv_cache_manager, _usable_blocks(scheduler)
    attention = [each for each in manager.coordinator.single_type_managers if role_of(each) is GroupRole.ATTENTION]
    groups = [_group_of(scheduler, each) for each in recurrent]
    return States(
        HeldKeys(manager.block_pool, grid, recurrent, attention),
        max(0, min(int(settings.pin_share() * usable), usable - _longest_blocks(scheduler))),
        in_pass,
        settings.state_share(),
        num_bytes=sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups),
        # What a connector loads comes beside the passes: as vLLM does with a request that is done, so these blocks are
        # held until their step is, too. Without a connector they are free at once, since passes write in order.
        give_back=lambda blocks: scheduler._free_cow_retained_blocks(blocks, scheduler.sched_step_seq),
    )


def _usable_blocks(scheduler: Any) -> int:
    """Blocks of the cache; one more is vLLM's null block."""
    blocks: int = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    return blocks - 1


def _longest_blocks(scheduler: Any) -> int:
    """Blocks that vLLM wants a cache to have for the longest request; it counts the null block with the cache's."""
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups]
    return sum(-(-spec.max_memory_usage_bytes(scheduler.vllm_config) // spec.page_size_bytes) for spec in specs)


def warn_of_a_short_cache(scheduler: Any, specs: Iterable[Any]) -> None:
    """Say so if vLLM admits prompts that it can never hold; `specs` are those of the recurrent layers."""
    exported = sum(spec.num_prefill_checkpoint_blocks for spec in specs)  # counted, and used only if they are free
    needed, usable = _longest_blocks(scheduler) - exported, _usable_blocks(scheduler)
    if needed > usable:
        longest, block = scheduler.max_model_len, scheduler.block_size
        logger.warning(
            "seamark: a prompt of nearly --max-model-len %d tokens takes %d cache blocks, and vLLM has %d to give. It "
            "admits such a prompt, begins it again and again, and holds up all behind it (vllm#52520): "
            "--max-model-len %d fits",
            *(longest, needed, usable, (-(-longest // block) - 1) * block),
        )


def _tell_vllm(scheduler: Any, recurrent: Sequence[Any], in_pass: bool) -> None:
    """Have vLLM find states at any match unit, and leave to us those that are written inside a pass."""
    if refusals.finds_whole_blocks(scheduler):
        # vLLM rounds what it caches down to whole blocks, and we could not tell at which of them a chunk ends.
        scheduler.kv_cache_manager.coordinator.enable_partial_hash_hits = True
    for manager in recurrent:
        if in_pass:  # vLLM's own export would write into blocks that we hide
            manager.has_prefill_checkpoint_blocks = False
        else:
            manager.shared_prefix_checkpoint = True
    if in_pass:
        scheduler.mamba_has_prefill_checkpoint_blocks = False


@Patch(
    "tail-states",
    f"{ledger.MANAGERS}:MambaManager._cache_partial_tail_block",
    why="the state at a chunk's end is written like any other, into a block of its own",
    until="vLLM writes states at any position inside a pass",
    mentions=(
        "self.shared_prefix_checkpoint",
        "num_tokens == request.shared_prefix_boundary",
        "request.num_computed_tokens < num_tokens <= request.num_prompt_tokens",
        "self._partial_hit_reqs[request.request_id] = (block_idx, source_block)",
    ),
    relies_on=(
        Shape(
            f"{ledger.MANAGERS}:MambaManager._needs_internal_checkpoint",
            mentions=("self.has_prefill_checkpoint_blocks",),
        ),
    ),
)
def count_tail_states(self: Any, request: Any, num_tokens: int, retention_interval: Any, *, original: Function) -> Any:
    """Replacement of `MambaManager._cache_partial_tail_block`: nothing inside a pass; else its states are counted."""
    checkpoints: Any = getattr(self, "seamark", None)
    if checkpoints is not None and checkpoints.writes_in_forward:
        return None
    key = original(self, request, num_tokens, retention_interval)
    states = None if key is None or checkpoints is None else checkpoints.states
    # All recurrent groups register the same position; one of them speaks for all.
    if states is not None and self.kv_cache_group_id == next(iter(states.keys.recurrent)):
        wish = checkpoints.state_of(request).wish
        kind = LEARNED if num_tokens == wish.learned else TAIL
        checkpoints.state_written(request, key, HINTED if num_tokens in wish.hinted_positions else kind)
    return key


@Patch(
    "hit-count",
    f"{ledger.KV_CACHE_MANAGER}.record_prefix_cache_stats",
    why="requests that resume from a checkpoint are counted",
    until="vLLM counts them",
)
def count_hits(self: Any, request: Any, num_hits: int, *, original: Function) -> None:
    """Replacement of `KVCacheManager.record_prefix_cache_stats`, called once for each admitted request."""
    original(self, request, num_hits)
    checkpoints = getattr(self, "seamark", None)
    if checkpoints is None:
        return
    if not is_own(request):
        checkpoints.counters.counts.cache_hit_tokens += num_hits
    if checkpoints.states is not None:
        loaded = getattr(request, LOADED, 0)
        checkpoints.admitted(request, num_hits + loaded, loaded)


@ours(
    "cache-reset",
    f"{ledger.SCHEDULER}.reset_prefix_cache",
    why="emptying the cache fails while blocks of a running step's states are held",
    mentions=("self.kv_cache_manager.reset_prefix_cache()",),
)
def release_before_reset(self: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    checkpoints: Checkpoints = self.seamark
    checkpoints.before_reset()
    if (states := checkpoints.states) is None:
        return original(self, *args, **kwargs)
    released, emptied = states.pins.let_go(), False
    try:
        emptied = original(self, *args, **kwargs)
    finally:
        if emptied:
            states.events.clear()
        else:
            states.pins.take_again(released)
    return emptied


@Patch(
    "changed-weights",
    f"{ledger.CORE}.collective_rpc",
    why="weights that are changed while the engine runs are no longer those that its states are known by",
    until="vLLM names what it has loaded by its contents",
    parameters="self, method, timeout, args, kwargs",
)
def forget_weights_that_may_change(self: Any, method: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    """Replacement of `EngineCore.collective_rpc`, by which vLLM and trainers reload and update weights."""
    checkpoints = getattr(getattr(self, "scheduler", None), "seamark", None)
    if checkpoints is not None and method not in LEAVE_WEIGHTS:
        checkpoints.weights_may_change()
    return original(self, method, *args, **kwargs)
