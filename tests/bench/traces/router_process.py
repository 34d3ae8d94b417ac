"""Another router's own program before the simulated workers, which answer HTTP on a clock faster than the wall's.

Each worker has a port of its own; a request comes to the one that the program chose, and its answer ends when the
simulated one does. First tokens count from a worker's port on: what the program itself takes is not in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
from aiohttp import web

from proxy.bench.harness.servers import NotStarted, Server, Servers
from proxy.server.descriptors import raise_limit
from tests.bench.peers import PEERS, SMG, VLLM_ROUTER, Peer, Started, start
from tests.bench.traces.formats import BLOCK, Place, TraceRequest
from tests.bench.traces.simulated_fleet import Execution, Fleet, Policy, Profile

MODEL = "simulated"

MODEL_SECONDS = 30.0  # until a program lists it

# A name of 64 letters, or 16 ids, stands for a block of 512 tokens: programs compare them, and shares stay the same.
TOKENS_PER_LETTER = 8

TOKENS_PER_ID = 32

COMPLETIONS = "/v1/completions"

# What a program may ask of a worker before it sends it requests. How busy it is it does not tell.
PAGES = (
    "/health",
    "/health_generate",
    "/v1/models",
    "/get_model_info",
    "/model_info",
    "/get_server_info",
    "/server_info",
)

ABOUT = {"model_path": MODEL, "served_model_name": MODEL, "model_id": MODEL, "is_generation": True}

LATE_SECONDS = 0.1  # of simulated time, by which a clock that runs too fast falls behind in a hundredth of its steps


def text_of(request: TraceRequest) -> str:
    """A prompt that begins as those do which share its blocks, and ends as no other does."""
    blocks = [hashlib.blake2b(str(name).encode(), digest_size=32).hexdigest() for name in request.blocks]
    own = hashlib.blake2b(f"{request.session} {request.turn}".encode(), digest_size=32).hexdigest()
    return "".join(blocks) + own[: max(1, (request.prompt - BLOCK * len(blocks)) // TOKENS_PER_LETTER)]


def ids_of(request: TraceRequest) -> list[int]:
    """The same as ids of tokens."""
    names = [f"{name} {at}" for name in request.blocks for at in range(BLOCK // TOKENS_PER_ID)]
    own = max(1, (request.prompt - BLOCK * len(request.blocks)) // TOKENS_PER_ID)
    names += [f"{request.session} {request.turn} {at} own" for at in range(own)]
    return [zlib.crc32(name.encode()) & 0x7FFFFFFF for name in names]


class Program(NamedTuple):
    """A router's own program, with its default policy (cache_aware)."""

    peer: Peer
    prompt: Callable[[TraceRequest], str | list[int]]  # vllm-router 0.1.17 compares ids alone: texts go to the idlest


PROGRAMS = {
    f"{peer.name}-program": Program(peer, ids_of if peer.name == VLLM_ROUTER else text_of)
    for peer in PEERS
    if peer.name in (VLLM_ROUTER, SMG)
}


@dataclass
class Played:
    """How it went."""

    failed: int = 0  # requests
    failure: str = ""  # of the first one
    late: float = 0.0  # seconds of simulated time by which the clock fell behind, 99 % of its steps less

    def remarks(self, name: str) -> list[str]:
        """What a reader of the program's row has to know, a line each."""
        found = [f"{name} failed {self.failed} requests: {self.failure}"] if self.failed else []
        if self.late > LATE_SECONDS:
            found.append(f"{name}: the clock was up to {self.late:.2f} simulated seconds late: take a lower --speed")
        return found


class HttpFleet(Fleet):
    """Simulated workers behind ports. What is sent goes out by HTTP when its time has come."""

    def __init__(
        self, workers: int, profile: Profile, hint: Callable[[TraceRequest], tuple[Place, ...]], speed: float
    ) -> None:
        """`speed`: simulated seconds in a second."""
        super().__init__(workers, profile, Policy(), hint)
        self._speed = speed
        self._posted: dict[int, TraceRequest] = {}  # under way, by a number that their bodies carry
        self._count = 0
        self._answers: dict[Execution, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = 0.0
        self._changed = asyncio.Event()
        self._late: list[float] = []
        self._ports: dict[int, int] = {}  # the workers' numbers, by port
        self._url = ""
        self._client: aiohttp.ClientSession | None = None
        self._prompt: Callable[[TraceRequest], str | list[int]] = text_of
        self.played = Played()

    def tell(self, worker: int, execution: Execution | None, end: int, kept: Sequence[Place], gone: int) -> None:
        """Nobody listens."""

    def done(self, execution: Execution, now: float) -> None:
        """An answer is complete."""
        super().done(execution, now)
        if (answer := self._answers.pop(execution, None)) is not None and not answer.done():
            answer.set_result(None)

    def play(self, program: Program, until: float, say: Callable[[str], None]) -> Played:
        """All that was sent, through the program; ends it, and returns, at that simulated time. Raises `NotStarted`."""
        raise_limit()
        with tempfile.TemporaryDirectory(prefix="seamark-router-") as folder, Servers(Path(folder)) as servers:
            begin = partial(start, servers, program.peer, folder=Path(folder), say=say)
            asyncio.run(self._play(program, until, begin))
        return self.played

    async def _play(self, program: Program, until: float, begin: Callable[[Sequence[str]], Started]) -> None:
        self._prompt = program.prompt
        app = web.Application(client_max_size=2**26)
        app.router.add_post(COMPLETIONS, self._answer)
        for path in PAGES:
            app.router.add_get(path, _page)
        # A program tries whether workers speak HTTP/2: each try would be an error in the log.
        quiet = logging.Logger(program.peer.name, logging.CRITICAL + 1)
        runner = web.AppRunner(app, access_log=None, logger=quiet, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            for _ in self.workers:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._ports = {address[1]: number for number, address in enumerate(runner.addresses)}
            started = await asyncio.to_thread(begin, [f"http://127.0.0.1:{port}" for port in self._ports])
            if (router := started.server) is None:
                raise NotStarted(started.failure)
            self._url = router.url + COMPLETIONS
            connections = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(
                connector=connections, timeout=aiohttp.ClientTimeout(total=None)
            ) as self._client:
                await self._wait_for_model(router)
                await self._keep_time(until, router)
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await runner.cleanup()
        late = sorted(self._late)
        self.played.late = late[int(0.99 * len(late))] if late else 0.0

    async def _wait_for_model(self, router: Server) -> None:
        """smg is healthy before it knows what its workers serve."""
        try:
            async with asyncio.timeout(MODEL_SECONDS):
                while True:
                    async with self._client.get(router.url + "/v1/models") as answer:
                        if MODEL in await answer.text():
                            return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise NotStarted(f"{router.name} does not list its workers' model:\n{router.log_end()}") from None

    @property
    def _time(self) -> float:
        """Simulated seconds since the start."""
        return (time.monotonic() - self._began) * self._speed

    async def _keep_time(self, until: float, router: Server) -> None:
        self._began = time.monotonic()
        while (now := self._time) < until and (self._events or self._tasks):
            if self._events and self._events[0][0] <= now:
                self._late.append(now - self._events[0][0])
            self.run(now)
            if router.process.poll() is not None:
                raise NotStarted(f"{router.name} ended with {router.process.returncode}:\n{router.log_end()}")
            following = min(until, self._events[0][0]) if self._events else until
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, max(0.0, following - self._time) / self._speed)):
                    await self._changed.wait()

    def _arrived(self, request: TraceRequest) -> None:
        self._count += 1
        self._posted[self._count] = request
        task = asyncio.create_task(self._post(self._count, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, number: int, request: TraceRequest) -> None:
        """A client's request, from its being sent to its answer."""
        body = {"model": MODEL, "prompt": self._prompt(request), "max_tokens": 1, "seed": number}
        failure = ""
        try:
            async with self._client.post(self._url, json=body) as answer:
                said = await answer.text()
                if answer.status != 200:
                    failure = f"{answer.status} {said[:200]}"
        except aiohttp.ClientError as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            self._posted.pop(number, None)
            self._changed.set()
        if failure:
            self.played.failed += 1
            self.played.failure = self.played.failure or failure

    async def _answer(self, http: web.Request) -> web.Response:
        """One worker's answer, when it is complete."""
        port = http.transport.get_extra_info("sockname")[1] if http.transport is not None else 0
        request = self._posted.get(int((await http.json())["seed"]))
        if request is None:
            raise web.HTTPBadRequest(text="a request that nobody has sent")
        now = self._time
        self.run(now)
        execution = self.begin(request, self._ports[port], now)
        answer = self._answers[execution] = asyncio.get_running_loop().create_future()
        self._changed.set()
        await answer
        usage = {"prompt_tokens": request.prompt, "completion_tokens": 1, "total_tokens": request.prompt + 1}
        choice = {"index": 0, "text": "x", "finish_reason": "stop"}
        return web.json_response(
            {"id": "x", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice], "usage": usage}
        )


async def _page(http: web.Request) -> web.Response:
    return web.json_response({**ABOUT, "object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]})
