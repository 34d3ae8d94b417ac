"""`seamark bench mine`: what a stack that runs finds in its cache, asked as any OpenAI client would ask it.

Nothing is needed but a URL: prompts are made here, their lengths are the server's own count, times are those of its
streams, and accepted drafts are what its engines count. With `--against` a second stack is asked in turns, so that
whatever else the machine does meets both.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import open_client
from proxy.bench.harness.prompts import QUESTIONS, prose
from proxy.commands.parser import Parser
from proxy.config_files import base_url, read_secret, without_credentials
from proxy.errors import SettingsError, did_you_mean
from proxy.fleet import worker_metrics
from proxy.fleet.probe import models_in
from proxy.fleet.worker_metrics import Accepted

# What is asked.
LENGTHS = (500, 2000, 6000)  # tokens of shared system prompts
PAIRS = 3  # cold and warm requests of each length
FAN_OUT = 4  # requests at once on one new prefix
TURNS = 4  # of the conversation
SAMPLE_WORDS = 300  # of the prompt by which words are converted to tokens

# Tokens of an answer of which the first one alone is timed, and of one long enough to have a speed.
TIMED, ANSWER = 4, 32
HEADROOM = 512  # tokens of the context that a shared prompt leaves to questions and answers

# How long is waited.
PROBE_SECONDS = 60.0  # for the first, short answer
LOADING_SECONDS, ASK_AGAIN_SECONDS = 3600.0, 2.0  # of a model
METRICS_SECONDS = 5.0  # for the engines' counters, which a stack may not show

# What it means.
HITS, PARTLY = 0.9, 0.1  # parts of the shared tokens from which a stack is said to hit, and to hit in part
SOONER = 0.7  # warm over cold from which time alone shows a hit
REACH = 0.02  # seconds below which neither is said to be sooner
BURST = 0.005  # seconds within which a whole answer comes only if something held it back: that is no speed


class Unusable(Exception):
    """The stack cannot be measured; the text says why, and the cure if there is one."""


class MinedReply(NamedTuple):
    prompt_tokens: int
    cached_tokens: int | None  # None: not reported
    first_token: float  # seconds after sending
    text: str
    output_tokens: int = 0  # as the server counts them; 0: it does not
    last_token: float = 0.0  # seconds after sending

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens after the first one over the time after the first one; None if that is no speed."""
        seconds = self.last_token - self.first_token
        return (self.output_tokens - 1) / seconds if self.output_tokens > 1 and seconds > BURST else None


class MinedPair(NamedTuple):
    """Two requests with one new system prompt, one after the other."""

    cold: MinedReply
    warm: MinedReply


@dataclass
class Measured:
    bare: int = 0  # tokens of the same chat without a system prompt worth the name
    pairs: dict[int, list[MinedPair]] = field(default_factory=dict)  # by the length asked for, in tokens
    fan_out: list[MinedReply] = field(default_factory=list)
    turns: list[MinedReply] = field(default_factory=list)
    drafts: Accepted | None = None  # of this run; None: the engines' counters cannot be read, or began anew meanwhile

    @property
    def reported(self) -> bool:
        """Whether any answer says what came from the cache. Some servers leave a zero out."""
        replies = [reply for pairs in self.pairs.values() for pair in pairs for reply in pair]
        return any(reply.cached_tokens is not None for reply in (*replies, *self.fan_out, *self.turns))

    def shared(self, length: int) -> int:
        """Tokens that the pairs of a length share, some few too low: the template's own around them are not counted."""
        return round(statistics.median(pair.cold.prompt_tokens - self.bare for pair in self.pairs[length]))

    def hit(self, length: int) -> float | None:
        """The part of the shared tokens that the second request of a pair takes from the cache; the median, up to 1."""
        if not self.reported:
            return None
        return statistics.median(
            min(1.0, (pair.warm.cached_tokens or 0) / (pair.cold.prompt_tokens - self.bare))
            for pair in self.pairs[length]
        )

    @property
    def hit_overall(self) -> float | None:
        """The mean over all lengths."""
        return statistics.mean(self.hit(length) or 0.0 for length in self.pairs) if self.reported else None

    def first_token(self, length: int, which: int) -> float:
        """Seconds to the first token of first (0) or second (1) requests, the median."""
        return statistics.median(pair[which].first_token for pair in self.pairs[length])

    def speed(self, length: int, which: int) -> float | None:
        """Tokens per second of them, the median; None if none has one."""
        return _median(pair[which].tokens_per_second for pair in self.pairs[length])


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


class Stack:
    """An OpenAI-compatible server; `measured` fills up as answers come. Errors are `Unusable`."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        """`url` with `/v1` or without, with a scheme or without; without a `model`, the first one that is served."""
        self.url = base_url(url if "://" in url else f"http://{url}")
        self.shown = without_credentials(self.url)[0]
        self.model = model or ""
        self.context: int | None = None  # tokens, if the server says
        self.measured = Measured()
        self._words_per_token = 1.0
        self._models: list[str] = []
        self._has_key = api_key is not None
        headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        self.client = open_client(httpx.Timeout(None, connect=5.0), headers)

    async def find_model(self, say: Callable[[str], None]) -> None:
        """Read `/v1/models`; a stack that asks for patience, as a gateway before a loading vLLM does, is waited for."""
        answer = await self._models_answer()
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and "retry-after" in answer.headers:
            say(f"{self.shown} has no model yet; waiting up to {LOADING_SECONDS / 60:.0f} minutes")
            give_up = time.monotonic() + LOADING_SECONDS
            while answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < give_up:
                await asyncio.sleep(ASK_AGAIN_SECONDS)
                answer = await self._models_answer()
        if answer.status_code in (401, 403):
            raise self._error(answer.status_code, "")
        entries = models_in(answer.content) or []
        self._models = [entry["id"] for entry in entries]
        if not self.model and not self._models:
            unknown = f"{self.shown}/v1/models names no model (status {answer.status_code})"
            raise Unusable(f"{unknown}: is this an OpenAI-compatible API? If it is, give --model")
        self.model = self.model or self._models[0]
        lengths = (entry.get("max_model_len") for entry in entries if entry["id"] == self.model)
        self.context = next((length for length in lengths if isinstance(length, int)), None)

    async def _models_answer(self) -> httpx.Response:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                return await self.client.get(self.url + "/v1/models")
        except TimeoutError:
            raise Unusable(f"{self.shown} does not answer /v1/models within {PROBE_SECONDS:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None

    async def probe(self) -> None:
        """Two short requests, which show what is wrong with it, and what a word takes in tokens."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                bare = self.measured.bare = (await self.ask("Hi.", QUESTIONS[0])).prompt_tokens
                sample = (await self.ask(fresh(SAMPLE_WORDS), QUESTIONS[0])).prompt_tokens
        except TimeoutError:
            raise Unusable(f"{self.shown} gives no answer within {PROBE_SECONDS:.0f} s") from None
        if sample <= bare:
            raise Unusable(f"{self.shown} counts {sample} tokens in a prompt that is {SAMPLE_WORDS} words longer")
        self._words_per_token = SAMPLE_WORDS / (sample - bare)

    def _prefix(self, length: int) -> str:
        """New for each stack: two addresses may lead to one engine."""
        return fresh(max(1, round(length * self._words_per_token)))

    async def ask_pair(self, length: int) -> None:
        system = self._prefix(length)
        cold, warm = [await self.ask(system, question, tokens=ANSWER) for question in QUESTIONS[:2]]
        self.measured.pairs.setdefault(length, []).append(MinedPair(cold, warm))

    async def fan_out(self, length: int) -> None:
        system = self._prefix(length)
        self.measured.fan_out = await asyncio.gather(*(self.ask(system, each) for each in QUESTIONS[:FAN_OUT]))

    async def converse(self, length: int) -> None:
        system, turns = self._prefix(length), list[str]()
        for question in QUESTIONS[:TURNS]:
            reply = await self.ask(system, *turns, question, tokens=ANSWER)
            self.measured.turns.append(reply)
            turns += [question, reply.text or "Yes."]

    async def ask(self, system: str, *turns: str, tokens: int = TIMED) -> MinedReply:
        """Stream a greedy answer of at most `tokens` tokens to a chat whose `turns` alternate from the user's on."""
        messages = [{"role": "system", "content": system}]
        messages += [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        sent = time.perf_counter()
        first_token, last_token, text, usage = None, 0.0, "", None
        try:
            async with self.client.stream("POST", self.url + "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise self._error(response.status_code, (await response.aread()).decode(errors="replace"))
                async for event in _events(response, self.shown):
                    usage = event.get("usage") or usage
                    for choice in event.get("choices") or ():
                        delta = choice.get("delta") or {}
                        text += delta.get("content") or ""
                        written = (delta.get(name) for name in ("content", "reasoning_content", "reasoning"))
                        if any(written) or choice.get("finish_reason"):
                            last_token = time.perf_counter() - sent
                            first_token = last_token if first_token is None else first_token
                header = response.headers.get("x-seamark-cached", "")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if first_token is None:
            raise Unusable(f"{self.shown} streams no token")
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            why = "though stream_options.include_usage asks for it: without prompt_tokens, prompts cannot be measured"
            raise Unusable(f"{self.shown} streams no usage, {why}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is None and header.isdigit():
            cached = int(header)
        output = usage.get("completion_tokens")
        output = output if isinstance(output, int) else 0
        return MinedReply(usage["prompt_tokens"], cached, first_token, text, output, last_token)

    async def accepted(self) -> Accepted | None:
        """Drafts that its engines have counted so far; None if the counters are not to be had with this URL and key.

        A gateway names its workers, who have them; where that is on another port, or out of reach, nothing is known.
        """
        try:
            if (own := worker_metrics.read(await _page(self.client, self.url + "/metrics")).accepted) is not None:
                return own
            status = json.loads(await _page(self.client, self.url + "/seamark/status"))
            # Ranks behind one address are workers each.
            workers = dict.fromkeys(str(worker["url"]) for worker in status["workers"])
            # The key is the gateway's, and none of its workers' business.
            async with httpx.AsyncClient(trust_env=False) as keyless:
                counted = [worker_metrics.read(await _page(keyless, f"{url}/metrics")).accepted for url in workers]
        except (ValueError, KeyError, TypeError):
            return None
        told = [each for each in counted if each is not None]
        return Accepted(*map(sum, zip(*told, strict=True))) if told and len(told) == len(counted) else None

    def _unreachable(self, error: Exception) -> Unusable:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL | httpx.UnsupportedProtocol):
            return Unusable(f"no server answers at {self.shown} ({error or type(error).__name__})")
        return Unusable(f"{self.shown} broke off: {error or type(error).__name__}")

    def _error(self, status: int, body: str) -> Unusable:
        if status in (401, 403) and self._has_key:
            return Unusable(f"{self.shown} refuses the key (status {status})")
        if status in (401, 403):
            return Unusable(f"{self.shown} wants a key (status {status}): --api-key-file FILE, or OPENAI_API_KEY")
        if status == 404 and self._models and self.model not in self._models:
            served = ", ".join(self._models)
            hint = did_you_mean(self.model, self._models)
            return Unusable(f"{self.shown} serves no model {self.model!r}, but {served}{hint}")
        return Unusable(f"{self.shown} answers {status}: {_message(body)}")


async def _page(client: httpx.AsyncClient, url: str) -> str:
    """The text of a page, empty if there is none."""
    try:
        async with asyncio.timeout(METRICS_SECONDS):
            answer = await client.get(url)
    except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
        return ""
    return answer.text if answer.status_code == 200 else ""


def _message(body: str) -> str:
    """What an error answer says, in any of the usual shapes; at most 300 characters."""
    try:
        said = json.loads(body)
        said = said.get("error", said)
        text = str(said if isinstance(said, str) else said.get("message") or said.get("detail") or body)
    except (ValueError, AttributeError):
        text = body
    return text.strip()[:300] or "nothing"


async def _events(response: httpx.Response, shown: str) -> AsyncIterator[Mapping[str, Any]]:
    """The events of a stream. Raises `Unusable` if it is none, or holds an error."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise Unusable(f"{shown} streams what is no JSON object")
        if event.get("error"):
            raise Unusable(f"{shown} breaks its stream off: {_message(data)}")
        yield event


class MinePlan(NamedTuple):
    lengths: tuple[int, ...]  # tokens, ascending
    pairs: int

    @property
    def middle(self) -> int:
        """Tokens of the prefix of the fan-out and of the conversation."""
        return self.lengths[len(self.lengths) // 2]

    @property
    def requests(self) -> int:
        """How many in all: two short ones first, which tell what a word takes."""
        return 2 + 2 * self.pairs * len(self.lengths) + FAN_OUT + TURNS

    @property
    def tokens(self) -> int:
        """About how many in all prompts, without those of questions and templates."""
        return 2 * self.pairs * sum(self.lengths) + (FAN_OUT + TURNS) * self.middle + SAMPLE_WORDS


def plan_for(stacks: Sequence[Stack], lengths: Sequence[int], pairs: int) -> MinePlan:
    """What fits the smallest context of `stacks`. Raises `Unusable` if no length does."""
    room = min((stack.context for stack in stacks if stack.context is not None), default=None)
    fitting = tuple(sorted({length for length in lengths if room is None or length + HEADROOM <= room}))
    if not fitting:
        raise Unusable(f"the context of {room} tokens is too short for a prompt of {min(lengths)}: give --lengths")
    return MinePlan(fitting, pairs)


async def ask_all(stacks: Sequence[Stack], plan: MinePlan) -> None:
    """All pairs once, the rest, then the pairs again, for an early end; each stack goes first every other time."""
    for number in range(plan.pairs):
        order = stacks[::-1] if number % 2 else stacks
        for length in plan.lengths:
            for stack in order:
                await stack.ask_pair(length)
        if number == 0:
            for stack in order:
                await stack.fan_out(plan.middle)
            for stack in order:
                await stack.converse(plan.middle)


def fresh(words: int) -> str:
    return prose(words, secrets.randbits(64))


def table(stacks: Sequence[Stack]) -> str:
    """One line for each length and stack, then the fan-out and the conversation."""
    named = dict(zip(("this", "other") if len(stacks) > 1 else ("",), stacks, strict=True))
    lines = [f"{name:<6}{stack.shown}, model {stack.model}" for name, stack in named.items()]
    head = f"{'':<6}{'shared tokens':>14}{'second one hits':>17}{'first token cold':>18}{'warm':>10}"
    lines += ["", f"{head}{'tokens/s cold':>15}{'warm':>8}"]
    for length in _common(stacks):
        for name, one in ((name, stack.measured) for name, stack in named.items()):
            cold, warm = (f"{one.first_token(length, which):.3f} s" for which in (0, 1))
            hit = "not reported" if (part := one.hit(length)) is None else f"{part:.0%}"
            line = f"{name:<6}{one.shared(length):>14,}{hit:>17}{cold:>18}{warm:>10}"
            lines.append(f"{line}{_speed(one.speed(length, 0)):>15}{_speed(one.speed(length, 1)):>8}")
        if len(stacks) > 1:
            line = f"{'this / other':<37}{_ratio(stacks, length, 0):>16.2f} x{_ratio(stacks, length, 1):>8.2f} x"
            speeds = [_ratio(stacks, length, which, "tokens_per_second") for which in (0, 1)]
            told = ["-" if ratio is None else f"{ratio:.2f} x" for ratio in speeds]
            lines.append(f"{line}{told[0]:>15}{told[1]:>8}")
    for name, one in ((name, stack.measured) for name, stack in named.items()):
        if one.fan_out:
            last = max(reply.first_token for reply in one.fan_out)
            lines += ["", f"{name:<6}{FAN_OUT} requests at once on a new system prompt: the last first token after"]
            lines[-1] += f" {last:.3f} s{_hits(one, one.fan_out)}"
        if one.turns:
            times = " ".join(f"{reply.first_token:.3f}" for reply in one.turns)
            lines.append(f"{name:<6}a conversation, turn by turn: first tokens after {times} s{_hits(one, one.turns)}")
        lines.append(f"{name:<6}{_drafts(one.drafts)}")
    lines += ["", "tokens/s: of one request, output tokens after the first over the time after the first; the median"]
    if not all(stack.measured.reported for stack in stacks):
        lines += ["", "hits are not reported: vLLM does so with --enable-prompt-tokens-details"]
    return "\n".join(lines)


def _common(stacks: Sequence[Stack]) -> list[int]:
    return sorted(set.intersection(*(set(stack.measured.pairs) for stack in stacks)))


def _speed(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:,.1f}"


def _drafts(drafts: Accepted | None) -> str:
    if drafts is None:
        return "drafts: not known (this URL shows none of vLLM's counters; they are in the worker's own /metrics)"
    if not drafts.steps:
        return "no drafts"
    return f"drafts: {drafts.per_step:.2f} accepted per step, of {drafts.steps:,} steps"


def _hits(one: Measured, replies: Sequence[MinedReply]) -> str:
    if not one.reported:
        return ""
    found = " ".join(f"{reply.cached_tokens or 0:,}" for reply in replies)
    return f"; from the cache {found} of {' '.join(f'{reply.prompt_tokens:,}' for reply in replies)} tokens"


def _ratio(stacks: Sequence[Stack], length: int, which: int, figure: str = "first_token") -> Any:
    """This over the other, the median over rounds, which share what the machine did; None if none has both figures."""
    rounds = zip(*(stack.measured.pairs[length] for stack in stacks), strict=False)
    figures = [[getattr(pair[which], figure) for pair in each] for each in rounds]
    return _median(mine / other if mine and other else None for mine, other in figures)


def verdict(stacks: Sequence[Stack]) -> str:
    """One sentence. Needs a length that every stack has answered."""
    length, one = _common(stacks)[-1], stacks[0].measured
    if len(stacks) > 1:
        parts = [stack.measured.hit_overall for stack in stacks]
        found = ["an unreported part" if part is None else f"{part:.0%}" for part in parts]
        speed = _ratio(stacks, length, 1, "tokens_per_second")
        beside = "" if speed is None else f" Its tokens then come {speed:.2f} times as fast."
        return (
            f"A second request with the same system prompt finds {found[0]} of it in this stack's cache and {found[1]} "
            f"in the other's, and its first token takes {_ratio(stacks, length, 1):.2f} times as long as there at "
            f"{one.shared(length):,} tokens, the first request's {_ratio(stacks, length, 0):.2f} times.{beside}"
        )
    cold, warm, part = one.first_token(length, 0), one.first_token(length, 1), one.hit_overall
    times = f"its first token comes after {warm:.3f} s where the first request's took {cold:.3f} s"
    times += f" ({one.shared(length):,} tokens)"
    if part is None:
        shows = warm <= SOONER * cold and cold - warm >= REACH
        seems = "but time shows that a second request does hit" if shows else "and time shows none"
        return f"This server does not report hits, {seems}: {times}."
    is_partial = PARTLY <= part < HITS
    hits = "hits" if part >= HITS else "hits in part" if is_partial else "does not hit"
    average = ", on average over the lengths" if is_partial else ""
    told = f"{hits}: {part:.0%} of it comes from the cache{average}"
    return f"A second request with the same system prompt {told}, and {times}."


def report(stacks: Sequence[Stack]) -> dict[str, Any]:
    """For machines: every answer without its text; times in seconds, lengths in tokens, `drafts` null if not known."""

    def plain(reply: MinedReply) -> dict[str, Any]:
        told = {name: value for name, value in reply._asdict().items() if name != "text"}
        return {**told, "tokens_per_second": reply.tokens_per_second}

    def of_stack(stack: Stack) -> dict[str, Any]:
        one, drafts = stack.measured, stack.measured.drafts
        return {
            "url": stack.shown,
            "model": stack.model,
            "hits_reported": one.reported,
            "lengths": {
                str(length): {
                    "shared": one.shared(length),
                    "hit": one.hit(length),
                    "tokens_per_second": {"cold": one.speed(length, 0), "warm": one.speed(length, 1)},
                    "pairs": [{"cold": plain(pair.cold), "warm": plain(pair.warm)} for pair in pairs],
                }
                for length, pairs in one.pairs.items()
            },
            "fan_out": [plain(reply) for reply in one.fan_out],
            "conversation": [plain(reply) for reply in one.turns],
            "drafts": None if drafts is None else {**drafts._asdict(), "accepted_per_step": drafts.per_step},
        }

    return {"verdict": verdict(stacks), "stacks": [of_stack(stack) for stack in stacks]}


async def measure(stacks: Sequence[Stack], args: Any, say: Callable[[str], None]) -> bool:
    """Ask each stack; whether time was enough for all of it. Raises `Unusable`."""
    try:
        for stack in stacks:
            await stack.find_model(say)
        plan = plan_for(stacks, args.lengths, args.pairs)
        say(
            f"sends {len(stacks) * plan.requests} requests with about {len(stacks) * plan.tokens:,} prompt tokens to "
            f"{' and '.join(f'{stack.shown} ({stack.model})' for stack in stacks)}, for {args.minutes:g} minutes at "
            "most; nothing else should be asked meanwhile"
        )
        complete, drafts = True, list[Accepted | None]()
        try:
            async with asyncio.timeout(args.minutes * 60):
                for stack in stacks:
                    await stack.probe()
                drafts += [await stack.accepted() for stack in stacks]
                await ask_all(stacks, plan)
        except TimeoutError:
            if not _common(stacks):
                raise Unusable(f"{args.minutes:g} minutes were too short for one pair: give --minutes") from None
            complete = False
        for stack, before in zip(stacks, drafts, strict=True):
            after = await stack.accepted()
            if before is not None and after is not None and after.steps >= before.steps:
                stack.measured.drafts = Accepted(after.steps - before.steps, after.tokens - before.tokens)
        return complete
    finally:
        for stack in stacks:
            await stack.client.aclose()


def main(argv: list[str]) -> int:
    described = "what a stack that runs finds in its cache, and how fast its tokens come"
    parser = Parser(prog="seamark bench mine", description=described)
    parser.add_argument("--base-url", required=True, metavar="URL", help="any OpenAI-compatible server")
    parser.add_argument("--against", metavar="URL", help="another one, asked in turns: with Seamark and without")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the API key; default: OPENAI_API_KEY")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="TOKENS", help="of shared prompts")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help="of requests for each length")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="end by then, with what there is")
    parser.add_argument("--json", action="store_true", help="print a report instead of the table")
    args = parser.parse_args(argv)
    if min(*args.lengths, args.pairs, args.minutes) <= 0:
        parser.error("lengths, pairs and minutes are above zero")
    try:
        key = read_secret("api_key_file", args.api_key_file) if args.api_key_file else os.environ.get("OPENAI_API_KEY")
    except SettingsError as error:
        parser.error(str(error))
    stacks = [Stack(url, args.model, key or None) for url in (args.base_url, args.against) if url]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        complete = asyncio.run(measure(stacks, args, say))
    except Unusable as error:
        say(f"seamark bench mine: {error}")
        return 1
    if args.json:
        print(json.dumps(report(stacks), indent=2))
    else:
        print(f"\n{table(stacks)}\n\n{verdict(stacks)}")
    if not complete:
        say(f"ended after {args.minutes:g} minutes, before all was asked: --minutes")
    return 0
