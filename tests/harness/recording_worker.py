"""A worker that records the bytes it gets: what a real engine cannot show. Its answers are those of vLLM 0.32.

Behind them stands `FakeEngine`: prompts are as long as its own template makes them, and hints are resolved on those.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from starlette.middleware.cors import CORSMiddleware

from proxy.http.auth import ADMIN_OF_WORKERS, LOAD_ADAPTER, UNLOAD_ADAPTER
from tests.harness.fake_engine import (
    VERSION,
    Admitted,
    FakeEngine,
    Template,
    engine_info,
    prompt_of,
    sleep_state,
    template,
    token_ids,
)
from tests.harness.threaded_server import serving, whole_body

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


@dataclass
class Recorded:
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    peer: tuple[str, int]  # other end of the connection it came on


@dataclass
class RecordingWorker:
    """State of the fake; change it between requests."""

    url: str = ""
    patched: bool = True
    version: str = VERSION  # of its plugin
    ahead: int = 0  # tokens past a state that a prompt has to share to find it
    connector: str = ""  # vLLM's name of its KV connector
    refused: str = ""  # why no hint counts
    sleeps: tuple[int | None, ...] = (None,)  # the level of each engine's sleep, None for one awake
    paused: bool = False
    dev_mode: bool = True  # it has the routes that ask the engine for these
    transfer: dict[str, Any] | None = None  # what a prefill worker says of a prompt that it has computed
    unfinished: threading.Event = field(default_factory=threading.Event)  # while set, such an answer stops at its head
    template: Template = template
    rendered: Template | None = None  # what its render route gives if that is not what it computes
    prompt_tokens: int | None = None  # that it reports; None: as many as its template makes
    more_metrics: str = ""  # lines of its /metrics
    boot: str = "1.7e+09"
    models: tuple[str, ...] = ("m",)  # names of its one model
    checks_names: bool = False  # answer 404 to a request for a model that it does not list, as vLLM does
    adapters: dict[str, str] | None = None  # paths of those that are loaded, by name; None: without routes for them
    render_status: int = 200
    hang_renders: bool = False  # answer no render until the gateway goes
    cached: int = 160  # tokens it reports
    status: int = 200  # of whole answers
    status_by: Callable[[bytes], int] | None = None  # the same by the body of a request
    reason: str | None = None  # that its engine gives; None: what fits the cached tokens
    location: str | None = None  # header of whole answers
    allowed_origins: tuple[str, ...] = ("*",)  # when it starts, as vLLM's --allowed-origins
    gzips: str | None = None  # as a proxy before it: "accepted" what the client takes so, "always" everything
    has_feed: bool = True
    api_key: str | None = None  # that it wants for /v1, as vLLM's --api-key
    hang: bool = False  # answer nothing until the client goes
    hold: threading.Event = field(default_factory=threading.Event)  # while set, answers to requests wait
    hang_replays: bool = False  # answer no request for a single token
    hang_in_stream: bool = False
    hang_after: int = 1  # events
    cut_stream: bool = False  # the connection closes in the middle
    cut_after: int = 1  # events
    streams: dict[str, Sequence[bytes]] = field(default_factory=lambda: {"/v1/chat/completions": EVENTS})  # by path
    silence: threading.Event = field(default_factory=threading.Event)  # while set, streams wait before their events
    stream_bytes: int = 0  # of filling, in the middle of a stream
    sent: int = 0  # bytes of it that went out
    requests: list[Recorded] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)  # bodies of what it answered in full
    renders: int = 0
    tokenized: int = 0  # texts alone
    rendering: int = 0  # asked for and not answered
    most_rendering: int = 0
    gone: threading.Event = field(default_factory=threading.Event)  # a client left before its answer was complete
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
        body = await whole_body(receive)
        path = scope["path"]
        wanted = (b"authorization", f"Bearer {self.api_key}".encode())
        if self.api_key is not None and path.startswith("/v1") and wanted not in scope["headers"]:
            return await respond(send, b'{"error":"Unauthorized"}', status=401)
        if path == "/health":
            return await respond(send, b"", "text/plain")
        if path in ("/metrics", "/seamark/metrics"):
            text = (
                f"process_start_time_seconds {self.boot}\n"
                + (engine_info(self.version, self.ahead, self.connector, self.refused) if self.patched else "")
                + sleep_state(*self.sleeps)
                + self.more_metrics
            )
            return await respond(send, text.encode(), "text/plain")
        if path == "/v1/models" and scope["method"] == "GET":
            data = [{"id": name, "object": "model", "max_model_len": 8192} for name in self.models]
            data += [
                {"id": name, "object": "model", "root": root, "parent": self.models[0]}
                for name, root in (self.adapters or {}).items()
            ]
            return await respond(send, json.dumps({"object": "list", "data": data}).encode())
        if path in ("/is_sleeping", "/is_paused"):
            asleep = [level is not None or self.paused for level in self.sleeps]
            if not self.dev_mode or len(set(asleep)) > 1:  # vLLM's engines have to agree
                return await respond(send, b"{}", status=500 if self.dev_mode else 404)
            return await respond(send, json.dumps({path[1:]: asleep[0]}).encode())
        if path == "/version":
            return await respond(send, b'{"version":"0.32.0"}')
        if path == "/seamark/outcomes":
            return await self._feed(scope, send)
        if path == "/v1/chat/completions/render" and self.hang_renders:
            await receive()
            return None
        if path == "/v1/chat/completions/render":
            return await self._render(body, send)
        if path == "/tokenize" and b'"prompt"' in body:
            self.tokenized += 1
            return await respond(send, json.dumps({"tokens": token_ids(json.loads(body)["prompt"])}).encode())
        if path == "/detokenize" and b'"tokens"' in body:
            text = "".join(map(chr, json.loads(body)["tokens"]))
            return await respond(send, json.dumps({"prompt": text}).encode())
        target = scope["raw_path"].decode() + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        self.requests.append(Recorded(scope["method"], target, list(scope["headers"]), body, scope["client"]))
        while self.hold.is_set():
            await asyncio.sleep(0.01)
        if self.gzips == "always" or (self.gzips and b"gzip" in dict(scope["headers"]).get(b"accept-encoding", b"")):
            send = gzipping(send)
        if self.adapters is not None and path in ADMIN_OF_WORKERS and self.status == 200:
            return await self._change_adapter(path, json.loads(body), send)
        if self.checks_names and not self._has_model(headers=dict(scope["headers"]), body=body):
            error = {"message": "The model does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
            return await respond(send, json.dumps({"error": error}).encode(), status=404)
        if self.hang or (self.hang_replays and b'"max_tokens":1' in body):
            await receive()
            self.gone.set()
            return None
        if self.status_by is not None:
            self.status = self.status_by(body)
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id", b"").decode("latin-1")
        prompt, admitted = self._admit(path, self._name_of_response() if path == "/v1/responses" else name, body)
        length = self.prompt_tokens or (len(prompt) if prompt else PROMPT_TOKENS)
        if path in self.streams and json.loads(body).get("stream"):
            counted = b'"prompt_tokens": %d'
            recorded = self.streams[path]
            events = [event.replace(counted % PROMPT_TOKENS, counted % length) for event in recorded]
            self.answers.append(b"".join(events))
            await self._stream(events, receive, send)
            return None
        details = {**USAGE["prompt_tokens_details"], "cached_tokens": self.cached}
        usage = {**USAGE, "prompt_tokens": length, "prompt_tokens_details": details}
        transfer = {"kv_transfer_params": self.transfer} if self.transfer is not None else {}
        answer = json.dumps({**COMPLETION, "usage": usage, **transfer}).encode()
        self.answers.append(answer)
        if self.unfinished.is_set():
            await _begin(send, answer)
            while self.unfinished.is_set():
                await asyncio.sleep(0.01)
            await send({"type": "http.response.body", "body": answer})
            return None
        asked = headers.get(b"x-seamark-outcome") == b"1"
        more = [(b"x-seamark-outcome", admitted.header.encode())] if asked and admitted is not None else []
        more += [(b"location", self.location.encode())] if self.location is not None else []
        await respond(send, answer, status=self.status, more=more)
        return None

    def _has_model(self, headers: dict[bytes, bytes], body: bytes) -> bool:
        """Whether a request names a model of this worker, or none."""
        if b"multipart" in headers.get(b"content-type", b""):
            named = re.search(rb'name="?model"?\r\n(?:.+\r\n)*\r\n(.*)\r\n', body)
            model = named[1].decode() if named else ""
        else:
            model = json.loads(body or b"{}").get("model")
        return not model or model in self.models or model in (self.adapters or {})

    async def _change_adapter(self, path: str, body: dict[str, Any], send: Any) -> None:
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
        error = {"message": text, "type": "InvalidUserInput", "param": None, "code": status}
        return await respond(send, json.dumps({"error": error}).encode(), status=status)

    def _name_of_response(self) -> str:
        """What vLLM's engine calls the request of a response, by the id in the answer."""
        first, *_ = self.streams.get("/v1/responses", (b"",))
        streamed = re.search(rb'"id":"resp_(\w+)"', first)
        return f"{streamed[1].decode() if streamed else COMPLETION['id']}_0"

    def _admit(self, path: str, request_id: str, raw: bytes) -> tuple[str | None, Admitted | None]:
        """The prompt of a request, and what the engine says of it; both None for what it does not compute."""
        try:
            body = json.loads(raw)
        except ValueError:
            return None, None
        prompt = prompt_of(path, body, self.template) if isinstance(body, dict) else None
        if prompt is None or not self.patched or self.status != 200:
            return prompt, None
        admitted = self.engine.admit(request_id, prompt, body, self.version, self.reason, self.cached or 0)
        return prompt, admitted if "resolved" in self.engine.feed("", 0, self.version) else None

    async def _feed(self, scope: Any, send: Any) -> None:
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode()).items()}
        boot, after = query.get("boot", ""), int(query.get("after", 0))
        until = time.monotonic() + float(query.get("wait", 0))
        while not self.engine.has_news(boot, after) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        events = self.engine.feed(boot, after, self.version)
        await respond(send, json.dumps(events).encode(), status=200 if self.has_feed else 404)

    async def _render(self, body: bytes, send: Any) -> None:
        self.renders += 1
        self.rendering += 1
        self.most_rendering = max(self.most_rendering, self.rendering)
        ids = token_ids((self.rendered or self.template)(json.loads(body)))
        await asyncio.sleep(0)  # others that have been asked for begin
        await respond(send, json.dumps({"token_ids": ids}).encode(), status=self.render_status)
        self.rendering -= 1

    async def _stream(self, events: Sequence[bytes], receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while self.silence.is_set():
            await asyncio.sleep(0.01)
        while self.sent < self.stream_bytes:
            filling = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"tide " * 3000)
            await send({"type": "http.response.body", "body": filling, "more_body": True})
            self.sent += len(filling)
        for number, event in enumerate(events, 1):
            for half in (event[:50], event[50:]):  # cuts the two bytes of é apart
                await send({"type": "http.response.body", "body": half, "more_body": True})
                await asyncio.sleep(0.01)
            if self.cut_stream and number == self.cut_after:
                return  # the server closes the connection in the middle
            if self.hang_in_stream and number == self.hang_after:
                await receive()
                self.gone.set()
                return
        await send({"type": "http.response.body", "body": b""})


def gzipping(send: Any) -> Any:
    """`send`, with each piece of the body compressed and flushed."""
    packer = zlib.compressobj(wbits=31)

    async def send_packed(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [header for header in message["headers"] if header[0] != b"content-length"]
            message = {**message, "headers": [*headers, (b"content-encoding", b"gzip")]}
        else:
            flush = zlib.Z_SYNC_FLUSH if message.get("more_body") else zlib.Z_FINISH
            message = {**message, "body": packer.compress(message["body"]) + packer.flush(flush)}
        await send(message)

    return send_packed


async def _begin(send: Any, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": True})


async def respond(
    send: Any,
    body: bytes,
    kind: str = "application/json",
    status: int = 200,
    more: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), (b"x-twice", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"x-twice", b"2"), *more]})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def recording_worker(address: str = "127.0.0.1", port: int = 0, **state: Any) -> Iterator[RecordingWorker]:
    """The fake under a real HTTP server, in a thread; port 0: a free one."""
    worker = RecordingWorker(**state)
    app = CORSMiddleware(worker, allow_origins=worker.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    with serving(app, address, port) as worker.url:
        yield worker
