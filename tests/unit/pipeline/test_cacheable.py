"""Which requests may be answered again, and which answers are final."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.http.auth import ApiKey
from proxy.pipeline.cacheable import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    LARGEST_JUDGED,
    MESSAGES,
    RESPONSES,
    Ending,
    is_repeatable,
)
from proxy.pipeline.request import ProxiedRequest, request_of


def asked(body: Any, path: str = CHAT, headers=(), of: ApiKey | None = None, query: bytes = b"") -> ProxiedRequest:
    scope = {"method": "POST", "path": path, "query_string": query, "headers": list(headers)}
    request = request_of(scope, json.dumps(body).encode(), "id", of)
    request.body.take(json.loads(request.body.raw), request.client, asks_usage=True)
    return request


GREEDY = {"model": "m", "temperature": 0}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (GREEDY, CHAT),
        ({**GREEDY, "temperature": 0.0}, MESSAGES),
        ({"temperature": 1, "seed": 3}, COMPLETIONS),
        ({"seed": 0, "n": 2}, CHAT),
        ({"seed": 3, "use_beam_search": False}, RESPONSES),
        ({**GREEDY, "tools": [{"type": "function"}]}, RESPONSES),
        ({**GREEDY, "tools": "none"}, RESPONSES),
        ({**GREEDY, "tools": [{"type": "web_search"}]}, CHAT),
        ({**GREEDY, "background": False}, RESPONSES),
        ({"seed": 3, "use_beam_search": None}, CHAT),
        ({"input": "x"}, EMBEDDINGS),
        ({**GREEDY, "messages": [{"content": [{"image_url": {"url": "data:image/png;base64,AA"}}]}]}, CHAT),
        ({**GREEDY, "messages": [{"content": 'see "url": "http://a"'}]}, CHAT),
    ],
)
def test_a_deterministic_request_is_repeatable(body, path):
    assert is_repeatable(asked(body, path))


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"model": "m"}, CHAT),
        ({}, EMBEDDINGS),
        ({"temperature": "0"}, CHAT),
        ({"temperature": False}, CHAT),
        ({"temperature": 0.1}, CHAT),
        ({"seed": 3.0}, CHAT),
        ({"seed": 3, "use_beam_search": "perhaps"}, CHAT),
        ({**GREEDY, "tools": [{"type": "function"}, 7]}, RESPONSES),
        ({"seed": True}, CHAT),
        ({"seed": -1}, CHAT),
        ({"temperature": 1, "seed": -1.0}, COMPLETIONS),
        ({"seed": "-1"}, RESPONSES),
        ({"seed": 3}, MESSAGES),
        ({"seed": 3, "use_beam_search": "true"}, CHAT),
        ({"input": "x", "temperature": 0}, "/v1/audio/speech"),
        ({**GREEDY, "previous_response_id": "resp_1"}, RESPONSES),
        ({**GREEDY, "background": True}, RESPONSES),
        ({**GREEDY, "tools": [{"type": "web_search"}]}, RESPONSES),
        ({**GREEDY, "input": [{"content": [{"type": "input_image", "image_url": "https://a/b"}]}]}, RESPONSES),
        ({**GREEDY, "messages": [{"content": [{"source": {"type": "url", "url": "https://a"}}]}]}, MESSAGES),
    ],
)
def test_one_that_may_come_out_otherwise_is_not(body, path):
    assert not is_repeatable(asked(body, path))


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
        (CHAT, {}, {"choices": [choice("stop")]}, True),
        (CHAT, {}, {"choices": [choice("tool_calls")]}, True),
        (CHAT, {}, {"choices": [choice("abort")]}, False),
        (CHAT, {}, {"choices": [choice(None)]}, False),
        (CHAT, {}, {"choices": []}, False),
        (CHAT, {}, [], False),
        (CHAT, {"n": 2}, {"choices": [choice("stop")]}, False),
        (CHAT, {"n": 2}, {"choices": [choice("stop"), choice("length", 1)]}, True),
        (COMPLETIONS, {"prompt": ["a", "b"]}, {"choices": [choice("stop")]}, False),
        (COMPLETIONS, {"prompt": [1, 2]}, {"choices": [choice("stop")]}, True),
        (MESSAGES, {}, {"stop_reason": "tool_use"}, True),
        (MESSAGES, {}, {"stop_reason": None}, False),
        (RESPONSES, {}, {"status": "completed"}, True),
        (RESPONSES, {}, {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, True),
        (RESPONSES, {}, {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, False),
        (RESPONSES, {}, {"status": "failed"}, False),
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
        (CHAT, {}, sse({"choices": [choice(None)]}), False),
        (CHAT, {}, sse({"choices": [choice("abort")]}), False),
        (CHAT, {"n": 2}, sse({"choices": [choice("stop")]}), False),
        (CHAT, {}, sse({"choices": [choice("stop")]}, {"error": {"message": "no"}}), False),
        (CHAT, {}, b"", False),
        (MESSAGES, {}, sse(STOP, {"type": "message_stop"}, end=b""), True),
        (MESSAGES, {}, sse(STOP, end=b""), False),
        (RESPONSES, {}, sse({"type": "response.completed", "response": {"status": "completed"}}, end=b""), True),
        (RESPONSES, {}, sse({"type": "response.completed", "response": {"status": "completed"}}), True),
        (RESPONSES, {}, sse({"type": "response.created", "response": {"status": "in_progress"}}, end=b""), False),
    ],
)
def test_a_stream_is_final_if_it_came_to_its_end(path, body, stream, final):
    assert is_final(path, body, True, stream) is is_final(path, body, True, stream, 7) is final


# What a worker may send in place of an event, and of a whole answer.
ODD_EVENTS = [
    {"finish_reason": "stop"},
    {"choices": [{"finish_reason": "stop"}]},
    {"choices": [{"index": [], "finish_reason": "stop"}]},
    {"choices": [{"index": 0, "finish_reason": "stop"}, 7], "finish_reason": "stop"},
    {"type": "message_delta", "stop_reason": "end_turn"},
]

ODD = [
    {"choices": None},
    {"choices": [None], "finish_reason": "stop"},
    {"choices": [{"index": 0, "finish_reason": ["stop"]}]},
    {"choices": {"index": 0, "finish_reason": "stop"}},
    {"type": "message_delta", "delta": {"stop_reason": ["end_turn"]}, "response": []},
    {"stop_reason": {}, "status": [], "data": 0},
    [{"finish_reason": "stop"}],
    "finish_reason",
    None,
    7,
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS])
@pytest.mark.parametrize("data", ODD + ODD_EVENTS)
@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n', b"data: {\n\n"])
def test_odd_events_are_no_final_answer(path, data, end):
    assert not is_final(path, {"n": 1}, True, sse(data, end=end))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS])
@pytest.mark.parametrize("data", ODD)
def test_an_odd_whole_answer_is_no_final_one(path, data):
    assert not is_final(path, {"n": 1}, False, json.dumps(data).encode())


def test_what_is_too_long_to_be_parsed_in_a_moment_is_no_final_answer_unless_it_is_a_stream():
    long = {"choices": [choice("stop")], "pad": "x" * 2 * LARGEST_JUDGED}
    assert not is_final(CHAT, {}, False, json.dumps(long).encode(), 2**16)
    assert not is_final(CHAT, {}, True, sse(long), 2**16)
    words = sse(*({"choices": [choice(None)], "pad": "x" * 2**16} for _ in range(40)), {"choices": [choice("stop")]})
    assert len(words) > 2 * LARGEST_JUDGED and is_final(CHAT, {}, True, words, 2**16)


def test_up_to_a_mebibyte_is_parsed():
    for more, final in ((0, True), (1, False)):
        answer = json.dumps({"choices": [choice("stop")], "pad": ""}).encode()
        whole = answer[:-2] + b"x" * (2**20 + more - len(answer)) + b'"}'
        assert len(whole) == 2**20 + more
        assert is_final(CHAT, {}, False, whole, 2**16) is final
