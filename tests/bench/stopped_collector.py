"""`python -m tests.bench.stopped_collector`: whether an engine's steps wait for the process that takes its reports.

vLLM 0.33 with its frontend in Rust (fetched into .cache once) stands before the engine, so that the process which
collects does nothing else. It runs for a third of the requests, is stopped (SIGSTOP) for a third, long enough for its
socket to be full, and goes on. Prints milliseconds between the tokens of streams, and what the feed has at the end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import httpx

from engine_patches.scheduler.counters import MAX_REQUESTS
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME, Servers, generated_model, narrator
from proxy.fleet.reports import read_sources
from tests.harness.versions import engine_of

VERSION = "0.33.0"

TOKENS = 12


def gaps_of(client: httpx.Client, url: str, name: str, seed: int) -> list[float]:
    """Seconds between the tokens of one stream."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "system", "content": prose(40, seed)}, {"role": "user", "content": "Tide?"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "vllm_xargs": {"seamark_boundaries": [16, 32]},
    }
    headers = {"x-request-id": name}
    with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        came = [time.perf_counter() for piece in answer.iter_raw() if b'"content"' in piece]
    return [after - before for before, after in pairwise(came)]


def shown(gaps: Sequence[float]) -> str:
    """Quantiles in milliseconds."""
    ordered = sorted(gaps)
    points = [ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.99, 1.0)]
    return "p50 {:6.2f}   p99 {:6.2f}   most {:6.2f}".format(*(1e3 * point for point in points))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stopped_collector")
    parser.add_argument("--requests", type=int, default=600, help="in each of three parts (%(default)s)")
    count: int = parser.parse_args().requests
    say = narrator()
    environment = {"PYTHONPATH": str(engine_of(VERSION)), "VLLM_USE_RUST_FRONTEND": "1"}
    with tempfile.TemporaryDirectory() as folder, Servers(Path(folder)) as servers, httpx.Client(timeout=120) as client:
        engine = servers.engine("rust", generated_model(say), "1", (), environment)
        engine.wait_until_ready()
        reports = f"http://{read_sources(client.get(engine.url + '/kv_event_sources').content).at}/seamark/outcomes"
        for seed in range(20):
            gaps_of(client, engine.url, "warm-up", seed)
        names: list[str] = []
        for part in ("runs", "is stopped", "runs again"):
            if part == "is stopped":
                os.kill(engine.process.pid, signal.SIGSTOP)
            gaps: list[float] = []
            for number in range(count):
                names.append(f"{part}-{number}")
                gaps += gaps_of(client, engine.url, names[-1], 1000 + len(names))
            if part == "is stopped":
                os.kill(engine.process.pid, signal.SIGCONT)
            print(f"the collector {part:12} {shown(gaps)} ms between tokens, {count} streams", flush=True)
        told = client.get(reports).json()
        found = {name for name, *_ in told["outcomes"]}
        lost = sum(event == ["cleared", "lost"] for event in told["states"])
        print(
            f"outcomes: {len(found & set(names))} of the last {len(names)} (a feed keeps 8,192 entries, an engine that "
            f"cannot report {MAX_REQUESTS:,} requests); the feed says {lost} times that events were lost"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
