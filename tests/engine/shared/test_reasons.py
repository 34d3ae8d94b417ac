"""The table of reasons: each provoked on a real engine, and told by label, header, explanation and the worker's feed.

`unpatched` is in tests/engine/shared/test_failures.py.
"""

from __future__ import annotations

import random
import uuid
from typing import Any

import httpx
import pytest

from proxy.bench.harness.client import CHAT
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from proxy.bench.stories import UNIT
from proxy.fleet import worker_metrics
from proxy.observability.shadow import MATCH_UNIT
from tests.harness.changed_requests import changed_requests
from tests.harness.engines import SharedServers
from tests.harness.waiting import wait_for

LONG = "You pilot ships into the harbour, and you name the tide before you name the berth. " * 6


@pytest.fixture
def new() -> str:
    """A system prompt nobody sent before."""
    return f"{uuid.uuid4().hex} {LONG}"


def ask(gateway: Server, system: str | None, question: str, path: str = CHAT, **fields) -> httpx.Response:
    messages = [{"role": "system", "content": system}] if system else []
    body = {"model": MODEL_NAME, "messages": [*messages, {"role": "user", "content": question}], "max_tokens": 1}
    return httpx.post(gateway.url + path, json={**body, **fields}, timeout=120).raise_for_status()


def explained(gateway: Server, answer: httpx.Response) -> dict:
    """The explanation of a stream comes when its engine's events do."""
    url = f"{gateway.url}/seamark/requests/{answer.headers['x-request-id']}"
    wait_for(lambda: httpx.get(url).json().get("reason") is not None)
    told = httpx.get(url).json()
    assert told["reason"] == answer.headers.get("x-seamark-reason", told["reason"])
    return told


def test_cold_then_hit_and_another_salt(servers: SharedServers, new):
    assert explained(servers.gateway, ask(servers.gateway, new, "High tide?"))["reason"] == "cold"
    told = explained(servers.gateway, ask(servers.gateway, new, "And low?"))
    assert told["reason"] == "hit"
    assert told["shareable"] == told["predicted"] == told["delivered"] > 64
    # Nothing stands between the system prompt's end and the question.
    assert [boundary["kind"] for boundary in told["boundaries"]] == ["system", "turn"]
    told = explained(servers.gateway, ask(servers.gateway, new, "High tide?", cache_salt="another"))
    assert told["reason"] == "salt" and told["delivered"] == 0


def test_what_may_not_be_kept_is_not_found_by_the_next_and_finds_what_others_left(servers: SharedServers, new):
    def asked(keep: str = "") -> tuple[str, str]:
        xargs = {"vllm_xargs": {"seamark_keep": keep}} if keep else {}
        answer = ask(servers.gateway, new, "High tide?", max_tokens=16, temperature=0, **xargs)
        answers.add(answer.json()["choices"][0]["message"]["content"])
        return answer.headers["x-seamark-cached"], answer.headers["x-seamark-reason"]

    answers: set[str] = set()
    assert [asked("no"), asked("private"), asked("no")] == [("0", "not_kept")] * 3
    assert asked()[0] == "0"
    assert asked() == asked("no") != ("0", "hit") and asked("private") == ("0", "not_kept")
    assert len(answers) == 1


def test_what_the_engine_says_of_a_streamed_response_is_known(servers: SharedServers, new):
    body = {"model": MODEL_NAME, "instructions": new, "max_output_tokens": 16, "stream": True}
    for question, reasons in (("High tide?", {"cold", "prefix_changed"}), ("And low?", {"hit"})):  # by what came before
        answer = httpx.post(servers.gateway.url + "/v1/responses", json={**body, "input": question}, timeout=120)
        told = explained(servers.gateway, answer.raise_for_status())
        assert told["reason"] in reasons and all(told["positions"])
        assert told["positions"][0] > 64  # behind the instructions


def test_below_unit_and_no_boundary(servers: SharedServers):
    assert explained(servers.gateway, ask(servers.gateway, None, "?"))["reason"] == "below_unit"
    body = {"messages": [{"role": "assistant", "content": "Only the model has spoken. " * 20}]}
    assert explained(servers.gateway, ask(servers.gateway, None, "", **body))["reason"] == "no_boundary"


def test_evicted(servers: SharedServers, new):
    new = new * 8  # so long that its state is worth writing, however slow the engine's steps were
    ask(servers.tight_gateway, new, "High tide?")
    for _ in range(40):  # 64 blocks of 384 tokens, and states hold half of them
        ask(servers.tight_gateway, f"{uuid.uuid4().hex} {LONG * 4}", "High tide?")
    assert explained(servers.tight_gateway, ask(servers.tight_gateway, new, "And low?"))["reason"] == "evicted"


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_never_kept_and_what_was_not_looked_up_is_not_evicted(servers: SharedServers, new, stream):
    """Prompt logprobs want every token computed, whatever the cache holds: only the engine knows."""
    # Nothing tells that their last one is the only new one. So many that a state is worth writing at any step's time.
    ids = random.Random(new).sample(range(300, 3000), 1000)

    def reasons(*prompts: object, **fields: object) -> list[str]:
        bodies = [{"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, **fields} for prompt in prompts]
        url = servers.gateway.url + "/v1/completions"
        answers = [httpx.post(url, json=body, timeout=120).raise_for_status() for body in bodies]
        return [explained(servers.gateway, answer)["reason"] for answer in answers]

    usage = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    first, second, third = reasons(*([*ids, end] for end in range(3)), **usage)
    # What other tests have sent decides whether a first one is expected to be left at its end.
    assert first == "cold" and second in ("between_states", "hit") and third == "hit"
    prompts = (f"{new} High?", f"{new} Low?", [*ids, 3], f"{new} Flood?")
    assert reasons(*prompts, logprobs=1, echo=True, **usage) == ["hint_ignored"] * 4


def test_each_request_has_its_reason_and_its_states_in_the_workers_feed(servers: SharedServers, new):
    feed = servers.seamark.url + "/seamark/outcomes"

    def events() -> list[list[Any]]:
        told, answer = [], {"boot": "", "cursor": 0, "events": [0]}
        while answer["events"]:
            asked = {"boot": answer["boot"], "after": answer["cursor"]}
            answer = httpx.get(feed, params=asked, timeout=60).json()
            told += answer["events"]
        return told

    def outcomes() -> dict[str, tuple[str, int]]:
        return {event[1]: (event[2], event[3]) for event in events() if event[0] == "admitted"}

    for name, stream in (("feed-1", False), ("feed-2", True)):
        messages = [{"role": "system", "content": new * 8}, {"role": "user", "content": name}]
        body = {"model": MODEL_NAME, "max_tokens": 2, "messages": messages, "stream": stream}
        httpx.post(servers.gateway.url + CHAT, json=body, headers={"x-request-id": name}, timeout=120)
    body = {"model": MODEL_NAME, "max_tokens": 2, "prompt": ["one", "two"]}
    httpx.post(servers.seamark.url + "/v1/completions", json=body, headers={"x-request-id": "feed-3"}, timeout=120)
    wait_for(lambda: {"feed-1", "feed-2", "feed-3"} <= outcomes().keys())
    found = outcomes()
    assert found["feed-1"] == ("cold", 0) and found["feed-3"] == ("no_boundary", 0)
    assert found["feed-2"][0] == "hit" and found["feed-2"][1] >= 64
    (came,) = (event for kind, *event in events() if kind == "came" and event[0] == "feed-1")
    assert came[1] > came[2][-1][0] >= 64 and all(name for _, name in came[2])
    some, whole = (httpx.get(servers.seamark.url + path).text for path in (worker_metrics.OF_PLUGIN, "/metrics"))
    assert worker_metrics.read(some) == worker_metrics.read(whole) and len(some) < len(whole) / 5
    for path in ("/seamark/outcomes", worker_metrics.OF_PLUGIN):  # of operators
        assert httpx.get(servers.gateway.url + path, timeout=60).status_code == 404


def test_on_an_untouched_engine_the_loss_is_what_requests_shared(servers: SharedServers, new):
    """vLLM as it is hits nothing shorter than a block of 384 tokens: everything shared is lost, to the unit."""
    gateway, lost, prompts = servers.untouched_gateway, [], []
    for question in ("High tide?", "And low?", "Which berth?"):
        answer = ask(gateway, new, question)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        url = f"{gateway.url}/seamark/requests/{answer.headers['x-request-id']}"
        wait_for(lambda url=url: httpx.get(url).json()["lost"] is not None)
        lost.append(httpx.get(url).json()["lost"])
        asked = {"model": MODEL_NAME, "messages": [{"role": "system", "content": new}, {"role": "user"}]}
        asked["messages"][1]["content"] = question
        prompts.append(httpx.post(servers.untouched.url + "/tokenize", json=asked).json()["tokens"])
    common = next(at for at, three in enumerate(zip(*prompts, strict=False)) if len(set(three)) > 1)
    assert lost == [{}, *[{"unpatched": common // MATCH_UNIT * MATCH_UNIT}] * 2]


def test_another_worker_has_more(servers: SharedServers, fleet: Servers, new):
    gateway = fleet.gateway(servers.seamark, servers.tight, flags=("--max-inflight", "1"))
    gateway.wait_until_ready("/ready", seconds=30)
    first = ask(gateway, new, "High tide?")
    holder = first.headers["x-seamark-worker"]
    # A long answer takes the holder's only place, so the next request has to go elsewhere.
    body = {"model": MODEL_NAME, "prompt": "Tide", "max_tokens": 4000, "ignore_eos": True, "stream": True}
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
        # What both share came from the cache, or nothing was kept there yet; the change is named either way, and is the
        # reason where it cost a quarter or more.
        changed = told["changed"]
        in_full = told["delivered"] > 0 and told["shareable"] - told["delivered"] < 2 * UNIT
        is_small = in_full and changed["lost"] * 4 < (changed["token"] + changed["lost"]) // UNIT * UNIT
        assert told["reason"] == ("hit" if is_small else "prefix_changed"), case.description
        seen.add(in_full)
        assert (changed["what"], changed["index"]) == (case.what, case.index), case.description
    assert seen == {True, False}
