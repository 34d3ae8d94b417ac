"""The FastAPI application: the gateway's own pages, and raw ASGI routes for everything that goes to a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Route

from proxy.errors import GatewayError, NotFound, NoWorker
from proxy.gateway import Gateway
from proxy.settings import Settings
from proxy.workers import Worker, union_of_models


def build(settings: Settings) -> FastAPI:
    """The application for these settings. Workers are looked at from its start-up to its end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway = app.state.gateway = Gateway(settings)
        watching = asyncio.create_task(gateway.pool.watch())
        try:
            yield
        finally:
            watching.cancel()
            await gateway.words.aclose()
            await gateway.upstream.aclose()

    app = FastAPI(title="Seamark", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    async def serving() -> list[Worker]:
        workers = await app.state.gateway.pool.ready()
        if not workers:
            raise NoWorker("No worker is ready.")
        return workers

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        return JSONResponse({"status": "ready", "workers": [worker.name for worker in await serving()]})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(app.state.gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": union_of_models(await serving())})

    @app.get("/seamark/status")
    async def status() -> dict[str, Any]:
        gateway = app.state.gateway
        return {
            "workers": [
                {
                    "url": worker.url,
                    "up": worker.up,
                    "boot": worker.boot,
                    "inflight": worker.inflight,
                    "models": [entry.get("id") for entry in worker.models],
                    "engine": asdict(worker.engine) if worker.engine is not None else None,
                }
                for worker in gateway.pool.workers
            ],
            "directory_entries": len(gateway.directory),
            "known_positions": len(gateway.finding.memory),
            "text_bytes_held": gateway.finding.learner.held + gateway.finding.recent.held,
        }

    @app.get("/seamark/requests/{request_id}")
    async def request_explained(request_id: str) -> dict[str, Any]:
        gateway = app.state.gateway
        told = gateway.finding.explanations.get(request_id)
        if told is None:
            raise NotFound(f"No request with the id {request_id} is remembered.")
        return told.as_json()

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        known = (
            NotFound(f"No such path: {request.url.path}") if error.status_code == 404 else GatewayError(error.detail)
        )
        known.status = error.status_code
        return error_response(known)

    @app.exception_handler(GatewayError)
    async def told(request: Request, error: GatewayError) -> Response:
        return error_response(error)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(GatewayError("The gateway failed to handle this request."))

    for path in ("/v1/{path:path}", "/tokenize", "/detokenize"):
        app.router.routes.append(Route(path, endpoint=_Raw()))
    return app


class _Raw:
    """An instance, so that Starlette takes it for an ASGI application and leaves request and response alone."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await scope["app"].state.gateway(scope, receive, send)


def error_response(error: GatewayError) -> Response:
    """The error in OpenAI's envelope."""
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else None
    return Response(error.body(), error.status, headers, "application/json")
