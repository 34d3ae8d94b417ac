"""A proxied request from first to last byte: find boundaries, choose a worker, forward, stream back, account.

Bodies travel as bytes. Whatever fails while a boundary is sought costs the hint, never the request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import traceback
from typing import TYPE_CHECKING

from proxy.chat.chat import HINTED
from proxy.config_files import read_secret
from proxy.errors import BadRequest, GatewayError, NotFound, Stopping, TooDeep
from proxy.fleet.pool import WorkerPool
from proxy.fleet.self_check import SelfCheck
from proxy.fleet.warmup import WarmupRequest, replay_all
from proxy.fleet.worker import Worker
from proxy.http import asgi, auth
from proxy.http.auth import KeyRing
from proxy.http.client import Answer, Broken, Stale, Unreachable, Upstream
from proxy.http.json_body import as_utf8, parse_object
from proxy.metrics import Metrics
from proxy.observability.shadow import Shadow
from proxy.pipeline import error_responses
from proxy.pipeline.accounting import Accounting
from proxy.pipeline.dispatch import Dispatcher
from proxy.pipeline.forward import ResponseRelay, broken
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.request import ProxiedRequest, request_of
from proxy.pipeline.sse import Heartbeats
from proxy.routing.queue import AdmissionQueue
from proxy.settings import Settings

if TYPE_CHECKING:
    from proxy.routing.redis_sync import RedisSync

from proxy.pipeline.handler import _OBJECT, MAX_ID_CHARACTERS

logger = logging.getLogger("seamark.gateway")

# Seconds between two looks at the files that are read again when they change.
FILES_INTERVAL = 1.0


class Gateway:
    """ASGI application for everything that goes to a worker."""

    def __init__(self, settings: Settings) -> None:
        """Raises `SettingsError` for a file that cannot be used."""
        self.settings = settings
        self.metrics = Metrics()
        worker_key = settings.worker_api_key_file and read_secret("worker_api_key_file", settings.worker_api_key_file)
        self.upstream = Upstream(settings.connect_timeout, worker_key)
        self.keys: KeyRing | None = None
        if settings.api_keys is not None:
            secret = settings.salt_secret_file and read_secret("salt_secret_file", settings.salt_secret_file)
            self.keys = KeyRing(settings.api_keys, secret)
        self.pool = WorkerPool(settings, self.upstream, self.metrics)
        self.finding = PromptReader(settings, self.metrics)
        self.admission = AdmissionQueue(settings.max_queue, settings.queue_timeout, self.metrics.queue_seconds)
        self.dispatch = Dispatcher(settings, self.pool, self.finding, self.admission, self.upstream, self.metrics)
        self.accounting = Accounting(self.metrics, self.pool, self.finding, self.dispatch.words, settings.excerpts)
        self.shadow = Shadow(settings, self.finding.look, self.finding.recent, self.metrics, self.pool.boots)
        self.self_check = SelfCheck(
            settings,
            self.pool,
            self.dispatch.hot,
            self.finding.stored,
            self.upstream,
            self.metrics,
            lambda worker: self.dispatch.directory.forget_all(worker.boot),
        )
        self.pulse = Heartbeats(settings.heartbeat, self.metrics.heartbeats)
        self.delivery = ResponseRelay(self.dispatch, self.finding, self.accounting, self.shadow, self.pulse)
        self.metrics.shadow_mode.set(settings.shadow)
        self.metrics.queued.set_function(lambda: len(self.admission))
        self.pool.warm = self._warm
        self.pool.removed = self._forget
        self._boundary_seconds = self.metrics.overhead.labels("boundary")
        self.sharing: RedisSync | None = None  # with other gateways
        self.created = time.time()
        self._bodies = asgi.BodyRoom(settings.max_bodies_bytes)
        self._under_way: set[str] = set()  # names of requests, as engines know them
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin what runs beside the requests. Inside a running event loop."""
        beside = [self.pool.watch(), self.pulse.run(), self._watch_files(), self.shadow.run(), self.self_check.run()]
        if self.settings.redis is not None:
            self.sharing = self._shared()
            beside.append(self.sharing.run())
        self._tasks = [asyncio.create_task(work) for work in beside]

    def _forget(self, worker: Worker) -> None:
        for part in (self.dispatch.words, self.shadow, self.self_check):
            part.forget(worker)

    def _shared(self) -> RedisSync:
        from proxy.routing.redis_sync import RedisSync  # and with it redis: not even imported where it is not wanted

        return RedisSync(
            self.settings.redis,
            self.dispatch.directory,
            self.finding.memory,
            self.metrics,
            self.pool.boots,
        )

    async def stop(self) -> None:
        """End it, and close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.sharing is not None:
            await self.sharing.aclose()
        await self.dispatch.words.aclose()
        await self.upstream.aclose()

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILES_INTERVAL)
            self.pool.refresh()
            if self.keys is not None:
                self.keys.refresh()

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        request_id = asgi.header(scope, b"x-request-id")
        if not request_id or len(request_id) > MAX_ID_CHARACTERS or not request_id.isascii():
            request_id = os.urandom(16).hex()
        call: ProxiedRequest | None = None
        taken = 0
        try:
            key = auth.client(scope, self.keys) if self.keys is not None else None
            settings = self.settings
            raw = await asgi.read_body(scope, receive, settings.max_body_bytes, settings.client_timeout, self._bodies)
            taken = len(raw)
            call = request_of(scope, raw, request_id, key)
            if request_id in self._under_way:  # one name for a whole fan-out; the engine's words must not be mixed up
                call.engine_id = f"{request_id}.{os.urandom(4).hex()}"
            self._under_way.add(call.engine_id)
            async with asgi.ClientWatch(scope, receive) as watch:
                await self._serve(call, send, watch)
        except asgi.ClientGone:
            if call is not None:
                call.status = 499
        except asyncio.CancelledError:  # the server's time to finish is over; a stream was told so by `ResponseRelay`
            await self._refuse(call, scope, Stopping("The gateway is stopping."), request_id, send)
            raise
        except GatewayError as error:
            await self._refuse(call, scope, error, request_id, send)
        except Exception as error:
            # Where it happened, and nothing of what: the message of an unexpected error might hold prompt text.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("request %s failed: %s\n%s", request_id, type(error).__name__, where)
            await self._refuse(
                call, scope, GatewayError("The gateway failed to handle this request."), request_id, send
            )
        finally:
            self._bodies.give_back(taken)
            if call is not None:
                self._under_way.discard(call.engine_id)
                self.accounting.count(call)

    async def _refuse(
        self, call: ProxiedRequest | None, scope: asgi.Scope, error: GatewayError, request_id: str, send: asgi.Send
    ) -> None:
        if call is not None:
            call.status = error.status
            if call.started:
                return  # returning without the last chunk makes the server close the connection: a visible break
        await error_responses.send_error(send, error, scope["path"], [(b"x-request-id", request_id.encode("latin-1"))])

    async def _serve(self, call: ProxiedRequest, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        self._check_owner(call)  # of a response in the path, whatever the body is
        if call.method == "POST":
            await self._read(call)
        await self.dispatch.place(call)
        try:
            response = await self._forward(call)
            try:
                await self.delivery.deliver(call, response, send, watch)
            finally:
                response.close()
        except Broken as error:
            raise broken(call, error) from None
        finally:
            self.dispatch.leave(call)

    async def _read(self, call: ProxiedRequest) -> None:
        """Parse the body where it is JSON, and find its boundaries."""
        hinted = call.endpoint in HINTED
        if not hinted and not call.is_json and _OBJECT.match(call.raw) is None:
            return
        try:
            raw = as_utf8(call.raw)
            body = parse_object(raw, self.settings.max_json_depth)
        except BadRequest as error:
            # The worker's to judge, unless it might read what is refused here.
            if hinted or isinstance(error, TooDeep) or (call.key is not None and call.is_json):
                raise
            return
        call.raw = raw
        call.take_body(body, self.settings.ask_usage)
        self._check_owner(call)
        if hinted:
            await self.finding.read(call, await self.pool.ready())
            call.sought_seconds = time.perf_counter() - call.arrived
            self._boundary_seconds.observe(call.sought_seconds)

    def _check_owner(self, call: ProxiedRequest) -> None:
        if call.key is not None and not self.finding.stored.may_see(call.response_id, call.owner):
            raise NotFound("No such response.")

    async def _forward(self, call: ProxiedRequest) -> Answer:
        """Send to the chosen worker. What was not sent at all is sent again: elsewhere, or on a new connection."""
        resent = False
        while True:
            worker = call.worker
            headers = [
                *call.headers,
                call.engine_id_header,
                *(self.upstream.own_headers if call.key is not None else ()),
            ]
            raw = self._body(call)
            try:
                response = await self.upstream.send(
                    call.method, worker.url + call.target, headers, raw, self.settings.silence_timeout, resent
                )
            except Unreachable:
                self.metrics.resent.labels(worker.name, "unreachable").inc()
                self.pool.mark_down(worker)
                self.dispatch.never_got(call)
                await self.dispatch.place(call)
            except Stale:
                if resent:
                    raise
                resent = True
                self.metrics.resent.labels(worker.name, "stale").inc()
            except Broken:
                self.pool.record_failure(worker)
                raise
            else:
                worker.answered()
                return response

    def _body(self, call: ProxiedRequest) -> bytes:
        """As its worker gets it."""
        if call.method != "POST":
            return call.raw
        return call.body_with(self.dispatch.hint(call), call.worker.cache.salt(call.body))

    async def _warm(self, worker: Worker) -> None:
        """Replay hot prefixes on a worker that has restarted."""
        models = {entry.get("id") for entry in worker.models}

        async def one(replay: WarmupRequest) -> None:
            positions = worker.hint(replay.boundaries, self.settings.boundary_budget)
            raw = replay.body_with(positions)
            try:
                status, answer = await self.upstream.fetch("POST", worker.url + replay.endpoint, raw)
            except (Unreachable, Broken):
                status = 0
            self.metrics.replays.labels(worker.name, "done" if status == 200 else "failed").inc()
            if status == 200:
                self.accounting.replayed(replay.model, worker, answer)
                self.dispatch.directory.note(replay.boundaries, worker.boot)

        if worker.takes_hints:
            await replay_all(self.dispatch.hot.hottest(models), one)
