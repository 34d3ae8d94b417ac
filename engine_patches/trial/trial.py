"""Are hits right beside an engine's drafts, and do they leave the drafts as good as they were? The engine is asked.

Each prompt is answered recomputed, from the cache, and by a prefill, in which nothing is drafted: that is the engine
without drafts, and needs no second one. Every prompt has a salt of its own, so that no client finds what a trial left.
It cannot see: sampling at a temperature, preemption, adapters, images, structured output, and faults that all three
kinds of answers share.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from engine_patches.answers import compare, grain, spread
from engine_patches.scheduler import drafts
from engine_patches.scheduler.drafts import AcceptedDrafts, AcceptedPair, judge_pairs

# Prompts. Their ids are drawn apart from where special tokens lie, and phrases come again and again, so that a model
# has something to guess.
FIRST_ID, LAST_ID = 1000, 30_000  # of the vocabulary, as far as it goes; of a small one the upper three quarters
PHRASE, POOL = 24, 48  # tokens of a phrase, and ids that a prompt is made of
CHANGED = 1 / 12  # of a phrase's tokens, each time it comes
SHORT, LONG, ANSWER = 163, 448, 32  # tokens
BETWEEN = 40  # tokens of a turn behind an answer
LONGEST_EDGE = 8192  # tokens of a cache block whose end an answer is to cross
CACHE_SHARE = 1 / 4  # of the cache, that one prompt may take

# `edge`: its answer crosses the end of a cache block. `turn`: it goes on behind an answer. `together`: its state is
# written beside another one. `staggered`: while it is answered, others come and end, so that rows of a batch move.
KINDS = ("short", "long", "together", "edge", "turn", "staggered")

# What a verdict takes.
AGREEING, HITTING = 8, 6  # prompts, before hints are opened
MOST = 24  # prompts of a trial, with those that got no answer
TWICE = 2  # prompts on which answers have to differ, the second one new and of the same kind

# A prompt's logprobs take memory for the whole vocabulary at each of its tokens that are in one pass. Behind longer
# prompts, only some tokens are asked for, by a prefill each.
MOST_SCORED = 256  # tokens

# Answers beside which others begin and end (tokens), and one that begins when the first of them has ended.
STAGGERED, LATER = (8, 20, 40), 12

# What still counts as noise: so many times the largest difference between two recomputed answers, so many steps of the
# model's logits; differences up to `LEAST` are any arithmetic's, and none is beyond: four steps of bfloat16 logits
# beyond 32.
NOISES, STEPS, LEAST, BEYOND_NOISE = 3.0, 4.0, 1e-3, 1.0
RECENT = 32  # prompts whose noise counts

# Prompts that were recomputed three times before an answer can be called different, where no two answers of an engine
# are bit-equal: it may round at random, and three of one prompt may happen to lie close together.
NOISY_PROMPTS = 2

FEWEST_PARTED = 6  # prompts, before other tokens in most steps of most of them are no noise any more

DIFFERS = "answers from the cache differ from recomputed ones beside drafts"
DRAFTS = "vLLM itself answers otherwise with drafts here than without them"
NO_HITS = "too few trial prompts were found in the cache where they were foretold"
NO_ANSWERS = "the engine answers too few of its trial prompts"


class Facts(NamedTuple):
    """What prompts for an engine depend on. Lengths in tokens."""

    vocabulary: int
    longest: int  # prompt and answer
    cache: int  # that fit into it; 0: vLLM does not say
    block: int
    unit: int  # what a hit is a multiple of
    ahead: int  # past a state that a prefix has to share


class PromptEnded(Exception):
    """A client has come, or something has changed: the prompt is to be asked anew."""


class NoAnswer(Exception):
    """The engine refused, failed or took too long, or its answer cannot be compared. No prompt is in the message."""


class TrialQuestion(NamedTuple):
    prompt: Sequence[int]
    salt: str = ""  # empty: a fresh one, under which nothing is cached
    hint: int = 0  # tokens, up to which a state is asked for; 0: none
    tokens: int = ANSWER
    scored: bool = False  # with logprobs of the prompt
    as_client: bool = False  # as others ask now: on trial, no state is kept

    def foretold(self, facts: Facts) -> int:
        """Tokens that the next request with this prompt and salt is to find: whole units."""
        return max(0, self.hint - facts.ahead) // facts.unit * facts.unit


class TrialAnswer(NamedTuple):
    """What came of one; `top` are the likeliest tokens and their logprobs at each token."""

    tokens: Sequence[int]
    top: Sequence[dict[int, float]]
    cached: int = 0  # tokens of the prompt that came from the cache
    accepted: AcceptedDrafts = AcceptedDrafts()
    scores: Sequence[dict[int, float]] = ()  # of the prompt's tokens but the first


class TrialVerdict(NamedTuple):
    result: Literal["open", "closed", "no_hits"]  # the last one: hints stay off, and it may be tried again
    why: str = ""


def fresh_salt() -> str:
    """A salt under which no cache holds anything."""
    return os.urandom(16).hex()


def drawn(length: int, vocabulary: int, draw: random.Random) -> list[int]:
    pool = [draw.randrange(min(FIRST_ID, vocabulary // 4), min(LAST_ID, vocabulary)) for _ in range(POOL)]
    phrase = [draw.choice(pool) for _ in range(PHRASE)]
    prompt: list[int] = []
    while len(prompt) < length:
        prompt += [draw.choice(pool) if draw.random() < CHANGED else each for each in phrase]
    return prompt[:length]


def question_of(kind: str, facts: Facts, draw: random.Random) -> TrialQuestion:
    """One with a new prompt of this kind, which leaves room for answers and a turn, and at least a token to compute."""
    most = min(facts.longest - 4 * ANSWER - BETWEEN, int(facts.cache * CACHE_SHARE) or facts.longest)
    length = LONG if kind in ("long", "together") else SHORT
    if kind == "edge":
        half = ANSWER // 2
        length = next((each for each in range(facts.block - half, most, facts.block) if each >= SHORT), 0)
        if not 0 < length <= LONGEST_EDGE:
            length = SHORT
    length = max(2, min(length, most))
    return TrialQuestion(drawn(length, facts.vocabulary, draw), fresh_salt(), length - 1)


class Trial:
    """Of one engine. `ask` asks one prompt; once it has asked enough, it comes to a verdict."""

    def __init__(self, asker: Any, facts: Facts, draw: random.Random | None = None) -> None:
        """`asker`: `own_requests.OwnRequests`, whose `send` and `wait` raise `PromptEnded` or `NoAnswer`."""
        self._asker, self._facts, self._draw = asker, facts, draw or random.Random()
        self._kinds = itertools.cycle(KINDS)
        self._kind = next(self._kinds)  # of the next prompt
        self._last: TrialQuestion | None = None  # one whose prompt is in the cache
        self._spreads: deque[float] = deque(maxlen=RECENT)  # the largest difference of two recomputed answers
        self.asked = self.agreed = self.hits = self.differing = self.parted = self.unlike_free = 0  # prompts
        self.unanswered = 0
        self._one_at_a_time = False
        self._pairs: list[AcceptedPair] = []

    @property
    def figures(self) -> str:
        finding = judge_pairs(self._pairs, is_last=True)
        lost = f", {self.unanswered} got no answer" if self.unanswered else ""
        return (
            f"{self.agreed} of {self.asked} prompts agree{lost}, {self.hits} of them with a hit where foretold; "
            f"{finding.hit:.2f} drafts a step accepted behind hits, {finding.cold:.2f} without"
        )

    def ask(self, *, one_at_a_time: bool = False) -> TrialVerdict | None:
        """One prompt; beside clients its requests come `one_at_a_time`. Raises `PromptEnded`, then asks its kind again.

        One that got no answer is counted, and another kind comes instead.
        """
        self._one_at_a_time = one_at_a_time
        try:
            self._ask(self._kind)
        except NoAnswer:
            self._kind = next(self._kinds)
            self.unanswered += 1
            if self.asked + self.unanswered < MOST:
                raise
        finally:
            self._asker.keep_only(self._last.salt if self._last is not None else "")
        return self._verdict()

    def _ask(self, kind: str) -> None:
        own = question_of(kind, self._facts, self._draw)
        seeds = [own._replace(tokens=1)]
        if kind == "turn":
            (first,) = self._answers([own])
            more = drawn(BETWEEN, self._facts.vocabulary, self._draw)
            own, seeds = own._replace(prompt=[*own.prompt, *first.tokens, *more]), []
        uncached = own._replace(salt="")
        if kind == "together":
            seeds.append(uncached._replace(tokens=1))
        cold = self._answers([uncached])
        # Two in one batch, one of them as clients ask now: the same sums in other shapes, which round differently.
        cold += self._answers([uncached, TrialQuestion(own.prompt, as_client=True)])
        self._answers(seeds)
        hits = self._answers([own])
        hits.append(self._with_another(kind, own))
        if any(each.cached for each in cold):
            raise NoAnswer("recomputed answers came from a cache")
        # As where an answer depends on which drafts were right: what is wrong must not count as noise.
        unsteady = spread(cold) > BEYOND_NOISE
        if not unsteady:
            self._spreads.append(spread(cold))
        free = self._without_drafts(own.prompt, cold)
        self._learn_noise(own.prompt)

        noise = max(NOISES * max(self._spreads, default=0.0), STEPS * max(map(grain, cold)), LEAST)
        bound = min(noise, BEYOND_NOISE)  # beside these answers
        off = max(min(compare(one, other).error for other in cold) for one in hits)
        differs, unlike_free = not unsteady and off > bound, unsteady or free > bound
        foretold = own.foretold(self._facts)
        found = foretold > 0 and all(each.cached >= foretold for each in hits)
        self._last = own
        self.asked += 1
        self.agreed += not differs and not unlike_free
        self.hits += found
        self.differing += differs
        self.parted += _part(hits, cold)
        self.unlike_free += unlike_free
        if found:
            sums = (AcceptedDrafts.of(each.accepted for each in some) for some in (cold, hits))
            self._pairs.append(AcceptedPair(*sums))
        if not differs and not unlike_free:
            self._kind = next(self._kinds)

    def _answers(self, questions: Sequence[TrialQuestion]) -> list[TrialAnswer]:
        if self._one_at_a_time:
            return [self._asker.wait(self._asker.send(each)) for each in questions]
        sent = [self._asker.send(each) for each in questions]
        return [self._asker.wait(each) for each in sent]

    def _with_another(self, kind: str, own: TrialQuestion) -> TrialAnswer:
        """The answer from the cache, in a batch with another hit or several."""
        if self._one_at_a_time:
            return self._answers([own])[0]
        another = self._last or own
        first, *rest = STAGGERED if kind == "staggered" else (ANSWER,)
        sent = [self._asker.send(each) for each in (another._replace(tokens=first), own)]
        sent += [self._asker.send(another._replace(tokens=each)) for each in rest]
        self._asker.wait(sent[0])
        if rest:
            sent.append(self._asker.send(another._replace(tokens=LATER)))
        answers: list[TrialAnswer] = [self._asker.wait(each) for each in sent[1:]]
        return answers[0]

    def _without_drafts(self, prompt: Sequence[int], cold: Sequence[TrialAnswer]) -> float:
        """How far the engine without drafts is from the nearest of these answers, which are recomputed.

        A prefill drafts nothing, and one that is asked for logprobs of its prompt reads nothing from the cache.
        """
        first = cold[0]
        if len(prompt) + len(first.tokens) <= MOST_SCORED:
            (answer,) = self._answers([TrialQuestion([*prompt, *first.tokens], tokens=1, scored=True)])
            if answer.scores:  # not every model runner gives them
                free = TrialAnswer(first.tokens, answer.scores[-len(first.tokens) :])
                return min(compare(free, each).error for each in cold if [*each.tokens] == [*first.tokens])
        error, last = 0.0, len(first.tokens) - 1
        for at in sorted({last // 4, last * 5 // 8, last}):
            (free,) = self._answers([TrialQuestion([*prompt, *first.tokens[:at]], tokens=1)])
            there = TrialAnswer(first.tokens[at : at + 1], first.top[at : at + 1])
            error = max(error, compare(free, there).error)
        return error

    def _learn_noise(self, prompt: Sequence[int]) -> None:
        """Recompute beginnings of this prompt, until it is known."""
        for part in range(2, NOISY_PROMPTS + 2):
            if not max(self._spreads, default=0.0) or len(self._spreads) >= NOISY_PROMPTS:
                return
            shorter = TrialQuestion(prompt[: max(1, len(prompt) * (part - 1) // part)], as_client=True)
            answers = [self._answers([shorter])[0] for _ in range(3)]
            if not any(each.cached for each in answers):
                self._spreads.append(spread(answers))

    def _verdict(self) -> TrialVerdict | None:
        is_last = self.asked + self.unanswered >= MOST
        if self.differing >= TWICE or (self.asked >= FEWEST_PARTED and self.parted > self.asked / 2):
            return TrialVerdict("closed", DIFFERS)
        if self.unlike_free >= TWICE:
            return TrialVerdict("closed", DRAFTS)
        finding = judge_pairs(self._pairs, is_last=is_last)
        if finding.result == "worse":
            return TrialVerdict("closed", drafts.worse(finding.hit, finding.cold, "on the same prompts"))
        if self.agreed >= AGREEING and self.hits >= HITTING and finding.result == "fine":
            return TrialVerdict("open")
        if not is_last:
            return None
        return TrialVerdict("no_hits", NO_ANSWERS if self.unanswered > self.asked else NO_HITS)


def _part(hits: Sequence[TrialAnswer], cold: Sequence[TrialAnswer]) -> bool:
    """Whether answers from the cache have other tokens in most steps, where recomputed ones have not."""

    def parts(one: TrialAnswer, other: TrialAnswer) -> bool:
        at = compare(one, other).token
        return at is not None and at < len(one.tokens) / 2

    return all(itertools.starmap(parts, itertools.product(hits, cold))) and not any(
        itertools.starmap(parts, itertools.combinations(cold, 2))
    )
