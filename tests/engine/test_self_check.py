"""The self-check: what counts as different, planted defects found, honest answers left alone."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from proxy.bench.harness import planted
from proxy.bench.harness.client import Answer, ask, open_client
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import Server, Servers
from tests.bench import self_check
from tests.harness.engines import SharedServers
from tests.harness.gateways import SYSTEM, chat, post, start_gateway, wait_for
from tests.harness.recording_worker import RecordingWorker, recording_worker

FLAGS = ("--self-check-interval", "0.1")


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
    gateway = start_gateway(fleet, worker, flags=FLAGS)
    for question in ("one", "two"):
        post(gateway, chat(question))
    time.sleep(4.5)  # it would be looked at after three seconds
    assert not replays(worker)


@pytest.fixture
def watched(servers: SharedServers, fleet: Servers) -> Server:
    """A gateway that checks, before the engine in which defects can be planted."""
    gateway = fleet.gateway(servers.seamark, flags=self_check.FLAGS)
    gateway.wait_until_ready("/ready", seconds=30)
    return gateway


async def watch(servers: SharedServers, gateway: Server, defect: str, seconds: float) -> self_check.Phase:
    """Traffic that nobody has sent before, with this defect."""
    seed, unit = time.time_ns() % 10**6, 16
    return await self_check.watch(servers.seamark, gateway, servers.planted, defect, seconds, seed, unit)


@pytest.mark.parametrize("defect", planted.DEFECTS)
def test_a_planted_defect_is_found_within_a_minute_and_turns_hints_off(servers: SharedServers, watched: Server, defect):
    phase = asyncio.run(watch(servers, watched, defect, self_check.FOUND_SECONDS))
    assert phase.held, phase
    log = watched.log.read_text()
    assert "from its cache, prompt" in log
    assert not any(word in log for word in ("harbour", "editor", "figures"))  # what the prompts are made of
    assert httpx.post(watched.url + "/seamark/self-check/reset").json() == {"hints_off": False}
    assert not checked(watched)["hints_off"]


def told(url: str, messages: list[dict], **fields) -> tuple[int, list[float]]:
    """Tokens that came from the cache, and the logprobs of a greedy answer."""

    async def asked() -> Answer:
        async with open_client() as client:
            return await ask(client, url, messages, 8, **fields)

    answer = asyncio.run(asked())
    return answer.cached_tokens, [step.top[step.token] for step in answer.steps]


def test_once_a_defect_is_found_clients_get_right_answers_whatever_the_engine_does(
    servers: SharedServers, watched: Server
):
    seed = time.time_ns() % 10**6
    system = {"role": "system", "content": prose(300, seed)}
    first = [system, {"role": "user", "content": prose(20, seed + 1)}]
    longer = [*first, {"role": "assistant", "content": prose(200, seed + 2)}, {"role": "user", "content": "Go on."}]
    engine = servers.seamark.url

    def anew(messages: list[dict]) -> list[float]:
        cached, logprobs = told(engine, messages, cache_salt=f"{time.time_ns()}")
        assert not cached
        return logprobs

    told(watched.url, [{"role": "user", "content": prose(40, seed + 3)}])  # whose state the defect takes
    for question in ("one", "two"):
        told(watched.url, [system, {"role": "user", "content": question}])
    with planted.planted(servers.planted, planted.OTHER_STATE):
        told(watched.url, longer)
        wait_for(lambda: checked(watched)["hints_off"], self_check.FOUND_SECONDS)

        # What it held is spoiled, and found by whoever asks past the gateway; not by those behind it.
        cached, logprobs = told(engine, longer)
        assert cached and logprobs != pytest.approx(anew(longer), abs=1e-3)
        assert told(watched.url, longer) == (0, pytest.approx(anew(longer), abs=1e-3))

        # Nor what vLLM caches by itself, once that was found to be wrong, too.
        wait_for(lambda: checked(watched)["cache_off"], self_check.FOUND_SECONDS)
        for _ in range(2):
            assert told(watched.url, longer) == (0, pytest.approx(anew(longer), abs=1e-3))
    assert httpx.post(watched.url + "/seamark/self-check/reset").json() == {"hints_off": False}
    assert not checked(watched)["cache_off"]

    # Restored, it caches anew; what was spoiled stays where it is.
    assert told(watched.url, longer)[0] == 0
    cached, logprobs = told(watched.url, longer)
    assert cached and logprobs == pytest.approx(anew(longer), abs=1e-3)


def test_honest_answers_are_never_called_different(servers: SharedServers, watched: Server):
    phase = asyncio.run(watch(servers, watched, "none", 30.0))
    assert phase.held and sum(phase.results.values()) >= 2, phase
    assert phase.hints_sent and phase.reason == "hit"
