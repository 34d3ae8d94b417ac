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
from engine_patches.scheduler.states import States
from engine_patches.scheduler.transfers import STOPS, Transfers
from tests.harness.audit import Scene, random_traffic
from tests.harness.audited_core import Core
from tests.harness.modelled_worker import Worker

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}

# Of all requests, so many are prefilled by P; of these, so many may stop before the prompt's end. With so many of those
# that come back, what D took before is given to it again, with another prompt.
PREFILL_SHARE, STOPPING_SHARE, AGAIN_SHARE = 0.7, 0.7, 0.1

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


class DecodingCore(Core):
    """D, whose requests P prefills before."""

    def __init__(self, model: str, prefilling: Core, **options: Any) -> None:
        super().__init__(model, **options)
        self.prefilling, self._draw = prefilling, random.Random(1)
        self._sent: dict[str, tuple[Any, ...]] = {}  # to P
        self._taken: list[dict[str, Any]] = []

    def request(
        self, name: str, tokens: Any, hint: Any = None, max_tokens: int = 1, salt: Any = None, *given: Any, **more: Any
    ) -> Any:
        """Of P first, mostly."""
        if self._draw.random() >= PREFILL_SHARE:
            return super().request(name, tokens, hint, max_tokens, salt, *given, **more)
        self._sent[name] = list(tokens), hint, max_tokens, salt, more
        transfer = PREFILL | ({STOPS: True} if self._draw.random() < STOPPING_SHARE else {})
        return self.prefilling.request(name, tokens, hint, 1, salt, transfer=transfer, extra=more.get("extra", {}))

    @property
    def waiting(self) -> int:
        return super().waiting + self.prefilling.waiting

    @property
    def busy(self) -> bool:
        return super().busy or self.prefilling.busy or bool(self._sent)

    def step(self) -> Any:
        """Of both."""
        self.prefilling.step()
        output, offers = super().step(), self.prefilling.worker.offers
        if self._draw.random() < RESET_SHARE:
            self._draw.choice((self, self.prefilling)).reset()
        for name in [name for name in self._sent if name in offers]:
            *asked, more = self._sent.pop(name)
            offer = offers.pop(name)
            if self._taken and self._draw.random() < AGAIN_SHARE:
                super().request(f"{name} again", *asked, **more, transfer=dict(self._draw.choice(self._taken)))
            self._taken.append(dict(offer))
            super().request(name, *asked, **more, transfer=offer)
        return output

    def run(self, most: int = 3000) -> None:
        self.drain(most)


def cores(
    model: str,
    name: str = "NixlConnector",
    *,
    multi: bool = False,
    failing: float = 0.0,
    weights: Sequence[Sequence[str]] = ((), ()),
    **options: Any,
) -> list[Core]:
    """D and P. `multi`: the connector is inside a MultiConnector; `failing`: share of reads.

    `weights`: the fields of the `Weights` of P and of D; `options`: of `Core`.
    """

    def made(kind: Any, role: str, own_weights: Sequence[str]) -> Core:
        connector: dict[str, Any] = {"kv_connector": name, "kv_role": role, "kv_load_failure_policy": "recompute"}
        if multi:
            children = {"connectors": [connector]}
            connector = {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": children}
        own = {"weights": Weights(*own_weights)} if own_weights else {}
        worker = TransferWorker(multi=multi, failing=failing)
        core: Core = kind(model, worker=worker, connector=connector, **options, **own)
        return core

    p = made(Core, "kv_producer", weights[0])
    d = made(partial(DecodingCore, prefilling=p), "kv_consumer", weights[1])
    p.worker.peer, d.worker.peer = d.worker, p.worker
    return [d, p]


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
        made = cores(model, **options)
        yield Scene(f"seed {seed}", made, partial(random_traffic, made[0], seed, wanted["chats"], longest_turn=400))


def said(core: Core, lines: list[str]) -> list[str]:
    """What is logged of how states are kept, and of hints that are refused, when a request brings some."""
    core.scheduler.seamark.state_of(core.request("r", list(range(200)), [163, 190]))
    return [line for line in lines if "states are written" in line or "hints are refused" in line]


def free_at_once() -> None:
    """Free blocks of states as without a connector: before the step that writes them is done."""
    hooks.States = lambda *given, **more: States(*given, **{**more, "give_back": None})  # type: ignore[misc,assignment]


def load_anything() -> None:
    """Load whatever a request is given to load."""
    Transfers._refusal = lambda *_: ""  # type: ignore[method-assign]


DEFECTS = {"at once": free_at_once, "content": load_anything}
