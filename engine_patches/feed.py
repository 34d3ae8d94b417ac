"""What became of each request, for the gateway: a path of the worker that clients behind the gateway cannot reach.

An answer cannot carry it: a stream's headers leave before the request is scheduled, and its body is the client's. So
the API server keeps the latest requests' reasons, and the gateway asks for what is new.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

PATH = "/seamark/outcomes"
MAX_KEPT = 8192  # requests; some 200 bytes each

# vLLM's name of a request: [child of n > 1]_[API]-[X-Request-Id][-prompt of a completion]-[8 random characters].
_COMPLETION = re.compile(r"(?:\d+_)?cmpl-(.*)-\d+-[0-9a-f]{8}")
_OTHER = re.compile(r"(?:\d+_)?(?:chatcmpl-|resp_)?(.*?)-[0-9a-f]{8}")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Outcome(NamedTuple):
    """What became of one request."""

    request_id: str  # its X-Request-Id
    reason: str
    hit_tokens: int


def client_id(engine_id: str) -> str:
    """The `X-Request-Id` in vLLM's name of a request; the name itself where it has another form."""
    match = _COMPLETION.fullmatch(engine_id) or _OTHER.fullmatch(engine_id)
    return match[1] if match else engine_id


class Feed:
    """The latest outcomes of one API server, numbered."""

    def __init__(self) -> None:
        self.boot = uuid.uuid4().hex  # numbers begin anew with every process
        self._cursor = 0
        self._kept: deque[tuple[int, Outcome]] = deque(maxlen=MAX_KEPT)

    def add(self, engine_id: str, reason: str, hit_tokens: int) -> None:
        """A request was admitted with `hit_tokens` from the cache, for `reason`."""
        self._cursor += 1
        self._kept.append((self._cursor, Outcome(client_id(engine_id), reason, hit_tokens)))

    def after(self, cursor: int, boot: str | None = None) -> dict[str, Any]:
        """Outcomes later than `cursor`, all that are kept if it is another process's."""
        if boot != self.boot:
            cursor = 0
        new: list[Outcome] = []
        for number, outcome in reversed(self._kept):
            if number <= cursor:
                break
            new.append(outcome)
        return {"boot": self.boot, "cursor": self._cursor, "outcomes": new[::-1]}


feed = Feed()


class OutcomeFeed:
    """ASGI middleware for vLLM's `--middleware`: `GET /seamark/outcomes?boot=B&after=N`, everything else to the app."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Callable, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        if scope["method"] != "GET":
            await _answer(send, 405, {"error": f"{PATH} is only read: GET"})
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        after = query.get("after", ["0"])[-1]
        if not (after.isascii() and after.isdigit()):
            await _answer(send, 400, {"error": "after: the cursor of the last answer, a number"})
            return
        await _answer(send, 200, feed.after(int(after), query.get("boot", [None])[-1]))


async def _answer(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
