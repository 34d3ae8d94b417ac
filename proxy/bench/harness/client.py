"""Requests as a client would send them, timed: prompts with a shared part of exact length, and the passes they took."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.servers import MODEL_NAME
from proxy.boundaries.divergence import common_prefix
from proxy.fleet.answer_compare import ContinuedToken

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

Messages = Sequence[Mapping[str, Any]]

TimedEvent = tuple[Mapping[str, Any], float]  # and when it came, in seconds on the monotonic clock

TOP_LOGPROBS, MIN_TOKENS = 5, 32  # of an answer that is compared with another's

# Fields of a request.
GREEDY: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True, "return_tokens_as_token_ids": True}


class TimedAnswer(NamedTuple):
    """A finished answer. Times in seconds on the monotonic clock, lengths in tokens."""

    steps: tuple[ContinuedToken, ...]
    prompt_tokens: int
    cached_tokens: int | None
    sent: float
    first_token: float
    finished: float

    @property
    def ttft(self) -> float:
        return self.first_token - self.sent


def open_client(
    seconds: float | httpx.Timeout = 300.0, headers: Sequence[tuple[bytes, bytes]] = ()
) -> httpx.AsyncClient:
    """A client with a connection for each request of at most `seconds`: servers close idle ones whenever they like."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(headers=headers, timeout=seconds, limits=limits, trust_env=False)


async def ask(client: httpx.AsyncClient, url: str, messages: Messages, tokens: int, **fields: Any) -> TimedAnswer:
    """Stream a greedy answer of exactly `tokens` tokens to a chat. Raises `RuntimeError` for an error answer."""
    body = {**GREEDY, "messages": messages, "max_tokens": tokens, "stream": True, "logprobs": True}
    return await send(client, url, CHAT, {**body, "top_logprobs": TOP_LOGPROBS, **fields})


async def ask_all(
    client: httpx.AsyncClient, url: str, prompts: Sequence[Messages], tokens: int, parallel: int, **fields: Any
) -> list[TimedAnswer]:
    gate = asyncio.Semaphore(parallel)

    async def one(messages: Messages) -> TimedAnswer:
        async with gate:
            return await ask(client, url, messages, tokens, **fields)

    return list(await asyncio.gather(*(one(messages) for messages in prompts)))


async def complete(client: httpx.AsyncClient, url: str, prompt: Sequence[int], **fields: Any) -> TimedAnswer:
    """A greedy completion of a prompt given as token ids. Raises `RuntimeError` for an error answer."""
    return await send(client, url, COMPLETION, judgeable(prompt, **fields))


def judgeable(prompt: Sequence[int], **fields: Any) -> Mapping[str, Any]:
    """A greedy completion of token ids with everything that an exactness check needs."""
    return {**GREEDY, "prompt": list(prompt), "max_tokens": MIN_TOKENS, "logprobs": TOP_LOGPROBS, **fields}


async def send(client: httpx.AsyncClient, url: str, path: str, body: Mapping[str, Any]) -> TimedAnswer:
    """The answer of the server at `url`. Raises `RuntimeError` for an error answer."""
    sent = time.perf_counter()
    return answer_of([event async for event in events_of(client, url, path, body)], sent, body)


async def events_of(
    client: httpx.AsyncClient, url: str, path: str, body: Mapping[str, Any]
) -> AsyncIterator[TimedEvent]:
    """The events of a stream, or the one of an answer in one piece. Raises `RuntimeError` for an error answer."""
    streamed = bool(body.get("stream"))
    asked = {"model": MODEL_NAME, **body} | ({"stream_options": {"include_usage": True}} if streamed else {})
    async with client.stream("POST", url + path, json=asked) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code} {(await response.aread()).decode()[:500]}")
        if not streamed:
            yield json.loads(await response.aread()), time.perf_counter()
            return
        ended = False
        async for line in response.aiter_lines():
            ended = ended or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(f"in the stream: {event['error']}")
                yield event, time.perf_counter()
        if not ended:
            raise RuntimeError("the stream ended before its end")


def answer_of(events: Sequence[TimedEvent], sent: float, body: Mapping[str, Any]) -> TimedAnswer:
    """What `events` say together: every step of every choice one after the other, prompt logprobs first."""
    steps: dict[int, list[ContinuedToken]] = {}  # by choice
    usage: Mapping[str, Any] = {}
    first_token = 0.0
    for event, at in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            found = [*_prompt_steps(choice, body.get("prompt")), *_steps(choice.get("logprobs") or {})]
            steps.setdefault(choice["index"], []).extend(found)
            if not first_token and (found or choice.get("text") or (choice.get("delta") or {}).get("content")):
                first_token = at
    details = usage.get("prompt_tokens_details") or {}
    flat = tuple(step for index in sorted(steps) for step in steps[index])
    last = events[-1][1]
    return TimedAnswer(flat, usage["prompt_tokens"], details.get("cached_tokens"), sent, first_token or last, last)


def _steps(logprobs: Mapping[str, Any]) -> Iterator[ContinuedToken]:
    for entry in logprobs.get("content") or ():  # of a chat
        yield ContinuedToken(entry["token"], {other["token"]: other["logprob"] for other in entry["top_logprobs"]})
    if "tokens" in logprobs:  # of a completion
        yield from map(ContinuedToken, logprobs["tokens"], logprobs["top_logprobs"])


def _prompt_steps(choice: Mapping[str, Any], prompt: Any) -> Iterator[ContinuedToken]:
    for token, entry in zip(prompt or (), choice.get("prompt_logprobs") or (), strict=False):
        if entry is not None:  # the first token has none
            yield ContinuedToken(str(token), {name: other["logprob"] for name, other in entry.items()})


async def tokens_of(client: httpx.AsyncClient, url: str, messages: Messages) -> list[int]:
    response = await client.post(url + "/tokenize", json={"model": MODEL_NAME, "messages": messages})
    response.raise_for_status()
    tokens: list[int] = response.json()["tokens"]
    return tokens


LOG_SECONDS = 10.0

_ITERATION = re.compile(
    rb"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, \d+ generation requests, (\d+)"
)


class Passes(NamedTuple):
    with_prompt: int  # those that computed prompt tokens
    prompt_tokens: int
    tokens: int  # computed, those of prompts and of answers


class PassCounter:
    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0
        self.restart()

    def restart(self) -> None:
        self._offset = self._log.stat().st_size

    def after(self, answers: Sequence[TimedAnswer]) -> Passes:
        """Passes since `restart`, once the log accounts for all tokens of `answers`, else `TimeoutError`; restarts."""
        # The last token of an answer is sampled, never computed.
        wanted = sum(answer.prompt_tokens - (answer.cached_tokens or 0) + len(answer.steps) - 1 for answer in answers)
        deadline = time.monotonic() + LOG_SECONDS
        while (passes := self.so_far()).tokens < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._log.name}: {passes.tokens} tokens computed of {wanted}")
            time.sleep(0.005)
        self.restart()
        return passes

    def so_far(self) -> Passes:
        """Passes since `restart` that the log names by now."""
        with self._log.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        counts = [(int(prompt), int(generated)) for prompt, generated in _ITERATION.findall(text)]
        prompts = [prompt for prompt, _ in counts]
        return Passes(sum(map(bool, prompts)), sum(prompts), sum(map(sum, counts)))


_SENTENCE = (
    ("The editor", "A harbour pilot", "Each reader", "The archive", "Our team", "The northern station", "A clerk"),
    ("checks", "describes", "records", "compares", "repeats", "returns", "measures", "answers"),
    ("the figures", "every request", "a short report", "the first page", "its own notes", "the tide tables"),
    ("before noon", "without delay", "in plain words", "for the next reader", "twice a week", "with care"),
)

# First words that share no beginning, so that two questions part at their first token.
QUESTIONS = (
    "What changed since the last report, and who has to know about it?",
    "Please list the three risks that matter most this week.",
    "How would you explain the main figure to a newcomer?",
    "Summarise the second section in two sentences.",
    "Give an example from the harbour that fits the rule.",
    "Is there anything in the notes that contradicts the summary?",
)


def prose(words: int, seed: int) -> str:
    """About `words` words of dull English, the same for the same seed."""
    draw = random.Random(seed)
    text: list[str] = []
    while len(text) < words:
        sentence = " ".join(map(draw.choice, _SENTENCE)) + "."
        text += sentence.split()
    return " ".join(text[:words])


async def with_shared_tokens(
    client: httpx.AsyncClient, url: str, shared: int, seed: int, questions: Sequence[str] = QUESTIONS
) -> tuple[Messages, ...]:
    """Chats, any two of which share exactly `shared` tokens; `ValueError` if the tokenizer does not allow that."""

    def chats(system: str) -> tuple[Messages, ...]:
        return tuple(
            [{"role": "system", "content": system}, {"role": "user", "content": question}] for question in questions
        )

    async def shared_of(system: str) -> int:
        first, second = chats(system)[:2]
        return common_prefix(await tokens_of(client, url, first), await tokens_of(client, url, second))

    words = shared * shared // await shared_of(prose(shared, seed))  # close; then to just below, and up token by token
    while (length := await shared_of(prose(words, seed))) > shared:
        words -= max(1, (length - shared) // 4)
    system = prose(words, seed)
    while length < shared:
        system += " so"
        length = await shared_of(system)
    if length != shared:
        raise ValueError(f"no system prompt of {shared} shared tokens, nearest {length}")
    return chats(system)
