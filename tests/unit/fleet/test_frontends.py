"""Workers whose HTTP server has no middleware, and engines that share one: found by the worker's URL alone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.bench.harness.prompts import prose
from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from proxy.server.status import warnings
from tests.harness.fake_engine import engine_info
from tests.harness.in_memory_gateway import InMemoryGateway, told
from tests.harness.recording_worker import RecordingWorker, respond

URL = "http://127.0.0.1:1"

REPORTS = 2  # port

Started = Callable[..., Awaitable[InMemoryGateway]]


@dataclass
class Rust(RecordingWorker):
    """vLLM's frontend in Rust: no middleware, and few of vLLM's metrics."""

    url: str = URL
    hits: bool = True
    lacks: tuple[str, ...] = (MESSAGES, RESPONSES, CHAT + "/render")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            text = "vllm:spec_decode_num_drafts_total 0.0\nvllm:prefix_cache_hits_total 0.0\n"
            await respond(send, text.encode(), "text/plain")
        elif scope["path"].startswith("/seamark/"):
            await respond(send, b"", status=404)
        else:
            await super().__call__(scope, receive, send)


@dataclass
class Collector:
    """The port that a worker's reports are read at."""

    worker: RecordingWorker
    api_key: str | None = None
    refused: int = 0
    url: str = f"http://127.0.0.1:{REPORTS}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        wanted = (b"authorization", f"Bearer {self.api_key}".encode())
        if not scope["path"].startswith("/seamark/") or (self.api_key is not None and wanted not in scope["headers"]):
            self.refused += 1
            await respond(send, b"", status=404)
        else:
            await RecordingWorker.__call__(self.worker, scope, receive, send)


class Stranger:
    url = f"http://127.0.0.1:{REPORTS}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b"<html>seamark</html>", "text/html")


LISTED = {"0": {"publisher": "null", "endpoint": f"tcp://127.0.0.1:{REPORTS}", "topic": "seamark"}}

KV_EVENTS = {"0": {"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv-events"}}


async def before(in_memory: Started, worker: RecordingWorker, *others: Any, key: str = "") -> InMemoryGateway:
    """A gateway that knows the worker's URL, and its key if it has one, where `others` answer at theirs."""
    gateway = await in_memory(worker, is_started=False)
    gateway.upstream.workers |= {each.url: each for each in others}
    gateway.upstream.own_headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    gateway.app.gateway.start()
    await gateway.gateway.pool.ready()
    return gateway


SYSTEM = {"role": "system", "content": prose(300, 1)}


def chat(question: str) -> dict[str, Any]:
    return {"model": "m", "messages": [SYSTEM, {"role": "user", "content": question}]}


async def test_the_workers_key_is_sent_to_its_port_and_a_stranger_there_is_not_believed(in_memory, caplog):
    caplog.set_level(logging.INFO)
    worker = Rust(sources=LISTED, api_key="right")
    collector = Collector(worker, api_key="right")
    gateway = await before(in_memory, worker, collector, key="right")
    assert (await gateway.status())["workers"][0]["engine"] and not collector.refused
    for other in (Stranger(), None):
        worker = Rust(sources=LISTED)
        gateway = await before(in_memory, worker, *filter(None, (other,)))
        (status,) = (await gateway.status())["workers"]
        assert status["engine"] is None and f"http://127.0.0.1:{REPORTS} does not give them" in caplog.text
        assert any("cannot be read" in sentence for sentence in warnings(gateway.gateway))
        assert (await gateway.post(chat("?"))).status_code == 200
        caplog.clear()


@dataclass
class Python(RecordingWorker):
    """A `vllm serve` that was started without the flag `--middleware`, with the plugin installed."""

    url: str = URL
    hits: bool = True
    reports: str = f"127.0.0.1:{REPORTS}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/seamark/"):
            await respond(send, b"", status=404)
        elif scope["path"] == "/metrics":
            text = f"process_start_time_seconds {self.boot}\n{engine_info(reports=self.reports)}"
            await respond(send, text.encode(), "text/plain")
        else:
            await super().__call__(scope, receive, send)


@pytest.mark.parametrize("sources", [None, KV_EVENTS])
async def test_a_python_frontend_tells_the_port_in_its_metrics_whatever_its_version(in_memory, sources):
    worker = Python(sources=sources)
    gateway = await before(in_memory, worker, Collector(worker))
    await gateway.post(chat("Any ship today?"))
    await told(worker)
    second = await gateway.post(chat("Any ship tomorrow?"))
    assert second.headers["x-seamark-reason"] == "hit" and second.headers["x-seamark-predicted"] != "0"
    (status,) = (await gateway.status())["workers"]
    assert status["frontend"] == {"name": "", "lacks": []}
