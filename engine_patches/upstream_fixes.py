"""Cures of upstream defects, wanted with or without checkpoints: they repair wrong answers and change no right one."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from engine_patches import kv_connectors, ledger
from engine_patches.families import MAMBA2_MIXER
from engine_patches.forward.scan_states import kernel_runs, scan_in_runs
from engine_patches.ledger import Function, Patch, Platform, Shape, ShapeMismatch, cure, exists, holds
from engine_patches.settings import logger

CPU_PLATFORM = "vllm.platforms.cpu:CpuPlatform"

RESETS_BLOCK_SIZE = Shape(f"{CPU_PLATFORM}.check_and_update_config", mentions=("cache_config.block_size = 128",))


@cure(
    "block-copy",
    "vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
    why="copy-on-write of a partial block copies only the shorter of two caches at one address: wrong tokens",
    upstream="PR vllm#55112; same text in 0.32 and 0.33",
    until="vLLM copies the widest view, or tells copied caches apart by address and size",
    mentions=("key = (cache.device, cache.data_ptr())", "if key in seen:"),
    rebind=(ledger.RUNNER_V1, ledger.RUNNER_V2, "vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker"),
)
def copy_largest_view_first(kv_caches: Any, num_blocks: Any, kv_cache_block_copies: Any, *, original: Function) -> Any:
    """With a layer-major layout a Mamba page and a larger attention page share their start. If only the shorter one is
    copied, the tail of the attention page is lost, and a request that resumes inside that block computes on someone
    else's keys. With the widest view of each address offered first, the one copy is complete.
    """
    caches = list(kv_caches) if kv_cache_block_copies else []
    caches.sort(key=lambda cache: cache.nbytes, reverse=True)
    return original(caches, num_blocks, kv_cache_block_copies)


@cure(
    "cpu-checkpoint-scan",
    f"{ledger.LAYERS}.ops.ssd_combined:_mamba_chunk_scan_combined_fwd",
    why="the CPU scan cannot deliver the promised export: a prompt longer than a block kills the engine",
    upstream="unreported; 0.32 promises it, and no version can",
    until="vLLM's CPU scan returns intermediate states",
    mentions=("return_intermediate_states",),  # also of the GPU's function, in whose place the CPU's own is put
    relies_on=(
        Shape(
            f"{ledger.LAYERS}.ops.cpu.mamba_ssm:_mamba_chunk_scan_combined_fwd_cpu",
            mentions=(
                "return_intermediate_states=False",
                "cu_chunk_seqlens=None",
                "return all_states",
                "all_states.copy_(initial_states.float())",
                "    ops.mamba_chunk_scan_fwd_cpu(",
            ),
        ),
    ),
    on=Platform.CPU,
)
def states_at_chunk_ends(original: Function) -> Function:
    """When asked for intermediate states, the scan returns the state at each chunk's end. What it does before its
    kernel it does once for all chunks.
    """
    if original.__name__ != "_mamba_chunk_scan_combined_fwd_cpu":
        raise ShapeMismatch(f"the scan on a CPU is {original.__name__}, expected the CPU's own")

    @wraps(original)
    def _mamba_chunk_scan_combined_fwd_cpu(x: Any, *args: Any, **options: Any) -> Any:
        if not options.get("return_intermediate_states"):
            return original(x, *args, **options)
        import torch

        runs = kernel_runs(options["cu_chunk_seqlens"].tolist(), options["seq_idx"].tolist())
        states: list[Any] = []
        scan_in_runs(partial(original, x, *args, **options), runs, lambda _, state: states.append(state.clone()))
        return torch.stack(states).to(options.get("state_dtype") or x.dtype)

    return _mamba_chunk_scan_combined_fwd_cpu


@cure(
    "cpu-checkpoint-store",
    f"{ledger.LAYERS}.ops.ssd_checkpoint:store_prefill_checkpoint",
    why="the last step of the promised export is a Triton kernel, and a CPU has none",
    upstream="unreported; present in 0.32",
    until="vLLM stores checkpoints on a CPU",
    parameters="checkpoint, chunk_idx, x, conv_state, chunk_states, ssm_state, query_start_loc, state_len",
    rebind=(f"{ledger.LAYERS}.mamba_mixer2",),
    on=Platform.CPU,
    applies=lambda: exists(f"{MAMBA2_MIXER.path}.get_kv_cache_spec"),  # Mamba2 promises to export states
)
def store_checkpoints_without_triton(checkpoint: Any, *tensors: Any, state_len: int, original: Function) -> None:
    chunk_idx, x, conv_state, chunk_states, ssm_state, query_start_loc = tensors
    offsets, chunks = checkpoint.checkpoint_offsets.tolist(), chunk_idx.tolist()
    starts, blocks = query_start_loc.tolist(), checkpoint.state_indices.tolist()
    for offset, chunk, start, block in zip(offsets, chunks, starts, blocks, strict=False):
        if offset > 0:
            end = start + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk]


@cure(
    "cpu-block-size",
    f"{CPU_PLATFORM}.check_and_update_config",
    why="the block size of a hybrid is reset after its cache was built: states under wrong keys, wrong tokens",
    upstream="repaired in 0.33; in 0.32 EngineCoreProc._perform_handshakes runs VllmConfig.__post_init__ again",
    until="vLLM leaves a block size alone that the cache was built with",
    mentions=("elif not cache_config.user_specified_block_size:", *RESETS_BLOCK_SIZE.mentions),
    on=Platform.CPU,
    applies=lambda: holds(RESETS_BLOCK_SIZE),
)
def keep_enlarged_block_size(cls: Any, vllm_config: Any, *, original: Function) -> None:
    """The scheduler then ends chunks at multiples of 128 while cache blocks are longer, and registers a state from the
    middle of a block as the state at its end: wrong tokens on the next hit, whenever a prompt takes two chunks.
    """
    enlarged = vllm_config.cache_config.block_size
    original(cls, vllm_config)
    cache_config = vllm_config.cache_config
    if cache_config.mamba_cache_mode == "align" and enlarged is not None and enlarged > cache_config.block_size:
        cache_config.block_size = enlarged


@cure(
    "block-edge-stop",
    f"{ledger.SCHEDULER}._mamba_block_aligned_split",
    why="a last chunk that starts inside a block runs past its edge: a state under the key of another position",
    upstream="unreported; same text in 0.32 and 0.33; needs a backend that exports states",
    until="vLLM keeps the stop at the block edge for chunks that start inside a block",
    parameters="self, request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens",
    mentions=(
        "self.mamba_has_prefill_checkpoint_blocks",
        "if start % block_size != 0 and not use_internal_checkpoint",
    ),
)
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


@cure(
    "preempted-keys",
    f"{ledger.SCHEDULER}._preempt_request",
    why="a request preempted in the step that was to compute it leaves keys of contents that nobody computes",
    upstream="vllm-project/vllm#57580",
    until="vLLM registers keys once a step is planned to its end, or takes them back",
    mentions=("self._free_request_blocks(request)", "request.num_computed_tokens = 0"),
)
def take_back_uncomputed_keys(self: Any, request: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    cache = self.kv_cache_manager
    for manager in cache.coordinator.single_type_managers:
        blocks = manager.req_to_blocks.get(request.request_id, ())
        first = request.num_computed_tokens // manager.block_size
        for index, block in enumerate(blocks[first:], first):
            end = block.block_hash_num_tokens or (index + 1) * manager.block_size
            if block.block_hash is not None and end > request.num_computed_tokens:
                cache.block_pool._maybe_evict_cached_block(block)
    return original(self, request, *args, **kwargs)


@Patch(
    "late-reads",
    kv_connectors.READ,
    why="blocks of a prefill whose lease is over hold other requests' states by now",
    upstream="vllm#52234; vllm#47021 cures it for what a decode worker lends",
    until="vLLM asks for the deadline of every read",
    applies=kv_connectors.hands_over,
)
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
