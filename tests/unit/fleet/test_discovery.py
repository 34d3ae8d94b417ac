"""What a name's addresses become, what stays when it is not resolved, and that nothing is left of what has gone."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from proxy.errors import SettingsError
from proxy.fleet import discovery
from proxy.fleet.discovery import Discovery, addresses_of
from proxy.metrics import Metrics
from proxy.pipeline.gateway import Gateway
from proxy.settings import Settings, add_arguments, load
from tests.harness.virtual_time import on_virtual_time

NAME = "http://vllm.test:8000"

ONE, TWO = "10.0.0.1", "10.0.0.2"

NOT_KNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


class Resolver:
    """Answers with what it is told to, by host; an exception is raised."""

    def __init__(self, *addresses: str) -> None:
        self.told: Sequence[str] | Exception = addresses
        self.slow = asyncio.Event()
        self.slow.set()
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        await self.slow.wait()
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


def found_by(resolver: Resolver, *names: str, keep: float = 60.0) -> tuple[Discovery, list[tuple[str, ...]], Metrics]:
    changes: list[tuple[str, ...]] = []
    metrics = Metrics()
    return Discovery(names or (NAME,), 1.0, keep, metrics, changes.append, resolver), changes, metrics


def failures(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("seamark_discovery_failures_total", {"name": "vllm.test:8000"})


async def test_each_address_is_a_worker_and_only_changes_are_told():
    resolver = Resolver(ONE, "2001:db8::1", ONE, "fe80::1%eth0")
    looking, changes, metrics = found_by(resolver)
    await looking.look()
    await looking.look()
    assert changes == [(f"http://{ONE}:8000", "http://[2001:db8::1]:8000")]
    resolver.told = (TWO,)
    await looking.look()
    assert changes[1:] == [(f"http://{TWO}:8000",)] and resolver.asked == [("vllm.test", 8000)] * 3
    assert metrics.registry.get_sample_value("seamark_discovered_workers", {"name": "vllm.test:8000"}) == 1


async def test_two_names_of_one_address_are_one_worker():
    looking, changes, _ = found_by(Resolver(ONE), NAME, "http://other.test:8000", "http://other.test:9/base")
    await looking.look()
    assert changes == [(f"http://{ONE}:8000", f"http://{ONE}:9/base")]


@pytest.mark.parametrize("error", [NOT_KNOWN, socket.gaierror(socket.EAI_AGAIN, "try again"), UnicodeError("label")])
async def test_a_name_that_is_not_resolved_keeps_its_workers_for_a_while(error, monkeypatch, caplog):
    resolver = Resolver(ONE)
    looking, changes, metrics = found_by(resolver, keep=60.0)
    await looking.look()
    resolver.told = error
    for _ in range(3):
        await looking.look()
    assert len(changes) == 1 and failures(metrics) == 3
    assert caplog.text.count("cannot be resolved") == 1 and "stay for 60 s" in caplog.text
    now = discovery.time.monotonic()
    monkeypatch.setattr(discovery.time, "monotonic", lambda: now + 61)
    await looking.look()
    assert changes[1:] == [()]
    resolver.told = (ONE,)
    await looking.look()
    assert changes[2:] == [(f"http://{ONE}:8000",)]


async def test_a_resolver_that_hangs_holds_up_no_other_name_and_is_not_asked_twice(monkeypatch):
    monkeypatch.setattr(discovery, "ANSWER_SECONDS", 0.05)
    resolver = Resolver(ONE)
    looking, changes, metrics = found_by(resolver)
    resolver.slow.clear()
    for _ in range(3):
        await looking.look()
    assert not changes and failures(metrics) == 3 and len(resolver.asked) == 1
    resolver.slow.set()
    await asyncio.sleep(0)
    await looking.look()
    assert changes == [(f"http://{ONE}:8000",)] and len(resolver.asked) == 1


async def test_workers_of_a_name_stay_for_as_long_as_is_said_after_it_was_resolved_last(monkeypatch, caplog):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(discovery, "time", SimpleNamespace(monotonic=lambda: clock.now))
    resolver = Resolver(ONE)
    looking, changes, _ = found_by(resolver, keep=60.0)

    async def left(seconds: float, told: Sequence[str] | Exception = NOT_KNOWN) -> int:
        clock.now, resolver.told = 1000 + seconds, told
        await looking.look()
        return len(changes[-1])

    assert [await left(0, (ONE,)), await left(50, (ONE,)), await left(109.9), await left(110)] == [1, 1, 1, 0]
    assert [await left(200), await left(300, (ONE, TWO)), await left(301), await left(359), await left(360)] == [
        0,
        2,
        2,
        2,
        0,
    ]
    assert len(changes) == 4 and caplog.text.count("cannot be resolved") == 2  # once each time that it begins


async def test_a_name_without_a_port_is_asked_for_on_http_s_port():
    resolver = Resolver(ONE)
    looking, changes, _ = found_by(resolver, "http://vllm.test")
    await looking.look()
    assert resolver.asked == [("vllm.test", 80)] and changes == [(f"http://{ONE}:80",)]


@on_virtual_time
async def test_names_are_looked_up_at_a_set_pace() -> None:
    at: list[float] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        at.append(asyncio.get_running_loop().time())
        return (ONE,)

    running = asyncio.create_task(Discovery((NAME,), 30.0, 60.0, Metrics(), lambda found: None, resolve).run())
    await asyncio.sleep(100)
    running.cancel()
    assert at == [0, 30, 60, 90]


async def test_the_systems_resolver_is_asked_where_no_other_one_is_given():
    changes: list[tuple[str, ...]] = []
    looking = Discovery(("http://127.0.0.1:8000",), 1.0, 60.0, Metrics(), changes.append)
    await looking.look()
    assert changes == [("http://127.0.0.1:8000",)]


async def test_the_systems_resolver_knows_both_kinds_of_addresses():
    assert "127.0.0.1" in await addresses_of("127.0.0.1", 80)
    assert "::1" in await addresses_of("::1", 80)
    with pytest.raises(socket.gaierror):
        await addresses_of("no-such-name.invalid", 80)


async def test_a_thousand_changes_leave_nothing_behind():
    gateway = Gateway(Settings(workers_dns=("vllm.test:8000",)))
    pool, accounting = gateway.pool, gateway.accounting
    pool._spawn = lambda work: work.close()  # type: ignore[method-assign]  # nothing listens there

    def change(number: int) -> None:
        pool.discover(tuple(f"http://10.{number // 200}.{number % 200}.{each}:8000" for each in range(3)))
        for worker in pool.workers:
            accounting._requests("m", worker.name, "/v1/chat/completions", "200").inc()
            accounting._counters("m", worker).prompt.inc()
            accounting._time.reused(worker.name, "m", 5)
            gateway.metrics.resent.labels(worker.name, "stale").inc()
        accounting.forget_gone()

    change(0)
    before = generate_latest(gateway.metrics.registry).count(b"\n")
    for number in range(1, 1001):
        change(number)
    assert generate_latest(gateway.metrics.registry).count(b"\n") == before
    assert len(pool.workers) == len(accounting._children) == 3 and not accounting._leaving and not pool._checks
    assert accounting._time.waiting == 15
    await gateway.stop()


async def test_a_worker_with_requests_under_way_keeps_its_figures_until_they_end():
    gateway = Gateway(Settings(workers_dns=("vllm.test:8000",)))
    accounting = gateway.accounting
    gateway.pool._spawn = lambda work: work.close()  # type: ignore[method-assign]
    gateway.pool.discover((f"http://{ONE}:8000",))
    (worker,) = gateway.pool.workers
    worker.inflight = 1
    accounting._counters("m", worker).prompt.inc()
    gateway.pool.discover(())
    accounting.forget_gone()
    assert ONE.encode() in generate_latest(gateway.metrics.registry)
    worker.inflight = 0
    accounting.forget_gone()
    assert ONE.encode() not in generate_latest(gateway.metrics.registry)
    await gateway.stop()


def test_names_come_as_a_list_as_flags_and_as_one_text():
    wanted = ("http://vllm.default.svc:8000", "http://b:1")
    assert Settings(workers_dns="vllm.default.svc:8000, b:1").workers_dns == wanted
    given = load(arguments("--workers-dns", "vllm.default.svc:8000", "--workers-dns", "b:1"), {})
    assert given.workers_dns == wanted and not given.worker
    assert load(arguments(), {"SEAMARK_WORKERS_DNS": "b:1"}).workers_dns == wanted[1:]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm", "NAME:PORT"),
        ("https://vllm:1", "https"),
        ("me:secret@vllm:1", "credentials"),
        ("http://:8000", "workers_dns"),
        ("vllm:port", "workers_dns"),
    ],
)
def test_what_is_no_name_is_refused_with_the_cure(name, words):
    with pytest.raises(SettingsError) as error:
        load(arguments("--workers-dns", name), {})
    assert words in str(error.value) and "workers_dns" in str(error.value) and "secret" not in str(error.value)
