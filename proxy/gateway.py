"""A proxied request from first to last byte: find boundaries, choose a worker, forward, stream back, account.

Bodies travel as bytes. Whatever fails while a boundary is sought costs the hint, never the request.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from proxy import wire
from proxy.body import parse_object, with_hint
from proxy.boundaries import BoundaryFinder, Found, PositionMemory
from proxy.directory import Directory
from proxy.errors import BadRequest, GatewayError, NotFound, NoWorker, WorkerFailed
from proxy.metrics import Metrics
from proxy.outcome import TAIL_BYTES, Expectation, Usage, cache_label, reason, usage_in_stream, usage_of
from proxy.routing import choose
from proxy.settings import Settings
from proxy.upstream import Broken, Unreachable, Upstream, chunks
from proxy.workers import Worker, WorkerPool

logger = logging.getLogger("seamark.gateway")

CHAT = "/v1/chat/completions"
UNKNOWN_MODEL = "unknown"  # model names come from clients; only those that a worker serves become labels
# Answers of these report cached tokens.
REPORTING = frozenset({CHAT, "/v1/completions", "/v1/responses", "/v1/messages"})
ENDPOINTS = REPORTING | {"/v1/embeddings", "/tokenize", "/detokenize"}


@dataclass
class Call:
    """One request on its way through the gateway."""

    method: str
    target: str  # path and query, as the client wrote them
    endpoint: str  # label: the path where it is a known one
    headers: wire.HeaderList
    request_id: str
    raw: bytes
    arrived: float  # time.perf_counter() when the body was complete
    body: dict[str, Any] = field(default_factory=dict)
    found: Found | None = None  # None: not a chat
    worker: Worker | None = None
    sent: tuple[int, ...] = ()  # positions in the hint
    expected: Expectation | None = None
    started: bool = False  # the response has begun
    status: int = 0
    first_byte: float | None = None

    @property
    def id_header(self) -> tuple[bytes, bytes]:
        """The request's identity, as clients and workers see it."""
        return (b"x-request-id", self.request_id.encode("latin-1"))


class Gateway:
    """ASGI application for everything that goes to a worker."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.upstream = Upstream(settings.connect_timeout)
        self.pool = WorkerPool(settings, self.upstream, self.metrics)
        self.memory = PositionMemory(settings.memory_entries)
        self.finder = BoundaryFinder(self.memory)
        self.directory = Directory(settings.memory_entries)

    async def __call__(self, scope: wire.Scope, receive: wire.Receive, send: wire.Send) -> None:
        request_id = wire.header(scope, b"x-request-id") or uuid.uuid4().hex
        call: Call | None = None
        try:
            raw = await wire.read_body(receive, self.settings.max_body_bytes)
            call = _call(scope, raw, request_id)
            await wire.unless_client_leaves(receive, self._serve(call, send))
        except wire.ClientGone:
            if call is not None:
                call.status = 499
        except GatewayError as error:
            await self._refuse(call, error, request_id, send)
        except Exception as error:
            # Where it happened, and nothing of what: the message of an unexpected error might hold prompt text.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("request %s failed: %s\n%s", request_id, type(error).__name__, where)
            await self._refuse(call, GatewayError("The gateway failed to handle this request."), request_id, send)
        finally:
            if call is not None:
                self._count(call)

    async def _refuse(self, call: Call | None, error: GatewayError, request_id: str, send: wire.Send) -> None:
        if call is not None:
            call.status = error.status
            if call.started:
                return  # returning without the last chunk makes the server close the connection: a visible break
        await wire.send_error(send, error, [(b"x-request-id", request_id.encode("latin-1"))])

    async def _serve(self, call: Call, send: wire.Send) -> None:
        if call.method == "POST":
            await self._read(call)
        async with self._forwarded(call) as response:
            call.status = response.status_code
            kind = response.headers.get("content-type", "")
            if kind.startswith("text/event-stream"):
                await self._stream_events(call, response, send)
            elif call.endpoint in REPORTING and kind.startswith("application/json"):
                await self._answer_whole(call, response, send)
            else:
                await self._stream(call, response, send)

    async def _read(self, call: Call) -> None:
        """Parse the body where it is JSON, and find a chat's boundaries."""
        if call.endpoint != CHAT:
            try:
                call.body = parse_object(call.raw)  # only to know the model
            except BadRequest:
                call.body = {}
            return
        call.body = parse_object(call.raw)
        call.found = await self._find(call)
        self.metrics.overhead.labels("boundary").observe(time.perf_counter() - call.arrived)

    async def _find(self, call: Call) -> Found:
        model = call.body.get("model")
        found = Found(failure="unpatched")
        workers = await self._candidates(model)
        renders = next((worker for worker in workers if worker.engine is not None and worker.serves(model)), None)
        if renders is not None:
            try:
                renderer_id = renders.renderer_ids.get(model, b"")
                found = await self.finder.find(call.body, renders.renderer, renderer_id)
            except Exception as error:
                logger.error("boundary of request %s: %s", call.request_id, type(error).__name__)
                found = Found(failure="render_failed")
        self.metrics.lookups.labels(found.result).inc()
        return found

    async def _candidates(self, model: Any) -> list[Worker]:
        """Workers that are up and serve `model`; all that are up where none does, the answer is theirs to give."""
        up = await self.pool.ready()
        return [worker for worker in up if worker.serves(model)] or up

    @asynccontextmanager
    async def _forwarded(self, call: Call) -> AsyncIterator[httpx.Response]:
        """Send to the chosen worker; one that refuses the connection is passed over."""
        while True:
            worker = self._choose(call, await self._candidates(call.body.get("model")))
            positions = call.found.positions if call.found is not None and worker.engine is not None else ()
            raw = with_hint(call.raw, call.body, positions) if call.found is not None else call.raw
            call.sent = positions if raw is not call.raw else ()
            headers = [*call.headers, call.id_header]
            worker.inflight += 1
            worker.dispatched += 1
            self.metrics.inflight.labels(worker.name).inc()
            try:
                try:
                    response = await self.upstream.send(call.method, worker.url + call.target, headers, raw)
                except Unreachable:
                    self.pool.mark_down(worker)
                    continue
                try:
                    yield response
                finally:
                    await response.aclose()
                return
            except Broken:
                raise WorkerFailed(f"Worker {worker.name} broke off.") from None
            finally:
                worker.inflight -= 1
                self.metrics.inflight.labels(worker.name).dec()

    def _choose(self, call: Call, workers: list[Worker]) -> Worker:
        """Choose and note it in one go, so that a request arriving right behind already follows."""
        if not workers:
            raise NoWorker("No worker is ready. It may still be loading its model.")
        found = call.found
        if found is None:
            call.worker = choose(workers, {}, self.settings.load_slack)
            return call.worker
        held = self.directory.longest(found.prefixes, [worker.boot for worker in workers])
        worker = call.worker = choose(workers, held, self.settings.load_slack)
        call.expected = Expectation(
            failure=found.failure if worker.engine is not None else "unpatched",
            shareable=max((holding.tokens for holding in held.values()), default=0),
            shareable_ever=self.directory.ever_sent(found.prefixes),
            predicted=held[worker.boot].tokens if worker.boot in held else 0,
            deepest=max(found.positions, default=0),
            match_unit=worker.engine.match_unit if worker.engine is not None else 1,
        )
        if worker.engine is not None:
            self.directory.note(found.boundaries, worker.boot)
        return worker

    def _response_headers(self, call: Call, response: httpx.Response) -> wire.HeaderList:
        headers = wire.end_to_end(response.headers.raw, wire.OWN_RESPONSE | {b"content-length"})
        headers.append(call.id_header)
        if call.worker is not None:
            headers.append((b"x-seamark-worker", call.worker.name.encode()))
        if call.sent:
            headers.append((b"x-seamark-boundary", ",".join(map(str, call.sent)).encode()))
        if call.expected is not None:
            predicted = call.expected.floored(call.expected.predicted)
            headers.append((b"x-seamark-predicted", str(predicted).encode()))
        return headers

    async def _stream(self, call: Call, response: httpx.Response, send: wire.Send) -> None:
        """Pass a body on as it comes."""
        headers = self._response_headers(call, response)
        if (length := response.headers.get("content-length")) is not None:
            headers.append((b"content-length", length.encode()))
        await self._begin(call, headers, send)
        async for chunk in chunks(response):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _stream_events(self, call: Call, response: httpx.Response, send: wire.Send) -> None:
        """Pass an event stream on as it comes, keeping its end for the usage. A break becomes an event."""
        await self._begin(call, self._response_headers(call, response), send)
        tail = b""
        try:
            async for chunk in chunks(response):
                if call.first_byte is None:
                    call.first_byte = time.perf_counter()
                tail = (tail + chunk)[-TAIL_BYTES:] if len(chunk) < TAIL_BYTES else chunk[-TAIL_BYTES:]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Broken:
            error = WorkerFailed("The worker broke off in the middle of the answer.")
            call.status = error.status
            await send({"type": "http.response.body", "body": wire.error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self._account(call, usage_in_stream(tail))

    async def _answer_whole(self, call: Call, response: httpx.Response, send: wire.Send) -> None:
        """Collect a JSON answer, so that what the engine reports can stand in the headers."""
        body = b"".join([chunk async for chunk in chunks(response)])
        call.first_byte = time.perf_counter()
        headers = self._response_headers(call, response)
        if call.status == 200 and "content-encoding" not in response.headers:
            try:
                usage = usage_of(json.loads(body))
            except ValueError:
                usage = None
            if usage is not None and usage.cached is not None:
                headers.append((b"x-seamark-cached", str(usage.cached).encode()))
            self._account(call, usage)
        call.started = True
        await wire.send_whole(send, call.status, headers, body)

    async def _begin(self, call: Call, headers: wire.HeaderList, send: wire.Send) -> None:
        call.started = True
        await send({"type": "http.response.start", "status": call.status, "headers": headers})

    def _account(self, call: Call, usage: Usage | None) -> None:
        """Compare what the engine reports with what was expected."""
        if usage is None or call.worker is None:
            return
        expected, metrics = call.expected, self.metrics
        labels = (self._model_label(call), call.worker.name)
        metrics.prompt_tokens.labels(*labels).inc(usage.prompt)
        if usage.cached is not None:
            metrics.cached_tokens.labels(*labels).inc(usage.cached)
        if expected is None:
            return
        metrics.shareable_tokens.labels(*labels).inc(expected.shareable)
        metrics.predicted_tokens.labels(*labels).inc(expected.floored(expected.predicted))
        if usage.cached is None:
            return
        why = reason(expected, usage.cached)
        if why != "hit":
            metrics.misses.labels(labels[0], why).inc()
        if call.first_byte is not None:
            seconds = call.first_byte - call.arrived
            metrics.first_token.labels(labels[0], cache_label(expected, usage.cached)).observe(seconds)

    def _count(self, call: Call) -> None:
        worker = call.worker.name if call.worker is not None else ""
        self.metrics.requests.labels(self._model_label(call), worker, call.endpoint, str(call.status)).inc()

    def _model_label(self, call: Call) -> str:
        model = call.body.get("model")
        served = isinstance(model, str) and any(worker.serves(model) for worker in self.pool.workers)
        return model if served else UNKNOWN_MODEL


def _call(scope: wire.Scope, raw: bytes, request_id: str) -> Call:
    path = scope["path"]
    if not {".", ".."}.isdisjoint(path.split("/")):
        raise NotFound("No such path.")  # the way up leads to routes of the worker that are not for clients
    target = scope.get("raw_path", path.encode()).decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    return Call(
        method=scope["method"],
        target=target,
        endpoint=path if path in ENDPOINTS else "other",
        headers=wire.end_to_end(scope["headers"], wire.RECOMPUTED),
        request_id=request_id,
        raw=raw,
        arrived=time.perf_counter(),
    )
