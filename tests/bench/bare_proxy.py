"""A proxy that does nothing but pass on, in aiohttp: what any gateway in Python takes. Beside others in a benchmark.

Run as `python -m tests.bench.bare_proxy PORT WORKER_URL`. It answers `/health` itself.
"""

from __future__ import annotations

import sys

import aiohttp
import uvloop
from aiohttp import web


async def main(port: int, worker: str) -> web.Application:
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)

    async def pass_on(request: web.Request) -> web.StreamResponse:
        headers = {"content-type": "application/json"}
        async with session.post(worker + request.path_qs, data=await request.read(), headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def taken(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    app = web.Application(client_max_size=2**26)
    app.add_routes([web.get("/health", taken), web.post("/{path:.*}", pass_on)])
    return app


if __name__ == "__main__":
    uvloop.install()
    web.run_app(main(int(sys.argv[1]), sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), access_log=None)
