"""Limits and queues, silence and slowness, stopping, and workers that fail: every bound on both of its sides."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from proxy.routing.prefix_index import ENTRY_BYTES
from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import CHAT, chat, post, start_gateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until, wait_for


def chats_at(worker: RecordingWorker) -> int:
    return sum(request.target == CHAT for request in worker.requests)


async def test_a_full_worker_has_not_lost_what_it_holds(in_memory, worker):
    other = RecordingWorker(cached=0)
    gateway = await in_memory(worker, other, max_inflight=1)
    owner = (await gateway.post(chat("first"))).headers["x-seamark-worker"]
    holder, second = (worker, other) if owner in worker.url else (other, worker)
    holder.hold.set()
    second.cached = 0
    kept = asyncio.create_task(gateway.post(chat("second")))
    await until(lambda: chats_at(holder) == 2)
    answer = await gateway.post(chat("third"))
    assert answer.headers["x-seamark-worker"] in second.url
    assert answer.headers["x-seamark-reason"] == "other_worker"
    holder.hold.clear()
    assert (await kept).status_code == 200


async def test_a_model_whose_workers_are_full_holds_up_no_other(in_memory, worker):
    second = RecordingWorker(models=("other",))
    gateway = await in_memory(worker, second, max_inflight=1)
    worker.hold.set()
    waiting = [asyncio.create_task(gateway.post(chat(f"{number}"))) for number in range(3)]
    await until(lambda: gateway.metric("seamark_queued") == 2)
    assert (await gateway.post(chat("at once", model="other"))).status_code == 200
    worker.hold.clear()
    assert {(await answer).status_code for answer in waiting} == {200}


async def test_a_body_counts_as_what_it_takes_parsed(in_memory, worker):
    gateway = await in_memory(worker, max_bodies_bytes=1_000_000)
    many = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "metadata": [{}] * 30_000})
    refused = await gateway.post(many.encode())
    assert refused.status_code == 503 and "max_bodies_bytes" in refused.json()["error"]["message"]
    assert chats_at(worker) == 0
    assert (await gateway.post(many.replace(", {}" * 29_000, "").encode())).status_code == 200


async def test_a_key_leaves_room_for_other_keys(in_memory, worker, keys):
    gateway = await in_memory(worker, max_bodies_bytes=300_000, api_keys=keys)
    worker.hold.set()
    kept = [asyncio.create_task(gateway.post(chat("x" * 80_000), **bearer("ann")))]
    await until(lambda: chats_at(worker) == 1)
    refused = await gateway.post(chat("x" * 80_000), **bearer("ann"))
    assert refused.status_code == 429 and refused.headers["retry-after"]
    kept.append(asyncio.create_task(gateway.post(chat("x" * 20_000), **bearer("bob"))))
    await until(lambda: chats_at(worker) == 2)
    worker.hold.clear()
    assert [(await answer).status_code for answer in kept] == [200, 200]


async def test_the_index_of_prefixes_forgets_the_oldest_when_its_share_of_the_memory_is_full(in_memory, worker):
    entries = 12
    gateway = await in_memory(worker, memory_bytes=-(-8 * entries * ENTRY_BYTES // 3))
    for number in range(2 * entries):
        assert (await gateway.post(chat(f"{number}?"))).status_code == 200
    assert (await gateway.status())["directory_entries"] == entries
    assert gateway.metric("seamark_directory_evictions_total") >= entries


async def test_the_limits_of_a_key(in_memory, worker, keys):
    keys.write_text(entry("ann", max_inflight=1, max_queued=1) + entry("bob"))
    gateway = await in_memory(worker, api_keys=keys)

    async def ask(name: str) -> httpx.Response:
        return await gateway.post(chat("Tide?"), **bearer(name))

    worker.hold.set()
    anns = [asyncio.create_task(ask("ann")) for _ in range(2)]
    await until(lambda: chats_at(worker) == 1)
    bobs = [asyncio.create_task(ask("bob")) for _ in range(3)]
    await until(lambda: chats_at(worker) == 4)  # whoever waits for a limit of its own holds nobody up
    refused = await ask("ann")
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    worker.hold.clear()
    assert {(await answer).status_code for answer in (*anns, *bobs)} == {200}


def test_stopping_is_bounded_and_whoever_is_cut_off_is_told(fleet, worker):
    pool = ThreadPoolExecutor()
    gateway = start_gateway(fleet, worker, flags=("--drain-timeout", "1"))
    worker.pause.set()
    stream = pool.submit(post, gateway, chat("stream", stream=True))
    wait_for(lambda: chats_at(worker) == 1)
    worker.hold.set()
    whole_answer = pool.submit(post, gateway, chat("whole"))
    wait_for(lambda: chats_at(worker) == 2)
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as half:  # a body that does not come to its end
        half.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n")
        assert half.recv(4096).startswith(b"HTTP/1.1 100")
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(30) == -signal.SIGTERM
        assert half.recv(4096).split(b" ")[1:2] in ([], [b"503"])
    assert "Traceback" not in gateway.log.read_text()
    last = stream.result().content.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stopping"
    assert whole_answer.result().status_code == 503


async def test_the_depth_of_a_body_is_bounded(in_memory, worker):
    gateway = await in_memory(worker, max_json_depth=32)
    for depth, status in ((32, 200), (33, 400)):
        nested = "[" * (depth - 1) + '"[[[[["' + "]" * (depth - 1)
        answer = await gateway.post(f'{json.dumps(chat("Tide?"))[:-1]}, "x": {nested}}}'.encode())
        assert answer.status_code == status
    assert "max_json_depth" in answer.json()["error"]["message"]


@pytest.mark.parametrize("filling", [b"{},", b'"":0,'])
async def test_the_values_of_a_body_are_bounded_and_the_worker_sees_none_of_a_larger_one(in_memory, worker, filling):
    gateway = await in_memory(worker, max_json_values=1000)
    opened, closed = (b"{", b'"z":0}') if b":" in filling else (b"[", b"0]")
    for times, status in ((200, 200), (3000, 400)):
        raw = json.dumps(chat("Tide?")).encode()[:-1] + b', "x": ' + opened + filling * times + closed + b"}"
        answer = await gateway.post(raw)
        assert answer.status_code == status
    assert "max_json_values" in answer.json()["error"]["message"] and len(worker.requests) == 1
