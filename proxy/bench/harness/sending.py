"""Any generation request, streamed or not, timed, and left by its client wherever a benchmark wants that."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import TOP_LOGPROBS, Answer, Step
from proxy.bench.harness.exact import MIN_TOKENS
from proxy.bench.harness.servers import MODEL_NAME

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class Leave(NamedTuple):
    """When a client closes its connection before the answer has ended: whichever comes first."""

    seconds: float | None = None  # after sending
    events: int | None = None  # received, of a stream


class Left(NamedTuple):
    """A request whose client has left."""

    events: int  # that had come by then


async def send(
    client: httpx.AsyncClient, url: str, path: str, body: Mapping[str, Any], leave: Leave | None = None
) -> Answer | Left:
    """The answer of the server at `url`, every step of every choice one after the other, prompt logprobs first.

    Raises `RuntimeError` for an error answer.
    """
    if body.get("stream"):
        body = {**body, "stream_options": {"include_usage": True}}
    leave = leave or Leave()
    received: list[Mapping[str, Any]] = []
    times: list[float] = []
    sent = time.perf_counter()
    try:
        async with (
            asyncio.timeout(leave.seconds),
            client.stream("POST", url + path, json={"model": MODEL_NAME, **body}) as response,
        ):
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code} {(await response.aread()).decode()[:500]}")
            async for event in _events(response, bool(body.get("stream"))):
                if "error" in event:
                    raise RuntimeError(f"in the stream: {event['error']}")
                received.append(event)
                times.append(time.perf_counter())
                if len(received) == leave.events:
                    return Left(len(received))
    except TimeoutError:
        return Left(len(received))
    return _answer(received, times, sent, body.get("prompt"))


def judgeable(prompt: Sequence[int], **fields: Any) -> Mapping[str, Any]:
    """A greedy completion of token ids with everything that an exactness check needs."""
    return {
        "prompt": list(prompt),
        "temperature": 0,
        "max_tokens": MIN_TOKENS,
        "ignore_eos": True,
        "logprobs": TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
        **fields,
    }


async def _events(response: httpx.Response, streamed: bool):
    if not streamed:
        yield json.loads(await response.aread())
        return
    ended = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            ended = True
        elif line.startswith("data: "):
            yield json.loads(line[6:])
    if not ended:
        raise RuntimeError("the stream ended before its end")


def _answer(events: list[Mapping[str, Any]], times: list[float], sent: float, prompt: Any) -> Answer:
    steps: dict[int, list[Step]] = {}  # by choice
    usage: Mapping[str, Any] = {}
    first_token = 0.0
    for event, at in zip(events, times, strict=True):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            found = [*_prompt_steps(choice, prompt), *_steps(choice.get("logprobs") or {})]
            steps.setdefault(choice["index"], []).extend(found)
            if not first_token and (found or choice.get("text") or (choice.get("delta") or {}).get("content")):
                first_token = at
    details = usage.get("prompt_tokens_details") or {}
    flat = tuple(step for index in sorted(steps) for step in steps[index])
    last = times[-1]
    return Answer(flat, usage["prompt_tokens"], details.get("cached_tokens"), sent, first_token or last, last)


def _steps(logprobs: Mapping[str, Any]) -> Iterator[Step]:
    for entry in logprobs.get("content") or ():  # of a chat
        yield Step(
            entry["token"], entry["logprob"], {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
        )
    if "tokens" in logprobs:  # of a completion
        yield from map(Step, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])


def _prompt_steps(choice: Mapping[str, Any], prompt: Any) -> Iterator[Step]:
    for token, entry in zip(prompt or (), choice.get("prompt_logprobs") or (), strict=False):
        if entry is not None:  # the first token has none
            top = {name: other["logprob"] for name, other in entry.items()}
            yield Step(str(token), top[str(token)], top)
