"""A recipe that drafts hits as it is: hints open once the engine's own answers have agreed, and stay shut else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.bench import mine
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import (
    ENGINE_ENVIRONMENT,
    ENGINE_FLAGS,
    MODEL_NAME,
    Server,
    Servers,
    free_port,
    generated_model,
)
from tests.harness import draft_defects, gate_engine
from tests.harness.draft_engines import MTP, STARTED_ALL_THE_SAME
from tests.harness.versions import ROOT, engine_of
from tests.harness.waiting import wait_for

PATIENCE = 600.0  # seconds; a quiet machine takes a tenth

CHATS = "/v1/chat/completions"

NEWEST = "0.33.0"

REASONS = {
    draft_defects.A_UNIT_EARLY: "answers from the cache differ from recomputed ones beside drafts",
    gate_engine.ROWS_LOST: "drafts a step are accepted behind hits",
}


@contextmanager
def alone(folder: Path, fault: str = "", version: str | None = None) -> Iterator[tuple[Servers, Server]]:
    """An engine that drafts, without a gateway."""
    model = generated_model(print, mtp=True)
    stand_ins = {"seamark_gate_engine": "tests.harness.gate_engine:register"}
    environment = {**plugin_environment(folder / "plugins", stand_ins), gate_engine.VARIABLE: fault}
    if version:
        path = environment["PYTHONPATH"]
        environment["PYTHONPATH"] = f"{engine_of(version)}:{ROOT}:{path}"
    with Servers(folder) as fleet:
        port = free_port()
        command = [sys.executable, "-c", STARTED_ALL_THE_SAME, str(model), "--port", str(port), *ENGINE_FLAGS]
        command += ["--speculative-config", json.dumps(MTP)]
        engine = fleet.start("drafts", port, command, {**ENGINE_ENVIRONMENT, **environment})
        engine.wait_until_ready()
        yield fleet, engine


@contextmanager
def drafting(folder: Path, fault: str = "", version: str | None = None) -> Iterator[tuple[Server, Server]]:
    """Such an engine, and a gateway with its defaults."""
    with alone(folder, fault, version) as (fleet, engine):
        gateway = fleet.gateway(engine, flags=("--self-check-interval", "30"))
        gateway.wait_until_ready("/ready", seconds=60)
        yield engine, gateway


def worker_of(gateway: Server) -> dict[str, Any]:
    """What the gateway's status says of its worker."""
    (worker,) = httpx.get(gateway.url + "/seamark/status", timeout=30).json()["workers"]
    return dict(worker)


def state(gateway: Server) -> str:
    """Of its worker's drafts."""
    return str(worker_of(gateway)["drafts"]["state"])


def chat(url: str, number: int) -> tuple[str, list[int], int]:
    """Of several chats with one system prompt: text and tokens of a greedy answer, and tokens from the cache."""
    words = " ".join(f"berth {n} tide" for n in range(90))
    messages = [{"role": "system", "content": words}, {"role": "user", "content": f"the {number}th of all lanterns"}]
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(url + CHATS, json=body, timeout=300).json()
    (choice,) = answer["choices"]
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return choice["message"]["content"], choice["token_ids"], cached


@pytest.mark.thorough
@pytest.mark.parametrize("version", [None, pytest.param(NEWEST, marks=pytest.mark.on_request)])
def test_an_engine_that_is_right_opens_by_itself_and_hits_then(tmp_path, version, capsys):
    with drafting(tmp_path, version=version) as (engine, gateway):
        began = time.monotonic()
        during = [chat(gateway.url, number)[1] for number in range(3)]
        assert state(gateway) == "trial"
        wait_for(lambda: state(gateway) != "trial", PATIENCE)
        assert state(gateway) == "open", gateway.log.read_text()[-3000:]
        print(f"open after {time.monotonic() - began:.0f} s: {gateway.log.read_text()[-600:]}")
        after = [chat(gateway.url, number) for number in range(4)]
        assert [tokens for _, tokens, _ in after[:3]] == during
        assert after[3][2] >= 160 and after[3][2] % 16 == 0
        metrics = httpx.get(engine.url + "/metrics").text
        assert 'drafts="open"' in metrics
        doctor = [sys.executable, "-m", "proxy.cli", "doctor", "--worker", engine.url]
        said = subprocess.run(doctor, capture_output=True, text=True, cwd=ROOT)
        assert "open" in said.stdout and said.returncode == 0, said.stdout
        # Who weighs drafts against hits asks the gateway, which knows where its worker counts drafts.
        assert mine.main(["--base-url", gateway.url, "--lengths", "200", "500", "--pairs", "2"]) == 0
        table = capsys.readouterr().out
        steps = re.search(r"drafts: (\d\.\d\d) accepted per step, of ([\d,]+) steps", table)
        assert steps is not None and int(steps[2].replace(",", "")) > 0, table


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "told"), [("", 'drafts="open"'), (gate_engine.ROWS_LOST, 'drafts="closed"')], ids=["right", "rows lost"]
)
def test_without_a_gateway_a_worker_tries_itself(tmp_path, fault, told):
    with alone(tmp_path, fault) as (_, engine):
        wait_for(lambda: told in httpx.get(engine.url + "/metrics", timeout=60).text, PATIENCE)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", REASONS)
def test_an_engine_with_a_fault_stays_shut_and_says_why(tmp_path, fault):
    with drafting(tmp_path, fault) as (engine, gateway):
        wait_for(lambda: state(gateway) != "trial", PATIENCE)
        assert state(gateway) == "closed", gateway.log.read_text()[-3000:]
        wait_for(lambda: REASONS[fault] in worker_of(gateway)["engine"]["refused"])  # which the next probe reads
        assert REASONS[fault] in gateway.log.read_text()
        doctor = [sys.executable, "-m", "proxy.cli", "doctor", "--worker", engine.url]
        said = subprocess.run(doctor, capture_output=True, text=True, cwd=ROOT)
        assert REASONS[fault].split(" beside")[0] in said.stdout, said.stdout
        answers, own = ([chat(url, number) for number in range(3)] for url in (gateway.url, engine.url))
        assert [tokens for _, tokens, _ in answers] == [tokens for _, tokens, _ in own]
        assert all(cached % 384 == 0 for *_, cached in answers)
