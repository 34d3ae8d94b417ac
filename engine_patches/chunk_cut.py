"""How a state comes to exist at a hinted position: the prefill chunk is ended there.

vLLM keeps the recurrent state at the end of a chunk, and already ends one at `request.shared_prefix_boundary`. Setting
that field to the next hinted position before each split gives any number of checkpoints, at one forward pass each.
This module is the only one that knows the price; a way to write states inside a pass would replace it.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_patches.checkpoints import RequestHint


def next_stop(hint: RequestHint, start: int, block_size: int) -> int:
    """The next position (tokens) after `start` where a chunk has to end, 0 if there is none.

    vLLM's own junction stays a candidate, floored to the cache block as vLLM would floor it.
    """
    candidates = [position for position in hint.positions if position > start]
    junction = start + (hint.upstream_junction - start) // block_size * block_size
    if junction > start:
        candidates.append(junction)
    return min(candidates, default=0)


def end_chunk_at_hints(original: Callable) -> Callable:
    """Replacement of `Scheduler._mamba_block_aligned_split`."""

    def _mamba_block_aligned_split(
        self, request, num_new_tokens, num_new_local_computed_tokens=0, num_external_computed_tokens=0
    ):
        def split() -> int:
            return original(self, request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens)

        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        if start >= request.num_prompt_tokens:
            return split()
        hint = self.seamark.hint_of(request)
        if hint is None:
            return split()
        if request.shared_prefix_boundary != hint.last_set:  # vLLM looked the prefix up since our last visit
            hint.upstream_junction = request.shared_prefix_boundary
        request.shared_prefix_boundary = hint.last_set = next_stop(hint, start, self.cache_config.block_size)
        # Only a hinted request may stop inside a block; all others are split exactly as vLLM splits them.
        upstream_flag = self.mamba_shared_prefix_checkpoint
        self.mamba_shared_prefix_checkpoint = self.seamark.enabled
        try:
            return split()
        finally:
            self.mamba_shared_prefix_checkpoint = upstream_flag

    return _mamba_block_aligned_split
