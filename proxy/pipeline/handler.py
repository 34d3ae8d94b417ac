"""The ASGI entry: one proxied request from first to last byte, stage by stage.

Bodies travel as bytes. A failure while boundaries are sought costs the hint, never the request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import traceback
from typing import TYPE_CHECKING, Any

from proxy.chat.reader import HINTED
from proxy.errors import (
    BadRequest,
    GatewayError,
    NotFound,
    Overloaded,
    Stopping,
    TooComplex,
    Unauthorized,
    UnreadableCoding,
)
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import OWN_REQUESTS
from proxy.http import asgi, auth
from proxy.http.auth import ADMIN_OF_WORKERS, KeyRing
from proxy.http.body_memory import BodyHold, BodyMemory
from proxy.http.form_body import is_form, read_form, refuse_urlencoded
from proxy.http.json_body import as_utf8, memory_of, parse_object
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.pipeline import error_responses
from proxy.pipeline.accounting import Accounting
from proxy.pipeline.adapter_changes import AdapterChanges
from proxy.pipeline.answering import Answering
from proxy.pipeline.dispatch import Dispatcher
from proxy.pipeline.engine_names import EngineName, EngineNames
from proxy.pipeline.preflight import ANY_SITE, Preflights, is_preflight
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.request import CLIENT_GONE, ProxiedRequest, Reply, Timings, request_of
from proxy.settings import Settings

if TYPE_CHECKING:
    from proxy.observability.tracing import Tracing

logger = logging.getLogger("seamark.gateway")

# A client's own name for a request is kept in memory for a while; longer ones are replaced.
MAX_ID_CHARACTERS = 256

# Parsing a larger body takes a millisecond and more. Many that arrive together take turns with everything else.
LARGE_BYTES = 2**16

TURNS = 4  # of the event loop: enough for a page, or for a piece of a stream from worker to client

# How a JSON object begins, in any of its encodings; audio and images do not.
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff|[\s\0])*\{")


class RequestHandler:
    """ASGI application for everything that goes to a worker."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        keys: KeyRing | None,
        pool: WorkerPool,
        reader: PromptReader,
        dispatcher: Dispatcher,
        answer: Answering,
        accounting: Accounting,
        idle: IdleWork,
        preflights: Preflights,
        adapters: AdapterChanges,
        tracing: Tracing | None = None,
    ) -> None:
        self._settings = settings
        self._boundary_seconds = metrics.overhead.labels("boundary")
        self._keys = keys
        self._pool = pool
        self._reader = reader
        self._dispatcher = dispatcher
        self._answer = answer
        self._accounting = accounting
        self._idle = idle
        self._preflights = preflights
        self._adapters = adapters
        self._tracing = tracing
        self._pace = asgi.Pace(settings.client_timeout, settings.min_body_rate)
        self._bodies = BodyMemory(settings.max_bodies_bytes)
        self._names = EngineNames()
        self._turns = asyncio.Lock()

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        self._idle.put_off()
        given = asgi.header(scope, b"x-request-id")
        request_id = given if given is not None and _is_name(given) else os.urandom(16).hex()
        request: ProxiedRequest | None = None
        with self._names.hold() as name:
            try:
                asgi.check_room(scope)
                if is_preflight(scope):
                    await self._preflights.answer(scope, request_id, send)
                    return
                key = auth.client(scope, self._keys) if self._keys is not None else None
                with self._bodies.of(key.name if key is not None else None) as held:
                    raw = await asgi.read_body(scope, receive, self._settings.max_body_bytes, self._pace, held)
                    request = request_of(scope, raw, request_id, key, send)
                    request.engine_id, request.is_named = name.take(request_id), request_id == given
                    async with asgi.ClientWatch(scope, receive) as watch:
                        await self._serve(request, held, name, watch)
            except asgi.ClientGone:
                if request is not None and not (request.delivered and request.reply.started):
                    request.reply.failed(CLIENT_GONE)
            except asyncio.CancelledError:  # the server's time to finish is over; `ResponseRelay` has ended a stream
                # The task ends here. Raised on, it would be one traceback in the log for each request.
                await _refuse(request, scope, Stopping("The gateway is stopping."), request_id, send)
            except Exception as error:
                await _refuse(request, scope, _known(error, _name_of(request, request_id)), request_id, send)
            finally:
                if request is not None:
                    self._accounting.count(request)

    async def _serve(self, request: ProxiedRequest, held: BodyHold, name: EngineName, watch: asgi.ClientWatch) -> None:
        client = request.client
        if self._tracing is not None:
            request.trace = self._tracing.begin(client.method, client.endpoint, client.headers)
        self._check_owner(request)  # of a response in the path, whatever the body is
        if client.method == "POST":
            await self._read(request, held, name)
            if client.path in ADMIN_OF_WORKERS:
                await self._adapters.serve(request)
                return
        await self._answer(request, request.reply, watch)

    async def _read(self, request: ProxiedRequest, held: BodyHold, name: EngineName) -> None:
        """Parse the body if it is JSON, and find its boundaries."""
        client, body, settings = request.client, request.body, self._settings
        if body.raw and (coded := asgi.codings(client.headers)):
            text = f"The body is compressed ({', '.join(coded)}), which vLLM does not read. Send it as it is."
            raise UnreadableCoding(text)
        hinted = client.endpoint in HINTED
        if not hinted and is_form(client.headers):
            body.form_model = await self._idle.finish(read_form(client.headers, body.raw))
            return
        if not hinted and body.raw.strip():
            refuse_urlencoded(client.headers)
        if not hinted and (_OBJECT.match(body.raw) is None if not client.is_json else not body.raw.strip()):
            return
        await self._turn(len(body.raw))
        try:
            raw = as_utf8(body.raw)
            parsed = parse_object(raw, *settings.json_limits)
        except BadRequest as error:
            # The worker judges it, unless the worker might read what is refused here.
            if hinted or isinstance(error, TooComplex) or (client.key is not None and client.is_json):
                raise
            return
        body.raw = raw
        body.memory = memory_of(parsed, len(raw), settings.max_boundary_values)
        held.take(body.memory.size)
        given = parsed.get("request_id")
        body.take(parsed, client, settings.ask_usage)
        _take_name(request, given, name)
        self._check_owner(request)
        if hinted:
            await self._turn(len(raw))
            with request.timings.waiting():
                workers = await self._pool.find(request.model)
            request.prompt = self._reader.read(request, workers)
            self._accounting.began(request)
            request.timings.reading_seconds = time.perf_counter() - request.timings.arrived
            self._boundary_seconds.observe(request.timings.reading_seconds)

    async def _turn(self, size: int) -> None:
        """Wait until the event loop has turned to all others since the last large body (`size` in bytes)."""
        if size > LARGE_BYTES:
            async with self._turns:
                for _ in range(TURNS):
                    await asyncio.sleep(0)

    def _check_owner(self, request: ProxiedRequest) -> None:
        """Raises `NotFound` for a response that is not known to be the key's."""
        key = request.client.key
        if key is None or not isinstance(named := request.response_id, str):
            return
        if self._reader.stored.boot(named, key.owner) is None and not key.made(named):
            raise NotFound("No such response.")


def _known(error: Exception, name: str) -> GatewayError:
    """What the client of the request that is called `name` learns of `error`."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, MemoryError):
        logger.error("request %s: out of memory", name)
        return Overloaded("The gateway is out of memory (settings max_bodies_bytes, memory_bytes, text_bytes).")
    # The place and the kind alone: the message of an unexpected error might hold prompt text.
    place = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed: %s\n%s", name, type(error).__name__, place)
    return GatewayError("The gateway failed to handle this request.")


async def _refuse(
    request: ProxiedRequest | None, scope: asgi.Scope, error: GatewayError, request_id: str, send: asgi.Send
) -> None:
    reply = request.reply if request is not None else Reply(send, Timings())
    reply.failed(error.status)
    if reply.started:
        return  # returning without the last chunk makes the server close the connection: a visible break
    headers = [(b"x-request-id", _name_of(request, request_id).encode("latin-1"))]
    if asgi.header(scope, b"origin") is not None and not isinstance(error, Unauthorized):
        headers.append(ANY_SITE)  # vLLM lets pages read its errors, except for this one
    await error_responses.send_error(reply, error, scope["path"], headers)


def _take_name(request: ProxiedRequest, given: Any, name: EngineName) -> None:
    """Give the request the name in its body, unless a header has named it, which vLLM prefers."""
    if request.is_named or not isinstance(given, str) or not _is_name(given):
        return
    request.client = request.client._replace(request_id=given)
    request.engine_id = name.take(given)
    if request.engine_id != given and "request_id" in request.body.parsed:
        request.body.put["request_id"] = request.engine_id  # by which vLLM stores a response


def _is_name(given: str) -> bool:
    """Whether a client's name for its request can be kept, and go on in a header: it is none that a gateway gives."""
    fits = 0 < len(given) <= MAX_ID_CHARACTERS and given.isascii() and given.isprintable() and given == given.strip()
    return fits and not given.startswith(OWN_REQUESTS)


def _name_of(request: ProxiedRequest | None, request_id: str) -> str:
    """The name of a request that was called `request_id` until its body had been read."""
    return request_id if request is None else request.client.request_id
