"""Every change Seamark makes to vLLM, as data. `python -m engine_patches patches` prints it.

How to read a row: `build` makes what replaces `target`. `parameters` and `mentions` are what the target must look like
for that: its parameter names, and words that its source contains. `relies_on` says the same of other functions; what
several rows rely on stands in one of them. `on` and `applies` say on which platform and in which versions the row has a
meaning. A row without `upstream` serves hints, so upstream has nothing to repair. Of a kind of rows (`cure`, `adapter`,
...) is said once what all say.

The cores of recurrent layers, and the builders of their metadata, have no rows of their own: `promise` and `builders`
replace those of the model that is loaded, by the tables in `families.py` and `forward/layers.py`.

CONTRIBUTING.md says how to support a new vLLM. A cure whose defect no supported version has (tests/upstream) can go.
"""

from __future__ import annotations

from functools import partial

from engine_patches import kv_connectors, upstream_fixes
from engine_patches.families import INSIDE, MAMBA2_MIXER
from engine_patches.forward import conv_states, layers, loaded_weights, scan_states, step_writes
from engine_patches.ledger import Patch, PatchRole, Platform, Shape, exists, holds
from engine_patches.reporting import hooks as reporting
from engine_patches.scheduler import adapters, cache_keys, draft_windows, fan_out, kv_events, state_writes, transfers
from engine_patches.scheduler import hooks as scheduling
from engine_patches.scheduler.not_kept import refuse_what_cannot_be
from engine_patches.trial import own_requests

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
KV_CACHE_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
POOL = "vllm.v1.core.block_pool:BlockPool"
ENGINES = "vllm.v1.engine.utils"
CORE = "vllm.v1.engine.core:EngineCore"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
LAYERS = "vllm.model_executor.layers.mamba"
CPU_PLATFORM = "vllm.platforms.cpu:CpuPlatform"

# vLLM 0.31 asks all groups for what they find between blocks.
LEFT_OUT_OF_LOOKUPS = Shape(
    f"{KV_CACHE_UTILS}:partial_hash_hits_enabled", mentions=("if group.kv_cache_spec.prefix_cacheable\n",)
)

RESETS_BLOCK_SIZE = Shape(f"{CPU_PLATFORM}.check_and_update_config", mentions=("cache_config.block_size = 128",))

# Of the kernels of convolutions, by position: they take more by name, each other ones.
CONVOLUTION_INPUTS = "x: torch.Tensor,\n    weight: torch.Tensor,\n    bias: torch.Tensor | None,\n    conv_states:"

CACHE_BLOCKS_PARAMETERS = "self, request, num_tokens, retention_interval, replay_boundaries"


ANY_POSITION = "vLLM writes states at any position inside a pass"
POSITIONS_FROM_REQUESTS = "vLLM takes checkpoint positions from requests (RFC vllm#55697)"

cure = partial(Patch, role=PatchRole.CURE)

adapter = partial(
    cure,
    upstream="vllm#42125, #48352, #30931; vLLM warns of it when it loads in place",
    until="vLLM's block hashes hold what an adapter contains",
)

handed_over = partial(
    Patch,
    upstream="vllm#52234: another prompt's prefill is loaded, and its blocks are cached for the wrong tokens",
    until="vLLM binds a prefill to its prompt",
    applies=kv_connectors.hands_over,
)

weights = partial(Patch, until="vLLM names what it has loaded by its contents")

inside = partial(Patch, until="vLLM exports several states from one pass")

ours = partial(Patch, until="never: ours")

PATCHES: tuple[Patch, ...] = (
    cure(
        "block-copy",
        "vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
        why="copy-on-write of a partial block copies only the shorter of two caches at one address: wrong tokens",
        upstream="PR vllm#55112; same text in 0.32 and 0.33",
        until="vLLM copies the widest view, or tells copied caches apart by address and size",
        build=upstream_fixes.copy_largest_view_first,
        parameters="kv_caches, num_blocks, kv_cache_block_copies",
        mentions=("key = (cache.device, cache.data_ptr())", "if key in seen:"),
        rebind=(RUNNER_V1, RUNNER_V2, "vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker"),
    ),
    cure(
        "cpu-checkpoint-scan",
        f"{LAYERS}.ops.ssd_combined:_mamba_chunk_scan_combined_fwd",
        why="the CPU scan cannot deliver the promised export: a prompt longer than a block kills the engine",
        upstream="unreported; 0.32 promises it, and no version can",
        until="vLLM's CPU scan returns intermediate states",
        build=upstream_fixes.states_at_chunk_ends,
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
    cure(
        "cpu-checkpoint-kernel",
        "vllm._custom_ops:mamba_chunk_scan_fwd_cpu",
        why="the states that `cpu-checkpoint-scan` returns, and those that Seamark keeps, come from the CPU's kernel",
        upstream="as cpu-checkpoint-scan",
        until="never: Seamark copies its states between two runs of it",
        build=scan_states.kernel_in_runs,
        parameters="out, final_states, x, dt, A, B, C, D, z, cu_seqlens",
        on=Platform.CPU,
    ),
    cure(
        "cpu-checkpoint-store",
        f"{LAYERS}.ops.ssd_checkpoint:store_prefill_checkpoint",
        why="the last step of the promised export is a Triton kernel, and a CPU has none",
        upstream="unreported; present in 0.32",
        until="vLLM stores checkpoints on a CPU",
        build=upstream_fixes.store_checkpoints_without_triton,
        parameters="checkpoint, chunk_idx, x, conv_state, chunk_states, ssm_state, query_start_loc, state_len",
        rebind=(f"{LAYERS}.mamba_mixer2",),
        on=Platform.CPU,
        applies=lambda: exists(f"{MAMBA2_MIXER.path}.get_kv_cache_spec"),  # Mamba2 promises to export states
    ),
    cure(
        "cpu-block-size",
        f"{CPU_PLATFORM}.check_and_update_config",
        why="the block size of a hybrid is reset after its cache was built: states under wrong keys, wrong tokens",
        upstream="repaired in 0.33; in 0.32 EngineCoreProc._perform_handshakes runs VllmConfig.__post_init__ again",
        until="vLLM leaves a block size alone that the cache was built with",
        build=upstream_fixes.keep_enlarged_block_size,
        parameters="cls, vllm_config",
        mentions=("elif not cache_config.user_specified_block_size:", *RESETS_BLOCK_SIZE.mentions),
        on=Platform.CPU,
        applies=lambda: holds(RESETS_BLOCK_SIZE),
    ),
    cure(
        "block-edge-stop",
        f"{SCHEDULER}._mamba_block_aligned_split",
        why="a last chunk that starts inside a block runs past its edge: a state under the key of another position",
        upstream="unreported; same text in 0.32 and 0.33; needs a backend that exports states",
        until="vLLM keeps the stop at the block edge for chunks that start inside a block",
        build=upstream_fixes.stop_at_the_block_edge_after_a_hit,
        parameters="self, request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens",
        mentions=(
            "self.mamba_has_prefill_checkpoint_blocks",
            "if start % block_size != 0 and not use_internal_checkpoint",
        ),
    ),
    cure(
        "preempted-keys",
        f"{SCHEDULER}._preempt_request",
        why="a request preempted in the step that was to compute it leaves keys of contents that nobody computes",
        upstream="vllm-project/vllm#57580",
        until="vLLM registers keys once a step is planned to its end, or takes them back",
        build=upstream_fixes.take_back_uncomputed_keys,
        mentions=("self._free_request_blocks(request)", "request.num_computed_tokens = 0"),
    ),
    adapter(
        "adapter-contents",
        f"{KV_CACHE_UTILS}:_gen_lora_extra_hash_keys",
        why="an adapter that is loaded again from its path is answered from what its old weights have computed",
        build=adapters.hash_contents,
        parameters="request",
        mentions=('return [("lora", lora_request.lora_name, lora_request.lora_path)]',),
        relies_on=(
            Shape(f"{KV_CACHE_UTILS}:generate_block_hash_extra_keys", mentions=("_gen_lora_extra_hash_keys(request)",)),
            Shape(f"{KV_CACHE_UTILS}:to_event_extra_keys", mentions=("key[1] for key in keys",)),
            Shape(
                "vllm.v1.request:Request.__init__",
                mentions=("self.block_hashes: list[BlockHash] = []", "self.lora_request = lora_request"),
            ),
            Shape("vllm.v1.request:Request.update_block_hashes", mentions=("self._block_hasher(self)",)),
        ),
    ),
    adapter(
        "adapter-of-request",
        f"{CORE}.preprocess_add_request",
        why="a request is hashed by the contents that its engine has loaded",
        build=adapters.know_adapters_of_requests,
        parameters="self, request",
        mentions=("Request.from_engine_core_request(request, self.request_block_hasher)",),
    ),
    adapter(
        "adapter-loads",
        f"{CORE}.add_lora",
        why="what a load has read is what the workers hold from then on",
        build=adapters.note_loads,
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
    adapter(
        "adapter-admission",
        f"{CORE}.add_request",
        why="a load may come between a request's hashes and its place in the queue, or with the request itself",
        build=adapters.admit_by_adapter,
        parameters="self, request, request_wave",
        mentions=("self.scheduler.add_request(request)",),
    ),
    adapter(
        "adapter-lookup",
        f"{KV_CACHE_MANAGER}.get_computed_blocks",
        why="a load may come while a request waits, and before it is resumed",
        build=adapters.look_up_by_adapter,
        mentions=("request.block_hashes",),
    ),
    adapter(
        "adapter-lookup-connector",
        f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector",
        why="KV connectors look up in a way of their own",
        build=adapters.look_up_by_adapter,
        mentions=("request.block_hashes",),
    ),
    Patch(
        "match-unit",
        f"{KV_CACHE_UTILS}:resolve_kv_cache_block_sizes",
        why="prefixes of hybrids are matched by blocks of 500 to 8,000 tokens unless the user asks for less",
        upstream="--prefix-match-unit",
        until="vLLM defaults to a fine unit for hybrids",
        build=scheduling.default_to_fine_unit,
        parameters="kv_cache_config, vllm_config",
        mentions=("cache_config.prefix_match_unit", "raise ValueError"),
        rebind=("vllm.v1.engine.core",),
    ),
    Patch(
        "checkpoints-set-up",
        f"{SCHEDULER}.__init__",
        why="hints and states need one place that knows them, and states are kept between block edges too",
        until=POSITIONS_FROM_REQUESTS,
        build=scheduling.set_up_checkpoints,
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
        build=kv_events.announce_resumable_blocks,
        mentions=("self.enable_kv_cache_events = (",),
        relies_on=(
            Shape(
                f"{POOL}.cache_full_blocks",
                "self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask",
                mentions=("if blk.is_null or (block_mask is not None and not block_mask[i])",),
            ),
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
        "not-kept",
        f"{CORE}.preprocess_add_request",
        why="a request that asks for nothing of it to be kept is refused where that cannot be promised",
        until="vLLM takes requests whose blocks get no keys",
        build=refuse_what_cannot_be,
        parameters="self, request",
        relies_on=(
            # By these alone do a request's blocks get keys.
            Shape(
                "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
                "self, request, num_computed_tokens",
                ("manager.cache_blocks(",),
            ),
            Shape(f"{KV_CACHE_MANAGER}.allocate_slots", mentions=("self.coordinator.cache_blocks(request, ",)),
            Shape(f"{KV_CACHE_MANAGER}.cache_blocks", mentions=("self.coordinator.cache_blocks(request, ",)),
            Shape(f"{KV_CACHE_MANAGER}.prefix_cache_lookup_enabled", mentions=("request.skip_reading_prefix_cache",)),
        ),
    ),
    Patch(
        "chunk-end",
        f"{SCHEDULER}._mamba_block_aligned_split",
        why="chunks run to the budget, since states no longer need a chunk's end; if they do, chunks end at hints",
        upstream="the junction stop of Marconi-style caching",
        until=ANY_POSITION,
        build=state_writes.end_chunk,
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
        build=state_writes.write_after_scheduling,
        mentions=("self.kv_cache_manager.new_step_starts()", "self._update_after_schedule(scheduler_output)"),
        relies_on=(
            Shape(
                f"{SCHEDULER}._update_after_schedule", mentions=("request.num_computed_tokens += num_scheduled_token",)
            ),
            Shape(f"{POOL}.get_new_blocks", "self, num_blocks"),
            Shape(f"{POOL}.free_blocks", "self, ordered_blocks"),
            Shape(
                f"{POOL}.cache_partial_block",
                "self, request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes",
                mentions=("block.block_hash_num_tokens < num_hash_blocks * self.hash_block_size",),
            ),
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
                f"{KV_CACHE_UTILS}:FreeKVCacheBlockQueue.__init__",
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
        build=state_writes.learn_step_time,
        parameters="self, scheduler_output, model_runner_output",
    ),
    Patch(
        "late-output",
        "vllm.v1.executor.uniproc_executor:AsyncOutputFuture.result",
        why="a step that ended while the next one was launched would be taken for as long as that launch",
        until="vLLM's scheduler knows its step times",
        build=state_writes.note_late_output,
        parameters="self, timeout",
        mentions=("output = self.async_output.get_output()",),
        relies_on=(
            Shape(
                f"{RUNNER_V1}:AsyncGPUModelRunnerOutput.get_output",
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
        build=fan_out.hold_followers,
        parameters="self, request",
        mentions=("return True", "return False"),
        relies_on=(
            Shape(
                f"{SCHEDULER}.schedule",
                mentions=(
                    "self._handle_blocked_waiting_request(request)",
                    "self.max_num_scheduled_tokens",
                    "self.max_num_running_reqs",
                    "num_running >= self.max_num_active_reqs",
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
        build=state_writes.keep_only_true_states,
        parameters=CACHE_BLOCKS_PARAMETERS,
        mentions=("if block.is_null or block.block_hash is None:",),
    ),
    Patch(
        "tail-states",
        f"{MANAGERS}:MambaManager._cache_partial_tail_block",
        why="the state at a chunk's end is written like any other, into a block of its own",
        until=ANY_POSITION,
        build=scheduling.count_tail_states,
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
        build=cache_keys.keep_hinted_keys,
        parameters=CACHE_BLOCKS_PARAMETERS,
        mentions=("self._cache_partial_tail_block(request, num_tokens)",),
        relies_on=(
            Shape(
                f"{MANAGERS}:SingleTypeKVCacheManager._apply_cow",
                mentions=("self._pending_cow_copies.append((source_block, cow_block))",),
            ),
            Shape(f"{POOL}._insert_block_hash", mentions=("self.cached_block_hashes_by_block.setdefault",)),
        ),
    ),
    Patch(
        "written-rows",
        f"{KV_CACHE_MANAGER}.get_computed_blocks",
        why="a partial hit must not copy a block that another request of the same step is about to fill",
        upstream="unreported; vLLM defers such a request only if state and rows are registered together",
        until="vLLM defers partial hits on any block registered in the same step",
        build=cache_keys.avoid_unwritten_rows,
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
    ),
    Patch(
        "written-rows-connector",
        f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector",
        why="KV connectors look up in a way of their own, and must not copy such a block either",
        upstream="see written-rows",
        until="as written-rows",
        build=cache_keys.avoid_unwritten_rows_with_a_connector,
        mentions=("return *self.get_computed_blocks(request", "return blocks, num_local, 0,"),
    ),
    ours(
        "cache-reset",
        f"{SCHEDULER}.reset_prefix_cache",
        why="emptying the cache fails while blocks of a running step's states are held",
        build=scheduling.release_before_reset,
        mentions=("self.kv_cache_manager.reset_prefix_cache()",),
    ),
    Patch(
        "prefill-end",
        kv_connectors.PREFILL_END,
        why="a prefill for another worker ends where a state is kept; its hint counts from the end of the whole prompt",
        until="vLLM hands over a state that both workers can keep",
        build=transfers.read_hint_of_the_whole_prompt,
        applies=kv_connectors.hands_over,
    ),
    handed_over(
        "load-end",
        kv_connectors.LOAD_END,
        why="a prefill is loaded by the prompt that it is of, once, and as far as it was computed",
        build=transfers.load_what_was_computed,
    ),
    handed_over(
        "sent-content",
        kv_connectors.SENT,
        why="who loads a prefill has to know of which tokens it is, and until when it is there",
        build=transfers.name_what_is_sent,
    ),
    Patch(
        "late-reads",
        kv_connectors.READ,
        why="blocks of a prefill whose lease is over hold other requests' states by now",
        upstream="vllm#52234; vllm#47021 cures it for what a decode worker lends",
        until="vLLM asks for the deadline of every read",
        build=upstream_fixes.decline_late_reads,
        applies=kv_connectors.hands_over,
    ),
    weights(
        "loaded-weights",
        "vllm.model_executor.model_loader.utils:process_weights_after_loading",
        why="states that outlive a process, or come from another one, are right for these weights alone",
        upstream="none: vLLM's tiers on disk name weights by the model's name",
        build=loaded_weights.read_what_was_loaded,
        parameters="model, model_config, target_device",
        rebind=(
            "vllm.model_executor.model_loader.base_loader",
            "vllm.model_executor.model_loader.weight_cache.ipc_loader",
        ),
    ),
    weights(
        "asked-weights",
        f"{CORE}._initialize_kv_caches",
        why="the scheduler has to know what the workers have loaded before it finds or keeps a state",
        build=loaded_weights.ask_workers,
        parameters="self, vllm_config",
        mentions=("self.model_executor.initialize_from_config(kv_cache_configs)",),
    ),
    weights(
        "changed-weights",
        f"{CORE}.collective_rpc",
        why="weights that are changed while the engine runs are no longer those that its states are known by",
        build=scheduling.forget_weights_that_may_change,
        parameters="self, method, timeout, args, kwargs",
    ),
    ours(
        "own-trial",
        f"{CORE}Proc.process_input_sockets",
        why="an engine that drafts asks itself whether hits are right beside its drafts, before it gives any",
        build=own_requests.try_drafts,
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
    ours(
        "evicted-states",
        f"{POOL}._remove_cached_block_hashes",
        why="a gateway that believes a prefix is held has to learn when it is evicted",
        upstream="KV events, for listeners on a socket of their own that compute vLLM's hashes",
        build=cache_keys.watch_removed_keys,
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
        build=scheduling.count_hits,
        parameters="self, request, num_hits",
    ),
    ours(
        "report-start",
        f"{SCHEDULER}.__init__",
        why="what an engine is has to be known before its first request",
        build=reporting.report_from_the_start,
        mentions=("self.vllm_config = vllm_config", "self.requests: dict[str, Request] = {}"),
        relies_on=(Shape(f"{SCHEDULER}.get_request_counts", "self"),),
    ),
    Patch(
        "report",
        f"{SCHEDULER}.make_stats",
        why="the counts have to reach the process that the gateway reads them from",
        until="vLLM lets plugins add to what its engines send",
        build=reporting.report_with_stats,
        mentions=("return SchedulerStats(",),
        relies_on=(Shape(f"{SCHEDULER}.update_from_output", mentions=("stats := self.make_stats(",)),),
    ),
    ours(
        "report-reset",
        f"{SCHEDULER}.reset_prefix_cache",
        why="no step may follow an emptied cache for hours",
        build=reporting.report_resets,
    ),
    ours(
        "reports-collected",
        f"{ENGINES}:CoreEngineProcManager.__init__",
        why="no API server has all reports if there are several, or none that runs Python",
        build=reporting.collect_before_the_engines,
        mentions=("vllm_config: VllmConfig", "local_client: bool", "target=EngineCoreProc.run_engine_core"),
    ),
    ours(
        "reports-collected-ray",
        f"{ENGINES}:CoreEngineActorManager.__init__",
        why="the same where engines are Ray's actors; those on other machines do not report",
        build=reporting.collect_before_the_engines,
        mentions=("vllm_config: VllmConfig",),
    ),
    ours(
        "reports-found",
        f"{SCHEDULER}.get_kv_event_publisher_config",
        why="a gateway knows a worker by the address of its HTTP server, and reports are read at another one",
        build=reporting.tell_where,
        parameters="self",
    ),
    ours(
        "promise-of-all",
        "vllm.v1.executor.abstract:Executor.get_kv_cache_specs",
        why="a worker that cannot write states inside a pass must keep all others from being asked to",
        build=layers.require_promise_of_all,
        parameters="self",
    ),
    inside(
        "promise",
        f"{LAYERS}.abstract:MambaBase.get_kv_cache_spec",
        why="a worker says that it writes states inside a pass, and does: the recurrent layers of its model get cores "
        "of ours",
        build=layers.promise_writes_in_forward,
        parameters="self, vllm_config",
        relies_on=layers.CORE_SHAPES,
        also=tuple(f"{layer.path}.{core}" for layer in INSIDE for core in layer.cores),
    ),
    inside(
        "builders",
        "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders",
        why="a recurrent layer has to know where in a step's tokens the states are that it hands out, and each cache "
        "group writes its states into blocks of its own",
        build=layers.plan_where_metadata_is_made,
        parameters="self, vllm_config, device, kernel_block_size, num_metadata_builders",
        mentions=("builder_cls = self.backend.get_builder_cls()", "self.metadata_builders = ["),
        relies_on=layers.BUILDER_SHAPES,
        also=tuple(layers.BUILDERS),
    ),
    inside(
        "worker-steps",
        f"{RUNNER_V1}:GPUModelRunner.execute_model",
        why="the layers have to know which states a step writes",
        build=step_writes.track_steps,
        mentions=("self._update_states(scheduler_output)", "req_ids = self.input_batch.req_ids"),
    ),
    inside(
        "worker-steps-v2",
        f"{RUNNER_V2}:GPUModelRunner.execute_model",
        why="the layers have to know which states a step writes, with model runner V2 too",
        build=step_writes.track_steps,
        mentions=("input_batch = self.prepare_inputs(",),
        on=Platform.GPU,
    ),
    inside(
        "worker-batch-v2",
        f"{RUNNER_V2}:GPUModelRunner.prepare_inputs",
        why="model runner V2 makes a new batch for each step, and its rows are in an order of their own",
        build=step_writes.track_batch,
        mentions=("req_ids=req_ids",),
        on=Platform.GPU,
    ),
    inside(
        "no-second-export",
        f"{LAYERS}.checkpoint:MambaPrefillCheckpointBuilder.build",
        why="vLLM's own export of one state per request would write into a block that is not meant for it",
        build=step_writes.skip_vllm_exports,
        parameters="self, m, request_rows",
    ),
    inside(
        "mamba2-scan",
        f"{LAYERS}.ops.ssd_combined:mamba_chunk_scan_combined_varlen",
        why="a scan has the state at the end of each of its chunks, and gives them away if asked",
        build=scan_states.scan_with_states,
        mentions=("return_intermediate_states=return_intermediate_states", "last_chunk_indices=last_chunk_indices"),
        rebind=(f"{LAYERS}.mamba_mixer2",),
    ),
    inside(
        "short-conv-inputs",
        f"{LAYERS}.ops.causal_conv1d:causal_conv1d_fn",
        why="a convolution's state is taken from its inputs, which only its kernel is given",
        build=conv_states.keep_inputs,
        mentions=(CONVOLUTION_INPUTS,),
        rebind=(f"{LAYERS}.short_conv",),
    ),
    inside(
        "short-conv-inputs-cpu",
        f"{LAYERS}.ops.cpu.causal_conv1d:causal_conv1d_fn_cpu",
        why="the same on a CPU",
        build=conv_states.keep_inputs,
        mentions=(CONVOLUTION_INPUTS,),
        on=Platform.CPU,
    ),
    inside(
        "gdn-core-cpu",
        f"{LAYERS}.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
        why="the recurrent core runs segment by segment and keeps the states between",
        build=layers.cpu_gdn_in_segments,
        parameters="layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out",
        mentions=("state_indices_tensor = attn_metadata_i.non_spec_state_indices_tensor", "layer.kv_cache[1]"),
        on=Platform.CPU,
    ),
    inside(
        "gdn-core-cpu-drafts",
        f"{LAYERS}.ops.cpu.gdn_attention:_cpu_gdn_attention_spec_aware",
        why="the same where drafts are configured",
        build=layers.cpu_gdn_in_segments,
        parameters="layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out, width, state_len",
        mentions=("spec_sequence_masks = attn_metadata_i.spec_sequence_masks", "conv_buf = _conv_buffer_view(layer)"),
        on=Platform.CPU,
    ),
)
