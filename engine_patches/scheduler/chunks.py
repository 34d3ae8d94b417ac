"""Where a prefill chunk ends.

Where states are written inside the pass, a chunk ends where the budget ends, rounded down to where a state can be:
each further stop would cost a pass. Where a backend cannot be run in pieces, the old way is left: vLLM keeps the
recurrent state at the end of a chunk, and already ends one at `request.shared_prefix_boundary`; setting that field to
the next hinted position before each split gives any number of checkpoints, at one forward pass each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_patches.scheduler.checkpoints import RequestHint


def run_to_the_budget(request: Any, start: int, num_new_tokens: int, alignment: int) -> int:
    """Tokens of a chunk that begins at `start`, at most `num_new_tokens`.

    A chunk that does not reach the prompt's end ends where a state could be placed, if the budget allows: the next one
    can then write states anywhere, and a kernel that scans in chunks sees the same chunks in one pass as in several.
    """
    end = start + num_new_tokens
    if end < max(request.num_prompt_tokens, request.num_tokens - 1):
        aligned = end // alignment * alignment
        if aligned > start:
            return aligned - start
    return num_new_tokens


def next_stop(hint: RequestHint, start: int, block_size: int, worth_a_pass: float) -> int:
    """The next position (tokens) after `start` where a chunk has to end, 0 if there is none.

    Only positions of at least `worth_a_pass` tokens: a shorter prefix saves less than the stop costs. vLLM's own
    junction stays a candidate, floored to the cache block as vLLM would floor it.
    """
    candidates = [position for position in hint.positions if position > start and position >= worth_a_pass]
    junction = start + (hint.upstream_junction - start) // block_size * block_size
    if junction > start:
        candidates.append(junction)
    return min(candidates, default=0)


def end_chunk(original: Callable) -> Callable:
    """Replacement of `Scheduler._mamba_block_aligned_split`."""

    def _mamba_block_aligned_split(
        self, request, num_new_tokens, num_new_local_computed_tokens=0, num_external_computed_tokens=0
    ):
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        request.seamark_start = start
        if self.seamark.exporting:
            if start < request.num_prompt_tokens:
                self.seamark.about_to_run(request, start)
            return run_to_the_budget(request, start, num_new_tokens, self.seamark.alignment)

        def split() -> int:
            return original(self, request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens)

        if start >= request.num_prompt_tokens:
            return split()
        hint = self.seamark.hint_of(request)
        if hint is None:
            return split()
        if request.shared_prefix_boundary != hint.last_set:  # vLLM looked the prefix up since our last visit
            hint.upstream_junction = request.shared_prefix_boundary
        worth_a_pass = self.seamark.pace.tokens_per_pass
        stop = next_stop(hint, start, self.cache_config.block_size, worth_a_pass)
        request.shared_prefix_boundary = hint.last_set = stop
        # Only a hinted request may stop inside a block; all others are split exactly as vLLM splits them.
        upstream_flag = self.mamba_shared_prefix_checkpoint
        self.mamba_shared_prefix_checkpoint = self.seamark.enabled
        try:
            return split()
        finally:
            self.mamba_shared_prefix_checkpoint = upstream_flag

    return _mamba_block_aligned_split
