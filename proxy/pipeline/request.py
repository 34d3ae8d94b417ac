"""One request on its way through the gateway."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from proxy.boundaries.boundary import Found
from proxy.chat.chat import ASKED_FOR_USAGE, ENDPOINTS, RESPONSES, Chat
from proxy.errors import NotFound
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.http.auth import ApiKey
from proxy.http.json_body import HINT, TRANSFERS, XARGS, with_fields, with_hint
from proxy.observability.reasons import Expectation, Explanation
from proxy.observability.request_diff import RememberedRequest

# What a client writes into a text, in tokens, where nothing better is known.
BYTES_PER_TOKEN = 4

RESPONSE_PATH = RESPONSES + "/"


@dataclass(slots=True)
class ProxiedRequest:
    """What is known of it so far."""

    method: str
    target: str  # path and query, as the client wrote them
    path: str  # decoded
    endpoint: str  # label: the path where it is a known one
    headers: asgi.HeaderList
    request_id: str
    engine_id: str  # the same, or another one where a request of that name is under way
    raw: bytes
    arrived: float  # time.perf_counter() when the body was complete
    key: ApiKey | None = None  # None where none are configured
    body: dict[str, Any] = field(default_factory=dict)  # as it is meant to reach the worker, but for the hint
    put: dict[str, Any] = field(default_factory=dict)  # outermost fields to set in `raw`
    dropped: list[str] = field(default_factory=list)  # and those to leave out
    names: tuple[str, ...] = ()  # outermost fields of `raw`
    strips_usage: bool = False  # the gateway asked for usage, the client did not
    chat: Chat | None = None
    found: Found | None = None  # None: nothing that boundaries are sought for
    sought_seconds: float = 0.0  # that it was read and its boundaries were sought
    recent: RememberedRequest | None = None
    explanation: Explanation | None = None
    worker: Worker | None = None
    is_placed: bool = False  # the call is counted at its worker
    prefill: int = 0  # tokens counted as still to be computed by the worker
    sent: tuple[int, ...] = ()  # positions in the hint
    expected: Expectation | None = None
    started: bool = False  # the response has begun
    status: int = 0
    placed: float = 0.0  # time.perf_counter() when it was given to its worker
    turn: int = 0  # how many requests that had had by then, this one included
    alone: bool = False  # nobody else was at its worker from then to the first byte of its stream
    first_byte: float | None = None
    begun: bool = False  # it is a stream, and `first_byte` that of its first event

    @property
    def id_header(self) -> tuple[bytes, bytes]:
        """The request's identity, as its client sees it."""
        return (b"x-request-id", self.request_id.encode("latin-1"))

    @property
    def engine_id_header(self) -> tuple[bytes, bytes]:
        """The same as the worker sees it."""
        return (b"x-request-id", self.engine_id.encode("latin-1"))

    @property
    def is_json(self) -> bool:
        """Whether the client says that the body is JSON."""
        return any(name == b"content-type" and b"json" in value.lower() for name, value in self.headers)

    @property
    def owner(self) -> str | None:
        """Name of the API key it came with."""
        return self.key.name if self.key is not None else None

    @property
    def response_id(self) -> Any:
        """The stored response that it continues or asks for, None where there is none."""
        if self.path.startswith(RESPONSE_PATH):
            return self.path[len(RESPONSE_PATH) :].split("/")[0]
        return self.body.get("previous_response_id")

    def take_body(self, body: dict[str, Any], asks_usage: bool) -> None:
        """The body has been parsed: settle what of it the gateway answers for.

        `asks_usage`: have streams report their tokens where the client does not ask for it.
        """
        self.body, self.names = body, tuple(body)
        for name in TRANSFERS:
            self._drop(name)
        xargs = body.get(XARGS)
        if isinstance(xargs, dict) and not xargs.keys().isdisjoint(TRANSFERS):
            body[XARGS] = self.put[XARGS] = {name: value for name, value in xargs.items() if name not in TRANSFERS}
        if self.key is not None:
            if self.endpoint == RESPONSES:
                self._drop("request_id")  # a response is stored by it, and may be another's
            body["cache_salt"] = self.put["cache_salt"] = self.key.salt
        if asks_usage and self.endpoint in ASKED_FOR_USAGE and body.get("stream") is True and _ends_once(body):
            options = body.get("stream_options")
            if options is None or (isinstance(options, dict) and not any(options.values())):
                self.put["stream_options"] = {**(options or {}), "include_usage": True}
                self.strips_usage = True

    def _drop(self, name: str) -> None:
        if name in self.body:
            del self.body[name]
            self.dropped.append(name)

    def body_with(self, positions: tuple[int, ...], salt: str | None = None) -> bytes:
        """The bytes to send, `positions` in their hint, under `salt` where one is given.

        All else that is the client's is as it was written.
        """
        put = self.put if salt is None else {**self.put, "cache_salt": salt}
        if XARGS in put:
            put = {**put, XARGS: {**put[XARGS], HINT: positions}}
        elif XARGS not in self.body:
            if positions:
                put = {**put, XARGS: {HINT: positions}}
        else:
            raw = with_hint(self.raw, self.body, positions)
            self.sent = positions if raw is not self.raw else ()
            return with_fields(raw, self.names, put, self.dropped)
        self.sent = positions
        return with_fields(self.raw, self.names, put, self.dropped) if put or self.dropped else self.raw

    def tokens_beyond(self, held: int) -> int:
        """Roughly how many tokens of the prompt come after the first `held`."""
        found = self.found
        known = max((boundary.tokens for boundary in found.boundaries), default=0) if found is not None else 0
        if not known:
            return max(0, len(self.raw) // BYTES_PER_TOKEN - held)
        last = 0
        if found.turn_key is None and found.layout is not None:
            last = found.layout.last_size // BYTES_PER_TOKEN
        return max(0, known + last - held)


def _ends_once(body: dict[str, Any]) -> bool:
    """Whether the stream has one choice: of several each ends by itself, and none is the last."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return body.get("n") in (None, 1) and not several


def request_of(scope: asgi.Scope, raw: bytes, request_id: str, key: ApiKey | None = None) -> ProxiedRequest:
    """The call in an ASGI scope and its body. Raises `NotFound` for a path that leads out of where clients may go."""
    path = scope["path"]
    if "/." in path and not {".", ".."}.isdisjoint(path.split("/")):
        raise NotFound("No such path.")  # the way up leads to routes of the worker that are not for clients
    target = scope.get("raw_path", path.encode()).decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    return ProxiedRequest(
        method=scope["method"],
        target=target,
        path=path,
        endpoint=path if path in ENDPOINTS else "other",
        headers=asgi.end_to_end(scope["headers"], asgi.RECOMPUTED if key is None else asgi.RECOMPUTED_WITH_KEY),
        request_id=request_id,
        engine_id=request_id,
        raw=raw,
        arrived=time.perf_counter(),
        key=key,
    )
