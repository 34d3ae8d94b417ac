"""What requests lose at workers without the plugin: tokens that could have been cached, seconds, and why.

All of it happens after an answer has gone by, one request at a time: nothing that a client or a worker sees is changed,
and no request waits. Texts wait here within `text_bytes`, and what does not fit goes unjudged and is counted.

Where answers do not say what was cached (vLLM without `--enable-prompt-tokens-details`, streams that nobody asked for
usage), the worker's own count of hits does: what others did not report of it is taken as theirs, in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.boundaries.boundary import Found, worth_sending
from proxy.boundaries.renderer import RenderFailed
from proxy.chat.chat import Chat
from proxy.fleet.worker import Worker, prompt_of
from proxy.metrics import Metrics
from proxy.observability.prefill_cost import NOTHING, CostLearner, TokenWork
from proxy.observability.reasons import Explanation
from proxy.observability.request_diff import RememberedRequest, RequestMemory
from proxy.routing.prefix_index import PrefixIndex
from proxy.settings import Settings

logger = logging.getLogger("seamark.shadow")

# Tokens: what the plugin sets for most hybrids. For gated delta nets it is 64, and a loss is told up to 48 too long.
MATCH_UNIT = 16

MAX_WAITING = 256

# Seconds of rest for each second of rendering: at most a fifth of one of the worker's cores is taken for it.
REST = 4.0

LOOK_SECONDS = 0.2  # between two glances whether a worker has told its hits

# Why tokens were lost that the plugin would have saved. Of the others it would have saved none by itself.
CURED = "unpatched"


class AnsweredRequest(NamedTuple):
    """A request that a worker without the plugin has answered; lengths in tokens."""

    chat: Chat | None  # None: no boundaries are sought in it
    worker: Worker
    boot: str
    model: str  # label
    size: int  # bytes of its body
    prompt: int | None  # None where its answer does not say
    cached: int | None  # the same
    seconds: float | None  # to its first token; None where that cannot be told from outside
    alone: bool
    owner: str | None  # the API key it came with
    explanation: Explanation | None
    at: float  # time.perf_counter() when it had been answered


class ReadPrompt(NamedTuple):
    """What is known of an answered request's prompt."""

    found: Found
    recent: RememberedRequest | None = None


# Finds the boundaries of a chat of so many bytes that a worker has answered to the owner of an API key.
FindBoundaries = Callable[[Chat, Worker, int, str | None], Awaitable[ReadPrompt]]


@dataclass
class _Known:
    """What has been learnt of a worker since it was started."""

    boot: str
    hits_told: int  # tokens of its cache's hits that are some request's, as far as known
    pace: CostLearner = field(default_factory=CostLearner)


class Shadow:
    """One per gateway; `run` beside the requests."""

    def __init__(
        self,
        settings: Settings,
        find_boundaries: FindBoundaries,
        recent: RequestMemory,
        metrics: Metrics,
        boots: Callable[[], Sequence[str]],
    ) -> None:
        """`boots`: identities of the workers that run."""
        self._find_boundaries = find_boundaries
        self._recent = recent
        self._metrics = metrics
        self._boots = boots
        self._budget = settings.boundary_budget
        self._room = settings.text_bytes // 8
        self._prefix_index = PrefixIndex(settings.memory_bytes // 8)  # what workers would hold if they had the plugin
        self._waiting: deque[AnsweredRequest] = deque()
        self.held = 0  # bytes of requests that wait
        self._came = asyncio.Event()
        self._patience = 3 * settings.health_interval  # seconds for a worker's next look
        self._known: dict[str, _Known] = {}  # by worker
        self._untold = 0  # requests judged whose answers did not say what was cached
        self._unpriced: dict[
            tuple[str, str, str], TokenWork
        ] = {}  # by worker, model, reason: while its pace is unknown
        self._tokens: Counter[str] = Counter()  # lost, by reason
        self._seconds: dict[str, float] = {}
        self._results: Counter[str] = Counter()
        self._began = time.monotonic()

    def add(self, request: AnsweredRequest) -> None:
        """A worker without the plugin has answered: judge that later."""
        if request.cached is not None:
            self._of(request.worker).hits_told += request.cached
        if request.chat is None:
            return
        if request.cached is None and request.worker.hits is None:
            self._count("no_usage")
            return
        if request.cached is not None and request.prompt is not None and request.seconds is not None:
            self._of(request.worker).pace.took(request.prompt, request.cached, request.seconds, request.alone)
        if len(self._waiting) >= MAX_WAITING or self.held + request.size > self._room:
            self._count("no_room")
            return
        self._waiting.append(request)
        self.held += request.size
        self._came.set()

    async def run(self) -> None:
        """Judge what was answered, for ever."""
        while True:
            await self._came.wait()
            while self._waiting:
                seen = self._waiting.popleft()
                took = 0.0
                try:
                    took = await self._judge(seen)
                except Exception as error:  # the kind alone: the message might hold prompt text
                    logger.error("judging a request: %s", type(error).__name__)
                    self._count("failed")
                finally:
                    self.held -= seen.size
                await asyncio.sleep(took * REST)
            self._came.clear()

    def status(self) -> dict[str, Any]:
        """For `/seamark/status`; seconds are those of prefill, by what was learnt of each worker."""
        lines = {name: known.pace.line for name, known in self._known.items()}
        return {
            "watched_seconds": time.monotonic() - self._began,
            "requests": dict(self._results),
            "lost": {
                reason: {"tokens": tokens, "seconds": self._seconds.get(reason, 0.0)}
                for reason, tokens in self._tokens.items()
            },
            "plugin_would_save": self.would_save(),
            "tokens_without_seconds": round(sum(work.tokens for work in self._unpriced.values())),
            "cached_not_told": self._untold,
            "waiting": len(self._waiting),
            "learnt": {name: line._asdict() for name, line in lines.items() if line is not None},
        }

    def would_save(self) -> dict[str, Any]:
        """What the plugin would have saved so far: tokens and, as far as these are known, seconds."""
        return {"tokens": self._tokens[CURED], "seconds": self._seconds.get(CURED, 0.0)}

    def forget(self, worker: Worker) -> None:
        """It was taken out; what it lost before its pace was known stays without seconds."""
        self._known.pop(worker.name, None)
        self._unpriced = {account: work for account, work in self._unpriced.items() if account[0] != worker.name}

    @property
    def judged(self) -> int:
        """Requests."""
        return self._results["judged"]

    async def _judge(self, seen: AnsweredRequest) -> float:
        """Seconds that rendering for it took."""
        if seen.cached is None and not await self._looked_since(seen):
            self._count("no_usage")
            return 0.0
        began = time.perf_counter()
        looked = await self._find_boundaries(seen.chat, seen.worker, seen.size, seen.owner)
        found = looked.found
        if found.failure is not None:
            self._count(found.failure)
            return time.perf_counter() - began if found.renders else 0.0
        prompt, renders = seen.prompt, found.renders
        if prompt is None and seen.seconds is not None:
            if found.tokens is not None:
                prompt = len(found.tokens)
            elif self._of(seen.worker).pace.wants_more:
                renders += 1
                with contextlib.suppress(RenderFailed):  # then the pace is learnt from others
                    prompt = len(await prompt_of(seen.chat, seen.worker))
        took = time.perf_counter() - began if renders else 0.0
        cached = seen.cached if seen.cached is not None else self._taken_for(seen, found, prompt)
        self._note(seen, looked, cached)
        return took

    def _note(self, seen: AnsweredRequest, looked: ReadPrompt, cached: int) -> None:
        found, lost = looked.found, self._lost(seen, looked, cached)
        kept = worth_sending(found.boundaries, MATCH_UNIT, self._budget)
        self._prefix_index.record([boundary for boundary in found.boundaries if boundary.tokens in kept], seen.boot)
        self._count("judged")
        if (told := seen.explanation) is not None:
            told.lost = {reason: end - start for reason, (start, end) in lost.items()}
            told.boundaries = tuple((boundary.tokens, boundary.kind) for boundary in found.boundaries)
        for reason, (start, end) in lost.items():
            self._tokens[reason] += end - start
            self._metrics.shadow_lost_tokens.labels(seen.model, reason).inc(end - start)
            account = (seen.worker.name, seen.model, reason)
            self._unpriced[account] = self._unpriced.get(account, NOTHING) + TokenWork.between(start, end)
        self._put_prices(seen.worker)

    async def _looked_since(self, seen: AnsweredRequest) -> bool:
        """Wait until the worker has told its hits after this request; False where it will not, or has restarted."""
        worker = seen.worker
        while worker.probed_at <= seen.at and worker.boot == seen.boot:
            if time.perf_counter() > seen.at + self._patience:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return worker.boot == seen.boot and worker.hits is not None

    def _taken_for(self, seen: AnsweredRequest, found: Found, prompt: int | None) -> int:
        """Of the worker's hits that nobody has reported, those that this request can have had, tokens."""
        known, worker = self._of(seen.worker), seen.worker
        most = max(self._prefix_index.sent(found.prefixes, self._boots()), self._prefix_index.ever_sent(found.prefixes))
        taken = max(0, min(most, worker.hits - known.hits_told))
        known.hits_told += taken
        if not worker.inflight and not any(other.worker is worker for other in self._waiting):
            # Whatever is left was others': several samples of one prompt, clients that left, or went past the gateway.
            known.hits_told = max(known.hits_told, worker.hits)
        if prompt is not None and seen.seconds is not None:
            known.pace.took(prompt, taken, seen.seconds, seen.alone)
        self._untold += 1
        return taken

    def _lost(self, seen: AnsweredRequest, looked: ReadPrompt, had: int) -> dict[str, tuple[int, int]]:
        """Where what was lost begins and ends, tokens, by reason; each token under one: the nearest cause first."""
        found, sent = looked.found, self._prefix_index.sent
        lost: dict[str, tuple[int, int]] = {}

        def lose(reason: str, shareable: int) -> None:
            nonlocal had
            shareable = shareable // MATCH_UNIT * MATCH_UNIT
            if shareable > had:
                lost[reason] = (had, shareable)
                had = shareable

        lose(CURED, sent(found.prefixes, (seen.boot,)))
        lose("other_worker", sent(found.prefixes, self._boots()))
        lose("worker_restarted", self._prefix_index.ever_sent(found.prefixes))
        would_share = max((each.tokens for each in found.boundaries if each.key != found.turn_key), default=0)
        if looked.recent is not None and would_share // MATCH_UNIT * MATCH_UNIT > had:
            change = self._recent.change(looked.recent)
            if change is not None:
                lose("salt" if change.salt else "prefix_changed", would_share)
        return lost

    def _of(self, worker: Worker) -> _Known:
        known = self._known.get(worker.name)
        if known is None or known.boot != worker.boot:
            known = self._known[worker.name] = _Known(worker.boot, worker.hits_before or 0)
        return known

    def _put_prices(self, worker: Worker) -> None:
        """Tokens that were lost at `worker`, in seconds; those before its pace was known are made up for."""
        line = self._of(worker).pace.line
        if line is None:
            return
        for name in [name for name in self._unpriced if name[0] == worker.name]:
            _, model, reason = name
            seconds = line.seconds(self._unpriced.pop(name))
            self._seconds[reason] = self._seconds.get(reason, 0.0) + seconds
            self._metrics.shadow_lost_seconds.labels(model, reason).inc(seconds)

    def _count(self, result: str) -> None:
        self._results[result] += 1
        self._metrics.shadow_requests.labels(result).inc()
