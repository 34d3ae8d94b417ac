"""uvicorn with httptools reads the body of a request that offers an upgrade as the next request.

Needs uvicorn, httptools and h11. Usage: python upgrade_body.py. Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import uvicorn

HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"

LAST = b"GET /last HTTP/1.1\r\nhost: x\r\n\r\n"

EXPECTED = ["/asked", "/last"]

OFFER = b"POST /asked HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n"


async def paths_seen(http: str) -> list[str]:
    """The paths of the requests that an application gets for two requests on one connection."""
    seen: list[str] = []

    async def app(scope, receive, send):
        seen.append(scope["path"])
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=http, ws="none", lifespan="off", log_level="critical"))
    serving = asyncio.create_task(server.serve([listening]))
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(OFFER % len(HIDDEN))
    while not seen:
        await asyncio.sleep(0.01)
    writer.write(HIDDEN + LAST)  # the body, in a packet of its own; in the same one it is lost
    while "/last" not in seen:
        await reader.readuntil(b"\r\n\r\n")
    writer.close()
    server.should_exit = True
    await serving
    return seen


def main() -> int:
    seen = {http: asyncio.run(paths_seen(http)) for http in ("h11", "httptools")}
    for http, paths in seen.items():
        print(f"{http}: two requests sent, expected {EXPECTED}, saw {paths}")
    present = seen["httptools"] != EXPECTED
    print("defect present" if present else "no defect")
    return int(present)


if __name__ == "__main__":
    sys.exit(main())
