"""Two workers on one checkpoint directory, one of them killed every minute: `make test-disk`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness.client import TimedAnswer, complete, open_client
from proxy.bench.harness.exact import FLOAT32, compare
from proxy.bench.harness.servers import Server, Servers

MINUTES = float(os.environ.get("DISK_MINUTES", "10"))

UNIT = 16

BOUND = 12_000_000  # bytes: some thirty files, of a hundred that the prompts would make

DRAW = random.Random(8)

HEADS = [[DRAW.randrange(20, 400) for _ in range(length)] for length in (130, 420, 790)]

PROMPTS = [HEADS[number % 3] + [DRAW.randrange(20, 400) for _ in range(60 + 30 * number)] for number in range(24)]

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(MINUTES * 120 + 900)]


async def ask(server: Server, number: int) -> TimedAnswer:
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
    """A kill a minute, or as soon as the worker killed before is back. Meanwhile the other one goes on."""
    folder = tmp_path / "states"
    flags = ("--checkpoint-dir", str(folder), "--checkpoint-bytes", str(BOUND), "--checkpoint-keep", "all")
    over: list[int] = []
    ended = threading.Event()
    asked = hits = kills = 0
    wrong: list[int] = []
    with Servers(tmp_path) as servers:
        reference = servers.engine("uncached", model, "reference", ("--no-enable-prefix-caching",))
        workers = [servers.engine(name, model, flags=flags) for name in ("one", "two")]
        reference.wait_until_ready()
        right = [asyncio.run(ask(reference, number)) for number in range(len(PROMPTS))]
        reference.stop()
        for server in workers:
            server.wait_until_ready()
        watcher = threading.Thread(target=watch, args=(folder, over, ended))
        watcher.start()
        began = time.monotonic()
        try:
            next_kill, away = began + 60, False
            while kills < MINUTES or away:
                ready = [server for server in workers if _is_ready(server)]
                for server, number in zip(ready, DRAW.sample(range(len(PROMPTS)), len(ready)), strict=True):
                    answer = asyncio.run(ask(server, number))
                    asked += 1
                    hits += answer.cached_tokens or 0
                    if not FLOAT32.accepts(compare(answer, right[number])):
                        wrong.append(number)
                if away and len(ready) == len(workers):
                    away = False
                    assert not [path for path in folder.rglob("*.tmp") if _is_of_nobody(path, workers)]
                if not away and kills < MINUTES and time.monotonic() >= next_kill:
                    _kill_at_work(workers[kills % 2])
                    workers[kills % 2] = servers.engine(f"again{kills}", model, flags=flags)
                    next_kill, away, kills = time.monotonic() + 60, True, kills + 1
            minutes = (time.monotonic() - began) / 60
        finally:
            ended.set()
            watcher.join()
        logs = "".join(server.log.read_text(errors="replace") for server in servers.started if server is not reference)
    print(f"{minutes:.1f} minutes: {asked} answers, {hits} tokens hit, {kills} kills, {len(wrong)} wrong")
    print(f"{len(over)} times over the bound")
    assert not wrong and not over and asked > 10 * MINUTES and hits
    assert "Traceback" not in logs and "AssertionError" not in logs


def _is_ready(server: Server) -> bool:
    """Whether it answers by now. Fails if it has ended by itself."""
    assert server.process.poll() is None, server.log_end()
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(server.url + "/health", timeout=30).status_code == 200
    return False


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
