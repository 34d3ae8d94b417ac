"""One engine with what big installations have: several API servers, asynchronous scheduling, and KV events.

Asynchronous scheduling plans the next step before the last one's tokens are known. It is the default wherever there is
a GPU; vLLM's CPU platform switches it off, and a plugin of the tests back on. KV events come over ZMQ, as to llm-d.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from proxy.bench.harness.client import fresh_tokens, open_client, request
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from proxy.commands.render_server import free_port
from tests.harness import engine_traffic
from tests.harness.async_scheduling import PLANS_AHEAD
from tests.harness.engines import SharedServers
from tests.harness.kv_event_listener import Listener, Ports
from tests.harness.predictions import is_known_as_gone, wait_for_predicted_hits
from tests.harness.waiting import until, wait_for

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}

FLAGS = ("--api-server-count", "2", "--async-scheduling", *engine_traffic.TIGHT)

CHAT = "/v1/chat/completions"

UNIT = 16  # tokens

HEADS = [fresh_tokens(length, "head", length) for length in (250, 390, 520, 800, 1000)]

PROMPTS = 60


class FleetOfOne(NamedTuple):
    """The engine's servers, a gateway before them, and where its events are."""

    engine: Server
    gateway: Server
    ports: Ports


@pytest.fixture(scope="module")
def fleet_of_one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetOfOne]:
    folder = tmp_path_factory.mktemp("api-servers")
    ports = Ports(free_port(), free_port())
    ahead = plugin_environment(folder / "plugins", {"seamark_async": "tests.harness.async_scheduling:register"})
    with Servers(folder) as fleet:
        engine = fleet.engine("two-api-servers", model, "1", (*FLAGS, *ports.flags), {**ENVIRONMENT, **ahead})
        engine.wait_until_ready()
        started = fleet.gateway(engine)
        started.wait_until_ready("/ready", seconds=60)
        yield FleetOfOne(engine, started, ports)


@pytest.fixture
def engine(fleet_of_one: FleetOfOne) -> Server:
    return fleet_of_one.engine


@pytest.fixture
def gateway(fleet_of_one: FleetOfOne) -> Server:
    return fleet_of_one.gateway


@pytest.fixture
def listener(fleet_of_one: FleetOfOne) -> Iterator[Listener]:
    started = Listener(fleet_of_one.ports, UNIT)
    yield started
    started.close()


pytestmark = pytest.mark.thorough


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


async def test_an_index_promises_what_the_engine_then_finds(engine: Server, listener: Listener):
    index = listener.index
    async with open_client() as client:
        markers = itertools.count()

        async def heard() -> None:
            """All events up to now have arrived: those of one more prompt have."""
            marker = fresh_tokens(200, "marker", next(markers))
            await request(client, engine.url, marker, 1, [192])
            await until(lambda: _hears(listener, marker))

        await first_heard(client, engine, listener)
        await reset(client, engine)
        await heard()
        index.surprises.clear()

        kept, tokens = 0, 0
        for number in range(PROMPTS):
            again = number % 2 == 1
            own = number // 2 - (number > 1 and again)  # each prompt twice, with another one between
            head = HEADS[(own * own + own // 7) % len(HEADS)]
            prompt = [*head, *fresh_tokens(150, "own", own)]
            await heard()
            promised = index.promised(prompt[:-1])
            found = (await request(client, engine.url, prompt, 2, [len(head), len(prompt) - 4])).cached_tokens
            # Who leaves a prefix before its state, since that of the head alone is gone, finds less than is announced.
            assert promised == found if again else promised >= found
            kept, tokens = kept + (promised == found), tokens + found
        assert kept > 0.9 * PROMPTS and tokens > 5000
        assert listener.removed > 100 and not index.surprises

        unhinted = fresh_tokens(500, "unhinted")
        await request(client, engine.url, unhinted, 1)
        await heard()
        promised = index.promised(unhinted[:-1])
        assert promised == (await request(client, engine.url, unhinted, 1)).cached_tokens == 496

        await reset(client, engine)
        await heard()
        assert not any(index.promised(head) for head in HEADS)
        await request(client, engine.url, HEADS[0], 1, [240])
        await heard()
        assert index.promised(HEADS[0]) == 240 and not index.surprises
        assert listener.numbers == list(range(listener.numbers[0], listener.numbers[0] + len(listener.numbers)))
        assert listener.replayed().held == index.held


def _hears(listener: Listener, prompt: list[int]) -> bool:
    listener.hear()
    return listener.index.promised(prompt) >= 192


async def first_heard(client: httpx.AsyncClient, engine: Server, listener: Listener) -> None:
    """A subscriber that connects misses what was published before."""
    for number in itertools.count():
        await request(client, engine.url, fresh_tokens(200, "first", number), 1, [192])
        listener.hear()
        if listener.numbers:
            return
        assert number < 300, "no event in 300 prompts"


async def reset(client: httpx.AsyncClient, engine: Server) -> None:
    async def emptied() -> bool:
        return bool((await client.post(engine.url + "/reset_prefix_cache")).json()["success"])

    await until(emptied)
