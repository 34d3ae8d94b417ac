"""Two workers on one checkpoint directory, one of them killed every minute: `make test-disk`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness.client import Answer, complete, open_client
from proxy.bench.harness.exact import FLOAT32, compare
from proxy.bench.harness.servers import Server, Servers

MINUTES = float(os.environ.get("DISK_MINUTES", "10"))

UNIT = 16

BOUND = 12_000_000  # bytes: some thirty files, of a hundred that the prompts would make

DRAW = random.Random(8)

HEADS = [[DRAW.randrange(20, 400) for _ in range(length)] for length in (130, 420, 790)]

PROMPTS = [HEADS[number % 3] + [DRAW.randrange(20, 400) for _ in range(60 + 30 * number)] for number in range(24)]

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(MINUTES * 120 + 900)]


async def ask(server: Server, number: int) -> Answer:
    prompt = PROMPTS[number]
    ends = [len(HEADS[number % 3]) // UNIT * UNIT, (len(prompt) - 3) // UNIT * UNIT]
    async with open_client(120) as client:
        return await complete(client, server.url, prompt, vllm_xargs={"seamark_boundaries": ends})


def held_by(folder: Path) -> tuple[int, int]:
    """Bytes of all files, and the largest."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:
            continue
    return sum(sizes), max(sizes)


def watch(folder: Path, over: list[int], ended: threading.Event) -> None:
    while not ended.wait(0.2):
        total, largest = held_by(folder)
        if total > BOUND + 2 * largest:
            over.append(total)


def test_workers_that_are_killed_share_a_directory_within_its_bound_and_answer_right(model: Path, tmp_path: Path):
    folder = tmp_path / "states"
    flags = ("--checkpoint-dir", str(folder), "--checkpoint-bytes", str(BOUND), "--checkpoint-keep", "all")
    over: list[int] = []
    ended = threading.Event()
    asked = hits = 0
    wrong: list[int] = []
    with Servers(tmp_path) as servers:
        reference = servers.engine("uncached", model, "reference", ("--no-enable-prefix-caching",))
        reference.wait_until_ready()
        right = [asyncio.run(ask(reference, number)) for number in range(len(PROMPTS))]
        reference.stop()

        def start(name: str) -> Server:
            server = servers.engine(name, model, flags=flags)
            server.wait_until_ready()
            return server

        workers = [start("one"), start("two")]
        watcher = threading.Thread(target=watch, args=(folder, over, ended))
        watcher.start()
        try:
            for kills in itertools.count():
                minute = time.monotonic() + 60
                while time.monotonic() < minute:
                    for server, number in zip(workers, DRAW.sample(range(len(PROMPTS)), 2), strict=True):
                        answer = asyncio.run(ask(server, number))
                        asked += 1
                        hits += answer.cached_tokens or 0
                        if not FLOAT32.accepts(compare(answer, right[number])):
                            wrong.append(number)
                if kills >= MINUTES:
                    break
                victim = workers[kills % 2]
                _kill_at_work(victim)
                workers[kills % 2] = start(f"again{kills}")
                assert not [path for path in folder.rglob("*.tmp") if _is_of_nobody(path, workers)]
        finally:
            ended.set()
            watcher.join()
        logs = "".join(server.log.read_text(errors="replace") for server in servers.started if server is not reference)
    print(f"{asked} answers, {hits} tokens hit, {kills} kills, {len(wrong)} wrong, {len(over)} times over the bound")
    assert not wrong and not over and asked > 10 * MINUTES and hits
    assert "Traceback" not in logs and "AssertionError" not in logs


def _kill_at_work(server: Server) -> None:
    """Kill a server in the middle of an answer."""
    asking = threading.Thread(target=_ask_in_vain, args=(server,))
    asking.start()
    time.sleep(0.05)
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    asking.join()


def _ask_in_vain(server: Server) -> None:
    with contextlib.suppress(httpx.HTTPError, RuntimeError):
        asyncio.run(ask(server, 0))


def _is_of_nobody(path: Path, workers: list[Server]) -> bool:
    """Whether none of the living workers is writing a temporary file."""
    return int(path.name.partition("-")[0]) not in {server.process.pid for server in workers}
