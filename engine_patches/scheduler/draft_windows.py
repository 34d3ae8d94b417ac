"""Draft heads whose own attention has a sliding window: their rows follow a hit where they can, and never decide one.

Such a head (most of `dflash`, some of `mtp`) has its rows in cache groups of its own. vLLM enters a sliding window at
whole blocks only, and then looks up all groups in whole blocks. But a row that a head misses costs drafts and no
answer: the target verifies every token. So these groups are left out of the lookup (`prefix_cacheable`, as vLLM's own
circular buffers are). Of the head's window before the place where a request resumes:

- its rows are held: their blocks carry keys of ours, at the positions of states. The request takes them over as it
  takes attention rows;
- they are not, or not all of them: the hit is given up for once, in favour of a shorter one, if computing the rows
  again costs less than the drafts that would be lost. They carry keys again then, for all who follow;
- that would cost more: vLLM gives the request new blocks for the window, zeroed as each new attention block of a hybrid
  is. The head drafts from zeros until its window has passed them, and blocks that hold any never get a key.

On vLLM 0.32 a head that reads one token past a row (MTP) may find its last row made with another: it drafts one worse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from engine_patches import ledger
from engine_patches.ledger import KV_CACHE_MANAGER, KV_CACHE_UTILS, RUNNER_V1, RUNNER_V2, Function, Patch, Shape, holds
from engine_patches.scheduler.cache_keys import key_at, look_up
from engine_patches.scheduler.earlier_prompts import Latest
from engine_patches.scheduler.planner import Grid, RequestState
from engine_patches.scheduler.step_time import StepTime

PATCH = "draft-windows"  # that puts rows into hits

# What a hit finds of the window: all of it, or none; or it was given up so that the next one finds it again.
HELD, ZEROED, HEALED = "held", "zeroed", "healed"

# vLLM 0.31 asks all groups for what they find between blocks.
LEFT_OUT_OF_LOOKUPS = Shape(
    f"{KV_CACHE_UTILS}:partial_hash_hits_enabled", mentions=("if group.kv_cache_spec.prefix_cacheable\n",)
)

MAX_HEALED = 4096  # states whose hits were given up for their windows, so that none is twice in a row
MAX_LOOKUPS = 8  # shorter hits that are looked up in place of one that is given up
ASSUMED_LOSS = 0.5  # drafts that a step loses from zeros, until steps have shown it: public reports name .3 to .7

# Steps with and without rows, each, before what they show is believed; and before they are halved, to follow a change.
ENOUGH_STEPS, MOST_STEPS = 256, 65_536

Blocks = list[tuple[Any, bytes]]  # vLLM's KVCacheBlocks, each with the key that it is found by


def leave_out(kv_cache_config: Any, vllm_config: Any) -> None:
    """Take the draft head's windowed groups of a scheduler's cache out of the lookup of prefixes."""
    has_zeros = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    if vllm_config.speculative_config is not None and has_zeros and can_be_left_out():
        for group in kv_cache_config.kv_cache_groups:
            if _is_a_heads_window(group, vllm_config):
                group.kv_cache_spec = _copied(group.kv_cache_spec, left_out_spec())


def can_be_left_out() -> bool:
    """Whether this vLLM's lookup can leave a window out: 0.31's asks all groups."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return ledger.has_patch(KVCacheManager.get_computed_blocks, PATCH)


def put_back(scheduler: Any) -> None:
    """Undo `leave_out` in a vLLM `Scheduler` whose hints are refused: vLLM caches as it does alone."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    cache = scheduler.kv_cache_manager
    coordinator, managers = cache.coordinator, windows_among(cache.coordinator.single_type_managers)
    for manager in managers:
        group = cache.kv_cache_config.kv_cache_groups[manager.kv_cache_group_id]
        group.kv_cache_spec = manager.kv_cache_spec = _copied(group.kv_cache_spec, SlidingWindowSpec)
    if managers:
        scheduler.mamba_partial_cache_hit = scheduler.mamba_shared_prefix_checkpoint = False
        # vLLM 0.33 has told its workers that hits are fine. So they would write states inside a pass elsewhere than its
        # managers take them to be: states come from the ends of chunks.
        scheduler.mamba_has_prefill_checkpoint_blocks = False
        coordinator.enable_partial_hash_hits = False
        for manager in coordinator.single_type_managers:
            manager.cache_hit_alignment_tokens = coordinator._cache_hit_alignment_tokens
            if hasattr(manager, "has_prefill_checkpoint_blocks"):
                manager.has_prefill_checkpoint_blocks = False
        coordinator.verify_and_split_kv_cache_groups()


def windows_among(managers: Iterable[Any]) -> list[Any]:
    return [manager for manager in managers if type(manager.kv_cache_spec).__name__ == "DraftWindowSpec"]


def _is_a_heads_window(group: Any, vllm_config: Any) -> bool:
    """Whether all layers of a cache group are a draft head's and have a window, which vLLM enters at whole blocks only.

    A row that the target misses would cost an answer. So it does not suffice that vLLM 0.33 says whose a spec is: one
    that is shared is said to be the first layer's.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = group.kv_cache_spec
    if type(spec) is not SlidingWindowSpec:
        return False
    layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    return getattr(spec, "is_draft", True) and all(_is_a_heads_layer(name, layers) for name in group.layer_names)


def _is_a_heads_layer(name: str, num_layers: int) -> bool:
    """Whether a layer of this name is none of the target's `num_layers`, behind which vLLM counts a head's."""
    parts = name.split(".")
    return "mtp" in parts or next((int(part) for part in parts if part.isdecimal()), -1) >= num_layers


def _copied(spec: Any, kind: Any) -> Any:
    return kind(**{each.name: getattr(spec, each.name) for each in fields(spec) if each.init})


@cache
def left_out_spec() -> Any:
    """The class of a spec that is left out: vLLM's `SlidingWindowSpec`, and nothing to look up."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    class DraftWindowSpec(SlidingWindowSpec):  # type: ignore[misc]
        @property
        def prefix_cacheable(self) -> bool:
            return False

    return DraftWindowSpec


class Acceptance:
    """Drafts that were right, in steps of requests with their head's rows, and of those that began on zeros."""

    def __init__(self) -> None:
        self.steps, self.accepted = [0, 0], [0, 0]  # by whether the rows were there

    def add(self, rows: bool, steps: int, accepted: int) -> None:
        self.steps[rows] += steps
        self.accepted[rows] += accepted
        if self.steps[rows] > MOST_STEPS:
            self.steps[rows] //= 2
            self.accepted[rows] //= 2

    def per_step(self, rows: bool) -> float:
        return self.accepted[rows] / self.steps[rows] if self.steps[rows] else 1.0

    @property
    def loss(self) -> float:
        """Drafts that a step of an answer on zeros has right less."""
        if min(self.steps) < ENOUGH_STEPS:
            return ASSUMED_LOSS
        return max(self.per_step(True) - self.per_step(False), 0.0)

    def steps_lost(self, missing: int, window: int, answer: int) -> float:
        """Passes more that an answer takes if `missing` rows of the `window` are zeros, with each token one less."""
        tokens = max(min(missing, answer - 1), 0)  # the first token has no drafts
        loss = self.loss * (missing - tokens / 2) / window
        good = 1 + self.per_step(True)
        return max(tokens / max(good - loss, 1.0) - tokens / good, 0.0)


class DraftWindows:
    """The windowed groups of one scheduler's draft head. Positions and lengths in tokens."""

    def __init__(self, pool: Any, grid: Grid, managers: Sequence[Any], step_time: StepTime) -> None:
        """`managers`: vLLM's, of groups that are left out."""
        self._pool, self._grid, self._managers, self._step_time = pool, grid, managers, step_time
        self.groups = {manager.kv_cache_group_id for manager in managers}  # of the cache
        self._healed: Latest[None] = Latest(MAX_HEALED)  # keys of states, since their windows were last found
        self.acceptance = Acceptance()

    def keep(self, request: Any, state: RequestState, positions: Sequence[int]) -> dict[int, Blocks]:
        """Make the rows before `positions`, computed by this step's end, findable; the blocks of each whole window."""
        kept: dict[int, Blocks] = defaultdict(list)
        for manager in self._managers:
            size, blocks = manager.block_size, manager.req_to_blocks[request.request_id]
            all_ends: dict[int, set[int]] = defaultdict(set)  # by index of a block
            for position in positions:
                window = _window(manager, position)
                if not window or window[-1] >= len(blocks) or window[0] * size < state.drafts_from:
                    continue
                if not any(blocks[index].is_null for index in window):
                    for index, key in zip(window, self._keys(manager, request, position), strict=True):
                        all_ends[index].add(min((index + 1) * size, position))
                        kept[position].append((blocks[index], key))
            for index, ends in all_ends.items():
                # vLLM drops a block's shorter keys when a longer one comes.
                ends.update(position for position in state.states if index * size < position < max(ends))
                for end in sorted(ends, reverse=True):
                    self._pool.cache_partial_block(request, blocks[index], end, manager.kv_cache_group_id, size)
        return kept

    def _keys(self, manager: Any, request: Any, position: int) -> Iterator[bytes]:
        """The keys of the blocks that a request reads in a group that resumes at `position`."""
        for index in _window(manager, position):
            end = min((index + 1) * manager.block_size, position)
            yield key_at(request, end, self._grid.unit, manager.kv_cache_group_id)

    def keys_at(self, request: Any, position: int) -> tuple[bytes, ...]:
        """The keys of all blocks in the windows before `position`; none if one of them is gone."""
        keys = tuple(key for manager in self._managers for key in self._keys(manager, request, position))
        return keys if all(map(self._block, keys)) else ()

    def _block(self, key: bytes) -> Any:
        return self._pool.cached_block_hash_to_block.get_one_block(key)

    def of_hit(self, manager: Any, request: Any, found: Any, *, ours: bool) -> Any:
        """What vLLM `found` (blocks, hit, junction), or a shorter hit, with rows. `ours`: it may resume without."""
        checkpoints = manager.seamark
        state: RequestState = checkpoints.state_of(request)
        state.drafts_from, state.window, state.heals = 0, "", 0
        hit = found[1]
        if not hit:
            return found
        if self.keys_at(request, hit):
            state.window = HELD
            return self._with_rows(request, found)
        if not ours:
            shorter = self._shorter(manager, request, hit, hit)
            return self._with_rows(request, shorter) if shorter is not None else (manager.empty_kv_cache_blocks, 0, 0)
        name = checkpoints.states.keys.state_key(request, hit)
        may_heal = state.wish.is_kept and name not in self._healed
        shorter = self._to_heal(manager, request, hit) if may_heal else None
        if shorter is None:
            state.drafts_from, state.window = hit, ZEROED
            return found
        state.heals, state.window = hit, HEALED
        if shorter[1] and not self.keys_at(request, shorter[1]):
            state.drafts_from = shorter[1]
            return shorter
        return self._with_rows(request, shorter)

    def _with_rows(self, request: Any, found: Any) -> Any:
        """A hit, with the blocks of the windows before it, which are held."""
        blocks, hit, _ = found
        for manager in self._managers if hit else ():
            window = [self._block(key) for key in self._keys(manager, request, hit)]
            blocks.blocks[manager.kv_cache_group_id][:] = [manager._null_block] * _window(manager, hit).start + window
        return found

    def _to_heal(self, manager: Any, request: Any, hit: int) -> Any:
        """A shorter hit, behind which the window before `hit` is computed; None if that costs more than drafts."""
        if not self._pays(request, hit, 1):  # whatever the shorter one is
            return None
        # A block that holds zeros before the first row that is read gets no key.
        first = min(_window(each, hit).start * each.block_size for each in self._managers)
        shorter = self._shorter(manager, request, hit, first)
        return shorter if shorter is not None and self._pays(request, hit, hit - shorter[1]) else None

    def _shorter(self, manager: Any, request: Any, hit: int, first: int) -> Any:
        """The longest hit below `hit` whose rows are held, or that ends up to `first`; None if it is not found soon."""
        at_most = hit
        for _ in range(MAX_LOOKUPS):
            shorter = look_up(manager, request, at_most - 1)
            at_most = shorter[1]
            if not at_most or (first < hit and at_most <= first) or self.keys_at(request, at_most):
                return shorter
        return None

    def _pays(self, request: Any, hit: int, tokens: int) -> bool:
        """Whether computing so many `tokens` again takes less time than drafts lost by this request and the next."""
        if not self._step_time.known:
            return True  # as far as is known
        window = max(manager.sliding_window for manager in self._managers)
        missing = window - 1 - (request.num_tokens - hit)
        if missing <= 0:
            return False
        lost = 2 * self.acceptance.steps_lost(missing, window, request.max_tokens)
        return tokens < self._step_time.tokens_worth(decodes=lost)

    def admitted(self, state: RequestState, name: bytes) -> None:
        """A request starts, as `of_hit` has last said. `name`: as there, or of the hit that it was given up for."""
        if state.window == HELD:
            self._healed.pop(name, None)
        elif state.window == HEALED:
            self._healed[name] = None

    def clear(self) -> None:
        self._healed.clear()


def _window(manager: Any, position: int) -> range:
    """Indices of the blocks that a request reads in a group that resumes at `position`."""
    return range(manager.get_num_skipped_tokens(position) // manager.block_size, -(-position // manager.block_size))


@Patch(
    PATCH,
    f"{KV_CACHE_MANAGER}.get_computed_blocks",
    why="a draft head's sliding window makes vLLM find whole blocks only; its rows can follow a hit instead",
    upstream="vllm#53786, #54360",
    until="vLLM finds sliding windows at any match unit (`supports_fine_grained_hash_lookup`)",
    relies_on=(
        LEFT_OUT_OF_LOOKUPS,
        Shape(
            "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
            mentions=("if not g.kv_cache_spec.prefix_cacheable:\n                continue",),
        ),
        # A row that is not held is zero: new blocks are zeroed first, and then some are copied over.
        Shape(
            f"{RUNNER_V1}:GPUModelRunner._update_states",
            mentions=(
                "self._zero_block_ids(scheduler_output.new_block_ids_to_zero)\n"
                "        if scheduler_output.kv_cache_block_copies:",
            ),
        ),
        Shape(
            f"{RUNNER_V2}:GPUModelRunner.update_requests",
            mentions=(
                "self.kv_block_zeroer.zero_block_ids(scheduler_output.new_block_ids_to_zero)\n\n"
                "        # Apply copy-on-write block copies for partial prefix-cache hits, after\n",
            ),
        ),
    ),
    applies=lambda: holds(LEFT_OUT_OF_LOOKUPS),
)
def put_rows_into_hits(self: Any, request: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    found = original(self, request, *args, **kwargs)
    checkpoints = getattr(self, "seamark", None)
    if checkpoints is None or checkpoints.states is None or checkpoints.states.windows is None:
        return found
    return checkpoints.states.windows.of_hit(self, request, found, ours=checkpoints.drafts.admits(request))
