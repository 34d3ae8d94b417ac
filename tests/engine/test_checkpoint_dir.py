"""`seamark worker --checkpoint-dir`: engines that are killed go on from what they stored, and from nothing else."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import Server, Servers
from tests.harness.rounds import Round, ask, differing, kill, told, two_rounds

DRAW = random.Random(5)

FIRST, SECOND = two_rounds(DRAW)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("checkpoint-dir")) as servers:
        yield servers


@pytest.fixture(scope="module")
def right(fleet: Servers, model: Path) -> tuple[Round, Round]:
    """Answers of an engine that caches nothing."""
    server = fleet.engine("uncached", model, "reference", ("--no-enable-prefix-caching",))
    server.wait_until_ready()
    rounds = asyncio.run(ask(server, FIRST)), asyncio.run(ask(server, SECOND))
    server.stop()
    return rounds


def start(fleet: Servers, model: Path, name: str, folder: Path | None, *flags: str, **environment: str) -> Server:
    directory = ("--checkpoint-dir", str(folder)) if folder is not None else ()
    server = fleet.engine(name, model, flags=(*directory, *flags), environment=environment)
    server.wait_until_ready()
    return server


def plugin(folder: Path, function: str) -> Mapping[str, str]:
    """Environment of an engine whose disk is as one of `tests.harness.disk_defects` has it."""
    return plugin_environment(folder / "plugins", {"seamark_disk": f"tests.harness.disk_defects:{function}"})


def written(folder: Path) -> list[Path]:
    """The files, once there are some and no further one comes for five seconds: nobody tells of the last one."""
    while True:
        files = list(folder.rglob("*.state"))
        time.sleep(5)
        if files and len(list(folder.rglob("*.state"))) == len(files):
            return files


def flip_all(folder: Path) -> int:
    paths = sorted(folder.rglob("*.state"))
    for path in paths:
        content = bytearray(path.read_bytes())
        content[DRAW.randrange(len(content))] ^= 1 << DRAW.randrange(8)
        path.write_bytes(content)
    return len(paths)


async def test_a_killed_engine_hits_as_if_it_had_not_been_and_loads_nothing_damaged(fleet, model, right, tmp_path):
    alive = start(fleet, model, "alive", None)
    await ask(alive, FIRST)
    undisturbed = await ask(alive, SECOND)
    alive.stop()
    keep = ("--checkpoint-keep", "all")
    folder, loads = tmp_path / "states", plugin(tmp_path, "loads_always_pay")
    first = start(fleet, model, "first", folder, *keep, **loads)
    assert differing(await ask(first, FIRST), right[0]) == 0
    await asyncio.to_thread(written, folder)
    kill(first)

    second = start(fleet, model, "second", folder, *keep, **loads)
    after = await ask(second, SECOND)
    counts = told(second)
    kill(second)
    assert differing(after, right[1]) == 0
    assert after.hits >= 0.99 * undisturbed.hits > 0
    assert counts["seamark_checkpoint_hits_total"] >= 12 and counts["seamark_checkpoint_hit_tokens_total"] == after.hits

    damaged = flip_all(folder)
    third = start(fleet, model, "third", folder, *keep, **loads)
    found = await ask(third, SECOND)
    counts = told(third)
    kill(third)
    assert damaged > 12 and differing(found, right[1]) == 0
    assert counts["seamark_checkpoint_files_refused_total"] >= 12


async def test_what_is_stored_is_what_was_come_back_to_and_a_slow_disk_is_not_used(fleet, model, right, tmp_path):
    folder = tmp_path / "states"
    worker = start(fleet, model, "worker", folder)
    assert differing(await ask(worker, FIRST), right[0]) == 0
    shared = len(await asyncio.to_thread(written, folder))
    assert differing(await ask(worker, SECOND), right[1]) == 0
    files = await asyncio.to_thread(written, folder)
    await ask(worker, FIRST[:1])  # counts come with steps
    counts = told(worker)
    kill(worker)
    # The heads, with their attention rows; then the first turns that the second ones resumed from.
    assert 0 < shared <= 3 * 6 and shared + 12 <= len(files)
    assert counts["seamark_checkpoint_bytes_written_total"] == sum(path.stat().st_size for path in files)

    slow = start(fleet, model, "slow", folder, **plugin(tmp_path, "slow_reads"))
    assert differing(await ask(slow, SECOND), right[1]) == 0
    counts = told(slow)
    kill(slow)
    assert counts["seamark_loads_declined_total"] == len(SECOND)


async def test_an_engine_serves_on_without_a_directory_that_it_can_use(fleet, model, right, tmp_path):
    (tmp_path / "taken").write_text("a file, where a directory is wanted")
    server = start(fleet, model, "without", tmp_path / "taken")
    assert differing(await ask(server, FIRST), right[0]) == 0
    counts = told(server)
    log = server.log.read_text(errors="replace")
    server.stop()
    assert counts["seamark_checkpoint_files_refused_total"] >= 2 and counts["seamark_checkpoint_hits_total"] > 0
    assert log.count("the checkpoint directory cannot be read") == 1
    assert log.count("the checkpoint directory cannot be written to") == 1
