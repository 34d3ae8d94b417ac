"""An engine that drafts, without a model: what follows a text is a function of it, and so are the drafts it accepts.

It keeps the states that it is asked for. Faults that a trial of its drafts, or a gateway's self-check, has to see can
be planted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_patches.scheduler.drafts import AcceptedDrafts
from engine_patches.trial.trial import Facts, NoAnswer, TrialAnswer, TrialQuestion, fresh_salt

UNIT, BLOCK = 16, 384  # tokens

DECODED = 16  # tokens behind which a fault of the drafts shows

FACTS = Facts(vocabulary=4096, longest=8192, cache=0, block=BLOCK, unit=UNIT, ahead=1)


@dataclass
class DraftingEngine:
    """One boot; change it between requests."""

    accepts: float = 0.6  # of drafts
    gap: float = 1.8  # logprob between the two likeliest tokens

    # Faults.
    hits_off: float = 0.0  # of the second one's logprob behind a hit, as of a state that lies a unit early
    drafts_off: float = 0.0  # of that which was computed while drafting, some tokens behind the prompt
    accepts_on_hits: float | None = None  # of drafts behind a hit; None: as many
    finds_hits: bool = True
    scores_prompts: bool = True  # it gives logprobs of prompts
    refuses_from: int = 2**31  # tokens of a prompt
    noise: float = 0.0  # standard deviation of what each decoded token, and a kept state, adds to logprobs at random

    draw: random.Random = field(default_factory=lambda: random.Random(1))
    asked: list[TrialQuestion] = field(default_factory=list)
    under_way: int = 0
    most: int = 0  # under way at once
    _states: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def send(self, question: TrialQuestion) -> TrialQuestion:
        self.asked.append(question)
        if len(question.prompt) >= self.refuses_from:
            raise NoAnswer("it is refused")
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return question

    def wait(self, sent: TrialQuestion) -> TrialAnswer:
        self.under_way -= 1
        return self.answer(sent)

    def keep_only(self, salt: str) -> None:
        """A prompt is over."""
        self._states = {each for each in self._states if each[0] == salt}

    def answer(self, question: TrialQuestion) -> TrialAnswer:
        """What it answers."""
        prompt, salt = list(question.prompt), question.salt or fresh_salt()
        cached = 0 if question.scored or not self.finds_hits else self._held(prompt, salt)
        if question.hint and not question.as_client:
            at = max(question.hint - FACTS.ahead, 0) // UNIT * UNIT
            self._states.add((salt, tuple(prompt[:at])))
        text, tops, drift = list(prompt), [], 0.0
        for number in range(question.tokens):
            drift += self.draw.gauss(0.0, self.noise) if self.noise and (number or cached) else 0.0
            off = (self.hits_off if cached else 0.0) + (self.drafts_off if number >= DECODED else 0.0)
            top = self._top(text, drift + off)
            tops.append(top)
            text.append(max(top, key=lambda token: top[token]))
        scores = []
        if question.scored and self.scores_prompts:
            scores = [{prompt[at]: -20.0, **self._top(prompt[:at], 0.0)} for at in range(1, len(prompt))]
        drafted = self._draft(text, len(prompt), is_hit=bool(cached))
        return TrialAnswer(text[len(prompt) :], tops, cached, drafted, scores)

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request for a completion of token ids."""
        (hint,) = (body.get("vllm_xargs") or {}).get("seamark_boundaries") or (0,)
        answer = self.answer(TrialQuestion(body["prompt"], str(body.get("cache_salt") or ""), hint, body["max_tokens"]))
        logprobs = {
            "tokens": [f"token_id:{token}" for token in answer.tokens],
            "top_logprobs": [{f"token_id:{token}": value for token, value in top.items()} for top in answer.top],
        }
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": answer.cached}}
        return {"choices": [{"logprobs": logprobs}], "usage": usage}

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        """In place of `Upstream`."""
        return (200, b"") if url.endswith("/metrics") else (200, json.dumps(self.complete(json.loads(body))).encode())

    def _held(self, prompt: Sequence[int], salt: str) -> int:
        positions = range((len(prompt) - 1) // UNIT * UNIT, 0, -UNIT)
        return next((at for at in positions if (salt, tuple(prompt[:at])) in self._states), 0)

    def _draft(self, text: Sequence[int], prompt: int, *, is_hit: bool) -> AcceptedDrafts:
        accepts = self.accepts if not is_hit or self.accepts_on_hits is None else self.accepts_on_hits
        steps = tokens = 0
        at = prompt + 1  # the first one comes from the prefill
        while at < len(text):
            right = int(_seeded(text[:at], "draft").random() < accepts)
            steps, tokens, at = steps + 1, tokens + right, at + 1 + right
        return AcceptedDrafts(steps, tokens)

    def _top(self, text: Sequence[int], off: float) -> dict[int, float]:
        """The likeliest tokens behind `text`. `off` moves the second one's logprob."""
        draw = _seeded(text, "next")
        best = -0.2 - draw.random() / 10
        values = [best, best - self.gap + off, *(-4.0 - number - draw.random() for number in range(3))]
        return dict(zip(draw.sample(range(16, 4096), 5), values, strict=True))


def _seeded(tokens: Sequence[int], what: str) -> random.Random:
    return random.Random(f"{what} {list(tokens[-4:])} {len(tokens)}")
