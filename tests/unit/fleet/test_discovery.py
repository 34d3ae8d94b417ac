"""What a name's addresses become, what stays when it is not resolved, and that nothing is left of what has gone."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Sequence

import pytest

from proxy.errors import SettingsError
from proxy.fleet import discovery
from proxy.fleet.discovery import Discovery, addresses_of
from proxy.metrics import Metrics
from proxy.settings import add_arguments, load

NAME = "http://vllm.test:8000"

ONE = "10.0.0.1"


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


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "not known"), UnicodeError("label")])
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
    with pytest.raises(SettingsError) as error:
        load(arguments("--workers-dns", name), {})
    assert words in str(error.value) and "workers_dns" in str(error.value) and "secret" not in str(error.value)
