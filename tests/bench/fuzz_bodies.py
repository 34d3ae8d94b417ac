"""Random requests with correct framing: odd bodies, headers and targets, each of which must get a whole answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from proxy.settings import Settings

PATHS = (
    *("/v1/chat/completions",) * 4,
    *("/v1/completions", "/v1/responses", "/v1/messages") * 2,
    *("/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/chat/completions/render"),
    *("/v1/models", "/v1/models/m", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/rerank", "/v1/"),
    *("/seamark/status", "/seamark/requests/x", "/seamark/requests/%00", "/seamark/", "/metrics", "/health", "/ready"),
    *("/", "//", "/v1", "/v1//chat/completions", "/v1/%2e%2e/metrics", "/v1/../metrics", "/v1/a%2f..%2f..%2fmetrics"),
    *("/v1/%zz", "/v1/%", "/v1/%c3%28", "/v1/%ff", "/v1/%00", "/v1/a b", "/v1/é", "/v1/;x=1", "/v1/?a=%zz&b", "/v1/#x"),
    *("/v1/*", "/v1/" + "x" * 3000, "/v1/?" + "q=1&" * 1000, "/v1/%2e", "/V1/models", "/ui", "*", "/docs"),
)

METHODS = (*("POST",) * 12, *("GET",) * 3, "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "PROPFIND")

HEADERS: tuple[tuple[str, str], ...] = (
    ("content-type", "application/json"),
    ("content-type", "text/plain; charset=utf-16"),
    ("content-encoding", "gzip"),
    ("accept-encoding", "gzip, br, zstd;q=0.1"),
    ("authorization", "Bearer \xff\xfe"),
    ("authorization", ""),
    ("x-api-key", "k" * 5000),
    ("x-request-id", "é" * 300),
    ("x-request-id", "a\tb"),
    ("x-request-id", ""),
    ("x-request-id", "../../etc"),
    ("connection", "x-fuzz, host, content-length, x-mock-id, keep-alive"),
    ("te", "trailers"),
    ("trailer", "x"),
    ("upgrade", "h2c"),
    ("http2-settings", "AAMAAABkAAQAAP__"),
    ("expect", "100-continue"),
    ("expect", "nonsense"),
    ("cookie", "a=b; " * 200),
    ("x-empty", ""),
    ("x-latin", "\x80\xff"),
    ("x-forwarded-for", "1.2.3.4"),
    ("x-forwarded-proto", "ftp"),
    ("forwarded", "for=x"),
    ("range", "bytes=0-5,10-"),
    ("if-none-match", "*"),
    ("max-forwards", "0"),
    ("proxy-connection", "keep-alive"),
    ("content-length-x", "5"),
    ("anthropic-version", "2023-06-01"),
    ("x-seamark-worker", "evil"),
)

TEXTS = ("Tide?", "", "é", "\ud800", "\udfff\ud800", "\x00", "<|im_start|>", "x" * 5000, "\U0001f600", "ı", "﷽" * 40)

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**64,
        10**400,
        -(10**30),
        0.1,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "text",
    ),
    *([], [[]], [None], {}, {"a": {}}, [{}], {"": ""}, "\ud800", ["a", 1, None, {}]),
)

FIELDS = (
    *("model", "messages", "tools", "tool_choice", "stream", "stream_options", "vllm_xargs", "cache_salt", "system"),
    *("input", "instructions", "prompt", "max_tokens", "temperature", "n", "logprobs", "response_format", "metadata"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
    *("previous_response_id", "prompt_cache_key", "truncate_prompt_tokens", "store", "reasoning", "thinking", "user"),
    *("mm_processor_kwargs", "functions", "kv_transfer_params", "priority", "request_id", "echo", "suffix", "seed"),
)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say."""
    kind = rng.random()
    if depth > 3 or kind < 0.6:
        return rng.choice(ODD)
    if kind < 0.75:
        return rng.choice(TEXTS)
    if kind < 0.9:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*FIELDS, "type", "text", "role", "content")): value(rng, depth + 1) for _ in range(3)}


def part(rng: random.Random) -> Any:
    """A content part of some API, often a broken one."""
    text = rng.choice(TEXTS)
    parts = (
        {"type": "text", "text": text},
        {"type": "text", "text": text, "cache_control": rng.choice(({"type": "ephemeral"}, value(rng)))},
        {"type": "input_text", "text": text},
        {"type": "image_url", "image_url": rng.choice(({"url": "data:image/png;base64,AAAA"}, value(rng)))},
        {"type": "tool_use", "id": value(rng), "name": text, "input": value(rng)},
        {"type": "tool_result", "tool_use_id": "x", "content": value(rng)},
        {"type": value(rng), "text": value(rng)},
        value(rng),
    )
    return rng.choice(parts)


def message(rng: random.Random) -> Any:
    """A message, often a broken one."""
    if rng.random() < 0.1:
        return value(rng)
    made: dict[str, Any] = {"role": rng.choice(("system", "user", "assistant", "tool", "developer", value(rng)))}
    made["content"] = rng.choice((rng.choice(TEXTS), [part(rng) for _ in range(rng.randrange(4))], value(rng)))
    if rng.random() < 0.2:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": rng.choice(("{}", "{", 7))}}
        made["tool_calls"] = rng.choice(([call], value(rng)))
    return made


def tool(rng: random.Random) -> Any:
    """A tool, often a broken one."""
    function = {"name": rng.choice(TEXTS), "parameters": rng.choice(({"type": "object"}, value(rng)))}
    return rng.choice(({"type": "function", "function": function}, {"name": "f", "input_schema": {}}, value(rng)))


def body(rng: random.Random) -> dict[str, Any]:
    """A request that would do for any of the APIs, with some fields broken."""
    messages = [message(rng) for _ in range(rng.randrange(1, 6))]
    if rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": "You pilot ships. " * rng.randrange(60)})
    made: dict[str, Any] = {"model": "m", "messages": messages, "input": messages, "prompt": rng.choice(TEXTS)}
    made |= {"max_tokens": 4, "stream": rng.random() < 0.3}
    if rng.random() < 0.3:
        made["tools"] = [tool(rng) for _ in range(rng.randrange(3))]
    if rng.random() < 0.3:
        made["vllm_xargs"] = {"seamark_boundaries": value(rng), "a": value(rng)}
    for _ in range(rng.choice((0, 0, 1, 2, 5))):
        made[rng.choice(FIELDS)] = value(rng)
    return made


def nested(rng: random.Random) -> bytes:
    """Deeper than any parser likes."""
    depth = rng.choice((50, 500, 990, 5_000, 100_000))
    opened, closed = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    deep = opened * depth + (b"1" if opened != b"[" else b"") + closed * depth
    where = rng.choice(
        (
            b"%b",
            b'{"model":"m","messages":%b}',
            b'{"model":"m","messages":[{"role":"user","content":%b}]}',
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":%b}',
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":%b}',
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"vllm_xargs":%b}',
        )
    )
    return where.replace(b"%b", deep)


def at_a_limit(rng: random.Random, beyond: bool) -> bytes:
    """A body that has as many values, elements or levels as the settings allow, or one more."""
    values, depth = (Settings.model_fields[name].default + beyond for name in ("max_json_values", "max_json_depth"))
    head = (
        b'{"model":"m","messages":[{"role":"user","content":"{[:,"}],"metadata":'  # 9 values with what opens behind it
    )
    return rng.choice(
        (
            head + b"[" + b",".join([b"{}"] * (values - 9)) + b"]}",
            head + b"[" + b",".join([b'{"a":[]}'] * ((values - 9) // 3)) + b",[]" * ((values - 9) % 3) + b"]}",
            head + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}",
            head + b'{"a":' * (depth - 1) + b"1" + b"}" * (depth - 1) + b"}",
        )
    )


def raw(rng: random.Random) -> bytes:
    """The bytes of a body."""
    kind = rng.random()
    if kind < 0.05:
        return rng.choice(
            (b"", b" ", b"null", b"0", b"[]", b'"x"', b"{", b"}", b"{}", b"\xff", b"\x00", b"\xef\xbb\xbf{}")
        )
    if kind < 0.1:
        return nested(rng)
    if kind < 0.13:
        return (
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"seed":'
            + b"9" * rng.choice((30, 4400, 90_000))
            + b"}"
        )
    text = json.dumps(body(rng), ensure_ascii=rng.random() < 0.7)
    if rng.random() < 0.1:  # duplicate keys, within and without
        text = (
            text[:-1]
            + f', "messages": {json.dumps(value(rng))}, "model": "m", "vllm_xargs": {json.dumps(value(rng))}}}'
        )
    codecs: list[Callable[[str], bytes]] = [
        *[lambda it: it.encode("utf-8", "surrogatepass")] * 10,
        lambda it: b"\xef\xbb\xbf" + it.encode("utf-8", "surrogatepass"),
        lambda it: it.encode("utf-16", "surrogatepass"),
        lambda it: it.encode("utf-16-le", "surrogatepass"),
        lambda it: it.encode("utf-32", "surrogatepass"),
        lambda it: it.encode("latin-1", "replace"),
        lambda it: it.encode("cp1252", "replace"),
    ]
    data = rng.choice(codecs)(text)
    for _ in range(rng.choice((0, 0, 0, 1, 3, 20))):
        at = rng.randrange(len(data) + 1)
        data = (
            data[:at]
            + rng.choice((b"", bytes([rng.randrange(256)]), b'"', b"{", b"\xc3", b","))
            + data[at + rng.randrange(3) :]
        )
    return data
