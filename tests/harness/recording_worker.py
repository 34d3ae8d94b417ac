"""A worker that records the bytes it gets: what a real engine cannot show. Its answers are those of vLLM 0.32.

Behind them stands `FakeEngine`: prompts are as long as its own template makes them, and hints are resolved on those.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import uvicorn

from proxy.chat.chat import CHAT, RESPONSES
from proxy.fleet.probe import OPTIONAL
from proxy.http.auth import ADMIN_OF_WORKERS, LOAD_ADAPTER, UNLOAD_ADAPTER
from tests.harness.fake_engine import (
    VERSION,
    Admitted,
    Computed,
    FakeEngine,
    Template,
    engine_info,
    prompt_of,
    sleep_state,
    template,
    token_ids,
)


@contextmanager
def serving(app: Any, address: str = "127.0.0.1", port: int = 0, **options: Any) -> Iterator[str]:
    """Its URL, at an address of this machine; port 0: a free one. `options` are uvicorn's.

    The socket is bound before the server starts, so that nobody takes the port.
    """
    server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="critical", **options))
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=kind)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    try:
        host = f"[{address}]" if ":" in address else address
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


async def whole_body(receive: Any) -> bytes:
    """A request's body, as the application receives it."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


PROMPT_TOKENS = 300  # of requests that are no chats, and in recorded streams

USAGE = {
    "prompt_tokens": PROMPT_TOKENS,
    "total_tokens": 301,
    "completion_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 160, "created_cache_tokens": 0, "multimodal_tokens": None},
}

COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "é"}, "finish_reason": "length"}],
    "usage": USAGE,
}

EVENTS = (
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"\xc3\xa9"}}],"usage":null}\n\n',
    b'data: {"id":"chatcmpl-1","choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n",
    b"data: [DONE]\n\n",
)


def recorded(name: str) -> list[bytes]:
    """The events of a stream of vLLM 0.32's for three tokens, as it came."""
    text = (Path(__file__).parents[1] / "streams" / f"{name}.sse").read_bytes()
    return [event + b"\n\n" for event in text.split(b"\n\n") if event]


Headers = Sequence[tuple[bytes, bytes]]

Stream = Sequence[bytes] | Callable[[int, int], Sequence[bytes]]  # made of a prompt's and of its cached tokens


@dataclass
class Recorded:
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def path(self) -> str:
        """Without the query."""
        return unquote(self.target.partition("?")[0])

    @property
    def fields(self) -> Mapping[str, Any]:
        """Of its body; none if that is no JSON object."""
        try:
            body = json.loads(self.body)
        except ValueError:
            return {}
        return body if isinstance(body, dict) else {}

    def header(self, name: bytes) -> bytes:
        """The last one of this name, empty without one."""
        return dict(self.headers).get(name, b"")


@dataclass
class RecordingWorker:
    """State of the fake; change it between requests."""

    url: str = ""
    patched: bool = True
    version: str = VERSION  # of its plugin
    ahead: int = 0  # tokens past a state that a prompt has to share to find it
    connector: str = ""  # vLLM's name of its KV connector
    refused: str = ""  # why no hint counts
    keep: str = ""  # whether it can be told what of a request it may keep
    reports: str = ""  # HOST:PORT where its plugin says that they are read
    sources: dict[str, Any] | None = None  # publishers of KV events, by rank, that it lists; None: it has no such route
    lacks: tuple[str, ...] = ()  # routes that its HTTP server does not serve, as vLLM's in Rust
    sleeps: tuple[int | None, ...] = (None,)  # the level of each engine's sleep, None for one awake
    paused: bool = False
    transfer: dict[str, Any] | None = None  # what a prefill worker says of a prompt that it has computed
    template: Template = template
    rendered: Template | None = None  # what its render route gives if that is not what it computes
    more_metrics: str = ""  # lines of its /metrics
    boot: str = "1.7e+09"
    models: tuple[str, ...] = ("m",)  # names of its one model
    checks_names: bool = False  # answer 404 to a request for a model that it does not list, as vLLM does
    adapters: dict[str, str] | None = None  # paths of those that are loaded, by name; None: without routes for them
    stored: dict[str, dict[str, Any]] | None = None  # responses by their ids; None: it answers without storing any
    names_responses: bool = False  # itself, whatever a request calls its response
    render_status: int = 200
    hang_renders: bool = False  # answer no render until the gateway goes
    cached: int = 160  # tokens it reports
    hits: bool = False  # report as cached what the states stand for that its engine has kept
    status: int = 200  # of whole answers
    status_by: Callable[[bytes], int] | None = None  # the same by the body of a request
    more_headers: Headers = ()  # of its answers
    has_feed: bool = True
    api_key: str | None = None  # that it wants for /v1, as vLLM's --api-key
    hold: threading.Event = field(default_factory=threading.Event)  # while set, answers to requests wait
    held_text: bytes = b""  # in the bodies of those that wait
    pause: threading.Event = field(default_factory=threading.Event)  # while set, answers stop behind `pause_after`
    pause_after: int = 1  # parts: events of a stream, halves of a whole answer
    cut_after: int | None = None  # parts, behind which the connection closes
    computed: Computed | None = None  # its answers follow from the requests; None: they are recorded ones
    streams: dict[str, Stream] = field(default_factory=lambda: {CHAT: EVENTS})  # by path
    requests: list[Recorded] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)  # bodies of what it answered in full
    renders: int = 0
    rendering: int = 0  # asked for and not answered
    most_rendering: int = 0
    gone: threading.Event = field(default_factory=threading.Event)  # a client left before its answer was complete
    drafts: tuple[str, str, str] = ("", "", "")  # of hints beside them: state, why they are not used, and figures
    engines: dict[str, FakeEngine] = field(default_factory=dict)  # by boot

    @property
    def engine(self) -> FakeEngine:
        """The engine of this boot."""
        return self.engines.setdefault(self.boot, FakeEngine(self.boot, self.ahead))

    @property
    def is_read(self) -> bool:
        """Whether a gateway has read its feed to the end."""
        return self.engine.read_to >= self.engine.cursor

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return None
        target = scope["raw_path"].decode() + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        headers = list(scope["headers"])
        request = Recorded(scope["method"], target, headers, await whole_body(receive))
        path, body = scope["path"], request.body
        wanted = (b"authorization", f"Bearer {self.api_key}".encode())
        if self.api_key is not None and path.startswith("/v1") and wanted not in headers:
            return await respond(send, b'{"error":"Unauthorized"}', status=401)
        if (page := self._page(request)) is not None:
            said, status = page
            if isinstance(said, str):
                return await respond(send, said.encode(), "text/plain", status)
            return await respond(send, json.dumps(said).encode(), status=status)
        if path in self.lacks:
            return await refuse(send, f"{path} is not supported by the Rust frontend yet", "NotImplemented", None, 501)
        if body == b"{}" and path in OPTIONAL:
            return await refuse(send, "1 validation error", "BadRequestError", None, 400)
        if path == "/seamark/outcomes":
            return await self._feed(scope, send)
        if path == "/v1/chat/completions/render" and self.hang_renders:
            await receive()
            return None
        if path == "/v1/chat/completions/render":
            return await self._render(body, send)
        self.requests.append(request)
        if await self._stays(receive, lambda: self.hold.is_set() and self.held_text in body):
            await self._answer(request, receive, send)
        return None

    def _page(self, request: Recorded) -> tuple[Any, int] | None:
        """What it says of itself and of texts: a text, or what becomes JSON; and the status."""
        path, body = request.path, request.body
        if path == "/health":
            return "", 200
        if path in ("/metrics", "/seamark/metrics"):
            state, why, _ = self.drafts
            refused = f"drafts: {why}" if state == "closed" else self.refused
            info = engine_info(self.version, self.ahead, self.connector, refused, self.reports, state, self.keep)
            started = f"process_start_time_seconds {self.boot}\n" if self.boot else ""
            return started + (info if self.patched else "") + sleep_state(*self.sleeps) + self.more_metrics, 200
        if path == "/v1/models" and request.method == "GET":
            data = [{"id": name, "object": "model", "max_model_len": 8192} for name in self.models]
            adapters = (self.adapters or {}).items()
            data += [{"id": name, "object": "model", "root": at, "parent": self.models[0]} for name, at in adapters]
            return {"object": "list", "data": data}, 200
        if path in ("/is_sleeping", "/is_paused"):
            asleep = {level is not None or self.paused for level in self.sleeps}
            return ({path[1:]: asleep.pop()}, 200) if len(asleep) == 1 else ({}, 500)  # vLLM's engines have to agree
        if path == "/kv_event_sources":
            return self.sources, 404 if self.sources is None else 200
        if path == "/version":
            return {"version": "0.32.0"}, 200
        if path == "/detokenize" and b'"tokens"' in body:
            return {"prompt": "".join(map(chr, json.loads(body)["tokens"]))}, 200
        return None

    async def _stays(self, receive: Any, waits: Callable[[], bool]) -> bool:
        """Wait for as long as `waits`; False if the client leaves meanwhile."""
        if not waits():
            return True
        left = asyncio.ensure_future(receive())
        try:
            while waits():
                if left.done():
                    self.gone.set()
                    return False
                await asyncio.sleep(0.01)
            return True
        finally:
            left.cancel()

    def _pauses(self, number: int) -> bool:
        """Whether an answer waits behind so many parts."""
        return self.pause.is_set() and self.pause_after == number

    async def _answer(self, request: Recorded, receive: Any, send: Any) -> None:
        path, body = request.path, request.fields
        if self.adapters is not None and path in ADMIN_OF_WORKERS and self.status == 200:
            return await self._change_adapter(path, body, send)
        if self.checks_names and not self._has_model(request):
            return await refuse(send, "The model does not exist.", "NotFoundError", "model", 404)
        if self.stored is not None and path.startswith(RESPONSES):
            return await self._answer_stored(self.stored, request, receive, send)
        if self.status_by is not None:
            self.status = self.status_by(request.body)
        prompt = prompt_of(path, body, self.template)
        length = len(prompt) if prompt else PROMPT_TOKENS
        if self.hits:
            self.cached = self.engine.held(prompt or "", body)
        is_stream = bool(body.get("stream")) and (path in self.streams or self.computed is not None)
        answer = b"".join(events := self._events(path, body, length)) if is_stream else self._whole(path, body, length)
        self.answers.append(answer)
        name = request.header(b"x-request-id").decode("latin-1")
        if path == RESPONSES:  # vLLM's engine calls its request by the id in the answer
            streamed = re.search(rb'"id":"resp_(\w+)"', answer)
            name = f"{streamed[1].decode() if streamed else COMPLETION['id']}_0"
        admitted = self._admit(name, prompt, body)
        if is_stream:
            head = [(b"content-type", b"text/event-stream; charset=utf-8"), *self.more_headers]
            status, in_halves = (200, True) if self.computed is None else (self.status, False)
            return await self._send(head, events, receive, send, status=status, in_halves=in_halves)
        head = _head("application/json", len(answer), self.more_headers)
        if admitted is not None and request.header(b"x-seamark-outcome") == b"1":
            head.append((b"x-seamark-outcome", admitted.header.encode()))
        return await self._send(head, (answer[:20], answer[20:]), receive, send, status=self.status)

    def _events(self, path: str, body: Mapping[str, Any], length: int) -> Sequence[bytes]:
        """A stream for a prompt of `length` tokens."""
        if self.computed is not None:
            return self.computed.events(body)
        recorded = self.streams[path]
        if callable(recorded):
            return recorded(length, self.cached)
        counted = b'"prompt_tokens": %d'
        return [event.replace(counted % PROMPT_TOKENS, counted % length) for event in recorded]

    def _whole(self, path: str, body: Mapping[str, Any], length: int) -> bytes:
        details = {**USAGE["prompt_tokens_details"], "cached_tokens": self.cached}
        usage = {**USAGE, "prompt_tokens": length, "prompt_tokens_details": details}
        transfer = {"kv_transfer_params": self.transfer} if self.transfer is not None else {}
        answer = COMPLETION if self.computed is None else self.computed.whole(path, body)
        return json.dumps({**answer, "usage": usage, **transfer}).encode()

    def _has_model(self, request: Recorded) -> bool:
        """Whether a request names a model of this worker, or none."""
        if b"multipart" in request.header(b"content-type"):
            named = re.search(rb'name="?model"?\r\n(?:.+\r\n)*\r\n(.*)\r\n', request.body)
            model = named[1].decode() if named else ""
        else:
            model = request.fields.get("model")
        return not model or model in self.models or model in (self.adapters or {})

    async def _change_adapter(self, path: str, body: Mapping[str, Any], send: Any) -> None:
        """As vLLM's routes do, with its words."""
        name, loaded = body.get("lora_name"), self.adapters if self.adapters is not None else {}
        status, text = (
            200,
            f"Success: LoRA adapter '{name}' {'added' if path == LOAD_ADAPTER else 'removed'} successfully.",
        )
        if not name:
            status, text = 400, "1 validation error"
        elif path == UNLOAD_ADAPTER and name not in loaded:
            status, text = 404, f"The lora adapter '{name}' cannot be found."
        elif path == UNLOAD_ADAPTER:
            del loaded[name]
        elif name in loaded and not body.get("load_inplace"):
            status, text = 400, f"The lora adapter '{name}' has already been loaded."
        else:
            loaded[name] = body["lora_path"]
        if status == 200:
            return await respond(send, text.encode(), "text/plain")
        return await refuse(send, text, "InvalidUserInput", None, status)

    async def _answer_stored(
        self, stored: dict[str, dict[str, Any]], request: Recorded, receive: Any, send: Any
    ) -> None:
        """As vLLM does with `VLLM_ENABLE_RESPONSES_API_STORE=1`; other engines delete them, too.

        Each is stored under the request's `request_id`, and no worker knows of another one's.
        """
        path, body = request.path, request.fields
        response_id = body.get("previous_response_id") if path == RESPONSES else path.split("/")[3]
        if response_id is not None and response_id not in stored:
            text = f"Response with id '{response_id}' not found."
            return await refuse(send, text, "invalid_request_error", "response_id", 404)
        if path != RESPONSES:
            response = stored[response_id]
            if request.method == "DELETE":
                del stored[response_id]
                response = {"id": response_id, "object": "response", "deleted": True}
            elif path.endswith("/cancel"):
                response["status"] = "cancelled"
            return await respond(send, json.dumps(response).encode())
        own = f"resp_{os.urandom(8).hex()}"
        begun = {"id": own if self.names_responses else body.get("request_id", own), "object": "response"}
        begun |= {"model": body["model"], "status": "in_progress", "output": [], "usage": None}
        if body.get("background"):
            stored[begun["id"]] = begun
        text = {"type": "output_text", "text": f"Number {len(stored)}."}
        usage = {"input_tokens": 300, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 160}}
        ended = {"status": "completed", "output": [{"type": "message", "content": [text]}], "usage": usage}

        def events() -> Iterator[bytes]:
            for kind, response in (("created", begun), ("completed", begun | ended)):
                if kind == "completed":
                    stored[begun["id"]] = response
                data = json.dumps({"response": response, "type": f"response.{kind}"})
                yield f"event: response.{kind}\ndata: {data}\n\n".encode()

        if body.get("stream"):
            return await self._send([(b"content-type", b"text/event-stream; charset=utf-8")], events(), receive, send)
        stored[begun["id"]] = begun | ended
        return await respond(send, json.dumps(begun | ended).encode())

    def _admit(self, request_id: str, prompt: str | None, body: Mapping[str, Any]) -> Admitted | None:
        """What the engine says of a request; None for what it does not compute."""
        if prompt is None or not self.patched or self.status != 200:
            return None
        return self.engine.admit(request_id, prompt, body, self.cached or 0)

    async def _feed(self, scope: Any, send: Any) -> None:
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode()).items()}
        boot, after = query.get("boot", ""), int(query.get("after", 0))
        until = time.monotonic() + float(query.get("wait", 0))
        while not self.engine.has_news(boot, after) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        events = self.engine.feed(boot, after)
        if self.drafts[0]:
            events["drafts"] = self.drafts[::2]
        await respond(send, json.dumps(events).encode(), status=200 if self.has_feed else 404)

    async def _render(self, body: bytes, send: Any) -> None:
        self.renders += 1
        self.rendering += 1
        self.most_rendering = max(self.most_rendering, self.rendering)
        ids = token_ids((self.rendered or self.template)(json.loads(body)))
        await asyncio.sleep(0)  # others that have been asked for begin
        await respond(send, json.dumps({"token_ids": ids}).encode(), status=self.render_status)
        self.rendering -= 1

    async def _send(
        self,
        head: Headers,
        parts: Iterable[bytes],
        receive: Any,
        send: Any,
        *,
        status: int = 200,
        in_halves: bool = False,
    ) -> None:
        """An answer; a part is made once it is to be sent. `in_halves`: they arrive one by one, and cut apart."""
        await send({"type": "http.response.start", "status": status, "headers": head})
        number, coming = 0, iter(parts)
        while await self._stays(receive, partial(self._pauses, number)):
            if number == self.cut_after:
                return  # the server closes the connection in the middle
            if (part := next(coming, None)) is None:
                await send({"type": "http.response.body", "body": b""})
                return
            for half in (part[:50], part[50:]) if in_halves else (part,):  # cuts the two bytes of é apart
                await send({"type": "http.response.body", "body": half, "more_body": True})
                await asyncio.sleep(0.01 if in_halves else 0)
            number += 1


def _head(kind: str, length: int, more: Headers = ()) -> list[tuple[bytes, bytes]]:
    named = [(b"content-type", kind.encode()), (b"content-length", str(length).encode())]
    return [*named, (b"x-twice", b"1"), (b"x-twice", b"2"), *more]


async def respond(send: Any, body: bytes, kind: str = "application/json", status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _head(kind, len(body))})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Any, message: str, kind: str, param: str | None, status: int) -> None:
    """With an error as vLLM's."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    await respond(send, json.dumps({"error": error}).encode(), status=status)


@contextmanager
def recording_worker(address: str = "127.0.0.1", port: int = 0, **state: Any) -> Iterator[RecordingWorker]:
    """The fake under a real HTTP server, in a thread; port 0: a free one."""
    worker = RecordingWorker(**state)
    with serving(worker, address, port) as worker.url:
        yield worker
