"""A request on its way to the worker, and the answer on its way to the client: whole, or as it comes.

Bodies travel as bytes. What the engine reports goes into the headers of a whole answer; a stream has none left.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from proxy.chat.reader import HINTED
from proxy.chat.through_chat import has_reminders
from proxy.chat.usage import PassingUsage, Usage, usage_of
from proxy.errors import GatewayError, NotServed, Overloaded, Stopping, WorkerFailed, WorkerSilent
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.http.client import Answer, Broken, Exhausted, Malformed, Silent, Stale, Unreachable, Upstream
from proxy.http.json_body import TRANSFERS, loads
from proxy.metrics import Metrics
from proxy.pipeline import error_responses
from proxy.pipeline.accounting import Accounting
from proxy.pipeline.dispatch import MOST_ASKED, Lease
from proxy.pipeline.message_answer import MessageAnswer
from proxy.pipeline.prefill import Prefills
from proxy.pipeline.request import CLIENT_GONE, ProxiedRequest, Report, choices_of
from proxy.pipeline.sse import Heartbeats, SseRelay, data_of_last
from proxy.routing.engine_events import OUTCOME_HEADER, outcome_in
from proxy.settings import Settings

# How vLLM's answers begin.
_ID = re.compile(rb'\{\s*"id":\s*"([^"\\]+)"')

# The worker then says in a whole answer's headers what became of the hint.
ASK_FOR_OUTCOME = (OUTCOME_HEADER.encode(), b"1")


# A worker, or a proxy before it, says by these that it has not computed the request.
NOT_TAKEN = (502, 503)

UNREACHABLE, STALE, NOT_STORED, REFUSED = "unreachable", "stale", "not_found", "refused"


class _Retry(NamedTuple):
    """What follows a try that came to nothing."""

    elsewhere: bool  # else at the same worker, on a new connection, once
    waits: bool = False  # for a slot anywhere; else at a worker that has one now
    most: int = 1


# Whatever may have been read goes to no other worker, except that one which says that it has not computed the request
# is believed: once, and wherever the stored response that it names may be.
RETRIES: Mapping[str, _Retry] = {
    UNREACHABLE: _Retry(elsewhere=True, waits=True),
    STALE: _Retry(elsewhere=False),
    NOT_STORED: _Retry(elsewhere=True, waits=True, most=MOST_ASKED),
    REFUSED: _Retry(elsewhere=True),
}

NO_ROUTE = (404, 405, 501)
NOT_RENDERED = (400, 422, 500)  # what a template refuses

# Statuses without a body, and without a length to announce.
BODILESS = (204, 304)


class ResponseRelay:
    """One per gateway."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        pool: WorkerPool,
        upstream: Upstream,
        accounting: Accounting,
        heartbeats: Heartbeats,
        prefills: Prefills | None = None,
    ) -> None:
        """`prefills`: None without prefill workers."""
        self._most_collected = settings.max_collected_bytes
        self._leaves_unchanged = settings.shadow
        self._silence_timeout = settings.silence_timeout
        self._resent = metrics.resent
        self._pool = pool
        self._upstream = upstream
        self._accounting = accounting
        self._heartbeats = heartbeats
        self._prefills = prefills

    async def forward(self, request: ProxiedRequest, lease: Lease, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """From the first byte to the worker to the last byte to the client.

        Raises `WorkerFailed` or `WorkerSilent` if the worker breaks off and no event of a stream can say so, and
        `NotServed` if it lacks the route.
        """
        try:
            response = await self._send(request, lease)
            try:
                _check_route(request, lease.worker, response)
                await self._deliver(request, lease, response, send, watch)
            finally:
                response.close()
        except Broken as error:
            raise _worker_error(lease.worker, error) from None

    async def _send(self, request: ProxiedRequest, lease: Lease) -> Answer:
        """Send to the leased worker, and to another one if that has not taken it, as `RETRIES` says."""
        client = request.client
        is_read = client.endpoint in HINTED and not self._leaves_unchanged
        headers = [
            *(asgi.unencoded(client.headers) if is_read else client.headers),
            request.engine_id_header,
            ASK_FOR_OUTCOME,
            *(self._upstream.own_headers if client.key is not None else ()),
        ]
        transfer = None
        if self._prefills is not None:
            with request.timings.waiting():
                transfer = await self._prefills.transfer(request, lease, headers)
        tries = dict.fromkeys(RETRIES, 0)
        fresh = False
        while True:
            worker = lease.worker
            tried = await self._try(request, lease, headers, transfer, fresh=fresh)
            if isinstance(tried, Answer):
                return _with_valid_status(tried)
            failed, answer = tried
            retry = RETRIES[failed]
            tries[failed] += 1
            if not retry.elsewhere and fresh:
                raise Stale
            if failed == UNREACHABLE and tries[failed] > len(self._pool.workers):
                lease.never_sent()
                raise no_worker("No worker could be reached.", self._pool.workers)
            waits = retry.waits and (answer is None or lease.is_stored)
            if answer is not None:
                if not waits and (tries[failed] > retry.most or not lease.move_now()):
                    return _with_valid_status(answer)
                answer.close()
            self._resent.labels(worker.name, failed).inc()
            if waits:
                await lease.move()
            fresh = not retry.elsewhere
            if failed != UNREACHABLE or lease.worker.engine != worker.engine:
                transfer = None  # it is used once, whatever became of it

    async def _try(
        self,
        request: ProxiedRequest,
        lease: Lease,
        headers: asgi.HeaderList,
        transfer: Any,
        *,
        fresh: bool,
        merges: bool = False,
    ) -> Answer | tuple[str, Answer | None]:
        """Send it once. The worker's answer, or, if that is not the last word, a key of `RETRIES` and the answer."""
        client, worker = request.client, lease.worker
        merges = merges or worker.merges_system
        load = ""  # in the body
        if client.method == "POST" and worker.engine is not None and client.endpoint in HINTED:
            load = f"{self._pool.gateway_id},{lease.prompt},{lease.prefill_tokens}"  # other gateways learn of it there
        target, raw = self._encoded(request, worker, transfer, load, merges=merges)
        headers = worker.addressed(headers)
        try:
            with request.timings.waiting():
                answer = await self._upstream.send(
                    client.method, worker.address + target, headers, raw, self._silence_timeout, fresh
                )
        except Exhausted:
            lease.never_sent()
            raise Overloaded("The gateway has no descriptor or port left for another connection.") from None
        except Unreachable as error:
            self._pool.mark_down(worker, str(error))
            return UNREACHABLE, None
        except Stale:
            return STALE, None
        except Malformed:  # what was asked for may be the reason
            raise
        except Broken:
            self._record_failure(request, worker)
            raise
        if target != client.target:
            if has_reminders(request.body.parsed):
                if answer.status in NOT_RENDERED and not merges:
                    answer.close()
                    return await self._try(request, lease, headers, transfer, fresh=fresh, merges=True)
                worker.merges_system = merges and answer.status not in NOT_RENDERED
            answer = MessageAnswer(answer)
        self._judge(request, worker, answer.status)
        if lease.seeks_on(answer.status):
            return NOT_STORED, answer
        if client.endpoint in HINTED and answer.status in (200, 404) and request.response_id is None:
            self._pool.answered_name(worker, request.model, taken=answer.status == 200)
        return (REFUSED, answer) if answer.status in NOT_TAKEN and client.method == "POST" else answer

    def _judge(self, request: ProxiedRequest, worker: Worker, status: int) -> None:
        """What the head of an answer says of its worker."""
        worker.answered()
        if request.client.method != "POST":
            return
        if 200 <= status < 400:
            self._pool.record_success(worker)
        elif status >= 500 and status != 501:
            self._record_failure(request, worker)

    def _record_failure(self, request: ProxiedRequest, worker: Worker) -> None:
        self._pool.record_failure(worker, request.client.target.encode("latin-1") + request.body.raw)

    def _encoded(
        self,
        request: ProxiedRequest,
        worker: Worker,
        transfer: dict[str, Any] | None = None,
        load: str = "",
        *,
        merges: bool = False,
    ) -> tuple[str, bytes]:
        """Path and body as `worker` gets them. `transfer`: where it finds the prompt computed; `load`: as of `LOAD`.

        `merges`: system messages within a conversation go to its head, for a worker whose template takes one.
        """
        body, choice, client = request.body, request.choice, request.client
        if client.method != "POST":
            return client.target, body.raw
        own: dict[str, Any] = {}
        if (salt := worker.cache.salt(body.parsed)) is not None:
            own["cache_salt"] = salt
        if transfer is not None:
            own[TRANSFERS[0]] = transfer
        if client.endpoint == RESPONSES and (key := client.key) is not None:
            own["request_id"] = key.new_response_id()
        hint = choice.hint if choice is not None else ()
        if client.endpoint == MESSAGES and MESSAGES in worker.probed.frontend.lacks:
            return CHAT, body.as_chat(hint, own, load, merges=merges)
        return client.target, body.encoded(hint, own, load)

    async def _deliver(
        self, request: ProxiedRequest, lease: Lease, response: Answer, send: asgi.Send, watch: asgi.ClientWatch
    ) -> None:
        """The answer, from first to last byte. One that is encoded is not read, and nothing can be put into it."""
        kind = response.header("content-type") or ""
        is_reported = request.client.endpoint in HINTED
        if response.is_encoded:
            await self._stream(request, lease, response, send, watch)
            if is_reported:
                self._accounting.reported(request, Report(response.status))
        elif kind.startswith("text/event-stream"):
            await self._stream_events(request, lease, response, send, watch)
        elif is_reported and kind.startswith("application/json") and _has_body(request, response):
            await self._answer_whole(request, lease, response, send, watch)
        else:
            await self._stream(request, lease, response, send, watch)

    async def _stream(
        self, request: ProxiedRequest, lease: Lease, response: Answer, send: asgi.Send, watch: asgi.ClientWatch
    ) -> None:
        """Pass a body on as it comes. Tokens of which it tells count for the key."""
        usage = await self._pass_on(request, lease, response, send, [])
        kind = response.header("content-type") or ""
        if request.client.method == "POST" and response.status == 200 and kind.startswith("application/json"):
            self._accounting.used(request, usage)
        watch.over = True
        await send({"type": "http.response.body", "body": b""})

    async def _pass_on(
        self, request: ProxiedRequest, lease: Lease, response: Answer, send: asgi.Send, collected: list[bytes]
    ) -> Usage | None:
        """All but the end of an answer, behind what is `collected` of it; the tokens of which it tells.

        A client that does not read holds the worker back and fills no memory.
        """
        await self._begin_as_announced(request, response, send)
        passing = PassingUsage()
        collected.reverse()
        while chunk := collected.pop() if collected else await response.next_chunk():
            if request.makes and 200 <= response.status < 300:
                self._accounting.opened(request, _named_in(chunk))
            lease.prefilled()
            passing.see(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        return passing.usage

    async def _stream_events(
        self, request: ProxiedRequest, lease: Lease, response: Answer, send: asgi.Send, watch: asgi.ClientWatch
    ) -> None:
        """Pass an event stream on as it comes. A break becomes an event."""

        def first_event() -> None:
            timings = request.timings
            timings.first_byte, timings.is_stream = time.perf_counter(), True
            timings.was_alone = lease.is_alone
            lease.prefilled()

        await _begin(response, _response_headers(request, response), send)
        body = request.body
        opened = partial(self._opened, request) if request.client.endpoint == RESPONSES else None
        stream = SseRelay(send, choices_of(body.parsed) if body.strips_usage else 0, opened)
        end = b""
        with self._heartbeats.watching(stream, lease.worker):
            try:
                async with asyncio.timeout(None) as stream.scope:
                    await stream.run(response.chunks(), first_event)
            except (Broken, TimeoutError) as error:
                if isinstance(error, TimeoutError) and stream.scope is not None:
                    raise  # the client's
                end = _error_event(request, _worker_error(lease.worker, error), stream)
            except asyncio.CancelledError:
                request.delivered = watch.gone and stream.is_complete
                if not (request.delivered or watch.gone):  # the server stops
                    await stream.finish(_error_event(request, Stopping("The gateway is stopping."), stream))
                elif not request.delivered:
                    request.reply.failed(CLIENT_GONE)
                usage = stream.usage if request.delivered else None
                self._accounting.reported(request, Report(response.status, usage), stream.response)
                raise
            watch.over = True
            await stream.finish(end)
        self._accounting.reported(request, Report(response.status, stream.usage), stream.response)

    def _opened(self, request: ProxiedRequest, event: bytes) -> None:
        """The first event of a stream of /v1/responses names the response: from now on it can be asked for."""
        self._accounting.opened(request, data_of_last(event).get("response"))

    async def _answer_whole(
        self, request: ProxiedRequest, lease: Lease, response: Answer, send: asgi.Send, watch: asgi.ClientWatch
    ) -> None:
        """Collect a JSON answer, so that what the engine reports can go into the headers; unless it is too large."""
        collected: list[bytes] = []
        size = 0
        with request.timings.waiting():
            while size <= self._most_collected and (chunk := await response.next_chunk()):
                collected.append(chunk)
                size += len(chunk)
        if size > self._most_collected:
            await self._pass_large(request, lease, response, collected, send)
            watch.over = True
            await send({"type": "http.response.body", "body": b""})
            return
        body = b"".join(collected)
        request.timings.first_byte = time.perf_counter()
        headers = _response_headers(request, response)
        if response.status == 200:
            try:
                answer = loads(body)
            except ValueError:
                answer = None
            usage = usage_of(answer)
            if usage is not None and usage.cached is not None:
                headers.append((b"x-seamark-cached", str(usage.cached).encode()))
            report = Report(response.status, usage, outcome_in(response.header(OUTCOME_HEADER)))
            reason = await self._accounting.answered(request, report, answer)
            if reason is not None:
                headers.append((b"x-seamark-reason", reason.encode()))
        watch.over = True
        await asgi.send_whole(send, response.status, headers, body)

    async def _pass_large(
        self, request: ProxiedRequest, lease: Lease, response: Answer, collected: list[bytes], send: asgi.Send
    ) -> None:
        """Pass on a JSON answer as it comes."""
        request.timings.first_byte = time.perf_counter()
        answer = _named_in(collected[0])
        if response.status == 200:
            self._accounting.opened(request, answer)
        usage = await self._pass_on(request, lease, response, send, collected)
        if response.status == 200:
            outcome = outcome_in(response.header(OUTCOME_HEADER))
            self._accounting.reported(request, Report(response.status, usage, outcome), answer)

    async def _begin_as_announced(self, request: ProxiedRequest, response: Answer, send: asgi.Send) -> None:
        """Begin an answer that is passed on as it comes, with the length that the worker gave."""
        headers = _response_headers(request, response)
        if response.status not in BODILESS and (length := response.header("content-length")) is not None:
            headers.append((b"content-length", length.encode()))
        await _begin(response, headers, send)


async def _begin(response: Answer, headers: asgi.HeaderList, send: asgi.Send) -> None:
    await send({"type": "http.response.start", "status": response.status, "headers": headers})


def _has_body(request: ProxiedRequest, response: Answer) -> bool:
    return response.status not in BODILESS and request.client.method != "HEAD"


def _check_route(request: ProxiedRequest, worker: Worker, response: Answer) -> None:
    """Raises `NotServed` if the answer says no more than that the worker's HTTP server has no such route."""
    frontend, endpoint = worker.probed.frontend, request.client.endpoint
    if response.status in NO_ROUTE and endpoint in frontend.lacks and not isinstance(response, MessageAnswer):
        raise NotServed(
            f"{endpoint} is not served by {frontend.name}, which worker {worker.name} runs: use {CHAT}, or start vLLM "
            "without VLLM_USE_RUST_FRONTEND=1."
        )


def _named_in(begun: bytes) -> Any:
    """By what id an answer that begins so can be asked for."""
    named = _ID.match(begun)
    return {"id": named[1].decode(errors="replace")} if named is not None else None


def _with_valid_status(response: Answer) -> Answer:
    """The same answer. Raises `Malformed` for a status that no final answer has; 101 among them."""
    if 200 <= response.status < 600:
        return response
    response.close()
    raise Malformed(f"status {response.status}")


def _response_headers(request: ProxiedRequest, response: Answer) -> asgi.HeaderList:
    headers = asgi.end_to_end(response.headers, asgi.OWN_RESPONSE)
    if 300 <= response.status < 400 and request.worker is not None:
        headers = _redirected_here(headers, request.worker.address)
    headers.append(request.client.id_header)
    if request.worker is not None:
        headers.append((b"x-seamark-worker", request.worker.name.encode()))
    if request.body.hint:
        headers.append((b"x-seamark-boundary", ";".join(map(str, request.body.hint)).encode()))
    if (expected := request.expected) is not None:
        headers.append((b"x-seamark-predicted", str(expected.found(expected.predicted)).encode()))
    return headers


def _redirected_here(headers: asgi.HeaderList, worker_url: str) -> asgi.HeaderList:
    """A worker's redirect to itself becomes one to the same path of the gateway; one to any other address is left out.

    Workers have addresses that clients must not learn, under names that the gateway does not know.
    """
    here = [(name, _path_here(value, worker_url) if name == b"location" else value) for name, value in headers]
    return [(name, value) for name, value in here if value is not None]


def _path_here(location: bytes, worker_url: str) -> bytes | None:
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


def _error_event(request: ProxiedRequest, error: GatewayError, stream: SseRelay) -> bytes:
    request.reply.failed(error.status)
    return error_responses.error_event(error, request.client.endpoint, stream.first, stream.last)


def _worker_error(worker: Worker, error: Exception) -> GatewayError:
    """What the client learns of a worker that broke off, or is gone."""
    if isinstance(error, Silent):
        return WorkerSilent(f"Worker {worker.name} was silent for too long (setting silence_timeout).")
    if isinstance(error, Malformed):
        return WorkerFailed(f"Worker {worker.name} gave an answer that is no valid HTTP, or whose head is too long.")
    return WorkerFailed(f"Worker {worker.name} broke off.")
