"""`seamark bench mine`: what a stack that runs finds in its cache, asked as any OpenAI client would ask it.

Nothing is needed but a URL: prompts are made here, their lengths are the server's own count, times are those of its
streams, and accepted drafts are what its engines count. With `--against` a second stack is asked in turns, so that
whatever else the machine does meets both. What is asked is a table: `SHAPES`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
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
LENGTHS, PAIRS = (500, 2000, 6000), 3  # tokens of shared system prompts; cold and warm requests of each length
SHORTEST = 16  # tokens, of what prompts share
QUICK_LENGTHS, QUICK_PAIRS = (2000,), 1
FAN_OUT, TURNS = 4, 4  # requests at once on one new prefix, and of the conversation
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


class MinedShape(NamedTuple):
    """Requests that begin alike, and like none before them."""

    name: str
    told: str  # what they are, before what they found
    requests: int
    repeats: bool  # asked at each length, `--pairs` times; else once, at the middle one
    ask: Callable[[Stack, int], Awaitable[Round]]  # a stack, with a system prompt of so many tokens


async def _pair(stack: Stack, length: int) -> Round:
    system = stack.prefix(length)
    return [await stack.ask(system, question, tokens=ANSWER) for question in QUESTIONS[:2]]


async def _fan_out(stack: Stack, length: int) -> Round:
    system = stack.prefix(length)
    return await asyncio.gather(*(stack.ask(system, question) for question in QUESTIONS[:FAN_OUT]))


async def _conversation(stack: Stack, length: int) -> Round:
    system, said, replies = stack.prefix(length), list[str](), list[MinedReply]()
    for question in QUESTIONS[:TURNS]:
        replies.append(await stack.ask(system, *said, question, tokens=ANSWER))
        said += [question, replies[-1].text or "Yes."]
    return replies


Round = Sequence[MinedReply]  # of one shape, in the order of its requests
PAIR = MinedShape("pair", "two requests with one system prompt", 2, True, _pair)
SHAPES = (
    PAIR,
    MinedShape("fan-out", f"{FAN_OUT} requests at once on a new system prompt", FAN_OUT, False, _fan_out),
    MinedShape("conversation", "a conversation, turn by turn", TURNS, False, _conversation),
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Stack:
    """An OpenAI-compatible server, and what it has answered. Errors are `Unusable`."""

    def __init__(self, url: str, model: str | None, api_key: str | None, name: str = "") -> None:
        """`url` with `/v1` and a scheme or without; no `model`: the first that is served; `name`: which of two."""
        self.url = base_url(url if "://" in url else f"http://{url}")
        self.shown = without_credentials(self.url)[0]
        self.model = model or ""
        self.name = f"{name:<6}"
        self.context: int | None = None  # tokens, if the server says
        self.bare = 0  # tokens of the same chat without a system prompt worth the name
        self.rounds: dict[MinedShape, dict[int, list[Round]]] = {shape: {} for shape in SHAPES}  # by length
        self.drafts: Accepted | None = None  # of this run; None: counters cannot be read, or began anew meanwhile
        self.reported = False  # whether any answer says what came from the cache; some servers leave a zero out
        self._asked = "a short prompt"
        self._words_per_token = 1.0
        self._models: list[str] = []
        self._has_key = api_key is not None
        headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        self.client = open_client(httpx.Timeout(None, connect=5.0), headers)

    async def find_model(self) -> None:
        """Read `/v1/models`; a stack that asks for patience, as a gateway before a loading vLLM does, is waited for."""
        give_up = time.monotonic() + LOADING_SECONDS
        answer = await self._get("/v1/models", PROBE_SECONDS)
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and "retry-after" in answer.headers:
            say(f"{self.shown} has no model yet; waiting up to {LOADING_SECONDS / 60:.0f} minutes")
            while answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < give_up:
                await asyncio.sleep(ASK_AGAIN_SECONDS)
                answer = await self._get("/v1/models", PROBE_SECONDS)
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

    @asynccontextmanager
    async def _asking(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Raises `Unusable` if there is no answer, and if it takes longer than so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise Unusable(f"{self.shown} gives no answer within {seconds:.0f} s") from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise Unusable(f"no server answers at {self.shown} ({error or type(error).__name__})") from None
        except httpx.HTTPError as error:
            raise Unusable(f"{self.shown} broke off: {error or type(error).__name__}") from None

    async def _get(self, path: str, seconds: float) -> httpx.Response:
        async with self._asking(seconds):
            return await self.client.get(self.url + path)

    async def probe(self) -> None:
        """Two short requests, which show what is wrong with it, and what a word takes in tokens."""
        async with self._asking(PROBE_SECONDS):
            self.bare = (await self.ask("Hi.", QUESTIONS[0])).prompt_tokens
            sample = (await self.ask(self.prefix(SAMPLE_WORDS), QUESTIONS[0])).prompt_tokens
        if sample <= self.bare:
            raise Unusable(f"{self.shown} counts {sample} tokens in a prompt that is {SAMPLE_WORDS} words longer")
        self._words_per_token = SAMPLE_WORDS / (sample - self.bare)

    def prefix(self, length: int) -> str:
        """A system prompt of so many tokens, new for each stack: two addresses may lead to one engine."""
        return prose(max(1, round(length * self._words_per_token)), secrets.randbits(64))

    async def play(self, shape: MinedShape, length: int) -> None:
        self._asked = f"{shape.name} at {length:,} tokens"
        answers = await shape.ask(self, length)
        self.rounds[shape].setdefault(length, []).append(answers)

    async def ask(self, system: str, *turns: str, tokens: int = TIMED) -> MinedReply:
        """Stream a greedy answer of at most `tokens` tokens to a chat whose `turns` alternate from the user's on."""
        messages = [{"role": "system", "content": system}]
        messages += [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        sent = time.perf_counter()
        first_token, last_token, text, usage = None, 0.0, "", None
        stream = self.client.stream("POST", self.url + "/v1/chat/completions", json=body)
        async with self._asking(), stream as response:
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
        if first_token is None:
            raise Unusable(f"{self.shown} streams no token")
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            why = "though stream_options.include_usage asks for it: without prompt_tokens, prompts cannot be measured"
            raise Unusable(f"{self.shown} streams no usage, {why}")
        prompt, cached = usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is None and header.isdigit():
            cached = int(header)
        self.reported |= cached is not None
        found = "what it found is not reported" if cached is None else f"{cached:,} of {prompt:,} tokens found"
        say(f"{self.name}{self._asked}: {found}, first token after {first_token:.3f} s")
        return MinedReply(prompt, cached, first_token, text, usage.get("completion_tokens") or 0, last_token)

    async def accepted(self) -> Accepted | None:
        """Drafts that its engines, or a gateway's workers, have counted so far; None if that cannot be read here."""
        try:
            if (own := await self._own_drafts()) is not None:
                return own
            status = json.loads((await self._get("/seamark/status", METRICS_SECONDS)).text)
            # Ranks behind one address are workers each. The key is the gateway's, and none of its workers' business.
            workers = [Stack(url, "", None) for url in dict.fromkeys(worker["url"] for worker in status["workers"])]
            counted = [await worker._own_drafts() for worker in workers]
        except (Unusable, ValueError, KeyError, TypeError):
            return None
        told = [each for each in counted if each is not None]
        return Accepted(*map(sum, zip(*told, strict=True))) if told and len(told) == len(counted) else None

    async def _own_drafts(self) -> Accepted | None:
        return worker_metrics.read((await self._get("/metrics", METRICS_SECONDS)).text).accepted

    def _error(self, status: int, body: str) -> Unusable:
        if status in (401, 403):
            wants = "refuses the" if self._has_key else "wants a"
            return Unusable(f"{self.shown} {wants} key (status {status}): --api-key-file FILE, or OPENAI_API_KEY")
        if status == 404 and self._models and self.model not in self._models:
            served = ", ".join(self._models) + did_you_mean(self.model, self._models)
            return Unusable(f"{self.shown} serves no model {self.model!r}, but {served}")
        return Unusable(f"{self.shown} answers {status}: {_message(body)}")

    def shared(self, length: int) -> int:
        """Tokens that the pairs of a length share, some few too low: the template's own around them are not counted."""
        return round(statistics.median(cold.prompt_tokens - self.bare for cold, _ in self.rounds[PAIR][length]))

    def hit(self, length: int) -> float | None:
        """The part of the shared tokens that the second request of a pair takes from the cache; the median, up to 1."""
        pairs = self.rounds[PAIR][length]
        parts = [(warm.cached_tokens or 0) / (cold.prompt_tokens - self.bare) for cold, warm in pairs]
        return min(1.0, statistics.median(parts)) if self.reported else None

    @property
    def hit_overall(self) -> float | None:
        """The mean over all lengths."""
        return statistics.mean(self.hit(length) or 0.0 for length in self.rounds[PAIR]) if self.reported else None

    def median(self, length: int, which: int, figure: str) -> Any:
        """Of first (0) or second (1) requests; None if none has the figure."""
        return _median(getattr(pair[which], figure) for pair in self.rounds[PAIR][length])


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


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


class PlannedRound(NamedTuple):
    number: int
    shape: MinedShape
    length: int  # tokens


def plan_for(stacks: Sequence[Stack], lengths: Iterable[int], pairs: int) -> list[PlannedRound]:
    """What fits the smallest context: all shapes, then those that repeat, for an early end. Raises `Unusable`."""
    room = min((stack.context for stack in stacks if stack.context is not None), default=None)
    fitting = sorted({length for length in lengths if room is None or length + HEADROOM <= room})
    if not fitting:
        raise Unusable(f"the context of {room} tokens is too short for a prompt of {min(lengths)}: give --lengths")
    once = fitting[len(fitting) // 2 :][:1]
    return [
        PlannedRound(number, shape, length)
        for number in range(pairs)
        for shape in SHAPES
        for length in (fitting if shape.repeats else once if number == 0 else ())
    ]


def table(stacks: Sequence[Stack]) -> str:
    """One line for each length and stack, then one for each other shape."""
    lines = [f"{stack.name}{stack.shown}, model {stack.model}" for stack in stacks]
    head = f"{'':<6}{'shared tokens':>14}{'second one hits':>17}{'first token cold':>18}{'warm':>10}"
    lines += ["", f"{head}{'tokens/s cold':>15}{'warm':>8}"]
    for length in _common(stacks):
        for stack in stacks:
            cold, warm = (f"{stack.median(length, which, 'first_token'):.3f} s" for which in (0, 1))
            hit = "not reported" if (part := stack.hit(length)) is None else f"{part:.0%}"
            line = f"{stack.name}{stack.shared(length):>14,}{hit:>17}{cold:>18}{warm:>10}"
            speeds = [stack.median(length, which, "tokens_per_second") for which in (0, 1)]
            lines.append(line + _columns(speeds, ",.1f"))
        if len(stacks) > 1:
            line = f"{'this / other':<37}{_ratio(stacks, length, 0):>16.2f} x{_ratio(stacks, length, 1):>8.2f} x"
            speeds = [_ratio(stacks, length, which, "tokens_per_second") for which in (0, 1)]
            lines.append(line + _columns(speeds, ".2f", " x"))
    lines.append("")
    for stack in stacks:
        for shape, by_length in stack.rounds.items():
            for replies in chain.from_iterable(by_length.values()) if shape is not PAIR else ():
                times = " ".join(f"{reply.first_token:.3f}" for reply in replies)
                found = " ".join(f"{reply.cached_tokens or 0:,}" for reply in replies) if stack.reported else "?"
                asked = " ".join(f"{reply.prompt_tokens:,}" for reply in replies)
                lines.append(f"{stack.name}{shape.told}: found {found} of {asked} tokens, first tokens after {times} s")
        lines.append(stack.name + _drafts(stack.drafts))
    lines += ["", "tokens/s: of one request, output tokens after the first over the time after the first; the median"]
    if not all(stack.reported for stack in stacks):
        lines += ["", "hits are not reported: vLLM does so with --enable-prompt-tokens-details"]
    return "\n".join(lines)


def _common(stacks: Sequence[Stack]) -> list[int]:
    return sorted(set.intersection(*(set(stack.rounds[PAIR]) for stack in stacks)))


def _columns(cold_and_warm: Iterable[float | None], form: str, unit: str = "") -> str:
    cold, warm = ("-" if figure is None else f"{figure:{form}}{unit}" for figure in cold_and_warm)
    return f"{cold:>15}{warm:>8}"


def _drafts(drafts: Accepted | None) -> str:
    if drafts is None:
        return "drafts: not known (this URL shows none of vLLM's counters; they are in the worker's own /metrics)"
    if not drafts.steps:
        return "no drafts"
    return f"drafts: {drafts.per_step:.2f} accepted per step, of {drafts.steps:,} steps"


def _ratio(stacks: Sequence[Stack], length: int, which: int, figure: str = "first_token") -> Any:
    """This over the other, the median over rounds, which share what the machine did; None if none has both figures."""
    rounds = zip(*(stack.rounds[PAIR][length] for stack in stacks), strict=False)
    figures = [[getattr(pair[which], figure) for pair in each] for each in rounds]
    return _median(mine / other if mine and other else None for mine, other in figures)


def verdict(stacks: Sequence[Stack]) -> str:
    """One sentence. Needs a length that every stack has answered."""
    length, one = _common(stacks)[-1], stacks[0]
    if len(stacks) > 1:
        parts = [stack.hit_overall for stack in stacks]
        found = ["an unreported part" if part is None else f"{part:.0%}" for part in parts]
        speed = _ratio(stacks, length, 1, "tokens_per_second")
        beside = "" if speed is None else f" Its tokens then come {speed:.2f} times as fast."
        return (
            f"A second request with the same system prompt finds {found[0]} of it in this stack's cache and {found[1]} "
            f"in the other's, and its first token takes {_ratio(stacks, length, 1):.2f} times as long as there at "
            f"{one.shared(length):,} tokens, the first request's {_ratio(stacks, length, 0):.2f} times.{beside}"
        )
    cold, warm = (one.median(length, which, "first_token") for which in (0, 1))
    times = f"its first token comes after {warm:.3f} s where the first request's took {cold:.3f} s"
    times += f" ({one.shared(length):,} tokens)"
    if (part := one.hit_overall) is None:
        shows = warm <= SOONER * cold and cold - warm >= REACH
        seems = "but time shows that a second request does hit" if shows else "and time shows none"
        return f"This server does not report hits, {seems}: {times}."
    is_partial = PARTLY <= part < HITS
    hits = "hits" if part >= HITS else "hits in part" if is_partial else "does not hit"
    told = f"{hits}: {part:.0%} of it comes from the cache{', on average over the lengths' if is_partial else ''}"
    return f"A second request with the same system prompt {told}, and {times}."


def report(stacks: Sequence[Stack]) -> dict[str, Any]:
    """For machines: every answer without its text; times in seconds, lengths in tokens, `drafts` null if not known."""

    def plain(reply: MinedReply) -> dict[str, Any]:
        return {**reply._asdict(), "tokens_per_second": reply.tokens_per_second, "text": None}

    def of_stack(stack: Stack) -> dict[str, Any]:
        drafts, lengths = stack.drafts, stack.rounds[PAIR]
        return {
            **{"url": stack.shown, "model": stack.model, "hits_reported": stack.reported},
            "lengths": {length: {"shared": stack.shared(length), "hit": stack.hit(length)} for length in lengths},
            "rounds": [
                {"shape": shape.name, "length": length, "replies": list(map(plain, replies))}
                for shape, by_length in stack.rounds.items()
                for length, asked in by_length.items()
                for replies in asked
            ],
            "drafts": None if drafts is None else {**drafts._asdict(), "accepted_per_step": drafts.per_step},
        }

    return {"verdict": verdict(stacks), "stacks": [of_stack(stack) for stack in stacks]}


async def measure(stacks: Sequence[Stack], lengths: Sequence[int], pairs: int, minutes: float) -> bool:
    """Ask each stack; whether time was enough for all of it. Raises `Unusable`."""
    try:
        for stack in stacks:
            await stack.find_model()
        plan = plan_for(stacks, lengths, pairs)
        requests = 2 + sum(shape.requests for _, shape, _ in plan)  # beside those of `probe`
        tokens = SAMPLE_WORDS + sum(shape.requests * length for _, shape, length in plan)
        for stack in stacks:
            about = f"{requests} requests with about {tokens:,} prompt tokens, for {minutes:g} minutes at most"
            say(f"sends {stack.shown} ({stack.model}) {about}; nothing else should be asked meanwhile")
        complete, drafts = True, list[Accepted | None]()
        try:
            async with asyncio.timeout(minutes * 60):
                for stack in stacks:
                    await stack.probe()
                drafts += [await stack.accepted() for stack in stacks]
                for number, shape, length in plan:
                    for stack in stacks[::-1] if number % 2 else stacks:  # each goes first every other time
                        await stack.play(shape, length)
        except TimeoutError:
            if not _common(stacks):
                raise Unusable(f"{minutes:g} minutes were too short for one pair: give --minutes") from None
            complete = False
        for stack, before in zip(stacks, drafts, strict=True):
            after = await stack.accepted()
            if before is not None and after is not None and after.steps >= before.steps:
                stack.drafts = Accepted(after.steps - before.steps, after.tokens - before.tokens)
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
    parser.add_argument("--quick", action="store_true", help="one length and one pair: a dozen requests")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help="of shared prompts")
    parser.add_argument("--pairs", type=int, metavar="N", help="of requests for each length")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="end by then, with what there is")
    parser.add_argument("--json", action="store_true", help="print a report instead of the table")
    args = parser.parse_args(argv)
    lengths, pairs = (QUICK_LENGTHS, QUICK_PAIRS) if args.quick else (LENGTHS, PAIRS)
    lengths, pairs = args.lengths or lengths, pairs if args.pairs is None else args.pairs
    if not (min(lengths) >= SHORTEST and pairs > 0 and args.minutes > 0):  # nor not a number
        parser.error(f"lengths are at least {SHORTEST} tokens; pairs and minutes are above zero")
    try:
        key = read_secret("api_key_file", args.api_key_file) if args.api_key_file else os.environ.get("OPENAI_API_KEY")
    except SettingsError as error:
        parser.error(str(error))
    asked = {"this": args.base_url, "other": args.against} if args.against else {"": args.base_url}
    stacks = [Stack(url, args.model, key or None, name) for name, url in asked.items()]
    try:
        complete = asyncio.run(measure(stacks, lengths, pairs, args.minutes))
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
