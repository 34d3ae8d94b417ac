"""Where the bookkeeping meets vLLM's scheduler: set up, states seen written, hits seen, counts handed over."""

from __future__ import annotations

from collections.abc import Callable

from engine_patches.checkpoints import Checkpoints
from engine_patches.report import attach

HINTED, TAIL = "hinted", "tail"


def set_up_checkpoints(original: Callable) -> Callable:
    """Replacement of `Scheduler.__init__`: every scheduler and each of its cache managers share one `Checkpoints`."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        checkpoints = Checkpoints(match_unit=self.hash_block_size, block_size=self.block_size)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        groups = self.kv_cache_manager.kv_cache_config.kv_cache_groups
        recurrent = [index for index, manager in enumerate(managers) if isinstance(manager, MambaManager)]
        if recurrent and self.mamba_partial_cache_hit:
            checkpoints.enabled = True
            checkpoints.recurrent_group = managers[recurrent[0]].kv_cache_group_id
            checkpoints.state_bytes = sum(
                groups[index].kv_cache_spec.page_size_bytes * len(groups[index].layer_names) for index in recurrent
            )
            if self.num_spec_tokens or self.use_eagle_block_drop:
                # A draft model shifts what a prefix must cover; a checkpoint at the exact end would never match.
                checkpoints.refuse_all = "speculative"
        for manager in managers:
            manager.seamark = checkpoints
            if checkpoints.enabled and checkpoints.refuse_all is None and isinstance(manager, MambaManager):
                manager.shared_prefix_checkpoint = True
        self.seamark = checkpoints

    return __init__


def note_written_states(original: Callable) -> Callable:
    """Replacement of `MambaManager._cache_partial_tail_block`, which registers the state at a chunk's end."""

    def _cache_partial_tail_block(self, request, num_tokens, retention_interval):
        key = original(self, request, num_tokens, retention_interval)
        checkpoints = getattr(self, "seamark", None)
        # All recurrent groups register the same position; one of them speaks for all.
        if key is not None and checkpoints is not None and self.kv_cache_group_id == checkpoints.recurrent_group:
            hint = checkpoints.hint_of(request)
            checkpoints.state_written(key, HINTED if hint is not None and num_tokens in hint.positions else TAIL)
        return key

    return _cache_partial_tail_block


def note_hits(original: Callable) -> Callable:
    """Replacement of `KVCacheManager.record_prefix_cache_stats`, called once for each admitted request."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    def record_prefix_cache_stats(self, request, num_hits):
        original(self, request, num_hits)
        managers = self.coordinator.single_type_managers  # none for a model without a KV cache
        checkpoints = getattr(managers[0], "seamark", None) if managers else None
        if num_hits and checkpoints is not None and checkpoints.enabled:
            block_hash = request.block_hashes[num_hits // checkpoints.match_unit - 1]
            checkpoints.prefix_reused(make_block_hash_with_group_id(block_hash, checkpoints.recurrent_group), num_hits)

    return record_prefix_cache_stats


def report_with_stats(original: Callable) -> Callable:
    """Replacement of `Scheduler.make_stats`: the counts ride to the process that serves `/metrics`."""

    def make_stats(self, *args, **kwargs):
        stats = original(self, *args, **kwargs)
        if stats is not None:
            attach(stats, self.seamark, self.kv_cache_manager.block_pool)
        return stats

    return make_stats
