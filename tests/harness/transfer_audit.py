"""Prefill and decode apart over NIXL's own schedulers, without engines: each key and each block that is read, checked.

Two cores: P prefills, D loads what P computed and goes on. What NIXL's worker does is copying the
blocks that its scheduler names, at any time after the step that names them was planned: before the steps that still run
have written, if the engine plans ahead. P's blocks are its own again when D has read them.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.v1.outputs import KVConnectorOutput

from engine_patches.forward.loaded_weights import Weights
from engine_patches.scheduler import hooks
from engine_patches.scheduler.transfers import STOPS, Transfers
from tests.harness.audit import Scene
from tests.harness.audited_core import Core
from tests.harness.modelled_worker import Worker

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


class TransferWorker(Worker):
    """Of one of two engines that hand prefills over."""

    late = True

    counted = ("read",)

    peer: TransferWorker

    def __init__(self, *, multi: bool, failing: float) -> None:
        super().__init__()
        self.multi, self.failing = multi, failing
        self.offers: dict[str, dict[str, Any]] = {}  # by request: its `kv_transfer_params` for the other engine
        self.reading: dict[str, tuple[Any, Any, str]] = {}  # local blocks, remote blocks, the other engine's request
        self.sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._draw = random.Random(9)

    def start(self) -> None:
        groups = self.core.scheduler.kv_cache_config.transfer_groups
        self._nixl = SimpleNamespace(_has_mamba=True, _group_spec_types=[type(g.kv_cache_spec) for g in groups])

    @property
    def busy(self) -> bool:
        return bool(self.reading or self._received or self.sent)

    def planned(self, output: Any) -> None:
        for request in self.core.scheduler.running:
            if (request.kv_transfer_params or {}).get("do_remote_decode") and not request.num_output_tokens:
                del self.tokens[request.request_id][request.num_prompt_tokens :]  # it stops where a state is kept
        connector = output.kv_connector_metadata
        for name, read in (connector.metadata[0] if self.multi else connector).reqs_to_recv.items():
            if read.awaiting_kvs:
                self.reading[name] = read.local_block_ids, read.remote.block_ids, read.remote.request_id
            else:  # D has the whole prompt, or its client is gone
                self.peer.sent.add(read.remote.request_id)
        self._read(READ_SHARE * EARLY_SHARE)

    def computed(self) -> None:
        self._read(READ_SHARE)

    def _read(self, share: float) -> None:
        for name in [name for name in self.reading if self._draw.random() < share]:
            local, remote, lender = self.reading.pop(name)
            groups = NixlBaseConnectorWorker._apply_prefix_caching(
                self._nixl, list(map(list, local)), list(map(list, remote)), 1, 1
            )
            if self.failing and self._draw.random() < self.failing:
                self._failed.add(name)
                self.contents.update((block, {}) for group in local for block in group)
                groups = (), ()
            for mine, theirs in zip(*groups, strict=True):
                for own, other in zip(mine, theirs, strict=True):
                    self.contents[own] = dict(self.peer.contents.get(other, {}))
                    self.core.counts["read"] += 1
            self._received.add(name)
            if name not in self._failed:
                self.loaded.add(name)
            self.peer.sent.add(lender)

    def connector_output(self) -> KVConnectorOutput:
        done = KVConnectorOutput(
            finished_recving=self._received or None,
            failed_recving=self._failed,
            finished_sending=self.sent & self.core.scheduler.requests.keys() or None,
        )
        self._received, self._failed, self.sent = set(), set(), set()
        return done

    def reported(self, output: Any, answers: Any) -> None:
        for answer in itertools.chain.from_iterable(each.outputs for each in answers.values()):
            if answer.kv_transfer_params:
                self.offers[answer.request_id] = answer.kv_transfer_params


def cores(
    model: str,
    name: str = "NixlConnector",
    *,
    multi: bool = False,
    failing: float = 0.0,
    weights: Sequence[Sequence[str]] = (),
    **options: Any,
) -> list[Core]:
    """P and D. `multi`: the connector is inside a MultiConnector; `failing`: share of reads.

    `weights`: the fields of each one's `Weights`; `options`: of `Core`.
    """
    made = []
    for number, role in enumerate(("kv_producer", "kv_consumer")):
        connector: dict[str, Any] = {"kv_connector": name, "kv_role": role, "kv_load_failure_policy": "recompute"}
        if multi:
            children = {"connectors": [connector]}
            connector = {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": children}
        own = {"weights": Weights(*weights[number])} if weights else {}
        worker = TransferWorker(multi=multi, failing=failing)
        made.append(Core(model, worker=worker, connector=connector, **options, **own))
    p, d = made
    p.worker.peer, d.worker.peer = d.worker, p.worker
    return made


def random_traffic(p: Core, d: Core, seed: int, chats: int) -> None:
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
                draw_reset.choice((p, d)).reset()
            for name in [name for name in waiting if name in p.worker.offers]:
                tokens, hint, answer, salt = waiting.pop(name)
                offer = p.worker.offers.pop(name)
                if draw.random() < SWAPPED_SHARE:
                    spare.insert(0, offer)
                    offer = spare.pop()
                if taken and draw.random() < AGAIN_SHARE:
                    again = dict(draw.choice(taken))
                    d.request(f"{name} again", list(tokens), hint, answer, salt, transfer=again, stop=answer > 3)
                taken.append(dict(offer))
                d.request(name, tokens, hint, answer, salt, transfer=offer, stop=answer > 3)
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
            d.request(name, tokens, hint, answer, salt, stop=answer > 3)
        else:
            stops = {STOPS: True} if draw.random() < STOPPING_SHARE else {}
            p.request(name, tokens, hint, 1, salt, transfer=PREFILL | stops)
            waiting[name] = tokens, hint, answer, salt
        both(draw.randrange(1, 6))
    for _ in range(3000):
        if not (waiting or p.busy or d.busy or spare):
            return
        p.worker.sent.update(offer["remote_request_id"] for offer in spare)  # their lease is over
        spare.clear()
        both(1)
    d.errors.append(f"stuck: {p.scheduler.get_request_counts()}, {d.scheduler.get_request_counts()}, {len(waiting)}")


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`options`: see `cores`; with a `connector`, which vLLM's flag would have, a start beside that is all."""
    if "connector" in options:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        hooks.logger = logging.getLogger("started")  # each engine configuration resets vLLM's own
        hooks.logger.setLevel(logging.INFO)
        hooks.logger.addHandler(handler)
        logging.disable(logging.NOTSET)
        core = Core(model, **options)
        yield Scene("start", [core], partial(said, core, lines))
        hooks.logger.removeHandler(handler)
        return
    for seed in wanted["seeds"]:
        p, d = cores(model, **options)
        yield Scene(f"seed {seed}", [p, d], partial(random_traffic, p, d, seed, wanted["chats"]))


def said(core: Core, lines: list[str]) -> list[str]:
    """What is logged of how states are kept, and of hints that are refused, when a request brings some."""
    core.scheduler.seamark.state_of(core.request("r", list(range(200)), [163, 190]))
    return [line for line in lines if "states are written" in line or "hints are refused" in line]


def free_at_once() -> None:
    """Free blocks of states as without a connector: before the step that writes them is done."""
    hooks._give_back_after_their_step = lambda scheduler, blocks: scheduler.kv_cache_manager.block_pool.free_blocks(
        blocks
    )


def load_anything() -> None:
    """Load whatever a request is given to load."""
    Transfers._refusal = lambda *_: ""  # type: ignore[method-assign]


DEFECTS = {"at once": free_at_once, "content": load_anything}
