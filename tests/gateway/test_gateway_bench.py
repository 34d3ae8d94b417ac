"""`tests.bench.gateway_cost`: run small, what it makes of made-up batches, and the worker that it stands before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from proxy.bench.harness.servers import Server, Servers
from tests.bench import gateway_cost, peers
from tests.bench.gateway_cost import (
    BARE,
    CASES,
    DIRECT,
    ONE,
    SEAMARK,
    SMALL,
    Batch,
    Case,
    Contestant,
    Report,
    compare,
    render,
    verdicts,
)
from tests.bench.peers import VLLM_ROUTER, Peer
from tests.harness.cpu_time import CpuTime
from tests.harness.forked_gateways import GatewayForks
from tests.harness.load import CHAT, connect, request, send_all
from tests.harness.mock_worker import FRAMES, FRAMES_FIELD, MATCH_UNIT, MODEL, STEP_FIELD, mock_worker

SYSTEM = {"role": "system", "content": "You keep the harbour's books. " * 20}


class Stand(NamedTuple):
    """A gateway before a worker without an engine."""

    servers: Servers
    worker: Server
    gateway: Server


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with GatewayForks(tmp_path_factory.mktemp("stand")) as servers:
        worker = mock_worker(servers)
        worker.wait_until_ready()
        gateway = servers.gateway(worker)
        gateway.wait_until_ready("/ready", seconds=30)
        yield Stand(servers, worker, gateway)


def chat(question: str, **fields) -> dict:
    """A chat that shares its system prompt with all others."""
    return {"model": MODEL, "messages": [SYSTEM, {"role": "user", "content": question}], **fields}


def events(answer: httpx.Response) -> list[dict]:
    """Of a stream that came to its end."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return list(map(json.loads, lines))


def test_the_hint_reaches_the_worker_and_its_usage_is_read(stand: Stand):
    with httpx.Client(base_url=stand.gateway.url) as client:
        client.post(CHAT, json=chat("Who left?"))
        answer = client.post(CHAT, json=chat("Who left?"))
    opener, end = answer.headers["x-seamark-boundary"].split(";")
    assert opener.startswith("last:") and end == "-1"
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    deepest = usage["prompt_tokens"] - 1
    assert cached == deepest // MATCH_UNIT * MATCH_UNIT > 0  # the worker has it from the hint alone
    assert answer.headers["x-seamark-cached"] == str(cached)
    assert answer.headers["x-seamark-predicted"] == str(cached)  # told by the usage of the first


def test_without_the_gateway_no_hint_comes_and_nothing_is_cached(stand: Stand):
    usage = httpx.post(stand.worker.url + CHAT, json=chat("Who left?")).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0 < usage["prompt_tokens"]


def test_a_stream_has_its_chunks_its_usage_and_its_end(stand: Stand):
    for server in (stand.worker, stand.gateway):
        found = events(
            httpx.post(server.url + CHAT, json=chat("Who stays?", stream=True, stream_options={"include_usage": True}))
        )
        assert sum(bool(event["choices"]) for event in found) == FRAMES
        assert found[-1]["usage"]["prompt_tokens"] > 0


def test_frames_come_at_the_wanted_pace_and_say_when_they_were_due(stand: Stand):
    paced = chat("Who waits?", stream=True) | {STEP_FIELD: 20, FRAMES_FIELD: 4}
    for _ in range(50):  # a step that a busy machine delays is followed by the next one sooner
        found = events(httpx.post(stand.gateway.url + CHAT, json=paced))
        sent = [event["sent"] for event in found if "sent" in event]
        assert len(sent) == 4
        if all(later - earlier > 10e6 for earlier, later in itertools.pairwise(sent)):
            return
    pytest.fail("no stream came at its pace")


async def test_clients_take_turns_and_an_error_answer_is_an_error(stand: Stand):
    clients = [await connect(stand.gateway.url) for _ in range(3)]
    bodies = [json.dumps(chat(f"{number}?", stream=True)).encode() for number in range(7)]
    samples = await send_all(clients, [request(stand.gateway.url, body) for body in bodies])
    assert len(samples) == 7 and all(0 < sample.first <= sample.last for sample in samples)
    with pytest.raises(RuntimeError, match=r"^400 .*not valid JSON"):
        await send_all(clients[:1], [request(stand.gateway.url, b"{")])
    for client in clients:
        client.close()


@pytest.mark.thorough
async def test_the_gateway_benchmark_has_a_row_for_each_gateway_and_kind_of_traffic():
    report = await gateway_cost.run([], CASES, 8, 2, print)
    assert list(report.batches) == [DIRECT, SEAMARK, BARE]
    for name, batches in report.batches.items():
        assert {case: len(each) for case, each in batches.items()} == dict.fromkeys(CASES, 2)
        assert name == DIRECT or all(report.cpu(name, case).median > 20e-6 for case in CASES)
    assert report.renders == 0  # no request is rendered


async def test_a_gateway_that_dies_is_given_up_and_the_others_go_on(stand: Stand):
    dead, said = mock_worker(stand.servers), []
    dead.wait_until_ready()
    contestants = [Contestant(DIRECT, stand.worker, None), Contestant("dead", dead, CpuTime(dead.process.pid))]
    dead.stop()
    case = Case(SMALL, False, ONE)
    await compare(contestants, [case], 4, 2, said.append)
    assert len(contestants[0].batches[case]) == 2
    assert contestants[1].failure and not contestants[1].batches
    assert any(line.startswith("dead is given up") for line in said)


def test_a_peer_that_does_not_start_is_left_out_and_why_is_said(stand: Stand, tmp_path: Path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "broken").symlink_to("/bin/false")
    monkeypatch.setattr(peers, "environment_of", lambda peer, say: tmp_path)
    peer = Peer("broken", "broken==1", "broken")
    started = peers.start(stand.servers, peer, stand.worker.url, tmp_path, print)
    assert started.server is None and started.failure.startswith("broken ended with 1")


def made_up(ours: float, theirs: float, added: float) -> Report:
    """CPU seconds of both on every kind of traffic, and seconds that ours adds to the p50."""

    def batches(cpu: float | None, more: float) -> dict[Case, list[Batch]]:
        rounds = [Batch(cpu and cpu * n, 0.001 * n + more, 0.003, 0.001) for n in (1, 2, 3)]
        return dict.fromkeys(CASES, rounds)

    gateways = {DIRECT: batches(None, 0.0), SEAMARK: batches(ours, added), VLLM_ROUTER: batches(theirs, 0.0001)}
    return Report(gateways, {"litellm": "no such version"}, 0, 100)


def test_a_gateway_that_costs_too_much_or_was_not_measured_beside_the_router_has_not_held():
    for report, held in ((made_up(170e-6, 200e-6, 0.0004 - 1e-9), 3), (made_up(510e-6, 200e-6, 0.00071), 0)):
        assert [line.startswith("held") for line in verdicts(report, beside_router=True)] == [bool(held)] * 3
    assert "NOT HELD: CPU over vllm-router, 2 kB, plain, 16 clients: 2.55, at most 1.5 wanted" in verdicts(report, True)
    del report.batches[VLLM_ROUTER]
    assert [line.count("not taken") for line in verdicts(report, beside_router=True)] == [0, 1, 1]


def test_the_table_names_a_missing_peer_and_both_gateways():
    block = render(made_up(240e-6, 200e-6, 0.0005)).partition("\n\n")[0].splitlines()
    assert block[3].split() == ["seamark", "480", "360..600", "+0.50", "+0.00", "+0.00", "1.20"]
    assert block[5].strip() == "litellm         is missing: no such version"
