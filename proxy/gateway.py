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
from typing import Any

import httpx

from proxy import wire
from proxy.accounting import Accounting
from proxy.body import parse_object, with_hint
from proxy.budget import worth_sending
from proxy.call import REPORTING, Call, call_of
from proxy.directory import Directory
from proxy.engine_words import EngineWords
from proxy.errors import BadRequest, GatewayError, NoWorker, WorkerFailed
from proxy.finding import HINTED, Finding
from proxy.metrics import Metrics
from proxy.outcome import TAIL_BYTES, Expectation, usage_in_stream, usage_of
from proxy.routing import choose
from proxy.settings import Settings
from proxy.upstream import Broken, Unreachable, Upstream, chunks
from proxy.workers import Worker, WorkerPool

logger = logging.getLogger("seamark.gateway")


# A client's own X-Request-Id is kept in memory for a while; longer ones are replaced.
MAX_ID_CHARACTERS = 256


class Gateway:
    """ASGI application for everything that goes to a worker."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.upstream = Upstream(settings.connect_timeout)
        self.pool = WorkerPool(settings, self.upstream, self.metrics)
        self.finding = Finding(settings, self.metrics)
        self.directory = Directory(settings.memory_bytes // 2)
        self.words = EngineWords(self.upstream, self.directory)
        self.accounting = Accounting(self.metrics, self.pool, self.finding, self.words, settings.excerpts)

    async def __call__(self, scope: wire.Scope, receive: wire.Receive, send: wire.Send) -> None:
        request_id = wire.header(scope, b"x-request-id")
        if not request_id or len(request_id) > MAX_ID_CHARACTERS:
            request_id = uuid.uuid4().hex
        call: Call | None = None
        try:
            raw = await wire.read_body(receive, self.settings.max_body_bytes)
            call = call_of(scope, raw, request_id)
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
                self.accounting.count(call)

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
        """Parse the body where it is JSON, and find its boundaries."""
        if call.endpoint not in HINTED:
            try:
                call.body = parse_object(call.raw)  # only to know the model
            except BadRequest:
                call.body = {}
            return
        call.body = parse_object(call.raw)
        workers = await self._candidates(call.body.get("model"))
        await self.finding.read(call, workers)
        self.metrics.overhead.labels("boundary").observe(time.perf_counter() - call.arrived)

    async def _candidates(self, model: Any) -> list[Worker]:
        """Workers that are up and serve `model`; all that are up where none does, the answer is theirs to give."""
        up = await self.pool.ready()
        return [worker for worker in up if worker.serves(model)] or up

    @asynccontextmanager
    async def _forwarded(self, call: Call) -> AsyncIterator[httpx.Response]:
        """Send to the chosen worker; one that refuses the connection is passed over."""
        while True:
            worker = self._choose(call, await self._candidates(call.body.get("model")))
            positions = self._worth_sending(call, worker)
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

    def _worth_sending(self, call: Call, worker: Worker) -> tuple[int, ...]:
        if call.found is None or worker.engine is None:
            return ()
        return worth_sending(call.found.boundaries, worker.engine.match_unit, self.settings.boundary_budget)

    def _choose(self, call: Call, workers: list[Worker]) -> Worker:
        """Choose and note it in one go, so that a request arriving right behind already follows."""
        if not workers:
            raise NoWorker("No worker is ready. It may still be loading its model.")
        found = call.found
        if found is None:
            call.worker = choose(workers, {}, self.settings.load_slack)
            return call.worker
        if (keeper := self._keeper(call, workers)) is not None:
            workers = [keeper]
        boots = [worker.boot for worker in workers]
        held = self.directory.longest(found.prefixes, boots)
        together = call.body.get("prompt_cache_key")
        worker = call.worker = choose(workers, held, self.settings.load_slack, together)
        call.expected = Expectation(
            failure=found.failure if worker.engine is not None else "unpatched",
            shareable=self.directory.sent(found.prefixes, boots),
            shareable_ever=self.directory.ever_sent(found.prefixes),
            held=max((holding.tokens for holding in held.values()), default=0),
            predicted=held[worker.boot].tokens if worker.boot in held else 0,
            deepest=max(found.positions, default=0),
            match_unit=worker.engine.match_unit if worker.engine is not None else 1,
            would_share=max((b.tokens for b in found.boundaries if b.key != found.turn_key), default=0),
        )
        if worker.engine is not None:
            self.directory.note(found.boundaries, worker.boot)
            self.words.sent(worker, call.request_id, found.boundaries)
        return worker

    def _keeper(self, call: Call, workers: list[Worker]) -> Worker | None:
        """The worker that stores the response which this request continues; others would not know it."""
        boot = self.finding.stored.boot(call.body.get("previous_response_id"))
        return next((worker for worker in workers if worker.boot == boot), None)

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
        await self.accounting.answered(call, usage_in_stream(tail))

    async def _answer_whole(self, call: Call, response: httpx.Response, send: wire.Send) -> None:
        """Collect a JSON answer, so that what the engine reports can stand in the headers."""
        body = b"".join([chunk async for chunk in chunks(response)])
        call.first_byte = time.perf_counter()
        headers = self._response_headers(call, response)
        if call.status == 200 and "content-encoding" not in response.headers:
            try:
                answer = json.loads(body)
            except ValueError:
                answer = None
            usage = usage_of(answer)
            if usage is not None and usage.cached is not None:
                headers.append((b"x-seamark-cached", str(usage.cached).encode()))
            why = await self.accounting.answered(call, usage)
            if why is not None:
                headers.append((b"x-seamark-reason", why.encode()))
            self.finding.answered(call, answer)
        call.started = True
        await wire.send_whole(send, call.status, headers, body)

    async def _begin(self, call: Call, headers: wire.HeaderList, send: wire.Send) -> None:
        call.started = True
        await send({"type": "http.response.start", "status": call.status, "headers": headers})
