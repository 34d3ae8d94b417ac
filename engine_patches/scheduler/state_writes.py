"""A step's writes, as the scheduler plans them: where its chunks end, and a block and its keys for each state in it.

If states are written inside the pass, a chunk ends where the budget ends: each further stop would cost a pass. If a
backend cannot run in segments, a chunk has to end at every position whose state is kept. vLLM already ends one at
`request.shared_prefix_boundary`; setting that field to the next hinted position before each split gives any number of
checkpoints, at one forward pass each.

All else happens after a step is planned to its end. So a state is promised only for requests that are in the step,
its blocks are taken only from those that no request needed, and no request can resume from it before it is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine_patches.footprint import FOLLOWED_AT, LATE, PLANNED_AT, WRITES
from engine_patches.forward.step_writes import Write
from engine_patches.ledger import KV_CACHE_UTILS, MANAGERS, POOL, RUNNER_V1, SCHEDULER, Function, Patch, Platform, Shape
from engine_patches.scheduler.cache_keys import keep_attention_keys
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import only_generates
from engine_patches.scheduler.earlier_prompts import EVICTED, HINT_IGNORED, NOT_WORTH_IT
from engine_patches.scheduler.planner import HINTED, RUNG, SPARE, CheckpointTarget, Grid, RequestState
from engine_patches.scheduler.states import StateEvents, States
from engine_patches.scheduler.transfers import keep_loaded_state


def run_to_the_budget(request: Any, start: int, num_new_tokens: int, grid: Grid) -> int:
    """Tokens of a chunk that begins at `start`, at most `num_new_tokens`.

    A chunk that does not reach the prompt's end ends where a state can lie, if the budget allows it: the next chunk can
    then write states anywhere, and a kernel that scans in chunks sees the same ones in any number of passes.
    """
    end = start + num_new_tokens
    if end >= max(request.num_prompt_tokens, request.num_tokens - 1):
        return num_new_tokens
    return max(grid.floor(end) - start, 0) or num_new_tokens


def no_short_replay(request: Any, start: int, num_new_tokens: int, verified: int) -> int:
    """Tokens of a chunk beside drafts: not so few that model runner V1 takes a preempted request's replay for drafts.

    It tells the two apart by the prompt's length, and of `verified` tokens at most would go on from the first one's.
    """
    replays = request.num_prompt_tokens <= start < request.num_tokens - 1
    return 1 if replays and 1 < num_new_tokens <= verified else num_new_tokens


def next_stop(state: RequestState, start: int, block_size: int, tokens_per_pass: float) -> int:
    """The next position (tokens) after `start` at which a chunk has to end, 0 if there is none.

    Only positions of at least `tokens_per_pass` tokens: a shorter prefix saves less than the stop costs. A learned one
    has to be as far behind `start`, where a state is found already. vLLM's own junction is floored as vLLM floors it.
    """
    wish = state.wish
    stops = [position for position in wish.hinted_positions if position >= tokens_per_pass]
    if wish.learned - start >= tokens_per_pass:
        stops.append(wish.learned)
    stops.append(start + (state.upstream_junction - start) // block_size * block_size)
    return min((stop for stop in stops if stop > start), default=0)


def _split(original: Callable[..., int], scheduler: Any, *chunk: Any, inside_blocks: bool) -> int:
    """As vLLM does with states inside blocks, too, or at the ends of blocks alone."""
    fine = scheduler.mamba_partial_cache_hit, scheduler.mamba_shared_prefix_checkpoint
    scheduler.mamba_partial_cache_hit = fine[0] and inside_blocks
    scheduler.mamba_shared_prefix_checkpoint = inside_blocks
    try:
        return original(scheduler, *chunk)
    finally:
        scheduler.mamba_partial_cache_hit, scheduler.mamba_shared_prefix_checkpoint = fine


@Patch(
    "chunk-end",
    f"{SCHEDULER}._mamba_block_aligned_split",
    why="chunks run to the budget, since states no longer need a chunk's end; if they do, chunks end at hints",
    upstream="the junction stop of Marconi-style caching",
    until="vLLM writes states at any position inside a pass",
    mentions=(
        "junction = request.shared_prefix_boundary",
        "if self.mamba_shared_prefix_checkpoint",
        "junction_stop if start < junction < end else 0",
    ),
    relies_on=(Shape("vllm.v1.request:Request.__init__", mentions=("self.shared_prefix_boundary = 0",)),),
)
def end_chunk(self: Any, request: Any, num_new_tokens: int, *found: int, original: Function) -> Any:
    # `found`: tokens of the cache, and of a connector, if the request begins.
    checkpoints = self.seamark
    start = request.num_computed_tokens + sum(found)
    state: RequestState = checkpoints.state_of(request)
    state.chunk_start = start
    if checkpoints.writes_in_forward:
        if state.wish.left_to_vllm and state.wish.is_kept:
            tokens = _split(original, self, request, num_new_tokens, *found, inside_blocks=False)
        else:
            if start < request.num_prompt_tokens and state.wish.is_kept:
                checkpoints.expect_states(request, start)
            tokens = run_to_the_budget(request, start, num_new_tokens, checkpoints.grid)
        return no_short_replay(request, start, tokens, checkpoints.verified)

    if start >= request.num_prompt_tokens or not state.wish.positions:
        return original(self, request, num_new_tokens, *found)
    if request.shared_prefix_boundary != state.own_junction:  # vLLM has looked the prefix up since the last call
        state.upstream_junction = request.shared_prefix_boundary
    tokens_per_pass = checkpoints.step_time.tokens_worth(passes=1)
    state.own_junction = next_stop(state, start, self.cache_config.block_size, tokens_per_pass)
    request.shared_prefix_boundary = state.own_junction
    # Only a hinted or learned position may end a chunk inside a block; without one vLLM splits as it does alone.
    return _split(original, self, request, num_new_tokens, *found, inside_blocks=True)


@Patch(
    "step-writes",
    f"{SCHEDULER}.schedule",
    why="each wanted state gets a block and its keys, once the step is planned to its end",
    until="vLLM takes checkpoint positions from requests (RFC vllm#55697)",
    mentions=("self.kv_cache_manager.new_step_starts()", "self._update_after_schedule(scheduler_output)"),
    relies_on=(
        Shape(
            f"{SCHEDULER}._update_after_schedule",
            mentions=("request.num_computed_tokens += num_scheduled_token",),
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
)
def write_after_scheduling(self: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    """Replacement of `Scheduler.schedule`."""
    checkpoints: Checkpoints = self.seamark
    if checkpoints.own is not None:
        checkpoints.own.make_way(self)
    checkpoints.begin_step(self.requests)
    output = original(self, *args, **kwargs)
    if checkpoints.writes_in_forward:
        setattr(output, WRITES, _plan_writes(self, output))
    if checkpoints.pinning:
        checkpoints.pin_prompts(self.requests)
    if checkpoints.states is not None:
        _emit_events(self, output)
    checkpoints.long_prefills.step_planned(self, output)
    now = time.monotonic()
    setattr(output, PLANNED_AT, now)
    if checkpoints.last_planned is not None:
        setattr(checkpoints.last_planned, FOLLOWED_AT, now)
    checkpoints.last_planned = output
    return output


def _emit_events(scheduler: Any, output: Any) -> None:
    """A step is planned to its end: emit the states that came with it, and those that went."""
    checkpoints = scheduler.seamark
    events: StateEvents = checkpoints.states.events
    events.emit_evictions()  # nothing may be reported as stored in a pool that was emptied since
    if only_generates(output) and not output.scheduled_new_reqs:
        return
    for name, num_tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        end = request.num_computed_tokens  # vLLM has advanced it already
        start = end - num_tokens
        if start < request.num_prompt_tokens and (state := checkpoints.state_of(request)).wish.positions:
            events.emit_stored(request, state, checkpoints.targets(request), start, end)
    events.emit_evictions()


@Patch(
    "late-output",
    "vllm.v1.executor.uniproc_executor:AsyncOutputFuture.result",
    why="a step that ended while the next one was launched would be taken for as long as that launch",
    until="vLLM's scheduler knows its step times",
    mentions=("output = self.async_output.get_output()",),
    relies_on=(
        Shape(
            f"{RUNNER_V1}:AsyncGPUModelRunnerOutput.get_output",
            mentions=("self.async_copy_ready_event.synchronize()",),
        ),
        Shape("vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output", mentions=("self.copy_event.synchronize()",)),
    ),
    on=Platform.GPU,
)
def note_late_output(self: Any, timeout: Any = None, *, original: Function) -> Any:
    """Replacement of `AsyncOutputFuture.result`: mark an output that was there before it was asked for.

    With one worker in the engine's process the next step is launched first, which can take longer than the step.
    """
    runner = self.async_output
    event = getattr(runner, "async_copy_ready_event", None) or getattr(runner, "copy_event", None)
    is_late = event is not None and event.query()
    output = original(self, timeout)
    if is_late and hasattr(output, "sampled_token_ids"):
        setattr(output, LATE, True)
    return output


@Patch(
    "step-time",
    f"{SCHEDULER}.update_from_output",
    why="what a hit or a wait is worth depends on how long a pass takes",
    until="vLLM's scheduler knows its step times",
    parameters="self, scheduler_output, model_runner_output",
)
def learn_step_time(
    self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, original: Function, **more: Any
) -> Any:
    """Replacement of `Scheduler.update_from_output`: when a step's output returns, its time is known."""
    checkpoints: Checkpoints = self.seamark
    if scheduler_output.total_num_scheduled_tokens:  # an empty one may come out of vLLM's queue amid the next
        _learn(checkpoints, scheduler_output, is_late=getattr(model_runner_output, LATE, False))
    if checkpoints.states is not None and scheduler_output is checkpoints.last_planned:
        checkpoints.states.release()  # perhaps no further step follows
    if checkpoints.verified == 1:
        return original(self, scheduler_output, model_runner_output, *args, **more)
    requests = _count_drafts(self, scheduler_output, model_runner_output)
    answers = original(self, scheduler_output, model_runner_output, *args, **more)
    for request in requests:
        if request.is_finished():
            checkpoints.finished(request)
    if checkpoints.own is not None:
        checkpoints.own.take(answers)
    return answers


def _learn(checkpoints: Checkpoints, output: Any, *, is_late: bool) -> None:
    """The output of a step has come; `is_late`: it was there when the next step was being launched."""
    ended = time.monotonic()
    planned = getattr(output, PLANNED_AT, ended)
    if is_late:
        ended = max(getattr(output, FOLLOWED_AT, ended), planned)
    # A step may be planned before the last one is done; then it began when the last one ended.
    began = max(planned, checkpoints.step_ended)
    checkpoints.step_ended = max(ended, checkpoints.step_ended)
    writes = getattr(output, WRITES, None) or {}
    states, prefill = max(map(len, writes.values()), default=0), bool(writes) or not only_generates(output)
    checkpoints.step_time.step_took(output.total_num_scheduled_tokens, ended - began, prefill=prefill, states=states)


def _count_drafts(scheduler: Any, output: Any, answers: Any) -> list[Any]:
    """The requests of a step that are alive, after their drafts which it has verified were counted."""
    alive = []
    for name in output.num_scheduled_tokens:
        request = scheduler.requests.get(name)
        if request is None or request.is_finished():
            continue
        alive.append(request)
        if output.scheduled_spec_decode_tokens.get(name) and answers.sampled_token_ids:
            sampled = answers.sampled_token_ids[answers.req_id_to_index[name]]
            if len(sampled):
                state: RequestState = scheduler.seamark.state_of(request)
                state.draft_steps += 1
                state.accepted += len(sampled) - 1  # the last one is no draft
    return alive


def _plan_writes(scheduler: Any, output: Any) -> dict[str, list[Write]]:
    requests = [scheduler.requests[name] for name in output.num_scheduled_tokens]
    requests = [each for each in requests if scheduler.seamark.state_of(each).wish.is_kept]
    prompts = []
    for request in requests:
        end = request.num_computed_tokens  # vLLM has advanced it already
        start = end - output.num_scheduled_tokens[request.request_id]
        if start < request.num_prompt_tokens:
            is_kept = keep_loaded_state(scheduler, request, start, output)
            prompts.append(_PlannedChunk(scheduler, request, start, end, is_kept))
    # The last room is for what is asked for, in all prompts.
    for is_rung in (False, True):
        for prompt in prompts:
            for target in prompt.targets:
                if (target.kind == RUNG) is is_rung:
                    prompt.plan(target)
    for prompt in prompts:
        prompt.keep_keys()
    if scheduler.seamark.states.windows is not None:
        for request in requests:
            _keep_windows_at_edge(scheduler, request, request.num_computed_tokens)
    return {prompt.request.request_id: sorted(prompt.writes) for prompt in prompts if prompt.writes}


def _keep_windows_at_edge(scheduler: Any, request: Any, end: int) -> None:
    """The state of a block's edge may be vLLM's own, in an answer, too: a draft head's rows before it are kept."""
    states: States = scheduler.seamark.states
    keys, state = states.keys, scheduler.seamark.state_of(request)
    size = next(iter(keys.recurrent.values()))
    edge = min(end, len(request.block_hashes) * keys.grid.unit) // size * size
    if edge > state.last_edge and keys.is_cached(request, edge):
        state.last_edge = edge
        states.keep_windows(request, state, [edge])


class _PlannedChunk:
    """A prompt's part of a step, and the states in it, at positions in (start, end]."""

    def __init__(self, scheduler: Any, request: Any, start: int, end: int, is_kept: bool) -> None:
        """`is_kept`: the state at `start`, too, has just been kept."""
        self.request, self.start, self.end = request, start, end
        self.writes: list[Write] = []
        self._scheduler, self._checkpoints = scheduler, scheduler.seamark
        self._states, self._state = scheduler.seamark.states, scheduler.seamark.state_of(request)
        self.targets = scheduler.seamark.targets_in(request, start, end)
        # It goes on in copies of blocks: who shares the state finds it by these, too, when what was copied is evicted.
        resumed = start == self._state.resumed_at > self._state.loaded
        self._positions: list[int] = [start] if is_kept or resumed else []
        self._not_offered = {start} if resumed else set()  # it was when the request was admitted
        # A step of single tokens, or of tokens with their drafts, may be replayed as one graph of kernels, which runs
        # no layer in segments.
        self._is_replayed = end - start <= scheduler.seamark.verified

    def plan(self, target: CheckpointTarget) -> None:
        """Write a state, if it is worth that and there is room."""
        checkpoints, request, position, ignored, miss = self._checkpoints, self.request, target.position, "", EVICTED
        is_unnamed = target.kind in (SPARE, RUNG)
        if self._states.keys.is_cached(request, position):
            if not is_unnamed:
                self._positions.append(position)
                self._states.retention.claim(self._states.keys.state_key(request, position))
            return
        is_spare = checkpoints.planner.is_spare(self._state.wish, target)
        is_worth = checkpoints.worth_writing(self._state, target)
        blocks = checkpoints.reserve(request, target) if is_worth and not self._is_replayed else None
        if blocks is not None:
            groups = zip(self._states.keys.recurrent, blocks, strict=True)
            self.writes.append(Write(position - self.start, {group: block.block_id for group, block in groups}))
            self._positions.append(position)
            if is_spare:
                self._not_offered.add(position)
                return
        elif is_spare or not is_worth:
            miss, ignored = NOT_WORTH_IT, NOT_WORTH_IT if target.kind == HINTED else ""
        else:
            miss, ignored = HINT_IGNORED, "single_token" if self._is_replayed else "no_room"
            if checkpoints.gate is not None and not self._is_replayed:
                checkpoints.gate.pause()
        if ignored:
            checkpoints.counters.hint_ignored(ignored)
        if not is_unnamed:
            checkpoints.outcomes.computed(request, position, miss)

    def keep_keys(self) -> None:
        """All states are planned: register what leads to them."""
        request, state, states, positions = self.request, self._state, self._states, self._positions
        if self.start < state.heals <= self.end and state.heals not in positions:
            states.keep_windows(request, state, [state.heals])
        if positions:
            state.states.update(positions)
            managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
            for group, _, drop in states.keys.attention:
                # Keys past this chunk come with the chunk that computes their rows.
                reached = (position + drop for position in positions)
                keep_attention_keys(
                    managers[group], request, (position for position in reached if position <= self.end)
                )
            states.keep_windows(request, state, positions)
            offered = (position for position in positions if position not in self._not_offered)
            states.offer(request, offered, used=False)


def _generates(request: Any, start: int, num_tokens: int) -> bool:
    """Whether a step from `start` generates: one that replays an answer caches more, and leaves no edge's state."""
    return bool(start >= request.num_prompt_tokens and num_tokens <= start + 1)


@Patch(
    "true-states",
    f"{MANAGERS}:MambaManager.cache_blocks",
    why="a chunk that runs on past a block's edge leaves no state of the edge behind: no key for it",
    until="vLLM registers recurrent blocks by the position of their state",
    parameters="self, request, num_tokens, retention_interval, replay_boundaries",
    mentions=("if block.is_null or block.block_hash is None:",),
)
def keep_only_true_states(
    self: Any, request: Any, num_tokens: int, *args: Any, original: Function, **kwargs: Any
) -> Any:
    """vLLM registers every block that a chunk has passed. Only a block that ends where the chunk ends holds the state
    that its key promises. vLLM gets by on chunks that end at block edges; ours run on. Of a step that generates, with
    drafts or without, vLLM itself puts the state of an edge into the edge's block, however many drafts were right.
    """
    checkpoints = getattr(self, "seamark", None)
    passed = num_tokens // self.block_size
    first = self.num_cached_block.get(request.request_id, 0)
    if checkpoints is None or not checkpoints.writes_in_forward or passed <= first:
        return original(self, request, num_tokens, *args, **kwargs)
    start = checkpoints.state_of(request).chunk_start
    if checkpoints.verified > 1 and _generates(request, start, num_tokens):
        return original(self, request, num_tokens, *args, **kwargs)
    blocks = self.req_to_blocks[request.request_id]
    whole = passed if num_tokens % self.block_size else passed - 1
    hidden = blocks[first:whole]
    blocks[first:whole] = [self._null_block] * len(hidden)
    try:
        return original(self, request, num_tokens, *args, **kwargs)
    finally:
        blocks[first:whole] = hidden
