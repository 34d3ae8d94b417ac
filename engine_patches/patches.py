"""Every change Seamark makes to vLLM, as data. `python -m engine_patches patches` prints it."""

from __future__ import annotations

from functools import partial

from engine_patches.forward.layers import (
    cpu_gdn_in_pieces,
    gdn_in_pieces,
    hold_all_to_the_promise,
    mamba2_in_pieces,
    promise_exports,
)
from engine_patches.forward.segments import follow_steps, leave_exports, note_batch, plan_pieces, plan_pieces_of_group
from engine_patches.ledger import Patch, Role, Shape, exists
from engine_patches.reporting.stats_channel import report_with_stats
from engine_patches.scheduler.cache_keys import (
    avoid_unwritten_rows,
    avoid_unwritten_rows_with_a_connector,
    keep_hinted_keys,
)
from engine_patches.scheduler.chunks import end_chunk
from engine_patches.scheduler.fan_out import hold_followers
from engine_patches.scheduler.hooks import forget_with_the_cache, leave_to_writes, note_hits, set_up_checkpoints
from engine_patches.scheduler.match_unit import default_to_fine_unit
from engine_patches.scheduler.state_events import notice_what_is_taken_back
from engine_patches.scheduler.state_writes import keep_only_true_states, learn_pace, write_after_scheduling
from engine_patches.upstream_fixes import (
    copy_largest_view_first,
    keep_enlarged_block_size,
    promises_export_on_cpu,
    resets_block_size,
    runs_on_cpu,
    runs_on_gpu,
    states_at_chunk_ends,
    stop_at_the_block_edge_after_a_hit,
    store_checkpoints_without_triton,
    take_back_uncomputed_keys,
)

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"

KV_CACHE_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"

POOL = "vllm.v1.core.block_pool:BlockPool"

NO_UPSTREAM = "none: depends on hints"

SPLIT_PARAMETERS = (
    "self",
    "request",
    "num_new_tokens",
    "num_new_local_computed_tokens",
    "num_external_computed_tokens",
)

CACHE_PARTIAL_BLOCK = Shape(
    f"{POOL}.cache_partial_block",
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
)

RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

MAMBA2_BUILDER = "vllm.v1.attention.backends.mamba2_attn:Mamba2AttentionMetadataBuilder"

BASE_BUILDER = "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder"

GDN_BUILDER = "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder"

MAMBA_BASE = "vllm.model_executor.layers.mamba.abstract:MambaBase"

MAMBA2 = "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2"

GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"


def _promise_patch(name: str, layer: str) -> Patch:
    """Of a class that has `get_kv_cache_spec` in this vLLM: the base always, Mamba2 since 0.32, GDN since 0.33."""
    target = f"{layer}.get_kv_cache_spec"
    return Patch(
        name=name,
        role=Role.FEATURE,
        target=target,
        why="tells the scheduler that this worker writes states inside a pass",
        upstream=NO_UPSTREAM,
        until="vLLM exports several states from one pass",
        shape=Shape(target, parameters=("self", "vllm_config")),
        build=promise_exports,
        applies=(lambda: True) if layer == MAMBA_BASE else partial(exists, target),
    )


def _builder_patches(name: str, builder: str, base: str) -> tuple[Patch, ...]:
    """A recurrent backend's metadata is made once for a step, and taken over by other cache groups.

    `base`: the class that has `update_block_table` where the builder itself has none.
    """
    taking_over = builder if exists(f"{builder}.update_block_table") else base
    return (
        Patch(
            name=f"{name}-pieces",
            role=Role.FEATURE,
            target=f"{builder}.build",
            why="plans which tokens of a step a recurrent layer runs before it hands out a state",
            upstream=NO_UPSTREAM,
            until="vLLM exports several states from one pass",
            shape=Shape(
                f"{builder}.build", mentions=("common_prefix_len: int", "common_attn_metadata: CommonAttentionMetadata")
            ),
            build=plan_pieces,
        ),
        Patch(
            name=f"{name}-pieces-of-group",
            role=Role.FEATURE,
            target=f"{taking_over}.update_block_table",
            why="each cache group writes its states into blocks of its own",
            upstream=NO_UPSTREAM,
            until="vLLM exports several states from one pass",
            shape=Shape(
                f"{taking_over}.update_block_table", parameters=("self", "metadata", "blk_table", "slot_mapping")
            ),
            build=plan_pieces_of_group,
        ),
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="block-copy",
        role=Role.CURE,
        target="vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
        why="copy-on-write of a partial block copies only the shorter of two caches at one address: wrong tokens",
        upstream="PR vllm#55112; same text in 0.32 and 0.33",
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
        name="cpu-checkpoint-scan",
        role=Role.CURE,
        target="vllm.model_executor.layers.mamba.ops.ssd_combined:_mamba_chunk_scan_combined_fwd",
        why="the CPU scan cannot deliver the promised export: a prompt longer than a block kills the engine",
        upstream="unreported; present in 0.32",
        until="vLLM's CPU scan returns intermediate states",
        shape=Shape(
            "vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm:_mamba_chunk_scan_combined_fwd_cpu",
            mentions=("return_intermediate_states=False", "cu_chunk_seqlens=None", "return all_states"),
        ),
        build=states_at_chunk_ends,
        relies_on=(
            Shape(
                "vllm.model_executor.layers.mamba.ops.ssd_combined:_mamba_chunk_scan_combined_fwd",
                mentions=("return all_states",),  # the CPU's own, put there at import
            ),
            Shape(
                f"{MAMBA2}.get_kv_cache_spec",
                mentions=("num_prefill_checkpoint_blocks=1",),
            ),
        ),
        applies=promises_export_on_cpu,
    ),
    Patch(
        name="cpu-checkpoint-store",
        role=Role.CURE,
        target="vllm.model_executor.layers.mamba.ops.ssd_checkpoint:store_prefill_checkpoint",
        why="the other half of the same promise: a Triton kernel",
        upstream="unreported; present in 0.32",
        until="vLLM stores checkpoints on a CPU",
        shape=Shape(
            "vllm.model_executor.layers.mamba.ops.ssd_checkpoint:store_prefill_checkpoint",
            parameters=(
                "checkpoint",
                "chunk_idx",
                "x",
                "conv_state",
                "chunk_states",
                "ssm_state",
                "query_start_loc",
                "state_len",
            ),
        ),
        build=store_checkpoints_without_triton,
        rebind=("vllm.model_executor.layers.mamba.mamba_mixer2",),
        applies=promises_export_on_cpu,
    ),
    Patch(
        name="cpu-block-size",
        role=Role.CURE,
        target="vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        why="the block size of a hybrid is reset after its cache was built: states under wrong keys, wrong tokens",
        upstream="repaired in 0.33; in 0.32 EngineCoreProc._perform_handshakes runs VllmConfig.__post_init__ again",
        until="vLLM leaves a block size alone that the cache was built with",
        shape=Shape(
            "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
            parameters=("cls", "vllm_config"),
            mentions=("elif not cache_config.user_specified_block_size:", "cache_config.block_size = 128"),
        ),
        build=keep_enlarged_block_size,
        applies=resets_block_size,
    ),
    Patch(
        name="block-edge-stop",
        role=Role.CURE,
        target=f"{SCHEDULER}._mamba_block_aligned_split",
        why="a last chunk that starts inside a block runs past its edge: a state under the key of another position",
        upstream="unreported; same text in 0.32 and 0.33; needs a backend that exports states",
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
        relies_on=(Shape(f"{KV_CACHE_MANAGER}.__init__", mentions=("manager.shared_prefix_checkpoint",)),),
    ),
    Patch(
        name="chunk-end",
        role=Role.FEATURE,
        target=f"{SCHEDULER}._mamba_block_aligned_split",
        why="chunks run to the budget, since states no longer need a chunk's end; where they do, ends them at hints",
        upstream="the junction stop of Marconi-style caching",
        until="vLLM writes states at any position inside a pass",
        shape=Shape(
            f"{SCHEDULER}._mamba_block_aligned_split",
            parameters=SPLIT_PARAMETERS,
            mentions=(
                "junction = request.shared_prefix_boundary",
                "if self.mamba_shared_prefix_checkpoint",
                "junction_stop if start < junction < end else 0",
            ),
        ),
        build=end_chunk,
        relies_on=(Shape("vllm.v1.request:Request.__init__", mentions=("self.shared_prefix_boundary = 0",)),),
    ),
    Patch(
        name="step-writes",
        role=Role.FEATURE,
        target=f"{SCHEDULER}.schedule",
        why="gives each wanted state a block and its keys, once the step is planned to its end",
        upstream=NO_UPSTREAM,
        until="vLLM takes checkpoint positions from requests (RFC vllm#55697)",
        shape=Shape(
            f"{SCHEDULER}.schedule",
            mentions=("self.kv_cache_manager.new_step_starts()", "self._update_after_schedule(scheduler_output)"),
        ),
        build=write_after_scheduling,
        relies_on=(
            Shape(
                f"{SCHEDULER}._update_after_schedule", mentions=("request.num_computed_tokens += num_scheduled_token",)
            ),
            Shape(f"{POOL}.get_new_blocks", parameters=("self", "num_blocks")),
            Shape(f"{POOL}.free_blocks", parameters=("self", "ordered_blocks")),
            CACHE_PARTIAL_BLOCK,
        ),
    ),
    Patch(
        name="pace",
        role=Role.FEATURE,
        target=f"{SCHEDULER}.update_from_output",
        why="learns how long a pass takes, to know what a hit or a wait is worth",
        upstream=NO_UPSTREAM,
        until="vLLM's scheduler knows its step times",
        shape=Shape(f"{SCHEDULER}.update_from_output", parameters=("self", "scheduler_output", "model_runner_output")),
        build=learn_pace,
    ),
    Patch(
        name="fan-out",
        role=Role.FEATURE,
        target=f"{SCHEDULER}._handle_blocked_waiting_request",
        why="a request waits while a running one computes its prefix, if that saves time",
        upstream="RFC vllm#55697 holds followers too",
        until="vLLM shares a cold prefix among requests",
        shape=Shape(
            f"{SCHEDULER}._handle_blocked_waiting_request",
            parameters=("self", "request"),
            mentions=("return True", "return False"),
        ),
        build=hold_followers,
        relies_on=(Shape(f"{SCHEDULER}.schedule", mentions=("self._handle_blocked_waiting_request(request)",)),),
    ),
    Patch(
        name="true-states",
        role=Role.FEATURE,
        target=f"{MANAGERS}:MambaManager.cache_blocks",
        why="a chunk that runs on past a block's edge leaves no state of the edge behind: no key for it",
        upstream=NO_UPSTREAM,
        until="vLLM registers recurrent blocks by the position of their state",
        shape=Shape(
            f"{MANAGERS}:MambaManager.cache_blocks",
            parameters=("self", "request", "num_tokens", "retention_interval", "replay_boundaries"),
            mentions=("if block.is_null or block.block_hash is None:",),
        ),
        build=keep_only_true_states,
        relies_on=(Shape(f"{POOL}.cache_full_blocks", mentions=("if blk.is_null or",)),),
    ),
    Patch(
        name="tail-states",
        role=Role.FEATURE,
        target=f"{MANAGERS}:MambaManager._cache_partial_tail_block",
        why="the state at a chunk's end is written like any other, into a block of its own",
        upstream=NO_UPSTREAM,
        until="vLLM writes states at any position inside a pass",
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
        build=leave_to_writes,
        relies_on=(
            Shape(
                f"{MANAGERS}:MambaManager._needs_internal_checkpoint", mentions=("self.has_prefill_checkpoint_blocks",)
            ),
        ),
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
            CACHE_PARTIAL_BLOCK,
            Shape(
                f"{POOL}._insert_block_hash",
                mentions=("self.cached_block_hashes_by_block.setdefault",),
            ),
        ),
    ),
    Patch(
        name="written-rows",
        role=Role.FEATURE,
        target=f"{KV_CACHE_MANAGER}.get_computed_blocks",
        why="a partial hit must not copy a block that another request of the same step is about to fill",
        upstream="unreported; vLLM defers such a request only where state and rows are registered together",
        until="vLLM defers partial hits on any block registered in the same step",
        shape=Shape(
            f"{KV_CACHE_MANAGER}.get_computed_blocks",
            mentions=("self.empty_kv_cache_blocks, 0, 0", "return blocks, num_new_computed_tokens,"),
        ),
        build=avoid_unwritten_rows,
        relies_on=(
            Shape(
                "vllm.v1.core.block_pool:BlockHashToBlockMap.insert",
                mentions=("self._cache[key] = {blocks.block_id: blocks, block.block_id: block}",),
            ),
        ),
    ),
    Patch(
        name="written-rows-connector",
        role=Role.FEATURE,
        target=f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector",
        why="the same for KV connectors that look up by a way of their own",
        upstream="see written-rows",
        until="as written-rows",
        shape=Shape(
            f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector",
            mentions=("return *self.get_computed_blocks(request", "return blocks, num_local, 0,"),
        ),
        build=avoid_unwritten_rows_with_a_connector,
        applies=lambda: exists(f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector"),
    ),
    Patch(
        name="preempted-keys",
        role=Role.CURE,
        target=f"{SCHEDULER}._preempt_request",
        why="a request preempted in the step that was to compute it leaves keys of contents that nobody computes",
        upstream="vllm-project/vllm#57580",
        until="vLLM registers keys once a step is planned to its end, or takes them back",
        shape=Shape(
            f"{SCHEDULER}._preempt_request",
            mentions=("self._free_request_blocks(request)", "request.num_computed_tokens = 0"),
        ),
        build=take_back_uncomputed_keys,
    ),
    Patch(
        name="cache-reset",
        role=Role.FEATURE,
        target=f"{SCHEDULER}.reset_prefix_cache",
        why="emptying the cache fails while blocks of a running step's states are held",
        upstream=NO_UPSTREAM,
        until="never: ours",
        shape=Shape(f"{SCHEDULER}.reset_prefix_cache", mentions=("self.kv_cache_manager.reset_prefix_cache()",)),
        build=forget_with_the_cache,
    ),
    Patch(
        name="taken-back",
        role=Role.FEATURE,
        target=f"{POOL}._remove_cached_block_hashes",
        why="a gateway that believes a prefix is held has to hear when it is evicted",
        upstream="KV events tell it too, to who listens on a socket of its own and computes vLLM's hashes",
        until="never: ours",
        shape=Shape(
            f"{POOL}._remove_cached_block_hashes",
            parameters=("self", "block"),
            mentions=("removed_hashes.append(block_hash)", "return removed_hashes"),
        ),
        build=notice_what_is_taken_back,
        relies_on=(
            Shape(
                f"{POOL}._maybe_evict_cached_block", mentions=("evicted_hashes = self._remove_cached_block_hashes(",)
            ),
        ),
    ),
    Patch(
        name="common-promise",
        role=Role.FEATURE,
        target="vllm.v1.executor.abstract:Executor.get_kv_cache_specs",
        why="a worker that cannot write states inside a pass must keep all others from being asked to",
        upstream=NO_UPSTREAM,
        until="never: ours",
        shape=Shape("vllm.v1.executor.abstract:Executor.get_kv_cache_specs", parameters=("self",)),
        build=hold_all_to_the_promise,
    ),
    Patch(
        name="hit-count",
        role=Role.FEATURE,
        target=f"{KV_CACHE_MANAGER}.record_prefix_cache_stats",
        why="counts requests that resume from a checkpoint",
        upstream=NO_UPSTREAM,
        until="vLLM counts them",
        shape=Shape(
            f"{KV_CACHE_MANAGER}.record_prefix_cache_stats",
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
    Patch(
        name="worker-steps",
        role=Role.FEATURE,
        target=f"{RUNNER_V1}.execute_model",
        why="the layers have to know which states a step writes",
        upstream=NO_UPSTREAM,
        until="vLLM exports several states from one pass",
        shape=Shape(
            f"{RUNNER_V1}.execute_model",
            mentions=("self._update_states(scheduler_output)", "req_ids = self.input_batch.req_ids"),
        ),
        build=follow_steps,
    ),
    Patch(
        name="worker-steps-v2",
        role=Role.FEATURE,
        target=f"{RUNNER_V2}.execute_model",
        why="the same for model runner V2",
        upstream=NO_UPSTREAM,
        until="vLLM exports several states from one pass",
        shape=Shape(f"{RUNNER_V2}.execute_model", mentions=("input_batch = self.prepare_inputs(",)),
        build=follow_steps,
        applies=runs_on_gpu,
    ),
    Patch(
        name="worker-batch-v2",
        role=Role.FEATURE,
        target=f"{RUNNER_V2}.prepare_inputs",
        why="the order of requests in a step's batch",
        upstream=NO_UPSTREAM,
        until="vLLM exports several states from one pass",
        shape=Shape(f"{RUNNER_V2}.prepare_inputs", mentions=("req_ids=req_ids",)),
        build=note_batch,
        applies=runs_on_gpu,
    ),
    Patch(
        name="no-second-export",
        role=Role.FEATURE,
        target="vllm.model_executor.layers.mamba.checkpoint:MambaPrefillCheckpointBuilder.build",
        why="vLLM's own export of one state per request would write into a block that is not meant for it",
        upstream=NO_UPSTREAM,
        until="vLLM exports several states from one pass",
        shape=Shape(
            "vllm.model_executor.layers.mamba.checkpoint:MambaPrefillCheckpointBuilder.build",
            parameters=("self", "m", "request_rows"),
        ),
        build=leave_exports,
    ),
    *_builder_patches("mamba2", MAMBA2_BUILDER, BASE_BUILDER),
    *_builder_patches("gdn", GDN_BUILDER, GDN_BUILDER),
    Patch(
        name="mamba2-core",
        role=Role.FEATURE,
        target=f"{MAMBA2}.conv_ssm_forward",
        why="runs the recurrent core piece by piece and keeps the states between",
        upstream=NO_UPSTREAM,
        until="vLLM exports several states from one pass",
        shape=Shape(
            f"{MAMBA2}.conv_ssm_forward",
            parameters=("self", "projected_states", "output"),
            mentions=("attn_metadata = attn_metadata_raw.get(self.prefix)", "self.kv_cache[1]"),
        ),
        build=mamba2_in_pieces,
    ),
    Patch(
        name="gdn-core-cpu",
        role=Role.FEATURE,
        target="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
        why="runs the recurrent core piece by piece and keeps the states between",
        upstream=NO_UPSTREAM,
        until="vLLM exports several states from one pass",
        shape=Shape(
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
            parameters=("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out"),
            mentions=("state_indices_tensor = attn_metadata_i.non_spec_state_indices_tensor", "layer.kv_cache[1]"),
        ),
        build=cpu_gdn_in_pieces,
        applies=runs_on_cpu,
    ),
    Patch(
        name="gdn-core",
        role=Role.FEATURE,
        target=f"{GDN}._forward_core",
        why="runs the recurrent core piece by piece and keeps the states between",
        upstream=NO_UPSTREAM,
        until="vLLM exports several states from one pass",
        shape=Shape(
            f"{GDN}._forward_core",
            parameters=("self", "mixed_qkv", "b", "a", "core_attn_out"),
            mentions=("attn_metadata = attn_metadata_raw.get(self.prefix)", "self_kv_cache = self.kv_cache"),
        ),
        build=gdn_in_pieces,
    ),
    _promise_patch("promise", MAMBA_BASE),
    _promise_patch("mamba2-promise", MAMBA2),
    _promise_patch("gdn-promise", GDN),
)
