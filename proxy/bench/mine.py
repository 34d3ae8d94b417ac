"""`seamark bench mine`: what a stack that runs finds in its cache, asked as any OpenAI client would ask it.

Nothing is needed but a URL: prompts are made here, their lengths are the server's own count, times are those of its
streams, and accepted drafts are what its engines count. With `--against` a second stack is asked in turns, so that
whatever else the machine does meets both. What is asked is a table: `proxy.bench.shapes`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain, count, product
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import QUESTIONS, Messages, open_client, prose
from proxy.bench.shapes import QUICK, SHAPES, Seen, SharingShape, in_system, message
from proxy.commands.parser import Parser
from proxy.config_files import base_url, read_secret, without_credentials
from proxy.errors import SettingsError, did_you_mean
from proxy.fleet import worker_metrics
from proxy.fleet.probe import models_in
from proxy.fleet.worker_metrics import Accepted
from proxy.http.json_body import words_in

# What is asked.
LENGTHS, QUICK_LENGTHS = (2000, 6000), (2000,)  # tokens of documents
SHORTEST = 16  # tokens, of a document, and of what requests are said to share
BURST, MOST = 4, 256  # chats at once
SHORT = 64  # tokens of a chat that shares nothing
SAMPLE_WORDS = 300  # of the prompt by which words are converted to tokens

# Tokens of an answer of which the first one alone is timed, of one long enough to have a speed, and of one that lasts.
TIMED, ANSWER, LONG_ANSWER = 4, 32, 192
HEADROOM = 512  # tokens of the context that a document leaves to questions and answers

# How long is waited.
PROBE_SECONDS = 60.0  # for the first, short answer
LOADING_SECONDS, ASK_AGAIN_SECONDS = 3600.0, 2.0  # of a model
METRICS_SECONDS = 5.0  # for the engines' counters, which a stack may not show

# What it means.
HITS = 0.9  # the part of the shared tokens from which nothing is said to be lost
SOONER = 0.7  # later over first from which time alone shows a hit
REACH = 0.02  # seconds below which neither is said to be sooner
HELD_BACK = 0.005  # seconds within which a whole answer comes only if something held it back: that is no speed
UNIT = 64  # tokens from which a common divisor of all hits is told
MOST_SAID = 300  # characters of what a stack says of an error


class Unusable(Exception):
    """The stack cannot be measured; the text says why, and the cure if there is one."""


class MinedReply(NamedTuple):
    prompt_tokens: int
    cached_tokens: int | None  # None: not reported
    first_token: float  # seconds after sending
    text: str = ""
    output_tokens: int = 0  # as the server counts them; 0: it does not
    last_token: float = 0.0  # seconds after sending
    explained_as: str = ""  # the id by which a Seamark gateway explains it


class AskedRequest(NamedTuple):
    """One request of a shape and what came of it; lengths in tokens."""

    shape: str
    length: int  # of its document
    round: int
    wave: int  # of those that are sent together, from 0 on
    number: int  # in its shape, from 1 on
    shared: int  # about so many with earlier ones, as an ideal cache would find them; 0: next to none
    sent: float  # seconds on this machine's clock
    reply: MinedReply

    @property
    def found(self) -> int:
        return min(self.reply.cached_tokens or 0, self.shared)

    @property
    def lost(self) -> int:
        """What it shares and computes again; 0 if that is little."""
        return self.shared - self.found if self.found < HITS * self.shared else 0


class MinedRow:
    """What came of one shape at one length. Lengths in tokens, times in seconds."""

    def __init__(self, asked: Sequence[AskedRequest]) -> None:
        self.asked = asked
        self.later = [each for each in asked if each.shared]
        self.shared, self.found = sum(each.shared for each in self.later), sum(each.found for each in self.later)
        self.part = self.found / self.shared if self.shared else 1.0
        times = [each.reply.first_token for each in self.later]
        # Until first tokens: the first request's, and those of later ones that share.
        self.first = _median(each.reply.first_token for each in asked if each.number == 1)
        self.warm, self.slowest = _median(times), max(times, default=None)
        self.sooner = (self.first or 0.0) - (self.warm or 0.0) >= max(REACH, (1 - SOONER) * (self.first or 0.0))

    @property
    def speed(self) -> float | None:
        """Output tokens of all that runs together, but the first, over the time after the first; median over waves."""
        waves = {(each.round, each.wave) for each in self.asked}
        return _median(_speed([each for each in self.asked if (each.round, each.wave) == wave]) for wave in waves)

    def within(self, bound: float) -> float:
        """The part whose first token comes within so many seconds."""
        return sum(each.reply.first_token <= bound for each in self.asked) / max(1, len(self.asked))

    def told(self, stack: Stack) -> str:
        """What is lost and why, in one sentence."""
        if not self.later or self.first is None or self.slowest is None:
            return "nothing was asked that could be found"
        new = max((each.reply.first_token for each in self.asked if not each.shared and each.wave), default=0.0)
        late = self.first + REACH
        beside = f"; a new request beside it waits {new:.3f} s" if new > late else ""
        if not stack.reported:
            return f"not reported; first tokens come {'sooner' if self.sooner else 'no sooner'} later{beside}"
        worst = max(self.later, key=lambda each: each.lost)
        if not worst.lost:
            return ("nothing" if self.slowest <= late else f"time: a first token takes {self.slowest:.3f} s") + beside
        behind = [each.lost for each in self.later if each.wave > worst.wave]
        if behind and not any(behind):
            why = "what two requests share is kept only once the second has shown it"
        elif worst.lost < stack.unit:
            why = f"hits end at multiples of {stack.unit:,} tokens"
        elif worst.wave == 0:
            why = "it does not wait for the one beside it that computes the same"
        else:
            why = f"nothing is kept {'nearer to its end' if worst.found else 'of it'}"
        if reason := stack.reasons.get(worst.reply.explained_as):
            why += f" ({reason})"
        return f"{worst.lost:,} of the {worst.shared:,} tokens that request {worst.number} shares: {why}{beside}"


def _speed(together: Sequence[AskedRequest]) -> float | None:
    begun = min(each.sent + each.reply.first_token for each in together)
    seconds = max(each.sent + each.reply.last_token for each in together) - begun
    tokens = sum(max(0, each.reply.output_tokens - 1) for each in together)
    return tokens / seconds if tokens and seconds > HELD_BACK else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Stack:
    """An OpenAI-compatible server, and what it has answered. Errors are `Unusable`."""

    def __init__(self, url: str, model: str | None, api_key: str | None, name: str = "") -> None:
        """`url` with `/v1` and a scheme or without; no `model`: the first that is served; `name`: which of two."""
        self.url = base_url(url if "://" in url else f"http://{url}")
        self.shown = without_credentials(self.url)[0]
        self.model = model or ""
        self.name = f"{name:<6}" if name else ""
        self.context: int | None = None  # tokens, if the server says
        self.asked: list[AskedRequest] = []
        self.failed: dict[tuple[str, int], str] = {}  # by shape and length: why it was not asked to its end
        self.reasons: dict[str, str] = {}  # that a Seamark gateway gives, by `MinedReply.explained_as`
        self.drafts: Accepted | None = None  # of this run; None: counters cannot be read, or began anew meanwhile
        self.reported = False  # whether any answer says what came from the cache; some servers leave a zero out
        self.template = 0.0  # tokens that the template writes around a system prompt and a question
        self.words_per_token = 1.0
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
            raise self._error(answer.status_code, b"")
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
        texts = "Hi.", prose(SAMPLE_WORDS, secrets.randbits(64))
        async with self._asking(PROBE_SECONDS):
            replies = [await self.ask(in_system(text, 0), TIMED, asyncio.Event()) for text in texts]
        bare, sample = (reply.prompt_tokens for reply in replies)
        if sample <= bare:
            raise Unusable(f"{self.shown} counts {sample} tokens in a prompt that is {SAMPLE_WORDS} words longer")
        self.words_per_token = SAMPLE_WORDS / (sample - bare)
        self.template = max(0.0, bare - (sample - bare) * len(f"Hi.{QUESTIONS[0]}") / len(texts[1]))

    def write(self, tokens: int) -> str:
        """A text of so many tokens, new for each stack: two addresses may lead to one engine."""
        _, _, rest = prose(max(1, round(tokens * self.words_per_token)), secrets.randbits(64)).partition(" ")
        return f"{secrets.token_hex(4)} {rest}"

    async def ask(self, messages: Messages, tokens: int, begun: asyncio.Event) -> MinedReply:
        """Stream a greedy answer of at most `tokens` tokens; `begun` is set at the first one."""
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        sent = time.perf_counter()
        first_token, last_token, text, usage = None, 0.0, "", None
        stream = self.client.stream("POST", self.url + "/v1/chat/completions", json=body)
        async with self._asking(), stream as response:
            if response.status_code != 200:
                raise self._error(response.status_code, await response.aread())
            async for event in _events(response, self.shown):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    text += delta.get("content") or ""
                    written = (delta.get(name) for name in ("content", "reasoning_content", "reasoning"))
                    if any(written) or choice.get("finish_reason"):
                        last_token = time.perf_counter() - sent
                        first_token = last_token if first_token is None else first_token
                        begun.set()
            headers = response.headers
        if first_token is None:
            raise Unusable(f"{self.shown} streams no token")
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            why = "though stream_options.include_usage asks for it: without prompt_tokens, prompts cannot be measured"
            raise Unusable(f"{self.shown} streams no usage, {why}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self.reported |= cached is not None
        output = usage.get("completion_tokens") or 0
        is_seamark = any(name.startswith("x-seamark-") for name in headers)
        explained_as = headers.get("x-request-id", "") if is_seamark else ""
        return MinedReply(usage["prompt_tokens"], cached, first_token, text, output, last_token, explained_as)

    async def play(self, round_: int, length: int, shape: SharingShape, burst: int) -> None:
        """Raises `Unusable`; what was answered before that stays."""
        numbers, seen, before = count(1), Seen(), len(self.asked)
        answered: list[tuple[MinedReply, float, Messages]] = []  # of a wave

        async def ask(chat: Messages, tokens: int, begun: asyncio.Event) -> None:
            sent = time.perf_counter()
            try:
                reply = await self.ask(chat, tokens, begun)
            finally:
                begun.set()
            answered.append((reply, sent, chat))
            found = "hits are not reported" if reply.cached_tokens is None else f"{reply.cached_tokens:,} found"
            told = f"{shape.name}: {reply.prompt_tokens:,} tokens, {found}"
            say(f"{self.name}{told}, first token after {reply.first_token:.3f} s")

        waves = shape.waves(self.write(length), lambda: [message("user", self.write(SHORT))], burst)
        for turn, wave in enumerate(waves):
            decoding = [(chat, LONG_ANSWER, asyncio.Event()) for chat in wave.beside]
            tasks = [asyncio.create_task(ask(*each)) for each in decoding]
            try:
                for _, _, begun in decoding:
                    await begun.wait()
                chats = map(seen.filled, wave.chats)
                tasks += [asyncio.create_task(ask(chat, ANSWER, asyncio.Event())) for chat in chats]
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                # Who of a wave found least computed it for the others.
                answered.sort(key=lambda each: (each[0].cached_tokens or 0, each[0].first_token))
                for (reply, sent, chat), number in zip(answered, numbers, strict=False):
                    about = (reply.prompt_tokens - self.template) * seen.shared(chat, reply.text)
                    # Half of the template's words stand before the end of what is shared.
                    shared = round(about + self.template / 2) if about >= SHORTEST else 0
                    self.asked.append(AskedRequest(shape.name, length, round_, turn, number, shared, sent, reply))
                answered.clear()
            if failed := next((each for each in ended if each is not None), None):
                raise failed
        await self.explain(self.asked[before:])

    async def explain(self, asked: Iterable[AskedRequest]) -> None:
        """Ask a Seamark gateway why these lost what they lost."""
        for reply in (each.reply for each in asked if each.lost and each.reply.explained_as):
            with suppress(Unusable, ValueError, KeyError, TypeError):
                answer = await self._get(f"/seamark/requests/{reply.explained_as}", METRICS_SECONDS)
                self.reasons[reply.explained_as] = json.loads(answer.text)["reason"]

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

    def _error(self, status: int, body: bytes) -> Unusable:
        if status in (401, 403):
            wants = "refuses the" if self._has_key else "wants a"
            return Unusable(f"{self.shown} {wants} key (status {status}): --api-key-file FILE, or OPENAI_API_KEY")
        if status == 404 and self._models and self.model not in self._models:
            served = ", ".join(self._models) + did_you_mean(self.model, self._models)
            return Unusable(f"{self.shown} serves no model {self.model!r}, but {served}")
        return Unusable(f"{self.shown} answers {status}: {words_in(body)[:MOST_SAID] or 'nothing'}")

    def rows(self) -> dict[tuple[str, int], MinedRow]:
        asked: dict[tuple[str, int], list[AskedRequest]] = {}
        for each in self.asked:
            asked.setdefault((each.shape, each.length), []).append(each)
        return {key: MinedRow(asked.get(key, [])) for key in dict.fromkeys((*asked, *self.failed))}

    @property
    def unit(self) -> int:
        """The tokens of which every hit is a multiple; 1 if that says nothing."""
        found = {each.reply.cached_tokens or 0 for each in self.asked} - {0}
        unit = math.gcd(*found)
        return unit if unit >= UNIT and len(found) > 1 else 1


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
            raise Unusable(f"{shown} breaks its stream off: {words_in(data.encode())[:MOST_SAID]}")
        yield event


def table(stacks: Sequence[Stack], bound: float | None = None) -> str:
    """A line for each shape, length and stack; then a sentence for each, of what is lost, and what they mean."""
    lines = [f"{stack.name}{stack.shown}, model {stack.model}" for stack in stacks]
    head = ("shape", "tokens", "found of shared", "", "first token", "later", "slowest", "tokens/s")
    form = "{:<8}{:>8}{:>18}{:>6}{:>13}{:>11}{:>11}{:>10}{:>10}"
    lines += ["", " " * len(stacks[0].name) + form.format(*head, "" if bound is None else f"in {bound:g} s").rstrip()]
    lost = ["", "lost:"]
    rows = [(stack, stack.rows()) for stack in stacks]
    for key in dict.fromkeys(chain.from_iterable(of_stack for _, of_stack in rows)):
        for stack, row in ((stack, of_stack[key]) for stack, of_stack in rows if key in of_stack):
            place = key[0], f"{key[1]:,}"
            found = (f"{row.found:,} of {row.shared:,}", f"{row.part:.0%}") if stack.reported else ("not reported", "")
            times = ("-" if each is None else f"{each:.3f} s" for each in (row.first, row.warm, row.slowest))
            speed = "-" if row.speed is None else f"{row.speed:,.1f}"
            within = "" if bound is None else f"{row.within(bound):.0%}"
            lines.append(stack.name + form.format(*place, *found, *times, speed, within).rstrip())
            failed = stack.failed.get(key)
            told = f"not asked to its end: {failed}" if failed else row.told(stack)
            lost.append(f"{stack.name}{key[0]:<8}{key[1]:>8,}  {told}")
    lines += [*lost, ""]
    for stack in stacks:
        if bound is not None:
            part = MinedRow(stack.asked).within(bound)
            lines.append(f"{stack.name}{part:.0%} of {len(stack.asked)} first tokens came within {bound:g} s")
        lines.append(stack.name + _drafts(stack.drafts))
    lines.append("tokens/s: of all that runs together, output tokens after the first over the time after the first")
    if not all(stack.reported for stack in stacks):
        lines.append("what is found is not reported: vLLM does so with --enable-prompt-tokens-details")
    return "\n".join(lines)


def _drafts(drafts: Accepted | None) -> str:
    if drafts is None:
        return "drafts: not known (this URL shows none of vLLM's counters; they are in the worker's own /metrics)"
    if not drafts.steps:
        return "no drafts"
    return f"drafts: {drafts.per_step:.2f} accepted per step, of {drafts.steps:,} steps"


def verdict(stack: Stack) -> str:
    rows = {key: row for key, row in stack.rows().items() if row.later}
    if not rows:
        return "No request was answered that shares anything with an earlier one."
    parts = {key: row.part for key, row in rows.items()}
    least = min(parts, key=parts.__getitem__)
    found = f"finds {statistics.mean(parts.values()):.0%} of what it shares with earlier ones"
    found += f" ({parts[least]:.0%} of {least[0]!r})" if len(rows) > 1 else ""
    first, warm = (_median(getattr(row, name) for row in rows.values()) for name in ("first", "warm"))
    times = f"gets its first token after {warm:.3f} s where the first one did after {first:.3f} s"
    return (
        f"A later request {found} and {times}."
        if stack.reported
        else f"A later request {times}; hits are not reported."
    )


def report(stack: Stack) -> dict[str, Any]:
    """For machines: times in seconds, lengths in tokens, `drafts` null if not known."""
    drafts = stack.drafts and {**stack.drafts._asdict(), "accepted_per_step": stack.drafts.per_step}
    return {
        **{"url": stack.shown, "model": stack.model, "hits_reported": stack.reported, "drafts": drafts},
        "requests": [
            {**each._asdict(), "reply": each.reply._asdict(), "reason": stack.reasons.get(each.reply.explained_as)}
            for each in stack.asked
        ],
        "failed": [[*place, why] for place, why in stack.failed.items()],
        "verdict": verdict(stack),
    }


async def measure(
    stacks: Sequence[Stack], planned: Sequence[tuple[int, int, SharingShape]], burst: int, minutes: float
) -> bool:
    """Ask each stack the rounds, lengths and shapes that fit; whether time was enough for all. Raises `Unusable`."""
    try:
        for stack in stacks:
            await stack.find_model()
        room = min((stack.context for stack in stacks if stack.context is not None), default=math.inf)
        plan = [(number, length, shape) for number, length, shape in planned if length + HEADROOM <= room]
        if not plan:
            raise Unusable(f"the context of {room} tokens is too short for such documents: give --tokens")
        for stack in stacks:
            about = f"{len(plan)} rounds of requests, each on a new document, for {minutes:g} minutes at most"
            say(f"sends {stack.shown} ({stack.model}) {about}; nothing else should be asked meanwhile")
        complete, drafts = True, list[Accepted | None]()
        try:
            async with asyncio.timeout(minutes * 60):
                for stack in stacks:
                    await stack.probe()
                drafts += [await stack.accepted() for stack in stacks]
                for turn, (number, length, shape) in enumerate(plan):
                    say(f"{shape.name} at {length:,} tokens: {shape.told}")
                    for stack in stacks[::-1] if turn % 2 else stacks:  # each goes first every other time
                        try:
                            await stack.play(number, length, shape, burst)
                        except Unusable as error:
                            stack.failed[shape.name, length] = str(error)
                            say(f"{stack.name}{shape.name} {error}")
        except TimeoutError:
            complete = False
        for stack, before in zip(stacks, drafts, strict=False):
            after = await stack.accepted()
            if before is not None and after is not None and after.steps >= before.steps:
                stack.drafts = Accepted(after.steps - before.steps, after.tokens - before.tokens)
        return complete
    finally:
        for stack in stacks:
            await stack.client.aclose()


def parser_of(name: str, description: str) -> Parser:
    parser = Parser(prog=f"seamark bench {name}", description=description)
    parser.add_argument("--base-url", required=True, metavar="URL", help="any OpenAI-compatible server")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the API key; default: OPENAI_API_KEY")
    parser.add_argument("--bound", type=float, metavar="SECONDS", help="say how many first tokens come within so many")
    return parser


def key_in(file: Path | None) -> str | None:
    """Raises `SettingsError`."""
    return (read_secret("api_key_file", file) if file else os.environ.get("OPENAI_API_KEY")) or None


def main(argv: list[str]) -> int:
    names = [shape.name for shape in SHAPES]
    parser = parser_of("mine", "what a stack that runs finds in its cache, and how fast")
    parser.add_argument("--against", metavar="URL", help="another one, asked in turns: with Seamark and without")
    parser.add_argument("--quick", action="store_true", help="three shapes at one length: a dozen requests")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", choices=names, help=f"of {', '.join(names)}")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="of documents; default: 2000 6000")
    parser.add_argument("--burst", type=int, default=BURST, metavar="N", help=f"requests at once; default: {BURST}")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="how often each shape is asked; default: 1")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="end by then, with what there is")
    parser.add_argument("--json", action="store_true", help="print a report instead of the table")
    args = parser.parse_args(argv)
    lengths = args.tokens or (QUICK_LENGTHS if args.quick else LENGTHS)
    if not (min(lengths) >= SHORTEST and 2 <= args.burst <= MOST and args.rounds > 0 and args.minutes > 0):
        limits = f"--tokens at least {SHORTEST}, --burst 2 to {MOST}, --rounds and --minutes above zero"  # a nan, too
        parser.error(limits)
    try:
        key = key_in(args.api_key_file)
    except SettingsError as error:
        parser.error(str(error))
    asked = {"this": args.base_url, "other": args.against} if args.against else {"": args.base_url}
    stacks = [Stack(url, args.model, key, name) for name, url in asked.items()]
    chosen = args.shapes or names[: QUICK if args.quick else None]
    shapes = [shape for shape in SHAPES if shape.name in chosen]
    # For an early end: all shapes at one length before the next.
    planned = [*product(range(args.rounds), sorted({*lengths}), shapes)]
    ended, status = "", 0
    try:
        if not asyncio.run(measure(stacks, planned, args.burst, args.minutes)):
            ended = f"ended after {args.minutes:g} minutes, before all was asked: --minutes"
        status = int(any(stack.failed for stack in stacks))
    except Unusable as error:
        ended, status = str(error), 1
    except KeyboardInterrupt:
        ended, status = "interrupted before all was asked", 130
    if all(stack.asked for stack in stacks):
        verdicts = "\n".join(stack.name + verdict(stack) for stack in stacks)
        text = f"\n{table(stacks, args.bound)}\n\n{verdicts}"
        print(json.dumps({"stacks": [*map(report, stacks)]}, indent=2) if args.json else text)
    else:
        ended, status = ended or next(why for stack in stacks for why in stack.failed.values()), status or 1
    if ended:
        say(f"seamark bench mine: {ended}")
    return status
