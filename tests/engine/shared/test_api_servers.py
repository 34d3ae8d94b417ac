"""One engine with what big installations have: several API servers and asynchronous scheduling.

The latter plans the next step before the last one's tokens are known. It is the default wherever there is a GPU; vLLM's
CPU platform switches it off, and a plugin of the tests back on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness.client import open_client
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from tests.harness import engine_traffic
from tests.harness.async_scheduling import PLANS_AHEAD
from tests.harness.engines import SharedServers
from tests.harness.gateways import CHAT, start_gateway
from tests.harness.predictions import is_known_as_gone, wait_for_predicted_hits
from tests.harness.waiting import wait_for

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}

FLAGS = ("--api-server-count", "2", "--async-scheduling", *engine_traffic.TIGHT)

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("api-servers")
    ahead = plugin_environment(folder / "plugins", {"seamark_async": "tests.harness.async_scheduling:register"})
    with Servers(folder) as fleet:
        started = fleet.engine("two-api-servers", model, "1", FLAGS, {**ENVIRONMENT, **ahead})
        started.wait_until_ready()
        yield started


@pytest.fixture
def gateway(engine: Server, fleet: Servers) -> Server:
    return start_gateway(fleet, engine)


@pytest.mark.parametrize(
    "traffic", [engine_traffic.shared_beginnings, engine_traffic.cold_fan_out, engine_traffic.clients_that_leave]
)
async def test_answers_are_exact_and_hit(engine: Server, servers: SharedServers, traffic):
    async with open_client(300) as client:
        await traffic(client, engine, servers.reference)
    assert PLANS_AHEAD in engine.log.read_text(errors="replace")


def fresh(url: str, path: str) -> httpx.Response:
    """On a connection of its own, so that any of the API servers may answer."""
    return httpx.get(url + path, headers={"connection": "close"}, timeout=60)


def test_whichever_server_is_asked_there_is_one_feed_with_every_outcome_and_every_state(engine, gateway):
    names = [f"of-any-{number}" for number in range(10)]
    for number, name in enumerate(names):
        head = {"role": "system", "content": prose(200, 7400 + number)}
        body = {"model": MODEL_NAME, "messages": [head, {"role": "user", "content": "?"}], "max_tokens": 1}
        httpx.post(gateway.url + CHAT, json=body, headers={"x-request-id": name}, timeout=120).raise_for_status()
    feeds = [fresh(engine.url, "/seamark/outcomes").json() for _ in range(12)]
    assert len({feed["boot"] for feed in feeds}) == 1
    for feed in feeds:
        assert set(names) <= {name for name, *_ in feed["outcomes"]}
        came = {event[1]: event[3] for event in feed["states"] if event[0] == "came"}
        assert all(states and all(name for _, name in states) for states in map(came.get, names))
    metrics = [fresh(engine.url, path).text for path in ("/seamark/metrics", "/metrics") for _ in range(6)]
    counted = {re.search(r'seamark_engine_requests_total\{reason="cold"\} (\S+)', text)[1] for text in metrics}
    assert len(counted) == 1 and float(counted.pop()) >= len(names)
    assert all(re.search(r"^vllm:num_requests_running\{.*\} 0.0$", text, re.M) for text in metrics)


def test_an_emptied_cache_reaches_the_gateway_without_another_request_and_nothing_is_warned_of(engine, gateway):
    def ask(seed: int, question: str) -> httpx.Response:
        head = {"role": "system", "content": prose(200, seed)}
        body = {"model": MODEL_NAME, "messages": [head, {"role": "user", "content": question}], "max_tokens": 1}
        return httpx.post(gateway.url + CHAT, json=body, timeout=120)

    seeds = range(7500, 7506)
    wait_for_predicted_hits(ask, seeds)
    httpx.post(engine.url + "/reset_prefix_cache", timeout=60).raise_for_status()
    wait_for(lambda: ["cleared"] in fresh(engine.url, "/seamark/outcomes").json()["states"])
    ask(7511, "Whose outcome is read, and so all that happened before?")
    assert is_known_as_gone(ask, seeds)
    # A busy machine may lose a report, which is said, and is no harm: its reader forgets what it cannot be sure of.
    warned = [line for line in gateway.log.read_text().splitlines() if "WARNING" in line and "were lost" not in line]
    assert not warned
