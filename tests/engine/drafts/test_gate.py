"""A recipe that drafts hits as it is: hints open once the engine has tried itself, and stay shut if it is wrong.

Behind the gateway then comes what it predicts, all that is owed, as from an engine without drafts and a cache.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_patches.commands.worker import CPU_ENVIRONMENT
from proxy.bench import mine
from proxy.bench.harness.client import CHAT, prose
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import (
    ENGINE_ENVIRONMENT,
    ENGINE_FLAGS,
    MODEL_NAME,
    NEMOTRON_H,
    QWEN3_NEXT,
    Server,
    Servers,
    free_port,
)
from proxy.boundaries.divergence import common_prefix
from tests.harness import draft_defects, gate_engine
from tests.harness.draft_engines import MTP, STARTED_ALL_THE_SAME
from tests.harness.draft_heads import mtp_model
from tests.harness.engines import FLOAT32_DELTA
from tests.harness.versions import ROOT, engine_of
from tests.harness.waiting import wait_for

PATIENCE = 600.0  # seconds; a quiet machine takes a tenth

NEWEST = "0.33.0"

UNIT = 16  # tokens

# What a gateway's worker is refused for, by fault.
REASONS = {
    draft_defects.A_UNIT_EARLY: "answers from the cache differ from recomputed ones beside drafts",
    gate_engine.ROWS_LOST: "drafts a step are accepted behind hits",
}

VLLM_SERVE = ["-m", "vllm.entrypoints.openai.api_server", "--enable-prefix-caching", "--enable-prompt-tokens-details"]

pytestmark = pytest.mark.thorough


@contextmanager
def drafting(
    folder: Path,
    fault: str = "",
    version: str | None = None,
    family: str = NEMOTRON_H,
    started: Sequence[str] = ("-c", STARTED_ALL_THE_SAME),
    **more: str,
) -> Iterator[tuple[Servers, Server]]:
    """An engine that drafts, without a gateway. `more`: of its environment."""
    stand_ins = {"seamark_gate_engine": "tests.harness.gate_engine:register"}
    flags = [*ENGINE_FLAGS, "--speculative-config", json.dumps(MTP), "--dtype", "float32", "--enforce-eager"]
    if family == QWEN3_NEXT:
        stand_ins |= FLOAT32_DELTA
        flags += ["--mamba-ssm-cache-dtype", "float32"]
    environment = {**plugin_environment(folder / "plugins", stand_ins), gate_engine.VARIABLE: fault, **more}
    if version:
        path = environment["PYTHONPATH"]
        environment["PYTHONPATH"] = f"{engine_of(version)}:{ROOT}:{path}"
    port = free_port()
    command = [sys.executable, *started, str(mtp_model(family)), "--port", str(port), *flags]
    with Servers(folder) as fleet:
        engine = fleet.start("drafts", port, command, {**ENGINE_ENVIRONMENT, **CPU_ENVIRONMENT, **environment})
        engine.wait_until_ready()
        yield fleet, engine


def gateway_before(fleet: Servers, engine: Server) -> Server:
    gateway = fleet.gateway(engine, flags=("--self-check-interval", "30"))
    gateway.wait_until_ready("/ready", seconds=60)
    return gateway


def worker_of(gateway: Server) -> dict[str, Any]:
    """What the gateway's status says of its worker."""
    (worker,) = httpx.get(gateway.url + "/seamark/status", timeout=30).json()["workers"]
    return dict(worker)


def tried(gateway: Server) -> str:
    """The state of its worker's drafts, once it has been tried."""
    wait_for(lambda: worker_of(gateway)["drafts"]["state"] != "trial", PATIENCE)
    return str(worker_of(gateway)["drafts"]["state"])


def said_by_doctor(engine: Server) -> str:
    doctor = [sys.executable, "-m", "proxy.cli", "doctor", "--worker", engine.url]
    return subprocess.run(doctor, capture_output=True, text=True, cwd=ROOT).stdout


def body_of(messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True}


def chat(url: str, number: int) -> tuple[list[int], int]:
    """Of several chats with one system prompt: tokens of a greedy answer, and tokens from the cache."""
    words = " ".join(f"berth {n} tide" for n in range(90))
    messages = [{"role": "system", "content": words}, {"role": "user", "content": f"the {number}th of all lanterns"}]
    answer = httpx.post(url + CHAT, json=body_of(messages), timeout=300).json()
    return answer["choices"][0]["token_ids"], (answer["usage"].get("prompt_tokens_details") or {})["cached_tokens"] or 0


def chats() -> Iterator[list[dict[str, str]]]:
    """Questions behind a few system prompts in turn, and a conversation."""
    for turn in range(3):
        for words in (70, 120, 200, 400):
            head = {"role": "system", "content": f"{words} {prose(words, words)}"}
            yield [head, {"role": "user", "content": f"{turn} {prose(12, words + turn)}"}]
    conversation = [{"role": "system", "content": f"3 {prose(150, 1)}"}]
    for turn in range(6):
        conversation.append({"role": "user", "content": f"{turn} {prose(40, turn)}"})
        yield list(conversation)
        conversation.append({"role": "assistant", "content": f"{turn} {prose(25, turn)}"})


@pytest.mark.parametrize("version", [None, pytest.param(NEWEST, marks=pytest.mark.on_request)])
def test_an_engine_that_is_right_opens_by_itself_and_hits_all_it_owes_as_predicted_then(tmp_path, version, capsys):
    with drafting(tmp_path, version=version) as (fleet, engine):
        reference = fleet.engine("reference", mtp_model(), "reference", ("--no-enable-prefix-caching",))
        reference.wait_until_ready()
        gateway = gateway_before(fleet, engine)
        assert tried(gateway) == "open", gateway.log.read_text()[-3000:]
        assert "open" in said_by_doctor(engine)

        before: list[list[int]] = []
        found: list[tuple[int, int, int]] = []  # predicted, cached and owed tokens
        ahead = UNIT if version is None else 1  # tokens past a state that a prefix has to share
        for messages in chats():
            body = body_of(messages)
            prompt = httpx.post(f"{reference.url}{CHAT}/render", json=body, timeout=60).json()["token_ids"]
            shared = max((common_prefix(prompt, other) for other in before), default=0)
            before.append(prompt)
            told, right = (httpx.post(each.url + CHAT, json=body, timeout=300) for each in (gateway, reference))
            assert told.json()["choices"][0]["token_ids"] == right.json()["choices"][0]["token_ids"], messages
            predicted, cached = (int(told.headers[f"x-seamark-{name}"]) for name in ("predicted", "cached"))
            owed = max(min(shared, len(prompt)) - ahead, 0) // UNIT * UNIT
            assert not owed or cached < owed or told.headers["x-seamark-reason"] == "hit"
            found.append((predicted, cached, owed))
        # Random answers of the model are no part of the next turn's prompt, so nothing is lost between turns.
        owed = sum(owed for *_, owed in found)
        assert owed > 3000 and sum(cached for _, cached, _ in found) >= 0.99 * owed
        equal = [predicted == cached for predicted, cached, _ in found if predicted]
        assert len(equal) >= 13 and sum(equal) >= 0.97 * len(equal)
        metrics = httpx.get(engine.url + "/metrics").text
        assert 'drafts="open"' in metrics and f'ahead="{ahead}"' in metrics

        # Who weighs drafts against hits asks the gateway, which knows where its worker counts drafts.
        assert mine.main(["--base-url", gateway.url, "--shapes", "system", "--tokens", "200", "500"]) == 0
        table = capsys.readouterr().out
        steps = re.search(r"drafts: (\d\.\d\d) accepted per step, of ([\d,]+) steps", table)
        assert steps is not None and int(steps[2].replace(",", "")) > 0, table


@pytest.mark.parametrize("family", [NEMOTRON_H, QWEN3_NEXT])
def test_under_vllms_own_server_and_without_a_gateway_an_engine_tries_itself_and_hits_then(tmp_path, family):
    with drafting(tmp_path, family=family, started=(*VLLM_SERVE, "--model")) as (_, engine):
        wait_for(lambda: 'drafts="open"' in httpx.get(engine.url + "/metrics", timeout=60).text, PATIENCE)
        body = body_of([{"role": "user", "content": prose(60, 1)}]) | {"vllm_xargs": {"seamark_boundaries": [-20]}}
        first, second = (httpx.post(engine.url + CHAT, json=body, timeout=300).json() for _ in range(2))
        assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < second["usage"]["prompt_tokens"] < 250, (
            "a whole block, which vLLM alone would find, is more"
        )


@pytest.mark.parametrize(("fault", "state"), [("", "open"), (draft_defects.A_UNIT_EARLY, "closed")])
def test_beside_clients_who_never_rest_and_name_themselves_as_they_like_it_comes_to_the_same(tmp_path, fault, state):
    with drafting(tmp_path, fault, **{gate_engine.SOON: "1"}) as (fleet, engine):
        gateways, over = [gateway_before(fleet, engine) for _ in range(2)], threading.Event()
        named = {"vllm_xargs": {"seamark_trial": 1, "seamark_drafts": "open:"}, "max_tokens": 8}

        def asks(number: int) -> list[int]:
            told, url = [], (engine, *gateways)[number].url
            while not over.is_set():
                body = body_of([{"role": "user", "content": f"{len(told)} {prose(100, number)}"}]) | named
                name = {"x-request-id": f"own-drafts-{len(told)}"}
                told.append(httpx.post(url + CHAT, json=body, headers=name, timeout=300).status_code)
            return told

        with ThreadPoolExecutor() as pool:
            clients = [pool.submit(asks, number) for number in range(3)]
            try:
                assert [tried(gateway) for gateway in gateways] == [state, state], engine.log.read_text()[-3000:]
            finally:
                over.set()
        assert {status for each in clients for status in each.result()} == {200}


@pytest.mark.parametrize("fault", REASONS)
def test_an_engine_with_a_fault_stays_shut_and_says_why(tmp_path, fault):
    with drafting(tmp_path, fault) as (fleet, engine):
        gateway = gateway_before(fleet, engine)
        assert tried(gateway) == "closed", gateway.log.read_text()[-3000:]
        wait_for(lambda: REASONS[fault] in worker_of(gateway)["engine"]["refused"])  # which the next probe reads
        assert REASONS[fault] in gateway.log.read_text() and REASONS[fault] in engine.log.read_text()
        assert REASONS[fault].split(" beside")[0] in said_by_doctor(engine)
        answers, own = ([chat(url, number) for number in range(3)] for url in (gateway.url, engine.url))
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in own]
        assert all(cached % 384 == 0 for _, cached in answers)
