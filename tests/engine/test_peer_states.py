"""`seamark worker --peer-address`: a worker answers from what another one has computed. `make test-nixl` runs it.

Each answer is compared with that of an engine that caches nothing.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_patches.commands.model import write_model
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port
from tests.harness.restarts import Round, kill
from tests.harness.rounds import Turn, ask, metrics_of, two_rounds
from tests.harness.transfer_engine import nixl

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(1200)]

FIRST, SECOND = two_rounds(random.Random(21))

SALTED = FIRST[:4]

FRESH, FRESHER = ([Turn(turn.prompt[::-1], turn.ends) for turn in turns] for turns in (FIRST[:6], FIRST[6:]))

ALL = {"first": FIRST, "second": SECOND, "salted": SALTED, "fresh": FRESH, "fresher": FRESHER}

BYTES = 400_000_000


def tokens_of(turns: list[Turn]) -> int:
    return sum(len(turn.prompt) for turn in turns)


class Peer:
    """A worker with an address for its peers."""

    def __init__(self, fleet: Servers, model: Path, name: str, defect: str = "") -> None:
        """`defect`: of `tests.harness.disk_defects`."""
        self.port = free_port()
        plugins = {"seamark_peers": f"tests.harness.disk_defects:{defect}"} if defect else {}
        environment = dict(plugin_environment(fleet._folder / f"{name}-plugins", plugins))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment["PYTHONPATH"], nixl())))
        flags = ("--peer-address", f"127.0.0.1:{self.port}", "--peer-bytes", str(BYTES))
        self.server: Server = fleet.engine(name, model, flags=flags, environment=environment)

    @property
    def source(self) -> dict[str, object]:
        """What a request to another worker names this one with."""
        return {"kv_transfer_params": {"remote_kv_source": {"remote_host": "127.0.0.1", "remote_port": self.port}}}

    @property
    def log(self) -> str:
        return self.server.log.read_text(errors="replace")

    def from_peers(self) -> float:
        """Tokens of prompts that came from another worker."""
        return self._sum(r'vllm:prompt_tokens_cached_by_source_total\{.*"p2p".*\}')

    def stored(self) -> float:
        """Bytes that were copied to host memory."""
        return self._sum(r"vllm:kv_offload_store_bytes_total.*")

    def answered(self) -> float:
        """Requests."""
        return self._sum(r"vllm:request_success_total.*")

    def _sum(self, name: str) -> float:
        found = (re.fullmatch(rf"{name} (\S+)", line) for line in metrics_of(self.server))
        return sum(float(each[1]) for each in found if each)


class Far:
    """A worker's tiers in a process of their own, over NIXL; it holds four of `KEYS`."""

    def __init__(self, log: Path, path: str) -> None:
        """`path`: folder with NIXL. Returns before it is ready."""
        self._log = log
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), path)))}
        with log.open("wb") as output:
            command = [sys.executable, "-m", "tests.harness.peer_worker", "aa" * 32, "4", "5"]
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    @functools.cached_property
    def port(self) -> int:
        while not (found := re.search(r"^(\d+)$", self._log.read_text(), re.MULTILINE)):
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.1)
        return int(found[1])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def test_rows_come_over_nixl_and_none_from_a_worker_that_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = nixl()
    far = Far(tmp_path / "far.log", path)
    monkeypatch.syspath_prepend(path)
    from tests.harness.peer_worker import KEYS, Worker, loaded  # it imports NIXL

    b = Worker("aa" * 32)
    try:
        assert loaded(b, b.request(far), KEYS[:4]) and [b.row(key) for key in KEYS[:4]] == [5] * 4
        assert not loaded(b, b.request(far), KEYS[4:5])
        far.end()
        assert not loaded(b, b.request(far), KEYS[5:6]) and not b.tier.lost
    finally:
        far.end()
        b.tier.shutdown()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("peers")) as servers:
        yield servers


@pytest.fixture(scope="module")
def peers(fleet: Servers, model: Path) -> tuple[Peer, Peer]:
    """A and B, which wait for each other however long that takes."""
    a, b = (Peer(fleet, model, name, "loads_always_pay") for name in ("A", "B"))
    for peer in (a, b):
        peer.server.wait_until_ready()
    return a, b


@pytest.fixture(scope="module")
def right(fleet: Servers, model: Path) -> dict[str, Round]:
    """Answers of an engine that caches nothing."""
    server = fleet.engine("uncached", model, "reference", ("--no-enable-prefix-caching",))
    server.wait_until_ready()
    rounds = {name: asyncio.run(ask(server, turns)) for name, turns in ALL.items()}
    server.stop()
    return rounds


async def settled(peer: Peer) -> None:
    """Return once the worker has copied its states to host memory: it is asked for nothing, and goes on stepping."""
    before = -1.0
    deadline = time.monotonic() + 60
    while (now := peer.stored()) != before or not now:
        before = now
        assert time.monotonic() < deadline
        await asyncio.sleep(1)


async def test_another_models_states_are_not_taken(fleet, peers, right, tmp_path):
    _, b = peers
    other = write_model(tmp_path / "model", seed=7)  # of the same shapes
    stranger = Peer(fleet, other, "stranger", "loads_always_pay")
    stranger.server.wait_until_ready()
    assert (await ask(stranger.server, FIRST)).differing(right["first"]) > 0  # it is another model
    await settled(stranger)
    found = await ask(b.server, SALTED, cache_salt="s", **stranger.source)
    assert found.differing(right["salted"]) == 0
    assert b.from_peers() == 0 and "mismatch" in b.log + stranger.log
    stranger.server.stop()  # a worker with peers never sleeps


async def test_a_second_turn_is_answered_from_what_another_worker_computed_and_under_its_salt_alone(peers, right):
    a, b = peers
    first = await ask(a.server, FIRST)
    assert first.differing(right["first"]) == 0
    await settled(a)

    salted = await ask(b.server, SECOND[:4], cache_salt="another", **a.source)
    assert salted.differing(right["second"]._replace(answers=right["second"].answers[:4])) == 0
    assert salted.hits == 0 and b.from_peers() == 0

    began = time.monotonic()
    second = await ask(b.server, SECOND, **a.source)
    took = time.monotonic() - began
    again = await ask(b.server, SECOND)
    alone = await ask(a.server, SECOND)
    print(f"B from A {second.hits}, B again {again.hits}, A itself {alone.hits} of {tokens_of(SECOND)}, {took:.1f} s")
    assert second.differing(right["second"]) == 0 and again.differing(right["second"]) == 0
    assert alone.differing(right["second"]) == 0
    assert second.hits >= 0.99 * alone.hits > 0
    assert b.from_peers() > 0


async def test_a_peer_that_dies_or_stops_costs_time_and_no_answer(fleet, model, peers, right):
    a, b = peers
    usual = Peer(fleet, model, "usual")  # it waits for a peer no longer than computing takes
    usual.server.wait_until_ready()
    await ask(a.server, FRESH)
    await settled(a)
    os.killpg(a.server.process.pid, signal.SIGSTOP)  # its engine is a process of its own
    began = time.monotonic()
    stopped = await ask(usual.server, SECOND, **a.source)
    print(f"a peer that does not answer: {time.monotonic() - began:.1f} s")
    assert stopped.differing(right["second"]) == 0 and usual.from_peers() == 0
    os.killpg(a.server.process.pid, signal.SIGCONT)
    assert (await ask(usual.server, SECOND)).differing(right["second"]) == 0

    asked = asyncio.create_task(ask(b.server, FRESH, **a.source))
    before = b.answered()
    while b.answered() < before + 2:
        await asyncio.sleep(0.05)
    kill(a.server)
    began = time.monotonic()
    found = await asked
    late = await ask(b.server, FRESHER, **a.source)
    took = time.monotonic() - began
    print(f"a peer that is dead: {took:.1f} s")
    assert found.differing(right["fresh"]) == 0 and late.differing(right["fresher"]) == 0
    assert took < 240  # each of them would wait for 40 s if nobody saw that the peer is gone
    assert (await ask(b.server, SECOND)).differing(right["second"]) == 0
    assert b.server.process.poll() is None and usual.server.process.poll() is None
    assert "Traceback" not in b.log and "Traceback" not in usual.log
