"""The first of two calls, where prompts are computed by other workers than those that answer: prefill and decode apart.

A prefill worker computes the prompt and says where it lies; the worker that answers takes it from there. What it says
is for this one request: it is kept nowhere, used once, and neither a client's nor told to one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter

from proxy.chat.chat import COMPLETIONS
from proxy.chat.reader import HINTED
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Slot, Worker
from proxy.fleet.worker_metrics import TOLD
from proxy.http import asgi
from proxy.http.client import Answer, Broken, Stale, Unreachable, Upstream
from proxy.http.json_body import TRANSFERS
from proxy.idle_work import beside
from proxy.pipeline.exchange import Exchange, affinity_key
from proxy.routing.policy import choose
from proxy.routing.prefix_index import PrefixIndex
from proxy.settings import Settings

TRANSFER = TRANSFERS[0]

# vLLM's word to a prefill worker, and the plugin's: the other worker goes by the number of tokens that were computed.
PREFILL: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "seamark_stops": True}

# What asks for more of an answer than its one token has, or forbids so short a one.
_LEFT_OUT = ("stream_options", "logprobs", "top_logprobs", "min_tokens", "max_completion_tokens")

# Fields of requests whose prompt is computed several times, or has to be computed where it is answered.
_ALONE = ("previous_response_id", "prompt_logprobs", "echo", "background", "best_of", "use_beam_search")

# Until the workers know their own speed: a prompt of so many tokens is worth a second call.
ASSUMED_TOKENS = 512

REMEMBERED = 32  # calls of which it is remembered what they cost beside the computing

# What became of the first call.
LOADED, SHORT, FAILED, NO_PREFILL_WORKER = "sent", "short", "failed", "no_worker"


@dataclass(eq=False)
class Prefills:
    _settings: Settings
    _pool: WorkerPool  # of prefill workers
    _upstream: Upstream
    _prefix_index: PrefixIndex
    _results: Counter
    _overhead: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # seconds

    async def transfer(self, exchange: Exchange, headers: asgi.HeaderList) -> dict[str, Any] | None:
        """Parameters with which its worker takes the prompt from a prefill worker; None if it computes it.

        If the client leaves meanwhile, the prefill worker's blocks become free as soon as it can be told.
        """
        decoder, tokens = exchange.at, exchange.slot.prefill_tokens if exchange.slot is not None else 0
        if not _is_suitable(exchange, decoder):
            return None
        if not self._is_worth_it(tokens, decoder):
            self._results.labels(SHORT).inc()
            return None
        worker = self._choose(exchange, decoder)
        if worker is None:
            self._results.labels(NO_PREFILL_WORKER).inc()
            return None
        began = time.perf_counter()
        slot = Slot(worker, tokens)
        try:
            params = await self._ask(exchange, worker, decoder, headers)
        finally:
            slot.give_back()
        self._results.labels(FAILED if params is None else LOADED).inc()
        if params is not None:
            self._learn(worker, params, time.perf_counter() - began)
        return params

    def _is_worth_it(self, tokens: int, decoder: Worker) -> bool:
        """Whether to compute so many tokens takes the worker longer than to have them brought."""
        times = decoder.step_times
        if not times.known:
            return tokens >= ASSUMED_TOKENS
        # Both workers make a pass where one would do; and what calls have cost beside the computing.
        cost = times.pass_seconds + (statistics.median(self._overhead) if self._overhead else times.pass_seconds)
        return times.seconds(tokens) > cost

    def _learn(self, worker: Worker, params: Mapping[str, Any], seconds: float) -> None:
        computed, cached = params.get("remote_num_tokens"), params.get("remote_prefill_cached_tokens") or 0
        if worker.step_times.known and isinstance(computed, int) and isinstance(cached, int):
            self._overhead.append(max(0.0, seconds - worker.step_times.seconds(max(0, computed - cached))))

    def _choose(self, exchange: Exchange, decoder: Worker) -> Worker | None:
        """A prefill worker of the model that names prompts as `decoder` does; recorded as chosen."""
        model = exchange.model
        if not (serving := self._pool.serving(model)) or (decoder.serves(model) and not self._pool.lists(model)):
            return None  # an adapter that only the other workers have, among them
        fit = self._pool.for_model(model, serving)
        workers = [worker for worker in fit if worker.has_room and _hand_over(worker, decoder)]
        if not workers:
            return None
        found = exchange.prompt.found
        if found is None:
            return choose(workers, {}, self._settings.load_slack)
        held = self._prefix_index.longest(found.prefixes, {worker.boot for worker in workers})
        together = affinity_key(exchange.head.headers, exchange.body.parsed)
        worker = choose(workers, held, self._settings.load_slack, together, found.shared)
        self._prefix_index.record(found.boundaries, worker.boot, worker.hint(found))
        return worker

    async def _send(self, exchange: Exchange, worker: Worker, raw: bytes, headers: asgi.HeaderList) -> Answer:
        url, headers = worker.address + exchange.head.target, worker.addressed(headers)
        return await self._upstream.send(exchange.head.method, url, headers, raw, self._settings.silence_timeout)

    async def _ask(
        self, exchange: Exchange, worker: Worker, decoder: Worker, headers: asgi.HeaderList
    ) -> dict[str, Any] | None:
        body = exchange.body
        put = {"stream": False, TRANSFER: PREFILL, **HINTED[exchange.head.endpoint].one_token}
        raw = body.for_prefill(worker.hint(exchange.prompt.found), put, _LEFT_OUT)
        try:
            response = await self._send(exchange, worker, raw, headers)
        except Stale:
            return None
        except Unreachable as error:
            self._pool.mark_down(worker, str(error))
            return None
        except Broken:
            self._pool.record_failure(worker, body.raw)
            return None
        worker.answered_at = time.monotonic()
        # From here on its blocks are held for the answer, whether the client waits for it or not.
        reading = asyncio.create_task(_params_in(response))
        try:
            params = await asyncio.shield(reading)
        except asyncio.CancelledError:
            beside(self._give_back(exchange, reading, decoder, headers))
            raise
        if params is None and response.status >= 500:
            self._pool.record_failure(worker, body.raw)
        elif response.status == 200:
            self._pool.record_success(worker)
        return params

    async def _give_back(
        self, exchange: Exchange, reading: asyncio.Task[Any], decoder: Worker, headers: asgi.HeaderList
    ) -> None:
        """Nobody waits for the answer: `decoder` takes the prompt. No other word reaches the other worker."""
        if (params := await reading) is None:
            return
        put = {"stream": False, TRANSFER: params, **HINTED[exchange.head.endpoint].one_token}
        raw = exchange.body.for_prefill((), put, _LEFT_OUT)
        with (
            contextlib.suppress(Broken, Unreachable),  # then its lease ends
            contextlib.closing(await self._send(exchange, decoder, raw, headers)) as response,
        ):
            await response.read()


async def _params_in(response: Answer) -> dict[str, Any] | None:
    """The parameters for the second call; None if the answer has none."""
    try:
        answer = await response.read()
        params = json.loads(answer)[TRANSFER] if response.status == 200 else None
    except (Broken, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        response.close()
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None


def _is_suitable(exchange: Exchange, decoder: Worker) -> bool:
    """Whether its prompt is one, is computed once, and may be computed elsewhere."""
    head, body = exchange.head, exchange.body.parsed
    if head.method != "POST" or head.endpoint not in HINTED or not body:
        return False
    if decoder.engine is None or not decoder.engine.loads_prefills or not decoder.takes_hints:
        return False
    if exchange.keep and decoder.engine.keep != TOLD:
        return False
    if decoder.salt(body) is not None or body.get("n") not in (None, 1) or any(map(body.get, _ALONE)):
        return False
    prompt = body.get("prompt")
    is_ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    return head.endpoint != COMPLETIONS or isinstance(prompt, str) or is_ids


def _hand_over(worker: Worker, decoder: Worker) -> bool:
    """Whether `decoder` can take what `worker` computes."""
    mine, other = worker.engine, decoder.engine
    if mine is None or other is None or not mine.loads_prefills:
        return False
    return (mine.match_unit, mine.version, mine.keep) == (other.match_unit, other.version, other.keep)
