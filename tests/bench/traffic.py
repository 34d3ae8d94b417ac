"""Random requests of every sort that an engine has to bear: a stream fixed by its seed, so that a run can be repeated.

Chats grow on a few system prompts, completions of token ids bring hints of their own, good and bad. A part of the
requests is asked so that the answers can be judged; a part is left by its client before it has ended.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.bench.harness.client import CHAT, COMPLETION, MIN_TOKENS, TOP_LOGPROBS, prose
from tests.harness.bench_clients import Leave

TOKENS = range(64, 4000)  # plain words of the generated models

SYSTEM_WORDS = (20, 70, 150, 400, 700)

FAMILIES = (40, 163, 384, 470, 900, 1600)  # tokens of the prefixes that completions share

CONVERSATIONS = 40

TURNS = 4

SALTS = (None, None, None, None, "red", "blue")  # of requests on shared text

WEIRD_HINTS: Sequence[Any] = (
    *([], [-16], [0, 0, 0], [3], [10**9], [2**63 - 1], [400, 160, 32], [160, 160, 160, 161], [-5, 160, 10**12, 320]),
    *(["160"], [160.0, 320.5], list(range(16, 1600, 16)), 160, "160"),
)

# Fields that say how an answer is delivered or found, not what it is.
DELIVERY = ("stream", "cache_salt", "vllm_xargs")


@dataclass(frozen=True)
class Request:
    """One request to an engine or to the gateway in front of it."""

    kind: str
    path: str
    body: Mapping[str, Any]
    leave: Leave | None = None
    judged: bool = False
    must_miss: bool = False  # nothing of its prompt was ever sent with its salt

    @property
    def through_gateway(self) -> bool:
        """Chats go through the gateway; completions carry hints of their own, straight to the engine."""
        return self.path == CHAT

    @property
    def question(self) -> str:
        """Everything that decides the answer: requests with equal questions have one right answer."""
        return json.dumps([self.path, {name: self.body[name] for name in sorted(self.body) if name not in DELIVERY}])


@dataclass(frozen=True)
class Event:
    """Requests that belong together: all at once, or each after the one before."""

    requests: tuple[Request, ...]
    at_once: bool = False


@dataclass(frozen=True)
class Traffic:
    """`event(number)` is the same for the same seed, whatever came before."""

    seed: int

    @property
    def kinds(self) -> Mapping[str, tuple[int, Callable[[random.Random, int], Event]]]:
        """How often, and how each kind is drawn."""
        return {
            "chat": (30, self._chat),
            "hinted": (20, self._hinted),
            "odd hint": (12, self._odd_hint),
            "salts": (4, self._salts),
            "burst": (5, self._burst),
            "two answers": (6, self._two_answers),
            "prompt logprobs": (6, self._prompt_logprobs),
            "long": (8, self._long),
        }

    def event(self, number: int) -> Event:
        draw, kinds = random.Random(f"{self.seed} {number}"), self.kinds
        (kind,) = draw.choices(list(kinds), [weight for weight, _ in kinds.values()])
        event = kinds[kind][1](draw, number)
        return replace(event, requests=tuple(replace(request, kind=kind) for request in event.requests))

    def _chat(self, draw: random.Random, number: int) -> Event:
        which = draw.randrange(CONVERSATIONS)
        return Event((self._finished(draw, CHAT, {"messages": self._conversation(which, draw.randint(1, TURNS))}),))

    def _conversation(self, which: int, turns: int) -> list[Mapping[str, str]]:
        draw = random.Random(f"{self.seed} conversation {which}")
        system = draw.randrange(len(SYSTEM_WORDS))
        messages = [{"role": "system", "content": prose(SYSTEM_WORDS[system], 100 * self.seed + system)}]
        for turn in range(turns):
            if turn:
                messages.append({"role": "assistant", "content": prose(draw.randint(3, 80), draw.randrange(2**30))})
            text = f"{draw.choice('ABCDEFGH')}{which}: {prose(draw.choice((4, 15, 60, 200)), draw.randrange(2**30))}"
            messages.append({"role": "user", "content": text})
        return messages

    def _hinted(self, draw: random.Random, number: int) -> Event:
        prompt, shared = self._family_prompt(draw)
        hint = sorted({*draw.sample(range(16, shared + 1), draw.randint(0, 2)), shared})
        if draw.random() < 0.4:
            hint.append(len(prompt))
        return Event((self._finished(draw, COMPLETION, {"prompt": prompt, **_hint(hint)}),))

    def _family_prompt(self, draw: random.Random) -> tuple[list[int], int]:
        """A prompt (token ids) and how many of its tokens its family shares. Some end within a token of that."""
        family = draw.choice(FAMILIES)
        prefix = random.Random(f"{self.seed} family {family}").choices(TOKENS, k=family)
        own = random.Random(f"{self.seed} own {family} {draw.randrange(12)}")  # so few that whole prompts come again
        length = draw.choice((1, 2, own.randint(3, 60), own.randint(60, 400)))
        return [*prefix, *own.choices(TOKENS, k=length)], family

    def _odd_hint(self, draw: random.Random, number: int) -> Event:
        prompt, _ = self._family_prompt(draw)
        return Event((self._finished(draw, COMPLETION, {"prompt": prompt, **_hint(draw.choice(WEIRD_HINTS))}),))

    def _salts(self, draw: random.Random, number: int) -> Event:
        """A new text under one salt, twice; then under another and under none, where it has to be as new as ever."""
        if draw.random() < 0.5:
            system = {"role": "system", "content": f"Edition {number}. {prose(draw.randint(20, 400), number)}"}
            path, body = CHAT, {"messages": [system, {"role": "user", "content": "What is new?"}]}
        else:
            prompt = draw.choices(TOKENS, k=draw.randint(40, 900))
            path, body = COMPLETION, {"prompt": prompt, **_hint([len(prompt) - 8, len(prompt)])}
        salts = [f"{number} {name}" for name in ("one", "one", "two")]
        bodies = [*({**body, "cache_salt": salt} for salt in salts), body]
        requests = [_judged(Request("", path, each)) for each in bodies]
        return Event(tuple(replace(request, must_miss=index != 1) for index, request in enumerate(requests)))

    def _burst(self, draw: random.Random, number: int) -> Event:
        """Prompts of very different lengths on one new prefix, at once."""
        prefix = draw.choices(TOKENS, k=draw.randint(30, 1000))
        requests = []
        for _ in range(draw.randint(5, 10)):
            prompt = [*prefix, *draw.choices(TOKENS, k=int(2 ** draw.uniform(0, 9)))]
            requests.append(self._finished(draw, COMPLETION, {"prompt": prompt, **_hint([len(prefix)])}))
        return Event(tuple(requests), at_once=True)

    def _two_answers(self, draw: random.Random, number: int) -> Event:
        """Two requests with one prompt in the same step, each sampling the one token it may.

        vLLM 0.32 on a CPU dies of a seed where a prompt takes more than one step ("CPU Generator does not use offset").
        """
        sampling: dict[str, Any] = {"n": 2, "temperature": 0.8, "max_tokens": MIN_TOKENS // 2}
        prompt, shared = self._family_prompt(draw)
        request = Request("", COMPLETION, {"prompt": prompt, **_hint([shared])})
        if draw.random() < 0.5:
            request = Request("", CHAT, {"messages": self._conversation(draw.randrange(CONVERSATIONS), TURNS)})
        sampling["allowed_token_ids"] = [draw.choice(TOKENS)]
        request = _judged(request)
        return Event((replace(request, body={**request.body, **sampling}),))

    def _prompt_logprobs(self, draw: random.Random, number: int) -> Event:
        prompt, shared = self._family_prompt(draw)
        judged = _judged(Request("", COMPLETION, {"prompt": prompt, **_hint([shared, len(prompt)])}))
        return Event((replace(judged, body={**judged.body, "prompt_logprobs": 1, "max_tokens": 4}),))

    def _long(self, draw: random.Random, number: int) -> Event:
        """A prompt that nobody ever sends again: it pushes others out of the cache."""
        prompt = draw.choices(TOKENS, k=draw.randint(1200, 3500))
        hint = draw.choice(({}, _hint([draw.randint(16, len(prompt))]), _hint([len(prompt)])))
        return Event((self._finished(draw, COMPLETION, {"prompt": prompt, **hint}),))

    def _finished(self, draw: random.Random, path: str, body: Mapping[str, Any]) -> Request:
        """A request on `body` as drawn: judged, only answered, or left by its client."""
        salt = draw.choice(SALTS)
        request = Request("", path, body if salt is None else {**body, "cache_salt": salt})
        if draw.random() < 0.15:
            answer = {"temperature": 0, "max_tokens": draw.randint(16, 64), "ignore_eos": True, "stream": True}
            seconds, events = draw.choice((0.05, 1.5)) * draw.random(), draw.choice((1, draw.randint(2, 12)))
            leave = draw.choice((Leave(seconds=seconds), Leave(events=events)))
            return replace(request, body={**request.body, **answer}, leave=leave)
        request = replace(request, body={**request.body, "stream": draw.random() < 0.5})
        if draw.random() < 0.3:
            return _judged(request)
        answer = {"temperature": draw.choice((0, 0.9)), "max_tokens": draw.randint(1, 12)}
        return replace(request, body={**request.body, **answer})


def _hint(positions: Any) -> Mapping[str, Any]:
    return {"vllm_xargs": {"seamark_boundaries": positions}}


def _judged(request: Request) -> Request:
    """The same request, its answer greedy, long enough, and with everything a comparison needs."""
    logprobs = {"logprobs": TOP_LOGPROBS}
    if request.path == CHAT:
        logprobs = {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
    greedy = {"temperature": 0, "max_tokens": MIN_TOKENS, "ignore_eos": True, "return_tokens_as_token_ids": True}
    return replace(request, body={**request.body, **greedy, **logprobs}, judged=True)
