"""HTTP as ASGI presents it: bodies, headers, errors, and a client that leaves."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from msgspec import Struct

from proxy.errors import BodyTooLarge, InvalidHttp, KeyBusy, Overloaded, TooSlow

logger = logging.getLogger("uvicorn.error")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]

# RFC 9110, 7.6.1.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)

# Request headers that the gateway sets itself, or that only it and other trusted hops may send to a worker.
RECOMPUTED = HOP_BY_HOP | frozenset(
    b"content-length host expect x-request-id x-seamark-outcome x-seamark-boundaries x-seamark-keep".split()
)

# A client's key is for the gateway alone; workers have a key of their own, if any.
RECOMPUTED_WITH_KEY = RECOMPUTED | {b"authorization", b"x-api-key"}

# Response headers that the gateway sets itself. A worker may be a gateway too; its headers must not travel on.
OWN_RESPONSE = HOP_BY_HOP | frozenset(
    b"content-length x-request-id x-seamark-worker x-seamark-boundary x-seamark-predicted x-seamark-cached "
    b"x-seamark-reason x-seamark-outcome x-seamark-cache x-seamark-keep x-seamark-overhead-ms x-session-token".split()
)

_NONE_SUCH = re.compile(rb"q=0(\.0*)?")  # weight of a content coding that is not accepted (RFC 9110, 12.4.2)

SERVED = "seamark.served"  # in a scope of the gateway's own server: its `Request`

_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}

BODILESS = (204, 304)  # statuses without a body, and without a length to announce


class Pace(NamedTuple):
    """How slowly a body may come: both are bounds."""

    seconds: float  # of silence, and of grace for the whole
    rate: float  # bytes a second of the whole, beyond the grace; 0: no bound


# A key may hold so many times what is free: two thirds of all if no other holds anything, and less as others come. So
# there is always room for one more key (dynamic thresholds: Choudhury and Hahne, 1998).
TIMES_WHAT_IS_FREE = 2

# A body of so many bytes may take what is left. A larger one leaves a sixteenth of all, so that no number of large ones
# keeps a chat out.
SMALL_BYTES = 2**16
LEFT_BY_LARGE = 1 / 16

# glibc gives back to the system only the end of its heap, and large bodies lie between small objects. Once so much has
# been freed, everything is given back; that takes some milliseconds.
TRIM_AFTER_BYTES = 32 * 2**20

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None: another libc


class BodyMemory:
    """What all bodies take together, in bytes: one bound for all of them, and a share of it per API key."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self.freed = 0  # since the heap was given back
        self.of_owners: Counter[Hashable] = Counter()

    def of(self, owner: Hashable = None) -> BodyHold:
        """An empty hold for one request; `owner` is its API key, None without keys."""
        return BodyHold(self, owner)


@dataclass(slots=True, eq=False)
class BodyHold:
    """What one request's body takes, until its context is left."""

    _memory: BodyMemory
    _owner: Hashable
    size: int = 0

    def __enter__(self) -> BodyHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def take(self, size: int) -> None:
        """So many bytes more. Raises `Overloaded` or `KeyBusy` if there is no room for them."""
        memory, owner = self._memory, self._owner
        held = memory.held + size
        if held > memory.most * (1 if self.size + size <= SMALL_BYTES else 1 - LEFT_BY_LARGE):
            raise Overloaded("The gateway holds as many request bodies as it may (setting max_bodies_bytes).")
        if owner is not None:
            of_owner = memory.of_owners[owner] + size
            if of_owner > TIMES_WHAT_IS_FREE * (memory.most - held):
                raise KeyBusy("The request bodies of this API key take as much as one may (setting max_bodies_bytes).")
            memory.of_owners[owner] = of_owner
        memory.held = held
        self.size += size

    def give_back(self, size: int | None = None) -> None:
        """So many bytes less; all of them if no number is given."""
        memory, owner, size = self._memory, self._owner, self.size if size is None else size
        self.size -= size
        memory.held -= size
        if owner is not None:
            memory.of_owners[owner] -= size
            if not memory.of_owners[owner]:
                del memory.of_owners[owner]
        memory.freed += size
        if memory.freed >= TRIM_AFTER_BYTES and _trim is not None:
            memory.freed = 0
            _trim(0)


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def crowded() -> Overloaded:
    """The refusal of what comes on a connection beyond those that fit."""
    return Overloaded("The gateway has as many connections as it may (setting max_connections, or RLIMIT_NOFILE).")


def check_room(scope: Scope) -> None:
    """Raises `Overloaded` if the request came on a connection beyond those that fit."""
    served: Request | None = scope.get(SERVED)
    if served is not None and served.is_crowded:
        raise crowded()


async def read_body(scope: Scope, receive: Receive, limit: int, pace: Pace, room: BodyHold) -> bytes:
    """The whole request body. Its room is taken; if it is not read to its end, the room is given back.

    Raises `BodyTooLarge` past `limit` bytes, before anything is read where the client says so; `TooSlow` when it
    falls behind `pace`; `InvalidHttp`, `Overloaded`, `KeyBusy`, and `ClientGone` when the client leaves before its end.
    """
    served: Request | None = scope.get(SERVED)
    if served is not None and (whole := served.whole_body()) is not None:
        if len(whole) > limit:
            raise too_large(limit)
        room.take(len(whole))
        return whole
    _check_announced(scope, limit)
    # Grows in place, and at a megabyte moves to pages of its own: parts kept until they are joined would take the body
    # twice, and leave holes in the heap.
    body = bytearray()
    now = began = asyncio.get_running_loop().time()
    try:
        while True:
            until = now + pace.seconds
            if pace.rate:
                until = min(until, began + pace.seconds + len(body) / pace.rate)
            async with asyncio.timeout_at(until):
                message = await receive()
            if served is not None and served.is_broken:
                raise InvalidHttp("The request's body is not valid HTTP.")
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            if len(body) + len(part) > limit:
                raise too_large(limit)
            room.take(len(part))
            body += part
            if not message.get("more_body"):
                return bytes(body)
            now = asyncio.get_running_loop().time()
    except BaseException as error:
        room.give_back()
        if isinstance(error, TimeoutError):
            text = (
                f"The request came too slowly: nothing for {pace.seconds:g} seconds (setting client_timeout), or fewer "
                f"than {pace.rate:g} bytes a second (setting min_body_rate)."
            )
            raise TooSlow(text) from None
        raise


MOST_DIGITS = 20  # of a length


def _check_announced(scope: Scope, limit: int) -> None:
    """Refuse by its announced length what is still to come: a client that expects `100 Continue` sends none of it."""
    length = header(scope, b"content-length")
    if length is None or not length.isdecimal():
        return
    if len(length) > MOST_DIGITS or int(length) > limit:
        raise too_large(limit)


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit} bytes (setting max_body_bytes).")


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a request header (`name` in lower case)."""
    headers: HeaderList = scope["headers"]
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def codings(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """How a body is compressed, in the order of the steps (header names in lower case); empty if it is not."""
    values = [value for name, value in headers if name == b"content-encoding"]
    if not values:
        return []
    named = b",".join(values).decode("latin-1").lower()
    return [coding for each in named.split(",") if (coding := each.strip()) not in ("", "identity")]


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> HeaderList:
    """The headers that travel on: all but `dropped`, `HOP_BY_HOP` among them, and those that `Connection` names."""
    kept: HeaderList = []
    named: set[bytes] = set()
    for key, value in headers:
        name = key.lower()
        if name not in dropped:
            kept.append((name, value))
        elif name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return [each for each in kept if each[0] not in named] if named else kept


def unencoded(headers: HeaderList) -> HeaderList:
    """Request headers that ask for a body without a content coding; as they are if the client takes none such."""
    kept: HeaderList = []
    accepted: HeaderList = []
    for header in headers:
        (accepted if header[0] == b"accept-encoding" else kept).append(header)
    return [*kept, (b"accept-encoding", b"identity")] if not accepted or _takes_identity(accepted) else headers


def _takes_identity(accepted: HeaderList) -> bool:
    weights: dict[bytes, bytes] = {}
    for each in b",".join([value for _, value in accepted]).lower().split(b","):
        coding, _, weight = each.partition(b";")
        weights[coding.strip()] = weight.strip()
    return _NONE_SUCH.fullmatch(weights.get(b"identity", weights.get(b"*", b""))) is None


def head_of(first: bytes, headers: Sequence[tuple[bytes, bytes]], last: bytes, own_lines: int) -> bytes:
    """The head of a message, its headers byte for byte; `own_lines`: so many are in `first` and `last`.

    Raises `ValueError` for a header that would not end where its line does.
    """
    parts = [first]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts += (last, b"\r\n")
    head = b"".join(parts)
    if not head.count(b"\r") == head.count(b"\n") == own_lines + len(headers) + 1 or b"\0" in head:
        raise ValueError("a header has a line break, or a null byte")
    return head


class Request:
    """A request at the gateway's own server, and its answer: ASGI's `receive` and `send`, and what goes beyond them.

    Nothing here leads to its scope, which leads here: a large body would else stay in memory until the garbage
    collector comes, which counts objects.
    """

    is_crowded = False  # there are more connections than fit: it is to be refused
    wants_websocket = False  # its client offered to go on as one
    is_broken = False  # what came of its body is no HTTP, so that no more will follow
    is_left = False  # its client is gone
    on_left: Callable[[], None] | None = None  # is called when that happens
    is_complete = _has_told_end = False  # all of its body has come, and been read
    is_answered = _is_chunked = False
    _status = 0  # of the answer, once that has begun
    _left: int | None = None  # bytes of the answer's body, if it says how many there are

    def __init__(self, connection: Any, version: str, is_head: bool, expects: bool, keeps: bool) -> None:
        """`expects`: the client waits for 100 Continue; `keeps`: it keeps the `Connection` behind the answer."""
        self._connection, self._version, self._is_head, self._expects = connection, version, is_head, expects
        self.keeps, self.unread = keeps, bytearray()  # of its body

    def whole_body(self) -> bytes | None:
        return self._read() if self.is_complete and not self.is_left else None

    def _read(self) -> bytes:
        self._has_told_end = self.is_complete
        body, self.unread = bytes(self.unread), bytearray()
        return body

    async def receive(self) -> dict[str, Any]:
        connection = self._connection
        if self._expects and not connection.transport.is_closing():
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects = False
        while not (self.is_left or self.is_answered or self.is_broken):
            if self.unread or (self.is_complete and not self._has_told_end):
                return {"type": "http.request", "body": self._read(), "more_body": not self.is_complete}
            if not self.is_complete:
                connection.go_on_reading()
            await connection.changes()
        return {"type": "http.disconnect"}

    async def send(self, message: Scope) -> None:
        """Raises `RuntimeError` for what does not follow what was sent, and for a body that has not its length."""
        while self._connection.is_full and not self.is_left:
            await self._connection.changes()
        if self.is_left:
            return
        if (message["type"] == "http.response.start") is (self._status > 0) or self.is_answered:
            raise RuntimeError(f"{message['type']} does not follow what was sent")
        write = self._connection.transport.write
        if not self._status:
            write(self._begun(message["status"], message["headers"]))
            return
        body, is_last = message.get("body", b""), not message.get("more_body")
        if self._is_chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        elif self._is_head:
            body = b""
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (is_last and self._left):
                raise RuntimeError("the answer has not the length that it announces")
        if body:
            write(body)
        if is_last:
            self._connection.on_answered()

    def answer(self, status: int, headers: HeaderList, body: bytes) -> bool:
        """Send a whole answer, whose headers tell its length; whether that could be done at once."""
        if self._status or self.is_left or self._connection.is_full:
            return False
        head = self._begun(status, headers)
        self._connection.transport.writelines((head, body) if self._left else (head,))
        self._connection.on_answered()
        return True

    def is_writable(self) -> bool:
        """Whether `write_chunk` can send a piece of the answer now."""
        return self._is_chunked and not (self.is_left or self._connection.is_full)

    def write_chunk(self, piece: bytes) -> None:
        self._connection.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def _begun(self, status: int, headers: HeaderList) -> bytes:
        """The answer's head. Raises `ValueError`, see `head_of`."""
        length, last = dict(headers).get(b"content-length"), b"" if self.keeps else b"connection: close\r\n"
        is_bodiless = self._is_head or status in BODILESS
        is_chunked = not is_bodiless and length is None and self._version != "1.0"
        if is_chunked:
            last += b"transfer-encoding: chunked\r\n"
        first = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        head = head_of(first, headers, last, 2 - self.keeps + is_chunked)
        self._left = 0 if is_bodiless else None if length is None else int(length)
        self._is_chunked, self._status, self._expects = is_chunked, status, False
        return head

    async def run(self, app: Any, scope: Scope) -> None:
        """Have the application answer. What it leaves open, or fails at, the client sees break off."""
        try:
            await app(scope, self.receive, self.send)
            if self.is_answered or self.is_left:
                return
            logger.error("ASGI callable returned without completing response.")
        except BaseException as error:
            logger.error("Exception in ASGI application\n", exc_info=error)
        finally:
            self._connection.tasks.discard(asyncio.current_task())
        transport, ends = self._connection.transport, self._is_chunked or self._left is not None or not self._status
        (transport.close if ends else transport.abort)()  # what nothing else ends would seem whole


async def send_whole(send: Send, status: int, headers: HeaderList, body: bytes) -> None:
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    at_once: Callable[[int, HeaderList, bytes], bool] | None = getattr(send, "whole", None)  # as `Reply` has it
    if at_once is None or not at_once(status, headers, body):
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class ClientWatch(Struct, eq=False):
    """Inside its context, a client that disconnects cancels the task, and leaving the context raises `ClientGone`.

    It is for requests whose body has been read. The gateway's own server calls back. Under any other server a second
    task waits for the message, which is all that ASGI offers.
    """

    served: Request | None = None  # None: under another server, or nobody waits for the answer
    _receive: Receive | None = None
    _task: asyncio.Task[Any] | None = None
    _watching: asyncio.Task[None] | None = None
    gone: bool = False
    over: bool = False  # the server has the whole answer, so a disconnect means nothing any more

    def __enter__(self) -> ClientWatch:
        self._task = asyncio.current_task()
        if self.served is not None:
            self.served.on_left = self._left
            if self.served.is_left:
                self._left()
        elif self._receive is not None:
            self._watching = asyncio.create_task(self._watch(self._receive))
        return self

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        if not self.over:
            self.gone = True
            if self._task is not None:
                self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.over = True
        if self.served is not None:
            self.served.on_left = None  # it leads back here
        elif self._watching is not None:
            self._watching.cancel()
        if self.gone and self._task is not None:
            self._task.uncancel()
            if kind is None or kind is asyncio.CancelledError:
                raise ClientGone
