"""The first of two calls, where prompts are computed by other workers than those that answer: prefill and decode apart.

A prefill worker computes the prompt and says where it lies; the worker that answers takes it from there. What it says
is for this one request: it is kept nowhere, used once, and neither a client's nor told to one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any

from proxy.chat.chat import COMPLETIONS
from proxy.chat.reader import HINTED
from proxy.errors import NoWorker
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Slot, Worker
from proxy.http import asgi
from proxy.http.client import Answer, Broken, Stale, Unreachable, Upstream
from proxy.http.json_body import TRANSFERS
from proxy.metrics import Metrics
from proxy.pipeline.dispatch import Lease
from proxy.pipeline.request import ProxiedRequest, affinity_key
from proxy.routing.policy import choose
from proxy.routing.prefix_index import PrefixIndex
from proxy.settings import Settings

TRANSFER = TRANSFERS[0]

# vLLM's word to a prefill worker, and the plugin's: the other worker goes by the number of tokens that were computed.
PREFILL: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "seamark_stops": True}

# What asks for more of an answer than its one token has, or forbids so short a one.
_LEFT_OUT = ("stream_options", "logprobs", "top_logprobs", "min_tokens")

# Fields of requests whose prompt is computed several times, or has to be computed where it is answered.
_ALONE = ("previous_response_id", "prompt_logprobs", "echo", "background", "best_of", "use_beam_search")

# Until the workers know their own speed: a prompt of so many tokens is worth a second call.
ASSUMED_TOKENS = 512

# Calls of which it is remembered what they cost beside the computing.
REMEMBERED = 32

# What became of the first call.
LOADED, SHORT, FAILED, NO_PREFILL_WORKER = "sent", "short", "failed", "no_worker"


class Prefills:
    """One per gateway that has prefill workers."""

    def __init__(
        self, settings: Settings, pool: WorkerPool, upstream: Upstream, prefix_index: PrefixIndex, metrics: Metrics
    ) -> None:
        """`pool`: of prefill workers."""
        self._load_slack = settings.load_slack
        self._silence_timeout = settings.silence_timeout
        self._pool = pool
        self._upstream = upstream
        self._prefix_index = prefix_index
        self._results = metrics.prefills
        self._overhead: deque[float] = deque(maxlen=REMEMBERED)  # seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def transfer(self, request: ProxiedRequest, lease: Lease, headers: asgi.HeaderList) -> dict[str, Any] | None:
        """Parameters with which the leased worker takes the prompt from a prefill worker; None if it computes it.

        If the client leaves meanwhile, the prefill worker's blocks become free as soon as it can be told.
        """
        decoder = lease.worker
        if not _is_suitable(request, decoder):
            return None
        if not self._is_worth_it(lease.prefill_tokens, decoder):
            self._results.labels(SHORT).inc()
            return None
        worker = self._choose(request, decoder)
        if worker is None:
            self._results.labels(NO_PREFILL_WORKER).inc()
            return None
        began = time.perf_counter()
        slot = Slot(worker, lease.prefill_tokens)
        try:
            params = await self._ask(request, worker, decoder, headers)
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

    def _choose(self, request: ProxiedRequest, decoder: Worker) -> Worker | None:
        """A prefill worker of the model that names prompts as `decoder` does; recorded as chosen."""
        model = request.model
        if not self._pool.serving(model) or (decoder.serves(model) and not self._pool.lists(model)):
            return None  # an adapter that only the other workers have, among them
        try:
            workers = [worker for worker in self._pool.for_model(request.model) if _hand_over(worker, decoder)]
        except NoWorker:
            return None
        workers = [worker for worker in workers if worker.has_room]
        if not workers:
            return None
        found = request.prompt.found
        if found is None:
            return choose(workers, {}, self._load_slack)
        held = self._prefix_index.longest(found.prefixes, {worker.boot for worker in workers})
        together = affinity_key(request.client.headers, request.body.parsed)
        worker = choose(workers, held, self._load_slack, together, found.shared)
        self._prefix_index.record(found.boundaries, worker.boot, worker.hint(found))
        return worker

    async def _ask(
        self, request: ProxiedRequest, worker: Worker, decoder: Worker, headers: asgi.HeaderList
    ) -> dict[str, Any] | None:
        body, client = request.body, request.client
        put: dict[str, Any] = {"stream": False, TRANSFER: PREFILL} | {
            name: value
            for name, value in HINTED[client.endpoint].one_token.items()
            if name != "max_completion_tokens" or name in body.parsed
        }
        raw = body.for_prefill(worker.hint(request.prompt.found), put, _LEFT_OUT)
        try:
            response = await self._upstream.send(
                client.method, worker.address + client.target, worker.addressed(headers), raw, self._silence_timeout
            )
        except Stale:
            return None
        except Unreachable as error:
            self._pool.mark_down(worker, str(error))
            return None
        except Broken:
            self._pool.record_failure(worker, body.raw)
            return None
        worker.answered()
        # From here on its blocks are held for the answer, whether the client waits for it or not.
        reading = asyncio.create_task(_params_in(response))
        try:
            params = await asyncio.shield(reading)
        except asyncio.CancelledError:
            self._spawn(self._give_back(request, reading, decoder, headers))
            raise
        if params is None and response.status >= 500:
            self._pool.record_failure(worker, body.raw)
        elif response.status == 200:
            self._pool.record_success(worker)
        return params

    async def _give_back(
        self,
        request: ProxiedRequest,
        reading: asyncio.Task[dict[str, Any] | None],
        decoder: Worker,
        headers: asgi.HeaderList,
    ) -> None:
        """Nobody waits for the answer: a worker that takes the prompt and answers with one token sets it free."""
        params = await reading
        if params is not None:
            await self.release(request, decoder, params, headers)

    async def release(
        self, request: ProxiedRequest, decoder: Worker, params: dict[str, Any], headers: asgi.HeaderList
    ) -> None:
        """Have `decoder` take a prompt that nobody waits for: no other word reaches the worker that computed it."""
        put = {"stream": False, TRANSFER: params, **HINTED[request.client.endpoint].one_token}
        raw = request.body.for_prefill((), put, _LEFT_OUT)
        try:
            response = await self._upstream.send(
                request.client.method,
                decoder.address + request.client.target,
                decoder.addressed(headers),
                raw,
                self._silence_timeout,
            )
            async for _ in response.chunks():
                pass
        except (Broken, Unreachable, Stale):
            pass  # then its lease ends

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _params_in(response: Answer) -> dict[str, Any] | None:
    """The parameters for the second call; None if the answer has none."""
    try:
        answer = b"".join([piece async for piece in response.chunks()])
        params = json.loads(answer)[TRANSFER] if response.status == 200 else None
    except (Broken, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        response.close()
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None


def _is_suitable(request: ProxiedRequest, decoder: Worker) -> bool:
    """Whether its prompt is one, is computed once, and may be computed elsewhere."""
    client, body = request.client, request.body.parsed
    if client.method != "POST" or client.endpoint not in HINTED or not body:
        return False
    if decoder.engine is None or not decoder.engine.loads_prefills or not decoder.takes_hints:
        return False
    if decoder.cache.salt(body) is not None or body.get("n") not in (None, 1) or any(map(body.get, _ALONE)):
        return False
    prompt = body.get("prompt")
    return client.endpoint != COMPLETIONS or isinstance(prompt, str) or _is_ids(prompt)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _hand_over(worker: Worker, decoder: Worker) -> bool:
    """Whether `decoder` can take what `worker` computes."""
    mine, other = worker.engine, decoder.engine
    return (
        mine is not None
        and other is not None
        and mine.loads_prefills
        and (mine.match_unit, mine.version) == (other.match_unit, other.version)
    )
