"""An answer on its way from the worker to the client: whole, or as it comes.

Bodies travel as bytes. What the engine reports stands in the headers of whole answers; of a stream it is noted.
"""

from __future__ import annotations

import asyncio
import json
import time

from proxy.chat.chat import REPORTING, RESPONSES
from proxy.chat.usage import Usage, usage_of
from proxy.errors import GatewayError, Stopping, WorkerFailed, WorkerSilent
from proxy.http import asgi
from proxy.http.client import Answer, Broken, Silent
from proxy.observability.shadow import AnsweredRequest, Shadow
from proxy.pipeline import error_responses
from proxy.pipeline.accounting import Accounting
from proxy.pipeline.dispatch import Dispatcher
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.request import ProxiedRequest
from proxy.pipeline.sse import Heartbeats, SseRelay


class ResponseRelay:
    """One per gateway."""

    def __init__(
        self, dispatch: Dispatcher, finding: PromptReader, accounting: Accounting, shadow: Shadow, pulse: Heartbeats
    ) -> None:
        self._dispatch = dispatch
        self._finding = finding
        self._accounting = accounting
        self._shadow = shadow
        self._pulse = pulse

    async def deliver(self, call: ProxiedRequest, response: Answer, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """From first to last byte. Raises `Broken` where the worker breaks off and no stream can tell of it."""
        call.status = response.status
        kind = response.header("content-type") or ""
        if kind.startswith("text/event-stream"):
            await self._stream_events(call, response, send, watch)
        elif call.endpoint in REPORTING and kind.startswith("application/json"):
            await self._answer_whole(call, response, send, watch)
        else:
            await self._stream(call, response, send, watch)

    def _response_headers(self, call: ProxiedRequest, response: Answer) -> asgi.HeaderList:
        headers = asgi.end_to_end(response.headers, asgi.OWN_RESPONSE)
        headers.append(call.id_header)
        if call.worker is not None:
            headers.append((b"x-seamark-worker", call.worker.name.encode()))
        if call.sent:
            headers.append((b"x-seamark-boundary", ",".join(map(str, call.sent)).encode()))
        if call.expected is not None:
            predicted = call.expected.floored(call.expected.predicted)
            headers.append((b"x-seamark-predicted", str(predicted).encode()))
        return headers

    async def _stream(self, call: ProxiedRequest, response: Answer, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """Pass a body on as it comes."""
        headers = self._response_headers(call, response)
        if (length := response.header("content-length")) is not None:
            headers.append((b"content-length", length.encode()))
        await self._begin(call, headers, send)
        async for chunk in response.chunks():
            self._dispatch.prefilled(call)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        watch.over = True
        await send({"type": "http.response.body", "body": b""})

    async def _stream_events(
        self, call: ProxiedRequest, response: Answer, send: asgi.Send, watch: asgi.ClientWatch
    ) -> None:
        """Pass an event stream on as it comes. A break becomes an event."""
        await self._begin(call, self._response_headers(call, response), send)
        relay = SseRelay(send, call.strips_usage, keeps_first=call.endpoint == RESPONSES)
        end = b""
        with self._pulse.watching(relay):
            try:
                await relay.run(response.chunks(), lambda: self._begun(call))
            except Broken as error:
                end = self._event(call, broken(call, error), relay)
            except asyncio.CancelledError:
                if not watch.gone:  # the server ends us
                    await relay.finish(self._event(call, Stopping("The gateway is stopping."), relay))
                raise
            finally:
                if call.endpoint == RESPONSES:
                    self._finding.answered(call, relay.response)
            watch.over = True
            await relay.finish(end)
        await self._answered(call, relay.usage)

    async def _answered(self, call: ProxiedRequest, usage: Usage | None) -> str | None:
        """The reason for what it got, None where the worker reports nothing."""
        worker = call.worker
        if worker is not None and worker.engine is None and call.status == 200:
            # A response's first event comes before it is computed.
            timed = call.begun and call.endpoint != RESPONSES
            self._shadow.add(
                AnsweredRequest(
                    chat=call.chat,
                    worker=worker,
                    boot=worker.boot,
                    model=self._accounting.model_label(call),
                    size=len(call.raw),
                    prompt=usage.prompt if usage is not None else None,
                    cached=usage.cached if usage is not None else None,
                    seconds=call.first_byte - call.placed if timed else None,
                    alone=call.alone,
                    owner=call.owner,
                    explanation=call.explanation,
                    at=time.perf_counter(),
                )
            )
        return await self._accounting.answered(call, usage)

    def _begun(self, call: ProxiedRequest) -> None:
        call.first_byte, call.begun = time.perf_counter(), True
        call.alone = call.alone and call.worker.dispatched == call.turn
        self._dispatch.prefilled(call)

    @staticmethod
    def _event(call: ProxiedRequest, error: GatewayError, relay: SseRelay) -> bytes:
        call.status = error.status
        return error_responses.error_event(error, call.endpoint, relay.first, relay.last)

    async def _answer_whole(
        self, call: ProxiedRequest, response: Answer, send: asgi.Send, watch: asgi.ClientWatch
    ) -> None:
        """Collect a JSON answer, so that what the engine reports can stand in the headers."""
        body = await response.read()
        call.first_byte = time.perf_counter()
        headers = self._response_headers(call, response)
        if call.status == 200 and response.header("content-encoding") is None:
            try:
                answer = json.loads(body)
            except ValueError:
                answer = None
            usage = usage_of(answer)
            if usage is not None and usage.cached is not None:
                headers.append((b"x-seamark-cached", str(usage.cached).encode()))
            why = await self._answered(call, usage)
            if why is not None:
                headers.append((b"x-seamark-reason", why.encode()))
            self._finding.answered(call, answer)
        call.started = watch.over = True
        await asgi.send_whole(send, call.status, headers, body)

    async def _begin(self, call: ProxiedRequest, headers: asgi.HeaderList, send: asgi.Send) -> None:
        call.started = True
        await send({"type": "http.response.start", "status": call.status, "headers": headers})


def broken(call: ProxiedRequest, error: Broken) -> GatewayError:
    """What the client is told of a worker that broke off."""
    name = call.worker.name
    if isinstance(error, Silent):
        return WorkerSilent(f"Worker {name} was silent for too long (setting silence_timeout).")
    return WorkerFailed(f"Worker {name} broke off.")
