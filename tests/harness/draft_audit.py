"""The scheduler audit for engines that draft tokens: every cache key checked, whatever the target makes of the drafts.

A step of generation runs a token and its drafts, and leaves the state after each of them in a column of its own. How
many drafts are right is drawn at random. The running state then starts from the column of the last right one; the state
of a block's edge is copied into the edge's block, as vLLM does after sampling; rows of wrong drafts are overwritten.

A draft head's own row for a token is made with the next token, too. `foreign_rows` counts the rows that requests found
in the cache and that were made with another next token than their own: the head then drafts worse, no answer changes.

Run as `python -m tests.harness.draft_audit MODEL '{"seeds": [1], "chats": 9, "cores": [{}], "planted": []}'`, since
patching is per process. Prints JSON.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from engine_patches import ledger, settings
from engine_patches.footprint import WRITES
from engine_patches.patches import PATCHES
from tests.harness import draft_defects
from tests.harness.draft_cores import BESIDE_THE_TARGET, NOWHERE, OWN_GROUP, OWN_SHAPE, OWN_WINDOW, UNKNOWN
from tests.harness.scheduler_audit import ATTENTION, BLOCK, RECURRENT, UNIT, Core, prefix, random_traffic

WINDOW = 100  # tokens


class DraftCore(Core):
    """One engine core without an engine, whose requests draft tokens."""

    def __init__(
        self,
        model: str,
        blocks: int = 200,
        budget: int = 256,
        *,
        drafts: int = 3,
        variable: bool = False,
        head: str = BESIDE_THE_TARGET,
        drop: bool = True,
        fills_in: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """`drafts`: for each token, at most so many; exactly so many unless `variable`. `head`: where it has its rows.
        `drop`: if False, vLLM is told not to take a unit off each match. `fills_in`: the head has a row for one token
        more than it drafts (dflash, and dspark with a bonus query). `options`: those of `Core`. With `overlap`
        the worker is a model runner V2, and V1 without.
        """
        speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": drafts}
        if head == NOWHERE:
            speculative.update(method="ngram", prompt_lookup_max=3)
        elif not drop:
            speculative["disable_eagle_block_drop"] = True
        self.most_drafts, self.variable, self._head, self._drop = drafts, variable, head, drop
        self.head_group = -1  # in which the head has its rows
        self.window_group = -1
        self.verified: list[int] = [0] * (drafts + 1)  # rows with drafts, by how many were right
        self.found_rows = self.foreign_rows = self.foreign_edges = 0  # of the head's
        self._draw = random.Random(seed)
        self._known: dict[str, Request] = {}  # all there ever were
        self._accepted: dict[str, int] = {}  # tokens of the last step that were right, where the next one needs it
        self._computed: dict[str, int] = {}  # tokens; the scheduler's own counts may run ahead
        self._prefill_ends: dict[str, int] = {}  # tokens that a request had when it was admitted
        super().__init__(model, blocks, budget, speculative=speculative, **options)
        self.scheduler.num_lookahead_tokens += fills_in

    def _place_draft_head(self, groups: list[KVCacheGroupSpec]) -> None:
        shape = dict(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.head_group = ATTENTION
        if self._head in (OWN_GROUP, OWN_SHAPE, OWN_WINDOW):
            self.head_group = len(groups)
            if self._head == OWN_WINDOW:
                spec = SlidingWindowSpec(**shape, sliding_window=WINDOW)
                self.window_group = self.head_group
            else:
                spec = FullAttentionSpec(**{**shape, "head_size": 1 + (self._head == OWN_SHAPE)})
            self.attention.append(self.head_group)
            groups.append(KVCacheGroupSpec(["head"], spec))
        if self._head == NOWHERE:
            self.head_group = -1
        elif self._drop and self._head != UNKNOWN:
            groups[self.head_group].is_eagle_group = True

    def request(self, name: str, *args: Any, **kwargs: Any) -> Request:
        """Add a request."""
        self._known[name] = request = super().request(name, *args, **kwargs)
        return request

    def empty_cache(self) -> None:
        """Preempt all running requests and forget everything cached, as a reset of the prefix cache may."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        for name in self.scheduler.requests:
            self.forget_sampled(name)
            self._computed.pop(name, None)

    def _record_meanings(self) -> None:
        # A last step is cached under hashes of a request that is gone by then.
        for name, request in self._known.items():
            tokens = self._tokens[name]
            for number, block_hash in enumerate(request.block_hashes, 1):
                key = bytes(block_hash)
                if key not in self._meant and number * UNIT <= len(tokens):
                    self._meant[key] = (prefix(tokens, number * UNIT), number * UNIT)

    def _found(self, block_hashes: Any, most: int) -> int:
        # By a prompt that shares no more than it takes: a longer one may enter a group by a later key. vLLM 0.31 looks
        # no further than it is asked to, and takes a unit off that.
        reached = most + self.scheduler.seamark.grid.drop
        looks_past = hasattr(kv_cache_coordinator, "eagle_proof_margin")
        return super()._found(list(block_hashes)[: reached // UNIT], most if looks_past else reached)

    def _receive(self, output: Any) -> dict[str, int]:
        starts = super()._receive(output)
        gone = set(output.finished_req_ids)
        fresh = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        for name in gone | fresh:
            self._accepted.pop(name, None)
            self._computed.pop(name, None)
        for name in fresh:
            self._state_index.pop(name, None)
            self._prefill_ends[name] = len(self._tokens[name])
            self._count_foreign_rows(name, starts[name])
        return {**starts, **{name: self._computed[name] for name in starts if name in self._computed}}

    def _compute(self, output: Any) -> dict[str, list[int]]:
        starts = self._receive(output)
        writes = getattr(output, WRITES, None) or {}
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            # Model runner V1 goes by the prompt's length: what a preempted request had generated is no prompt to it.
            prompt = self._prefill_ends[name] if self.overlap else self._known[name].num_prompt_tokens
            short = count <= 1 + self.most_drafts and starts[name] >= prompt and output.scheduled_spec_decode_tokens
            sampled[name] = self._compute_row(
                name, starts[name], count, drafts, writes.get(name, ()), verifies=bool(drafts or short)
            )
        return sampled

    def _compute_row(
        self, name: str, start: int, count: int, drafts: int, asked: Sequence[Any], verifies: bool
    ) -> list[int]:
        """Run `count` tokens of a request, the last ones of them drafts; the tokens that this gives."""
        tokens, end = self._tokens[name], start + count
        sure = end - drafts  # tokens that are no drafts
        if drafts and sure != len(tokens):
            self.errors.append(f"{name}: {drafts} drafts behind {sure} of {len(tokens)} tokens")
        self.chunk_ends.setdefault(name, []).append(end)
        right = self._draw.randint(0, drafts)
        sampled = [prefix(tokens, sure) % 3] if sure == len(tokens) else []
        for _ in range(right):
            sampled.append(prefix([*tokens, *sampled], sure + len(sampled)) % 3)
        seen = [*tokens[:sure], *sampled[:right], *[-1] * (drafts - right)]  # by the pass
        column = self._start_column(name, start, end)
        self._compute_attention(name, start, end, seen, [*tokens, *sampled])
        self._compute_states(name, start, seen, column, asked, verifies)
        self._copy_edge(name, sure, right)
        if drafts:
            self.verified[right] += 1
        self._computed[name] = sure + right
        self._tokens[name] = [*tokens, *sampled]
        return sampled

    def _start_column(self, name: str, start: int, end: int) -> int:
        """The column of the block tables with the state to go on from, after a running state has moved."""
        before = self._state_index.get(name, (start - 1) // BLOCK if start else -1)
        after = self._state_index[name] = cdiv(end, BLOCK) - 1
        accepted = self._accepted.get(name, 1)
        if before in (-1, after):
            return after + accepted - 1
        for group in RECURRENT:
            table = self._tables[name][group]
            self._contents[table[after]] = dict(self._contents.get(table[before + accepted - 1], {}))
        return after

    def _compute_attention(self, name: str, start: int, end: int, seen: Sequence[int], known: Sequence[int]) -> None:
        """`seen`: tokens that the pass computes; `known`: those that are right, with those sampled."""
        for group in self.attention:
            rows = self._tables[name][group]
            for position in range(max(start - WINDOW + 1, 0) if group == self.window_group else 0, start):
                found = self._contents.get(rows[position // BLOCK], {}).get(position % BLOCK)
                if found != prefix(known, position + 1):
                    self.errors.append(f"{name} reads someone else's keys at {position} in group {group}")
                    break
            for position in range(start, end):
                block = self._contents.setdefault(rows[position // BLOCK], {})
                block[position % BLOCK] = prefix(seen, position + 1)
                if group == self.head_group:
                    block["head", position % BLOCK] = prefix(known, position + 2)

    def _compute_states(
        self, name: str, start: int, seen: Sequence[int], column: int, asked: Sequence[Any], verifies: bool
    ) -> None:
        end, running = len(seen), self._state_index[name]
        self.written.setdefault(name, []).extend(start + write.offset for write in asked)
        for group in RECURRENT:
            table = self._tables[name][group]
            if start and self._contents.get(table[column], {}).get("state") != prefix(seen, start):
                self.errors.append(f"{name} resumes at {start} from a wrong state")
            for write in asked:
                self._contents[write.blocks[group]] = {"state": prefix(seen, start + write.offset)}
            if not verifies:
                self._contents[table[running]] = {"state": prefix(seen, end)}
                continue
            for number, block in enumerate(table[running : running + end - start], 1):
                self._contents[block] = {"state": prefix(seen, start + number)}

    def _copy_edge(self, name: str, sure: int, right: int) -> None:
        """After sampling: the state of an edge among `sure` tokens and `right` drafts goes where its key leads."""
        running, edge = self._state_index[name], (sure + right) // BLOCK
        self._accepted[name] = 1 + right
        if edge * BLOCK < sure:
            return
        for group in RECURRENT:
            table = self._tables[name][group]
            self._contents[table[edge - 1]] = dict(self._contents.get(table[running + edge * BLOCK - sure], {}))
        if running == edge - 1:
            self._accepted[name] = 1

    def _count_foreign_rows(self, name: str, hit: int) -> None:
        if self.head_group < 0:
            return
        rows, tokens = self._tables[name][self.head_group], self._tokens[name]
        first = max(hit - WINDOW + 1, 0) if self.head_group == self.window_group else 0
        for position in range(first, min(hit, len(tokens) - 1)):
            made = self._contents.get(rows[position // BLOCK], {}).get(("head", position % BLOCK))
            self.found_rows += 1
            if made != prefix(tokens, position + 2):
                self.foreign_rows += (position + 1) % BLOCK > 0
                self.foreign_edges += (position + 1) % BLOCK == 0

    def _report(self, output: Any, sampled: dict[str, list[int]]) -> None:
        super()._report(output, sampled)
        self._record_meanings()
        names = [name for name in output.num_scheduled_tokens if name in self.scheduler.requests]
        if not self.overlap:
            most = self.most_drafts
            drafts = [[0] * (self._draw.randint(0, most) if self.variable else most) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        for name in names:
            if self.scheduler.requests[name].num_computed_tokens == 0:  # it was preempted
                self.forget_sampled(name)
                self._computed.pop(name, None)


def replay(core: DraftCore, answer: int) -> dict[str, Any]:
    """A request loses its cache after `answer` tokens, and computes them again in chunks; another goes on from it."""
    core.request("other", range(5000, 5004), max_tokens=2 * answer)  # drafts all the time
    first = core.request("first", range(1000, 1040), max_tokens=answer + 20)
    while first.num_output_tokens < answer:
        core.step()
    core.empty_cache()
    core.run()
    sibling = core.request("sibling", [*first.all_token_ids, *range(2000, 2030)])
    core.run()
    later = [end for end in core.chunk_ends["first"] if end > first.num_prompt_tokens]
    return {"ends": later, "hit": core.hits[sibling.request_id]}


def siblings(core: DraftCore, shared: int) -> int:
    """Tokens that the last of three requests finds, which share `shared` tokens and say so in their hints."""
    for number in range(3):
        own = range(2000 + 100 * number, 2090 + 100 * number)
        core.request(str(number), [*range(1000, 1000 + shared), *own], [shared])
        core.run()
    return core.hits["2"]


def _audit(model: str, options: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"core": options, "errors": [], "hit_tokens": 0, "evicted": 0, "preempted": 0}
    found |= {
        "lookahead": 0,
        "verified": [],
        "found_rows": 0,
        "foreign_rows": 0,
        "foreign_edges": 0,
        "enabled": True,
        "ignored": {},
    }

    def ends(core: DraftCore, where: str) -> None:
        if core.blocks_in_use():
            core.errors.append(f"{core.blocks_in_use()} blocks are held without a request")
        found["errors"] += [f"{where}: {error}" for error in core.errors[:3]]
        found["enabled"] = found["enabled"] and core.scheduler.seamark.states is not None
        found["lookahead"] = getattr(core.scheduler, "num_hash_lookahead_tokens", 0)  # from vLLM 0.33 on

    for seed in wanted.get("seeds", ()):
        core = DraftCore(model, seed=seed, **options)
        random_traffic(core, seed, wanted["chats"], outputs=(1, 3, 20, 150), longest_turn=700)
        ends(core, f"seed {seed}")
        for name in ("evicted", "found_rows", "foreign_rows", "foreign_edges"):
            found[name] += getattr(core, name)
        found["hit_tokens"] += sum(core.hits.values())
        found["preempted"] += sum(request.num_preemptions for request in core._known.values())
        found["verified"] = [sum(pair) for pair in zip(found["verified"] or [0] * 99, core.verified, strict=False)]
        for reason, number in core.scheduler.seamark.counters.counts.ignored.items():
            found["ignored"][reason] = found["ignored"].get(reason, 0) + number
    found["replays"] = {}
    for answer in wanted.get("answers", ()):
        core = DraftCore(model, seed=answer, **options)
        found["replays"][answer] = replay(core, answer)
        ends(core, f"after {answer} tokens")
    found["hits"] = {}
    for shared in wanted.get("shared", ()):
        core = DraftCore(model, seed=shared, **options)
        found["hits"][shared] = siblings(core, shared)
        ends(core, f"{shared} shared")
        for name in ("found_rows", "foreign_rows", "foreign_edges"):
            found[name] += getattr(core, name)
    return found


def main(model: str, argument: str) -> None:
    """What is wanted, as JSON.

    `cores`: arguments of `DraftCore`; each sees `chats` chats of random traffic for each of `seeds`, `replay` for each
    of `answers`, `siblings` for each of `shared`. `planted`: defects, by `draft_defects`' names. `without`: patches.
    """
    wanted = json.loads(argument)
    logging.disable(logging.INFO)
    os.environ[settings.DRAFTS] = "1"
    init_none_hash(sha256)
    ledger.apply([patch for patch in PATCHES if patch.name not in wanted.get("without", ())])
    for defect in wanted.get("planted", ()):
        draft_defects.plant(defect)
    print(json.dumps([_audit(model, options, wanted) for options in wanted["cores"]]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
