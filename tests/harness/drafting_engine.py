"""An engine that drafts, without a model: what follows a text is a function of it, and so are the drafts it accepts.

It keeps states for trial requests, or for all once its gate is open, and takes commands, as the plugin does. Faults
that a trial has to see can be planted.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from tests.harness.probed import probed

TOP = 5

UNIT, BLOCK = 16, 384  # tokens

DECODED = 16  # tokens behind which a fault of the drafts shows


@dataclass
class DraftingEngine:
    """One boot; change it between requests."""

    state: str = "trial"
    id: str = "engine-1"
    why: str = ""
    ahead: int = 1  # tokens past a state that a prompt has to share
    vocabulary: int = 4096
    accepts: float = 0.6  # of drafts

    # Faults.
    hits_off: float = 0.0  # of logprobs behind a hit, as of a state that lies a unit early
    drafts_off: float = 0.0  # of logprobs that were computed while drafting, some tokens behind the prompt
    accepts_on_hits: float | None = None  # of drafts behind a hit; None: as many
    finds_hits: bool = True
    scores_prompts: bool = True  # it answers `prompt_logprobs`
    counts: bool = True  # it tells how many drafts were accepted
    obeys: bool = True  # commands change its state
    noise: float = 0.0  # standard deviation of what each decoded token, and a kept state, adds to logprobs at random

    draw: random.Random = field(default_factory=lambda: random.Random(1))
    asked: list[dict[str, Any]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    entries: list[tuple[str, int, tuple[int, int] | None]] = field(default_factory=list)  # id, cached, steps and tokens
    _states: set[tuple[str, int, bytes]] = field(default_factory=set)

    def complete(self, body: Mapping[str, Any], name: str = "") -> tuple[int, dict[str, Any]]:
        """The status and the answer to a request for a completion of token ids."""
        prompt, salt = list(body["prompt"]), str(body.get("cache_salt") or "")
        xargs = body.get("vllm_xargs") or {}
        self.asked.append(dict(body))
        if max(prompt) >= self.vocabulary:
            return 400, {"error": {"message": "Token id is out of vocabulary"}}
        self._obey(str(xargs.get("seamark_drafts", "")))
        scores = "prompt_logprobs" in body
        cached = 0 if scores or not self.finds_hits else self._held(prompt, salt)
        if xargs.get("seamark_trial") or self.state in ("open", "on"):
            for position in xargs.get("seamark_boundaries") or ():
                at = max(position - self.ahead, 0) // UNIT * UNIT
                self._states.add((salt, at, _name(prompt[:at])))
        text, tops, drift = list(prompt), [], 0.0
        for number in range(body["max_tokens"]):
            drift += self.draw.gauss(0.0, self.noise) if self.noise and (number or cached) else 0.0
            off = drift + (self.hits_off if cached else 0.0) + (self.drafts_off if number >= DECODED else 0.0)
            top = _top(text, self.vocabulary, off)
            tops.append(top)
            text.append(max(top, key=lambda token: top[token]))
        steps = self._draft(text, len(prompt), is_hit=bool(cached))
        self.entries.append((name, cached, steps))
        tokens = [f"token_id:{token}" for token in text[len(prompt) :]]
        logprobs = {
            "tokens": tokens,
            "top_logprobs": [{f"token_id:{token}": value for token, value in top.items()} for top in tops],
        }
        choice: dict[str, Any] = {"logprobs": logprobs}
        if scores and self.scores_prompts:
            choice["prompt_logprobs"] = [None, *(self._score(prompt, at) for at in range(1, len(prompt)))]
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
        return 200, {"choices": [choice], "usage": usage}

    def tell(self, after: int = 0) -> dict[str, Any]:
        """Its part of the feed: what is later than `after` entries."""
        told: dict[str, Any] = {
            "cursor": len(self.entries),
            "outcomes": [[name, "hit" if cached else "cold", cached] for name, cached, _ in self.entries[after:]],
            "drafts": {"state": self.state, "id": self.id, "why": self.why},
        }
        if self.counts:
            told["drafted"] = [[name, *steps] for name, _, steps in self.entries[after:] if steps is not None]
        return told

    def _obey(self, command: str) -> None:
        if command:
            self.commands.append(command)
        state, _, rest = command.partition(":")
        name, _, why = rest.partition(":")
        if self.obeys and state in ("open", "closed") and name == self.id:
            self.state, self.why = state, why

    def _held(self, prompt: Sequence[int], salt: str) -> int:
        positions = range(len(prompt) // UNIT * UNIT, 0, -UNIT)
        return next((at for at in positions if at < len(prompt) and (salt, at, _name(prompt[:at])) in self._states), 0)

    def _draft(self, text: Sequence[int], prompt: int, *, is_hit: bool) -> tuple[int, int] | None:
        accepts = self.accepts if not is_hit or self.accepts_on_hits is None else self.accepts_on_hits
        steps = tokens = 0
        at = prompt + 1  # the first one comes from the prefill
        while at < len(text):
            accepted = int(_seeded(text[:at], "draft").random() < accepts)
            steps, tokens, at = steps + 1, tokens + accepted, at + 1 + accepted
        return (steps, tokens) if steps else None

    def _score(self, text: Sequence[int], at: int) -> dict[str, Any]:
        top = _top(text[:at], self.vocabulary, 0.0)
        top.setdefault(text[at], -20.0)
        return {str(token): {"logprob": value, "rank": 1, "decoded_token": "x"} for token, value in top.items()}


def _name(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(repr(list(tokens)).encode()).digest()


def _seeded(tokens: Sequence[int], what: str) -> random.Random:
    return random.Random(f"{what} {list(tokens[-4:])} {len(tokens)}")


def _top(text: Sequence[int], vocabulary: int, off: float) -> dict[int, float]:
    """The likeliest tokens behind `text`. `off` moves the second one's logprob."""
    draw = _seeded(text, "next")
    tokens = draw.sample(range(16, min(vocabulary, 4096)), TOP)
    values = [-0.2 - draw.random() / 10, *(-2.0 - number - draw.random() for number in range(TOP - 1))]
    values[1] += off
    return dict(zip(tokens, values, strict=True))


class DraftingUpstream:
    """In place of `Upstream`, before one such engine."""

    def __init__(self, engine: DraftingEngine) -> None:
        self.engine = engine
        self.requests = 0  # of others, as its metrics tell
        self.reads = 0  # of its feed

    async def fetch(
        self,
        method: str,
        url: str,
        body: bytes = b"",
        timeout: float | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> tuple[int, bytes]:
        if url.endswith("/metrics"):
            return 200, b'vllm:num_requests_running{engine="0"} %d\n' % self.requests
        if "/seamark/outcomes" in url:
            self.reads += 1
            after = int(url.partition("after=")[2].partition("&")[0])
            return 200, json.dumps({"boot": "feed", **self.engine.tell(after)}).encode()
        status, answer = self.engine.complete(json.loads(body), dict(headers).get(b"x-request-id", b"").decode())
        return status, json.dumps(answer).encode()


def drafting_worker(ahead: int = 1, state: str = "trial") -> Worker:
    """What a gateway knows of a worker with such an engine."""

    async def render(body: Any, path: str = CHAT) -> TokenIds:
        raise AssertionError("a trial renders nothing")

    engine = EngineInfo("0.3.0", "0", match_unit=UNIT, block_size=BLOCK, ahead=ahead, drafts=state)
    return Worker("http://w", renderer=render, probed=probed("w#1", engine, "m"), up=True)
