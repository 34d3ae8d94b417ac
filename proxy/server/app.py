"""The FastAPI application: the gateway's own pages. Requests for a worker bypass FastAPI."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from starlette.exceptions import HTTPException

from proxy.chat.chat import OUTSIDE_V1
from proxy.chat.reader import ENDPOINTS
from proxy.errors import Forbidden, GatewayError, NotFound, NoWebSockets, Stopping
from proxy.fleet.model_names import union_of_models
from proxy.fleet.pool import no_worker
from proxy.fleet.probe import MODELS
from proxy.fleet.worker import Worker
from proxy.http import asgi, auth
from proxy.idle_work import Steps
from proxy.pipeline.error_responses import error_body, error_headers, send_error
from proxy.pipeline.gateway import Gateway
from proxy.pipeline.handler import ANY_SITE
from proxy.pipeline.pinned_prompts import NOT_RELEASED
from proxy.server import status as pages

HEALTH = "/health"
_PAGES = frozenset({HEALTH, MODELS, "/ready", "/metrics"})
API, _TWICE = "/v1", "/v1/v1/"

# First parts of paths under `API`. Clients ask for them without it, or with it twice, if their base_url is wrong.
_RESOURCES = frozenset(path.split("/")[2] for path in (*ENDPOINTS, MODELS) if path.startswith(API + "/"))

_NO_WEBSOCKETS = (
    "The gateway speaks no websockets. What vLLM serves by them, such as /v1/realtime, is reached at the worker itself."
)

_JSON = [(b"content-type", b"application/json")]


class App(FastAPI):
    """Requests for a worker never enter FastAPI's stack: it must not parse them, and each layer costs time."""

    def __init__(self, gateway: Gateway, pages_only: bool, **options: Any) -> None:
        """`pages_only`: nothing is forwarded to workers."""
        super().__init__(docs_url=None, redoc_url=None, openapi_url=None, title="Seamark", **options)
        self.gateway = gateway
        self._pages_only = pages_only
        self._alive = json.dumps({"status": "ok", "gateway": gateway.pool.gateway_id}).encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if scope["path"].endswith("/"):
                scope = _without_slash(scope)
            if (served := scope.get(asgi.SERVED)) is not None and served.wants_websocket:
                await send_error(send, NoWebSockets(_NO_WEBSOCKETS), scope["path"], ())
                return
            if scope["path"] == HEALTH and scope["method"] in ("GET", "HEAD"):
                await asgi.send_whole(send, 200, _JSON, self._alive)  # at once, however much there is to do
                return
            if not self._pages_only and _is_forwarded(scope["path"], scope["method"]):
                await self.gateway.handler(scope, receive, send)
                return
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}  # the server, which knows better, sends no body
        await super().__call__(scope, receive, send)


def _without_slash(scope: Any) -> Any:
    """A known path is the same with a slash behind it; a worker would answer with a redirect to itself."""
    path = scope["path"].rstrip("/")
    if path not in ENDPOINTS and path not in _PAGES:
        return scope
    return {**scope, "path": path, "raw_path": path.encode()}


def _is_forwarded(path: str, method: str) -> bool:
    if (path == MODELS or path.startswith(MODELS + "/")) and method in ("GET", "HEAD"):
        return False
    if path.startswith(API + "/"):
        return not (path.startswith(_TWICE) and _wrong_base_url(path))
    return path in OUTSIDE_V1


def _wrong_base_url(path: str) -> str | None:
    """The path that a client means whose base_url lacks `/v1`, or has it twice; None for any other path."""
    meant = path.removeprefix(API) if path.startswith(_TWICE) else API + path
    return meant if _RESOURCES.intersection(meant.split("/")[2:3]) else None


def _no_such_path(path: str, pages_only: bool) -> str:
    meant = _wrong_base_url(path)
    if pages_only and (meant is not None or path.startswith(API + "/")):
        return f"No such path: {path}. This address has the operator's pages only; clients use the gateway's port."
    if meant is not None:
        end = "ends in /v1" if meant.startswith(API + path) else "must not end in /v1: this client adds it"
        return f"No such path: {path}. Did you mean {meant}? base_url {end}."
    if path == auth.ROOT:
        return "No such path: /. The live page is at the admin port; base_url ends in /v1."
    if pages_only:
        return f"No such path: {path}"
    here = ", ".join(sorted(OUTSIDE_V1))
    return f"No such path: {path}. Of vLLM's, /v1/... and {here} are reached here, any other at the worker itself."


def build(gateway: Gateway, *, pages_only: bool = False) -> App:
    """The application that clients reach, which runs `gateway`; `pages_only`: its pages at an address of their own."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        try:
            yield
        finally:
            await gateway.stop()

    app = App(gateway, pages_only, lifespan=None if pages_only else lifespan)
    own_address = gateway.settings.admin_port is not None

    async def serving() -> list[Worker]:
        workers = await gateway.pool.ready()
        if not workers:
            raise no_worker("No worker is ready.", gateway.pool.workers)
        return workers

    @app.middleware("http")
    async def check_key(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            request.state.key = auth.admit(request.scope, gateway.keys, own_address, pages_only)
        except GatewayError as error:
            return error_response(error)
        return await call_next(request)

    @app.get("/ready")
    async def ready() -> Response:
        if gateway.is_stopping:
            raise Stopping("The gateway is stopping.")
        return JSONResponse({"status": "ready", "workers": [worker.name for worker in await serving()]})

    @app.get("/metrics")
    async def metrics() -> Response:
        await gateway.idle.caught_up()
        gateway.accounting.time_saved()
        shown = await gateway.idle.finish(exposition_of(gateway.metrics.registry))
        if gateway.settings.sidecar:  # an endpoint picker looks for vLLM's figures here
            shown = merged(await gateway.pool.exposition(gateway.pool.workers[0]), shown.decode()).encode()
        return Response(shown, media_type=CONTENT_TYPE_LATEST)

    @app.get(MODELS)
    async def models(request: Request) -> Response:
        models = union_of_models(worker.probed.models for worker in await serving())
        return JSONResponse({"object": "list", "data": models}, headers=_for_pages(request))

    @app.get(MODELS + "/{name:path}")  # with slashes, as many have
    async def model(request: Request, name: str) -> Response:
        await serving()
        await gateway.pool.look_for(name)
        for worker in gateway.pool.up:
            for entry in worker.probed.models:
                if entry["id"] == name:
                    return JSONResponse(entry, headers={"x-seamark-worker": worker.name, **_for_pages(request)})
        raise NotFound(f"The model `{name}` does not exist.")

    @app.get("/seamark/status")
    async def status() -> Response:
        await gateway.idle.caught_up()
        return _plain_json(pages.status(gateway))

    if pages_only or not own_address:

        @app.get(auth.ROOT)
        async def root() -> Response:
            return RedirectResponse(auth.PAGE.removeprefix("/"))  # relative: a proxy before it may add a prefix

    @app.get(auth.PAGE)
    async def page() -> Response:
        return Response(pages.PAGE, headers=pages.PAGE_HEADERS, media_type="text/html")

    @app.get(auth.LIVE)
    async def live_figures() -> Response:
        await gateway.idle.caught_up()
        return _plain_json(pages.live(gateway))

    @app.get(auth.PREFIXES)
    async def prefixes() -> Response:
        return _plain_json({"prefixes": gateway.pinned.as_json()})

    @app.post(auth.PREFIXES)
    async def pin(request: Request) -> Response:
        _refuse_other_sites(request)
        return _plain_json(await gateway.pinned.add(await _bounded_body(request, gateway.settings.max_body_bytes)))

    @app.delete(auth.PREFIXES + "/{name}")
    async def unpin(request: Request, name: str) -> Response:
        _refuse_other_sites(request)
        removed = await gateway.pinned.remove(name)
        is_held = NOT_RELEASED in removed["workers"].values()
        return _plain_json(removed, HTTPStatus.ACCEPTED if is_held else HTTPStatus.OK)

    @app.post("/seamark/self-check/reset")
    async def reset_self_check(request: Request) -> dict[str, bool]:
        _refuse_other_sites(request)
        gateway.self_check.reset()
        return {"hints_off": gateway.self_check.hints_off}

    @app.get(auth.EXPLANATIONS + "{request_id:path}")
    async def request_explained(request: Request, request_id: str) -> Response:
        await gateway.idle.caught_up()
        explanations, key = gateway.accounting.explanations, request.state.key
        # A client must not even learn that another client's request exists.
        sees_all = key is None or key.entry.admin
        explanation = explanations.of_anyone(request_id) if sees_all else explanations.get(request_id, key.owner)
        if explanation is None:
            raise NotFound(f"No request with the id {request_id} is remembered.")
        return _plain_json(explanation.as_json())

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        known = NotFound(_no_such_path(path, pages_only)) if error.status_code == 404 else GatewayError(error.detail)
        known.status = error.status_code
        if error.status_code < 500:
            known.type = "invalid_request_error"
        return error_response(known, _wrong_base_url(path) or path)

    @app.exception_handler(GatewayError)
    async def known_error(request: Request, error: GatewayError) -> Response:
        response = error_response(error)
        response.headers.update(_for_pages(request))
        return response

    @app.exception_handler(Exception)
    async def unknown_error(request: Request, error: Exception) -> Response:
        return error_response(GatewayError("The gateway failed to handle this request."))

    return app


def _refuse_other_sites(request: Request) -> None:
    """Any page may post to an address that only this machine reaches; a browser says which site's page it was."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Forbidden("Another site's page cannot do this.")


async def _bounded_body(request: Request, most: int) -> bytes:
    """Raises `BodyTooLarge` for one of more than `most` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise asgi.too_large(most)
    return bytes(body)


def _for_pages(request: Request) -> dict[str, str]:
    """The header by which pages of any site may read the answer: of the models alone, as with vLLM."""
    if not request.url.path.startswith(MODELS) or "origin" not in request.headers:
        return {}
    name, value = ANY_SITE
    return {name.decode(): value.decode()}


def _plain_json(value: Any, status: int = HTTPStatus.OK) -> Response:
    """JSON in ASCII: clients' texts may hold halves of surrogate pairs, which UTF-8 cannot encode."""
    return Response(json.dumps(value), status, headers={"cache-control": "no-store"}, media_type="application/json")


def error_response(error: GatewayError, path: str = "") -> Response:
    """The error in the envelope of the API that `path` belongs to: OpenAI's, or Anthropic's."""
    return Response(error_body(error, path), error.status, error_headers(error))


_NAMED = re.compile(r"# (?:HELP|TYPE) (\S+)")


class _One(NamedTuple):
    family: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.family,)


def exposition_of(registry: CollectorRegistry) -> Steps[bytes]:
    """All families of a registry as text, one in each step: a thousand series take milliseconds."""
    parts = []
    for family in registry.collect():
        parts.append(generate_latest(_One(family)))
        yield
    return b"".join(parts)


def merged(first: str, second: str) -> str:
    """Both, each family once, as the format demands. A series that both have is the one of `first`."""
    families = _families(first)
    for name, lines in _families(second).items():
        known = families.setdefault(name, lines)
        if known is not lines:
            taken = {_series(line) for line in known}
            known += [line for line in lines if not line.startswith("#") and _series(line) not in taken]
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _families(text: str) -> dict[str, list[str]]:
    """Lines by the family under whose `# HELP` or `# TYPE` they stand."""
    families: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if (named := _NAMED.match(line)) is not None:
            lines = families.setdefault(named[1], [])
        elif line.startswith("#") or not line.strip():  # a comment, or OpenMetrics' end
            continue
        elif not families:  # a sample without a family
            lines = families.setdefault("", [])
        lines.append(line)
    return families


def _series(line: str) -> str:
    """Name and labels of a sample: all before its value, and before a time behind that."""
    end = line.rfind("}") + 1
    return line[:end] if end else line.split(" ", 1)[0]
