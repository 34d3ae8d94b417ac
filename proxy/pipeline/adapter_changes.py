"""LoRA adapters loaded and unloaded at all workers that serve their base model, so that a name means the same at each.

A worker that has the adapter already, or has it no more, counts as done: a request that reached only some of them can
be sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.errors import AdapterNotEverywhere, BadRequest
from proxy.fleet.model_names import name_keys
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.http.auth import LOAD_ADAPTER, UNLOAD_ADAPTER
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.pipeline.exchange import Choice, Exchange

# Not a field of vLLM, which reads over it: whose adapter it is, where several models are served.
BASE = "base_model_name"

MOST_CHARACTERS = 200  # of a worker's own words in an error

NO_ROUTE = "it has no such route: start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class _Site(NamedTuple):
    """A worker, and the pool that knows it."""

    pool: WorkerPool
    worker: Worker


class _Changed(NamedTuple):
    """What became of a change at one worker."""

    worker: Worker
    status: int = 0  # 0: it gave no answer
    kind: bytes = b""  # content type
    body: bytes = b""
    why_not: str = ""  # empty if it is as asked for now
    has_route: bool = True

    @property
    def cause(self) -> str:
        """Where it was not done, and why."""
        return f"{self.worker.name} ({self.why_not})"


@dataclass(eq=False)
class AdapterChanges:
    """Has all workers change."""

    _pools: Sequence[WorkerPool]
    _upstream: Upstream
    _silence_timeout: float  # seconds: how long a worker may take for a change
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)  # all workers get changes in the same order
    _tasks: set[asyncio.Task[_Changed]] = field(init=False, default_factory=set)

    async def serve(self, exchange: Exchange) -> None:
        """Change it everywhere, and answer as vLLM does. Goes on if the client leaves meanwhile.

        Raises `AdapterNotEverywhere`, `BadRequest` if it is not clear whose adapter it is, or `NoWorker`.
        """
        task = asyncio.create_task(self._change(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._over)
        with exchange.timings.waiting():
            outcome = await asyncio.shield(task)
        exchange.give(Choice(outcome.worker))
        headers = [
            (b"content-type", outcome.kind),
            (b"x-seamark-worker", outcome.worker.name.encode()),
            exchange.head.id_header,
        ]
        await asgi.send_whole(exchange.reply, outcome.status, headers, outcome.body)

    def _over(self, task: asyncio.Task[_Changed]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its client may have left, whom it would have told

    async def _change(self, exchange: Exchange) -> _Changed:
        async with self._turn:
            await self._look(place for pool in self._pools for place in _places(pool))
            places = await self._places(exchange)
            if not any(place.worker.up for place in places):
                raise no_worker("No worker is ready for this adapter.", [place.worker for place in places])
            outcomes = await asyncio.gather(*(self._ask(exchange, place.worker) for place in places))
            await self._look(places)
        return _answer(exchange, outcomes)

    async def _places(self, exchange: Exchange) -> list[_Site]:
        """Where the adapter belongs, workers that are down included."""
        everywhere = [place for pool in self._pools for place in _places(pool)]
        name, base = (exchange.body.parsed.get(field) for field in ("lora_name", BASE))
        if base is not None:
            places = [place for place in everywhere if place.worker.serves(base)]
            if not places:
                raise BadRequest(f"No worker serves the base model {str(base)[:MOST_CHARACTERS]!r}.", param=BASE)
            return places
        if exchange.head.path == UNLOAD_ADAPTER:
            return [place for place in everywhere if place.worker.serves(name)] or everywhere
        keys = name_keys(place.worker.names for place in everywhere)  # prefill workers included
        if len({keys.get(place.worker.names.base) for place in everywhere}) < 2:
            return everywhere
        asked = await asyncio.gather(*(self._ask(exchange, place.worker, b"{}") for place in everywhere))
        places = [place for place, outcome in zip(everywhere, asked, strict=True) if outcome.has_route]
        models = {keys.get(place.worker.names.base, "") for place in places}
        if len(models) > 1:
            raise BadRequest(f"Several models may take this adapter: name one of {', '.join(sorted(models))}.", BASE)
        return places or everywhere

    @staticmethod
    async def _look(places: Any) -> None:
        """Have the workers list what they have now, all engines behind one address."""
        here = {place.worker.address: place.pool for place in places}
        found = [(pool, worker) for pool in {*here.values()} for worker in pool.workers if worker.address in here]
        await asyncio.gather(*(pool.ask_models(worker) for pool, worker in found if worker.up))

    async def _ask(self, exchange: Exchange, worker: Worker, raw: bytes | None = None) -> _Changed:
        """Have one worker do it. `raw`: another body than the client's."""
        if not worker.up:
            return _Changed(worker, why_not=worker.why_down or "down")
        head = exchange.head
        headers = [*head.headers, exchange.engine_id_header]
        headers += self._upstream.own_headers if head.key is not None else ()
        body = exchange.body.raw if raw is None else raw
        try:
            answer = await self._upstream.send(
                "POST", worker.address + head.target, headers, body, self._silence_timeout, fresh=True
            )
            kind, told = (answer.header("content-type") or "").encode(), await answer.read()
        except (Unreachable, Broken) as error:
            return _Changed(worker, why_not=str(error) or "it broke off")
        has_route = answer.status not in (404, 405) or b"adapter" in told.lower()  # the word is in what vLLM then says
        why_not = "" if _is_done(exchange, worker, answer.status, told, has_route=has_route) else _words(told)
        why_not = why_not if has_route else NO_ROUTE
        return _Changed(worker, answer.status, kind, told, why_not, has_route)


def _places(pool: WorkerPool) -> list[_Site]:
    """One for each address: engines behind the same one load together."""
    return list({worker.address: _Site(pool, worker) for worker in reversed(pool.workers)}.values())[::-1]


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


def _words(told: bytes) -> str:
    """A worker's error in a few words."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        told = json.loads(told)["error"]["message"].encode()
    return told.decode(errors="replace")[:MOST_CHARACTERS] or "it gives no reason"
