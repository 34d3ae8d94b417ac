"""`seamark worker --checkpoint-dir`: engines that are killed go on from what they stored, and from nothing else.

The story of `make test`, with a shared engine's answers: `tests/engine/shared/test_checkpoint_dir.py`.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.bench.harness.servers import Servers
from tests.harness.changed_weights import CHANGES, change
from tests.harness.damaged_files import STRANGERS, hold_lock, let_go, strangers_files
from tests.harness.restarts import (
    KEEP_ALL,
    UNIT,
    Chats,
    ask,
    blocks_for,
    chats_answered_by,
    counted,
    kill,
    plugin,
    start,
    stock_tier,
    stored_killed_and_asked,
    uncached,
    written,
)

DRAW = random.Random(5)

REFUSED = "seamark_checkpoint_files_refused_total"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("checkpoint-dir")) as servers:
        yield servers


@pytest.fixture(scope="module")
def chats(fleet: Servers, model: Path, tokenizer) -> Chats:
    server = uncached(fleet, model)
    found = chats_answered_by(server, tokenizer)
    server.stop()
    return found


def flip_all(folder: Path) -> int:
    paths = sorted(folder.rglob("*.state"))
    for path in paths:
        content = bytearray(path.read_bytes())
        content[DRAW.randrange(len(content))] ^= 1 << DRAW.randrange(8)
        path.write_bytes(content)
    return len(paths)


@pytest.mark.thorough
def test_a_killed_engine_hits_as_if_it_had_not_been_and_loads_nothing_damaged(fleet, model, chats, tmp_path):
    alive = start(fleet, model, "alive")
    ask(alive, chats.first)
    undisturbed = ask(alive, chats.second)
    alive.stop()
    folder, loads = tmp_path / "states", plugin(tmp_path, "loads_always_pay")
    after = stored_killed_and_asked(fleet, model, chats, folder, loads)
    assert after.hits >= 0.99 * undisturbed.hits >= 0.99 * 13_456

    stock = start(fleet, model, "stock", None, *stock_tier(tmp_path / "stock"))
    assert ask(stock, chats.first).differing(chats.right_first) == 0
    written(tmp_path / "stock", "*.bin")
    kill(stock)
    stock = start(fleet, model, "stock-again", None, *stock_tier(tmp_path / "stock"))
    vllms = ask(stock, chats.second)
    kill(stock)
    assert vllms.differing(chats.right_second) == 0
    assert vllms.hits <= 0.8 * undisturbed.hits

    damaged = flip_all(folder)
    third = start(fleet, model, "third", folder, *KEEP_ALL, **loads)
    found = ask(third, chats.second)
    told = counted(third)
    kill(third)
    assert damaged > 20 and found.differing(chats.right_second) == 0
    assert told[REFUSED] >= 20 and told[REFUSED] == sum(told.get(f"{REFUSED}{{{reason}}}", 0) for reason in FLIPPED)

    for name, each in (("not killed", undisturbed), ("killed", after), ("vLLM's own tier", vllms), ("flipped", found)):
        ratio = each.first_token_over(chats.right_second)
        print(f"{name}: {each.hits} of {each.tokens} tokens hit, first token {ratio:.2f} of cold")


FLIPPED = ("checksum", "format", "identity", "key")  # what a bit may be part of


@pytest.mark.on_request  # five engines one after the other
def test_other_weights_in_the_same_files_are_told_apart_and_the_first_ones_again_are_known(
    fleet, model, chats, tmp_path
):
    own, folder = Path(shutil.copytree(model, tmp_path / "model")), tmp_path / "states"
    loads = plugin(tmp_path, "loads_always_pay")
    first = start(fleet, own, "first-weights", folder, *KEEP_ALL, **loads)
    before = ask(first, chats.first)
    written(folder)
    kill(first)

    change(own, CHANGES["an adapter merged"])
    computed = uncached(fleet, own)
    right = ask(computed, chats.first)
    computed.stop()
    changed = start(fleet, own, "other-weights", folder, *KEEP_ALL, **loads)
    after = ask(changed, chats.first)
    log = changed.log.read_text(errors="replace")
    kill(changed)
    assert before.differing(right) == len(chats.first), "the change is too small to be seen"
    assert after.differing(right) == 0 and after.hits == before.hits and "seamark: 0 blocks of states" in log

    for path in model.glob("*.safetensors"):
        shutil.copyfile(path, own / path.name)
    again = start(fleet, own, "first-weights-again", folder, *KEEP_ALL, **loads)
    found = ask(again, chats.first)
    kill(again)
    assert found.differing(chats.right_first) == 0 and found.hits > before.hits


@pytest.mark.thorough
def test_what_is_stored_is_what_was_come_back_to_and_a_slow_disk_is_not_used(fleet, model, chats, tmp_path):
    folder = tmp_path / "states"
    worker = start(fleet, model, "worker", folder)
    once = ask(worker, chats.first)
    assert once.differing(chats.right_first) == 0
    shared = written(folder)
    # One round: only what several chats begin with, as their hints say.
    heads = [prompt["hint"][0] // UNIT * UNIT for prompt in chats.first]
    assert all(answer.cached_tokens in (0, head) for answer, head in zip(once.answers, heads, strict=True))
    size = shared[0].stat().st_size
    assert 0 < len(shared) <= 1.2 * len(blocks_for(chats.first, once.answers))

    twice = ask(worker, chats.second)
    assert twice.differing(chats.right_second) == 0
    files = written(folder)
    ask(worker, chats.first[:1])  # counts come with steps
    told = counted(worker)
    kill(worker)
    boundaries = blocks_for([*chats.first, *chats.second], [*once.answers, *twice.answers])
    num_bytes = told["seamark_checkpoint_bytes_written_total"]
    print(
        f"{len(shared)} files, then {len(files)}: {num_bytes / size / len(boundaries):.2f} of the distinct boundaries"
    )
    assert num_bytes == len(files) * size  # each once
    assert len(shared) + 2 * len(chats.second) <= len(files)
    assert num_bytes <= 1.2 * len(boundaries) * size

    slow = start(fleet, model, "slow", folder, **plugin(tmp_path, "slow_reads"))
    computed = ask(slow, chats.second)
    told = counted(slow)
    kill(slow)
    assert computed.differing(chats.right_second) == 0
    # The disk holds more than the cache for all but the few whose state of the turn before was not worth keeping.
    declined = told["seamark_loads_declined_total"]
    print(
        f"{declined:.0f} loads declined, {twice.hits} tokens hit with the cache kept, {computed.hits} without the disk"
    )
    assert declined >= 15 and computed.hits < twice.hits


def a_file(folder: Path) -> None:
    """Where a directory is wanted."""
    folder.write_text(STRANGERS)


def everybodys(folder: Path) -> None:
    """A directory as /tmp is, with files of others that have been there for long."""
    (folder / "their-app").mkdir(parents=True)
    for name in ("upload.tmp", "game.state"):
        (folder / "their-app" / name).write_text(STRANGERS)
        os.utime(folder / "their-app" / name, (1, 1))
    folder.chmod(0o1777)


def locked(folder: Path) -> None:
    """By a process that is stopped, as this one is to whoever waits for it."""
    folder.mkdir(mode=0o700)
    hold_lock(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spoil", "line", "reason"),
    [
        (a_file, "cannot be read", "unreadable"),
        (everybodys, "is not used", "unreadable"),
        (locked, "cannot be written to", "not_written"),
    ],
)
def test_an_engine_serves_on_without_a_directory_that_it_can_use(fleet, model, chats, tmp_path, spoil, line, reason):
    folder = tmp_path / "states"
    spoil(folder)
    mode, strangers = folder.stat().st_mode, strangers_files(tmp_path)
    server = start(fleet, model, f"without-{spoil.__name__}", folder)
    try:
        assert ask(server, chats.first).differing(chats.right_first) == 0
        told = counted(server)
    finally:
        let_go()
    log = server.log.read_text(errors="replace")
    server.stop()
    assert told[REFUSED] == told[f"{REFUSED}{{{reason}}}"] > 0 and told["seamark_checkpoint_hits_total"] > 0
    assert log.count(f"the checkpoint directory {line}") == log.count("the checkpoint directory") == 1
    assert folder.stat().st_mode == mode and strangers_files(tmp_path) == strangers
    assert not [path for path in tmp_path.rglob("*.state") if path not in strangers]


@pytest.mark.thorough
def test_an_engine_serves_on_when_the_disk_is_full(fleet, model, chats, tmp_path):
    folder = tmp_path / "states"
    server = start(fleet, model, "full", folder, *KEEP_ALL, **plugin(tmp_path, "full"))
    assert ask(server, chats.first).differing(chats.right_first) == 0
    assert ask(server, chats.second).differing(chats.right_second) == 0
    told = counted(server)
    log = server.log.read_text(errors="replace")
    server.stop()
    assert told[REFUSED] == told[f"{REFUSED}{{not_written}}"] > 0
    assert told["seamark_checkpoint_bytes_written_total"] == 0 and not list(folder.rglob("*.state"))
    assert log.count("the checkpoint directory cannot be written to") == 1 and "cannot be read" not in log
