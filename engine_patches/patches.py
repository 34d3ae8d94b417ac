"""Every change Seamark makes to vLLM, as data. `python -m engine_patches patches` prints it."""

from __future__ import annotations

from engine_patches.attention_keys import keep_hinted_keys
from engine_patches.chunk_cut import end_chunk_at_hints
from engine_patches.cures import (
    copy_largest_view_first,
    keep_enlarged_block_size,
    no_checkpoint_export_on_cpu,
    runs_on_cpu,
    stop_at_the_block_edge_after_a_hit,
)
from engine_patches.ledger import Patch, Role, Shape
from engine_patches.match_unit import default_to_fine_unit
from engine_patches.scheduling import note_hits, note_written_states, report_with_stats, set_up_checkpoints

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
NO_UPSTREAM = "none: depends on hints"
SPLIT_PARAMETERS = (
    "self",
    "request",
    "num_new_tokens",
    "num_new_local_computed_tokens",
    "num_external_computed_tokens",
)

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="block-copy",
        role=Role.CURE,
        target="vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
        why="copy-on-write of a partial block copies only the shorter of two caches at one address: wrong tokens",
        upstream="unreported; same text in 0.32 and 0.33",
        until="vLLM copies the widest view, or keys what it has copied by address and size",
        shape=Shape(
            "vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
            parameters=("kv_caches", "num_blocks", "kv_cache_block_copies"),
            mentions=("key = (cache.device, cache.data_ptr())", "if key in seen:"),
        ),
        build=copy_largest_view_first,
        rebind=(
            "vllm.v1.worker.gpu_model_runner",
            "vllm.v1.worker.gpu.model_runner",
            "vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker",
        ),
    ),
    Patch(
        name="cpu-checkpoint-export",
        role=Role.CURE,
        target="vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.get_kv_cache_spec",
        why="the CPU scan cannot deliver the promised export: a prompt longer than a block kills the engine",
        upstream="unreported; present in 0.32",
        until="vLLM's CPU scan returns intermediate states",
        shape=Shape(
            "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.get_kv_cache_spec",
            parameters=("self", "vllm_config"),
            mentions=("num_prefill_checkpoint_blocks=1",),
        ),
        build=no_checkpoint_export_on_cpu,
        applies=runs_on_cpu,
    ),
    Patch(
        name="cpu-block-size",
        role=Role.CURE,
        target="vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        why="the block size of a hybrid is reset after its cache was built: states under wrong keys, wrong tokens",
        upstream="unreported; present in 0.32: EngineCoreProc._perform_handshakes runs VllmConfig.__post_init__ again",
        until="vLLM leaves a block size alone that the cache was built with",
        shape=Shape(
            "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
            parameters=("cls", "vllm_config"),
            mentions=("elif not cache_config.user_specified_block_size:", "cache_config.block_size = 128"),
        ),
        build=keep_enlarged_block_size,
        applies=runs_on_cpu,
    ),
    Patch(
        name="block-edge-stop",
        role=Role.CURE,
        target=f"{SCHEDULER}._mamba_block_aligned_split",
        why="a last chunk that starts inside a block runs past its edge: a state under the key of another position",
        upstream="unreported; same text in 0.32 and 0.33; needs a backend that exports states, so never on a CPU",
        until="vLLM keeps the stop at the block edge for chunks that start inside a block",
        shape=Shape(
            f"{SCHEDULER}._mamba_block_aligned_split",
            parameters=SPLIT_PARAMETERS,
            mentions=(
                "self.mamba_has_prefill_checkpoint_blocks",
                "if start % block_size != 0 and not use_internal_checkpoint",
            ),
        ),
        build=stop_at_the_block_edge_after_a_hit,
    ),
    Patch(
        name="match-unit",
        role=Role.FEATURE,
        target="vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
        why="prefixes of hybrids are matched by blocks of 500 to 8,000 tokens unless the user asks for less",
        upstream="--prefix-match-unit",
        until="vLLM defaults to a fine unit for hybrids",
        shape=Shape(
            "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
            parameters=("kv_cache_config", "vllm_config"),
            mentions=("cache_config.prefix_match_unit", "raise ValueError"),
        ),
        build=default_to_fine_unit,
        rebind=("vllm.v1.engine.core",),
    ),
    Patch(
        name="checkpoints-set-up",
        role=Role.FEATURE,
        target=f"{SCHEDULER}.__init__",
        why="one place for what is known of hints and states; lets states be kept between block edges",
        upstream=NO_UPSTREAM,
        until="vLLM takes checkpoint positions from requests (RFC vllm#55697)",
        shape=Shape(
            f"{SCHEDULER}.__init__",
            mentions=(
                "self.hash_block_size = hash_block_size",
                "self.mamba_partial_cache_hit = (",
                "self.mamba_shared_prefix_checkpoint = (",
                "self.use_eagle_block_drop",
                "self.num_spec_tokens",
            ),
        ),
        build=set_up_checkpoints,
        relies_on=(
            Shape(
                "vllm.v1.core.kv_cache_manager:KVCacheManager.__init__", mentions=("manager.shared_prefix_checkpoint",)
            ),
        ),
    ),
    Patch(
        name="chunk-cut",
        role=Role.FEATURE,
        target=f"{SCHEDULER}._mamba_block_aligned_split",
        why="a state exists only where a chunk ends; ends chunks at the hinted positions",
        upstream="the junction stop of Marconi-style caching",
        until="states are written inside the forward pass",
        shape=Shape(
            f"{SCHEDULER}._mamba_block_aligned_split",
            parameters=SPLIT_PARAMETERS,
            mentions=(
                "junction = request.shared_prefix_boundary",
                "if self.mamba_shared_prefix_checkpoint",
                "junction_stop if start < junction < end else 0",
            ),
        ),
        build=end_chunk_at_hints,
        relies_on=(Shape("vllm.v1.request:Request.__init__", mentions=("self.shared_prefix_boundary = 0",)),),
    ),
    Patch(
        name="state-count",
        role=Role.FEATURE,
        target=f"{MANAGERS}:MambaManager._cache_partial_tail_block",
        why="counts the states that vLLM registers",
        upstream=NO_UPSTREAM,
        until="vLLM counts them",
        shape=Shape(
            f"{MANAGERS}:MambaManager._cache_partial_tail_block",
            parameters=("self", "request", "num_tokens", "retention_interval"),
            mentions=(
                "self.shared_prefix_checkpoint",
                "num_tokens == request.shared_prefix_boundary",
                "request.num_computed_tokens < num_tokens <= request.num_prompt_tokens",
                "self._partial_hit_reqs[request.request_id] = (block_idx, source_block)",
            ),
        ),
        build=note_written_states,
    ),
    Patch(
        name="attention-keys",
        role=Role.FEATURE,
        target=f"{MANAGERS}:FullAttentionManager.cache_blocks",
        why="without an attention key at the same position a state cannot be reached",
        upstream=NO_UPSTREAM,
        until="vLLM keeps keys at every checkpoint position",
        shape=Shape(
            f"{MANAGERS}:FullAttentionManager.cache_blocks",
            parameters=("self", "request", "num_tokens", "retention_interval", "replay_boundaries"),
            mentions=("self._cache_partial_tail_block(request, num_tokens)",),
        ),
        build=keep_hinted_keys,
        relies_on=(
            Shape(
                f"{MANAGERS}:SingleTypeKVCacheManager._apply_cow",
                mentions=("self._pending_cow_copies.append((source_block, cow_block))",),
            ),
            Shape(
                "vllm.v1.core.block_pool:BlockPool.cache_partial_block",
                parameters=(
                    "self",
                    "request",
                    "block",
                    "num_tokens",
                    "kv_cache_group_id",
                    "block_size",
                    "replace_existing_hashes",
                ),
                mentions=("block.block_hash_num_tokens < num_hash_blocks * self.hash_block_size",),
            ),
            Shape(
                "vllm.v1.core.block_pool:BlockPool._insert_block_hash",
                mentions=("self.cached_block_hashes_by_block.setdefault",),
            ),
        ),
    ),
    Patch(
        name="hit-count",
        role=Role.FEATURE,
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.record_prefix_cache_stats",
        why="counts requests that resume from a checkpoint",
        upstream=NO_UPSTREAM,
        until="vLLM counts them",
        shape=Shape(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.record_prefix_cache_stats",
            parameters=("self", "request", "num_hits"),
        ),
        build=note_hits,
    ),
    Patch(
        name="report",
        role=Role.FEATURE,
        target=f"{SCHEDULER}.make_stats",
        why="the counts have to reach the API server's process",
        upstream=NO_UPSTREAM,
        until="vLLM lets plugins add to its scheduler statistics",
        shape=Shape(f"{SCHEDULER}.make_stats", mentions=("return SchedulerStats(",)),
        build=report_with_stats,
        relies_on=(Shape("vllm.v1.metrics.stats:SchedulerStats", mentions=("waiting_lora_adapters: dict[str, int]",)),),
    ),
)
