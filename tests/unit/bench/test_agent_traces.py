"""`tests.bench.agent_traces`: what it makes of recorded requests and of runs."""

from __future__ import annotations

import gzip
import json

from proxy.bench.harness.servers import MODEL_NAME
from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from tests.bench import agent_traces


def replayed(ids, before, delivered, reason="hit", plain=0, number=0):
    request = agent_traces.Recorded(number, "a/A1", CHAT, {}, {})
    told = {"delivered": delivered, "reason": reason}
    done = agent_traces.judged(request, ids, before, plain, told)
    before.append((done, ids))
    return done


def test_a_divergence_is_first_where_none_was_and_known_from_then_on():
    before, base = [], list(range(1000))
    assert not replayed(base, before, 0, "cold", number=1).first
    second = replayed([*base[:500], *range(5000, 5500)], before, 0, number=2)
    assert second.first and second.nearest == 1 and second.oracle == 496 and second.lost == 496
    assert second.reason_wrong  # it says hit and lost everything
    third = replayed([*base[:500], *range(7000, 7500)], before, 496, number=3)
    assert not third.first and not third.lost and not third.reason_wrong
    nothing = replayed([*range(7000, 7100)], before, 0, "cold", number=4)
    assert not nothing.first and not nothing.oracle
    assert not replayed([*base[:-4], *range(9000, 9500)], before, 992).first  # it continues the first one


def test_less_than_from_vllm_alone_is_noticed():
    before, base = [], list(range(1000))
    replayed(base, before, 0, "cold")
    one = replayed([*base[:-4], *range(5000, 5500)], before, 512, "evicted", plain=768)
    assert one.below_plain and not one.reason_wrong
    trace = agent_traces.Trace("a", [one])
    assert trace.share() == 512 / 992 and trace.share(plain=True) == 768 / 992
    assert trace.complaints == ["51.6% delivered", "#0 below vLLM alone"]


def test_a_recorded_request_asks_for_one_token_and_brings_no_key(tmp_path):
    headers = [["Authorization", "Bearer k"], ["content-length", "9"], ["x-session-id", "s"]]
    entry = {"kind": "request", "n": 7, "label": "a/A1", "method": "POST", "headers": headers}
    lines = [
        {**entry, "url": MESSAGES + "?beta=true", "body": '{"model": "x", "max_tokens": 900}'},
        {**entry, "url": RESPONSES, "body": '{"model": "x"}'},
        {**entry, "url": "/v1/models", "method": "GET", "body": ""},
    ]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    message, response = agent_traces.recorded(path)
    assert message.body == {"model": MODEL_NAME, "max_tokens": 1}
    assert response.body == {"model": MODEL_NAME, "max_output_tokens": 1}
    assert message.headers == {"x-session-id": "s"}
