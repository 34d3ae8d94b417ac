"""A request on its way to the worker, and the answer on its way to the client: whole, or as it comes.

Bodies travel as bytes. What the engine reports goes into the headers of a whole answer; a stream has none left.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from math import inf
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from proxy.chat.reader import HINTED
from proxy.chat.through_chat import MessageStream, error_of, has_reminders, message_of
from proxy.chat.usage import PassingUsage, Usage, usage_of
from proxy.errors import BadRequest, GatewayError, NotServed, Overloaded, Stopping, WorkerFailed, WorkerSilent
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import TOLD
from proxy.http import asgi
from proxy.http.client import Answer, Broken, Exhausted, Malformed, Silent, Stale, Unreachable, Upstream
from proxy.http.json_body import TRANSFERS, loads
from proxy.metrics import Metrics
from proxy.pipeline import error_responses
from proxy.pipeline.accounting import Accounting
from proxy.pipeline.dispatch import TOO_LONG, Dispatcher
from proxy.pipeline.exchange import (
    CLIENT_GONE,
    KEEP_HEADER,
    SESSION_TOKEN,
    Exchange,
    RequestOutcome,
    choices_of,
    id_header,
    session_token,
)
from proxy.pipeline.prefill import Prefills
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.sse import Heartbeats, SseRelay, data_of_last
from proxy.routing.engine_events import OUTCOME_HEADER, outcome_in
from proxy.settings import Settings

_ID = re.compile(rb'\{\s*"id":\s*"([^"\\]+)"')  # how vLLM's answers begin

# The worker then says in a whole answer's headers what became of the hint.
ASK_FOR_OUTCOME = (OUTCOME_HEADER.encode(), b"1")

NOT_TAKEN = (502, 503)  # a worker, or a proxy before it, says by these that it has not computed the request
UNREACHABLE, STALE, NOT_STORED, REFUSED = "unreachable", "stale", "not_found", "refused"

NO_ROUTE = (404, 405, 501)
NOT_RENDERED = (400, 422, 500)  # what a template refuses
EVENT_STREAM = "text/event-stream"

# How vLLM ends its word that a stored response is not there, and what it leaves out.
NOT_THERE = b"' not found."
HOW_STORED = b" vLLM stores responses if it is started with VLLM_ENABLE_RESPONSES_API_STORE=1: all of them, in memory."

# Headers of a chat that say something else of a message.
NOT_OF_MESSAGES = (b"content-length", b"content-encoding", b"content-type")


@dataclass(eq=False)
class ResponseRelay:
    _settings: Settings
    _metrics: Metrics
    _pool: WorkerPool
    _upstream: Upstream
    _dispatcher: Dispatcher
    _reader: PromptReader
    _accounting: Accounting
    _heartbeats: Heartbeats
    _prefills: Prefills | None = None  # None without prefill workers

    async def __call__(self, exchange: Exchange) -> None:
        """Have a worker answer, from the first byte to it to the last one to the client; the slot is given back.

        What the template lacks is learnt in the background. Raises `WorkerFailed` or `WorkerSilent` if the worker
        breaks off and no event of a stream can say so, `NotServed` if it lacks the route, and as `Dispatcher.acquire`.
        """
        dispatcher = self._dispatcher
        if exchange.slot is None:
            await dispatcher.acquire(exchange)
        try:
            self._reader.learn(exchange)
            response = await self._send(exchange)
            try:
                if response.status in NO_ROUTE:
                    _check_route(exchange, response)
                await self._deliver(exchange, response)
            finally:
                response.close()
        except Broken as error:
            raise _worker_error(exchange.at, error) from None
        finally:
            dispatcher.release(exchange)

    async def _send(self, exchange: Exchange) -> Answer:
        """Send to its worker, and to another one if that has not taken it.

        Whatever may have been read goes to no other worker, except that one which says that it has not computed the
        request is believed: once, and wherever the stored response that it names may be. A connection that was closed
        while it was idle is replaced, once.
        """
        head, timings, dispatcher = exchange.head, exchange.timings, self._dispatcher
        is_read = head.endpoint in HINTED and not self._settings.shadow
        headers = [
            *(asgi.unencoded(head.headers) if is_read else head.headers),
            id_header(exchange.engine_id),
            ASK_FOR_OUTCOME,
            *([(KEEP_HEADER, exchange.keep.encode())] if exchange.keep else ()),  # for a worker that is a gateway
            *(self._upstream.own_headers if head.key is not None else ()),
        ]
        transfer = None
        if self._prefills is not None:
            with timings.waiting():
                transfer = await self._prefills.transfer(exchange, headers)
        unreachable = 0  # workers that were
        was_refused = fresh = merges = False
        while True:
            worker = exchange.at
            merges = merges or worker.merges_system
            target, raw = self._encoded(exchange, worker, transfer, merges=merges)
            url, given = worker.address + target, worker.addressed(headers) if worker.rank else headers
            answer, began = None, time.perf_counter()
            try:
                answer = await self._upstream.send(head.method, url, given, raw, self._settings.silence_timeout, fresh)
            except Exhausted:
                dispatcher.never_sent(exchange)
                raise Overloaded("The gateway has no descriptor or port left for another connection.") from None
            except Unreachable as error:
                self._pool.mark_down(worker, str(error))
                failed = UNREACHABLE
            except Stale:
                failed = STALE
            except Broken as error:
                if not isinstance(error, Malformed):  # else what was asked for may be the reason
                    self._record_failure(exchange, worker)
                raise
            finally:
                timings.waited_seconds += time.perf_counter() - began
            if answer is not None and target != head.target:
                if has_reminders(exchange.body.parsed):
                    if answer.status in NOT_RENDERED and not merges:
                        answer.close()
                        merges = True
                        continue
                    worker.merges_system = merges and answer.status not in NOT_RENDERED
                answer = MessageAnswer(answer)
            if answer is not None and not (failed := self._why_not(exchange, worker, answer.status)):
                return answer
            if failed == STALE and fresh:
                raise Stale
            unreachable += failed == UNREACHABLE
            if unreachable > len(self._pool.workers):
                dispatcher.never_sent(exchange)
                raise no_worker("No worker could be reached.", self._pool.workers)
            # What is stored, or a known worker has made, is worth waiting for a slot.
            is_kept = exchange.response_id is not None or dispatcher.keeper(exchange) is not None
            waits = failed == UNREACHABLE or (failed == NOT_STORED and is_kept)
            if answer is not None:
                if not waits and ((was_refused and failed == REFUSED) or not dispatcher.move_now(exchange)):
                    return answer
                answer.close()
            was_refused = was_refused or failed == REFUSED
            self._metrics.resent.labels(worker.name, failed).inc()
            if waits:
                await dispatcher.move(exchange)
            fresh, merges = failed == STALE, False
            if failed != UNREACHABLE or exchange.at.engine != worker.engine:
                transfer = None  # it is used once, whatever became of it

    def _why_not(self, exchange: Exchange, worker: Worker, status: int) -> str:
        """Why an answer with this status is not the last word; empty if it is. Either is learnt from."""
        worker.answered_at = time.monotonic()
        is_post = exchange.head.method == "POST"
        if is_post:
            if 200 <= status < 400:
                if worker.breaker.failures:
                    self._pool.record_success(worker)
            elif status >= 500 and status != 501:
                self._record_failure(exchange, worker)
        may_move = exchange.kept_id is not None or status == TOO_LONG
        if may_move and self._dispatcher.should_retry_elsewhere(exchange, worker, status):
            return NOT_STORED
        if status in (200, 404) and exchange.response_id is None and exchange.head.endpoint in HINTED:
            self._pool.answered_name(worker, exchange.model, taken=status == 200)
        return REFUSED if status in NOT_TAKEN and is_post else ""

    def _record_failure(self, exchange: Exchange, worker: Worker) -> None:
        self._pool.record_failure(worker, exchange.head.target.encode("latin-1") + exchange.body.raw)

    def _encoded(
        self, exchange: Exchange, worker: Worker, transfer: dict[str, Any] | None, *, merges: bool
    ) -> tuple[str, bytes]:
        """Path and body as the worker gets them.

        `transfer`: where it finds the prompt computed. `merges`: system messages within a conversation go to its head,
        for a worker whose template takes one.
        """
        body, head, slot = exchange.body, exchange.head, exchange.slot
        if head.method != "POST":
            return head.target, body.raw
        load = ""
        if worker.engine is not None and head.endpoint in HINTED and slot is not None:
            load = f"{self._pool.gateway_id},{slot.prompt},{slot.prefill_tokens}"  # other gateways learn of it there
        own: dict[str, Any] = {}
        if exchange.keep and body.parsed and _needs_salt(exchange, worker):
            own["cache_salt"] = exchange.salt
        elif worker.changes_salt and (salt := worker.salt(body.parsed)) is not None:
            own["cache_salt"] = salt
        if transfer is not None:
            own[TRANSFERS[0]] = transfer
        if head.endpoint == RESPONSES and (key := head.key) is not None:
            own["request_id"] = key.new_response_id()
        if head.endpoint == MESSAGES and MESSAGES in worker.probed.frontend.lacks:
            return CHAT, body.as_chat(exchange.hint, own, load, merges=merges)
        return head.target, body.encoded(exchange.hint, own, load)

    async def _deliver(self, exchange: Exchange, response: Answer) -> None:
        """The answer, from first to last byte. One that is encoded is not read, and nothing can be put into it."""
        head = exchange.head
        kind = response.header("content-type") or ""
        is_json = kind.startswith("application/json")
        has_body = response.status not in asgi.BODILESS and head.method != "HEAD"
        if kind.startswith(EVENT_STREAM) and not response.is_encoded:
            await self._stream_events(exchange, response)
            return
        if head.endpoint in HINTED and is_json and has_body and not response.is_encoded:
            await self._answer_whole(exchange, response)
            return
        usage = await self._pass_on(exchange, response)
        if head.method == "POST" and response.status == 200 and is_json:
            self._accounting.used(exchange, usage)
        await exchange.send({"type": "http.response.body", "body": b""})
        if head.endpoint in HINTED and response.is_encoded:
            self._accounting.reported(exchange, RequestOutcome(response.status))

    async def _pass_on(self, exchange: Exchange, response: Answer, begun: bytes = b"") -> Usage | None:
        """All but the end of an answer, which has `begun` so; the tokens of which it tells.

        It has the length that the worker gave. A client that does not read holds the worker back and fills no memory.
        """
        headers = _response_headers(exchange, response)
        if response.status not in asgi.BODILESS and (length := response.header("content-length")) is not None:
            headers.append((b"content-length", length.encode()))
        await exchange.send({"type": "http.response.start", "status": response.status, "headers": headers})
        passing = PassingUsage()
        while chunk := begun or await response.next_chunk():
            begun = b""
            if exchange.makes and 200 <= response.status < 300:
                self._accounting.opened(exchange, _named_in(chunk))
            self._dispatcher.prefilled(exchange)
            passing.see(chunk)
            await exchange.send({"type": "http.response.body", "body": chunk, "more_body": True})
        return passing.usage

    async def _stream_events(self, exchange: Exchange, response: Answer) -> None:
        """Pass an event stream on as it comes. A break becomes an event."""
        reply = exchange.reply
        headers = _response_headers(exchange, response)
        await exchange.send({"type": "http.response.start", "status": response.status, "headers": headers})

        def opened(event: bytes) -> None:  # it names the response: from now on that can be asked for
            self._accounting.opened(exchange, data_of_last(event).get("response"))

        served = reply.served if exchange.send is reply else None  # else something looks at what is sent
        choices = choices_of(exchange.body.parsed) if exchange.body.strips_usage else 0
        names = opened if exchange.head.endpoint == RESPONSES else None
        charge = reply.charge if reply.charge is not None and not reply.charge.goes_on else None
        stream = SseRelay(response, exchange.send, served, choices, names, charge)
        end = b""
        self._heartbeats.streams[stream] = exchange.at
        try:
            if piece := await response.next_chunk():
                timings = exchange.timings
                timings.first_byte, timings.is_stream = time.perf_counter(), True
                timings.was_alone = exchange.slot is not None and exchange.slot.is_alone
                self._dispatcher.prefilled(exchange)
                await stream.run(piece)
        except Broken as error:
            end = _error_event(exchange, _worker_error(exchange.at, error), stream)
        except asyncio.CancelledError:
            exchange.delivered = reply.gone and stream.is_complete
            if not reply.gone:  # the server stops
                await stream.finish(_error_event(exchange, Stopping("The gateway is stopping."), stream))
            elif not exchange.delivered:
                reply.failed(CLIENT_GONE)
            usage = stream.usage if exchange.delivered else None
            self._accounting.reported(exchange, RequestOutcome(response.status, usage), stream.response)
            raise
        finally:
            del self._heartbeats.streams[stream]
        await stream.finish(end)
        self._accounting.reported(exchange, RequestOutcome(response.status, stream.usage), stream.response)

    async def _answer_whole(self, exchange: Exchange, response: Answer) -> None:
        """Collect a JSON answer, so that what the engine reports can go into the headers; unless it is too large."""
        collected = bytearray()
        timings, began = exchange.timings, time.perf_counter()
        try:
            while len(collected) <= self._settings.max_collected_bytes and (chunk := await response.next_chunk()):
                collected += chunk
        finally:
            timings.waited_seconds += time.perf_counter() - began
        timings.first_byte = time.perf_counter()
        outcome = RequestOutcome(response.status, engine=outcome_in(response.header(OUTCOME_HEADER)))
        body = bytes(collected)
        if len(body) > self._settings.max_collected_bytes:
            answer = _named_in(body)
            if response.status == 200:
                self._accounting.opened(exchange, answer)
            outcome.usage = await self._pass_on(exchange, response, body)
            if response.status == 200:
                self._accounting.reported(exchange, outcome, answer)
            await exchange.send({"type": "http.response.body", "body": b""})
            return
        if response.status == 404 and exchange.response_id is not None and not self._settings.shadow:
            body = body.replace(NOT_THERE, NOT_THERE + HOW_STORED, 1)
        headers = _response_headers(exchange, response)
        if response.status == 200:
            try:
                answer = loads(body)
            except ValueError:
                answer = None
            outcome.usage = usage = usage_of(answer)
            if usage is not None and usage.cached is not None:
                headers.append((b"x-seamark-cached", str(usage.cached).encode()))
            reason = await self._accounting.answered(exchange, outcome, answer)
            if reason is not None:
                headers.append((b"x-seamark-reason", reason.encode()))
        await asgi.send_whole(exchange.send, response.status, headers, body)


class MessageAnswer(Answer):
    """A worker's chat as the answer to /v1/messages, event by event or whole; whatever else it said is an error."""

    __slots__ = ("_answer", "_is_over", "_stream")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        is_stream = (answer.header("content-type") or "").startswith(EVENT_STREAM) and not answer.is_encoded
        self._stream = MessageStream() if is_stream else None
        self._is_over = False
        self.status = answer.status
        kept = (header for header in answer.headers if header[0].lower() not in NOT_OF_MESSAGES)
        self.headers = (*kept, (b"content-type", EVENT_STREAM.encode() if is_stream else b"application/json"))
        self.named = {name.lower(): value for name, value in reversed(self.headers)}

    async def next_chunk(self) -> bytes:
        if self._stream is None:
            self._is_over, is_read = True, self._is_over
            return b"" if is_read else await self.read()
        while piece := await self._answer.next_chunk():
            if made := self._stream.events(piece):
                return made
        return b""

    async def read(self, most: float = inf) -> bytes:
        """Raises `Broken`, and `WorkerFailed` for what is neither a chat nor an error."""
        answer = await self._answer.read(most)
        if self.status >= 400:
            return error_of(answer, self.status)
        try:
            return message_of(answer)
        except ValueError as error:
            raise WorkerFailed(str(error)) from None

    def close(self) -> None:
        self._answer.close()


def _needs_salt(exchange: Exchange, worker: Worker) -> bool:
    """Whether, for nothing of a request to be found, it needs a salt of its own: its engine cannot be told.

    Raises `BadRequest` for a worker where that is not enough.
    """
    told, where = worker.engine.keep if worker.engine is not None else "", KEEP_HEADER.decode()
    if told not in ("", TOLD):
        raise BadRequest(f"{where}: worker {worker.name} cannot promise that, since {told}.", where)
    is_told = told == TOLD and exchange.body.keep != ""
    exchange.left_out_by = "engine" if is_told else "salt"
    return not is_told


def _check_route(exchange: Exchange, response: Answer) -> None:
    """Raises `NotServed` if the answer says no more than that the worker's HTTP server has no such route."""
    worker, endpoint = exchange.at, exchange.head.endpoint
    frontend = worker.probed.frontend
    if endpoint in frontend.lacks and not isinstance(response, MessageAnswer):
        raise NotServed(
            f"{endpoint} is not served by {frontend.name}, which worker {worker.name} runs: use {CHAT}, or start "
            "vLLM without VLLM_USE_RUST_FRONTEND=1."
        )


def _named_in(begun: bytes) -> Any:
    """By what id an answer that begins so can be asked for."""
    named = _ID.match(begun)
    return {"id": named[1].decode(errors="replace")} if named is not None else None


def _response_headers(exchange: Exchange, response: Answer) -> asgi.HeaderList:
    headers = asgi.end_to_end(response.headers, asgi.OWN_RESPONSE)
    if 300 <= response.status < 400 and exchange.worker is not None:
        here = (
            (name, _path_here(value, exchange.worker.address) if name == b"location" else value)
            for name, value in headers
        )
        headers = [(name, value) for name, value in here if value is not None]
    headers.append(id_header(exchange.head.request_id))
    if exchange.worker is not None:
        headers.append((b"x-seamark-worker", exchange.worker.name.encode()))
        if exchange.gets_token:
            headers.append((SESSION_TOKEN, session_token(exchange.worker)))
    if exchange.body.hint:
        headers.append((b"x-seamark-boundary", ";".join(map(str, exchange.body.hint)).encode()))
    if exchange.keep:
        headers.append((KEEP_HEADER, exchange.keep.encode()))
    if (expected := exchange.expected) is not None:
        headers.append((b"x-seamark-predicted", str(expected.found(expected.predicted)).encode()))
    return headers


def _path_here(location: bytes, worker_url: str) -> bytes | None:
    """A worker's redirect to itself becomes one to the same path of the gateway; None for one to any other address.

    Workers have addresses that clients must not learn, under names that the gateway does not know.
    """
    try:
        where, worker = urlsplit(location.decode("latin-1")), urlsplit(worker_url)
        if not where.scheme and not where.netloc:
            return location
        if where.hostname != worker.hostname:
            return None
    except ValueError:
        return None
    path = "/" + where.path.removeprefix(worker.path).lstrip("/")
    return urlunsplit(("", "", path, where.query, where.fragment)).encode("latin-1")


def _error_event(exchange: Exchange, error: GatewayError, stream: SseRelay) -> bytes:
    exchange.reply.failed(error.status)
    return error_responses.error_event(error, exchange.head.endpoint, stream.first, stream.last)


def _worker_error(worker: Worker, error: Exception) -> GatewayError:
    """What the client learns of a worker that broke off, or is gone."""
    if isinstance(error, Silent):
        return WorkerSilent(f"Worker {worker.name} was silent for too long (setting silence_timeout).")
    if isinstance(error, Malformed):
        return WorkerFailed(f"Worker {worker.name} gave an answer that is no valid HTTP, or whose head is too long.")
    return WorkerFailed(f"Worker {worker.name} broke off.")
