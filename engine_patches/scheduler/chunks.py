"""Where a prefill chunk ends.

If states are written inside the pass, a chunk ends where the budget ends, rounded down to a position that can have a
state: each further stop would cost a pass. If a backend cannot run in segments, a chunk has to end at every position
whose state is kept. vLLM already ends one at `request.shared_prefix_boundary`; setting that field to the next hinted
position before each split gives any number of checkpoints, at one forward pass each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.request_state import RequestState


def run_to_the_budget(request: Any, start: int, num_new_tokens: int, grid: Grid) -> int:
    """Tokens of a chunk that begins at `start`, at most `num_new_tokens`.

    A chunk that does not reach the prompt's end ends where a state can lie, if the budget allows it: the next chunk can
    then write states anywhere, and a kernel that scans in chunks sees the same ones in any number of passes.
    """
    end = start + num_new_tokens
    if end < max(request.num_prompt_tokens, request.num_tokens - 1):
        aligned = grid.floor(end)
        if aligned > start:
            return aligned - start
    return num_new_tokens


def no_short_replay(request: Any, start: int, num_new_tokens: int, verified: int) -> int:
    """Tokens of a chunk beside drafts: not so few that model runner V1 takes a preempted request's replay for drafts.

    It tells a request that generates from a prompt by the prompt's length. What was generated before a preemption is
    computed again; of at most `verified` tokens of that it would keep a state each, and go on from the first one's.
    """
    replays = request.num_prompt_tokens <= start < request.num_tokens - 1
    return 1 if replays and 1 < num_new_tokens <= verified else num_new_tokens


def next_stop(state: RequestState, start: int, block_size: int, tokens_per_pass: float) -> int:
    """The next position (tokens) after `start` at which a chunk has to end, 0 if there is none.

    Only positions of at least `tokens_per_pass` tokens: a shorter prefix saves less than the stop costs. A learned one
    has to be as far behind `start`, where a state is found already. vLLM's own junction stays a candidate, floored to
    the cache block as vLLM floors it.
    """
    wish = state.wish
    candidates = [position for position in wish.hinted_positions if position > start and position >= tokens_per_pass]
    if wish.learned > start and wish.learned - start >= tokens_per_pass:
        candidates.append(wish.learned)
    junction = start + (state.upstream_junction - start) // block_size * block_size
    if junction > start:
        candidates.append(junction)
    return min(candidates, default=0)


def _split_in_blocks(scheduler: Any, split: Callable[..., int], request: Any, num_new_tokens: int, start: int) -> int:
    """As vLLM alone does, which finds states at the ends of cache blocks."""
    fine = scheduler.mamba_partial_cache_hit, scheduler.mamba_shared_prefix_checkpoint
    scheduler.mamba_partial_cache_hit = scheduler.mamba_shared_prefix_checkpoint = False
    try:
        return split(scheduler, request, num_new_tokens, start - request.num_computed_tokens)
    finally:
        scheduler.mamba_partial_cache_hit, scheduler.mamba_shared_prefix_checkpoint = fine


def end_chunk(original: Callable[..., int]) -> Callable[..., int]:
    """Replacement of `Scheduler._mamba_block_aligned_split`."""

    def _mamba_block_aligned_split(
        self: Any,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        checkpoints = self.seamark
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        state: RequestState = checkpoints.state_of(request)
        state.chunk_start = start
        if checkpoints.writes_in_forward and state.wish.left_to_vllm:
            tokens = _split_in_blocks(self, original, request, num_new_tokens, start)
            return no_short_replay(request, start, tokens, checkpoints.verified)
        if checkpoints.writes_in_forward:
            if start < request.num_prompt_tokens:
                checkpoints.expect_states(request, start)
            tokens = run_to_the_budget(request, start, num_new_tokens, checkpoints.grid)
            return no_short_replay(request, start, tokens, checkpoints.verified)

        def split() -> int:
            return original(self, request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens)

        if start >= request.num_prompt_tokens or not state.wish.positions:
            return split()
        if request.shared_prefix_boundary != state.own_junction:  # vLLM has looked the prefix up since the last call
            state.upstream_junction = request.shared_prefix_boundary
        tokens_per_pass = checkpoints.step_time.tokens_per_pass
        stop = next_stop(state, start, self.cache_config.block_size, tokens_per_pass)
        request.shared_prefix_boundary = state.own_junction = stop
        # Only a hinted or learned position may end a chunk inside a block; without one vLLM splits as it does alone.
        upstream_flag = self.mamba_shared_prefix_checkpoint
        self.mamba_shared_prefix_checkpoint = checkpoints.states is not None
        try:
            return split()
        finally:
            self.mamba_shared_prefix_checkpoint = upstream_flag

    return _mamba_block_aligned_split
