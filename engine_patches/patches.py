"""Every change Seamark makes to vLLM, as data. `python -m engine_patches patches` prints it.

How to read a row: `build` makes what replaces `target`. `parameters` and `mentions` are what the target must look like
for that: its parameter names, and words that its source contains. `relies_on` says the same of other functions.
`on` and `applies` say on which platform and in which versions the row has a meaning. A row without `upstream` serves
hints, so upstream has nothing to repair.

How to support a new vLLM: run `python -m tests.harness.versions NUMBER`. A `ShapeMismatch` names the function that
differs. Read it in both versions. If the patch is right for both, state here only what both have; if not, give each
version a row of its own with `applies`. A cure whose defect no supported version has (tests/upstream) can go. The whole
way is in CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_patches import kv_connectors
from engine_patches.families import (
    GLM_KDA,
    K3_KDA,
    KIMI_KDA,
    LING_KDA,
    MAMBA2_MIXER,
    OLMO_GDN,
    QWEN_GDN,
    QWEN_NGRAM,
    SHORT_CONVOLUTION,
    RecurrentLayer,
)
from engine_patches.forward.conv_states import (
    keep_inputs,
    keep_ngram_states,
    plan_conv_states,
    plan_ngram_states,
)
from engine_patches.forward.cpu_scan import kernel_in_runs
from engine_patches.forward.layers import (
    convolution_with_states,
    cpu_gdn_beside_drafts_in_segments,
    cpu_gdn_in_segments,
    gdn_in_segments,
    kda_in_segments,
    mamba2_with_states,
    promise_writes_in_forward,
    require_promise_of_all,
)
from engine_patches.forward.loaded_weights import ask_workers, read_what_was_loaded
from engine_patches.forward.remote_reads import decline_late_reads
from engine_patches.forward.scan_states import plan_scan_states, scan_with_states, states_of_group
from engine_patches.forward.segments import plan_segments, plan_segments_of_group
from engine_patches.forward.step_writes import skip_vllm_exports, track_batch, track_steps
from engine_patches.ledger import Function, Patch, PatchRole, Platform, Shape, exists, holds
from engine_patches.reporting.hooks import (
    collect_before_the_engines,
    report_from_the_start,
    report_resets,
    report_with_stats,
    tell_where,
)
from engine_patches.scheduler import draft_windows
from engine_patches.scheduler.adapters import (
    admit_by_adapter,
    hash_contents,
    know_adapters_of_requests,
    look_up_by_adapter,
    note_loads,
)
from engine_patches.scheduler.cache_keys import (
    avoid_unwritten_rows,
    avoid_unwritten_rows_with_a_connector,
    keep_hinted_keys,
    watch_removed_keys,
)
from engine_patches.scheduler.fan_out import hold_followers
from engine_patches.scheduler.hooks import (
    count_hits,
    count_tail_states,
    default_to_fine_unit,
    forget_weights_that_may_change,
    release_before_reset,
    set_up_checkpoints,
)
from engine_patches.scheduler.kv_events import announce_resumable_blocks
from engine_patches.scheduler.state_writes import (
    end_chunk,
    keep_only_true_states,
    learn_step_time,
    note_late_output,
    write_after_scheduling,
)
from engine_patches.scheduler.transfers import (
    load_what_was_computed,
    name_what_is_sent,
    read_hint_of_the_whole_prompt,
)
from engine_patches.trial.turns import try_drafts
from engine_patches.upstream_fixes import (
    copy_largest_view_first,
    keep_enlarged_block_size,
    states_at_chunk_ends,
    stop_at_the_block_edge_after_a_hit,
    store_checkpoints_without_triton,
    take_back_uncomputed_keys,
)

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

# vLLM 0.31 asks all groups for what they find between blocks.
LEFT_OUT_OF_LOOKUPS = Shape(
    "vllm.v1.core.kv_cache_utils:partial_hash_hits_enabled", mentions=("if group.kv_cache_spec.prefix_cacheable\n",)
)

MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"

KV_CACHE_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"

POOL = "vllm.v1.core.block_pool:BlockPool"

ENGINES = "vllm.v1.engine.utils"

CORE = "vllm.v1.engine.core:EngineCore"

RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

LAYERS = "vllm.model_executor.layers.mamba"

MAMBA2 = MAMBA2_MIXER.path

GDN = QWEN_GDN.path

CPU_PLATFORM = "vllm.platforms.cpu:CpuPlatform"

RESETS_BLOCK_SIZE = Shape(f"{CPU_PLATFORM}.check_and_update_config", mentions=("cache_config.block_size = 128",))

MAMBA2_BUILDER = "vllm.v1.attention.backends.mamba2_attn:Mamba2AttentionMetadataBuilder"

BASE_BUILDER = "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder"

GDN_BUILDER = "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder"

K3_BUILDER = "vllm.models.kimi_k3.nvidia.kda_metadata:KimiK3KDAMetadataBuilder"

NGRAM_BUILDER = "vllm.v1.attention.backends.short_conv_attn:PleShortConvAttentionMetadataBuilder"

# Of the kernels of convolutions, by position: they take more by name, each other ones.
CONVOLUTION_INPUTS = "x: torch.Tensor,\n    weight: torch.Tensor,\n    bias: torch.Tensor | None,\n    conv_states:"

SPLIT_PARAMETERS = "self, request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens"

CACHE_BLOCKS_PARAMETERS = "self, request, num_tokens, retention_interval, replay_boundaries"

CACHE_PARTIAL_BLOCK = Shape(
    f"{POOL}.cache_partial_block",
    "self, request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes",
    mentions=("block.block_hash_num_tokens < num_hash_blocks * self.hash_block_size",),
)

# Until when a row is needed, if several say the same.
MANY_EXPORTS = "vLLM exports several states from one pass"

ANY_POSITION = "vLLM writes states at any position inside a pass"

POSITIONS_FROM_REQUESTS = "vLLM takes checkpoint positions from requests (RFC vllm#55697)"

NEVER = "never: ours"

CONTENTS_HASHED = "vLLM's block hashes hold what an adapter contains"

OLD_WEIGHTS = "vllm#42125, #48352, #30931; vLLM warns of it when it loads in place"


def _promise_patch(name: str, layer: str, in_every_version: bool = False) -> Patch:
    """The base class always has `get_kv_cache_spec`, Mamba2 has its own since 0.32, GDN since 0.33."""
    target = f"{layer}.get_kv_cache_spec"
    return Patch(
        name,
        target,
        why="a worker tells the scheduler that it writes states inside a pass",
        until=MANY_EXPORTS,
        build=promise_writes_in_forward,
        parameters="self, vllm_config",
        applies=lambda: in_every_version or exists(target),
    )


def _has(layer: RecurrentLayer) -> Callable[[], bool]:
    """Whether this vLLM has such layers. If so, it has to have all that is said of them, or nothing is patched."""
    return lambda: exists(layer.path)


def _kda_patch(name: str, layer: RecurrentLayer, output: str = "core_attn_out[0, :num_actual_tokens]") -> Patch:
    return Patch(
        f"{name}-core",
        f"{layer.path}.{layer.core}",
        why="the recurrent core runs segment by segment and keeps the states between",
        until=MANY_EXPORTS,
        build=kda_in_segments,
        mentions=(".get(self.prefix)", output, "= self.kv_cache"),
        applies=_has(layer),
    )


def _builder_patches(
    name: str,
    builder: str,
    base: str,
    build: Callable[[Function], Function],
    build_of_group: Callable[[Function], Function],
    relies_on: tuple[Shape, ...] = (),
) -> tuple[Patch, ...]:
    """A recurrent backend's metadata is made once for a step, and taken over by other cache groups.

    `base`: the class that has `update_block_table` if the builder itself has none.
    """
    taking_over = builder if exists(f"{builder}.update_block_table") else base
    return (
        Patch(
            f"{name}-states",
            f"{builder}.build",
            why="a recurrent layer has to know where in a step's tokens the states are that it hands out",
            until=MANY_EXPORTS,
            build=build,
            mentions=("common_prefix_len: int", "common_attn_metadata: CommonAttentionMetadata"),
            relies_on=relies_on,
        ),
        Patch(
            f"{name}-states-of-group",
            f"{taking_over}.update_block_table",
            why="each cache group writes its states into blocks of its own",
            until=MANY_EXPORTS,
            build=build_of_group,
            parameters="self, metadata, blk_table, slot_mapping",
        ),
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        "block-copy",
        "vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
        role=PatchRole.CURE,
        why="copy-on-write of a partial block copies only the shorter of two caches at one address: wrong tokens",
        upstream="PR vllm#55112; same text in 0.32 and 0.33",
        until="vLLM copies the widest view, or tells copied caches apart by address and size",
        build=copy_largest_view_first,
        parameters="kv_caches, num_blocks, kv_cache_block_copies",
        mentions=("key = (cache.device, cache.data_ptr())", "if key in seen:"),
        rebind=(
            "vllm.v1.worker.gpu_model_runner",
            "vllm.v1.worker.gpu.model_runner",
            "vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker",
        ),
    ),
    Patch(
        "cpu-checkpoint-scan",
        f"{LAYERS}.ops.ssd_combined:_mamba_chunk_scan_combined_fwd",
        role=PatchRole.CURE,
        why="the CPU scan cannot deliver the promised export: a prompt longer than a block kills the engine",
        upstream="unreported; 0.32 promises it, and no version can",
        until="vLLM's CPU scan returns intermediate states",
        build=states_at_chunk_ends,
        mentions=("return_intermediate_states",),  # also of the GPU's function, in whose place the CPU's own is put
        relies_on=(
            Shape(
                f"{LAYERS}.ops.cpu.mamba_ssm:_mamba_chunk_scan_combined_fwd_cpu",
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
    ),
    Patch(
        "cpu-checkpoint-kernel",
        "vllm._custom_ops:mamba_chunk_scan_fwd_cpu",
        role=PatchRole.CURE,
        why="the states that `cpu-checkpoint-scan` returns, and those that Seamark keeps, come from the CPU's kernel",
        upstream="as cpu-checkpoint-scan",
        until="never: Seamark copies its states between two runs of it",
        build=kernel_in_runs,
        parameters="out, final_states, x, dt, A, B, C, D, z, cu_seqlens",
        on=Platform.CPU,
    ),
    Patch(
        "cpu-checkpoint-store",
        f"{LAYERS}.ops.ssd_checkpoint:store_prefill_checkpoint",
        role=PatchRole.CURE,
        why="the last step of the promised export is a Triton kernel, and a CPU has none",
        upstream="unreported; present in 0.32",
        until="vLLM stores checkpoints on a CPU",
        build=store_checkpoints_without_triton,
        parameters="checkpoint, chunk_idx, x, conv_state, chunk_states, ssm_state, query_start_loc, state_len",
        rebind=(f"{LAYERS}.mamba_mixer2",),
        on=Platform.CPU,
        applies=lambda: exists(f"{MAMBA2}.get_kv_cache_spec"),  # Mamba2 promises to export states
    ),
    Patch(
        "cpu-block-size",
        f"{CPU_PLATFORM}.check_and_update_config",
        role=PatchRole.CURE,
        why="the block size of a hybrid is reset after its cache was built: states under wrong keys, wrong tokens",
        upstream="repaired in 0.33; in 0.32 EngineCoreProc._perform_handshakes runs VllmConfig.__post_init__ again",
        until="vLLM leaves a block size alone that the cache was built with",
        build=keep_enlarged_block_size,
        parameters="cls, vllm_config",
        mentions=("elif not cache_config.user_specified_block_size:", *RESETS_BLOCK_SIZE.mentions),
        on=Platform.CPU,
        applies=lambda: holds(RESETS_BLOCK_SIZE),
    ),
    Patch(
        "block-edge-stop",
        f"{SCHEDULER}._mamba_block_aligned_split",
        role=PatchRole.CURE,
        why="a last chunk that starts inside a block runs past its edge: a state under the key of another position",
        upstream="unreported; same text in 0.32 and 0.33; needs a backend that exports states",
        until="vLLM keeps the stop at the block edge for chunks that start inside a block",
        build=stop_at_the_block_edge_after_a_hit,
        parameters=SPLIT_PARAMETERS,
        mentions=(
            "self.mamba_has_prefill_checkpoint_blocks",
            "if start % block_size != 0 and not use_internal_checkpoint",
        ),
    ),
    Patch(
        "preempted-keys",
        f"{SCHEDULER}._preempt_request",
        role=PatchRole.CURE,
        why="a request preempted in the step that was to compute it leaves keys of contents that nobody computes",
        upstream="vllm-project/vllm#57580",
        until="vLLM registers keys once a step is planned to its end, or takes them back",
        build=take_back_uncomputed_keys,
        mentions=("self._free_request_blocks(request)", "request.num_computed_tokens = 0"),
    ),
    Patch(
        "adapter-contents",
        "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys",
        role=PatchRole.CURE,
        why="an adapter that is loaded again from its path is answered from what its old weights have computed",
        upstream=OLD_WEIGHTS,
        until=CONTENTS_HASHED,
        build=hash_contents,
        parameters="request",
        mentions=('return [("lora", lora_request.lora_name, lora_request.lora_path)]',),
        relies_on=(
            Shape(
                "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
                mentions=("_gen_lora_extra_hash_keys(request)",),
            ),
            Shape("vllm.v1.core.kv_cache_utils:to_event_extra_keys", mentions=("key[1] for key in keys",)),
            Shape(
                "vllm.v1.request:Request.__init__",
                mentions=("self.block_hashes: list[BlockHash] = []", "self.lora_request = lora_request"),
            ),
            Shape("vllm.v1.request:Request.update_block_hashes", mentions=("self._block_hasher(self)",)),
        ),
    ),
    Patch(
        "adapter-of-request",
        f"{CORE}.preprocess_add_request",
        role=PatchRole.CURE,
        why="a request is hashed by the contents that its engine has loaded",
        upstream=OLD_WEIGHTS,
        until=CONTENTS_HASHED,
        build=know_adapters_of_requests,
        parameters="self, request",
        mentions=("Request.from_engine_core_request(request, self.request_block_hasher)",),
    ),
    Patch(
        "adapter-loads",
        f"{CORE}.add_lora",
        role=PatchRole.CURE,
        why="what a load has read is what the workers hold from then on",
        upstream=OLD_WEIGHTS,
        until=CONTENTS_HASHED,
        build=note_loads,
        parameters="self, lora_request",
        mentions=("self.model_executor.add_lora(lora_request)",),
        relies_on=(
            Shape(f"{CORE}.list_loras", "self"),
            Shape(
                "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter",
                mentions=("lora_request.lora_int_id not in self.list_adapters()", "or lora_request.load_inplace"),
            ),
            Shape(
                "vllm.lora.lora_model:LoRAModel.from_local_checkpoint",
                mentions=("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"),
            ),
        ),
    ),
    Patch(
        "adapter-admission",
        f"{CORE}.add_request",
        role=PatchRole.CURE,
        why="a load may come between a request's hashes and its place in the queue, or with the request itself",
        upstream=OLD_WEIGHTS,
        until=CONTENTS_HASHED,
        build=admit_by_adapter,
        parameters="self, request, request_wave",
        mentions=("self.scheduler.add_request(request)",),
    ),
    Patch(
        "adapter-lookup",
        f"{KV_CACHE_MANAGER}.get_computed_blocks",
        role=PatchRole.CURE,
        why="a load may come while a request waits, and before it is resumed",
        upstream=OLD_WEIGHTS,
        until=CONTENTS_HASHED,
        build=look_up_by_adapter,
        mentions=("request.block_hashes",),
    ),
    Patch(
        "adapter-lookup-connector",
        f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector",
        role=PatchRole.CURE,
        why="KV connectors look up in a way of their own",
        upstream=OLD_WEIGHTS,
        until=CONTENTS_HASHED,
        build=look_up_by_adapter,
        mentions=("request.block_hashes",),
        applies=lambda: exists(f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector"),
    ),
    Patch(
        "match-unit",
        "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
        why="prefixes of hybrids are matched by blocks of 500 to 8,000 tokens unless the user asks for less",
        upstream="--prefix-match-unit",
        until="vLLM defaults to a fine unit for hybrids",
        build=default_to_fine_unit,
        parameters="kv_cache_config, vllm_config",
        mentions=("cache_config.prefix_match_unit", "raise ValueError"),
        rebind=("vllm.v1.engine.core",),
    ),
    Patch(
        "checkpoints-set-up",
        f"{SCHEDULER}.__init__",
        why="hints and states need one place that knows them, and states are kept between block edges too",
        until=POSITIONS_FROM_REQUESTS,
        build=set_up_checkpoints,
        mentions=(
            "self.hash_block_size = hash_block_size",
            "self.mamba_partial_cache_hit = (",
            "self.mamba_shared_prefix_checkpoint = (",
            "self.use_eagle_block_drop",
            "self.num_spec_tokens",
        ),
        relies_on=(Shape(f"{KV_CACHE_MANAGER}.__init__", mentions=("manager.shared_prefix_checkpoint",)),),
    ),
    Patch(
        "kv-events",
        f"{SCHEDULER}.__init__",
        why="KV events name attention blocks that no state makes usable; nothing is replaced where they are off",
        upstream="vllm#44451, #43258; ai-dynamo/dynamo#12169",
        until="vLLM announces of a hybrid what can be resumed, and indexes go by it",
        build=announce_resumable_blocks,
        mentions=("self.enable_kv_cache_events = (",),
        relies_on=(
            Shape(
                f"{POOL}.cache_full_blocks",
                "self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask",
                mentions=("if blk.is_null or (block_mask is not None and not block_mask[i])",),
            ),
            CACHE_PARTIAL_BLOCK,
            Shape(
                f"{POOL}.emit_cached_block_events", "self, request, num_cached_blocks, block_size, kv_cache_group_id"
            ),
            Shape(f"{POOL}.take_events", "self", mentions=("self.kv_event_queue = []",)),
            Shape(
                f"{POOL}._build_block_stored_event",
                mentions=("request.all_token_ids[start_token_idx:end_token_idx]", "extra_keys_list", "self.medium"),
            ),
            Shape(f"{POOL}.reset_prefix_cache", mentions=("self.cached_block_hash_to_block = BlockHashToBlockMap()",)),
            Shape(f"{KV_CACHE_MANAGER}.take_events", "self", mentions=("self.block_pool.take_events()",)),
        ),
    ),
    Patch(
        "chunk-end",
        f"{SCHEDULER}._mamba_block_aligned_split",
        why="chunks run to the budget, since states no longer need a chunk's end; if they do, chunks end at hints",
        upstream="the junction stop of Marconi-style caching",
        until=ANY_POSITION,
        build=end_chunk,
        parameters=SPLIT_PARAMETERS,
        mentions=(
            "junction = request.shared_prefix_boundary",
            "if self.mamba_shared_prefix_checkpoint",
            "junction_stop if start < junction < end else 0",
        ),
        relies_on=(Shape("vllm.v1.request:Request.__init__", mentions=("self.shared_prefix_boundary = 0",)),),
    ),
    Patch(
        "step-writes",
        f"{SCHEDULER}.schedule",
        why="each wanted state gets a block and its keys, once the step is planned to its end",
        until=POSITIONS_FROM_REQUESTS,
        build=write_after_scheduling,
        mentions=("self.kv_cache_manager.new_step_starts()", "self._update_after_schedule(scheduler_output)"),
        relies_on=(
            Shape(
                f"{SCHEDULER}._update_after_schedule", mentions=("request.num_computed_tokens += num_scheduled_token",)
            ),
            Shape(f"{POOL}.get_new_blocks", "self, num_blocks"),
            Shape(f"{POOL}.free_blocks", "self, ordered_blocks"),
            CACHE_PARTIAL_BLOCK,
            # What a connector loads may come before the steps that are running have written.
            Shape(
                f"{SCHEDULER}._free_cow_retained_blocks",
                "self, blocks, fence_seq",
                (
                    "if not self.defer_block_free or fence_seq <= self.processed_step_seq:",
                    "self.deferred_frees.append((fence_seq, ",
                ),
            ),
            # A state that is given up is put behind others in the list of free blocks.
            Shape(
                "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.__init__",
                mentions=(
                    "self.num_free_blocks = ",
                    "self.fake_free_list_head.next_free_block",
                    "self.fake_free_list_tail.prev_free_block",
                ),
            ),
        ),
    ),
    Patch(
        "step-time",
        f"{SCHEDULER}.update_from_output",
        why="what a hit or a wait is worth depends on how long a pass takes",
        until="vLLM's scheduler knows its step times",
        build=learn_step_time,
        parameters="self, scheduler_output, model_runner_output",
    ),
    Patch(
        "late-output",
        "vllm.v1.executor.uniproc_executor:AsyncOutputFuture.result",
        why="a step that ended while the next one was launched would be taken for as long as that launch",
        until="vLLM's scheduler knows its step times",
        build=note_late_output,
        parameters="self, timeout",
        mentions=("output = self.async_output.get_output()",),
        relies_on=(
            Shape(
                "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.get_output",
                mentions=("self.async_copy_ready_event.synchronize()",),
            ),
            Shape("vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output", mentions=("self.copy_event.synchronize()",)),
        ),
        on=Platform.GPU,
    ),
    Patch(
        "fan-out",
        f"{SCHEDULER}._handle_blocked_waiting_request",
        why="a request waits while a running one computes its prefix, if that saves time",
        upstream="RFC vllm#55697 holds followers too",
        until="vLLM shares a cold prefix among requests",
        build=hold_followers,
        parameters="self, request",
        mentions=("return True", "return False"),
        relies_on=(
            Shape(
                f"{SCHEDULER}.schedule",
                mentions=(
                    "self._handle_blocked_waiting_request(request)",
                    "self.max_num_scheduled_tokens",
                    "self.max_num_running_reqs",
                    "self.scheduler_config.long_prefill_token_threshold",
                ),
            ),
        ),
    ),
    Patch(
        "true-states",
        f"{MANAGERS}:MambaManager.cache_blocks",
        why="a chunk that runs on past a block's edge leaves no state of the edge behind: no key for it",
        until="vLLM registers recurrent blocks by the position of their state",
        build=keep_only_true_states,
        parameters=CACHE_BLOCKS_PARAMETERS,
        mentions=("if block.is_null or block.block_hash is None:",),
        relies_on=(Shape(f"{POOL}.cache_full_blocks", mentions=("if blk.is_null or",)),),
    ),
    Patch(
        "tail-states",
        f"{MANAGERS}:MambaManager._cache_partial_tail_block",
        why="the state at a chunk's end is written like any other, into a block of its own",
        until=ANY_POSITION,
        build=count_tail_states,
        parameters="self, request, num_tokens, retention_interval",
        mentions=(
            "self.shared_prefix_checkpoint",
            "num_tokens == request.shared_prefix_boundary",
            "request.num_computed_tokens < num_tokens <= request.num_prompt_tokens",
            "self._partial_hit_reqs[request.request_id] = (block_idx, source_block)",
        ),
        relies_on=(
            Shape(
                f"{MANAGERS}:MambaManager._needs_internal_checkpoint", mentions=("self.has_prefill_checkpoint_blocks",)
            ),
        ),
    ),
    Patch(
        "attention-keys",
        f"{MANAGERS}:FullAttentionManager.cache_blocks",
        why="without an attention key at the same position a state cannot be reached",
        until="vLLM keeps keys at every checkpoint position",
        build=keep_hinted_keys,
        parameters=CACHE_BLOCKS_PARAMETERS,
        mentions=("self._cache_partial_tail_block(request, num_tokens)",),
        relies_on=(
            Shape(
                f"{MANAGERS}:SingleTypeKVCacheManager._apply_cow",
                mentions=("self._pending_cow_copies.append((source_block, cow_block))",),
            ),
            CACHE_PARTIAL_BLOCK,
            Shape(f"{POOL}._insert_block_hash", mentions=("self.cached_block_hashes_by_block.setdefault",)),
        ),
    ),
    Patch(
        "written-rows",
        f"{KV_CACHE_MANAGER}.get_computed_blocks",
        why="a partial hit must not copy a block that another request of the same step is about to fill",
        upstream="unreported; vLLM defers such a request only if state and rows are registered together",
        until="vLLM defers partial hits on any block registered in the same step",
        build=avoid_unwritten_rows,
        mentions=("self.empty_kv_cache_blocks, 0, 0", "return blocks, num_new_computed_tokens,"),
        relies_on=(
            Shape(
                "vllm.v1.core.block_pool:BlockHashToBlockMap.insert",
                mentions=("self._cache[key] = {blocks.block_id: blocks, block.block_id: block}",),
            ),
        ),
    ),
    Patch(
        draft_windows.PATCH,
        f"{KV_CACHE_MANAGER}.get_computed_blocks",
        why="a draft head's sliding window makes vLLM find whole blocks only; its rows can follow a hit instead",
        upstream="vllm#53786, #54360",
        until="vLLM finds sliding windows at any match unit (`supports_fine_grained_hash_lookup`)",
        build=draft_windows.put_rows_into_hits,
        mentions=("self.empty_kv_cache_blocks, 0, 0", "return blocks, num_new_computed_tokens,"),
        relies_on=(
            LEFT_OUT_OF_LOOKUPS,
            Shape(
                "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
                mentions=("if not g.kv_cache_spec.prefix_cacheable:\n                continue",),
            ),
            # A row that is not held is zero: new blocks are zeroed first, and then some are copied over.
            Shape(
                "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
                mentions=(
                    "self._zero_block_ids(scheduler_output.new_block_ids_to_zero)\n"
                    "        if scheduler_output.kv_cache_block_copies:",
                ),
            ),
            Shape(
                "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests",
                mentions=(
                    "self.kv_block_zeroer.zero_block_ids(scheduler_output.new_block_ids_to_zero)\n\n"
                    "        # Apply copy-on-write block copies for partial prefix-cache hits, after\n",
                ),
            ),
        ),
        applies=lambda: holds(LEFT_OUT_OF_LOOKUPS),
    ),
    Patch(
        "written-rows-connector",
        f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector",
        why="KV connectors look up in a way of their own, and must not copy such a block either",
        upstream="see written-rows",
        until="as written-rows",
        build=avoid_unwritten_rows_with_a_connector,
        mentions=("return *self.get_computed_blocks(request", "return blocks, num_local, 0,"),
        applies=lambda: exists(f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector"),
    ),
    Patch(
        "cache-reset",
        f"{SCHEDULER}.reset_prefix_cache",
        why="emptying the cache fails while blocks of a running step's states are held",
        until=NEVER,
        build=release_before_reset,
        mentions=("self.kv_cache_manager.reset_prefix_cache()",),
    ),
    Patch(
        "prefill-end",
        kv_connectors.PREFILL_END,
        why="a prefill for another worker ends where a state is kept; its hint counts from the end of the whole prompt",
        until="vLLM hands over a state that both workers can keep",
        build=read_hint_of_the_whole_prompt,
        parameters="self, request",
        applies=kv_connectors.hands_over,
    ),
    Patch(
        "load-end",
        kv_connectors.LOAD_END,
        why="a prefill is loaded by the prompt that it is of, once, and as far as it was computed",
        upstream="vllm#52234: another prompt's prefill is loaded, and its blocks are cached for the wrong tokens",
        until="vLLM binds a prefill to its prompt",
        build=load_what_was_computed,
        parameters="self, request, num_computed_tokens",
        applies=kv_connectors.hands_over,
    ),
    Patch(
        "sent-content",
        kv_connectors.SENT,
        why="who loads a prefill has to know of which tokens it is, and until when it is there",
        upstream="as load-end",
        until="as load-end",
        build=name_what_is_sent,
        parameters="self, request, block_ids",
        applies=kv_connectors.hands_over,
    ),
    Patch(
        "late-reads",
        kv_connectors.READ,
        why="blocks of a prefill whose lease is over hold other requests' states by now",
        upstream="vllm#52234; vllm#47021 cures it for what a decode worker lends",
        until="vLLM asks for the deadline of every read",
        build=decline_late_reads,
        parameters="self, req_id, meta",
        applies=kv_connectors.hands_over,
    ),
    Patch(
        "loaded-weights",
        "vllm.model_executor.model_loader.utils:process_weights_after_loading",
        why="states that outlive a process, or come from another one, are right for these weights alone",
        upstream="none: vLLM's tiers on disk name weights by the model's name",
        until="vLLM names what it has loaded by its contents",
        build=read_what_was_loaded,
        parameters="model, model_config, target_device",
        rebind=(
            "vllm.model_executor.model_loader.base_loader",
            "vllm.model_executor.model_loader.weight_cache.ipc_loader",
        ),
    ),
    Patch(
        "asked-weights",
        f"{CORE}._initialize_kv_caches",
        why="the scheduler has to know what the workers have loaded before it finds or keeps a state",
        until="as loaded-weights",
        build=ask_workers,
        parameters="self, vllm_config",
        mentions=("self.model_executor.initialize_from_config(kv_cache_configs)",),
    ),
    Patch(
        "changed-weights",
        f"{CORE}.collective_rpc",
        why="weights that are changed while the engine runs are no longer those that its states are known by",
        until="as loaded-weights",
        build=forget_weights_that_may_change,
        parameters="self, method, timeout, args, kwargs",
    ),
    Patch(
        "own-trial",
        f"{CORE}Proc.process_input_sockets",
        why="an engine that drafts asks itself whether hits are right beside its drafts, before it gives any",
        until=NEVER,
        build=try_drafts,
        mentions=("self.input_queue.put_nowait((request_type, request))", "self.preprocess_add_request(req)"),
        relies_on=(
            Shape(
                f"{CORE}Proc.__init__",
                mentions=("self.has_coordinator = ", "target=self.process_input_sockets", "self.engines_running = "),
            ),
            Shape(f"{POOL}.evict_blocks", "self, block_ids"),
            Shape(f"{POOL}.touch", "self, blocks"),
            Shape(
                f"{CORE}Proc._handle_client_request",
                mentions=("req, request_wave = request", "self.add_request(req, request_wave)", "self.abort_requests("),
            ),
            Shape(f"{CORE}.preprocess_add_request", mentions=("return req, request.current_wave",)),
            Shape(f"{CORE}Proc.is_running", "self"),
            Shape(f"{CORE}.is_sleeping", "self"),
            Shape(f"{SCHEDULER}.finish_requests", "self, request_ids, finished_status"),
        ),
    ),
    Patch(
        "evicted-states",
        f"{POOL}._remove_cached_block_hashes",
        why="a gateway that believes a prefix is held has to learn when it is evicted",
        upstream="KV events, for listeners on a socket of their own that compute vLLM's hashes",
        until=NEVER,
        build=watch_removed_keys,
        parameters="self, block",
        mentions=("removed_hashes.append(block_hash)", "return removed_hashes"),
        relies_on=(
            Shape(
                f"{POOL}._maybe_evict_cached_block", mentions=("evicted_hashes = self._remove_cached_block_hashes(",)
            ),
        ),
    ),
    Patch(
        "hit-count",
        f"{KV_CACHE_MANAGER}.record_prefix_cache_stats",
        why="requests that resume from a checkpoint are counted",
        until="vLLM counts them",
        build=count_hits,
        parameters="self, request, num_hits",
    ),
    Patch(
        "report-start",
        f"{SCHEDULER}.__init__",
        why="what an engine is has to be known before its first request",
        until=NEVER,
        build=report_from_the_start,
        mentions=("self.vllm_config = vllm_config", "self.requests: dict[str, Request] = {}"),
        relies_on=(Shape(f"{SCHEDULER}.get_request_counts", "self"),),
    ),
    Patch(
        "report",
        f"{SCHEDULER}.make_stats",
        why="the counts have to reach the process that the gateway reads them from",
        until="vLLM lets plugins add to what its engines send",
        build=report_with_stats,
        mentions=("return SchedulerStats(",),
        relies_on=(Shape(f"{SCHEDULER}.update_from_output", mentions=("stats := self.make_stats(",)),),
    ),
    Patch(
        "report-reset",
        f"{SCHEDULER}.reset_prefix_cache",
        why="no step may follow an emptied cache for hours",
        until=NEVER,
        build=report_resets,
        mentions=("self.kv_cache_manager.reset_prefix_cache()",),
    ),
    Patch(
        "reports-collected",
        f"{ENGINES}:CoreEngineProcManager.__init__",
        why="no API server has all reports if there are several, or none that runs Python",
        until=NEVER,
        build=collect_before_the_engines,
        mentions=("vllm_config: VllmConfig", "local_client: bool", "target=EngineCoreProc.run_engine_core"),
    ),
    Patch(
        "reports-collected-ray",
        f"{ENGINES}:CoreEngineActorManager.__init__",
        why="the same where engines are Ray's actors; those on other machines do not report",
        until=NEVER,
        build=collect_before_the_engines,
        mentions=("vllm_config: VllmConfig",),
    ),
    Patch(
        "reports-found",
        f"{SCHEDULER}.get_kv_event_publisher_config",
        why="a gateway knows a worker by the address of its HTTP server, and reports are read at another one",
        until=NEVER,
        build=tell_where,
        parameters="self",
        applies=lambda: exists(f"{SCHEDULER}.get_kv_event_publisher_config"),
    ),
    Patch(
        "promise-of-all",
        "vllm.v1.executor.abstract:Executor.get_kv_cache_specs",
        why="a worker that cannot write states inside a pass must keep all others from being asked to",
        until=NEVER,
        build=require_promise_of_all,
        parameters="self",
    ),
    _promise_patch("promise", f"{LAYERS}.abstract:MambaBase", in_every_version=True),
    _promise_patch("mamba2-promise", MAMBA2),
    _promise_patch("gdn-promise", GDN),
    Patch(
        "worker-steps",
        f"{RUNNER_V1}.execute_model",
        why="the layers have to know which states a step writes",
        until=MANY_EXPORTS,
        build=track_steps,
        mentions=("self._update_states(scheduler_output)", "req_ids = self.input_batch.req_ids"),
    ),
    Patch(
        "worker-steps-v2",
        f"{RUNNER_V2}.execute_model",
        why="the layers have to know which states a step writes, with model runner V2 too",
        until=MANY_EXPORTS,
        build=track_steps,
        mentions=("input_batch = self.prepare_inputs(",),
        on=Platform.GPU,
    ),
    Patch(
        "worker-batch-v2",
        f"{RUNNER_V2}.prepare_inputs",
        why="model runner V2 makes a new batch for each step, and its rows are in an order of their own",
        until=MANY_EXPORTS,
        build=track_batch,
        mentions=("req_ids=req_ids",),
        on=Platform.GPU,
    ),
    Patch(
        "no-second-export",
        f"{LAYERS}.checkpoint:MambaPrefillCheckpointBuilder.build",
        why="vLLM's own export of one state per request would write into a block that is not meant for it",
        until=MANY_EXPORTS,
        build=skip_vllm_exports,
        parameters="self, m, request_rows",
    ),
    *_builder_patches(
        "mamba2",
        MAMBA2_BUILDER,
        BASE_BUILDER,
        plan_scan_states,
        states_of_group,
        (
            Shape(
                f"{BASE_BUILDER}._compute_chunk_metadata",
                mentions=("if this_num_computed % chunk_size != 0:", "n_chunks = cdiv(this_new_tokens, chunk_size)"),
            ),
        ),
    ),
    *_builder_patches("gdn", GDN_BUILDER, GDN_BUILDER, plan_segments, plan_segments_of_group),
    Patch(
        "mamba2-core",
        f"{MAMBA2}.conv_ssm_forward",
        why="the convolution's part of a state is taken from its inputs, and the scan told which states to keep",
        until=MANY_EXPORTS,
        build=mamba2_with_states,
        parameters="self, projected_states, output",
        mentions=(
            "attn_metadata = attn_metadata_raw.get(self.prefix)",
            "self.kv_cache[1]",
            "projected_states[..., self.tped_intermediate_size :]",
            "[self.tped_conv_size, self.tped_dt_size]",
            "[num_decode_tokens, num_prefill_tokens]",
        ),
    ),
    Patch(
        "mamba2-scan",
        f"{LAYERS}.ops.ssd_combined:mamba_chunk_scan_combined_varlen",
        why="a scan has the state at the end of each of its chunks, and gives them away if asked",
        until=MANY_EXPORTS,
        build=scan_with_states,
        mentions=("return_intermediate_states=return_intermediate_states", "last_chunk_indices=last_chunk_indices"),
        relies_on=(Shape(f"{MAMBA2}.conv_ssm_forward", mentions=("= mamba_chunk_scan_combined_varlen(",)),),
        rebind=(f"{LAYERS}.mamba_mixer2",),
    ),
    Patch(
        "gdn-core",
        f"{GDN}._forward_core",
        why="the recurrent core runs segment by segment and keeps the states between",
        until=MANY_EXPORTS,
        build=gdn_in_segments,
        parameters="self, mixed_qkv, b, a, core_attn_out",
        mentions=("attn_metadata = attn_metadata_raw.get(self.prefix)", "self_kv_cache = self.kv_cache"),
    ),
    Patch(
        "olmo-core",
        f"{OLMO_GDN.path}.{OLMO_GDN.core}",
        why="as gdn-core",
        until=MANY_EXPORTS,
        build=gdn_in_segments,
        parameters="self, mixed_qkv, b, a, core_attn_out",
        mentions=(".get(self.prefix)", "= self.kv_cache"),
        applies=_has(OLMO_GDN),
    ),
    _kda_patch("kimi", KIMI_KDA),
    _kda_patch("k3", K3_KDA),
    _kda_patch("glm", GLM_KDA),
    _kda_patch("ling", LING_KDA),
    Patch(
        "k3-states",
        f"{K3_BUILDER}.build",
        why="Kimi-K3 has a builder of its own, which gives blocks away as the one of gated delta nets does",
        until=MANY_EXPORTS,
        build=plan_segments,
        mentions=("common_prefix_len: int", "common_attn_metadata: CommonAttentionMetadata"),
        applies=_has(K3_KDA),
    ),
    Patch(
        "ngram-states",
        f"{NGRAM_BUILDER}.build",
        why="a convolution has to know where in a step's tokens the states are that it hands out",
        until=MANY_EXPORTS,
        build=plan_ngram_states,
        mentions=("common_prefix_len: int", "torch.cat((decode_req_idx_cpu, prefill_req_idx_cpu))"),
        applies=_has(QWEN_NGRAM),
    ),
    Patch(
        "ngram-core",
        f"{QWEN_NGRAM.path}.{QWEN_NGRAM.core}",
        why="a convolution's state is taken from its inputs",
        until=MANY_EXPORTS,
        build=keep_ngram_states,
        parameters="self, inputs, residual, outer_residual, metadata, conv_state, conv_weights",
        relies_on=(
            Shape(
                f"{QWEN_NGRAM.path}._short_conv",
                mentions=("conv_state = conv_state[..., -state_capacity:]", "inputs=inputs"),
            ),
        ),
        applies=_has(QWEN_NGRAM),
    ),
    Patch(
        "short-conv-states",
        f"{BASE_BUILDER}.build",
        why="as ngram-states; short convolutions have no builder of their own",
        until=MANY_EXPORTS,
        build=plan_conv_states,
        mentions=("common_prefix_len: int", "common_attn_metadata: CommonAttentionMetadata"),
        applies=_has(SHORT_CONVOLUTION),
    ),
    Patch(
        "short-conv-states-of-group",
        f"{BASE_BUILDER}.update_block_table",
        why="each cache group writes its states into blocks of its own",
        until=MANY_EXPORTS,
        build=states_of_group,
        parameters="self, metadata, blk_table, slot_mapping",
        applies=lambda: exists(SHORT_CONVOLUTION.path) and exists(f"{MAMBA2_BUILDER}.update_block_table"),
    ),
    Patch(
        "short-conv-core",
        f"{SHORT_CONVOLUTION.path}.{SHORT_CONVOLUTION.core}",
        why="its kernel has to know which states to keep",
        until=MANY_EXPORTS,
        build=convolution_with_states,
        parameters="self, hidden_states, output",
        mentions=(".get(self.prefix)", "= causal_conv1d_fn("),
        applies=_has(SHORT_CONVOLUTION),
    ),
    Patch(
        "short-conv-core-cpu",
        f"{SHORT_CONVOLUTION.path}.forward_native",
        why="the same on a CPU",
        until=MANY_EXPORTS,
        build=convolution_with_states,
        parameters="self, hidden_states, output",
        mentions=(".get(self.prefix)", "causal_conv1d_fn_cpu as causal_conv1d_torch"),
        on=Platform.CPU,
        applies=_has(SHORT_CONVOLUTION),
    ),
    Patch(
        "short-conv-inputs",
        f"{LAYERS}.ops.causal_conv1d:causal_conv1d_fn",
        why="a convolution's state is taken from its inputs, which only its kernel is given",
        until=MANY_EXPORTS,
        build=keep_inputs,
        mentions=(CONVOLUTION_INPUTS,),
        rebind=(f"{LAYERS}.short_conv",),
        applies=_has(SHORT_CONVOLUTION),
    ),
    Patch(
        "short-conv-inputs-cpu",
        f"{LAYERS}.ops.cpu.causal_conv1d:causal_conv1d_fn_cpu",
        why="the same on a CPU",
        until=MANY_EXPORTS,
        build=keep_inputs,
        mentions=(CONVOLUTION_INPUTS,),
        on=Platform.CPU,
        applies=_has(SHORT_CONVOLUTION),
    ),
    Patch(
        "gdn-core-cpu",
        f"{LAYERS}.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
        why="the recurrent core runs segment by segment and keeps the states between",
        until=MANY_EXPORTS,
        build=cpu_gdn_in_segments,
        parameters="layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out",
        mentions=("state_indices_tensor = attn_metadata_i.non_spec_state_indices_tensor", "layer.kv_cache[1]"),
        on=Platform.CPU,
    ),
    Patch(
        "gdn-core-cpu-drafts",
        f"{LAYERS}.ops.cpu.gdn_attention:_cpu_gdn_attention_spec_aware",
        why="the same where drafts are configured",
        until=MANY_EXPORTS,
        build=cpu_gdn_beside_drafts_in_segments,
        parameters="layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out, width, state_len",
        mentions=("spec_sequence_masks = attn_metadata_i.spec_sequence_masks", "conv_buf = _conv_buffer_view(layer)"),
        on=Platform.CPU,
    ),
)
