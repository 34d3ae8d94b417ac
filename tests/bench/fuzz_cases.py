"""The stream of cases of a fuzzing run: what is sent, in which pieces, and what has to become of it.

Seed and number determine a case, so that one can be repeated alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from proxy.settings import Settings
from tests.bench import fuzz_framing
from tests.harness.raw_http import request
from tests.harness.raw_worker import Seen

# What must become of it.
ANSWERED = "answered"  # each request gets one whole answer, and reaches the worker once or not at all

REFUSED = "refused"  # nothing of it reaches the worker

SURVIVED = "survived"  # no error of the gateway's own, no hang

# Fields the gateway may set or take out.
_ITS_OWN = ("vllm_xargs", "stream_options", "cache_salt", "kv_transfer_params")

_HINT = re.compile(rb',?"vllm_xargs":\{"seamark_boundaries":\[(?:-?[0-9]+,?|"[a-z0-9:,-]+",?)*\]\}')


@dataclass(frozen=True)
class Sent:
    """One well-framed request."""

    name: str  # its x-mock-id
    method: str
    target: str
    body: bytes


@dataclass(frozen=True)
class Case:
    """Bytes, and what they are."""

    number: int
    kind: str
    verdict: str
    pieces: Sequence[bytes]  # written one after the other
    requests: Sequence[Sent] = ()  # where they are well framed
    leaves: bool = False  # the client closes without waiting

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


def case(seed: int, number: int) -> Case:
    """The case with this number."""
    rng = random.Random(f"{seed}/{number}")
    name = name_of(seed, number)
    kind = rng.random()
    if kind < 0.5:
        return _well_framed(rng, number, [_request(rng, name)])
    if kind < 0.6:
        return _well_framed(rng, number, [_request(rng, f"{name}-{each}") for each in range(rng.randrange(2, 6))])
    if kind < 0.7:
        wrong, data = rng.choice(list(fuzz_framing.ambiguous(name).items()))
        return Case(number, wrong, REFUSED, cut(rng, data))
    if kind < 0.8:
        return Case(number, "odd", SURVIVED, cut(rng, fuzz_framing.odd(rng, name)))
    bases = (_request(rng, name)[1], fuzz_framing.odd(rng, name), *fuzz_framing.ambiguous(name).values())
    base = rng.choice(bases[:1] * 20 + bases)
    if kind < 0.93:
        return Case(number, "mutated", SURVIVED, cut(rng, fuzz_framing.mutated(rng, base)))
    if kind < 0.94:
        return _limited(rng, number, name)
    return Case(number, "half", SURVIVED, cut(rng, base[: rng.randrange(1, len(base) + 1)]), leaves=True)


def name_of(seed: int, number: int) -> str:
    """What the requests of a case are called, or begin with."""
    return f"fuzz-{seed}-{number}"


def cut(rng: random.Random, data: bytes) -> Sequence[bytes]:
    """The bytes as one, or in pieces that may end anywhere."""
    if rng.random() < 0.6 or len(data) < 2:
        return [data]
    at = sorted(rng.randrange(1, len(data)) for _ in range(rng.choice((1, 2, 8))))
    return [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]


def _well_framed(rng: random.Random, number: int, made: Sequence[tuple[Sent, bytes]]) -> Case:
    kind = "well framed" if len(made) == 1 else "pipelined"
    data = b"".join(data for _, data in made)
    return Case(number, kind, ANSWERED, cut(rng, data), [sent for sent, _ in made])


def _limited(rng: random.Random, number: int, name: str) -> Case:
    """What the settings just allow, or just not."""
    is_beyond = rng.random() < 0.5
    body, fields = at_a_limit(rng, is_beyond), {"content-type": "application/json", "x-mock-id": name}
    data = request("POST", "/v1/chat/completions", fields, body)
    if is_beyond:
        return Case(number, "beyond a limit", REFUSED, cut(rng, data))
    return Case(number, "at a limit", ANSWERED, cut(rng, data), [Sent(name, "POST", "/v1/chat/completions", body)])


def _request(rng: random.Random, name: str) -> tuple[Sent, bytes]:
    method, target = rng.choice(METHODS), rng.choice(PATHS)
    body = raw(rng) if method in ("POST", "PUT", "PATCH") or rng.random() < 0.1 else b""
    headers = {"content-type": "application/json", "x-mock-id": name}
    headers |= dict(rng.choice(HEADERS) for _ in range(rng.choice((0, 0, 1, 2, 4))))
    if "connection" in headers:
        headers["x-fuzz"] = "hop"
    elif rng.random() < 0.2:  # an offer that the gateway leaves alone; the body is the request's all the same
        headers |= {"connection": "keep-alive, upgrade", "upgrade": rng.choice(("h2c", "websocket"))}
    return Sent(name, method, target, body), request(method, target, headers, body)


def complaint(sent: Sent, seen: Seen) -> str:
    """How what arrived differs from what was sent; empty where it does not."""
    if seen.method.decode() != sent.method:
        return f"{sent.method} arrived as {seen.method!r}"
    if unquote_to_bytes(sent.target) != unquote_to_bytes(seen.target):
        return f"target {sent.target[:200]!r} arrived as {seen.target[:200]!r}"
    return "" if same_body(sent.body, seen.body) else f"the body arrived as {seen.body[:500]!r}"


def same_body(sent: bytes, seen: bytes) -> bool:
    """Whether a body is the same but for its encoding and for what the gateway may put into it."""
    sent, seen = _utf8(sent), _utf8(seen)
    if sent == seen or sent == _HINT.sub(b"", seen):
        return True
    try:
        return _without_own(sent) == _without_own(seen)
    except (ValueError, RecursionError):
        return False


def _utf8(raw: bytes) -> bytes:
    try:
        return raw.decode(json.detect_encoding(raw), "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeError:
        return raw


def _without_own(raw: bytes) -> Any:
    parsed = json.loads(raw, parse_constant=str, parse_int=str)
    if isinstance(parsed, dict):
        return {name: value for name, value in parsed.items() if name not in _ITS_OWN}
    return parsed


# Bodies, headers and targets with correct framing, each of which must get a whole answer.

PATHS = (
    *("/v1/chat/completions",) * 4,
    *("/v1/completions", "/v1/responses", "/v1/messages") * 2,
    *("/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/chat/completions/render"),
    *("/v1/models", "/v1/models/m", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/rerank", "/v1/"),
    *("/seamark/status", "/seamark/requests/x", "/seamark/requests/%00", "/seamark/", "/metrics", "/health", "/ready"),
    *("/", "//", "/v1", "/v1//chat/completions", "/v1/%2e%2e/metrics", "/v1/../metrics", "/v1/a%2f..%2f..%2fmetrics"),
    *("/v1/%zz", "/v1/%", "/v1/%c3%28", "/v1/%ff", "/v1/%00", "/v1/;x=1", "/v1/?a=%zz&b", "/v1/*", "/v1/%2e"),
    *("/v1/" + "x" * 3000, "/v1/?" + "q=1&" * 1000, "/V1/models", "/ui", "/docs"),
)

METHODS = (*("POST",) * 12, *("GET",) * 3, "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "PROPFIND")

HEADERS: tuple[tuple[str, str], ...] = (
    *(("content-type", "text/plain; charset=utf-16"), ("content-encoding", "gzip"), ("accept-encoding", "br, zstd")),
    *(("authorization", "Bearer \xff\xfe"), ("authorization", ""), ("x-api-key", "k" * 5000)),
    *(("x-request-id", "é" * 300), ("x-request-id", "a\tb"), ("x-request-id", ""), ("x-request-id", "../../etc")),
    *(("connection", "x-fuzz, host, content-length, keep-alive"), ("te", "trailers"), ("trailer", "x")),
    *(("upgrade", "h2c"), ("http2-settings", "AAMAAABkAAQAAP__"), ("expect", "100-continue"), ("expect", "nonsense")),
    *(("cookie", "a=b; " * 200), ("x-empty", ""), ("x-latin", "\x80\xff"), ("content-length-x", "5")),
    *(("x-forwarded-for", "1.2.3.4"), ("x-forwarded-proto", "ftp"), ("forwarded", "for=x"), ("range", "bytes=0-5,10-")),
    *(("if-none-match", "*"), ("max-forwards", "0"), ("proxy-connection", "keep-alive"), ("x-seamark-worker", "evil")),
)

TEXTS = ("Tide?", "", "é", "\ud800", "\udfff\ud800", "\x00", "<|im_start|>", "x" * 5000, "\U0001f600", "ı", "﷽" * 40)

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**64, 10**400, -(10**30), 0.1, 1e308, float("nan"), float("inf"), *TEXTS),
    *([], [[]], [None], {}, {"a": {}}, [{}], {"": ""}, ["a", 1, None, {}]),
)

FIELDS = (
    *("model", "messages", "tools", "tool_choice", "stream", "stream_options", "vllm_xargs", "cache_salt", "system"),
    *("input", "instructions", "prompt", "max_tokens", "temperature", "n", "logprobs", "response_format", "metadata"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
    *("previous_response_id", "prompt_cache_key", "truncate_prompt_tokens", "store", "reasoning", "thinking", "user"),
    *("mm_processor_kwargs", "functions", "kv_transfer_params", "priority", "request_id", "echo", "suffix", "seed"),
)

_MARKED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}

# Messages and tools of all APIs, of which some places are broken.
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "You pilot ships. " * 30},
    {"role": "developer", "content": [_MARKED, {"type": "text", "text": "Tide?"}]},
    {"role": "user", "content": "Tide?"},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, _MARKED]},
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "x"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]},
    {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}]},
    {"role": "tool", "content": "x", "tool_call_id": "c"},
)

TOOLS = (
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"name": "f", "input_schema": {}},
)

_HEAD = b'{"model":"m","messages":[{"role":"user","content":"x"}]'

CODECS = (*("utf-8",) * 10, "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252")


def value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say."""
    kind = rng.random()
    if depth > 3 or kind < 0.75:
        return rng.choice(ODD)
    if kind < 0.9:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*FIELDS, "type", "text", "role", "content")): value(rng, depth + 1) for _ in range(3)}


def broken(rng: random.Random, node: Any) -> Any:
    """The same with some of its places replaced by anything."""
    if rng.random() < 0.08:
        return value(rng)
    if isinstance(node, dict):
        return {name: broken(rng, inner) for name, inner in node.items()}
    if isinstance(node, list):
        return [broken(rng, inner) for inner in node if rng.random() < 0.9]
    return rng.choice(TEXTS) if isinstance(node, str) and rng.random() < 0.1 else node


def body(rng: random.Random) -> dict[str, Any]:
    """A request that would do for any of the APIs, with some fields broken."""
    messages = [broken(rng, message) for message in rng.choices(MESSAGES, k=rng.randrange(1, 7))]
    made: dict[str, Any] = {"model": "m", "messages": messages, "input": messages, "prompt": rng.choice(TEXTS)}
    made |= {"max_tokens": 4, "stream": rng.random() < 0.3}
    if rng.random() < 0.3:
        made["tools"] = [broken(rng, tool) for tool in rng.choices(TOOLS, k=rng.randrange(3))]
    if rng.random() < 0.3:
        made["vllm_xargs"] = {"seamark_boundaries": value(rng), "a": value(rng)}
    for _ in range(rng.choice((0, 0, 1, 2, 5))):
        made[rng.choice(FIELDS)] = value(rng)
    return made


def nested(rng: random.Random) -> bytes:
    """Deeper than any parser likes."""
    depth = rng.choice((50, 500, 990, 5_000, 100_000))
    deep = rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
    field = rng.choice((b"tools", b"metadata", b"vllm_xargs", b"messages"))
    return rng.choice((deep, _HEAD + b',"%b":%b}' % (field, deep), _HEAD.replace(b'"x"', deep) + b"}"))


def at_a_limit(rng: random.Random, beyond: bool) -> bytes:
    """A body that has as many values, elements or levels as the settings allow, or one more."""
    values, depth = (Settings.model_fields[name].default + beyond for name in ("max_json_values", "max_json_depth"))
    values -= 9  # with what opens behind the head
    filled = rng.choice(
        (
            b"[" + b",".join([b"{}"] * values) + b"]",
            b"[" + b",".join([b'{"a":[]}'] * (values // 3)) + b",[]" * (values % 3) + b"]",
            b"[" * (depth - 1) + b"]" * (depth - 1),
            b'{"a":' * (depth - 1) + b"1" + b"}" * (depth - 1),
        )
    )
    return _HEAD.replace(b'"x"', b'"{[:,"') + b',"metadata":' + filled + b"}"


def raw(rng: random.Random) -> bytes:
    """The bytes of a body."""
    kind = rng.random()
    if kind < 0.05:
        return rng.choice(
            (b"", b" ", b"null", b"0", b"[]", b'"x"', b"{", b"}", b"{}", b"\xff", b"\0", b"\xef\xbb\xbf{}")
        )
    if kind < 0.1:
        return nested(rng)
    if kind < 0.13:
        return _HEAD + b',"seed":' + b"9" * rng.choice((30, 4400, 90_000)) + b"}"
    text = json.dumps(body(rng), ensure_ascii=rng.random() < 0.7)
    if rng.random() < 0.1:  # keys that are there twice
        twice = {"messages": value(rng), "model": "m", "vllm_xargs": value(rng)}
        text = text[:-1] + ", " + json.dumps(twice)[1:]
    codec = rng.choice(CODECS)
    data = text.encode(codec, "surrogatepass" if codec.startswith("utf") else "replace")
    for _ in range(rng.choice((0, 0, 0, 1, 3, 20))):
        at = rng.randrange(len(data) + 1)
        put = rng.choice((b"", bytes([rng.randrange(256)]), b'"', b"{", b"\xc3", b","))
        data = data[:at] + put + data[at + rng.randrange(3) :]
    return data
