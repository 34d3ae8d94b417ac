"""HTTP as bytes on a socket, with nothing in between: to send what no client would, and to leave when one likes."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from proxy.bench.harness.servers import Server


class Response(NamedTuple):
    """One response; of several equal headers the last."""

    status: int
    headers: dict[str, str]  # lower-case names
    body: bytes


class Cut(Exception):
    """The server closed the connection within a response."""


class Connection:
    """A connection to a server on this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @staticmethod
    async def open(server: Server) -> Connection:
        """Connect to `server`."""
        return Connection(*await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), limit=2**24))

    async def send(self, data: bytes) -> None:
        """Write these bytes. A server that has closed already is found out when reading."""
        if self._writer.transport.is_closing():
            return
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    async def some(self) -> bytes:
        """The next bytes that come. Raises `Cut` where none will."""
        if data := await self._reader.read(65536):
            return data
        raise Cut("where an answer was to come")

    async def response(self, to_head: bool = False) -> Response | None:
        """The next response that is not a 1xx; None when the server closes instead. Raises `Cut`."""
        while True:
            try:
                head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise Cut(f"within the head: {error.partial!r}") from None
                return None
            except ConnectionError:
                return None
            first, *lines = head.split("\r\n")[:-2]
            status = int(first.split(" ")[1])
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if status >= 200 or status == 101:
                try:
                    return Response(status, headers, b"" if to_head else await self._body(status, headers))
                except (asyncio.IncompleteReadError, ConnectionError):
                    raise Cut(f"within the body of a {status}") from None

    async def _body(self, status: int, headers: dict[str, str]) -> bytes:
        if status in (101, 204, 304):
            return b""
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self._reader.read()
        body = b""
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")
        return body

    def finish(self) -> None:
        """Half-close: nothing more will be sent."""
        if self._writer.can_write_eof() and not self._writer.is_closing():
            self._writer.write_eof()

    def close(self) -> None:
        """Leave, as a client does that has had enough."""
        self._writer.close()


def request(method: str, target: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """A request framed as it should be."""
    fields = {"host": "gateway", **headers}
    if body or method == "POST":
        fields["content-length"] = str(len(body))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
