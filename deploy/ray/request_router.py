"""Seamark inside Ray Serve LLM: a request router that puts the hint in, and knows which replica holds a prefix.

Ray's engines have no HTTP address, so there is no place for a gateway. Its router sees each request before it is sent:
boundaries come from the model's own tokenizer and template, loaded in Ray's ingress process; the choice and the index
are the gateway's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from transformers import AutoTokenizer

from proxy.boundaries.boundary import Found
from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.renderer import RenderFailed, identify_renderer
from proxy.boundaries.template_facts import setting_of
from proxy.chat.chat import CHAT
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.routing.policy import choose
from proxy.routing.prefix_index import PrefixIndex
from proxy.version import version

MEMORY_BYTES = 2**26  # each, of positions and of the index

LOAD_SLACK = 8  # requests, as the gateway's setting


class TokenizerRenderer:
    """A chat's token ids, by the tokenizer in this process."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> list[int]:
        return await asyncio.to_thread(self._render, body)

    def _render(self, body: Mapping[str, Any]) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                continue_final_message=body.get("continue_final_message", False),
                chat_template=body.get("chat_template"),
                return_dict=False,
                **(body.get("chat_template_kwargs") or {}),
            )
        except Exception as error:  # whatever a template raises; its message might hold text of the chat
            raise RenderFailed(f"the template failed: {type(error).__name__}") from None
        return list(ids)


class SeamarkRouter(RequestRouter):
    """`request_router_class` of a deployment; `request_router_kwargs`: `tokenizer`, a name or folder of the model."""

    def initialize_state(self, tokenizer: str, match_unit: int = 16) -> None:
        """`match_unit` in tokens, as the replicas' `prefix_match_unit`."""
        self._renderer = TokenizerRenderer(tokenizer)
        self._info = EngineInfo(version(), "", match_unit, match_unit)
        self._facts, self._stored = FactsLearner(), StoredResponses(MEMORY_BYTES)
        self._finder, self._index = BoundaryFinder(PositionCache(MEMORY_BYTES)), PrefixIndex(MEMORY_BYTES)
        self._workers: dict[str, Worker] = {}  # by replica
        self._running: dict[str, Worker] = {}  # by request
        self._renderer_id: bytes | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica for a request, whose hint is put in."""
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for boot in replicas.keys() - self._workers.keys():
            self._workers[boot] = Worker(boot, None, up=True, boot=boot, engine=self._info)
        workers = [self._workers[boot] for boot in replicas]
        request = pending_request.args[0] if pending_request.args else None
        found = await self._find(request) if hasattr(request, "messages") else Found()
        worker = choose(workers, self._index.longest(found.prefixes, set(replicas)), LOAD_SLACK)
        if hint := found.entries():
            request.vllm_xargs = {**(request.vllm_xargs or {}), "seamark_boundaries": list(hint)}
            self._index.record(found.boundaries, worker.boot, hint)
        worker.inflight += 1
        worker.dispatched += 1
        self._running[pending_request.metadata.internal_request_id] = worker
        return [[replicas[worker.boot]]]

    async def _find(self, request: Any) -> Found:
        body = request.model_dump(mode="json", exclude_unset=True)
        if self._renderer_id is None:
            self._renderer_id = await identify_renderer(self._renderer, body["model"]) or b""
        setting = setting_of(body)
        await self._facts.learn(self._renderer, self._renderer_id, body["model"], setting)
        facts = self._facts.facts(self._renderer_id, setting)
        return self._finder.find(chat_in(CHAT, body, self._stored), facts, self._renderer_id, len(json.dumps(body)))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The replica has answered."""
        if (worker := self._running.pop(internal_request_id, None)) is not None:
            worker.inflight -= 1
