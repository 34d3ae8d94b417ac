"""Where workers are, what a probe makes of their answers, and where their reports are read."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from proxy.errors import SettingsError
from proxy.fleet import discovery
from proxy.fleet.discovery import Discovery, addresses_of
from proxy.fleet.probe import (
    ALL,
    IS_PAUSED,
    IS_SLEEPING,
    NO_HTTP,
    OPTIONAL,
    EngineAnswers,
    Probe,
    Probed,
    Reports,
    Told,
    Unwell,
    base_url,
    read_sources,
    why_broken,
)
from proxy.fleet.worker_metrics import Accepted, EngineInfo, StepTimes, WorkerMetrics, read
from proxy.http.client import Broken, Malformed, Unreachable
from proxy.metrics import Metrics
from proxy.server.status import warnings
from proxy.settings import add_arguments, load
from proxy.version import version
from tests.harness.fake_engine import engine_info
from tests.harness.gateways import chat
from tests.harness.in_memory_gateway import InMemoryGateway, told
from tests.harness.recording_worker import RecordingWorker, respond

URL = "http://w:1"

INFO = b'seamark_engine_info{match_unit="%b",block_size="%b",version="' + version().encode() + b'",vllm="0.32.0"} 1.0\n'


class Server:
    """A vLLM without the plugin, whose answers can have another status."""

    def __init__(self) -> None:
        self.pages = {
            "/health": b"",
            "/metrics": b'process_start_time_seconds 1.0\nvllm:engine_sleep_state{sleep_state="awake"} 1.0\n',
            "/v1/models": b'{"data":[{"id":"m"}]}',
            "/version": b'{"version":"0.32.0"}',
        }
        self.status: dict[str, int] = {}

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        path = url.removeprefix(URL)
        if path not in self.pages:
            raise Unreachable
        return self.status.get(path, 200), self.pages[path]

    async def probe(self) -> Probed:
        async def lull() -> None:
            """Nobody else has work."""

        return await Probe(self, URL).probe(Probed(), own_id="me", of_plugin=False, lull=lull)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "status", "answer", "words"),
    [
        ("/health", 200, b'{"gateway":"me"}', "this is the gateway itself"),
        ("/health", 500, b"", "not well: /health answers 500"),
        ("/v1/models", 401, b"", "not vLLM: /v1/models answers 401"),
        ("/v1/models", 200, b'{"data":[{"id":' + b"7" * 5000 + b"}]}", "not vLLM: /v1/models lists no models"),
        *(
            ("/metrics", 200, metrics, "not vLLM: its /metrics cannot be read")
            for metrics in (
                b"process_start_time_seconds x\n",
                b"vllm:prefix_cache_hits_total NaN\n",
                b'seamark_engine_info{version="%b"} 1.0\n' % version().encode(),
                INFO % (b"1" * 5000, b"384"),
                INFO % (b"0", b"384"),
                INFO % (b"16", b"-384"),
            )
        ),
    ],
)
async def test_what_cannot_be_used_is_unwell(path, status, answer, words):
    server = Server()
    server.pages[path], server.status[path] = answer, status
    with pytest.raises(Unwell, match=words) as found:
        await server.probe()
    assert status == 200 or (found.value.path, found.value.status) == (path, status)


async def test_what_a_worker_is_follows_from_what_it_says():
    server = Server()
    plain = await server.probe()
    assert (plain.is_vllm, plain.is_gateway, plain.vllm, plain.metrics.engine) == (True, False, "0.32.0", None)
    del server.pages["/version"]
    other = await server.probe()
    assert (other.is_vllm, other.is_gateway, other.vllm) == (False, False, "")
    server.pages["/metrics"] += engine_info().encode()
    patched = await server.probe()
    assert patched.metrics.engine is not None and patched.is_vllm and patched.vllm == patched.metrics.engine.vllm
    server.pages["/health"] = b'{"gateway":"another"}'
    gateway = await server.probe()
    assert (gateway.is_vllm, gateway.is_gateway) == (False, True)


async def test_a_frontend_in_rust_is_known_by_its_words_with_the_routes_that_it_lacks():
    rust = b"not supported by the Rust frontend yet"
    for said, lacks in (
        ([(404, b""), (405, rust), (400, b"")], OPTIONAL[:2]),
        ([Broken(), Unreachable(), (501, rust)], OPTIONAL[2:]),
        ([(501, b"")] * 3, None),  # not the frontend in Rust
    ):
        fetch = AsyncMock(side_effect=said)
        frontend = await Probe(SimpleNamespace(fetch=fetch), URL).frontend()
        assert frontend == (ALL if lacks is None else ("vLLM's Rust frontend", lacks))
        assert [asked.args[1] for asked in fetch.mock_calls] == [URL + path for path in OPTIONAL]


def test_why_a_worker_that_takes_connections_gives_no_answer():
    words = "it closes the connection without an answer"
    assert (why_broken(Malformed(), True), why_broken(Broken(), True)) == (NO_HTTP, words)
    assert why_broken(Broken(), False) == f"{words}: https:// instead of http://?"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, "serves m; vLLM 0.32.0; not patched, so it gets no hints: seamark doctor --worker http://w:1"),
        ({"models": ()}, "serves no model; vLLM 0.32.0; not patched, so it"),
        ({"is_gateway": True}, "serves m; a Seamark gateway, not a worker"),
        (
            {"metrics": WorkerMetrics(engine=EngineInfo("0.3.0", "0.32.0", 16, 384, refused="a window"))},
            "serves m; vLLM 0.32.0; patched (Seamark 0.3.0, match unit 16 tokens), but it gets no hints: a window",
        ),
        (
            {"reports": Reports(why_not="why")},
            "serves m; vLLM 0.32.0; it has Seamark's plugin and gets no hints, since its reports cannot be read: why",
        ),
    ],
)
def test_what_a_worker_is_in_words(known, words):
    probed = Probed(**{"url": "http://w:1", "models": [{"id": "m"}], "vllm": "0.32.0", **known})
    assert probed.words.startswith(words)


OF_ENGINE = f'seamark_engine_info{{block_size="384",match_unit="16",version="{version()}",vllm="0.32.0"}}'


def test_all_that_a_patched_engine_says_is_read_and_nothing_else():
    text = (
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
        "# TYPE process_start_time_seconds gauge\n"
        "process_start_time_seconds 1.76378925345e+09\n"
        f"{OF_ENGINE} 1.0\n"
        "seamark_pass_seconds 0.5\n"
        "seamark_token_seconds 0.001\n"
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 9000.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1600.0\n'
        'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="4096",num_gpu_blocks="None"} 1.0\n'
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 70.0\n'
    )
    engine = EngineInfo(version(), "0.32.0", 16, 384)
    known = {"accepted": Accepted(), "block_size": 16}
    assert read(text) == WorkerMetrics("1.76378925345e+09", engine, StepTimes(0.5, 0.001), 1600, 4096, 3, **known)
    states = (("awake", 1, 0), ("discard_all", 0, 0), ("awake", 0, 1), ("odd", 1, 2))
    lines = (f'vllm:engine_sleep_state{{engine="{at}",sleep_state="{state}"}} {value}' for state, value, at in states)
    text = "\n".join([*lines, 'vllm:engine_sleep_state{sleep_state="weights_offloaded"} 1\n'])
    assert read(text).sleep_levels == (None, 0, 0, 1)


@pytest.mark.parametrize(("other", "called"), [("0.0.9", "0.0.9"), ("99.0", "99.0"), ("", "of unknown version")])
def test_a_plugin_of_another_release_is_not_used_and_the_sentence_says_update_the_plugin(other, called):
    found = read(f'seamark_engine_info{{version="{other}"}} 1.0\n')  # whatever else it says
    words = f"its plugin is Seamark {called}, this gateway {version()}: update the plugin"
    assert (found.engine, found.other_release) == (None, words)
    release = version().partition("+")[0]
    for of_it, differs in ((f"{release}9", True), (release + "+gother", "+" in version()), (release, False)):
        patch = read(OF_ENGINE.replace(version(), of_it) + " 1.0\n")
        assert (": install both from one version" in Probed(metrics=patch).words) is differs and not patch.other_release


OURS = {"enable_kv_cache_events": False, "publisher": "null", "endpoint": "tcp://127.0.0.1:33007", "topic": "seamark"}

THEIRS = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv-events"}


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ({"0": OURS, "1": OURS}, Told("127.0.0.1:33007", ranks=(0, 1))),
        ({"0": THEIRS}, Told(beside="*:5556")),
        ({"1": THEIRS | {"endpoint": "tcp://*:5558"}, "0": THEIRS}, Told(beside="*:5556", ranks=(0, 1))),
        ({"0": THEIRS | {"endpoint": "inproc://x"}}, Told()),
        ({"0": "text"}, Told()),
        *((answer, Told()) for answer in (b"[]", b"{", b"\xff", b"[" * 100_000)),
    ],
)
def test_vllms_list_of_publishers_tells(sources, told):
    assert read_sources(sources if isinstance(sources, bytes) else json.dumps(sources).encode()) == told


@pytest.mark.parametrize(
    ("worker", "at", "url"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:33007", "http://127.0.0.1:33007"),
        ("http://localhost:8000", "127.0.0.1:33007", "http://localhost:33007"),
        ("http://spark:8000", "192.0.2.7:8001", "http://spark:8001"),  # of what it tells, the port alone
        ("http://[::1]:8000", "[::1]:33007", "http://[::1]:33007"),
        ("https://spark/prefix", "evil.example:8001", "http://spark:8001"),
    ],
)
def test_the_gateway_asks_no_host_but_the_workers(worker, at, url):
    assert base_url(worker, at) == url
    with pytest.raises(ValueError, match="SEAMARK_REPORTS_AT"):
        base_url("http://spark:8000", "127.0.0.1:33007")
    for port in ("70000", "1" * 5000):
        with pytest.raises(ValueError, match="names no port"):
            base_url(worker, f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("levels", "is_sleeping", "is_paused", "words"),
    [
        ((None,), False, False, ""),
        ((0,), False, False, ""),  # /resume has ended a sleep of level 0, and the gauge stays
        ((0,), False, None, "asleep (level 0)"),  # it may be paused
        ((None,), True, True, "asleep (paused): POST /resume wakes it"),  # vLLM calls it sleeping, too
        ((1,), True, True, "asleep (level 1): POST /wake_up wakes it"),
        ((None,), True, False, "asleep: POST /wake_up wakes it"),
    ],
)
def test_the_engines_word_counts_and_else_its_gauge(levels, is_sleeping, is_paused, words):
    found = EngineAnswers("")
    for path, said in ((IS_SLEEPING, is_sleeping), (IS_PAUSED, is_paused)):
        found.take(path, 404 if said is None else 200, json.dumps({path[1:]: said}).encode())  # None: it has no route
    why = found.why_asleep(levels)
    assert why.startswith(words) and bool(why) == bool(words)


def test_what_a_route_answers_is_what_it_says_and_one_without_an_answer_is_lacking():
    paused = b'{"is_paused":true}'
    for status, body, said in (
        (200, paused, {IS_SLEEPING: None, IS_PAUSED: True}),
        (500, paused, {IS_SLEEPING: None, IS_PAUSED: None}),  # nothing now
        (404, paused, {IS_SLEEPING: None}),  # it lacks the route: it is not asked there again
        (200, b'{"is_paused":1}', {IS_SLEEPING: None}),
        (200, b"no JSON", {IS_SLEEPING: None}),
    ):
        found = EngineAnswers("boot")
        found.take(IS_PAUSED, status, body)
        assert found.said == said


ONE = "10.0.0.1"


class Resolver:
    """Answers with what it is told to; an exception is raised. `changes`: what is discovered by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discovery, "addresses_of", self)
        self.told: Sequence[str] | Exception = (ONE,)
        self.slow, self.asked = asyncio.Event(), 0
        self.slow.set()
        self.changes: list[tuple[str, ...]] = []
        self.metrics = Metrics()
        self.looking = Discovery(("http://vllm.test:8000",), 1.0, 60.0, self.metrics, self.changes.append)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        await self.slow.wait()
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    @property
    def failures(self) -> float | None:
        value = self.metrics.registry.get_sample_value
        return value("seamark_discovery_failures_total", {"name": "vllm.test:8000"})


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "not known"), UnicodeError("label")])
async def test_a_name_that_is_not_resolved_keeps_its_workers_for_a_while(error, monkeypatch, caplog):
    resolver = Resolver(monkeypatch)
    looking, changes = resolver.looking, resolver.changes
    now = discovery.time.monotonic()
    monkeypatch.setattr(discovery.time, "monotonic", lambda: now)
    await looking.look()
    resolver.told = error
    for _ in range(3):
        await looking.look()
    assert len(changes) == 1 and resolver.failures == 3
    assert caplog.text.count("cannot be resolved") == 1 and "stay for 60 s" in caplog.text
    monkeypatch.setattr(discovery.time, "monotonic", lambda: now + 60)
    await looking.look()
    assert changes[1:] == [()]
    resolver.told = (ONE,)
    await looking.look()
    assert changes[2:] == [(f"http://{ONE}:8000",)]


async def test_a_resolver_that_hangs_holds_up_no_other_name_and_is_not_asked_twice(monkeypatch):
    monkeypatch.setattr(discovery, "ANSWER_SECONDS", 0.05)
    resolver = Resolver(monkeypatch)
    resolver.slow.clear()
    for _ in range(3):
        await resolver.looking.look()
    assert not resolver.changes and resolver.failures == 3 and resolver.asked == 1
    resolver.slow.set()
    await asyncio.sleep(0)
    await resolver.looking.look()
    assert resolver.changes == [(f"http://{ONE}:8000",)] and resolver.asked == 1


async def test_the_systems_resolver_knows_both_kinds_of_addresses():
    assert "127.0.0.1" in await addresses_of("127.0.0.1", 80)
    assert "::1" in await addresses_of("::1", 80)
    with pytest.raises(socket.gaierror):
        await addresses_of("no-such-name.invalid", 80)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm", "NAME:PORT"),
        ("https://vllm:1", "https"),
        ("me:secret@vllm:1", "credentials"),
        ("http://:8000", "workers_dns"),
    ],
)
def test_what_is_no_name_is_refused_with_the_cure(name, words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SettingsError) as error:
        load(parser.parse_args(["--workers-dns", name]), {})
    assert words in str(error.value) and "workers_dns" in str(error.value) and "secret" not in str(error.value)


AT, REPORTS_AT = "http://127.0.0.1:1", "127.0.0.1:2"

SOURCES = {"0": {"publisher": "null", "endpoint": f"tcp://{REPORTS_AT}", "topic": "seamark"}}


@dataclass
class Frontend(RecordingWorker):
    """A worker whose HTTP server has no middleware, so that its reports are read at another port."""

    url: str = AT
    hits: bool = True
    metrics: str = "vllm:spec_decode_num_drafts_total 0.0\nvllm:prefix_cache_hits_total 0.0\n"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await respond(send, self.metrics.encode(), "text/plain")
        elif scope["path"].startswith("/seamark/"):
            await respond(send, b"", status=404)
        else:
            await super().__call__(scope, receive, send)


@dataclass
class Port:
    """What answers where they are read: a worker's plugin, or a stranger."""

    worker: RecordingWorker | None = None
    refused: int = 0
    url: str = f"http://{REPORTS_AT}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.worker is None:
            await respond(send, b"<html>seamark</html>", "text/html")
        elif (
            self.worker.api_key and (b"authorization", f"Bearer {self.worker.api_key}".encode()) not in scope["headers"]
        ):
            self.refused += 1
            await respond(send, b"", status=404)
        else:
            await RecordingWorker.__call__(self.worker, scope, receive, send)


async def before(in_memory: Any, worker: RecordingWorker, *others: Any) -> InMemoryGateway:
    """A gateway that knows the worker's URL, and its key if it has one, where `others` answer at theirs."""
    gateway: InMemoryGateway = await in_memory(worker, is_started=False)
    gateway.upstream.workers |= {each.url: each for each in others}
    if worker.api_key:
        gateway.upstream.own_headers = [(b"authorization", f"Bearer {worker.api_key}".encode())]
    gateway.app.gateway.start()
    await gateway.gateway.pool.ready()
    return gateway


async def test_the_workers_key_is_sent_to_its_port_and_a_stranger_there_is_not_believed(in_memory, caplog):
    caplog.set_level(logging.INFO)
    worker = Frontend(sources=SOURCES, api_key="right")
    gateway = await before(in_memory, worker, port := Port(worker))
    assert (await gateway.status())["workers"][0]["engine"] and not port.refused
    for others in ([Port()], []):
        gateway = await before(in_memory, Frontend(sources=SOURCES), *others)
        (status,) = (await gateway.status())["workers"]
        assert status["engine"] is None and f"http://{REPORTS_AT} does not give them" in caplog.text
        assert any("cannot be read" in sentence for sentence in warnings(gateway.gateway))
        assert (await gateway.post(chat("?"))).status_code == 200
        caplog.clear()


@pytest.mark.parametrize(
    "sources", [None, {"0": {"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv-events"}}]
)
async def test_a_python_frontend_tells_the_port_in_its_metrics_whatever_its_version(in_memory, sources):
    worker = Frontend(sources=sources)
    worker.metrics = f"process_start_time_seconds {worker.boot}\n{engine_info(reports=REPORTS_AT)}"
    gateway = await before(in_memory, worker, Port(worker))
    await gateway.post(chat("Any ship today?"))
    await told(worker)
    second = await gateway.post(chat("Any ship tomorrow?"))
    assert second.headers["x-seamark-reason"] == "hit" and second.headers["x-seamark-predicted"] != "0"
    (status,) = (await gateway.status())["workers"]
    assert status["frontend"] == {"name": "", "lacks": []}
