"""One request on its way through the gateway, in parts.

They are what the client sent, what is changed in its body, what was predicted, and when things happened.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.boundaries.boundary import Entry, Found
from proxy.boundaries.template_facts import Setting
from proxy.chat.chat import GENERATE, RESPONSES, Chat, flag, number
from proxy.chat.reader import ENDPOINTS, HINTED
from proxy.chat.through_chat import chat_of
from proxy.chat.usage import Usage
from proxy.errors import BadRequest, NotFound
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.http.auth import ApiKey
from proxy.http.json_body import (
    HINT,
    LOAD,
    NOTHING,
    PIN,
    TRANSFERS,
    XARGS,
    Memory,
    with_fields,
    with_hint,
)
from proxy.observability.explanations import Record
from proxy.observability.reasons import Expectation
from proxy.observability.request_diff import RememberedRequest
from proxy.routing.engine_events import EngineOutcome

if TYPE_CHECKING:
    from proxy.observability.tracing import RequestTrace

RESPONSE_PATH = RESPONSES + "/"

_DIGITS = frozenset("0123456789")  # nearly every id has one, no word of a path has

RESPONSE_ACTIONS = frozenset({"render", "input_tokens", "compact"})  # what stands in place of an id there

CONTINUOUS = "continuous_usage_stats"  # in `stream_options`: usage in every event

# Milliseconds between a request's arrival and its answer's head, except for those in which it waited.
OWN_TIME = b"x-seamark-overhead-ms"

# In `vllm_xargs`, beside the hint, which is replaced.
NOT_FROM_CLIENTS = frozenset({PIN, LOAD, *TRANSFERS})

# How coding agents name a session, the narrowest name first: OpenCode, Codex (two spellings), Claude Code.
SESSION_HEADERS = (
    b"x-session-affinity",
    b"x-session-id",
    b"session-id",
    b"session_id",
    b"x-claude-code-session-id",
)


class ClientRequest(NamedTuple):
    """What the client sent; its body is in `RequestBody`."""

    method: str
    target: str  # path and query, as the client wrote them
    path: str  # decoded
    endpoint: str  # label: the path if it is a known one, "other" if not
    headers: asgi.HeaderList  # those that go on to the worker
    request_id: str
    key: ApiKey | None  # None if no keys are configured

    @property
    def id_header(self) -> tuple[bytes, bytes]:
        """The request's identity, as its client sees it."""
        return (b"x-request-id", self.request_id.encode("latin-1"))

    @property
    def is_json(self) -> bool:
        """Whether the client says that the body is JSON."""
        return any(name == b"content-type" and b"json" in value.lower() for name, value in self.headers)

    @property
    def user_agent(self) -> str | None:
        """What the client calls itself."""
        agent = next((value for name, value in self.headers if name == b"user-agent"), None)
        return agent.decode("latin-1") if agent is not None else None

    @property
    def owner(self) -> str | None:
        """Whose it is, of all that have an API key."""
        return self.key.owner if self.key is not None else None


NO_FIELDS: Mapping[str, Any] = {}


@dataclass(slots=True)
class RequestBody:
    """The body as the client wrote it, and the changes to make in it."""

    raw: bytes
    parsed: dict[str, Any] = field(default_factory=dict)  # as it is meant to reach the worker, except for the hint
    put: dict[str, Any] = field(default_factory=dict)  # outermost fields to set in `raw`
    dropped: list[str] = field(default_factory=list)  # outermost fields to leave out
    names: tuple[str, ...] = ()  # outermost fields of `raw`
    memory: Memory = NOTHING  # that `parsed` takes
    strips_usage: bool = False  # the gateway asked for usage, the client did not
    hint: tuple[Entry, ...] = ()  # as it was last sent
    form_model: str | None = None  # the model that a form names; None if the body is no form

    def take(self, parsed: dict[str, Any], client: ClientRequest, asks_usage: bool) -> None:
        """The body has been parsed: settle what the gateway decides in it.

        `asks_usage`: have streams report their tokens if the client does not ask for it. Raises `BadRequest`.
        """
        self.parsed, self.names = parsed, tuple(parsed)
        for name in TRANSFERS:
            self._drop(name)
        xargs = parsed.get(XARGS)
        if isinstance(xargs, dict) and not xargs.keys().isdisjoint(NOT_FROM_CLIENTS):
            kept = {name: value for name, value in xargs.items() if name not in NOT_FROM_CLIENTS}
            parsed[XARGS] = self.put[XARGS] = kept
        if client.endpoint == GENERATE:
            self._take_ids(parsed, client)
        if client.key is not None:
            if client.endpoint == RESPONSES:
                self._drop("request_id")  # a response is stored by it, and may be another's
            parsed["cache_salt"] = self.put["cache_salt"] = client.key.salt
        route = HINTED.get(client.endpoint) if asks_usage else None
        if route is not None and route.asks_usage and flag(parsed.get("stream")):
            options = {} if parsed.get("stream_options") is None else parsed["stream_options"]
            if isinstance(options, dict) and flag(options.get("include_usage")) is False:
                # vLLM heeds this one beside the other alone, so that the client's means nothing.
                unheeded = {name: False for name in options if name == CONTINUOUS and flag(options[name]) is not None}
                self.put["stream_options"] = {**options, **unheeded, "include_usage": True}
                self.strips_usage = True

    def encoded(self, hint: tuple[Entry, ...], own: Mapping[str, Any] = NO_FIELDS, load: str = "") -> bytes:
        """The bytes to send, with this hint, and `load` as `LOAD`, none if it is empty.

        `own`: outermost fields to set for the worker that gets them. Everything else is as the client wrote it.
        """
        put = {**self.put, **own} if own else self.put
        if XARGS in put:
            put = {**put, XARGS: {**put[XARGS], HINT: hint, **({LOAD: load} if load else NO_FIELDS)}}
        elif XARGS not in self.parsed:
            if load:
                put = {**put, XARGS: {HINT: hint, LOAD: load} if hint else {LOAD: load}}
            elif hint:
                put = {**put, XARGS: {HINT: hint}}
        else:
            raw = with_hint(self.raw, self.parsed, hint, load)
            self.hint = hint if raw is not self.raw else ()
            return with_fields(raw, self.names, put, self.dropped)
        self.hint = hint
        return with_fields(self.raw, self.names, put, self.dropped) if put or self.dropped else self.raw

    def as_chat(self, hint: tuple[Entry, ...], own: Mapping[str, Any], load: str, *, merges: bool = False) -> bytes:
        """The bytes to send to the chat API in place of /v1/messages, as `encoded`; `merges`: as of `chat_of`."""
        put = {name: value for name, value in self.put.items() if name != XARGS}
        body = {**self.parsed, **put, **own}
        xargs = body.get(XARGS) or {}
        if isinstance(xargs, dict):
            told = {HINT: hint, LOAD: load}
            body[XARGS] = {**xargs, **{name: value for name, value in told.items() if value or name in xargs}}
        self.hint = hint
        return json.dumps(chat_of(body, merges=merges)).encode()

    def for_prefill(self, hint: tuple[Entry, ...], put: Mapping[str, Any], left_out: Collection[str]) -> bytes:
        """The bytes of a call about the same prompt that is not the client's: `put` and `left_out` are its own."""
        other = RequestBody(self.raw, self.parsed, {**self.put, **put}, [*self.dropped, *left_out], self.names)
        for name in left_out:
            other.put.pop(name, None)
        return other.encoded(hint)

    def _take_ids(self, parsed: dict[str, Any], client: ClientRequest) -> None:
        """The same for a prompt of token ids, whose sampling parameters hold what is `vllm_xargs` elsewhere.

        Raises `BadRequest` where one key could give another's images a content of its own.
        """
        params = parsed.get("sampling_params")
        params = params if isinstance(params, dict) else {}
        extra = params.get("extra_args")
        if isinstance(extra, dict) and not extra.keys().isdisjoint((HINT, *NOT_FROM_CLIENTS)):
            kept = {name: value for name, value in extra.items() if name != HINT and name not in NOT_FROM_CLIENTS}
            parsed["sampling_params"] = self.put["sampling_params"] = {**params, "extra_args": kept}
        if client.key is not None and parsed.get("features") is not None:
            raise BadRequest("features name media by hashes that all keys share; send content_parts.", "features")

    def _drop(self, name: str) -> None:
        if name in self.parsed:
            del self.parsed[name]
            self.dropped.append(name)


class Unlearnt(NamedTuple):
    """What a worker can be asked about a request's template once the request has a slot."""

    worker: Worker
    renderer_id: bytes
    setting: Setting
    is_missing: bool  # its own facts are not there
    is_rendered: bool  # some facts are there, so that places which none of them tells can be looked for


class Prompt(NamedTuple):
    """What was read of a request before a worker was chosen."""

    chat: Chat | None = None
    unlearnt: Unlearnt | None = None
    found: Found | None = None  # None: no boundaries are sought in such a request
    remembered: RememberedRequest | None = None
    tokens: int = 0  # by its bytes: for load, nothing else
    rewrites: tuple[str, ...] = ()  # rules that were applied


NOT_READ = Prompt()


class Choice(NamedTuple):
    """The worker that a request was given to, and what was known of its cache then."""

    worker: Worker
    expected: Expectation | None = None  # None: no boundaries are sought in such a request
    held: int = 0  # tokens of the prompt that the worker holds, guesses included: for load, nothing else
    hint: tuple[Entry, ...] = ()  # that it gets


class Waiting:
    """Counts the time inside it; a generator would take four times as long, several times a request."""

    __slots__ = ("_began", "_timings")

    def __init__(self, timings: Timings) -> None:
        self._timings = timings

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._timings.waited_seconds += time.perf_counter() - self._began


@dataclass(slots=True)
class Timings:
    """`time.perf_counter()` unless a field says otherwise."""

    reading_seconds: float = 0.0  # for parsing it and finding its boundaries
    asked: float | None = None  # for a slot at a worker
    choosing: float = 0.0  # a slot is there
    leased: float = 0.0  # it was given to its worker
    first_byte: float | None = None
    is_stream: bool = False  # `first_byte` is that of a stream's first event
    arrived: float = field(default_factory=time.perf_counter)  # the body was complete
    waited_seconds: float = 0.0  # for workers, and for a slot
    was_alone: bool = False  # no other request was at its worker between `leased` and `first_byte`

    def waiting(self) -> Waiting:
        """What passes inside is not the gateway's own time."""
        return Waiting(self)

    @property
    def own_milliseconds(self) -> float:
        """That the gateway itself has taken by now."""
        return max(0.0, time.perf_counter() - self.arrived - self.waited_seconds) * 1e3


CLIENT_GONE = 499  # the client left; the engine may have computed something all the same


class Reply:
    """The way of an answer to its client, an ASGI `send`: what goes through it says how the request ended.

    The answer's head tells the gateway's own time.
    """

    __slots__ = ("_begun_as", "_hold_head", "_send", "_timings", "failure", "started")

    def __init__(self, send: asgi.Send, timings: Timings, hold_head: Callable[[], None] | None = None) -> None:
        """`hold_head`: the server's `asgi.HOLD_HEAD`, if it has it."""
        self._send = send
        self._timings = timings
        self._hold_head = hold_head
        self._begun_as = 0
        self.started = False
        self.failure = 0  # status of what went wrong behind the head, or before there was one; 0: nothing

    async def __call__(self, message: asgi.Scope) -> None:
        if message["type"] == "http.response.start":
            self._begun_as, self.started = message["status"], True
            own = (OWN_TIME, f"{self._timings.own_milliseconds:.1f}".encode())
            message = {**message, "headers": [*message["headers"], own]}
            if self._hold_head is not None and asgi.IS_WHOLE in message:
                self._hold_head()
        await self._send(message)

    @property
    def status(self) -> int:
        """What the request counts as: HTTP's status, or `CLIENT_GONE`; 0 while there is none."""
        return self.failure or self._begun_as

    def failed(self, status: int) -> None:
        """It counts as `status`, whatever it has begun with."""
        self.failure = status


class Report(NamedTuple):
    """What a worker has reported in its answer."""

    status: int  # of HTTP
    usage: Usage | None = None
    outcome: EngineOutcome | None = None  # what its engine says of the request; None: it has to be asked for
    engine_id: str = ""  # what its engine calls the request; by `Accounting`


class Verdict(NamedTuple):
    """What a request got of its prompt from the cache, and why not more; lengths in tokens."""

    reason: str
    prompt: int
    delivered: int
    shareable: int
    predicted: int
    positions: tuple[int, ...] = ()  # what the engine made of the hint, in its order
    changed: dict[str, Any] | None = None  # where the request differs from the nearest recent one
    would_save: Mapping[str, int] = NO_FIELDS  # by the kind of text that changes


@dataclass(slots=True)
class ProxiedRequest:
    """What is known of a request so far. Each field has one writer, which is named beside it."""

    client: ClientRequest  # `RequestHandler`, as all up to the next comment
    body: RequestBody
    reply: Reply
    engine_id: str  # `client.request_id`, or another name if a request of that name is under way
    is_named: bool = False  # by its client's X-Request-Id
    trace: RequestTrace | None = None  # None: nothing is traced
    prompt: Prompt = NOT_READ
    timings: Timings = field(default_factory=Timings)
    choice: Choice | None = None  # by `give`; None: no worker had it yet
    asked: list[Worker] = field(default_factory=list)  # that do not know what it names, or take less: `Dispatcher`
    delivered: bool = False  # a client that left had all of the response: `ResponseRelay`
    record: Record | None = None  # of its explanation: `Accounting`, as all below
    model_label: str | None = None  # in metrics; None until it is counted
    report: Report | None = None  # that is still to be counted and explained
    verdict: Verdict | None = None
    explaining: asyncio.Task[None] | None = None  # goes on behind a stream's end
    is_over: bool = False

    def give(self, choice: Choice | None) -> None:
        """It goes to the worker that was chosen, or to none, whatever was chosen before."""
        self.choice = choice

    @property
    def worker(self) -> Worker | None:
        """The last one it was given to."""
        return self.choice.worker if self.choice is not None else None

    @property
    def expected(self) -> Expectation | None:
        """What was expected of that worker."""
        return self.choice.expected if self.choice is not None else None

    @property
    def status(self) -> int:
        """What it counts as; 0 while it is under way."""
        return self.reply.status

    @property
    def engine_id_header(self) -> tuple[bytes, bytes]:
        """The request's identity, as the worker sees it."""
        return (b"x-request-id", self.engine_id.encode("latin-1"))

    @property
    def model(self) -> Any:
        """What the client wrote as the model's name; empty if it leaves that to the worker, as vLLM lets it.

        None if its kind of request is for no model, or was not read.
        """
        if not self.body.parsed:
            return self.body.form_model
        return self.body.parsed.get("model") or (None if self.client.path.startswith(RESPONSE_PATH) else "")

    @property
    def response_id(self) -> Any:
        """The stored response that it continues or asks for, None if there is none."""
        path = self.client.path
        if path.startswith(RESPONSE_PATH) and (named := path.split("/")[3]) not in RESPONSE_ACTIONS:
            return named
        return self.body.parsed.get("previous_response_id")

    @property
    def kept_id(self) -> Any:
        """The same, or what else it asks for that some worker has made (a video, a file, a batch); None if nothing."""
        if (response := self.response_id) is not None or not self._is_of_jobs:
            return response
        parts = self.client.path.split("/")[3:]
        named = next((part for part in parts if not _DIGITS.isdisjoint(part)), None)
        if named is None and self.client.method != "POST":  # /v1/images/generations makes something
            named = "/".join(parts)
        given = named or self.body.parsed.get("input_file_id")
        return given if isinstance(given, str) else None

    @property
    def makes(self) -> bool:
        """Whether its answer may name what is asked for later."""
        return self.client.method == "POST" and self._is_of_jobs

    @property
    def _is_of_jobs(self) -> bool:
        path = self.client.path
        return path not in ENDPOINTS and path.startswith("/v1/") and not path.startswith("/v1/models/")


def choices_of(body: Mapping[str, Any]) -> int:
    """How many choices the answer to a chat or completion has."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return (number(body.get("n")) or 1) * prompts


def affinity_key(headers: asgi.HeaderList, body: Mapping[str, Any]) -> str | None:
    """What the requests of one conversation have in common: the client's `prompt_cache_key`, or the agent's session.

    `headers` with names in lower case. Another session of the same agent has another key.
    """
    if (given := _text(body, "prompt_cache_key")) is not None:
        return given
    named = {name: value for name, value in headers if name in SESSION_HEADERS and value}
    session = next((named[name].decode("latin-1") for name in SESSION_HEADERS if name in named), None)
    return session or _text(body, "session_id") or _text(body.get("metadata"), "session_id")


def user_key(body: Mapping[str, Any], found: Found) -> str | None:
    """The same of a client that names the user alone, who may have thousands of conversations at once.

    They are told apart by how they begin.
    """
    user = _text(body, "user") or _text(body.get("metadata"), "user_id")
    if user is None or found.layout is None:
        return None
    return f"{user} {found.layout.keys.after[found.layout.first].hex()}"


def _text(body: Any, name: str) -> str | None:
    given = body.get(name) if isinstance(body, Mapping) else None
    return given if isinstance(given, str) and given else None


def target_of(scope: asgi.Scope) -> str:
    """Path and query as the client wrote them. Raises `NotFound` for a path that clients may not use."""
    path = scope["path"]
    if "/." in path and not {".", ".."}.isdisjoint(path.split("/")):
        raise NotFound("No such path.")  # the way up leads to routes of the worker that are not for clients
    target: str = scope.get("raw_path", path.encode()).decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    return target


def request_of(
    scope: asgi.Scope, raw: bytes, request_id: str, key: ApiKey | None = None, send: asgi.Send | None = None
) -> ProxiedRequest:
    """The request in an ASGI scope and its body, to be answered by `send`; None: no client waits for it.

    Raises `NotFound` for a path that clients may not use.
    """
    path = scope["path"]
    client = ClientRequest(
        scope["method"],
        target_of(scope),
        path,
        path if path in ENDPOINTS else "other",
        asgi.end_to_end(scope["headers"], asgi.RECOMPUTED if key is None else asgi.RECOMPUTED_WITH_KEY),
        request_id,
        key,
    )
    timings = Timings()
    reply = Reply(send or _nowhere, timings, scope.get("extensions", {}).get(asgi.HOLD_HEAD))
    return ProxiedRequest(client, RequestBody(raw), reply, request_id, timings=timings)


async def _nowhere(message: asgi.Scope) -> None:
    """Nobody waits for the answer."""
