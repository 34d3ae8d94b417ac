"""LoRA adapters loaded and unloaded at all workers that serve their base model, so that a name means the same at each.

A worker that has the adapter already, or has it no more, counts as done: a request that reached only some of them can
be sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.errors import AdapterNotEverywhere, BadRequest
from proxy.fleet.model_names import name_keys
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.http.auth import LOAD_ADAPTER, UNLOAD_ADAPTER
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.json_body import words_in
from proxy.idle_work import beside
from proxy.pipeline.exchange import Exchange, id_header

# Not a field of vLLM, which reads over it: whose adapter it is, where several models are served.
BASE = "base_model_name"

MOST_CHARACTERS = 200  # of a worker's own words in an error
NO_ROUTE = "it has no such route: start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class _Changed(NamedTuple):
    worker: Worker
    status: int = 0  # 0: it gave no answer
    kind: bytes = b""  # content type
    body: bytes = b""
    why_not: str = ""  # empty if it is as asked for now
    has_route: bool = True

    @property
    def cause(self) -> str:
        return f"{self.worker.name} ({self.why_not})"


@dataclass(eq=False)
class AdapterChanges:
    _pools: Sequence[WorkerPool]
    _upstream: Upstream
    _silence_timeout: float  # seconds: how long a worker may take for a change
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)  # all workers get changes in the same order

    async def serve(self, exchange: Exchange) -> None:
        """Change it everywhere, with a client or without. Raises `AdapterNotEverywhere`, `BadRequest`, `NoWorker`."""
        task = beside(self._change(exchange))
        # Its client may have left, whom it would have told of an error.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        with exchange.timings.waiting():
            outcome = await asyncio.shield(task)
        exchange.give(outcome.worker)
        by = (b"x-seamark-worker", outcome.worker.name.encode())
        headers = [(b"content-type", outcome.kind), by, id_header(exchange.head.request_id)]
        await asgi.send_whole(exchange.reply, outcome.status, headers, outcome.body)

    async def _change(self, exchange: Exchange) -> _Changed:
        async with self._turn:
            everywhere = [worker for pool in self._pools for worker in _by_address(pool)]
            await self._look(everywhere)
            workers = await self._targets(exchange, everywhere)
            if not any(worker.up for worker in workers):
                raise no_worker("No worker is ready for this adapter.", workers)
            outcomes = await asyncio.gather(*(self._ask(exchange, worker) for worker in workers))
            await self._look(workers)
        return _answer(exchange, outcomes)

    async def _targets(self, exchange: Exchange, everywhere: list[Worker]) -> list[Worker]:
        """Where the adapter belongs, workers that are down included."""
        name, base = (exchange.body.parsed.get(field) for field in ("lora_name", BASE))
        if base is not None:
            if not (named := [worker for worker in everywhere if worker.serves(base)]):
                raise BadRequest(f"No worker serves the base model {str(base)[:MOST_CHARACTERS]!r}.", param=BASE)
            return named
        if exchange.head.path == UNLOAD_ADAPTER:
            return [worker for worker in everywhere if worker.serves(name)] or everywhere
        keys = name_keys(worker.names for worker in everywhere)  # prefill workers included
        if len({keys.get(worker.names.base) for worker in everywhere}) < 2:
            return everywhere
        asked = await asyncio.gather(*(self._ask(exchange, worker, b"{}") for worker in everywhere))
        able = [outcome.worker for outcome in asked if outcome.has_route]
        models = {keys.get(worker.names.base, "") for worker in able}
        if len(models) > 1:
            raise BadRequest(f"Several models may take this adapter: name one of {', '.join(sorted(models))}.", BASE)
        return able or everywhere

    async def _look(self, workers: Sequence[Worker]) -> None:
        """Have the workers list what they have now, all engines behind one address."""
        here = {worker.address for worker in workers}
        found = [(pool, worker) for pool in self._pools for worker in pool.workers if worker.address in here]
        await asyncio.gather(*(pool.ask_models(worker) for pool, worker in found if worker.up))

    async def _ask(self, exchange: Exchange, worker: Worker, raw: bytes | None = None) -> _Changed:
        """Have one worker do it. `raw`: another body than the client's."""
        if not worker.up:
            return _Changed(worker, why_not=worker.why_down or "down")
        head = exchange.head
        headers = [*head.headers, id_header(exchange.engine_id)]
        headers += self._upstream.own_headers if head.key is not None else ()
        body = exchange.body.raw if raw is None else raw
        try:
            answer = await self._upstream.send(
                "POST", worker.address + head.target, headers, body, self._silence_timeout, fresh=True
            )
            with contextlib.closing(answer):
                kind, told = (answer.header("content-type") or "").encode(), await answer.read()
        except (Unreachable, Broken) as error:
            return _Changed(worker, why_not=str(error) or "it broke off")
        has_route = answer.status not in (404, 405) or b"adapter" in told.lower()  # the word is in what vLLM then says
        why_not = words_in(told)[:MOST_CHARACTERS] or "it gives no reason"
        why_not = "" if _is_done(exchange, worker, answer.status, told, has_route=has_route) else why_not
        return _Changed(worker, answer.status, kind, told, why_not if has_route else NO_ROUTE, has_route)


def _by_address(pool: WorkerPool) -> list[Worker]:
    """One worker for each address: engines behind the same one load together."""
    return list({worker.address: worker for worker in reversed(pool.workers)}.values())[::-1]


def _is_done(exchange: Exchange, worker: Worker, status: int, told: bytes, *, has_route: bool) -> bool:
    if exchange.head.path == UNLOAD_ADAPTER:
        return status == 200 or (status == 404 and has_route)
    if status != 400 or b"already been loaded" not in told:
        return status == 200
    asked = exchange.body.parsed  # under this name there may be another adapter
    return any(
        card["id"] == asked.get("lora_name") and card.get("root") == asked.get("lora_path")
        for card in worker.probed.models
    )


def _answer(exchange: Exchange, outcomes: Sequence[_Changed]) -> _Changed:
    """What the client gets of all that the workers answered. Raises `AdapterNotEverywhere`."""
    changed = [outcome for outcome in outcomes if outcome.status == 200]
    failed = [outcome for outcome in outcomes if outcome.why_not and outcome.has_route]
    is_one_refusal = len(failed) == len(outcomes) and all(0 < each.status == outcomes[0].status for each in outcomes)
    if failed and not is_one_refusal:
        done = ", ".join(outcome.worker.name for outcome in outcomes if not outcome.why_not)
        causes = "; ".join(outcome.cause for outcome in failed)
        verb = "loaded" if exchange.head.path == LOAD_ADAPTER else "unloaded"
        raise AdapterNotEverywhere(
            f"LoRA adapter {exchange.body.parsed.get('lora_name')!r} is {verb} at {done or 'no worker'}, and not at "
            f"{causes}. Send the request again when that is mended: it changes nothing where it is {verb}."
        )
    first = next(iter(changed or [outcome for outcome in outcomes if outcome.has_route] or outcomes))
    lacking = [outcome.cause for outcome in outcomes if not outcome.has_route]
    return first._replace(body=first.body + f" Not at {'; '.join(lacking)}.".encode()) if changed and lacking else first
