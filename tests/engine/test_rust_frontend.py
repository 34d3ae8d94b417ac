"""vLLM's HTTP frontend in Rust before an engine with the plugin: a gateway that knows the worker's URL, and no more."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.bench.harness.client import prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from tests.harness.versions import engine_of
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.thorough

NEWEST = "0.33.0"

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"

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


def test_the_worker_is_known_as_what_it_is_and_what_it_lacks_is_said(fleet):
    worker = worker_of(fleet.gateway)
    assert worker["engine"]["vllm"].startswith(NEWEST) and worker["engine"]["match_unit"] == 16
    assert worker["frontend"]["name"] == "vLLM's Rust frontend" and "/v1/messages" in worker["frontend"]["lacks"]
    assert worker["reports"]["url"] not in ("", fleet.rust.url)
    answer = httpx.post(fleet.gateway.url + "/v1/responses", json={"model": MODEL_NAME, "input": "?"}, timeout=60)
    assert answer.status_code == 501 and "Rust frontend" in answer.text


def test_the_second_request_hits_as_predicted_and_is_answered_as_without_a_cache_also_as_a_stream(fleet):
    first = ask(fleet.gateway, chat(1, "Any ship today?"))
    assert first.headers["x-seamark-cached"] == "0" and first.headers["x-seamark-reason"] == "cold"
    second = ask(fleet.gateway, chat(1, "Any ship tomorrow?"))
    cached = int(second.headers["x-seamark-cached"])
    assert cached >= 256

    def is_predicted() -> bool:  # once the engine has told what it holds
        again = ask(fleet.gateway, chat(1, "Any ship tomorrow?")).headers
        return again["x-seamark-predicted"] == again["x-seamark-cached"] != "0"

    wait_for(is_predicted)
    assert second.headers["x-seamark-reason"] == "hit"
    cold = ask(fleet.gateway, chat(1, "Any ship tomorrow?", cache_salt="none"))
    assert second.json()["choices"][0]["message"]["content"] == cold.json()["choices"][0]["message"]["content"]
    stream = ask(fleet.gateway, chat(1, "Any ship at all?", stream=True))
    path = f"/seamark/requests/{stream.headers['x-request-id']}"
    wait_for(lambda: httpx.get(fleet.gateway.url + path, timeout=60).json().get("reason") == "hit")
    assert "[DONE]" in stream.text


def test_facts_of_the_template_and_a_message_are_those_of_the_python_frontend(fleet):
    def facts(gateway: Server) -> dict[str, Any]:
        return dict(worker_of(gateway)["templates"][MODEL_NAME])

    tool = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
    gateways = (fleet.gateway, fleet.other)
    bodies = [chat(3, "Where?"), chat(3, "Where?", tools=[tool])]
    wait_for(lambda: [ask(each, body) for each in gateways for body in bodies] and not facts(fleet.other)["unknown"])
    wait_for(lambda: facts(fleet.gateway) == facts(fleet.other))
    sent = [[ask(each, body).headers["x-seamark-boundary"] for body in bodies] for each in gateways]
    assert sent[0] == sent[1] and all(sent[0])
    message = {"model": MODEL_NAME, "system": prose(300, 10), "max_tokens": 12, "temperature": 0}
    message |= {"tools": [{"name": "tide", "input_schema": {"type": "object", "properties": {}}}]}
    for question in ("Any ship today?", "Any ship tomorrow?"):
        asked = message | {"messages": [{"role": "user", "content": question}]}
        ours, theirs = (httpx.post(each.url + MESSAGES, json=asked, timeout=120).json() for each in gateways)
        assert ours["content"] == theirs["content"] and ours["stop_reason"] == theirs["stop_reason"]
    assert ours["usage"]["cache_read_input_tokens"] >= 256


def test_an_emptied_cache_reaches_the_gateway_without_another_request(fleet):
    """The gateway reads a worker's events beside the requests, so it may learn of them a little later."""
    numbers = itertools.count(1)

    def is_as_predicted(seed: int, *, hit: bool) -> bool:
        """No two questions begin alike: what they shared would be found as well."""
        heads = ask(fleet.gateway, chat(seed, f"{next(numbers)} ships?")).headers
        predicted, cached = (heads[f"x-seamark-{name}"] for name in ("predicted", "cached"))
        return predicted == cached and (cached != "0") is hit

    for seed in range(51, 57):
        wait_for(lambda seed=seed: is_as_predicted(seed, hit=True))
    httpx.post(fleet.rust.url + "/reset_prefix_cache", timeout=60).raise_for_status()
    reports = worker_of(fleet.gateway)["reports"]["url"]
    wait_for(lambda: ["cleared", ""] in httpx.get(reports + "/seamark/outcomes", timeout=60).json()["events"])
    ask(fleet.gateway, chat(50, "Whose outcome is read, and so all that happened before?"))
    # Each prompt is asked with once, for that brings it back.
    assert any(is_as_predicted(seed, hit=False) for seed in range(51, 57))


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
