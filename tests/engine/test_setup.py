"""What `seamark setup` writes for a configuration file of vLLM, run as it says, with a real engine: chat 2 hits."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness.servers import ENGINE_ENVIRONMENT, Servers, free_port
from proxy.commands import setup

SYSTEM = "You are the harbour master. " * 40


@pytest.mark.thorough
def test_the_printed_command_leads_to_a_hit_at_the_printed_address(model, tmp_path, capsys):
    out, at_worker, at_gateway = tmp_path / "my files", free_port(), free_port()
    config = tmp_path / "mine.yaml"
    config.write_text(f"model: {model}\nport: {at_worker}\nhost: 127.0.0.1\nmax-model-len: 8192\n")
    assert setup.main([str(config), "--out", str(out)]) == 1  # which vLLM does not show
    printed = capsys.readouterr().out
    (command,) = re.findall(r"^  (sh .*run\.sh\S*)$", printed, re.M)
    (address,) = re.findall(r"base_url (\S+)", printed)
    settings = out / "seamark.toml"
    settings.write_text(settings.read_text().replace("port = 8080", f"port = {at_gateway}"))  # which may be taken here
    base_url = address.replace(":8080/", f":{at_gateway}/")
    vllm = tmp_path / "bin" / "vllm"  # that of the CPU's build asks for a package of another name, and ends
    vllm.parent.mkdir()
    vllm.write_text(f'#!/bin/sh\nshift\nexec {shlex.quote(sys.executable)} -m engine_patches worker "$@"\n')
    vllm.chmod(0o755)
    environment = {**ENGINE_ENVIRONMENT, "PATH": f"{vllm.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with Servers(tmp_path) as servers:
        servers.start("gateway", at_gateway, shlex.split(command), environment).wait_until_ready("/ready")
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
