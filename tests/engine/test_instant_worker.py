"""`tests/harness/instant_worker.py`: to a client and to the gateway it is a patched vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness.servers import MODEL_NAME, Servers
from proxy.chat.chat import CHAT
from proxy.chat.usage import usage_of
from tests.bench.agent_turns import SHAPES, body_of, steps
from tests.harness.instant_worker import ASKED, CACHED, FRAMES_FIELD, OURS, instant_worker

CHAT_BODY = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "When is high tide?"}]}


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Servers(tmp_path_factory.mktemp("instant")) as servers:
        worker = instant_worker(servers, model)
        worker.wait_until_ready()
        yield worker.url


def post(url: str, body, **headers: str) -> httpx.Response:
    answer = httpx.post(url, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def rendered(url: str, path: str, body) -> list[int]:
    """Token ids, asked for as a benchmark does."""
    return post(f"{url}{path}/render", body, **{OURS.decode(): "1"}).json()["token_ids"]


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[2]], ids=lambda shape: shape.name)
def test_an_answer_reports_the_prompt_that_was_prepared(url, shape):
    body = body_of(shape, steps(3, seed=1))
    ids = rendered(url, shape.path, body)
    answer = post(url + shape.path, body, **{CACHED.decode(): "160"})
    assert usage_of(answer.json()) == (len(ids), 160, 1)


def test_without_one_it_renders_the_chat_itself(url):
    ids = rendered(url, CHAT, CHAT_BODY)
    rendered(url, CHAT, {**CHAT_BODY, "messages": [{"role": "user", "content": "Another prompt, and a longer one."}]})
    assert usage_of(post(url + CHAT, CHAT_BODY).json()) == (len(ids), 0, 1)


def test_hints_are_resolved_and_reported(url):
    ids = rendered(url, CHAT, CHAT_BODY)
    opener = ",".join(map(str, ids[:2]))
    hint = {"vllm_xargs": {"seamark_boundaries": [3, -2, f"last:{opener}"]}}
    answer = post(url + CHAT, {**CHAT_BODY, **hint}, **{"x-request-id": "mine", "x-seamark-outcome": "1"})
    assert answer.headers["x-seamark-outcome"] == f"cold,0,0,3:{len(ids) - 2}:2"
    assert ["mine", 0, [3, len(ids) - 2, 2]] in httpx.get(url + "/seamark/outcomes").json()["resolved"]


def test_it_counts_what_others_ask(url):
    before = httpx.get(url + ASKED).json()
    rendered(url, CHAT, CHAT_BODY)
    post(f"{url}{CHAT}/render", CHAT_BODY)
    post(f"{url}/tokenize", CHAT_BODY)
    after = httpx.get(url + ASKED).json()
    grown = {path: count - before.get(path, 0) for path, count in after.items() if count != before.get(path)}
    assert grown == {f"{CHAT}/render": 1, "/tokenize": 1}


def test_a_stream_has_the_frames_that_were_asked_for(url):
    answer = post(url + CHAT, {**CHAT_BODY, "stream": True, FRAMES_FIELD: 3})
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and len(events) == 6


def test_its_metrics_are_those_of_a_patched_worker(url):
    assert 'seamark_engine_info{block_size="384",match_unit="16"' in httpx.get(url + "/metrics").text
