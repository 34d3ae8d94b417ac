"""Chats of many clients on vLLM's own scheduler, with too few blocks for all their states, on a simulated clock.

Run as `python -m tests.harness.simulated_eviction MODEL SIDE '{...}'`, a pool and the fields of patterns, since
patching is per process. Prints JSON: what each pattern's requests found.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool

from engine_patches import ledger, settings
from engine_patches.patches import PATCHES
from engine_patches.scheduler.planner import TAIL, CheckpointTarget, Planner
from engine_patches.scheduler.retention import Retention
from tests.harness.multi_turn import (
    ALONE,
    BLOCK,
    FLOOR,
    OURS,
    TOKEN,
    USED,
    WHOLE_PATH,
    Chat,
    Found,
    Pattern,
    Pool,
    Turn,
    hint,
    turns,
)
from tests.harness.simulated_core import ANSWER, SimulatedCore

UNIT = 16  # tokens


class PromptEnds(Planner):
    """One state a request, at the end of its prompt, as SGLang inserts it into its tree."""

    def targets(self, wish: Any, request: Any, prompt_tokens: int = 0) -> list[CheckpointTarget]:
        position = self.grid.floor(self.grid.resumable(request.num_prompt_tokens))
        return [CheckpointTarget(position, TAIL)] if position else []

    def spare(self, *_: Any) -> int:
        return 0


class OneList(Retention):
    """States without a share and without classes: they go as vLLM's free list has them, by their last use."""

    def make_room(self, num_blocks: int) -> bool:
        return True


def keep_as_sglang(core: SimulatedCore, whole_path: bool) -> None:
    """Have a core keep the states that SGLang would, and drop them by their last use.

    A request that resumes holds the state it resumes from, so vLLM itself counts that one as used, and no other.
    `whole_path`: all states before it count as used, too, the deepest last, as they did before SGLang's cure.
    """
    checkpoints, states = core.checkpoints, core.checkpoints.states
    checkpoints.planner = PromptEnds(checkpoints.grid, checkpoints.block_size)
    states.retention = OneList(core.pool)
    resumed = states.resumed

    def resumed_by_path(request: Any, position: int, passed: Sequence[int], **how: bool) -> None:
        resumed(request, position, range(UNIT, position, UNIT) if whole_path else (), **how)

    states.resumed = resumed_by_path


def part_pools(core: SimulatedCore, blocks: int) -> None:
    """Take attention's blocks out of the states' pool, as SGLang does.

    vLLM itself parts the pools of managers so. A key tells its group, so one table of them serves both.
    """
    for group in core.attention:
        manager, states = core.scheduler.kv_cache_manager.coordinator.single_type_managers[group], core.pool
        manager.block_pool = pool = SharedEventQueueBlockPool(
            num_gpu_blocks=blocks + 1,
            enable_caching=True,
            hash_block_size=states.hash_block_size,
            event_owner=states,
        )
        pool.cached_block_hash_to_block = states.cached_block_hash_to_block
        manager._null_block = pool.null_block


def engine(model: str, side: str, pattern: Pattern, pool: Pool) -> SimulatedCore:
    """A new one, of one of the sides."""
    # What a pool holds beside states is not theirs; one of their own is.
    os.environ[settings.STATE_SHARE] = "1" if pool.parted else str(settings.DEFAULT_SHARE)
    core = SimulatedCore(
        model,
        FLOOR,
        TOKEN,
        blocks=pool.blocks + 1,  # one is vLLM's null block
        budget=8192,
        running=pattern.clients,
        block=BLOCK,
        unit=BLOCK if side == ALONE else UNIT,
        longest=pattern.longest,
    )
    if pool.parted:
        part_pools(core, pool.attention)
    if side in (WHOLE_PATH, USED):
        keep_as_sglang(core, side == WHOLE_PATH)
    return core


class Clients:
    """They send their turns to an engine: each when it is due, and not before its last one is answered."""

    def __init__(self, pattern: Pattern, core: SimulatedCore, hinted: bool) -> None:
        self._pattern, self._core, self._hinted = pattern, core, hinted
        self._chats = [Chat(pattern, client) for client in range(pattern.clients)]
        self._coming = list(turns(pattern))[::-1]
        self._late: list[Turn] = []
        self._asked: dict[str, Turn] = {}
        self.shared: dict[str, int] = {}  # tokens, by request
        self.prompts = 0  # tokens

    def send(self) -> bool:
        """Send what is due by now; False if nothing is left to be sent or answered."""
        core = self._core
        if not self._asked and self._coming:
            core.now = max(core.now, self._coming[-1].at)
        while self._coming and self._coming[-1].at <= core.now:
            self._late.append(self._coming.pop())
        busy = {turn.client for turn in self._asked.values()}
        due, self._late = self._late, []
        for turn in due:
            if turn.client in busy:
                self._late.append(turn)
            else:
                busy.add(turn.client)
                self._ask(turn)
        return bool(self._asked or self._coming or self._late)

    def _ask(self, turn: Turn) -> None:
        name, chat = f"{turn.client}-{turn.number}", self._chats[turn.client]
        prompt = chat.ask()
        self._asked[name] = turn
        self.shared[name] = chat.shared
        self.prompts += len(prompt)
        entries = hint(turn.number) if self._hinted else None
        self._core.request(name, prompt, entries, max_tokens=self._pattern.answer)

    def take_answers(self) -> None:
        """Read the answers that are whole."""
        for name in [name for name in self._asked if name not in self._core.scheduler.requests]:
            self._chats[self._asked.pop(name).client].answered([ANSWER] * self._pattern.answer)
            del self._core.ever[name]


def run(model: str, side: str, pattern: Pattern, pool: Pool) -> Found:
    """What the requests of a pattern find on one of the sides."""
    core = engine(model, side, pattern, pool)
    clients = Clients(pattern, core, hinted=side == OURS)
    while clients.send():
        core.step()
        clients.take_answers()
    later = [(core.hits[name], shared) for name, shared in clients.shared.items() if shared]
    return Found(
        clients.prompts,
        sum(shared for _, shared in later),
        sum(hit for hit, _ in later),
        len(later),
        sum(hit > shared - BLOCK for hit, shared in later),
    )


def run_all(model: str, side: str, pool: Pool, patterns: Iterable[Pattern]) -> Iterator[Found]:
    """The same for several patterns, one after the other."""
    return (run(model, side, pattern, pool) for pattern in patterns)


def main(model: str, side: str, argument: str) -> None:
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    if side != ALONE:
        ledger.apply(PATCHES)
    wanted = json.loads(argument)
    patterns = [Pattern(**fields) for fields in wanted["patterns"]]
    print(json.dumps(list(run_all(model, side, Pool(**wanted["pool"]), patterns))))


if __name__ == "__main__":
    main(*sys.argv[1:4])
