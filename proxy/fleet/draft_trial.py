"""Are hits right beside an engine's drafts, and do they leave the drafts as good as they were? The engine is asked.

Each prompt is answered recomputed, from the cache, and by a prefill, in which nothing is drafted: that is the engine
without drafts, and needs no second one. Every prompt has a salt of its own, so that no client finds what a trial left.
It cannot see: sampling at a temperature, preemption, adapters, images, structured output, and faults that all three
kinds of answers share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from proxy.fleet.answer_compare import (
    BEYOND_NOISE,
    TOP,
    Continuation,
    Noise,
    Unanswered,
    answer_to,
    bound_of,
    completion_request,
    distance,
    judge,
    read_continuation,
    scored,
    spread,
)
from proxy.fleet.draft_acceptance import AcceptedPair, judge_pairs
from proxy.fleet.draft_prompts import ANSWER, BUILT_IN, RANGES, TrialKind, TrialPrompt, built_in, drawn, kinds
from proxy.fleet.draft_reports import NAMED, PAUSE_SECONDS, DraftFeed
from proxy.fleet.worker import CLOSED, OPEN, Worker, fresh_salt
from proxy.fleet.worker_metrics import Accepted
from proxy.http.client import Headers, Upstream
from proxy.http.json_body import TRIAL, VERDICT

AGREEING, HITTING = 8, 6  # prompts, before hints are opened

MOST = 24  # prompts of a trial

TWICE = 2  # prompts on which answers have to differ, the second one new and of the same kind

# A prompt's logprobs take memory for the whole vocabulary at each of its tokens that are in one pass. Behind longer
# prompts, only some tokens are asked for, by a prefill each.
MOST_SCORED = 1024  # tokens

CACHE_SHARE = 1 / 4  # of the cache, that one prompt may take

BETWEEN = 40  # tokens of a turn behind an answer

# Answers beside which others begin and end (tokens), and one that begins when the first of them has ended.
STAGGERED, LATER = (8, 20, 40), 12

BELIEVED_SECONDS = 10.0  # until the feed has to show a verdict that was sent

MOST_WHY = 200  # characters of a reason

Result = Literal["open", "differs", "drafts", "drafts_worse", "no_hits", "no_counts"]


class TrialVerdict(NamedTuple):
    """What a trial comes to."""

    result: Result
    why: str = ""  # hints stay off, in words; empty if they are opened
    figures: str = ""

    @property
    def state(self) -> str:
        """That the engine is to be in."""
        return OPEN if self.result == "open" else CLOSED

    def command(self, gate_id: str) -> dict[str, Any]:
        """What tells it to the engine with this id."""
        why = "" if self.result == "open" else f":{self.why[:MOST_WHY]}"
        return {TRIAL: 1, VERDICT: f"{self.state}:{gate_id}{why}"}


DIFFERS = TrialVerdict("differs", "answers from the cache differ from recomputed ones beside drafts")
DRAFTS = TrialVerdict("drafts", "vLLM itself answers otherwise with drafts here than without them")
NO_HITS = TrialVerdict("no_hits", "too few trial prompts were found in the cache where they were foretold")
NO_COUNTS = TrialVerdict("no_counts", "the engine does not say how many drafts it accepts")


def worse(hit: float, cold: float, where: str) -> TrialVerdict:
    """Drafts are accepted less often behind hits; tokens of a step."""
    return TrialVerdict(
        "drafts_worse", f"{where}, {hit:.2f} drafts a step are accepted behind hits, {cold:.2f} without"
    )


class Asker:
    """Sends the requests of a trial to one worker."""

    def __init__(self, upstream: Upstream, worker: Worker, model: Any, own: str, timeout: float) -> None:
        """`own`: begins the names of its requests. `timeout` in seconds without a byte of an answer."""
        self._upstream = upstream
        self._worker = worker
        self._model = model
        self._own = own
        self._timeout = timeout

    async def ask(
        self,
        prompt: Sequence[int],
        salt: str | None = None,
        hint: Sequence[int] = (),
        *,
        tokens: int = ANSWER,
        more: Mapping[str, Any] = {},
        **fields: Any,
    ) -> tuple[str, Any]:
        """Its name, and the JSON of the answer; under a fresh salt unless one is given."""
        name = f"{self._own}-{os.urandom(8).hex()}"
        headers: Headers = self._worker.addressed([(b"x-request-id", name.encode())])
        salt = fresh_salt() if salt is None else salt
        request = completion_request(self._model, prompt, salt, hint, tokens=tokens, more=more, **fields)
        return name, await answer_to(self._upstream, self._worker.address, request, self._timeout, headers)

    async def without_drafts(self, prompt: Sequence[int], answers: Sequence[Continuation]) -> float:
        """How far the engine without drafts is from the nearest of these answers, which are recomputed.

        The largest difference of a logprob, at the answer's tokens. A prefill drafts nothing, and one that is asked for
        logprobs of its prompt reads nothing from the cache.
        """
        first = answers[0]
        if len(prompt) + len(first.steps) <= MOST_SCORED:
            with contextlib.suppress(Unanswered):  # not every frontend gives them
                ids = [*prompt, *first.ids]
                _, answer = await self.ask(ids, tokens=1, prompt_logprobs=TOP)
                free = scored(answer, first.ids)
                alike = [each for each in answers if each.ids == first.ids]
                return min(distance(free, each).error for each in alike)
        error = 0.0
        for at in sorted({len(first.steps) // 4, len(first.steps) * 5 // 8, len(first.steps) - 1}):
            _, answer = await self.ask([*prompt, *first.ids[:at]], tokens=1)
            there = Continuation((first.steps[at],), 0)
            error = max(error, distance(read_continuation(answer), there).error)
        return error


class _NamedAnswer(NamedTuple):
    """An answer, and the name of its request."""

    name: str
    answer: Continuation


class DraftTrial:
    """Of one engine process. `step` asks one prompt; once it has asked enough, it comes to a verdict."""

    def __init__(
        self,
        upstream: Upstream,
        worker: Worker,
        feed: DraftFeed,
        own: str,
        noise: Noise,
        timeout: float,
        draw: random.Random | None = None,
    ) -> None:
        """`own`: who tries, a word. `noise`: of this engine, as far as it is known."""
        self._worker = worker
        self._feed = feed
        self._noise = noise
        self._draw = draw or random.Random()
        self._model = next(iter(sorted(set(worker.names.templates.values()))), worker.names.base)
        self._asker = Asker(upstream, worker, self._model, f"{NAMED}{own}", timeout)
        self._kinds, self._again = kinds(), deque[TrialKind]()
        self._range: tuple[int, int] | None = None
        self._last: tuple[TrialPrompt, str] | None = None  # a prompt in the cache, and its salt
        self.asked = self.agreed = self.hits = self.differing = self.unlike_free = 0  # prompts
        self.pairs: list[AcceptedPair] = []
        self.began = time.monotonic()

    @property
    def figures(self) -> str:
        """In words."""
        finding = judge_pairs(self.pairs, is_last=True)
        return (
            f"{self.agreed} of {self.asked} prompts agree, {self.hits} of them with a hit where foretold; "
            f"{finding.hit:.2f} drafts a step accepted behind hits, {finding.cold:.2f} without"
        )

    async def step(self, clients: Sequence[TrialPrompt] = (), *, beside: bool = False) -> TrialVerdict | None:
        """Ask one prompt; `clients`: theirs, hottest first. `beside` their requests: one request at a time.

        Raises `Unanswered`, `Unreachable`, `Broken` or `ValueError`, after which the same kind is asked again.
        """
        if self._range is None:
            self._range = await self._known_ids()
        prompt = self._next(clients)
        await self._ask(prompt, beside=beside)
        return self._verdict()

    def _next(self, clients: Sequence[TrialPrompt]) -> TrialPrompt:
        if not self._again:
            turn = self.asked - len(BUILT_IN)
            if 0 <= turn < len(clients):
                return clients[turn]
            self._again.append(next(self._kinds))
        engine, metrics = self._worker.engine, self._worker.probed.metrics
        lengths = [each.get("max_model_len") for each in self._worker.probed.models]
        most = min((each for each in lengths if isinstance(each, int)), default=2**16) - 4 * ANSWER - BETWEEN
        most = min(most, int(metrics.cache_tokens * CACHE_SHARE) or most)
        block = engine.block_size if engine is not None else most
        return built_in(self._again[0], self._range or RANGES[0], block, most, self._draw)

    async def _known_ids(self) -> tuple[int, int]:
        """A range of ids that the worker's vocabulary has."""
        for ids in RANGES:
            try:
                await self._asker.ask(drawn(8, ids, self._draw), tokens=1)
            except Unanswered as error:
                if error.status != 400:
                    raise
            else:
                return ids
        raise Unanswered("no known token ids")

    async def _ask(self, prompt: TrialPrompt, *, beside: bool) -> None:
        salt, seeded = fresh_salt(), False
        if prompt.kind == "turn":
            first = await self._answer(prompt.ids, salt, [prompt.hint])
            more = drawn(BETWEEN, self._range or RANGES[0], self._draw)
            prompt = TrialPrompt("turn", [*prompt.ids, *first.answer.ids, *more], prompt.hint)
            seeded = True
        hint = [prompt.hint]
        cold = [await self._answer(prompt.ids, None, hint)]
        # Two in one batch, one of them as clients ask now: the same sums in other shapes, which round differently.
        cold += await self._all(
            (self._answer(prompt.ids, None, hint), self._answer(prompt.ids, None, trial=False)), beside=beside
        )
        if not seeded:
            seeds = [self._answer(prompt.ids, salt, hint, tokens=1)]
            if prompt.kind == "together":
                seeds.append(self._answer(prompt.ids, None, hint, tokens=1))
            await self._all(seeds, beside=beside)
        hits = [await self._answer(prompt.ids, salt, hint)]
        hits.append(await self._beside_another(prompt, salt, beside=beside))
        recomputed, cached = [each.answer for each in cold], [each.answer for each in hits]
        if any(each.cached for each in recomputed):
            raise Unanswered("recomputed answers came from a cache")
        # As where an answer depends on which drafts were right: what is wrong must not count as noise.
        unsteady = spread(recomputed) > BEYOND_NOISE
        if not unsteady:
            self._noise.add(recomputed)
        free = await self._asker.without_drafts(prompt.ids, recomputed)
        if not self._noise.is_known:
            await self._noise.learn(prompt.ids, self._recomputed)
        engine = self._worker.engine
        foretold = prompt.foretold(engine.match_unit, engine.ahead) if engine is not None else 0
        differs = not unsteady and judge(cached, recomputed, self._noise.largest).result == "differs"
        unlike_free = unsteady or free > bound_of(self._noise.largest, recomputed)
        found = foretold > 0 and all(each.cached >= foretold for each in cached)
        told = await self._feed.accepted([each.name for each in (*cold, *hits)])

        # Nothing is awaited from here on: a step that a client ended leaves nothing behind.
        self._last = (prompt, salt)
        self.asked += 1
        self.agreed += not differs and not unlike_free
        self.hits += found
        self.differing += differs
        self.unlike_free += unlike_free
        if found:
            sums = [sum((told.get(each.name, Accepted()) for each in some), Accepted()) for some in (cold, hits)]
            self.pairs.append(AcceptedPair(*sums))
        if prompt.kind != "client" and not differs and not unlike_free:
            self._again.popleft()

    async def _beside_another(self, prompt: TrialPrompt, salt: str, *, beside: bool) -> _NamedAnswer:
        """The prompt from the cache, in a batch with another hit or several."""
        if beside:
            return await self._answer(prompt.ids, salt, [prompt.hint])
        other, others_salt = self._last or (prompt, salt)

        async def another(*tokens: int) -> None:
            for each in tokens:
                await self._answer(other.ids, others_salt, [other.hint], tokens=each)

        first, *rest = STAGGERED if prompt.kind == "staggered" else (ANSWER,)
        async with asyncio.TaskGroup() as group:
            group.create_task(another(first, LATER) if rest else another(first))
            answer = group.create_task(self._answer(prompt.ids, salt, [prompt.hint]))
            for each in rest:
                group.create_task(another(each))
        return answer.result()

    async def _all(self, asked: Sequence[Coroutine[Any, Any, _NamedAnswer]], *, beside: bool) -> list[_NamedAnswer]:
        if beside:
            waiting, told = deque(asked), []
            try:
                while waiting:
                    told.append(await waiting.popleft())
            finally:
                for each in waiting:
                    each.close()
            return told
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in asked]
        return [task.result() for task in tasks]

    async def _answer(
        self,
        prompt: Sequence[int],
        salt: str | None,
        hint: Sequence[int] = (),
        *,
        tokens: int = ANSWER,
        trial: bool = True,
    ) -> _NamedAnswer:
        more = {TRIAL: 1} if trial else {}
        name, answer = await self._asker.ask(prompt, salt, hint if trial else (), tokens=tokens, more=more)
        return _NamedAnswer(name, read_continuation(answer))

    async def _recomputed(self, prompt: Sequence[int]) -> Continuation:
        return (await self._answer(prompt, None, trial=False)).answer

    def _verdict(self) -> TrialVerdict | None:
        if self.differing >= TWICE:
            return DIFFERS._replace(figures=self.figures)
        if self.unlike_free >= TWICE:
            return DRAFTS._replace(figures=self.figures)
        is_last = self.asked >= MOST
        finding = judge_pairs(self.pairs, is_last=is_last)
        if finding.result == "worse":
            return worse(finding.hit, finding.cold, "on the same prompts")._replace(figures=self.figures)
        if self.agreed >= AGREEING and self.hits >= HITTING and finding.result == "fine":
            verdict = TrialVerdict("open") if self._feed.counts else NO_COUNTS
            return verdict._replace(figures=self.figures)
        return NO_HITS._replace(figures=self.figures) if is_last else None

    async def send(self, verdict: TrialVerdict) -> bool:
        """Tell the engine; whether its feed says so afterwards."""
        await self._feed.read()
        if self._feed.gate is None:
            return False
        ids = drawn(8, self._range or await self._known_ids(), self._draw)
        await self._asker.ask(ids, tokens=1, more=verdict.command(self._feed.gate.id))
        until = time.monotonic() + BELIEVED_SECONDS
        while True:
            await self._feed.read()
            if self._feed.gate is not None and self._feed.gate.state == verdict.state:
                return True
            if self._feed.gate is None or time.monotonic() >= until:
                return False
            await asyncio.sleep(PAUSE_SECONDS)
