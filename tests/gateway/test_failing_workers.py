"""Workers that fail, sleep, draft, are doubted, or come and go by a resolver: who is asked, and what is said of it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness.servers import free_port
from proxy.commands import doctor
from proxy.fleet import discovery
from proxy.fleet.worker import BREAKER_FAILURES
from proxy.http.client import Refused, Silent, Unreachable
from proxy.pipeline.sse import GONE_CHECKS
from tests.harness.gateways import OwnGateway, chat, metric, own_gateway, post, start_gateway
from tests.harness.raw_worker import raw_worker
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.waiting import until, wait_for

EMBEDDINGS = "/v1/embeddings"


def dies(body: bytes, served: int) -> None:
    """A worker that has worked on a request for a while: what it was sent is not lost on the way."""
    time.sleep(0.3)


def test_what_a_worker_has_read_is_never_sent_again(fleet):
    with raw_worker(dies) as worker:
        gateway = start_gateway(fleet, worker)
        failed = post(gateway, chat("once"))
        assert failed.status_code == 502 and failed.json()["error"]["code"] == "worker_failed"
        assert len(worker.seen[""]) == 1 and metric(gateway, "seamark_resent_total") == 0


@pytest.mark.parametrize("fault", [Refused("nothing listens"), Unreachable("no connection within 2 s"), Silent()])
async def test_a_silent_stream_ends_once_nothing_listens_at_its_worker_and_not_while_that_is_slow(in_memory, fault):
    worker = RecordingWorker()
    own = await in_memory(worker, is_started=False)
    await own.gateway.pool.check_all()
    worker.pause.set()
    stream = own.opened(chat("Tide?", stream=True, stream_options={"include_usage": True}))
    await stream.message()
    pieces, told = stream.body(), b""
    own.upstream.faults[worker.url] = fault
    for worker.pause_after in (1, 2):  # it says something between two checks
        told += await anext(pieces)
        for _ in range(GONE_CHECKS - 1):
            await own.gateway.pool.check_all()
    own.upstream.faults.clear()
    await own.gateway.pool.check_all()
    own.upstream.faults[worker.url] = fault
    for checks in (GONE_CHECKS - 1, 1):
        assert stream.task.done() is False and b"error" not in told
        for _ in range(checks):
            await own.gateway.pool.check_all()
    worker.pause.clear()
    told += b"".join([piece async for piece in pieces])
    is_gone = isinstance(fault, Refused)
    assert (told in worker.answers, b"broke off" in told) == (not is_gone, is_gone)


async def test_a_worker_that_fails_while_its_health_is_well_is_taken_out(in_memory, caplog):
    sick, well = RecordingWorker(status=500), RecordingWorker()
    gateway = await in_memory(sick, well)
    answers = [await gateway.post({"model": "m", "input": f"{number}"}, EMBEDDINGS) for number in range(60)]
    failed = [answer for answer in answers if answer.status_code != 200]
    # A slow machine may come to the first trial.
    assert BREAKER_FAILURES <= len(failed) == len(sick.requests) <= BREAKER_FAILURES + 2
    name = sick.url.removeprefix("http://")
    assert gateway.metric("seamark_worker_up", worker=name) == 0
    states = {each["name"]: each["breaker"] for each in (await gateway.status())["workers"]}
    assert sorted(states.values()) == ["closed", "open"] and states[name] == "open"
    assert f"worker {name} fails" in caplog.text


async def test_one_request_that_fails_everywhere_takes_no_worker_out(in_memory):
    both = [RecordingWorker(status_by=lambda body: 500 if b"poison" in body else 200) for _ in range(2)]
    gateway = await in_memory(*both)
    for _ in range(4 * BREAKER_FAILURES):
        assert (await gateway.post(chat("poison"))).status_code == 500
    assert gateway.metric("seamark_worker_up") == 2


async def test_the_last_worker_is_not_taken_out(in_memory):
    gateway = await in_memory(RecordingWorker(status_by=lambda body: 200 if b"good" in body else 500))
    words = [f"bad {number}" for number in range(2 * BREAKER_FAILURES)] + ["good", "bad", "good"]
    statuses = [(await gateway.post(chat(word))).status_code for word in words]
    assert statuses == [500] * 2 * BREAKER_FAILURES + [200, 500, 200]


README = (Path(__file__).parents[2] / "proxy" / "README.md").read_text()

WINDOW = "a layer has a sliding window, and vLLM finds whole blocks only"

STATES = {
    "`/sleep?level=0`": {"sleeps": (0,)},
    "`/sleep?level=1`": {"sleeps": (1,)},
    "`/sleep?level=2`": {"sleeps": (2,)},
    "one of two engines sleeps": {"sleeps": (None, 1)},
    "`/pause`": {"paused": True},
    "its plugin keeps no state for any hint": {"refused": WINDOW},
}


def rows() -> dict[str, list[str]]:
    """The cells behind the first, by the first."""
    _, table = README.split("### What a worker says of itself")
    lines = [line for line in table.split("###")[0].splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_the_readme_has_each_state_and_no_other():
    assert rows().keys() == STATES.keys()


@pytest.mark.parametrize("state", STATES)
async def test_a_workers_state_is_said_in_the_same_words_wherever_it_matters(in_memory, capsys, caplog, state):
    caplog.set_level(logging.INFO)
    said, ready, answer, reason = rows()[state]
    words = said if answer == "503" else WINDOW
    with recording_worker() as worker:  # which the doctor asks, too
        gateway = await in_memory(worker, health_interval=0.1)

        async def is_hinted() -> bool:
            return "x-seamark-boundary" in (await gateway.post(chat("Tide?"))).headers

        for name, value in STATES[state].items():
            setattr(worker, name, value)
        await until(lambda: words in caplog.text)
        asked = await gateway.get("/ready")
        answered = await gateway.post(chat("Tide?"))
        assert (asked.status_code, answered.status_code) == (int(ready), int(answer[:3]))
        if answer == "503":
            assert words in asked.json()["error"]["message"] and words in answered.json()["error"]["message"]
            assert not worker.requests
        else:
            assert "x-seamark-boundary" not in answered.headers and b"seamark_boundaries" not in worker.requests[0].body
            assert f"`{answered.headers['x-seamark-reason']}`" == reason
        live = (await gateway.get("/seamark/live")).json()
        assert words in " ".join(live["alarms"] + live["warnings"])
        (shown,) = (await gateway.get("/seamark/status")).json()["workers"]
        assert words in (shown["why_down"] if answer == "503" else shown["refused"])
        assert await asyncio.to_thread(doctor.main, ["--worker", worker.url]) == 1
        verdict, *_ = capsys.readouterr().out.splitlines()
        assert verdict.startswith("cannot hit: ") and verdict.endswith(words)
        worker.sleeps, worker.paused, worker.refused = (None,), False, ""
        await until(is_hinted)
        assert words not in str((await gateway.get("/seamark/live")).json()["alarms"])


HOST = "vllm.test"

ASK = chat("Tide?")


@pytest.fixture
def resolver(monkeypatch) -> list[str]:
    """What the name's addresses are from now on; none: the name is not known."""
    addresses: list[str] = []

    async def addresses_of(host: str, port: int) -> Sequence[str]:
        assert host == HOST
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "told to")
        return tuple(addresses)

    monkeypatch.setattr(discovery, "addresses_of", addresses_of)
    return addresses


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def own(resolver, port) -> Iterator[OwnGateway]:
    with own_gateway(workers_dns=(f"{HOST}:{port}",), workers_dns_interval=0.05) as started:
        yield started


def are_up(own: OwnGateway, *workers: RecordingWorker) -> None:
    """Return once these are, and no other one."""
    wait_for(lambda: {worker.url for worker in own.gateway.pool.up} == {worker.url for worker in workers})
    wait_for(lambda: not any(worker.warming for worker in own.gateway.pool.workers))


def test_a_gateway_may_start_before_any_worker_and_follows_them_to_the_end_of_their_requests(own, resolver, port):
    assert httpx.get(own.url + "/ready").status_code == post(own, ASK).status_code == 503
    with (
        recording_worker("127.0.0.2", port) as one,
        recording_worker("::1", port) as two,
        ThreadPoolExecutor() as pool,
    ):
        resolver[:] = ["127.0.0.2", "127.0.0.3"]  # nothing listens at the second
        are_up(own, one)
        assert {post(own, ASK).headers["x-seamark-worker"] for _ in range(4)} == {one.url[7:]}
        resolver[:] = ["127.0.0.2", "::1"]
        are_up(own, one, two)
        before = len(one.requests), len(two.requests)
        one.hold.set()
        two.hold.set()
        under_way = pool.submit(post, own, ASK)
        wait_for(lambda: (len(one.requests), len(two.requests)) != before)
        gone, stays, address = (one, two, "::1") if len(one.requests) > before[0] else (two, one, "127.0.0.2")
        resolver[:] = [address]
        are_up(own, stays)
        stays.hold.clear()
        assert post(own, ASK).headers["x-seamark-worker"] == stays.url[7:]
        gone.hold.clear()
        assert under_way.result().headers["x-seamark-worker"] == gone.url[7:]
        wait_for(lambda: gone.url[7:] not in httpx.get(own.url + "/metrics").text)


def test_addresses_that_change_all_the_time_fail_no_request(own, resolver, port):
    addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
    with ExitStack() as stack:
        for address in addresses:
            stack.enter_context(recording_worker(address, port))
        for number in range(30):
            stays = [address for address in addresses if any(address in each.url for each in own.gateway.pool.up)]
            coming = addresses[number % 3 :][:2]
            resolver[:] = [*coming, *stays]
            wait_for(lambda: len(own.gateway.pool.up) >= 2)
            resolver[:] = [*coming]
            assert post(own, ASK).status_code == 200


async def test_what_a_worker_says_of_its_drafts_decides_its_hints_and_is_seen_and_it_is_asked_nothing(
    in_memory, caplog
):
    caplog.set_level(logging.INFO, "seamark")
    worker = RecordingWorker(drafts=("trial", "", "3 of 3 prompts agree"), ahead=1)
    gateway = await in_memory(worker, self_check_interval=0.1, health_interval=3600)

    async def becomes(state: str, why: str = "", figures: str = "") -> bool:
        """Whether a client's request has a hint then."""
        worker.drafts = (state, why, figures)
        await gateway.shows(lambda status: status["workers"][0]["drafts"] == {"state": state, "trial": figures})
        await gateway.gateway.pool.check_all()
        assert gateway.metric("seamark_draft_gate", state=state) == 1
        await gateway.post(chat("one"))
        return "seamark_boundaries" in worker.requests[-1].fields["vllm_xargs"]

    async def warned() -> str:
        return " ".join((await gateway.get("/seamark/live")).json()["warnings"])

    assert not await becomes("trial", figures="3 of 3 prompts agree")
    assert "until its trial is over (3 of 3 prompts agree)" in await warned() and "hints are on trial" in caplog.text
    assert await becomes("open") and "hints are on beside drafts" in caplog.text
    worker.boot = "1.8e+09"
    await gateway.gateway.pool.check_all()
    assert not await becomes("trial", figures="1 of 1 prompts agree")
    assert not await becomes("closed", "answers differ", "0 of 2 prompts agree")
    assert "drafts: answers differ" in await warned()
    assert "hints are off until it restarts: drafts: answers differ (0 of 2 prompts agree)" in caplog.text
    assert all("chat" in each.path for each in worker.requests if each.method == "POST"), "the gateway tries nothing"


async def test_a_worker_in_quarantine_gets_the_salt_and_no_other_change(in_memory, worker):
    own = await in_memory(worker)
    (asked,) = own.gateway.pool.workers
    asked.quarantine()
    salt = asked.salt({"model": "m"})

    def sent() -> dict:
        return json.loads(worker.requests[-1].body)

    raw = json.dumps(chat("Tide?"), indent=2).encode()
    answer = await own.post(raw)
    assert worker.requests[-1].body.startswith(raw[:-1] + b',"cache_salt":"%b"' % salt.encode())
    assert "seamark_boundaries" not in sent()["vllm_xargs"]
    assert answer.headers["x-seamark-reason"] == "hint_ignored"
    await own.post(chat("Tide?", cache_salt="own", vllm_xargs={"a": 1}))
    assert (sent()["cache_salt"], sent()["vllm_xargs"].keys()) == ("own" + salt, {"a", "seamark_load"})
    await own.post({"model": "m", "input": "x"}, "/v1/embeddings")
    assert sent()["cache_salt"] == salt
    for unread in (b"{audio", b""):
        await own.post(unread, "/v1/audio/transcriptions", content_type="audio/wav")
        assert worker.requests[-1].body == unread
    await own.post(chat("Tide?", cache_salt=""))
    assert sent()["cache_salt"] == ""
    worker.boot = "1.8e+09"
    await until(lambda: asked.salt({"model": "m"}) is None)
    await own.post(chat("Tide?"))
    assert "cache_salt" not in sent()
