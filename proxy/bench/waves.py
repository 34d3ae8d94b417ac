"""A cold fan-out: interleaved groups of prompts that share a long beginning, at once, on an engine that has other work.

What it costs is counted in the prompt tokens that the engine computes, from the line its log has for each iteration.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from proxy.bench import exact
from proxy.bench.client import Answer
from proxy.bench.cpu_time import CpuTime
from proxy.bench.engines import MODEL_NAME, Server
from proxy.bench.samples import samples_of
from proxy.bench.sending import COMPLETION, Leave, Left, judgeable, send
from proxy.bench.token_requests import fresh_tokens

SETTLE_SECONDS = 30.0
DECODER_TOKENS = 100  # of the prompt of a request that only decodes
DECODING_LINES = 9  # of its stream, after which the log has the line of its prompt's pass
SHORT_TOKENS = 60
SHORT_INTERVAL = 0.2  # seconds
_ITERATION = re.compile(rb"Iteration\(\d+\): \d+ context requests, (\d+) context tokens")


@dataclass(frozen=True)
class Plan:
    """Which requests make a wave; lengths in tokens."""

    shared: int  # by all prompts of a group
    own: int  # of each prompt behind it
    groups: int = 2
    size: int = 8  # requests of a group
    decoders: int = 4  # unrelated requests that decode all the while
    decoded: int = 11_000  # tokens of their answers: more than a wave takes

    @property
    def ideal(self) -> int:
        """Prompt tokens that have to be computed: each shared part once."""
        return self.groups * (self.shared + self.size * self.own)

    def prompts(self, *seed: object) -> list[list[int]]:
        """A request of each group in turn: A, B, A, B, ..."""
        shared = [fresh_tokens(self.shared, *seed, group) for group in range(self.groups)]
        return [
            [*shared[group], *fresh_tokens(self.own, *seed, group, member)]
            for member, group in itertools.product(range(self.size), range(self.groups))
        ]


@dataclass(frozen=True)
class Wave:
    """What became of a wave. Times in seconds."""

    prompts: Sequence[Sequence[int]]
    results: Sequence[Answer | Left]  # in the same order
    computed: int  # prompt tokens, short requests included
    seconds: float  # until the last answer had ended
    cpu_seconds: float  # of the server and its processes meanwhile, user and system
    short_ttfts: Sequence[float]

    @property
    def answers(self) -> list[Answer]:
        """Of those whose client stayed."""
        return [result for result in self.results if isinstance(result, Answer)]

    @property
    def slow_short(self) -> float:
        """99th percentile of the short requests' times to the first token."""
        return sorted(self.short_ttfts)[math.ceil(0.99 * len(self.short_ttfts)) - 1]


@dataclass(frozen=True)
class Line:
    """One wave on one engine, its answers judged. Times in seconds, lengths in tokens."""

    engine: str
    computed: int
    ideal: int
    left_early: int  # requests whose client left before their first token
    left_later: int
    answered: int
    first_token: float  # median
    seconds: float
    cpu_seconds: float
    differing: int
    largest_error: float  # of a logprob

    @property
    def ratio(self) -> float:
        """Computed over what has to be."""
        return self.computed / self.ideal


class PromptTokens:
    """Counts the prompt tokens that an engine computes from here on."""

    def __init__(self, log: Path) -> None:
        self._log, self._offset = log, log.stat().st_size

    def computed(self) -> int:
        """As the log has it by now."""
        with self._log.open("rb") as log:
            log.seek(self._offset)
            return sum(int(tokens) for tokens in _ITERATION.findall(log.read()))


async def run_wave(
    client: httpx.AsyncClient, server: Server, plan: Plan, *seed: object, leave: Leave | None = None, short=False
) -> Wave:
    """Send a wave nobody has seen to an idle engine. `leave`: of the first request of each group.

    `short`: unrelated short requests arrive in a steady rhythm while it runs.
    """
    prompts = plan.prompts(*seed)
    async with decoding(client, server, plan, *seed):
        tokens, cpu = PromptTokens(server.log), CpuTime(server.process.pid)
        cpu_before = cpu.seconds()
        sent = time.perf_counter()
        arriving = asyncio.create_task(short_requests(client, server, *seed)) if short else None
        results = await asyncio.gather(
            *(
                send(client, server.url, COMPLETION, body(prompt, plan.shared), leave if index < plan.groups else None)
                for index, prompt in enumerate(prompts)
            )
        )
        seconds, cpu_seconds = time.perf_counter() - sent, cpu.seconds() - cpu_before
        short_ttfts = []
        if arriving is not None:
            arriving.cancel()  # no more of them; those on the way are waited for
            short_ttfts = await arriving
    await until_idle(client, server)
    return Wave(prompts, results, tokens.computed(), seconds, cpu_seconds, short_ttfts)


def body(prompt: Sequence[int], shared: int) -> Mapping[str, object]:
    """A streamed greedy completion with everything a comparison needs, hinted at the end of its shared part."""
    return judgeable(prompt, vllm_xargs={"seamark_boundaries": [shared]}, stream=True)


@contextlib.asynccontextmanager
async def decoding(client: httpx.AsyncClient, server: Server, plan: Plan, *seed: object) -> AsyncIterator[None]:
    """Unrelated requests that generate one token after the other for as long as the context lasts.

    Raises `RuntimeError` if one of them came to its end before, `httpx.HTTPStatusError` if it was refused.
    """

    async def one(number: int, began: asyncio.Future[None]) -> None:
        prompt = fresh_tokens(DECODER_TOKENS, *seed, "decoder", number)
        request = {"prompt": prompt, "max_tokens": plan.decoded, "ignore_eos": True, "stream": True}
        async with client.stream("POST", server.url + COMPLETION, json={"model": MODEL_NAME, **request}) as response:
            response.raise_for_status()
            lines = 0
            async for _ in response.aiter_lines():
                lines += 1
                if lines == DECODING_LINES:
                    began.set_result(None)

    begun = [asyncio.get_running_loop().create_future() for _ in range(plan.decoders)]
    tasks = [asyncio.create_task(one(number, began)) for number, began in enumerate(begun)]
    try:
        for task, began in zip(tasks, begun, strict=True):
            await asyncio.wait((task, began), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        yield
        if any(task.done() for task in tasks):
            raise RuntimeError("a request that was to decode all the while has ended")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def short_requests(client: httpx.AsyncClient, server: Server, *seed: object) -> list[float]:
    """Times to the first token of requests that arrive in a steady rhythm until the task is cancelled."""
    on_the_way: list[asyncio.Task[Answer | Left]] = []
    began = time.perf_counter()
    with contextlib.suppress(asyncio.CancelledError):
        for number in itertools.count():
            request = {"prompt": fresh_tokens(SHORT_TOKENS, *seed, "short", number), "max_tokens": 1, "stream": True}
            on_the_way.append(asyncio.create_task(send(client, server.url, COMPLETION, request)))
            await asyncio.sleep(began + (number + 1) * SHORT_INTERVAL - time.perf_counter())
    return [answer.ttft for answer in await asyncio.gather(*on_the_way) if isinstance(answer, Answer)]


async def until_idle(client: httpx.AsyncClient, server: Server) -> None:
    """Return once the engine runs nothing. Raises `TimeoutError` if it goes on for `SETTLE_SECONDS`."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while True:
            found = await samples_of(client, server)
            if found.get("vllm:num_requests_running") == found.get("vllm:num_requests_waiting") == 0:
                return
            await asyncio.sleep(0.1)


Right = Mapping[tuple[int, ...], Answer]


async def right_answers(client: httpx.AsyncClient, reference: Server, plan: Plan, waves: Sequence[Wave]) -> Right:
    """The reference engine's answers to all prompts of `waves`."""
    prompts = list({tuple(prompt) for wave in waves for prompt in wave.prompts})
    asked = (send(client, reference.url, COMPLETION, body(prompt, plan.shared)) for prompt in prompts)
    return dict(zip(prompts, await asyncio.gather(*asked), strict=True))


def judged(engine: str, plan: Plan, wave: Wave, right: Right) -> Line:
    """Compare the answers of a wave with the right ones."""
    differences = []
    for prompt, result in zip(wave.prompts, wave.results, strict=True):
        if isinstance(result, Answer):
            complete = len(result.steps) == exact.MIN_TOKENS
            difference = exact.compare(result, right[tuple(prompt)])
            differences.append(difference if complete else exact.Difference(len(result.steps), 0.0))
    left = [result for result in wave.results if isinstance(result, Left)]
    return Line(
        engine,
        computed=wave.computed,
        ideal=plan.ideal,
        left_early=sum(not result.events for result in left),
        left_later=sum(result.events > 0 for result in left),
        answered=len(wave.answers),
        first_token=statistics.median(answer.ttft for answer in wave.answers),
        seconds=wave.seconds,
        cpu_seconds=wave.cpu_seconds,
        differing=sum(not difference.exact for difference in differences),
        largest_error=max(difference.largest_error for difference in differences),
    )
