"""Counts how long prompts that fit a step waited behind one that does not, and took steps whole.

vLLM gives a step's tokens to running requests in their order. `--long-prefill-token-threshold` bounds what a prompt
takes while there are others. What of a prompt was cached is known once it is computed, so a wait is counted then.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine_patches.scheduler.fan_out import MAX_LINE


@dataclass
class LongPrefills:
    """Of one scheduler."""

    clock: Callable[[], float] = time.monotonic
    _planned_at: float = 0.0
    _held: list[str] = field(default_factory=list)  # requests that the step planned last holds up
    _waited: dict[str, float] = field(default_factory=dict)  # seconds, of requests that are not computed yet

    def step_planned(self, scheduler: Any, output: Any) -> None:
        now, seamark, budget = self.clock(), scheduler.seamark, scheduler.max_num_scheduled_tokens
        for name in self._held:
            self._waited[name] = self._waited.get(name, 0.0) + now - self._planned_at
        for name, request in [(name, scheduler.requests.get(name)) for name in self._waited]:
            if request is None or _left(request) <= 0:
                seconds = self._waited.pop(name)
                if request and request.num_prompt_tokens - seamark.state_of(request).resumed_at <= budget:
                    seamark.counters.counts.long_prefill_waits[str(threshold(budget, seamark.block_size))] += seconds
        self._planned_at, self._held = now, _held_up(scheduler, output, budget)


def threshold(budget: int, block_size: int) -> int:
    """Tokens a long prompt may take of a step: half of it, in whole cache blocks if one fits.

    vLLM alone cuts a block only where the threshold is below it. Else others that take more than a step get no tokens
    of a rest that is below a block: so the threshold leaves a block, or is below one.
    """
    return budget // 2 // block_size * block_size or budget // 2


def _held_up(scheduler: Any, output: Any, budget: int) -> list[str]:
    """Requests that get nothing more of a step, half of which or more goes to a prompt that takes more than a step."""
    seamark, running, cache = scheduler.seamark, scheduler.running, scheduler.kv_cache_manager
    rest = budget - output.total_num_scheduled_tokens
    if rest >= min(budget, seamark.grid.alignment) or scheduler.scheduler_config.long_prefill_token_threshold:
        return []
    name, tokens = max(output.num_scheduled_tokens.items(), key=lambda each: each[1])
    long = scheduler.requests[name]
    # Blocks that a prompt which fits a step takes, at most: without them it would wait in any case.
    room = len(cache.coordinator.single_type_managers) * (budget // seamark.block_size + 2)
    if 2 * tokens < budget or _left(long) + tokens <= budget or cache.block_pool.get_num_free_blocks() < room:
        return []
    waiting = scheduler.waiting if len(running) < scheduler.max_num_active_reqs else ()
    behind = itertools.chain(running[running.index(long) + 1 :], itertools.islice(waiting, MAX_LINE))
    ready = [each.request_id for each in behind if each.status.name in ("RUNNING", "WAITING") and _left(each) > 0]
    return [name for name in ready if seamark.gate is None or name not in seamark.gate.waiting]


def _left(request: Any) -> int:
    """Tokens of a prompt that no step was planned for."""
    return int(request.num_prompt_tokens - request.num_computed_tokens)
