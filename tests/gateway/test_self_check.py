"""The self-check: what is replayed, and what is not."""

from __future__ import annotations

import httpx
import pytest

from proxy.bench.harness.servers import Server
from tests.harness.forked_gateways import GatewayForks
from tests.harness.gateways import SYSTEM, chat, post, start_gateway, wait_for
from tests.harness.recording_worker import RecordingWorker, recording_worker

FLAGS = ("--self-check-interval", "0.1")


@pytest.fixture(autouse=True)
def soon(fleet: GatewayForks) -> None:
    """Idle workers are checked sooner."""
    fleet.constants["proxy.fleet.self_check.IDLE_SECONDS"] = 0.3


def replays(worker: RecordingWorker) -> list[bytes]:
    return [each.body for each in worker.requests if each.target == "/v1/completions"]


def checked(gateway: Server) -> dict:
    return httpx.get(gateway.url + "/seamark/status").json()["self_check"]


def test_without_memory_for_texts_nothing_is_replayed(fleet, worker):
    off = start_gateway(fleet, worker, flags=(*FLAGS, "--text-bytes", "0"))
    for question in ("one", "two", "three"):
        post(off, chat(question))
    with recording_worker() as other:  # as long as it takes where there is memory, and nothing has come here
        on = start_gateway(fleet, other, flags=FLAGS)
        for question in ("one", "two", "three"):
            post(on, chat(question))
        wait_for(lambda: replays(other))
    assert not replays(worker)


def test_answers_that_cannot_be_compared_are_not_judged_and_cost_no_hint(fleet, worker):
    gateway = start_gateway(fleet, worker, flags=FLAGS)
    for question in ("one", "two"):
        post(gateway, chat(question, temperature=1.0, seed=3))
    wait_for(lambda: replays(worker))
    replay = httpx.Response(200, content=replays(worker)[0]).json()
    assert replay["temperature"] == 0 and "seed" not in replay
    text = f"<system>{SYSTEM['content']}<user>"
    assert replay["prompt"][: len(text)] == list(map(ord, text))
    assert checked(gateway) == {"checked": 0, "differs": 0, "hints_off": False, "cache_off": False}
    assert b"seamark_boundaries" in replays(worker)[0]


def test_another_sites_page_cannot_turn_hints_on_again(fleet, worker):
    url = start_gateway(fleet, worker, flags=FLAGS).url + "/seamark/self-check/reset"
    assert httpx.post(url, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert httpx.post(url, headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert httpx.post(url).json() == {"hints_off": False}


def test_a_worker_that_others_keep_busy_is_left_alone(fleet, worker):
    worker.more_metrics = 'vllm:num_requests_running{engine="0"} 1.0\n'
    with recording_worker(models=("other",)) as idle:
        gateway = start_gateway(fleet, worker, idle, flags=FLAGS)
        for model in ("m", "other"):
            for question in ("one", "two"):
                post(gateway, chat(question, model=model))
        wait_for(lambda: replays(idle))  # the busy one had its last request before, and would have been replayed, too
        assert not replays(worker)
        worker.more_metrics = ""
        wait_for(lambda: replays(worker))  # that it was busy was the only reason
