"""What `seamark setup --way pip` writes, run as it says, with a real engine: the second chat hits."""

from __future__ import annotations

import re
import shlex

import httpx
import pytest

from proxy.bench.harness.servers import ENGINE_ENVIRONMENT, Servers
from proxy.commands import setup
from proxy.commands.render_server import free_port

SYSTEM = "You are the harbour master. " * 40


@pytest.mark.thorough
def test_the_two_printed_commands_lead_to_a_hit_at_the_printed_address(model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "my files"
    monkeypatch.setattr(setup, "PORTS", [free_port()])  # whatever runs on this machine
    assert setup.main(["--way", "pip", "--model", str(model), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    worker, gateway = (shlex.split(line) for line in printed.splitlines() if line.startswith("  sh "))
    (address,) = re.findall(r"base_url (\S+)", printed)
    # The scripts' own ports may be taken here. Flags behind the names of the scripts win, as they promise.
    at_worker, at_gateway = free_port(), free_port()
    worker += ["--port", str(at_worker), "--max-model-len", "8192"]
    gateway += ["--port", str(at_gateway), "--worker", f"http://127.0.0.1:{at_worker}"]
    base_url = address.replace(":8080/", f":{at_gateway}/")
    with Servers(tmp_path) as servers:
        started = servers.start("worker", at_worker, worker, ENGINE_ENVIRONMENT)
        front = servers.start("gateway", at_gateway, gateway, {})
        started.wait_until_ready()
        front.wait_until_ready("/ready", seconds=30)
        answers = [chat(base_url, question) for question in ("When is high tide?", "Which berth is free?")]
    cold, warm = (int(answer.headers["x-seamark-cached"]) for answer in answers)
    tokens = answers[1].json()["usage"]["prompt_tokens"]
    assert cold == 0 and tokens - 48 < warm < tokens
    assert [answer.headers["x-seamark-reason"] for answer in answers] == ["cold", "hit"]


def chat(base_url: str, question: str) -> httpx.Response:
    with httpx.Client(base_url=base_url, timeout=120, trust_env=False) as client:
        (model,) = client.get("/models").json()["data"]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        answer = client.post("/chat/completions", json={"model": model["id"], "messages": messages, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    return answer
