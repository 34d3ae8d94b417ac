"""Prefill and decode apart over NIXL's own schedulers, without engines: each key and each block that is read, checked.

Two cores of `scheduler_audit`: P prefills, D loads what P computed and goes on. What NIXL's worker does is copying the
blocks that its scheduler names, at any time after the step that names them was planned: before the steps that still run
have written, if the engine plans ahead. P's blocks are its own again when D has read them.

Run as `python -m tests.harness.transfer_audit MODEL '{"seeds": [1], "chats": 40, "cores": [{}]}'`, since patching is
per process. Prints JSON.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from engine_patches import ledger
from engine_patches.forward.loaded_weights import Weights
from engine_patches.patches import PATCHES
from engine_patches.scheduler import hooks
from engine_patches.scheduler.transfers import STOPS, Transfers
from tests.harness.scheduler_audit import Core

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}

# Of the prefills, so many may stop before the prompt's end; and of those that come back, so many are of another prompt,
# or were taken before.
STOPPING_SHARE, SWAPPED_SHARE, AGAIN_SHARE = 0.7, 0.15, 0.1

# Of all steps, so many are followed by an attempt to empty one of the caches: in vain while any of its blocks is held.
RESET_SHARE = 0.05

# Of the reads that have begun, so many are done in one step; and so many of those before the running steps.
READ_SHARE, EARLY_SHARE = 0.4, 0.5


class OwnConnector(NixlPullConnector):
    """One that is not vLLM's own."""


class TransferCore(Core):
    """One of two engine cores that hand prefills over."""

    def __init__(
        self,
        model: str,
        role: str,
        name: str = "NixlConnector",
        *,
        multi: bool = False,
        failing: float = 0.0,
        **options: Any,
    ) -> None:
        """`role`: vLLM's `kv_role`; `multi`: the connector is inside a MultiConnector; `failing`: share of reads."""
        connector: dict[str, Any] = {"kv_connector": name, "kv_role": role, "kv_load_failure_policy": "recompute"}
        if multi:
            children = {"connectors": [connector]}
            connector = {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": children}
        super().__init__(model, connector=connector, **options)
        self.peer: TransferCore = self
        self.multi, self.failing = multi, failing
        self.offers: dict[str, dict[str, Any]] = {}  # by request: its `kv_transfer_params` for the other core
        self.reading: dict[str, tuple[Any, Any, str]] = {}  # local blocks, remote blocks, the other core's request
        self.loaded: set[str] = set()  # requests that began with what the other core computed
        self.blocks_read = 0
        self.resets = 0
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._sent: set[str] = set()
        self._draw = random.Random(9)
        self._uncomputed: deque[Any] = deque()  # steps that were planned
        groups = self.scheduler.kv_cache_config.transfer_groups
        self._worker = SimpleNamespace(_has_mamba=True, _group_spec_types=[type(g.kv_cache_spec) for g in groups])

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        left = (self._queue, self._uncomputed, self.reading, self._received, self._sent)
        return bool(self.scheduler.has_unfinished_requests() or any(left))

    def step(self) -> Any:
        """As without a connector; a core that plans ahead computes each step after the next one is planned."""
        output = self.scheduler.schedule()
        for request in self.scheduler.running:
            if (request.kv_transfer_params or {}).get("do_remote_decode") and not request.num_output_tokens:
                del self._tokens[request.request_id][request.num_prompt_tokens :]  # it stops where a state is kept
        self._record_meanings()
        self._check_events()
        self._begin_reads(output)
        self._read(READ_SHARE * EARLY_SHARE)
        self._uncomputed.append(output)
        idle = not output.total_num_scheduled_tokens
        while len(self._uncomputed) > int(self.overlap and not idle):
            planned = self._uncomputed.popleft()
            self._queue.append((planned, self._compute(planned)))
        if not self._uncomputed:
            self._check_keys()
        self._read(READ_SHARE)
        while self._queue:
            self._report(*self._queue.pop(0))
        return output

    def _begin_reads(self, output: Any) -> None:
        connector = output.kv_connector_metadata
        for name, read in (connector.metadata[0] if self.multi else connector).reqs_to_recv.items():
            if read.awaiting_kvs:
                self.reading[name] = read.local_block_ids, read.remote.block_ids, read.remote.request_id
            else:  # D has the whole prompt, or its client is gone
                self.peer._sent.add(read.remote.request_id)

    def _read(self, share: float) -> None:
        for name in [name for name in self.reading if self._draw.random() < share]:
            local, remote, lender = self.reading.pop(name)
            groups = NixlBaseConnectorWorker._apply_prefix_caching(
                self._worker, list(map(list, local)), list(map(list, remote)), 1, 1
            )
            if self.failing and self._draw.random() < self.failing:
                self._failed.add(name)
                self._contents.update((block, {}) for group in local for block in group)
                groups = (), ()
            for mine, theirs in zip(*groups, strict=True):
                for own, other in zip(mine, theirs, strict=True):
                    self._contents[own] = dict(self.peer._contents.get(other, {}))
                    self.blocks_read += 1
            self._received.add(name)
            if name not in self._failed:
                self.loaded.add(name)
            self.peer._sent.add(lender)

    def _report(self, output: Any, sampled: dict[str, list[int]]) -> None:
        output.seamark_planned_at = float("inf")  # what a stand-in's steps take teaches nothing
        names = list(output.num_scheduled_tokens)
        done = KVConnectorOutput(
            finished_recving=self._received or None,
            failed_recving=self._failed,
            finished_sending=self._sent & self.scheduler.requests.keys() or None,
        )
        self._received, self._failed, self._sent = set(), set(), set()
        runner = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=done,
        )
        for answers in self.scheduler.update_from_output(output, runner).values():
            for answer in answers.outputs:
                if answer.kv_transfer_params:
                    self.offers[answer.request_id] = answer.kv_transfer_params


def random_traffic(p: TransferCore, d: TransferCore, seed: int, chats: int) -> None:
    """Chats on a few heads and later turns of them, most prefilled by P; some clients leave while D loads.

    Some of what P computed is given to D with another prompt, or a second time.
    """
    draw = random.Random(seed)
    lengths = (20, 33, 64, 70, 100, 130, 163, 250, 300, 400)
    heads = [[draw.randrange(1000) for _ in range(draw.choice(lengths))] for _ in range(4)]
    begun: list[list[int]] = []
    waiting: dict[str, tuple[list[int], Any, int, str | None]] = {}  # for P
    spare: list[dict[str, Any]] = []  # what P computed, and nobody has taken
    taken: list[dict[str, Any]] = []
    draw_reset = random.Random(-seed)

    def both(steps: int) -> None:
        for _ in range(steps):
            p.step()
            d.step()
            if draw_reset.random() < RESET_SHARE:
                core = draw_reset.choice((p, d))
                core.resets += bool(core.scheduler.reset_prefix_cache())
            for name in [name for name in waiting if name in p.offers]:
                tokens, hint, answer, salt = waiting.pop(name)
                offer = p.offers.pop(name)
                if draw.random() < SWAPPED_SHARE:
                    spare.insert(0, offer)
                    offer = spare.pop()
                if taken and draw.random() < AGAIN_SHARE:
                    again = dict(draw.choice(taken))
                    d.request(f"{name} again", list(tokens), hint, answer, salt, transfer=again)
                taken.append(dict(offer))
                d.request(name, tokens, hint, answer, salt, transfer=offer)
                if draw.random() < 0.1:
                    for _ in range(draw.randrange(3)):
                        d.step()
                    if name in d.scheduler.requests:
                        d.abort(name)

    for number in range(chats):
        tokens = list(draw.choice(begun) if begun and draw.random() < 0.5 else draw.choice(heads))
        seams = [len(tokens)]
        for _ in range(draw.randrange(1, 3)):
            tokens += [draw.randrange(1000) for _ in range(draw.randrange(1, 70))]
            seams.append(len(tokens))
        begun.append(list(tokens))
        tokens += list(range(1, draw.randrange(1, 6)))  # words that ask for an answer
        hint = [seam for seam in seams if draw.random() < 0.8] or None
        salt, answer, name = draw.choice((None, None, "salt")), draw.choice((1, 3, 20)), f"{seed}-{number}"
        if draw.random() < 0.3:
            d.request(name, tokens, hint, answer, salt)
        else:
            stops = {STOPS: True} if draw.random() < STOPPING_SHARE else {}
            p.request(name, tokens, hint, 1, salt, transfer=PREFILL | stops)
            waiting[name] = tokens, hint, answer, salt
        both(draw.randrange(1, 6))
    for _ in range(3000):
        if not (waiting or p.busy or d.busy or spare):
            return
        p._sent.update(offer["remote_request_id"] for offer in spare)  # their lease is over
        spare.clear()
        both(1)
    d.errors.append(f"stuck: {p.scheduler.get_request_counts()}, {d.scheduler.get_request_counts()}, {len(waiting)}")


def audited(model: str, seeds: Sequence[int], chats: int, options: dict[str, Any]) -> dict[str, Any]:
    """What is found with these arguments of the two cores; `weights`: the fields of each one's `Weights`, in a list."""
    options = dict(options)
    both = [{"weights": Weights(*fields)} for fields in options.pop("weights", ())] or [{}, {}]
    found: dict[str, Any] = {"core": options, "errors": [], "read": 0, "hit_tokens": 0, "written": 0, "evicted": 0}
    found["resets"] = 0
    for seed in seeds:
        roles = zip(("kv_producer", "kv_consumer"), both, strict=True)
        p, d = (TransferCore(model, role, **options, **weights) for role, weights in roles)
        p.peer, d.peer = d, p
        try:
            random_traffic(p, d, seed, chats)
        except AssertionError as error:  # vLLM's own, of what no engine survives
            found["errors"].append(f"seed {seed}: the engine dies: {error}")
            continue
        for core in (p, d):
            if core.blocks_in_use():
                core.errors.append(f"{core.blocks_in_use()} blocks are held without a request")
            found["errors"] += [f"seed {seed}: {error}" for error in core.errors[:3]]
            found["hit_tokens"] += sum(hit for name, hit in core.hits.items() if name not in core.loaded)
            found["written"] += sum(map(len, core.written.values()))
            found["evicted"] += core.evicted
            found["resets"] += core.resets
        found["read"] += d.blocks_read
        found["inside_pass"] = p.scheduler.seamark.writes_in_forward and d.scheduler.seamark.writes_in_forward
    return found


def started(model: str, connectors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a scheduler makes of each of these `--kv-transfer-config`, and of a hint beside it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    hooks.logger = logging.getLogger("started")  # each engine configuration resets vLLM's own
    hooks.logger.setLevel(logging.INFO)
    hooks.logger.addHandler(handler)
    found = []
    for connector in connectors:
        lines.clear()
        core = Core(model, connector=connector)
        checkpoints = core.scheduler.seamark
        checkpoints.state_of(core.request("r", list(range(200)), [163, 190]))
        told = [line for line in lines if "states are written" in line or "hints are refused" in line]
        ignored = dict(checkpoints.counters.counts.ignored)
        found.append({"inside_pass": checkpoints.writes_in_forward, "said": told, "ignored": ignored})
    return found


def main(model: str, argument: str) -> None:
    """`{"seeds": [..], "chats": n, "planted": [..], "cores": [arguments of both cores, ...]}`.

    Of `planted`, "at once" frees blocks of states as without a connector: before the step that writes them is done;
    "content" loads whatever a request is given to load.
    `{"started": [configurations of connectors]}` asks only what a scheduler makes of each.
    """
    wanted = json.loads(argument)
    init_none_hash(sha256)
    ledger.apply(PATCHES)
    if "started" in wanted:
        print(json.dumps(started(model, wanted["started"])))
        return
    if "at once" in wanted.get("planted", ()):
        hooks._give_back_after_their_step = lambda scheduler, blocks: scheduler.kv_cache_manager.block_pool.free_blocks(
            blocks
        )
    if "content" in wanted.get("planted", ()):
        Transfers._refusal = lambda *_: ""  # type: ignore[method-assign]
    print(json.dumps([audited(model, wanted["seeds"], wanted["chats"], options) for options in wanted["cores"]]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
