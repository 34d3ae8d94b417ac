"""Cures of upstream defects, wanted with or without checkpoints: they repair wrong answers and change no right one."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from engine_patches.forward.scan_states import kernel_runs, scan_in_runs
from engine_patches.ledger import Function, ShapeMismatch, replacement

logger = logging.getLogger("vllm.seamark")


@replacement
def copy_largest_view_first(kv_caches: Any, num_blocks: Any, kv_cache_block_copies: Any, *, original: Function) -> Any:
    """vLLM's block copy takes the first of several caches that start at one address and skips the others.

    With a layer-major layout a Mamba page and a larger attention page share their start. If only the shorter one is
    copied, the tail of the attention page is lost, and a request that resumes inside that block computes on someone
    else's keys. With the widest view of each address offered first, the one copy is complete.
    """
    caches = list(kv_caches) if kv_cache_block_copies else []
    caches.sort(key=lambda cache: cache.nbytes, reverse=True)
    return original(caches, num_blocks, kv_cache_block_copies)


def states_at_chunk_ends(original: Function) -> Function:
    """vLLM promises to export a state from inside one forward pass, but its CPU scan returns final states only: any
    prompt longer than a block kills the engine with an IndexError.

    When asked for intermediate states, the scan returns the state at each chunk's end. What it does before its kernel
    it does once for all chunks.
    """
    if original.__name__ != "_mamba_chunk_scan_combined_fwd_cpu":
        raise ShapeMismatch(f"the scan on a CPU is {original.__name__}, expected the CPU's own")

    def _mamba_chunk_scan_combined_fwd_cpu(x: Any, *args: Any, **options: Any) -> Any:
        if not options.get("return_intermediate_states"):
            return original(x, *args, **options)
        import torch

        runs = kernel_runs(options["cu_chunk_seqlens"].tolist(), options["seq_idx"].tolist())
        states: list[Any] = []
        scan_in_runs(partial(original, x, *args, **options), runs, lambda _, state: states.append(state.clone()))
        return torch.stack(states).to(options.get("state_dtype") or x.dtype)

    return _mamba_chunk_scan_combined_fwd_cpu


@replacement
def store_checkpoints_without_triton(checkpoint: Any, *tensors: Any, state_len: int, original: Function) -> None:
    """The last step of the export is a Triton kernel, and a CPU has none. This is the same in torch."""
    chunk_idx, x, conv_state, chunk_states, ssm_state, query_start_loc = tensors
    offsets, chunks = checkpoint.checkpoint_offsets.tolist(), chunk_idx.tolist()
    starts, blocks = query_start_loc.tolist(), checkpoint.state_indices.tolist()
    for offset, chunk, start, block in zip(offsets, chunks, starts, blocks, strict=False):
        if offset > 0:
            end = start + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk]


@replacement
def keep_enlarged_block_size(cls: Any, vllm_config: Any, *, original: Function) -> None:
    """vLLM's CPU platform sets its default block size again after the cache of a hybrid was built with a larger one.

    The scheduler then ends chunks at multiples of 128 while cache blocks are longer, and registers a state from the
    middle of a block as the state at its end: wrong tokens on the next hit, whenever a prompt takes two chunks.
    """
    enlarged = vllm_config.cache_config.block_size
    original(cls, vllm_config)
    cache_config = vllm_config.cache_config
    if cache_config.mamba_cache_mode == "align" and enlarged is not None and enlarged > cache_config.block_size:
        cache_config.block_size = enlarged


@replacement
def stop_at_the_block_edge_after_a_hit(
    self: Any, request: Any, num_new_tokens: int, *found: int, original: Function
) -> Any:
    """A prefill chunk that starts inside a block has to end at the block's edge. vLLM drops that rule if its backend
    can export a state from the last chunk.

    The chunk then runs past the edge. The block still holds the state of the position at which the chunk began, but is
    registered under the key of its edge. Without the export for such chunks the rule holds again.
    """
    start = request.num_computed_tokens + sum(found)
    exports = self.mamba_has_prefill_checkpoint_blocks
    self.mamba_has_prefill_checkpoint_blocks = exports and start % self.cache_config.block_size == 0
    try:
        return original(self, request, num_new_tokens, *found)
    finally:
        self.mamba_has_prefill_checkpoint_blocks = exports


@replacement
def take_back_uncomputed_keys(self: Any, request: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    """A request that is preempted in the step that was to compute it must not leave keys of what nobody computes."""
    cache = self.kv_cache_manager
    for manager in cache.coordinator.single_type_managers:
        blocks = manager.req_to_blocks.get(request.request_id, ())
        first = request.num_computed_tokens // manager.block_size
        for index, block in enumerate(blocks[first:], first):
            end = block.block_hash_num_tokens or (index + 1) * manager.block_size
            if block.block_hash is not None and end > request.num_computed_tokens:
                cache.block_pool._maybe_evict_cached_block(block)
    return original(self, request, *args, **kwargs)


@replacement
def decline_late_reads(self: Any, req_id: str, meta: Any, *, original: Function) -> None:
    """NIXL's blocks of another worker are not read once these may have been freed. Here, in the worker's process, both
    clocks are known: vLLM's handshake measures how far they are apart.

    vLLM asks for the deadline only of what a decode worker lends. A prefill is as surely gone once its lease is over,
    and whoever reads its blocks then reads somebody else's states. vLLM's margin of 5 s is kept.
    """
    engine = meta.remote.engine_id
    known = engine in self._remote_agents and engine not in self._invalid_remote_engines
    if not known or self._bidirectional_kv_xfer_enabled or not self._is_turn2_read_expired(meta):
        original(self, req_id, meta)
        return
    logger.warning("seamark: a prefill of worker %s came too late, request %s is computed here", engine, req_id)
    self.xfer_stats.record_kv_expired_req()
    self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)
