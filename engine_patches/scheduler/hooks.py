"""Where the bookkeeping meets vLLM's scheduler: set up, states seen written, hits seen, counts handed over."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine_patches import settings
from engine_patches.forward.layers import WRITES_IN_FORWARD
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.fan_out import PrefillGate
from engine_patches.scheduler.hints import HINTED, TAIL
from engine_patches.scheduler.match_unit import state_alignment
from engine_patches.scheduler.preflight import SelfTestFailed, run
from engine_patches.scheduler.retention import Retention
from engine_patches.scheduler.state_events import Findable

logger = logging.getLogger("vllm.seamark")


def set_up_checkpoints(original: Callable) -> Callable:
    """Replacement of `Scheduler.__init__`: every scheduler and its cache managers share one `Checkpoints`."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.seamark = checkpoints = Checkpoints(match_unit=self.hash_block_size, block_size=self.block_size)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        recurrent = [manager for manager in managers if isinstance(manager, MambaManager)]
        if recurrent and (self.num_spec_tokens or self.use_eagle_block_drop):
            # A draft model shifts what a prefix must cover; a checkpoint at the exact end would never match.
            checkpoints.refuse_all = "speculative"
            logger.warning("seamark: speculative decoding is on: hints are refused, vLLM caches as it does alone")
        elif recurrent and self.mamba_partial_cache_hit and _rehearsed():
            groups = self.kv_cache_manager.kv_cache_config.kv_cache_groups
            checkpoints.enabled = True
            checkpoints.block_sizes = {manager.kv_cache_group_id: manager.block_size for manager in recurrent}
            checkpoints.attention_managers = [m for m in managers if isinstance(m, FullAttentionManager)]
            pool = self.kv_cache_manager.block_pool
            checkpoints.findable = pool.seamark_findable = Findable(
                pool, self.hash_block_size, checkpoints.recurrent_groups, checkpoints.attention_managers
            )
            checkpoints.state_bytes = sum(
                groups[group].kv_cache_spec.page_size_bytes * len(groups[group].layer_names)
                for group in checkpoints.recurrent_groups
            )
            # Connectors load into and store from blocks they were told of; ours are taken after that.
            checkpoints.exporting = self.connector is None and all(
                getattr(groups[group].kv_cache_spec, WRITES_IN_FORWARD, False) for group in checkpoints.recurrent_groups
            )
            if checkpoints.exporting:
                specs = [groups[group].kv_cache_spec for group in checkpoints.recurrent_groups]
                checkpoints.alignment = state_alignment(specs, self.vllm_config, self.hash_block_size)
                checkpoints.retention = Retention(pool, settings.state_share())
                checkpoints.gate = PrefillGate(checkpoints.pace, self.hash_block_size) if settings.fan_out() else None
            logger.info(
                "seamark: states are written %s, on multiples of %d tokens; match unit %d, cache block %d tokens",
                "inside the pass" if checkpoints.exporting else "where a chunk is cut, one pass each",
                checkpoints.alignment,
                checkpoints.match_unit,
                checkpoints.block_size,
            )
        for manager in (self.kv_cache_manager, *managers):
            manager.seamark = checkpoints
        for manager in recurrent if checkpoints.enabled else ():
            if checkpoints.exporting:  # all states are ours: vLLM's own export would write into blocks that we hide
                manager.has_prefill_checkpoint_blocks = False
            else:
                manager.shared_prefix_checkpoint = True
        if checkpoints.exporting:
            self.mamba_has_prefill_checkpoint_blocks = False

    return __init__


def _rehearsed() -> bool:
    try:
        run()
    except SelfTestFailed as error:
        logger.error("seamark: no checkpoints, this vLLM's cache fails the self-test: %s", error)
        return False
    return True


def leave_to_writes(original: Callable) -> Callable:
    """Replacement of `MambaManager._cache_partial_tail_block`, which registers the state at a chunk's end.

    Where states are written inside the pass there is nothing left for it to do; where not, they are counted.
    """

    def _cache_partial_tail_block(self, request, num_tokens, retention_interval):
        checkpoints = getattr(self, "seamark", None)
        if checkpoints is not None and checkpoints.exporting:
            return None
        key = original(self, request, num_tokens, retention_interval)
        if key is None or checkpoints is None or not checkpoints.enabled:
            return key
        # All recurrent groups register the same position; one of them speaks for all.
        if self.kv_cache_group_id == checkpoints.recurrent_group:
            hint = checkpoints.hint_of(request)
            checkpoints.state_written(key, HINTED if hint is not None and num_tokens in hint.positions else TAIL)
        return key

    return _cache_partial_tail_block


def note_hits(original: Callable) -> Callable:
    """Replacement of `KVCacheManager.record_prefix_cache_stats`, called once for each admitted request."""

    def record_prefix_cache_stats(self, request, num_hits):
        original(self, request, num_hits)
        checkpoints = getattr(self, "seamark", None)
        if checkpoints is not None and checkpoints.enabled:
            checkpoints.admitted(request, num_hits)

    return record_prefix_cache_stats


def forget_with_the_cache(original: Callable) -> Callable:
    """Replacement of `Scheduler.reset_prefix_cache`, which fails while any block is held."""

    def reset_prefix_cache(self, *args, **kwargs):
        self.seamark.forget_cache(self.kv_cache_manager.block_pool)
        emptied = original(self, *args, **kwargs)
        if emptied:
            self.seamark.cache_was_emptied()
        return emptied

    return reset_prefix_cache
