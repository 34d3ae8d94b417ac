"""The ASGI entry: one proxied request from first to last byte, stage by stage.

Bodies travel as bytes. A failure while boundaries are sought costs the hint, never the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from proxy import errors
from proxy.chat.reader import HINTED
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import OWN_REQUESTS
from proxy.http import asgi, auth
from proxy.http.asgi import BodyHold, BodyMemory
from proxy.http.auth import ADMIN_OF_WORKERS, KeyRing
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.form_body import is_form, read_form, refuse_urlencoded
from proxy.http.json_body import as_utf8
from proxy.http.known_bodies import KnownBodies
from proxy.idle_work import IdleWork
from proxy.pipeline import error_responses
from proxy.pipeline.accounting import Accounting
from proxy.pipeline.adapter_changes import AdapterChanges
from proxy.pipeline.exchange import CLIENT_GONE, Exchange, Reply, exchange_of, id_header, keep_in, target_of
from proxy.pipeline.prompt_reader import PromptReader
from proxy.settings import Settings

logger = logging.getLogger("seamark.gateway")

# A client's own name for a request is kept in memory for a while; longer ones are replaced.
MAX_ID_CHARACTERS = 256

# Parsing a larger body takes a millisecond and more. Many that arrive together take turns with everything else.
LARGE_BYTES = 2**16

TURNS = 4  # of the event loop: enough for a page, or for a piece of a stream from worker to client

# How a JSON object begins, in any of its encodings; audio and images do not.
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff|[\s\0])*\{")

MOST_PREFLIGHTS, PREFLIGHT_SECONDS, PREFLIGHT_BYTES = 32, 5.0, 2**16  # at once; for an answer, and of one

# What a worker answers to a preflight request of every site if it lets all of them in, as vLLM does by default.
ANY_SITE = (b"access-control-allow-origin", b"*")

CANNOT_BE_TOLD = (
    "Nothing of the request is to be kept (x-seamark-keep, or keep in the keys file), and its API has no field to say "
    "so: use /v1/chat/completions, /v1/responses, /v1/messages, /v1/completions or /v1/embeddings."
)

# From a request that has been read to the last byte of its answer. Raises `GatewayError` for what a client is to be
# told before its answer begins.
Answering = Callable[[Exchange], Awaitable[None]]


class BodyReader:
    def __init__(self, settings: Settings, idle: IdleWork, known: KnownBodies) -> None:
        self._settings, self._known = settings, known
        self._idle = idle
        self._pace = asgi.Pace(settings.client_timeout, settings.min_body_rate)
        self._turns = asyncio.Lock()
        self.memory = BodyMemory(settings.max_bodies_bytes)

    def receive(self, scope: asgi.Scope, receive: asgi.Receive, held: BodyHold) -> Awaitable[bytes]:
        """All of it; raises as `asgi.read_body`. What runs beside the requests is put off."""
        self._idle.put_off()
        return asgi.read_body(scope, receive, self._settings.max_body_bytes, self._pace, held)

    async def parse(self, exchange: Exchange, held: BodyHold) -> Any:
        """Parse it if it is JSON. Returns the name that it gives the request, if any.

        Raises `BadRequest`, `UnreadableCoding`, `Overloaded` or `KeyBusy`.
        """
        head, body, settings = exchange.head, exchange.body, self._settings
        if body.raw and (coded := asgi.codings(head.headers)):
            text = f"The body is compressed ({', '.join(coded)}), which vLLM does not read. Send it as it is."
            raise errors.UnreadableCoding(text)
        hinted = head.endpoint in HINTED
        if not hinted:
            cannot_be_told = is_form(head.headers) or not _OBJECT.match(body.raw) or head.path in auth.UNSALTED
            if exchange.keep and body.raw.strip() and cannot_be_told:
                raise errors.BadRequest(CANNOT_BE_TOLD, "x-seamark-keep")
            if is_form(head.headers):
                exchange.model = await self._idle.finish(read_form(head.headers, body.raw))
                return None
            if body.raw.strip():
                refuse_urlencoded(head.headers)
            if not body.raw.strip() if head.is_json else _OBJECT.match(body.raw) is None:
                return None
        if len(body.raw) > LARGE_BYTES:
            await self.turn()
        try:
            raw = as_utf8(body.raw)
            read = self._known.read(raw, head.owner, is_chat=hinted and not exchange.keep)
        except errors.BadRequest as error:
            # The worker judges it, unless the worker might read what is refused here.
            must_be_read = exchange.keep or (head.key is not None and head.is_json)
            if hinted or isinstance(error, errors.TooComplex) or must_be_read:
                raise
            return None
        if keep_in(read.parsed) != "":
            read = self._known.forget(raw, head.owner, read)
        body.raw, body.memory, body.known = raw, read.memory, read.known
        held.take(body.memory.size)
        name = read.parsed.get("request_id")
        exchange.take(read.parsed, settings.ask_usage)
        return name

    async def turn(self) -> None:
        """Wait until the event loop has turned to all others since the last large body."""
        async with self._turns:
            for _ in range(TURNS):
                await asyncio.sleep(0)


def is_preflight(scope: asgi.Scope) -> bool:
    """Whether a browser asks, by the Fetch standard, before it sends a request of another site's page."""
    return (
        scope["method"] == "OPTIONS"
        and asgi.header(scope, b"origin") is not None
        and asgi.header(scope, b"access-control-request-method") is not None
    )


@dataclass(eq=False)
class Preflights:
    """Has a worker answer a browser's question whether a page of another site may ask, which carries no key.

    Whoever started the worker decides which sites may ask (vLLM's `--allowed-origins`; all, if it is not given). The
    question takes no slot: nobody with a key may have to wait behind those without one.
    """

    _pool: WorkerPool
    _upstream: Upstream
    _under_way: int = 0

    async def answer(self, scope: asgi.Scope, request_id: str, send: asgi.Send) -> None:
        """Pass on what a worker says. Raises `NotFound`, `NoWorker`, `Overloaded` or `WorkerFailed`."""
        workers = await self._pool.ready()
        if not workers:
            raise no_worker("No worker is ready.", self._pool.workers)
        if self._under_way >= MOST_PREFLIGHTS:
            raise errors.Overloaded("Too many preflight requests at once.")
        headers = asgi.end_to_end(scope["headers"], asgi.RECOMPUTED_WITH_KEY)
        self._under_way += 1
        try:
            url = workers[0].address + target_of(scope)
            answer = await self._upstream.send("OPTIONS", url, headers, read_timeout=PREFLIGHT_SECONDS)
            with contextlib.closing(answer):
                body = await answer.read(PREFLIGHT_BYTES)
        except (Unreachable, Broken):
            raise errors.WorkerFailed("The worker did not answer a preflight request, or it is too large.") from None
        finally:
            self._under_way -= 1
        named = id_header(request_id)
        await asgi.send_whole(send, answer.status, [*asgi.end_to_end(answer.headers, asgi.OWN_RESPONSE), named], body)


@dataclass(eq=False)
class RequestHandler:
    """ASGI application for everything that goes to a worker."""

    _keys: KeyRing | None
    _bodies: BodyReader
    _reader: PromptReader
    _answer: Answering
    _accounting: Accounting
    _preflights: Preflights
    _adapters: AdapterChanges
    _engine_ids: set[str] = field(init=False, default_factory=set)  # of requests under way: engines tell them apart

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        given = asgi.header(scope, b"x-request-id")
        request_id = given if given is not None and _is_name(given) else os.urandom(16).hex()
        exchange: Exchange | None = None
        try:
            asgi.check_room(scope)
            if scope["method"] == "OPTIONS" and is_preflight(scope):
                await self._preflights.answer(scope, request_id, send)
                return
            key = auth.client(scope, self._keys) if self._keys is not None else None
            with self._bodies.memory.of(key.name if key is not None else None) as held:
                raw = await self._bodies.receive(scope, receive, held)
                exchange = exchange_of(scope, raw, request_id, key, send, receive)
                exchange.engine_id, exchange.is_named = self._engine_id(request_id), request_id == given
                with exchange.reply:
                    await self._pass_through(exchange, held)
        except asgi.ClientGone:
            if exchange is not None and not (exchange.delivered and exchange.reply.started):
                exchange.reply.failed(CLIENT_GONE)
        except (Exception, asyncio.CancelledError) as error:
            # A task that is cancelled ends here. Raised on, it would be one traceback in the log for each request.
            name = exchange.head.request_id if exchange is not None else request_id
            await _refuse(exchange.reply if exchange is not None else Reply(_send=send), scope, error, name)
        finally:
            if exchange is not None:
                self._engine_ids.discard(exchange.engine_id)
                self._accounting.settle(exchange)

    async def _pass_through(self, exchange: Exchange, held: BodyHold) -> None:
        """From a body that is there to the last byte of the answer."""
        head = exchange.head
        self._accounting.begin(exchange)
        if exchange.response_id is not None:
            self._check_owner(exchange)  # of a response in the path, whatever the body is
        if head.method == "POST":
            name = await self._bodies.parse(exchange, held)
            if name is not None and not exchange.is_named:
                self._take_name(exchange, name)
            if exchange.response_id is not None:
                self._check_owner(exchange)
            if head.endpoint in HINTED:
                if len(exchange.body.raw) > LARGE_BYTES:
                    await self._bodies.turn()
                await self._reader.find(exchange)
                self._accounting.read(exchange)
            elif head.path in ADMIN_OF_WORKERS:
                await self._adapters.serve(exchange)
                return
        await self._answer(exchange)

    def _check_owner(self, exchange: Exchange) -> None:
        """Raises `NotFound` for a response that is not known to be the key's."""
        key, named = exchange.head.key, exchange.response_id
        if key is None or not isinstance(named, str):
            return
        if self._reader.stored.boot(named, key.owner) is None and not key.made(named):
            raise errors.NotFound("No such response.")

    def _take_name(self, exchange: Exchange, given: Any) -> None:
        """Give the request the name in its body; vLLM prefers one in a header."""
        if not isinstance(given, str) or not _is_name(given):
            return
        exchange.head.request_id = given
        self._engine_ids.discard(exchange.engine_id)
        exchange.engine_id = self._engine_id(given)
        if exchange.engine_id != given and "request_id" in exchange.body.parsed:
            exchange.body.put["request_id"] = exchange.engine_id  # by which vLLM stores a response

    def _engine_id(self, wanted: str) -> str:
        """What engines are to call a request: one name may be that of a whole fan-out of its client's."""
        name = f"{wanted}.{os.urandom(4).hex()}" if wanted in self._engine_ids else wanted
        self._engine_ids.add(name)
        return name


def _known(error: BaseException, name: str) -> errors.GatewayError:
    """What the client of the request that is called `name` learns of `error`."""
    if isinstance(error, errors.GatewayError):
        return error
    if isinstance(error, asyncio.CancelledError):  # the server's time to finish is over
        return errors.Stopping("The gateway is stopping.")
    if isinstance(error, MemoryError):
        logger.error("request %s: out of memory", name)
        return errors.Overloaded("The gateway is out of memory (settings max_bodies_bytes, memory_bytes, text_bytes).")
    # The place and the kind alone: the message of an unexpected error might hold prompt text.
    place = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed: %s\n%s", name, type(error).__name__, place)
    return errors.GatewayError("The gateway failed to handle this request.")


async def _refuse(reply: Reply, scope: asgi.Scope, failure: BaseException, name: str) -> None:
    error = _known(failure, name)
    reply.failed(error.status)
    if reply.started:
        return  # returning without the last chunk makes the server close the connection: a visible break
    headers = [id_header(name)]
    if asgi.header(scope, b"origin") is not None and not isinstance(error, errors.Unauthorized):
        headers.append(ANY_SITE)  # vLLM lets pages read its errors, except for this one
    await error_responses.send_error(reply, error, scope["path"], headers)


def _is_name(given: str) -> bool:
    """Whether a client's name for its request can be kept, and go on in a header: it is none that a gateway gives."""
    fits = 0 < len(given) <= MAX_ID_CHARACTERS and given.isascii() and given.isprintable() and given == given.strip()
    return fits and not given.startswith(OWN_REQUESTS)
