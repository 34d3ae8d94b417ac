"""smg's own process before the simulated workers, which answer HTTP on a clock faster than the wall's.

Each worker has a port of its own; a request comes to the one that the process chose, and its answer ends when the
simulated one does. First tokens count from a worker's port on: what the process itself takes is not in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from proxy.bench.harness.servers import NotStarted, Server, Servers
from proxy.commands.render_server import free_port
from proxy.server.descriptors import raise_limit
from tests.bench.traces.formats import BLOCK, Place, TraceRequest
from tests.bench.traces.simulated_fleet import Execution, Fleet, Policy, Profile

NAME = "smg"

MODULE = "smg"

START_SECONDS = 60.0

MODEL = "simulated"

# A name of 64 letters stands for a block of 512 tokens: the process compares texts, and the shares stay the same.
TOKENS_PER_LETTER = 8

COMPLETIONS = "/v1/completions"

# What the process may ask of a worker before it sends it requests.
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


def installed() -> list[str] | None:
    """The command that starts the user's smg; None if there is none."""
    if importlib.util.find_spec(MODULE) is not None:
        return [sys.executable, "-m", MODULE, "launch"]
    script = shutil.which(NAME)
    return [script, "launch"] if script is not None else None


@dataclass
class Played:
    """How it went."""

    failed: int = 0  # requests
    failure: str = ""  # of the first one, or why the process did not serve
    late: float = 0.0  # seconds of simulated time by which the clock fell behind, 99 % of its steps less

    @property
    def remarks(self) -> list[str]:
        """What a reader of the row has to know, a line each."""
        found = [f"{NAME} failed {self.failed} requests: {self.failure}"] if self.failed else []
        if self.late > LATE_SECONDS:
            found.append(f"{NAME}: the clock was up to {self.late:.2f} simulated seconds late: take a lower --speed")
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
        self.played = Played()

    def tell(self, worker: int, execution: Execution | None, end: int, kept: Sequence[Place], gone: int) -> None:
        """Nobody listens."""

    def done(self, execution: Execution, now: float) -> None:
        """An answer is complete."""
        super().done(execution, now)
        if (answer := self._answers.pop(execution, None)) is not None and not answer.done():
            answer.set_result(None)

    def play(self, command: Sequence[str], until: float) -> Played:
        """All that was sent, through a process that `command` starts; ends it, and returns, at that simulated time.

        Raises `NotStarted`.
        """
        raise_limit()
        with tempfile.TemporaryDirectory(prefix="seamark-router-") as folder, Servers(Path(folder)) as servers:
            asyncio.run(self._play(servers, command, until))
        return self.played

    async def _play(self, servers: Servers, command: Sequence[str], until: float) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post(COMPLETIONS, self._answer)
        for path in PAGES:
            app.router.add_get(path, _page)
        # The process tries whether workers speak HTTP/2: each try would be an error in the log.
        quiet = logging.Logger(NAME, logging.CRITICAL + 1)
        runner = web.AppRunner(app, access_log=None, logger=quiet, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            for _ in self.workers:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._ports = {address[1]: number for number, address in enumerate(runner.addresses)}
            router = await _started(servers, command, [f"http://127.0.0.1:{port}" for port in self._ports])
            self._url = router.url + COMPLETIONS
            connections = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(
                connector=connections, timeout=aiohttp.ClientTimeout(total=None)
            ) as self._client:
                await self._keep_time(until, router)
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await runner.cleanup()
        late = sorted(self._late)
        self.played.late = late[int(0.99 * len(late))] if late else 0.0

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
        body = {"model": MODEL, "prompt": text_of(request), "max_tokens": 1, "seed": number}
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


def text_of(request: TraceRequest) -> str:
    """A prompt that begins as those do which share its blocks, and ends as no other does."""
    blocks = [hashlib.blake2b(str(name).encode(), digest_size=32).hexdigest() for name in request.blocks]
    own = hashlib.blake2b(f"{request.session} {request.turn}".encode(), digest_size=32).hexdigest()
    return "".join(blocks) + own[: max(1, (request.prompt - BLOCK * len(blocks)) // TOKENS_PER_LETTER)]


async def _page(http: web.Request) -> web.Response:
    return web.json_response({**ABOUT, "object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]})


async def _started(servers: Servers, command: Sequence[str], workers: Sequence[str]) -> Server:
    """The process, with its default policy (cache_aware), once it serves."""
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port)]
    where += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    flags = ["--policy", "cache_aware", "--request-timeout-secs", "3600", "--log-level", "warn"]
    router = servers.start(NAME, port, [*command, *where, *flags, "--worker-urls", *workers], {})
    await asyncio.to_thread(router.wait_until_ready, "/health", START_SECONDS)
    return router
