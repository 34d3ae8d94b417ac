"""Whether answers from the cache are right: in idle moments, shared prompts are continued greedily and compared.

An answer from the cache is compared with recomputed ones, and judged by how far recomputed answers differ from each
other on that engine. A worker whose answers differ by more gets no more hints until an operator resets the check or
restarts the gateway, and nothing it held is found again. If what vLLM then caches by itself differs, too, nothing is
taken from the worker's cache at all. Replays are greedy, however clients sample.

A client's request ends a check once the engine's running step is finished. Recomputed prompts are of no use to clients
and take room from theirs, so between two requests of clients they fill a small part of the cache at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cachetools import FIFOCache
from xxhash import xxh3_64_hexdigest

from proxy.boundaries.boundary import resolve
from proxy.boundaries.renderer import RenderFailed
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses
from proxy.errors import BadRequest
from proxy.fleet import worker_metrics
from proxy.fleet.answer_compare import (
    Continuation,
    Judgement,
    Noise,
    Unanswered,
    completion_request,
    continuation,
    judge,
)
from proxy.fleet.hot_prefixes import WarmupRequest, WarmupSet
from proxy.fleet.part import Change, Part
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import TRIAL, Worker, fresh_salt, prompt_of
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.json_body import parse_object
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.settings import Settings

logger = logging.getLogger("seamark.self_check")

POLL_SECONDS = 0.25  # between two searches for an idle worker

# Seconds of rest for each second of a check, which so takes at most a fiftieth of a worker's idle time. A new worker
# rests less, because most causes of wrong answers are there from the start.
REST, REST_AT_FIRST = 49.0, 9.0

FIRST = 16  # checks of a new worker
IDLE_SECONDS = 3.0  # that a worker is without a request before a check
CACHE_SHARE = 1 / 16  # of the cache, that recomputed prompts may take between two requests of clients
MOST_IN_A_ROW = 16  # checks without a client's request between them; then an unused worker is left alone
CHECK_SECONDS = 120.0  # for a check; then it has failed, and the worker is left alone
MOST_RECOMPUTED = 3  # times that one comparison may compute a prompt
REMEMBERED = 256  # prompts that were checked


@dataclass
class _Watched:
    """What is known of a worker here, and when it is idle."""

    checks: int = 0  # since it started, or was last quarantined
    boot: str = ""
    noise: Noise = field(default_factory=Noise)  # of this boot

    last_dispatched: int = -1  # as of `Worker`
    busy_at: float = 0.0  # time.monotonic() when it last had a request
    next_at: float = 0.0  # time.monotonic() before which there is no turn
    in_a_row: int = 0
    recomputed: int = 0  # tokens, since the last request of a client


class _Cut(NamedTuple):
    prompt: Sequence[int]
    hint: Sequence[int]  # tokens
    salt: str | None


@dataclass(eq=False)
class SelfCheck(Part):
    name = "self_check"

    _settings: Settings
    _pool: WorkerPool
    _warmup: WarmupSet  # has the prompts to check
    _stored: StoredResponses  # that these continue
    _upstream: Upstream
    _metrics: Metrics
    _idle: IdleWork
    _distrust: Callable[[Worker], None]  # for one whose answers differ: nothing that it held can be used any more
    _watched: dict[str, _Watched] = field(default_factory=dict)
    # By boot and key of the prefix.
    _checked_at: FIFOCache[tuple[str, bytes], float] = field(default_factory=lambda: FIFOCache(REMEMBERED))
    checked: int = 0  # prompts judged
    differs: int = 0  # of them, beyond the noise

    @property
    def hints_off(self) -> bool:
        """Whether a worker gets no hints because its answers differed."""
        return any(not worker.hints_allowed for worker in self._pool.workers)

    @property
    def cache_off(self) -> bool:
        """Whether nothing is taken from a worker's cache, because its answers differed without hints, too."""
        return any(not worker.cache_allowed for worker in self._pool.workers)

    def reset(self) -> None:
        """An operator has watched to it: hints go out again."""
        for worker in self._pool.workers:
            worker.restore()
        logger.warning("hints are on again, by an operator")

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        if change is Change.REMOVED:
            self._watched.pop(worker.url, None)

    async def run(self) -> None:
        """Check idle workers, for ever, each in a task of its own: one that hangs keeps no other from its check."""
        checking: dict[str, asyncio.Task[None]] = {}
        try:
            while self._settings.self_check_interval:
                await asyncio.sleep(POLL_SECONDS)
                checking = {url: task for url, task in checking.items() if not task.done()}
                for worker in self._pool.workers:
                    if worker.url not in checking and self._is_due(worker):
                        work = self._check(worker, self._watched[worker.url])
                        checking[worker.url] = asyncio.create_task(work)
        finally:
            for task in checking.values():
                task.cancel()
            await asyncio.gather(*checking.values(), return_exceptions=True)

    def _is_due(self, worker: Worker) -> bool:
        """Whether a worker may be checked: it is without requests, and more may be recomputed before its next one."""
        watched, now = self._watched.setdefault(worker.url, _Watched()), time.monotonic()
        if worker.dispatched != watched.last_dispatched:
            watched.last_dispatched, watched.busy_at = worker.dispatched, now
            watched.in_a_row = watched.recomputed = 0
        if worker.inflight:
            watched.busy_at = now
        if worker.boot != watched.boot:
            watched.boot, watched.checks = worker.boot, 0
            watched.noise = Noise()  # of another engine
        fit = worker.up and worker.engine is not None and not worker.warming and worker.cache_allowed
        fit = fit and worker.draft_state != TRIAL  # its idle time is the engine's own
        is_idle = now - watched.busy_at >= IDLE_SECONDS and now >= watched.next_at
        return fit and is_idle and watched.in_a_row < MOST_IN_A_ROW and watched.recomputed < _allowance(worker)

    async def _check(self, worker: Worker, watched: _Watched) -> None:
        """Judge one prompt, unless a client's request comes meanwhile."""
        if (replay := self._next(worker)) is None:
            return
        await self._idle.lull()
        if worker.dispatched != watched.last_dispatched:
            return
        began, verdict = time.monotonic(), None
        working = worker.self_check = asyncio.create_task(self._judge(worker, replay, watched))
        try:
            await asyncio.wait((working,), timeout=CHECK_SECONDS)
            if not working.done():
                raise TimeoutError
            if not working.cancelled():  # by a client's request
                verdict = working.result()
        except (RenderFailed, BadRequest) as error:
            logger.info("self-check of worker %s: not judged (%s)", worker.name, type(error).__name__)
        except (TimeoutError, Unanswered, Unreachable, Broken, ExceptionGroup) as error:
            self._metrics.self_checks.labels("unanswered").inc()
            logger.info("self-check of worker %s: no answer (%s)", worker.name, type(error).__name__)
        except Exception as error:  # the kind alone: the message might hold prompt text
            logger.error("self-check of worker %s: %s", worker.name, type(error).__name__)
        finally:
            working.cancel()
            worker.self_check = None
            took = time.monotonic() - began
            rest = REST if watched.checks >= FIRST else REST_AT_FIRST
            watched.next_at = time.monotonic() + max(self._settings.self_check_interval, rest * took)
            watched.checks += 1
            watched.in_a_row += 1
            self._checked_at[_name(worker, replay)] = time.monotonic()
        if verdict is not None:
            self._settle(worker, verdict, watched)

    def _next(self, worker: Worker) -> WarmupRequest | None:
        """The prompt whose last check is the longest ago; of those never checked, the hottest."""
        hottest = [replay for replay in self._warmup.hottest(worker.names.templates) if replay.found.boundaries]
        checked = self._checked_at
        return min(hottest, key=lambda replay: checked.get(_name(worker, replay), 0.0), default=None)

    async def _judge(self, worker: Worker, replay: WarmupRequest, watched: _Watched) -> Judgement | None:
        """None if nothing came from the cache, or others use the worker. A difference is looked at twice."""
        timeout = self._settings.silence_timeout
        _, metrics = await self._upstream.fetch("GET", worker.address + "/metrics", timeout=timeout)
        if worker_metrics.read(metrics.decode(errors="replace")).requests:  # of others than this gateway's clients
            return None
        most = int(min(self._settings.self_check_tokens, _allowance(worker) / MOST_RECOMPUTED))
        if (cut := await self._cut(worker, replay, most)) is None:
            return None
        verdict = await self._compare(worker, replay.model, cut, watched)
        if verdict is not None and verdict.result == "differs":
            verdict = await self._compare(worker, replay.model, cut, watched)
        if verdict is None or verdict.result != "differs":
            return verdict
        logger.error(
            "worker %s: from its cache, prompt %s of %d tokens is continued otherwise than recomputed: "
            "answer %s against %s, first other token %s, logprobs off by %.3g, noise %.3g",
            worker.name,
            xxh3_64_hexdigest(repr(cut.prompt).encode()),
            len(cut.prompt),
            verdict.cached.hash,
            verdict.recomputed.hash,
            verdict.off.position,
            verdict.off.error,
            verdict.noise,
        )
        return verdict

    async def _cut(self, worker: Worker, replay: WarmupRequest, most: int) -> _Cut | None:
        """The first `most` tokens of a client's prompt; None if that is not all text. Raises what rendering does."""
        body = {**parse_object(replay.raw, *self._settings.json_limits), **replay.put}
        chat = chat_in(replay.endpoint, body, self._stored)
        if chat is None or chat.media:
            return None
        ids = await prompt_of(chat, worker)
        prompt = ids[:most]
        hint = sorted(at for at in set(resolve(worker.hint(replay.found), ids)) if 0 < at <= len(prompt))
        return _Cut(prompt, hint, worker.salt(body) or body.get("cache_salt"))

    async def _compare(self, worker: Worker, model: str, cut: _Cut, watched: _Watched) -> Judgement | None:
        prompt, hint, salt = cut

        async def ask(salt: str | None, hint: Sequence[int] = (), prompt: Sequence[int] = prompt) -> Continuation:
            request = completion_request(model, prompt, salt, hint)
            return await continuation(self._upstream, worker.address, request, self._settings.silence_timeout)

        async def recomputed(hint: Sequence[int] = (), prompt: Sequence[int] = prompt) -> Continuation:
            watched.recomputed += len(prompt)
            return await ask(fresh_salt(), hint, prompt)

        # First what clients left behind, then what this replay leaves: vLLM's own last block, which is copied for a
        # request that goes on from inside it.
        cached = [answer for answer in [await ask(salt, hint), await ask(salt, hint)] if answer.cached]
        if not cached:
            return None
        # Cut where the cached one was cut; mostly this one answer is enough.
        at = [cached[0].cached]
        answers = [await recomputed(at)]
        if not answers[0].cached and (verdict := judge(cached, answers, 0.0)).result == "same":
            watched.noise.excuses(cached, answers)
            return verdict
        # Two in one batch, one of them cut: the same sums in other shapes, which round differently.
        async with asyncio.TaskGroup() as group:
            batch = [group.create_task(recomputed(at)), group.create_task(recomputed())]
        answers += [task.result() for task in batch]
        if any(answer.cached for answer in answers):
            return None
        watched.noise.add(answers)
        verdict = judge(cached, answers, watched.noise.largest)
        if verdict.result == "differs" and not watched.noise.is_known:
            await watched.noise.learn(prompt, lambda part: recomputed(at if at[0] < len(part) else (), part))
            verdict = judge(cached, answers, watched.noise.largest)
        excused = watched.noise.excuses(cached, answers) or verdict.result == "same"
        return verdict if excused else verdict._replace(result="differs")

    def _settle(self, worker: Worker, verdict: Judgement, watched: _Watched) -> None:
        self.checked += 1
        self._metrics.self_checks.labels(verdict.result).inc()
        if verdict.result == "differs":
            self.differs += 1
            worker.quarantine()
            watched.checks = 0  # what vLLM now caches by itself is checked as closely
            self._distrust(worker)
            logger.error(
                "worker %s gets no more hints, and %s. Restart it; POST /seamark/self-check/reset, or a restart of the "
                "gateway, turns hints on again",
                worker.name,
                "nothing it held is found" if worker.cache_allowed else "nothing is taken from its cache",
            )


def _name(worker: Worker, replay: WarmupRequest) -> tuple[str, bytes]:
    return worker.boot, replay.found.boundaries[-1].key


def _allowance(worker: Worker) -> float:
    """Tokens that may be recomputed between two requests of clients."""
    tokens = worker.probed.metrics.cache_tokens
    return tokens * CACHE_SHARE if tokens else float("inf")
