"""An engine beside a KV connector of vLLM: what the command says, what its metrics say, and what the doctor says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness.servers import MODEL_NAME, Servers
from proxy.commands.doctor import examine


def transfer(name: str) -> str:
    return json.dumps({"kv_connector": name, "kv_role": "kv_both"})


def test_the_command_ends_with_a_sentence_where_vllm_could_not_serve_the_model(model: Path):
    command = [sys.executable, "-m", "proxy.cli", "worker", str(model), "--kv-transfer-config"]
    done = subprocess.run([*command, transfer("LMCacheConnectorV1")], env=os.environ, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("seamark worker: LMCacheConnectorV1 knows caches of one kind only")


def test_explain_names_the_connector_and_what_it_costs(model: Path):
    command = [sys.executable, "-m", "proxy.cli", "worker", str(model), "--explain", "--kv-transfer-config"]
    done = subprocess.run([*command, transfer("NixlPushConnector")], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "KV connector      NixlPushConnector" in done.stdout
    assert "  * NixlPushConnector is not known to leave alone the blocks" in done.stdout


def test_beside_values_that_nobody_has_computed_hints_are_refused_counted_and_told(model: Path, tmp_path: Path):
    flags = ("--kv-transfer-config", transfer("DecodeBenchConnector"))
    with Servers(tmp_path) as servers:
        worker = servers.engine("made-up", model, flags=flags)
        worker.wait_until_ready()
        prompt: dict[str, Any] = {"model": MODEL_NAME, "prompt": "tide " * 60, "max_tokens": 1}
        hinted = prompt | {"vllm_xargs": {"seamark_boundaries": [48]}}
        assert httpx.post(worker.url + "/v1/completions", json=hinted, timeout=120).status_code == 200
        told = examine(worker.url)
        metrics = httpx.get(worker.url + "/metrics").text
        log = worker.log.read_text(errors="replace")
    assert told.verdict.startswith("cannot hit: DecodeBenchConnector puts values into the cache")
    (info,) = [line for line in metrics.splitlines() if line.startswith("seamark_engine_info{")]
    assert 'connector="DecodeBenchConnector"' in info and 'lane="no_hints"' in info
    assert 'seamark_hints_ignored_total{reason="connector"} 1.0' in metrics
    assert "hints are refused, vLLM caches as it does alone: DecodeBenchConnector puts values" in log
