"""vLLM's HTTP frontend in Rust before an engine with the plugin: a gateway that knows the worker's URL, and no more."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from proxy.commands.render_server import free_port
from tests.harness.predictions import is_known_as_gone, wait_for_predicted_hits
from tests.harness.versions import engine_of
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.thorough

NEWEST = "0.33.0"

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"

MESSAGE_TOOL = {"name": "tide", "input_schema": {"type": "object", "properties": {}}}

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")

HEALTH_SECONDS = "0.5"  # between two health checks of the gateway


class Fleet(NamedTuple):
    servers: Servers
    rust: Server
    python: Server
    gateway: Server  # before the former
    other: Server  # before the latter


def environment() -> dict[str, str]:
    """Of the newest vLLM with its frontend in Rust."""
    return {"PYTHONPATH": str(engine_of(NEWEST)), "VLLM_USE_RUST_FRONTEND": "1", "VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Servers(tmp_path_factory.mktemp("rust")) as servers:
        rust = servers.engine("rust", model, "1", TOOLS, environment())
        python = servers.engine("python", model, "1", TOOLS)
        for engine in (rust, python):
            engine.wait_until_ready()
        gateways = [servers.gateway(each, flags=("--health-interval", HEALTH_SECONDS)) for each in (rust, python)]
        for gateway in gateways:
            gateway.wait_until_ready("/ready", seconds=60)
        yield Fleet(servers, rust, python, *gateways)


def chat(seed: int, question: str, **more: Any) -> dict[str, Any]:
    head = {"role": "system", "content": prose(300, seed)}
    return {
        "model": MODEL_NAME,
        "messages": [head, {"role": "user", "content": question}],
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }


def ask(gateway: Server, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(gateway.url + CHAT, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def worker_of(gateway: Server) -> dict[str, Any]:
    (worker,) = httpx.get(gateway.url + "/seamark/status", timeout=60).json()["workers"]
    return dict(worker)


def reason(gateway: Server, answer: httpx.Response) -> str:
    explained: dict[str, Any] = {}

    def is_explained() -> bool:
        path = f"/seamark/requests/{answer.headers['x-request-id']}"
        explained.update(httpx.get(gateway.url + path, timeout=60).json())
        return explained.get("reason") is not None

    wait_for(is_explained)
    return str(explained["reason"])


def test_the_worker_is_known_as_patched_and_as_what_it_is(fleet):
    worker = worker_of(fleet.gateway)
    assert worker["engine"]["vllm"].startswith(NEWEST) and worker["engine"]["match_unit"] == 16
    assert worker["frontend"]["name"] == "vLLM's Rust frontend" and "/v1/messages" in worker["frontend"]["lacks"]
    assert worker["reports"]["url"] not in ("", fleet.rust.url) and "patched" in fleet.gateway.log.read_text()


def test_the_second_request_hits_as_predicted_with_its_reason_also_as_a_stream(fleet):
    first = ask(fleet.gateway, chat(1, "Any ship today?"))
    assert first.headers["x-seamark-cached"] == "0" and first.headers["x-seamark-reason"] == "cold"
    second = ask(fleet.gateway, chat(1, "Any ship tomorrow?"))
    cached = int(second.headers["x-seamark-cached"])
    assert cached >= 256 and second.headers["x-seamark-predicted"] == str(cached)
    assert second.headers["x-seamark-reason"] == "hit"
    stream = ask(fleet.gateway, chat(1, "Any ship at all?", stream=True))
    assert reason(fleet.gateway, stream) == "hit" and "[DONE]" in stream.text


def test_answers_are_those_of_an_engine_that_has_never_seen_the_prompt(fleet):
    for question in ("Any ship today?", "Any ship tomorrow?"):
        warm = ask(fleet.gateway, chat(2, question)).json()["choices"][0]["message"]["content"]
        cold = ask(fleet.gateway, chat(2, question, cache_salt=question)).json()["choices"][0]["message"]["content"]
        assert warm == cold


def test_all_facts_of_the_template_are_those_that_pythons_render_gives(fleet):
    def facts(gateway: Server) -> dict[str, Any]:
        return dict(worker_of(gateway)["templates"][MODEL_NAME])

    gateways = (fleet.gateway, fleet.other)
    bodies = [chat(3, "Where?"), chat(3, "Where?", tools=[TOOL])]
    wait_for(lambda: [ask(each, body) for each in gateways for body in bodies] and not facts(fleet.other)["unknown"])
    wait_for(lambda: facts(fleet.gateway) == facts(fleet.other))
    # And what is sent is the same.
    sent = [[ask(each, body).headers["x-seamark-boundary"] for body in bodies] for each in gateways]
    assert sent[0] == sent[1] and all(sent[0])


TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}


def test_a_route_that_the_frontend_lacks_is_answered_with_its_name(fleet):
    answer = httpx.post(fleet.gateway.url + "/v1/responses", json={"model": MODEL_NAME, "input": "?"}, timeout=60)
    assert answer.status_code == 501 and "Rust frontend" in answer.text


@pytest.mark.parametrize("more", [{}, {"tools": [MESSAGE_TOOL]}])
def test_a_message_is_answered_as_the_python_frontend_answers_it(fleet, more):
    def message(question: str) -> dict[str, Any]:
        body = {"model": MODEL_NAME, "system": prose(300, 10), "messages": [{"role": "user", "content": question}]}
        return {**body, "max_tokens": 12, "temperature": 0, **more}

    def told(gateway: Server, question: str) -> dict[str, Any]:
        answer = httpx.post(gateway.url + MESSAGES, json=message(question), timeout=120)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    for question in ("Any ship today?", "Any ship tomorrow?"):
        ours, theirs = told(fleet.gateway, question), told(fleet.other, question)
        assert ours["content"] == theirs["content"] and ours["stop_reason"] == theirs["stop_reason"]
        assert sum(tokens for name, tokens in ours["usage"].items() if "input" in name) > 300
    assert ours["usage"]["cache_read_input_tokens"] >= 256

    def streamed(gateway: Server) -> list[dict[str, Any]]:
        body = message("Any ship at all?") | {"stream": True}
        lines = httpx.post(gateway.url + MESSAGES, json=body, timeout=120).text.splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    ours, theirs = streamed(fleet.gateway), streamed(fleet.other)
    assert {event["type"] for event in ours} == {event["type"] for event in theirs}
    texts = ["".join(event["delta"].get("text", "") for event in each if "delta" in event) for each in (ours, theirs)]
    assert texts[0] == texts[1] and texts[0]


def test_two_gateways_know_each_others_load_and_what_comes_past_both(fleet):
    first = fleet.gateway
    second = fleet.servers.gateway(fleet.rust)
    second.wait_until_ready("/ready", seconds=60)
    for gateway in (first, second):
        ask(gateway, chat(8, "Any ship today?"))  # from now on it reads

    def others(gateway: Server) -> int:
        return int(worker_of(gateway)["others"]["requests"])

    def held(url: str) -> contextlib.AbstractContextManager[httpx.Response]:
        """A request that is under way until it is left."""
        body = chat(9, "Tell all.", stream=True) | {"max_tokens": 7000, "ignore_eos": True}
        return httpx.stream("POST", url + CHAT, json=body, timeout=120)

    with held(first.url):
        wait_for(lambda: (others(first), others(second)) == (0, 1))
        with held(fleet.rust.url):
            wait_for(lambda: (others(first), others(second)) == (1, 2))
    wait_for(lambda: (others(first), others(second)) == (0, 0))


def test_a_pinned_prompt_is_told_to_be_pinned_though_no_answer_says_so(fleet):
    body = {"name": "rules", "body": chat(41, "Tide?")}
    answer = httpx.post(fleet.gateway.url + "/seamark/prefixes", json=body, timeout=120)
    assert answer.status_code == 200 and set(answer.json()["workers"].values()) == {"pinned"}, answer.text
    gone = httpx.delete(fleet.gateway.url + "/seamark/prefixes/rules", timeout=120)
    assert gone.status_code == 200 and set(gone.json()["workers"].values()) == {"released"}, gone.text


def test_an_emptied_cache_reaches_the_gateway_without_another_request(fleet):
    def asked(seed: int, question: str) -> httpx.Response:
        return ask(fleet.gateway, chat(seed, question))

    seeds = range(51, 57)
    wait_for_predicted_hits(asked, seeds)
    httpx.post(fleet.rust.url + "/reset_prefix_cache", timeout=60).raise_for_status()
    reports = worker_of(fleet.gateway)["reports"]["url"]
    wait_for(lambda: ["cleared"] in httpx.get(reports + "/seamark/outcomes", timeout=60).json()["states"])
    ask(fleet.gateway, chat(50, "Whose outcome is read, and so all that happened before?"))
    assert is_known_as_gone(asked, seeds)


def test_a_restarted_worker_is_another_boot_found_at_its_new_port(fleet, model):
    for question in ("Any ship today?", "Any ship tomorrow?"):
        ask(fleet.gateway, chat(6, question))
    before = worker_of(fleet.gateway)
    fleet.rust.stop()
    port = int(fleet.rust.url.rpartition(":")[2])
    again = fleet.servers.engine("rust-again", model, "1", TOOLS, environment(), port=port)
    again.wait_until_ready()
    with contextlib.suppress(httpx.HTTPError):
        wait_for(lambda: worker_of(fleet.gateway)["up"] and worker_of(fleet.gateway)["boot"] != before["boot"])
    now = worker_of(fleet.gateway)
    assert now["engine"] is not None and now["boot"] != before["boot"]
    assert now["reports"]["url"] != before["reports"]["url"]
    wait_for(lambda: not worker_of(fleet.gateway)["warming"])
    # What was shared before is computed again before its next request.
    assert int(ask(fleet.gateway, chat(6, "Any ship at all?")).headers["x-seamark-cached"]) >= 256


def test_while_kv_events_are_on_their_publisher_is_as_it_was_asked_for_and_the_reports_are_found(fleet, model):
    port = next(port for port in iter(free_port, None) if is_free(port + 1))
    asked_for = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port + 1}"}
    flags = ("--kv-events-config", json.dumps(asked_for))
    engine = fleet.servers.engine("rust-events", model, "1", flags, environment())
    engine.wait_until_ready()
    gateway = fleet.servers.gateway(engine)
    gateway.wait_until_ready("/ready", seconds=60)
    told = httpx.get(engine.url + "/kv_event_sources", timeout=60).json()["0"]
    assert asked_for.items() <= told.items() and told["topic"] == ""
    worker = worker_of(gateway)
    assert worker["reports"]["url"] == f"http://127.0.0.1:{port}" and worker["engine"] is not None


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
