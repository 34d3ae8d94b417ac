"""Which requests may be answered again, and which answers are final."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.http.auth import ApiKey, KeyEntry
from proxy.pipeline.cacheable import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    LARGEST_JUDGED,
    MESSAGES,
    RESPONSES,
    Ending,
    digest,
    is_repeatable,
    may_keep,
)
from proxy.pipeline.request import ProxiedRequest, request_of


def asked(body: Any, path: str = CHAT, headers=(), of: ApiKey | None = None, query: bytes = b"") -> ProxiedRequest:
    scope = {"method": "POST", "path": path, "query_string": query, "headers": list(headers)}
    request = request_of(scope, json.dumps(body).encode(), "id", of)
    request.body.take(json.loads(request.body.raw), request.client, asks_usage=True)
    return request


GREEDY = {"model": "m", "temperature": 0}

SECRET = b"secret"


@pytest.mark.parametrize(
    ("body", "path", "repeatable"),
    [
        (GREEDY, CHAT, True),
        ({**GREEDY, "tools": [{"type": "function"}]}, RESPONSES, True),
        ({**GREEDY, "tools": [{"type": "web_search"}]}, CHAT, True),
        ({"input": "x"}, EMBEDDINGS, True),
        ({**GREEDY, "messages": [{"content": [{"image_url": {"url": "data:image/png;base64,AA"}}]}]}, CHAT, True),
        ({**GREEDY, "messages": [{"content": 'see "url": "http://a"'}]}, CHAT, True),
        ({}, EMBEDDINGS, False),
        ({"temperature": False}, CHAT, False),
        ({"seed": 3.0}, CHAT, False),
        ({"seed": True}, CHAT, False),
        ({"seed": 3}, MESSAGES, False),
        ({"seed": 3, "use_beam_search": "true"}, CHAT, False),
        ({"input": "x", "temperature": 0}, "/v1/audio/speech", False),
        ({**GREEDY, "previous_response_id": "resp_1"}, RESPONSES, False),
        ({**GREEDY, "background": True}, RESPONSES, False),
        ({**GREEDY, "tools": [{"type": "web_search"}]}, RESPONSES, False),
        ({**GREEDY, "input": [{"content": [{"type": "input_image", "image_url": "https://a/b"}]}]}, RESPONSES, False),
        ({**GREEDY, "messages": [{"content": [{"source": {"type": "url", "url": "https://a"}}]}]}, MESSAGES, False),
    ],
)
def test_a_request_is_repeatable_if_it_cannot_come_out_otherwise(body, path, repeatable):
    assert is_repeatable(asked(body, path)) is repeatable


def key(name: str, salt: str) -> ApiKey:
    return ApiKey(name, KeyEntry(sha256="0" * 64), salt)


def test_requests_are_told_apart_by_all_that_answers_depend_on():
    ann, bob, cleo = key("ann", "a"), key("bob", "team"), key("cleo", "team")
    stream = {**GREEDY, "stream": True}
    apart = [b"accept", b"authorization", b"origin", b"cookie", b"accept-encoding"]
    requests = [
        asked(GREEDY),
        asked({**GREEDY, "user": "x"}),
        asked(GREEDY, COMPLETIONS),
        asked(GREEDY, query=b"a=b"),
        asked(GREEDY, of=ann),
        asked(GREEDY, of=bob),
        asked(GREEDY, RESPONSES),
        asked(GREEDY, RESPONSES, of=bob),
        asked(GREEDY, RESPONSES, of=cleo),  # only the key that asked can continue a response
        *(asked(GREEDY, headers=[(name, b"ab")]) for name in apart),
        asked(GREEDY, headers=[(b"accept", b"a"), (b"accept", b"b")]),
        asked(GREEDY, headers=[(b"accept", b"acookieb")]),
        asked(GREEDY, headers=[(b"accept", b"a"), (b"cookie", b"b")]),
        asked(stream),  # the gateway asks for usage and takes it out again
        asked({**stream, "stream_options": {"include_usage": True}}),
    ]
    digests = [digest(request, SECRET) for request in requests]
    assert len(set(digests)) == len(requests)
    assert digest(asked(GREEDY, of=bob), SECRET) == digest(asked(GREEDY, of=cleo), SECRET)
    assert digest(asked(GREEDY, headers=[(b"user-agent", b"x")]), SECRET) == digests[0]
    assert digest(asked(GREEDY), b"another") != digests[0]


@pytest.mark.parametrize(
    ("headers", "kept"),
    [
        ([(b"content-type", b"a"), (b"vary", b"Origin, Accept-Encoding"), (b"cache-control", b"max-age=0")], True),
        ([(b"vary", b"origin"), (b"vary", b"user-agent")], False),
        *(([(b"cache-control", b"max-age=9, " + word)], False) for word in (b"private", b"no-cache", b"No-Store")),
        ([(b"set-cookie", b"a=b"), (b"content-type", b"a")], False),
    ],
)
def test_an_answer_says_whether_it_may_be_shared(headers, kept):
    assert may_keep(headers) is kept


def is_final(path: str, asked: Any, is_stream: bool, body: bytes, at_once: int = 2**30) -> bool:
    ending = Ending(path, asked, is_stream)
    for at in range(0, len(body), at_once):
        ending.see(body[at : at + at_once])
    return ending.is_final


def choice(reason: str | None, index: int = 0) -> dict[str, Any]:
    return {"index": index, "finish_reason": reason}


def sse(*data: Any, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in data) + end


@pytest.mark.parametrize(
    ("path", "body", "answer", "final"),
    [
        (CHAT, {}, {"choices": [choice("abort")]}, False),
        (CHAT, {"n": 2}, {"choices": [choice("stop")]}, False),
        (CHAT, {"n": 2}, {"choices": [choice("stop"), choice("length", 1)]}, True),
        (COMPLETIONS, {"prompt": ["a", "b"]}, {"choices": [choice("stop")]}, False),
        (MESSAGES, {}, {"stop_reason": "tool_use"}, True),
        (MESSAGES, {}, {"stop_reason": None}, False),
        (RESPONSES, {}, {"status": "completed"}, True),
        (RESPONSES, {}, {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, True),
        (RESPONSES, {}, {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, False),
        (EMBEDDINGS, {}, {"data": [{}]}, True),
        (EMBEDDINGS, {}, {"error": {}}, False),
    ],
)
def test_a_whole_answer_is_final_if_each_choice_ended_by_itself(path, body, answer, final):
    raw = json.dumps(answer).encode()
    assert is_final(path, body, False, raw) is is_final(path, body, False, raw, 7) is final


STOP = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}


@pytest.mark.parametrize(
    ("path", "body", "stream", "final"),
    [
        (CHAT, {}, sse({"choices": [choice(None)]}, {"choices": [choice("stop")]}), True),
        (CHAT, {}, sse({"choices": [choice(None)]}, {"choices": [choice("stop")]}, end=b""), False),
        (CHAT, {}, sse({"choices": [choice("stop")]}, {"error": {"message": "no"}}), False),
        (MESSAGES, {}, sse(STOP, {"type": "message_stop"}, end=b""), True),
        (MESSAGES, {}, sse(STOP, end=b""), False),
        (RESPONSES, {}, sse({"type": "response.completed", "response": {"status": "completed"}}, end=b""), True),
        (RESPONSES, {}, sse({"type": "response.created", "response": {"status": "in_progress"}}, end=b""), False),
    ],
)
def test_a_stream_is_final_if_it_came_to_its_end(path, body, stream, final):
    assert is_final(path, body, True, stream) is is_final(path, body, True, stream, 7) is final


# What a worker may send in place of an event, and of a whole answer.
ODD_EVENTS = [
    {"finish_reason": "stop"},
    {"choices": [{"index": [], "finish_reason": "stop"}]},
    {"type": "message_delta", "stop_reason": "end_turn"},
]

ODD = [
    {"choices": [None], "finish_reason": "stop"},
    {"choices": [{"index": 0, "finish_reason": ["stop"]}]},
    {"choices": {"index": 0, "finish_reason": "stop"}},
    {"type": "message_delta", "delta": {"stop_reason": ["end_turn"]}, "response": []},
    {"stop_reason": {}, "status": [], "data": 0},
    "finish_reason",
    None,
    7,
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS])
def test_what_an_api_does_not_say_is_no_final_answer(path):
    for data in ODD:
        assert not is_final(path, {"n": 1}, False, json.dumps(data).encode()), data
    for data in ODD + ODD_EVENTS:
        for end in (b"", b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n', b"data: {\n\n"):
            assert not is_final(path, {"n": 1}, True, sse(data, end=end)), (data, end)


def test_what_is_too_long_to_be_parsed_in_a_moment_is_no_final_answer_unless_it_is_a_stream():
    answer = json.dumps({"choices": [choice("stop")], "pad": ""}).encode()
    for size, final in ((LARGEST_JUDGED, True), (LARGEST_JUDGED + 1, False)):
        assert is_final(CHAT, {}, False, answer[:-2] + b"x" * (size - len(answer)) + b'"}', 2**16) is final
    assert not is_final(CHAT, {}, True, sse({"choices": [choice("stop")], "pad": "x" * 2 * LARGEST_JUDGED}), 2**16)
    words = sse(*({"choices": [choice(None)], "pad": "x" * 2**16} for _ in range(40)), {"choices": [choice("stop")]})
    assert len(words) > 2 * LARGEST_JUDGED and is_final(CHAT, {}, True, words, 2**16)
