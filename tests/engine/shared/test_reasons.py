"""The table of reasons: each provoked on a real engine, and told by label, header and explanation alike.

`unpatched` is in tests/engine/shared/test_failures.py, beside the engine that it ends.
"""

from __future__ import annotations

import random
import uuid

import httpx
import pytest

from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from proxy.bench.stories import UNIT
from tests.harness.changed_requests import changed_requests
from tests.harness.engines import SharedServers
from tests.harness.waiting import wait_for

CHAT = "/v1/chat/completions"

LONG = "You pilot ships into the harbour, and you name the tide before you name the berth. " * 6


@pytest.fixture
def new() -> str:
    """A system prompt nobody sent before."""
    return f"{uuid.uuid4().hex} {LONG}"


def ask(gateway: Server, system: str | None, question: str, path: str = CHAT, **fields) -> httpx.Response:
    messages = [{"role": "system", "content": system}] if system else []
    body = {"model": MODEL_NAME, "messages": [*messages, {"role": "user", "content": question}], "max_tokens": 1}
    answer = httpx.post(gateway.url + path, json={**body, **fields}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def explained(gateway: Server, answer: httpx.Response) -> dict:
    told = httpx.get(f"{gateway.url}/seamark/requests/{answer.headers['x-request-id']}").json()
    assert told["reason"] == answer.headers["x-seamark-reason"]
    return told


def test_cold_then_hit(servers: SharedServers, new):
    assert explained(servers.gateway, ask(servers.gateway, new, "High tide?"))["reason"] == "cold"
    told = explained(servers.gateway, ask(servers.gateway, new, "And low?"))
    assert told["reason"] == "hit"
    assert told["shareable"] == told["predicted"] == told["delivered"] > 64
    # Nothing stands between the system prompt's end and the question.
    assert [boundary["kind"] for boundary in told["boundaries"]] == ["system", "turn"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_says_of_a_response_is_known(servers: SharedServers, new, stream):
    body = {"model": MODEL_NAME, "instructions": new, "max_output_tokens": 16, "stream": stream}
    for question, reasons in (("High tide?", {"cold", "prefix_changed"}), ("And low?", {"hit"})):  # by what came before
        answer = httpx.post(servers.gateway.url + "/v1/responses", json={**body, "input": question}, timeout=120)
        assert answer.status_code == 200 and "resp_" in answer.text
        told = in_the_end(servers.gateway, answer)
        assert told["reason"] in reasons and all(told["positions"])
        assert told["positions"][0] > 64  # behind the instructions


def in_the_end(gateway: Server, answer: httpx.Response) -> dict:
    """The explanation of a stream comes when its engine's events do."""
    url = f"{gateway.url}/seamark/requests/{answer.headers['x-request-id']}"
    wait_for(lambda: httpx.get(url).json().get("reason") is not None)
    return httpx.get(url).json()


def test_below_unit(servers: SharedServers):
    assert explained(servers.gateway, ask(servers.gateway, None, "?"))["reason"] == "below_unit"


def test_no_boundary(servers: SharedServers):
    body = {"messages": [{"role": "assistant", "content": "Only the model has spoken. " * 20}]}
    assert explained(servers.gateway, ask(servers.gateway, None, "", **body))["reason"] == "no_boundary"


def test_salt(servers: SharedServers, new):
    ask(servers.gateway, new, "High tide?", cache_salt="one tenant")
    told = explained(servers.gateway, ask(servers.gateway, new, "High tide?", cache_salt="another"))
    assert told["reason"] == "salt" and told["delivered"] == 0


def test_evicted(servers: SharedServers, new):
    new = new * 8  # so long that its state is worth writing, however slow the engine's steps were
    ask(servers.tight_gateway, new, "High tide?")
    for _ in range(40):  # 64 blocks of 384 tokens, and states hold half of them
        ask(servers.tight_gateway, f"{uuid.uuid4().hex} {LONG * 4}", "High tide?")
    assert explained(servers.tight_gateway, ask(servers.tight_gateway, new, "And low?"))["reason"] == "evicted"


def test_hint_ignored(servers: SharedServers, new):
    """Prompt logprobs want every token computed, whatever the cache holds: only the engine knows."""
    ask(servers.gateway, new, "High tide?")
    told = explained(servers.gateway, ask(servers.gateway, new, "And low?", prompt_logprobs=1))
    assert told["reason"] == "hint_ignored" and told["predicted"] > 64 and told["delivered"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_never_kept_and_what_was_not_looked_up_is_not_evicted(servers: SharedServers, new, stream):
    ids = random.Random(new).sample(range(300, 3000), 200)  # nothing tells that their last one is the only new one
    unlike = {"logprobs": 1, "echo": True}  # prompt logprobs by another name

    def reasons(*prompts: object, **fields: object) -> list[str]:
        bodies = [{"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, **fields} for prompt in prompts]
        url = servers.gateway.url + "/v1/completions"
        answers = [httpx.post(url, json=body, timeout=120).raise_for_status() for body in bodies]
        return [in_the_end(servers.gateway, answer)["reason"] for answer in answers]

    usage = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    first, second, third = reasons(*([*ids, end] for end in range(3)), **usage)
    # What other tests have sent decides whether a first one is expected to be left at its end.
    assert first == "cold" and second in ("no_boundary", "hit") and third == "hit"
    prompts = (f"{new} High?", f"{new} Low?", [*ids, 3], f"{new} Flood?")
    assert reasons(*prompts, **unlike, **usage) == ["hint_ignored"] * 4


def test_another_worker_has_more(servers: SharedServers, fleet: Servers, new):
    gateway = fleet.gateway(servers.seamark, servers.tight, flags=("--max-inflight", "1"))
    gateway.wait_until_ready("/ready", seconds=30)
    first = ask(gateway, new, "High tide?")
    holder = first.headers["x-seamark-worker"]
    # A long answer takes the holder's only place, so the next request has to go elsewhere.
    body = {"model": MODEL_NAME, "prompt": "Tide", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=120) as client:
        for _ in range(8):
            with client.stream("POST", gateway.url + "/v1/completions", json=body) as busy:
                if busy.headers["x-seamark-worker"] != holder:
                    continue
                answer = ask(gateway, new, "And low?")
                assert answer.headers["x-seamark-worker"] != holder
                assert explained(gateway, answer)["reason"] == "other_worker"
                return
    raise AssertionError("the holder was never chosen for the long answer")


def test_prefix_changed_names_the_right_part(servers: SharedServers):
    seen = set()
    # Fifty without an engine: tests/unit/observability/test_request_diff.py.
    for case in changed_requests(10, random.Random(17)):
        salt = {"cache_salt": uuid.uuid4().hex}
        ask(servers.gateway, None, "", **case.first, **salt)
        told = explained(servers.gateway, ask(servers.gateway, None, "", **case.second, **salt))
        # What both share came from the cache, or nothing was kept there yet; the change is named either way.
        in_full = told["delivered"] > 0 and told["shareable"] - told["delivered"] < 2 * UNIT
        assert told["reason"] == ("hit" if in_full else "prefix_changed"), case.description
        seen.add(told["reason"])
        changed = told["changed"]
        assert (changed["what"], changed["index"]) == (case.what, case.index), case.description
    assert seen == {"hit", "prefix_changed"}
