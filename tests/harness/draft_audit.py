"""The scheduler audit for engines that draft tokens: every cache key checked, whatever the target makes of the drafts.

A step of generation runs a token and its drafts, and leaves the state after each of them in a column of its own. How
many drafts are right is drawn at random. The running state then starts from the column of the last right one; the state
of a block's edge is copied into the edge's block, as vLLM does after sampling; rows of wrong drafts are overwritten.

A draft head with a sliding window may find zeros in place of its rows, and then none of them but what its request has
computed itself; `held` and `zeroed` count hits by that.

A draft head's own row for a token is made with the next token, too. `foreign_rows` counts the rows that requests found
in the cache and that were made with another next token than their own: the head then drafts worse, no answer changes.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds

from engine_patches import settings
from engine_patches.footprint import WRITES
from engine_patches.scheduler.drafts import CLOSED, OPEN
from tests.harness import draft_defects
from tests.harness.audit import Scene, random_traffic
from tests.harness.audited_core import ATTENTION, Core, blocks_of
from tests.harness.draft_cores import (
    BESIDE_THE_TARGET,
    NOWHERE,
    OWN_GROUP,
    OWN_SHAPE,
    OWN_WINDOW,
    UNKNOWN,
    expected_hits,
)
from tests.harness.modelled_worker import BLOCK, Worker, begun, prefixes, sample

WINDOW = 100  # tokens; a block has 64

IS_TOLD = "is_draft" in SlidingWindowSpec.__dataclass_fields__  # whose layers a group has; from vLLM 0.33 on


class DraftWorker(Worker):
    """Of an engine whose requests draft tokens."""

    counted = ("found_rows", "foreign_rows", "preempted", "held", "zeroed", "healed")

    def __init__(
        self,
        *,
        drafts: int = 3,
        variable: bool = False,
        head: str = BESIDE_THE_TARGET,
        drop: bool = True,
        fills_in: bool = False,
        window: int = WINDOW,
        window_groups: int = 1,
        full_groups: int = 0,
        seed: int = 0,
    ) -> None:
        """`drafts`: for each token, at most so many; exactly so many unless `variable`. `head`: where it has its rows.
        `drop`: if False, vLLM is told not to take a unit off each match. `fills_in`: the head has a row for one token
        more than it drafts (dflash, and dspark with a bonus query). `window`: of a head that has one, in tokens, in so
        many groups, and in so many beside them that have none. In a core with `overlap` this is a model runner V2,
        and V1 without.
        """
        super().__init__()
        self.speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": drafts}
        self._window, self._window_groups, self._full_groups = window, window_groups, full_groups
        self._hits: dict[str, int] = {}  # of each request, as it was last admitted
        if head == NOWHERE:
            self.speculative.update(method="ngram", prompt_lookup_max=3)
        elif not drop:
            self.speculative["disable_eagle_block_drop"] = True
        self._most, self._variable, self._head, self._drop, self._fills_in = drafts, variable, head, drop, fills_in
        self._head_group = -1  # in which the head has its rows
        self._draw = random.Random(seed)
        self._computed: dict[str, int] = {}  # tokens; the scheduler's own counts may run ahead
        self._prefill_ends: dict[str, int] = {}  # tokens that a request had when it was admitted

    def place_layers(self, groups: list[KVCacheGroupSpec]) -> None:
        shape = dict(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        if self._head != NOWHERE:
            self._head_group = ATTENTION
        if self._head in (OWN_GROUP, OWN_SHAPE, OWN_WINDOW):
            self._head_group = len(groups)
            spec = FullAttentionSpec(**{**shape, "head_size": 1 + (self._head == OWN_SHAPE)})
            if self._head == OWN_WINDOW:
                spec = SlidingWindowSpec(
                    **shape, **({"is_draft": True} if IS_TOLD else {}), sliding_window=self._window
                )
            for number in range(self._window_groups):
                if self._head == OWN_WINDOW:
                    self.core.windows[len(groups)] = self._window
                self.core.attention.append(len(groups))
                groups.append(KVCacheGroupSpec([f"mtp.layers.{number}.attn"], spec))
            for number in range(self._full_groups):
                self.core.attention.append(len(groups))
                groups.append(
                    KVCacheGroupSpec([f"mtp.layers.{self._window_groups + number}.attn"], FullAttentionSpec(**shape))
                )
        # vLLM 0.32 finds no group of a head with a window, and takes all for the head's.
        known = self._head not in (NOWHERE, UNKNOWN) and (self._head != OWN_WINDOW or IS_TOLD)
        if self._drop and known:
            groups[self._head_group].is_eagle_group = True

    def start(self) -> None:
        self.core.scheduler.num_lookahead_tokens += self._fills_in

    def empty_cache(self) -> None:
        """Preempt all running requests and forget everything cached, as a reset of the prefix cache may."""
        self.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        for name in self.core.scheduler.requests:
            self._forget_sampled(name)

    def _forget_sampled(self, name: str) -> None:
        self.core.forget_sampled(name)
        self._computed.pop(name, None)

    def receive(self, output: Any) -> dict[str, int]:
        starts = super().receive(output)
        for name in begun(output) | set(output.finished_req_ids):
            self._computed.pop(name, None)
        for name in begun(output):
            self._prefill_ends[name] = len(self.tokens[name])
            self._hits[name] = starts[name]
            self._count_foreign_rows(name, starts[name])
            self._count_windows(name, starts[name])
        return {**starts, **{name: self._computed[name] for name in starts if name in self._computed}}

    def compute_row(self, name: str, start: int, end: int, output: Any) -> list[int]:
        tokens, drafts = self.tokens[name], len(output.scheduled_spec_decode_tokens.get(name, ()))
        # Model runner V1 goes by the prompt's length: what a preempted request had generated is no prompt to it.
        prompt = self._prefill_ends[name] if self.core.overlap else self.core.ever[name].num_prompt_tokens
        short = end - start <= 1 + self._most and start >= prompt and output.scheduled_spec_decode_tokens
        sure = end - drafts  # tokens that are no drafts
        if drafts and sure != len(tokens):
            self.core.errors.append(f"{name}: {drafts} drafts behind {sure} of {len(tokens)} tokens")
        right = self._draw.randint(0, drafts)
        sampled = [sample(tokens)] if sure == len(tokens) else []
        for _ in range(right):
            sampled.append(sample([*tokens, *sampled]))
        seen = prefixes([*tokens[:sure], *sampled[:right], *[-1] * (drafts - right)])  # by the pass
        column = self.start_column(name, start, end)
        self.attend(name, start, end, seen, prefixes([*tokens, *sampled]))
        self.write_states(name, start, seen, column, (getattr(output, WRITES, None) or {}).get(name, ()))
        self._leave_states(name, start, end, seen, verifies=bool(drafts or short))
        self._copy_edge(name, sure, right)
        self.core.counts[f"{right} drafts right"] += drafts > 0
        self._computed[name] = sure + right
        return sampled

    def attend(self, name: str, start: int, end: int, seen: Sequence[int], known: Sequence[int]) -> None:
        super().attend(name, start, end, seen, known)
        if self._head_group >= 0:
            rows, span = self.tables[name][self._head_group], self.core.spans[self._head_group]
            for position in range(start, end):
                made = known[min(position + 2, len(known) - 1)]
                self.contents[rows[position // span]]["head", position % span] = made

    def may_miss(self, name: str, group: int, position: int, found: int | None) -> bool:
        """A head may read zeros before its hit, in blocks of its own."""
        if self._head != OWN_WINDOW or group not in self.core.windows or found is not None:
            return False
        return bool(self.tables[name][group][position // BLOCK]) and position < self._hits[name]

    def _count_windows(self, name: str, hit: int) -> None:
        if not hit or self._head != OWN_WINDOW:
            return
        rows = [
            self.contents.get(self.tables[name][group][position // BLOCK], {}).get(position % BLOCK)
            for group in self.core.windows
            for position in range(self.core.first_read(group, hit), hit)
        ]
        missing = rows.count(None)
        healing = self.core.ever[name].seamark.window == "healed"
        if missing and missing < len(rows) and not healing:
            self.core.errors.append(f"{name} has {missing} zeros among {len(rows)} rows before its hit of {hit}")
        self.core.counts["healed" if healing else "zeroed" if missing else "held"] += 1

    def _leave_states(self, name: str, start: int, end: int, seen: Sequence[int], verifies: bool) -> None:
        """The state behind the last token; behind each one where drafts are verified, in a column of its own."""
        running = self._state_index[name]
        for group in self.core.recurrent:
            blocks = self.tables[name][group][running : running + (end - start if verifies else 1)]
            for position, block in enumerate(blocks, start + 1 if verifies else end):
                self.contents[block] = {"state": seen[position]}

    def _copy_edge(self, name: str, sure: int, right: int) -> None:
        """After sampling: the state of an edge among `sure` tokens and `right` drafts goes where its key leads."""
        running, edge = self._state_index[name], (sure + right) // BLOCK
        self.accepted[name] = 1 + right
        if edge * BLOCK < sure:
            return
        for group in self.core.recurrent:
            table = self.tables[name][group]
            self.contents[table[edge - 1]] = dict(self.contents.get(table[running + edge * BLOCK - sure], {}))
        if running == edge - 1:
            self.accepted[name] = 1

    def _count_foreign_rows(self, name: str, hit: int) -> None:
        if self._head_group < 0:
            return
        rows, span = self.tables[name][self._head_group], self.core.spans[self._head_group]
        known = prefixes(self.tokens[name])
        for position in range(self.core.first_read(self._head_group, hit), min(hit, len(known) - 2)):
            made = self.contents.get(rows[position // span], {}).get(("head", position % span))
            if made is None and self._head == OWN_WINDOW:
                continue
            foreign = made != known[position + 2]
            self.core.counts["found_rows"] += 1
            self.core.counts["foreign_rows"] += foreign and (position + 1) % span > 0

    def reported(self, output: Any, answers: Any) -> None:
        scheduler = self.core.scheduler
        names = [name for name in output.num_scheduled_tokens if name in scheduler.requests]
        if not self.core.overlap:
            drafts = [[0] * (self._draw.randint(0, self._most) if self._variable else self._most) for _ in names]
            scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        for name in names:
            if scheduler.requests[name].num_computed_tokens == 0:  # it was preempted
                self._forget_sampled(name)


def chats(core: Core, seed: int, asked: dict[str, Any]) -> None:
    """Random traffic with answers long enough to draft in."""
    random_traffic(core, seed, asked["chats"], outputs=(1, 3, 20, 150), longest_turn=700)
    core.counts["preempted"] += sum(request.num_preemptions for request in core.ever.values())


def sibling(core: Core, number: int, shared: int, name: str = "", own: int = 90, **more: Any) -> int:
    """What a request finds that shares so many tokens with others, and says so in its hint."""
    tokens = [*range(1000, 1000 + shared), *range(2000 + 100 * number, 2000 + own + 100 * number)]
    core.request(name or str(number), tokens, **{"hint": [shared], **more})
    core.run()
    return core.hits[name or str(number)]


def expected(core: Core, shared: int, asked: dict[str, Any]) -> int:
    """What the third one finds."""
    return expected_hits(asked, shared, getattr(core.scheduler, "num_hash_lookahead_tokens", 0))  # vLLM 0.33 on


def heal(core: Core, shared: int, asked: dict[str, Any]) -> None:
    """The rows before a shared state are evicted; who comes third finds them again, and nobody reads others'."""
    how = {"own": 10, "hint": [shared - 110, shared], "max_tokens": 30}
    for number in range(5):
        if number == 2:
            for key, entry in [*core.pool.cached_block_hash_to_block._cache.items()]:
                for block in blocks_of(entry) if get_group_id(key) in core.windows else ():
                    core.pool._maybe_evict_cached_block(block)
        sibling(core, number, shared, **how)
    fates = [core.ever[str(number)].seamark.window for number in range(5)]
    if core.plugin["enabled"] and fates != ["", "held", "healed", "held", "held"]:
        core.errors.append(f"of {shared} shared tokens, the rows are {fates}")
    if sibling(core, 5, shared, **how, salt="other"):
        core.errors.append("another salt finds a state")


def gate(core: Core, shared: int, asked: dict[str, Any]) -> None:
    """What siblings find while hints are on trial, once they are open, and once they are closed again."""
    drafts, told = core.scheduler.seamark.drafts, itertools.count()

    def found(salt: str, **more: Any) -> int:
        """By the last of three that share so much under a salt."""
        return [sibling(core, each, shared, f"{salt}-{next(told)}", salt=salt, **more) for each in range(3)][-1]

    owed, before = expected(core, shared, asked), drafts.state
    alone = [
        found("alone"),
        found("named", extra={"seamark_trial": 1, "seamark_drafts": "open:"}),
        found("asked", trial=False),
    ]
    seen = [found("trial", trial=True)]
    drafts.state = OPEN
    seen += [found("open"), found("own", trial=False)]
    drafts.state, drafts.why = CLOSED, "it drafts worse"
    core.scheduler.seamark.refusal = drafts.refusal
    closed = found("shut")
    if before != "trial" or seen != [owed] * 3 or any(hit % BLOCK for hit in (*alone, closed)):
        core.errors.append(f"{before}: {alone}, {seen} and {closed} of {shared} tokens are found, expected {owed}")
    if core.plugin["refused"] != "drafts: it drafts worse":
        core.errors.append(f"hints are refused: {core.plugin['refused']}")


def pinned(core: Core, shared: int, asked: dict[str, Any]) -> None:
    """A pin holds the rows of a draft head's window, too, when everything else is evicted."""
    head = [*range(1000, 1000 + shared)]
    core.request("pin", head, [shared - 20], pin=1)
    core.run()
    for number in range(30):
        core.request(f"flood-{number}", range(5000 + 400 * number, 5300 + 400 * number), max_tokens=3)
        core.run()
    sibling(core, 0, shared, own=10, hint=[shared - 20], max_tokens=5)
    if core.ever["0"].seamark.window != "held":
        core.errors.append(f"of a pinned prompt the rows are {core.ever['0'].seamark.window}")


def replay(core: Core, answer: int, asked: dict[str, Any]) -> None:
    """A request loses its cache after `answer` tokens, and computes them again in chunks; another goes on from it."""
    core.request("other", range(5000, 5004), max_tokens=2 * answer)  # drafts all the time
    first = core.request("first", range(1000, 1040), max_tokens=answer + 20)
    while first.num_output_tokens < answer:
        core.step()
    core.worker.empty_cache()
    core.run()
    core.request("sibling", [*first.all_token_ids, *range(2000, 2030)])
    core.run()


def siblings(core: Core, shared: int, asked: dict[str, Any]) -> None:
    """Three requests share `shared` tokens; the last one has to find them."""
    hit = [sibling(core, number, shared) for number in range(3)][-1]
    if core.plugin["on_trial"] and hit % BLOCK:
        core.errors.append(f"{hit} tokens are found on trial, which are no whole blocks")
    elif core.plugin["enabled"] and not core.plugin["on_trial"] and hit != expected(core, shared, asked):
        core.errors.append(f"{hit} of {shared} shared tokens are found, expected {expected(core, shared, asked)}")


DEFECTS = draft_defects.DEFECTS

OF_THE_WORKER = ("drafts", "variable", "head", "drop", "fills_in", "window", "window_groups", "full_groups")


# What an audit is asked for, a scene for each number; and whether what it does is counted.
PLAYS: dict[str, tuple[Callable[[Core, int, dict[str, Any]], None], bool]] = {
    "seeds": (chats, True),
    "answers": (replay, False),
    "shared": (siblings, True),
    "gate": (gate, False),
    "pinned": (pinned, False),
    "healed": (heal, False),
}


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`wanted`: numbers for each of `PLAYS`, and `chats` for each seed. `options`: of `DraftWorker` and of `Core`."""
    os.environ[settings.DRAFTS] = wanted.get("drafts", settings.AT_ONCE)
    of_worker = {name: options[name] for name in OF_THE_WORKER if name in options}
    others = {name: value for name, value in options.items() if name not in OF_THE_WORKER}
    for kind, (play, counted) in PLAYS.items():
        for number in wanted.get(kind, ()):
            worker = DraftWorker(seed=number, **of_worker)
            core = Core(model, worker=worker, speculative=worker.speculative, **others)
            yield Scene(f"{kind} {number}", [core], partial(play, core, number, {**wanted, **options}), counted)
