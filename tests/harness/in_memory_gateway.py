"""Gateways and commands without a socket: all their real parts, before fake workers that run in the same event loop.

Only `Upstream` is another one: it calls a worker's ASGI application. What HTTP itself does is shown in `tests/gateway`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest

from proxy.chat.chat import CHAT
from proxy.http import asgi
from proxy.http.client import Answer, Broken, Headers, Silent, Unreachable, Upstream
from proxy.pipeline.gateway import Gateway
from proxy.server.app import App, build
from proxy.settings import Settings
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until


class Call:
    """One run of an ASGI application, and what it has sent so far."""

    def __init__(self, app: Callable[..., Coroutine[Any, Any, Any]], scope: asgi.Scope, body: bytes) -> None:
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self._messages: asyncio.Queue[asgi.Scope | None] = asyncio.Queue(1)  # it waits until that is read
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: Callable[..., Coroutine[Any, Any, Any]], scope: asgi.Scope) -> None:
        try:
            await app(scope, self._receive, self._messages.put)
        finally:
            if not self._left.is_set():
                await self._messages.put(None)

    async def _receive(self) -> asgi.Scope:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def message(self, timeout: float | None = None) -> asgi.Scope | None:
        """The next one; None if the application has ended without another. Raises `TimeoutError` (seconds)."""
        async with asyncio.timeout(timeout):
            return await self._messages.get()

    async def body(self) -> AsyncIterator[bytes]:
        """Its pieces as they come; ends without an error where the application ended too early."""
        while (message := await self.message()) is not None:
            if piece := message.get("body", b""):
                yield piece
            if not message.get("more_body"):
                return

    @property
    def is_left(self) -> bool:
        return self._left.is_set()

    def leave(self) -> None:
        """The other side closes the connection."""
        self._left.set()
        if not self._messages.empty():  # whatever it sends from now on is lost
            self._messages.get_nowait()


class DirectAnswer(Answer):
    """What a worker's application sends."""

    __slots__ = ("_call", "_is_over", "_timeout")

    def __init__(self, call: Call, start: asgi.Scope, timeout: float | None) -> None:
        self._call, self._timeout, self._is_over = call, timeout, False
        self.status, self.headers = start["status"], tuple(start["headers"])

    def header(self, name: str) -> str | None:
        found = (value.decode("latin-1") for own, value in self.headers if own.decode().lower() == name)
        return next(found, None)

    async def next_chunk(self) -> bytes:
        while not self._is_over:
            try:
                message = await self._call.message(self._timeout)
            except TimeoutError:
                raise Silent("") from None
            if message is None or self._call.is_left:
                raise Broken("it broke off")
            self._is_over = not message.get("more_body")
            if piece := message.get("body", b""):
                return piece
        return b""

    def close(self) -> None:
        if not self._is_over:
            self._call.leave()


class DirectUpstream(Upstream):
    """Calls of workers in this process."""

    def __init__(self, *workers: RecordingWorker) -> None:
        super().__init__(1.0, 65536)
        self.workers = {worker.url: worker for worker in workers}
        self.faults: dict[str, Exception] = {}  # by the URLs of workers, raised instead of each call

    async def send(
        self,
        method: str,
        url: str,
        headers: Headers = (),
        body: bytes = b"",
        read_timeout: float | None = None,
        fresh: bool = False,
    ) -> Answer:
        parts = urlsplit(url)
        address = f"{parts.scheme}://{parts.netloc}"
        if (fault := self.faults.get(address)) is not None:
            raise fault
        if address not in self.workers:
            raise Unreachable("connection refused")
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(parts.path),
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "headers": [(name.lower(), value) for name, value in headers],
            "client": ("127.0.0.1", 1),
        }
        call = Call(self.workers[address], scope, body)
        try:
            start = await call.message(read_timeout)
        except TimeoutError:
            call.leave()
            raise Silent("") from None
        except asyncio.CancelledError:
            call.leave()
            raise
        if start is None:
            raise Broken("it closed the connection")
        return DirectAnswer(call, start, read_timeout)


async def told(*workers: RecordingWorker) -> None:
    """Return once a gateway knows all that the engines of `workers` have to say."""
    await until(lambda: all(worker.is_read for worker in workers))


async def learnt(own: InMemoryGateway) -> None:
    """Return once the chat templates of all workers are known."""
    pool, facts = own.gateway.pool, own.gateway.facts
    await until(lambda: all(worker.up and worker.renderer_ids for worker in pool.workers))
    await until(lambda: all(facts.facts(worker.renderer_id("")) is not None for worker in pool.workers))


async def settled(worker: RecordingWorker) -> int:
    """The renders that `worker` was asked for, once it is asked for no more."""
    seen, since = -1, 0
    while since < 20:  # turns of the event loop, in which everybody else had one, too
        seen, since = worker.renders, since + 1 if seen == worker.renders else 0
        await asyncio.sleep(0.01)
    return seen


class InMemoryGateway:
    """A started gateway and its pages."""

    def __init__(self, app: App, upstream: DirectUpstream) -> None:
        self.app, self.gateway, self.upstream = app, app.gateway, upstream
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=30)

    async def post(self, body: Any, path: str = CHAT, **headers: str) -> httpx.Response:
        """The whole answer; `headers` with underscores for hyphens. What came of it is counted when it is there."""
        answer = await self.client.send(self._request(body, path, headers))
        await self.gateway.idle.caught_up()
        return answer

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """A page, or what a worker says there."""
        return await self.client.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    async def status(self) -> dict[str, Any]:
        """The status page."""
        status: dict[str, Any] = (await self.get("/seamark/status")).json()
        return status

    async def shows(self, condition: Callable[[dict[str, Any]], object], seconds: float = 120.0) -> None:
        """Wait until the status page does. Raises `TimeoutError`."""
        async with asyncio.timeout(seconds):
            while not condition(await self.status()):
                await asyncio.sleep(0.01)

    async def explained(self, request: httpx.Response | str) -> dict[str, Any]:
        """What is said of a request, by its answer or its id, once its engine has said what it makes of it."""
        name = request if isinstance(request, str) else request.headers["x-request-id"]
        explained: dict[str, Any] = {"reason": None}
        async with asyncio.timeout(120):
            while explained["reason"] is None:
                explained = (await self.get(f"/seamark/requests/{name}")).json()
                await asyncio.sleep(0.005)
        return explained

    def opened(self, body: Any, path: str = CHAT, **headers: str) -> Call:
        """A request whose answer is read piece by piece, and whose client can leave."""
        request = self._request(body, path, headers)
        scope = {
            "type": "http",
            "method": request.method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("127.0.0.1", 1),
        }
        return Call(self.app, scope, request.content)

    def _request(self, body: Any, path: str, headers: dict[str, str]) -> httpx.Request:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"content-type": "application/json", **named}
        return self.client.build_request("POST", path, content=raw, headers=named)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of its samples that have these labels."""
        samples = (sample for family in self.gateway.metrics.registry.collect() for sample in family.samples)
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


@contextlib.asynccontextmanager
async def in_memory_gateway(
    *workers: RecordingWorker,
    prefill_workers: Sequence[RecordingWorker] = (),
    is_started: bool = True,
    **settings: Any,
) -> AsyncIterator[InMemoryGateway]:
    """Before `workers`, which are given URLs; without self-checks, unless `settings` want them. It is ready.

    Not started, it does nothing that a test does not call.
    """
    for number, worker in enumerate((*workers, *prefill_workers)):
        worker.url = worker.url or f"http://worker-{number}"
    urls, prefill_urls = (tuple(worker.url for worker in each) for each in (workers, prefill_workers))
    upstream = DirectUpstream(*workers, *prefill_workers)
    own = {"worker": urls, "prefill_worker": prefill_urls, "self_check_interval": 0, "health_interval": 0.05}
    settings = {**own, **settings}
    app = build(Gateway(Settings(**settings), upstream))
    if is_started:
        app.gateway.start()
    try:
        if is_started:
            await app.gateway.pool.ready()
        yield InMemoryGateway(app, upstream)
    finally:
        await app.gateway.stop()


class Reachable:
    """ASGI applications by their URLs, and what fails instead of an answer. All else refuses connections."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.faults: dict[str, Exception] = {}
        self.unclosed = 0  # of those that were made to ask them
        self.connect_timeouts: set[float] = set()  # seconds
        self.patience: dict[str, float | None] = {}  # seconds for the last answer at each path

    def add(self, app: Callable[..., Any], url: str = "http://127.0.0.1:8000") -> str:
        """The URL of an application from now on."""
        self.workers[url] = app
        return url

    def serve(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """These are all that the `Upstream` of `modules` finds."""
        found = self

        class Direct(DirectUpstream):
            def __init__(self, *arguments: Any) -> None:
                super().__init__()
                Upstream.__init__(self, *arguments)
                self.workers, self.faults = found.workers, found.faults
                found.unclosed += 1
                found.connect_timeouts.add(self._connect_timeout)

            async def send(self, method: str, url: str, *given: Any, **named: Any) -> Answer:
                found.patience[urlsplit(url).path] = named.get("read_timeout")
                return await super().send(method, url, *given, **named)

            async def aclose(self) -> None:
                found.unclosed -= 1

        for module in modules:
            monkeypatch.setattr(module, "Upstream", Direct)
