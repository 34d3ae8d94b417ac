"""One request on its way through the gateway: an `Exchange` in parts, each of which one stage writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from xxhash import xxh3_64_hexdigest

from proxy.boundaries.boundary import Entry, Found
from proxy.boundaries.template_facts import TemplateFacts
from proxy.chat.chat import GENERATE, RESPONSES, Chat, flag, number
from proxy.chat.reader import ENDPOINTS, HINTED
from proxy.chat.through_chat import chat_of
from proxy.chat.usage import Usage
from proxy.errors import BadRequest, NotFound
from proxy.fleet.worker import Slot, Worker, fresh_salt
from proxy.http import asgi
from proxy.http.auth import ApiKey
from proxy.http.json_body import HINT, KEEP, LOAD, NOTHING, PIN, TRANSFERS, XARGS, Memory, with_fields, with_xargs
from proxy.http.known_bodies import KnownBody
from proxy.http.token_limits import Charge
from proxy.idle_work import Steps
from proxy.observability.explanations import Explanation
from proxy.observability.reasons import Expectation
from proxy.observability.request_diff import PrefixChange, RememberedRequest
from proxy.routing.feed_lines import Admitted

if TYPE_CHECKING:
    from proxy.observability.tracing import RequestTrace

RESPONSE_PATH = RESPONSES + "/"
_DIGITS = frozenset("0123456789")  # nearly every id has one, no word of a path has
RESPONSE_ACTIONS = frozenset({"render", "input_tokens", "compact"})  # what stands in place of an id there
CONTINUOUS = "continuous_usage_stats"  # in `stream_options`: usage in every event

# Milliseconds between a request's arrival and its answer's head, except for those in which it waited.
OWN_TIME = b"x-seamark-overhead-ms"

# In a request: `KEEP`'s values, of which the stricter one of it, of its body and of its API key counts.
KEEP_HEADER = b"x-seamark-keep"
STRICTER = ("", "no", "private")

NOT_FROM_CLIENTS = frozenset({PIN, LOAD, *TRANSFERS})  # in `vllm_xargs`, beside the hint, which is replaced

# How coding agents name a session, the narrowest name first: OpenCode, Codex (two spellings), Claude Code.
SESSION_HEADERS = tuple(b"x-session-affinity x-session-id session-id session_id x-claude-code-session-id".split())

# Of a request: what the last answer had, or nothing, to be given one. For clients that have no name for a session.
SESSION_TOKEN = b"x-session-token"


class Head(Struct, eq=False):
    method: str
    target: str  # path and query, as the client wrote them
    path: str  # decoded
    endpoint: str  # label: the path if it is a known one, "other" if not
    headers: asgi.HeaderList  # those that go on to the worker
    request_id: str
    key: ApiKey | None  # None if no keys are configured
    owner: str | None  # whose it is, of all that have an API key

    @property
    def is_json(self) -> bool:
        return any(name == b"content-type" and b"json" in value.lower() for name, value in self.headers)


NO_FIELDS: Mapping[str, Any] = {}


class Body(Struct, eq=False):
    """The body as the client wrote it, and the changes to make in it."""

    raw: bytes
    parsed: dict[str, Any] = field(default_factory=dict)  # as it is meant to reach the worker, except for the hint
    put: dict[str, Any] = field(default_factory=dict)  # outermost fields to set in `raw`
    dropped: list[str] = field(default_factory=list)  # outermost fields to leave out
    names: tuple[str, ...] = ()  # outermost fields of `raw`
    memory: Memory = NOTHING  # that `parsed` takes
    known: KnownBody | None = None  # what `raw` has in common with others
    strips_usage: bool = False  # the gateway asked for usage, the client did not
    keep: str = ""  # that engines are told in `vllm_xargs`
    hint: tuple[Entry, ...] = ()  # as it was last sent

    def take(self, parsed: dict[str, Any], head: Head, asks_usage: bool) -> None:
        """Settle what the gateway decides in it; `asks_usage`: streams report their tokens. Raises `BadRequest`."""
        self.parsed, self.names = parsed, tuple(parsed)
        for name in TRANSFERS:
            if name in parsed:
                self._drop(name)
        xargs = parsed.get(XARGS)
        if isinstance(xargs, dict) and not xargs.keys().isdisjoint(NOT_FROM_CLIENTS):
            kept = {name: value for name, value in xargs.items() if name not in NOT_FROM_CLIENTS}
            parsed[XARGS] = self.put[XARGS] = kept
        if head.endpoint == GENERATE:
            self._take_ids(parsed, head)
        if head.key is not None:
            if head.endpoint == RESPONSES and "request_id" in parsed:
                self._drop("request_id")  # a response is stored by it, and may be another's
            parsed["cache_salt"] = self.put["cache_salt"] = head.key.salt
        asks_usage = asks_usage or (head.key is not None and head.key.limits is not None)
        route = HINTED.get(head.endpoint) if asks_usage else None
        if route is not None and route.asks_usage and flag(parsed.get("stream")):
            options = {} if parsed.get("stream_options") is None else parsed["stream_options"]
            if isinstance(options, dict) and flag(options.get("include_usage")) is False:
                # vLLM heeds this one beside the other alone, so that the client's means nothing.
                unheeded = {name: False for name in options if name == CONTINUOUS and flag(options[name]) is not None}
                self.put["stream_options"] = {**options, **unheeded, "include_usage": True}
                self.strips_usage = True

    def leave_nothing(self, head: Head, keep: str, salt: str) -> None:
        """Settle that; `salt`: one of its own, for what cannot be told or is not to find anything."""
        xargs = self.parsed.get(XARGS)  # which a beam search drops
        is_told = head.endpoint in HINTED and flag(self.parsed.get("use_beam_search")) is False
        self.keep = "no" if is_told and (xargs is None or isinstance(xargs, dict)) else ""
        if keep == "private" or not self.keep:
            self.parsed["cache_salt"] = self.put["cache_salt"] = salt
        if head.endpoint == RESPONSES:
            self.parsed["store"] = self.put["store"] = False

    def encoded(self, hint: tuple[Entry, ...], own: Mapping[str, Any] = NO_FIELDS, load: str = "") -> bytes:
        """The bytes to send, with this hint, and `load` as `LOAD`, none if it is empty.

        `own`: outermost fields to set for the worker that gets them. Everything else is as the client wrote it.
        """
        raw, put = self.raw, {**self.put, **own} if own else self.put
        xargs = put[XARGS] if XARGS in put else self.parsed.get(XARGS)
        if xargs is not None and not isinstance(xargs, dict):  # the worker refuses such a request
            hint, load = (), ""
        keep = self.keep if xargs is None or isinstance(xargs, dict) else ""
        told: dict[str, Any] = {HINT: hint} if hint or XARGS in put or (type(xargs) is dict and HINT in xargs) else {}
        told |= {name: value for name, value in ((LOAD, load), (KEEP, keep)) if value}
        self.hint = hint
        if told and XARGS in self.parsed and XARGS not in put:
            raw = with_xargs(raw, xargs, told)
        elif told:
            put = {**put, XARGS: {**put.get(XARGS, NO_FIELDS), **told}}
        return with_fields(raw, self.names, put, self.dropped) if put or self.dropped else raw

    def as_chat(self, hint: tuple[Entry, ...], own: Mapping[str, Any], load: str, *, merges: bool = False) -> bytes:
        """The bytes to send to the chat API in place of /v1/messages, as `encoded`; `merges`: as of `chat_of`."""
        put = {name: value for name, value in self.put.items() if name != XARGS}
        body = {**self.parsed, **put, **own}
        xargs = body.get(XARGS) or {}
        if isinstance(xargs, dict):
            told = {HINT: hint, LOAD: load, KEEP: self.keep}
            body[XARGS] = {**xargs, **{name: value for name, value in told.items() if value or name in xargs}}
        self.hint = hint
        return json.dumps(chat_of(body, merges=merges)).encode()

    def for_prefill(self, hint: tuple[Entry, ...], put: Mapping[str, Any], left_out: Collection[str]) -> bytes:
        """The bytes of a call about the same prompt that is not the client's: `put` and `left_out` are its own."""
        other = Body(self.raw, self.parsed, {**self.put, **put}, [*self.dropped, *left_out], self.names)
        other.keep = self.keep
        for name in left_out:
            other.put.pop(name, None)
        return other.encoded(hint)

    def _take_ids(self, parsed: dict[str, Any], head: Head) -> None:
        """The same for a prompt of token ids, whose sampling parameters hold what is `vllm_xargs` elsewhere.

        Raises `BadRequest` where one key could give another's images a content of its own.
        """
        params = parsed.get("sampling_params")
        params = params if isinstance(params, dict) else {}
        extra = params.get("extra_args")
        if isinstance(extra, dict) and not extra.keys().isdisjoint((HINT, *NOT_FROM_CLIENTS)):
            kept = {name: value for name, value in extra.items() if name != HINT and name not in NOT_FROM_CLIENTS}
            parsed["sampling_params"] = self.put["sampling_params"] = {**params, "extra_args": kept}
        if head.key is not None and parsed.get("features") is not None:
            raise BadRequest("features name media by hashes that all keys share; send content_parts.", "features")

    def _drop(self, name: str) -> None:
        del self.parsed[name]
        self.dropped.append(name)


class Prompt(Struct, eq=False):
    """What was read of a request before a worker was chosen."""

    chat: Chat | None = None
    found: Found | None = None  # None: no boundaries are sought in such a request
    remembered: RememberedRequest | None = None
    tokens: int = 0  # by its bytes: for load, nothing else
    rewrites: tuple[str, ...] = ()  # rules that were applied
    template_of: Worker | None = None  # which can be asked about the template once the request has a slot
    facts: TemplateFacts | None = None  # that are known of it


class Timings(Struct, eq=False):
    """`time.perf_counter()` unless a field says otherwise."""

    reading_seconds: float = 0.0  # for parsing it and finding its boundaries
    asked: float | None = None  # for a slot at a worker
    choosing: float = 0.0  # a slot is there
    leased: float = 0.0  # it was given to its worker
    first_byte: float | None = None
    is_stream: bool = False  # `first_byte` is that of a stream's first event
    arrived: float = field(default_factory=time.perf_counter)  # the body was complete
    waited_seconds: float = 0.0  # for workers, and for a slot
    queued_seconds: float = 0.0  # of them, in the queue before the workers, while it has no slot yet
    was_alone: bool = False  # no other request was at its worker between `leased` and `first_byte`

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What passes inside this context is not the gateway's own time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - began

    @property
    def own_milliseconds(self) -> float:
        return max(0.0, time.perf_counter() - self.arrived - self.waited_seconds) * 1e3

    def stages(self) -> list[tuple[str, float, float]]:
        """What a trace shows: name, begin and end."""
        stages = []
        if self.reading_seconds:
            stages.append(("boundaries", self.arrived, self.arrived + self.reading_seconds))
        if self.asked is not None:
            has_slot = self.choosing >= self.asked
            stages.append(("queue", self.asked, self.choosing if has_slot else time.perf_counter()))
        if self.leased:
            stages.append(("choice", self.choosing, self.leased))
        if self.first_byte is not None:
            stages.append(("first token" if self.is_stream else "answer", self.leased, self.first_byte))
        return stages


CLIENT_GONE = 499  # the client left; the engine may have computed something all the same


async def _nowhere(message: asgi.Scope) -> None:
    """Nobody waits for the answer."""


class Reply(asgi.ClientWatch, eq=False):
    """The way of an answer to its client, an ASGI `send`: what goes through it says how the request ended.

    The answer's head tells the gateway's own time.
    """

    _send: asgi.Send = _nowhere
    _timings: Timings = field(default_factory=Timings)
    charge: Charge | None = None  # None: its key has no limits in tokens
    started: bool = False
    failure: int = 0  # status of what went wrong behind the head, or before there was one; 0: nothing
    status: int = 0  # what the request counts as: HTTP's status, or `failure`; 0 while there is none

    async def __call__(self, message: asgi.Scope) -> None:
        if message["type"] == "http.response.start":
            self.status, self.started = self.failure or message["status"], True
            message = {**message, "headers": self._with_own(message["headers"])}
        elif not message.get("more_body"):
            self.over = True
        await self._send(message)

    def whole(self, status: int, headers: asgi.HeaderList, body: bytes) -> bool:
        """Send a whole answer, as `asgi.Request.answer`."""
        if self.served is None or not self.served.answer(status, self._with_own(headers), body):
            return False
        self.status, self.started, self.over = self.failure or status, True, True
        return True

    def _with_own(self, headers: asgi.HeaderList) -> asgi.HeaderList:
        headers = [*headers, (OWN_TIME, b"%.1f" % self._timings.own_milliseconds)]
        return headers if self.charge is None else self.charge.on(headers)

    def failed(self, status: int) -> None:
        """It counts as `status`, whatever it has begun with."""
        self.failure = self.status = status


class RequestOutcome(Struct, eq=False):
    """What a worker has reported in its answer, and what follows from it; lengths in tokens."""

    status: int  # of HTTP
    usage: Usage | None = None
    engine: Admitted | None = None  # what its engine says of the request; None: it has to be asked for
    engine_id: str = ""  # what its engine calls the request
    predicted: int = 0  # what its worker was expected to find
    prompt: int = 0  # of `usage`, as these: once it is judged
    cached: int = 0
    shareable: int = 0
    deepest: int = 0  # its own deepest boundary, 0 if that is not known
    change: PrefixChange | None = None  # where the request differs from the nearest recent one
    reason: str | None = None  # why it got no more from the cache; None until it is judged
    explaining: Steps[None] | None = None  # what is not done of that
    is_explained: bool = False  # as far as it can be


class Exchange(Struct, eq=False):
    """What is known of a request so far. Each field has one writer, which is named beside it."""

    head: Head  # `RequestHandler`, as all up to the next comment
    body: Body
    reply: Reply
    send: asgi.Send  # to the client: `reply`, or what the response cache has put before it
    engine_id: str  # `head.request_id`, or another name if a request of that name is under way
    is_named: bool = False  # by its client's X-Request-Id
    trace: RequestTrace | None = None  # None: nothing is traced
    keep: str = ""  # of `STRICTER`: nothing of it may be kept, unless it is empty
    salt: str = ""  # nobody else has it
    left_out_by: str = ""  # what keeps it out of its worker's cache: "engine", told so, or a "salt"; `ResponseRelay`
    prompt: Prompt = field(default_factory=Prompt)
    timings: Timings = field(default_factory=Timings)
    # What it asks for, by `ask`.
    model: Any = None  # as the client wrote it; empty: any, as vLLM lets it; None: for no model, or not read
    response_id: Any = None  # the stored response that it continues or asks for
    kept_id: Any = None  # the same, or what else it asks for that some worker has made (a video, a file, a batch)
    makes: bool = False  # its answer may name what is asked for later
    # Where it goes, by `give`; no worker had it yet if there is none.
    worker: Worker | None = None  # the last one
    expected: Expectation | None = None  # of that worker; None: no boundaries are sought in such a request
    hint: tuple[Entry, ...] = ()  # that it gets
    slot: Slot | None = None  # that it has there: `Dispatcher`
    gets_token: bool = False  # its answer has a session token: `Dispatcher`
    asked: list[Worker] = field(default_factory=list)  # that do not know what it names, or take less: `Dispatcher`
    landed: asyncio.Event | None = None  # set once no other request waits for its answer: `Flight`
    delivered: bool = False  # a client that left had all of the response: `ResponseRelay`
    outcome: RequestOutcome | None = None  # `Accounting`, as all below
    record: Explanation | None = None  # what is said of it when somebody asks
    model_label: str | None = None  # in metrics; None until it is counted
    is_over: bool = False

    def give(self, worker: Worker | None, expected: Expectation | None = None, hint: tuple[Entry, ...] = ()) -> None:
        """It goes to this worker, or to none, wherever it went before."""
        self.worker, self.expected, self.hint = worker, expected, hint

    def take(self, parsed: dict[str, Any], asks_usage: bool) -> None:
        """Take in its body, parsed. Raises as `Body.take`."""
        self.body.parsed = parsed
        self.ask()
        self.keep = stricter(self.keep, keep_in(parsed), "vllm_xargs.seamark_keep")
        self.body.take(parsed, self.head, asks_usage)
        key = self.head.key
        if self.keep:
            self.salt = self.salt or fresh_salt()
            self.body.leave_nothing(self.head, self.keep, self.salt)
        elif key is not None and key.entry.priority is not None and self.head.endpoint in HINTED:
            self.body.keep = "low"

    def ask(self) -> None:
        """Work out what it asks for, from its path and from what is known of its body."""
        head, path, parsed = self.head, self.head.path, self.body.parsed
        if parsed:
            self.model = parsed.get("model") or (None if path.startswith(RESPONSE_PATH) else "")
        self.response_id = self.kept_id = parsed.get("previous_response_id")
        if head.endpoint != "other":
            return
        parts = path.split("/")[3:]
        if path.startswith(RESPONSE_PATH) and parts[0] not in RESPONSE_ACTIONS:
            self.response_id = self.kept_id = parts[0]
        if not path.startswith("/v1/") or path.startswith("/v1/models/"):
            return
        self.makes = head.method == "POST"
        if self.kept_id is None:
            named = next((part for part in parts if not _DIGITS.isdisjoint(part)), None)
            if named is None and head.method != "POST":  # /v1/images/generations makes something
                named = "/".join(parts)
            given = named or parsed.get("input_file_id")
            self.kept_id = given if isinstance(given, str) else None

    @property
    def at(self) -> Worker:
        if self.worker is None:
            raise RuntimeError("The request has no worker yet.")
        return self.worker


def stricter(keep: str, given: Any, where: str) -> str:
    """The stricter of two. Raises `BadRequest` for one that is none, `given` as `where`."""
    if given not in STRICTER:
        raise BadRequest(f'{where} is "no" (nothing of it is kept) or "private" (nor does it find anything).', where)
    return max(keep, str(given), key=STRICTER.index)


def keep_in(parsed: Mapping[str, Any]) -> Any:
    """What a body says of it, as engines are told; "" if nothing."""
    params = parsed.get("sampling_params")
    for told in (parsed.get(XARGS), params.get("extra_args") if isinstance(params, dict) else None):
        if isinstance(told, dict) and KEEP in told:
            return told[KEEP] if told[KEEP] != "low" else ""
    return ""


def id_header(name: str) -> tuple[bytes, bytes]:
    """A request's identity, as its client sees it (`Head.request_id`), or as its worker does (`Exchange.engine_id`)."""
    return (b"x-request-id", name.encode("latin-1"))


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


def session_token(worker: Worker) -> bytes:
    """Names the worker as it runs now, at all gateways alike; it tells nobody else anything."""
    return xxh3_64_hexdigest(f"{worker.name} {worker.boot}".encode()).encode()


def user_key(body: Mapping[str, Any], found: Found) -> str | None:
    """The same of a client that names the user alone, whose many conversations are told apart by how they begin."""
    user = _text(body, "user") or _text(body.get("metadata"), "user_id")
    if user is None or found.layout is None:
        return None
    return f"{user} {found.layout.keys.after[found.layout.first].hex()}"


def _text(body: Any, name: str) -> str | None:
    given = body.get(name) if isinstance(body, dict) else None
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


def exchange_of(
    scope: asgi.Scope,
    raw: bytes,
    request_id: str,
    key: ApiKey | None = None,
    send: asgi.Send | None = None,
    receive: asgi.Receive | None = None,
) -> Exchange:
    """The request in an ASGI scope, to be answered by `send`; None: no client waits for it. Raises as `target_of`."""
    path = scope["path"]
    endpoint = path if path in ENDPOINTS else "other"
    headers = asgi.end_to_end(scope["headers"], asgi.RECOMPUTED if key is None else asgi.RECOMPUTED_WITH_KEY)
    owner = key.owner if key is not None else None
    head = Head(scope["method"], target_of(scope), path, endpoint, headers, request_id, key, owner)
    timings = Timings()
    charge = Charge(key.limits) if key is not None and key.limits is not None else None
    reply = Reply(scope.get(asgi.SERVED), receive, _send=send or _nowhere, _timings=timings, charge=charge)
    exchange = Exchange(head, Body(raw), reply, reply, request_id, timings=timings)
    exchange.keep = key.entry.keep or "" if key is not None else ""
    given = b",".join(value for name, value in scope["headers"] if name == KEEP_HEADER)  # be it sent twice
    for each in given.decode("latin-1").lower().split(","):
        exchange.keep = stricter(exchange.keep, each.strip(), KEEP_HEADER.decode())
    if endpoint == "other":
        exchange.ask()
    return exchange
