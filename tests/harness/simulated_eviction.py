"""Chats of many clients on vLLM's own scheduler, with too few blocks for all their states, on a simulated clock.

Run as `python -m tests.harness.simulated_eviction MODEL SIDE '{...}'` (fields of `Pattern`), since patching is per
process. Prints JSON: `Found`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool

from engine_patches import ledger
from engine_patches.patches import PATCHES
from engine_patches.scheduler.planner import TAIL, CheckpointTarget, Planner
from engine_patches.scheduler.retention import Retention
from tests.harness.multi_turn import FLOOR, TOKEN, Chat, Pattern, hint, turns
from tests.harness.simulated_core import ANSWER, SimulatedCore

BLOCK, UNIT = 528, 16  # tokens, of Qwen3.5-4B


class Found(NamedTuple):
    """What the requests of a run found, in tokens; `last` and `shallower` in requests."""

    prompts: int
    shareable: int  # with the prompt before, of the same client
    hit: int
    rounds: int  # that had a prompt before
    whole: int  # of them, those that found all but the end of the last turn's prompt
    some: int  # those that found less
    preempted: int


class PromptEnds(Planner):
    """One state a request, at the end of its prompt, as SGLang inserts it into its tree."""

    def targets(self, wish: Any, request: Any, prompt_tokens: int = 0) -> list[CheckpointTarget]:
        position = self.grid.floor(self.grid.resumable(request.num_prompt_tokens))
        return [CheckpointTarget(position, TAIL)] if position else []

    def spare(self, *_: Any) -> int:
        return 0


class WholePath(Retention):
    """All states go by their last use, and a hit on one uses all before it: SGLang before it was cured."""

    def make_room(self, num_blocks: int) -> bool:
        return True


def as_sglang(core: SimulatedCore, whole_path: bool) -> None:
    """Have a core keep the states that SGLang would, and drop them by their last use.

    Without `Retention` that is what vLLM's own free list does with them: a request that resumes holds the state it
    resumes from, and no other.
    """
    checkpoints, states = core.checkpoints, core.checkpoints.states
    checkpoints.planner = PromptEnds(checkpoints.grid, checkpoints.block_size)
    states.retention = WholePath(core.pool, 1.0) if whole_path else None
    if not whole_path:
        return
    resumed = states.resumed

    def resumed_from_all(request: Any, position: int, passed: Sequence[int], **how: bool) -> None:
        resumed(request, position, range(UNIT, position, UNIT), **how)

    states.resumed = resumed_from_all


SIDES = {
    "alone": lambda core: None,  # not patched
    "path": lambda core: as_sglang(core, whole_path=True),
    "used": lambda core: as_sglang(core, whole_path=False),
    "ours": lambda core: None,
}


def give_attention_a_pool(core: SimulatedCore, blocks: int) -> None:
    """Take attention's blocks out of the states' pool, as SGLang does: they are ample.

    vLLM itself parts the pools of managers so. Keys tell their group, so that one table of them serves both.
    """
    for group in core.attention:
        manager, states = core.scheduler.kv_cache_manager.coordinator.single_type_managers[group], core.pool
        manager.block_pool = pool = SharedEventQueueBlockPool(
            num_gpu_blocks=blocks,
            enable_caching=True,
            hash_block_size=states.hash_block_size,
            event_owner=states,
        )
        pool.cached_block_hash_to_block = states.cached_block_hash_to_block
        manager._null_block = pool.null_block


def run(model: str, side: str, pattern: Pattern, pool: Any) -> Found:
    core = SimulatedCore(
        model,
        FLOOR,
        TOKEN,
        blocks=pool["blocks"] + 1,  # vLLM keeps one
        budget=8192,
        running=128,
        block=BLOCK,
        unit=BLOCK if side == "alone" else UNIT,
        longest=pattern.longest,
    )
    if pool["ample"]:
        give_attention_a_pool(core, pool["ample"])
    SIDES[side](core)
    chats = [Chat(pattern, client) for client in range(pattern.clients)]
    coming, waiting = list(turns(pattern))[::-1], []
    answering: dict[str, int] = {}
    found = dict.fromkeys(Found._fields, 0)
    busy: set[int] = set()
    shared: dict[str, int] = {}
    while coming or waiting or core.scheduler.has_unfinished_requests():
        if coming and not waiting and not core.scheduler.has_unfinished_requests():
            core.now = max(core.now, coming[-1].at)
        while coming and coming[-1].at <= core.now:
            waiting.append(coming.pop())
        for turn in [turn for turn in waiting if turn.client not in busy]:
            if turn.client in busy:
                continue
            waiting.remove(turn)
            busy.add(turn.client)
            name, chat = f"{turn.client}-{turn.number}", chats[turn.client]
            prompt = chat.ask()
            answering[name] = turn.client
            shared[name] = chat.shared
            found["prompts"] += len(prompt)
            core.request(name, prompt, hint(turn.number) if side == "ours" else None, max_tokens=pattern.answer)
        core.step()
        for name in [name for name in answering if name not in core.scheduler.requests]:
            client = answering.pop(name)
            chats[client].answered([ANSWER] * pattern.answer)
            busy.discard(client)
            del core.ever[name]
    for name, tokens in shared.items():
        hit = core.hits[name]
        found["hit"] += hit
        found["shareable"] += tokens
        found["rounds"] += tokens > 0
        found["whole"] += tokens > 0 and hit > tokens - BLOCK
        found["some"] += tokens > 0 and 0 < hit <= tokens - BLOCK
    return found


def main(model: str, side: str, argument: str) -> None:
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    if side != "alone":
        ledger.apply(PATCHES)
    wanted = json.loads(argument)
    print(json.dumps(run(model, side, Pattern(**wanted["pattern"]), wanted["pool"])))


if __name__ == "__main__":
    main(*sys.argv[1:4])
