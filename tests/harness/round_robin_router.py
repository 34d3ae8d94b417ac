"""A router that gives each request to the next worker, started as smg is; `--fail-every N` refuses some.

Run as `python -m tests.harness.round_robin_router --port N --worker-urls URL...`.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import aiohttp
from aiohttp import web


def application(workers: list[str], fail_every: int) -> web.Application:
    """Its health, its models, and one route."""
    turns = itertools.count()

    async def forward(request: web.Request) -> web.Response:
        turn = next(turns)
        if fail_every and turn % fail_every == fail_every - 1:
            return web.Response(status=503, text="no worker")
        url, body = workers[turn % len(workers)] + request.path, await request.read()
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, data=body, headers={"content-type": "application/json"}) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def models(request: web.Request) -> web.Response:
        async with aiohttp.ClientSession() as client, client.get(workers[0] + request.path) as answer:
            return web.json_response(await answer.json())

    app = web.Application(client_max_size=2**26)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", forward)
    return app


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.round_robin_router")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-urls", nargs="+", required=True)
    parser.add_argument("--fail-every", type=int, default=0)
    args, _ = parser.parse_known_args(argv)
    app = application(args.worker_urls, args.fail_every)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main(sys.argv[1:])
