"""Shadow mode: what requests lose at workers without the plugin, in tokens and seconds, and why.

Requests are judged after their answers, one at a time: nothing that a client or a worker sees is changed, and no
request waits. Texts wait here within `text_bytes`; a request that does not fit goes unjudged and is counted.

If answers do not say what was cached (vLLM without `--enable-prompt-tokens-details`, streams that nobody asked for
usage), the worker's own count of hits does: hits that no answer reported belong to these requests, in their order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_digest

from proxy.boundaries.boundary import Found
from proxy.chat.chat import Chat
from proxy.fleet.part import Change, Part
from proxy.fleet.worker import Worker
from proxy.idle_work import IdleWork, Steps
from proxy.metrics import Metrics
from proxy.observability.explanations import Explanation
from proxy.observability.prefill_cost import NOTHING, CostLearner, TokenWork
from proxy.observability.request_diff import RememberedRequest, RequestMemory
from proxy.observability.totals import RollingSums
from proxy.routing.prefix_index import Prefix, PrefixIndex
from proxy.settings import Settings

logger = logging.getLogger("seamark.shadow")

# Tokens: what the plugin sets for most hybrids. Gated delta nets have 64, so a loss may come out up to 48 too long.
MATCH_UNIT = 16

MAX_WAITING = 256

# Seconds of rest for each second of rendering, which so takes at most a fifth of one of the worker's cores.
REST = 4.0

POLL_SECONDS = 0.2  # between two checks whether a worker has counted its hits

# Hashes of whole prefixes, unit by unit: four million tokens in units of 16, some 40 MB.
MAX_HASHES = 2**18

MIN_SHARED = 128  # tokens; a shorter shared beginning is not learnt

# The reason of the tokens that the plugin would have saved. It would have saved none of the others by itself.
CURED = "unpatched"

# Of those behind text that changed.
CHANGED = "prefix_changed"

# Of those that a plugin which is there would not have saved, since it refuses hints.
REFUSED = "hint_ignored"


class AnsweredRequest(msgspec.Struct):
    """A request that a worker without the plugin has answered; lengths in tokens."""

    chat: Chat | None  # None: no boundaries are sought in it
    worker: Worker
    boot: str
    model: str  # label
    size: int  # bytes of its body
    memory: int  # bytes that it takes parsed
    prompt: int | None  # None if its answer does not say
    cached: int | None  # the same
    seconds: float | None  # to its first token; None if that cannot be seen from outside
    alone: bool  # no other request was at the worker until then
    owner: str | None  # the API key it came with
    record: Explanation | None  # None: it was not read
    at: float = msgspec.field(default_factory=time.perf_counter)  # when it had been answered


class ReadPrompt(NamedTuple):
    found: Found  # its boundaries with their tokens
    remembered: RememberedRequest | None = None
    ids: Sequence[int] = ()  # token ids; none if it was not rendered


# Finds the boundaries of a chat that a worker has answered: its body's bytes, those it takes parsed, its API key.
FindBoundaries = Callable[[Chat, Worker, int, int, str | None], Awaitable[ReadPrompt]]


@dataclass
class _WorkerKnowledge:
    """What has been learnt of a worker since it was started, and what came before its cost was known."""

    boot: str | None = None
    hits_reported: int = 0  # tokens of its cache's hits that are known to be some request's
    cost: CostLearner = field(default_factory=CostLearner)
    requests: int = 0  # that were judged
    computed: TokenWork = NOTHING  # of their prompts
    # By model and reason.
    lost: defaultdict[tuple[str, str], TokenWork] = field(default_factory=lambda: defaultdict(lambda: NOTHING))


@dataclass(eq=False)
class Shadow(Part):
    name = "shadow"

    _settings: Settings
    _find_boundaries: FindBoundaries
    _recent: RequestMemory
    _metrics: Metrics
    _idle: IdleWork
    _boots: Callable[[], Sequence[str]]  # identities of the workers that run
    held: int = 0  # bytes of requests that wait
    _unreported: int = 0  # requests judged whose answers did not say what was cached
    _computed_tokens: int = 0
    _prefill_seconds: float = 0.0  # that judged requests took, by the cost models

    def __post_init__(self) -> None:
        # What workers would hold if they had the plugin, and what they would have learnt.
        self._prefix_index, self._shared = PrefixIndex(self._settings.memory_bytes // 8), SharedTokens(MATCH_UNIT)
        self._waiting, self._arrived = deque[AnsweredRequest](), asyncio.Event()
        self._known = defaultdict[str, _WorkerKnowledge](_WorkerKnowledge)  # by worker
        self.sums = RollingSums()  # what judged requests got, of that and what the plugin would have saved
        self._began = time.monotonic()

    def add(self, request: AnsweredRequest) -> None:
        """A worker without the plugin has answered: judge that later."""
        if request.cached is not None:
            self._knowledge_of(request.worker).hits_reported += request.cached
        if request.chat is None:
            return
        if request.cached is None and request.worker.probed.metrics.hits is None:
            self._metrics.shadow_requests[("no_usage",)] += 1
            return
        if request.cached is not None and request.prompt is not None and request.seconds is not None:
            cost = self._knowledge_of(request.worker).cost
            cost.observe(request.prompt, request.cached, request.seconds, request.alone)
        if len(self._waiting) >= MAX_WAITING or self.held + request.memory > self._settings.text_bytes // 8:
            self._metrics.shadow_requests[("no_room",)] += 1
            return
        self._waiting.append(request)
        self.held += request.memory
        self._arrived.set()

    async def run(self) -> None:
        while True:
            await self._arrived.wait()
            while self._waiting:
                request = self._waiting.popleft()
                took = 0.0
                try:
                    took = await self._judge(request)
                except Exception as error:  # the kind alone: the message might hold prompt text
                    logger.error("judging a request: %s", type(error).__name__)
                    self._metrics.shadow_requests[("failed",)] += 1
                finally:
                    self.held -= request.memory
                await asyncio.sleep(took * REST)
            self._arrived.clear()

    def status(self) -> dict[str, Any]:
        """For `/seamark/status`; seconds are those of prefill, by the cost model of each worker."""
        costs = {name: known.cost.model for name, known in self._known.items()}
        unpriced = sum(work.tokens for known in self._known.values() for work in known.lost.values())
        return {
            "watched_seconds": time.monotonic() - self._began,
            "requests": {result: int(number) for (result,), number in self._metrics.shadow_requests.items()},
            "lost": self._lost_by_reason(),
            "plugin_would_save": self.would_save(),
            "tokens_without_seconds": round(unpriced),
            "cached_not_told": self._unreported,
            "waiting": len(self._waiting),
            "learnt": {name: cost._asdict() for name, cost in costs.items() if cost is not None},
        }

    def would_save(self) -> dict[str, Any]:
        """Of what judged requests computed, what the plugin would have saved; seconds are 0 while no cost is known."""
        return {
            **self._lost_by_reason().get(CURED, {"tokens": 0, "seconds": 0.0}),
            "computed_tokens": self._computed_tokens,
            "prefill_seconds": self._prefill_seconds,
        }

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """Tokens that a removed worker lost before its cost was known stay without seconds."""
        if change is Change.REMOVED:
            self._known.pop(worker.name, None)

    @property
    def judged(self) -> int:
        return int(self._metrics.shadow_requests.get(("judged",), 0))

    def _lost_by_reason(self) -> dict[str, dict[str, Any]]:
        lost: dict[str, dict[str, Any]] = {}
        for (model, reason), tokens in self._metrics.shadow_lost_tokens.items():
            sums = lost.setdefault(reason, {"tokens": 0, "seconds": 0.0})
            sums["tokens"] += int(tokens)
            sums["seconds"] += self._metrics.shadow_lost_seconds.get((model, reason), 0.0)
        return lost

    async def _judge(self, request: AnsweredRequest) -> float:
        """Returns the seconds that rendering took."""
        if request.chat is None:
            return 0.0
        if request.cached is None and not await self._counted_since(request):
            self._metrics.shadow_requests[("no_usage",)] += 1
            return 0.0
        began = time.perf_counter()
        prompt = await self._find_boundaries(request.chat, request.worker, request.size, request.memory, request.owner)
        took = time.perf_counter() - began
        found = prompt.found
        if found.failure is not None:
            self._metrics.shadow_requests[(found.failure,)] += 1
            return took
        length = len(prompt.ids) if request.prompt is None else request.prompt
        cached = request.cached if request.cached is not None else self._hits_of(request, found, length)
        await self._idle.lull()
        await self._idle.finish(self._record(request, prompt, length, cached))
        return took

    def _record(self, request: AnsweredRequest, prompt: ReadPrompt, length: int, cached: int) -> Steps[None]:
        found, lost = prompt.found, (yield from self._lost(request, prompt, length, cached))
        self._prefix_index.record(found.boundaries, request.boot)
        self._metrics.shadow_requests[("judged",)] += 1
        length = max(length, cached, *(end for _, end in lost.values()))
        start, end = lost.get(CHANGED, (0, 0))
        self.sums.add(length, lost[CURED][1] if CURED in lost else cached, cached, end - start)
        self._computed_tokens += length - cached
        known = self._knowledge_of(request.worker)
        known.requests += 1
        known.computed += TokenWork.between(cached, length)
        if (record := request.record) is not None:
            if record.delivered is None:
                record.prompt, record.delivered = length, cached
            record.lost = {reason: end - start for reason, (start, end) in lost.items()}
            record.boundaries = tuple(replace(boundary, entry=boundary.tokens) for boundary in found.boundaries)
        for reason, (start, end) in lost.items():
            self._metrics.shadow_lost_tokens[request.model, reason] += end - start
            known.lost[request.model, reason] += TokenWork.between(start, end)
        self._price(known)

    async def _counted_since(self, request: AnsweredRequest) -> bool:
        """Wait until the worker has counted its hits after this request; False if it does not, or has restarted."""
        worker, patience = request.worker, 3 * self._settings.health_interval  # for its next probe
        while worker.probed.at <= request.at and worker.boot == request.boot:
            if time.perf_counter() > request.at + patience:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return worker.boot == request.boot and worker.probed.metrics.hits is not None

    def _hits_of(self, request: AnsweredRequest, found: Found, prompt: int) -> int:
        """The hits that this request can have had, tokens, among those of its worker that no answer has reported."""
        known, worker = self._knowledge_of(request.worker), request.worker
        hits = worker.probed.metrics.hits or 0
        index = self._prefix_index
        most = max(map(_tokens, index.look_up(found.prefixes, (), self._boots())[1:]))
        taken = max(0, min(most, hits - known.hits_reported))
        known.hits_reported += taken
        if not worker.inflight and not any(other.worker is worker for other in self._waiting):
            # The rest belongs to others: several samples of one prompt, clients that left, or went past the gateway.
            known.hits_reported = max(known.hits_reported, hits)
        if request.seconds is not None:
            known.cost.observe(prompt, taken, request.seconds, request.alone)
        self._unreported += 1
        return taken

    def _lost(
        self, request: AnsweredRequest, prompt: ReadPrompt, length: int, had: int
    ) -> Steps[dict[str, tuple[int, int]]]:
        """First and last position of what was lost, by reason; each token counts once, under its nearest cause."""
        found, sent = prompt.found, self._prefix_index.sent
        lost: dict[str, tuple[int, int]] = {}

        def lose(reason: str, shareable: int) -> None:
            nonlocal had
            shareable = shareable // MATCH_UNIT * MATCH_UNIT
            if shareable > had:
                lost[reason] = (had, shareable)
                had = shareable

        apart = repr((request.boot, request.chat.body.get("cache_salt") if request.chat is not None else None))
        learnt = self._shared.look(apart.encode(errors="surrogatepass"), prompt.ids)
        lose(REFUSED if request.worker.refused else CURED, max(_tokens(sent(found.prefixes, (request.boot,))), learnt))
        lose("other_worker", _tokens(sent(found.prefixes, self._boots())))
        lose("worker_restarted", _tokens(self._prefix_index.look_up(found.prefixes, (), ())[2]))
        would_share = max((each.tokens for each in found.boundaries if each.key != found.turn_key), default=0)
        if prompt.remembered is not None and would_share // MATCH_UNIT * MATCH_UNIT > had:
            change = yield from self._recent.seek_change(prompt.remembered, max(length, would_share), had)
            if change is not None:
                lose("salt" if change.is_salt else CHANGED, would_share)
        return lost

    def _knowledge_of(self, worker: Worker) -> _WorkerKnowledge:
        known = self._known[worker.name]
        if known.boot != worker.boot:
            known.boot, known.hits_reported, known.cost = worker.boot, worker.probed.hits_before or 0, CostLearner()
        return known

    def _price(self, known: _WorkerKnowledge) -> None:
        """Count in seconds what was lost and computed at a worker, from before its cost was known included."""
        cost = known.cost.model
        if cost is None:
            return
        for (model, reason), work in known.lost.items():
            self._metrics.shadow_lost_seconds[model, reason] += cost.seconds(work)
        self._prefill_seconds += known.requests * cost.floor_seconds + cost.seconds(known.computed)
        known.lost.clear()
        known.requests, known.computed = 0, NOTHING


def _tokens(prefix: Prefix | None) -> int:
    return prefix.tokens if prefix is not None else 0


class SharedTokens:
    """What an engine with the plugin would have learnt from prompts: where they part, by hashes of their tokens.

    The second prompt that begins like an earlier one shows where the two part, and the third finds a state there.
    Bounded; the oldest are forgotten first.
    """

    def __init__(self, unit: int, most: int = MAX_HASHES) -> None:
        """`unit`: the match unit in tokens. `most`: hashes that are kept."""
        self._unit = unit
        self._most = most
        self._prefixes: OrderedDict[bytes, bool] = OrderedDict()  # by hash: whether prompts have parted there

    def look(self, apart: bytes, ids: Sequence[int]) -> int:
        """Tokens of the deepest state that earlier prompts have led to; learns from this prompt, token ids `ids`.

        `apart` is what else parts the caches: the worker's boot, the salt.
        """
        held = shared = 0
        hashes = list(self._hashes(apart, ids[:-1]))  # the last token is always computed
        for number, name in enumerate(hashes, 1):
            parted = self._prefixes.get(name)
            if parted is None:
                break
            shared = number
            if parted:
                held = number
        if shared * self._unit >= MIN_SHARED:
            self._prefixes[hashes[shared - 1]] = True
        for name in hashes:
            self._prefixes.setdefault(name, False)
            self._prefixes.move_to_end(name)
        while len(self._prefixes) > self._most:
            self._prefixes.popitem(last=False)
        return held * self._unit

    def _hashes(self, apart: bytes, ids: Sequence[int]) -> Iterator[bytes]:
        name = apart
        for start in range(0, len(ids) - self._unit + 1, self._unit):
            name = xxh3_64_digest(name + array("Q", ids[start : start + self._unit]).tobytes())
            yield name


# What is said beside losses, by the field or the result that counts it.
BESIDE = {
    "waiting": "requests are still to be judged",
    "tokens_without_seconds": "of these tokens have no seconds yet: too few streams to learn from",
    "cached_not_told": "answers did not say what was cached: the worker's own total of hits was used",
    "no_usage": "requests not judged: neither the answers nor the worker's /metrics say what was cached",
    "no_room": "requests not judged: raise text_bytes",
}


def shadow_lines(shadow: Mapping[str, Any]) -> list[str]:
    """The part `shadow` of `/seamark/status` in words. Raises `KeyError` or `TypeError` for anything else."""
    seconds, results = shadow["watched_seconds"], dict(shadow["requests"])
    time = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"
    lines = [f"lost in {time}, {results.pop('judged', 0):,} requests judged:"]
    for reason, loss in sorted(shadow["lost"].items(), key=lambda item: -item[1]["tokens"]):
        cured = "   the plugin saves these" if reason == CURED else ""
        lines.append(f"    {loss['tokens']:>12,} tokens {loss['seconds']:>10.1f} s   {reason}{cured}")
    if not shadow["lost"]:
        lines.append("    nothing so far")
    counts = {name: shadow[name] for name in ("waiting", "tokens_without_seconds", "cached_not_told")} | results
    said = {name: BESIDE.get(name, f"requests not judged: {name}") for name in counts}
    return [*lines, *(f"    {count:,} {said[name]}" for name, count in counts.items() if count)]
