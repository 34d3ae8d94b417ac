"""The commands on real servers, with good and bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise

import httpx
import pytest

from engine_patches.commands.model import write_model
from proxy.bench import mine
from proxy.bench.harness.servers import MODEL_NAME
from proxy.fleet.probe import read_metrics
from tests.harness.engines import SharedServers
from tests.harness.scheduler_process import run_apart

REQUEST = {
    "model": MODEL_NAME,
    "messages": [
        {"role": "system", "content": "You pilot ships into the harbour."},
        {"role": "user", "content": "High tide?"},
        {"role": "assistant", "content": "At nine."},
        {"role": "user", "content": "Low tide?"},
    ],
}


def seamark(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proxy.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


@pytest.mark.thorough
def test_boundary_tells_where_a_worker_renders_the_shared_parts_ends(servers: SharedServers):
    by_worker = seamark("boundary", "--worker", servers.seamark.url, "-", stdin=json.dumps(REQUEST))
    assert by_worker.returncode == 0, by_worker.stderr
    told = json.loads(by_worker.stdout)
    assert [boundary["kind"] for boundary in told["boundaries"]] == ["system", "history", "turn"]
    tokens = [boundary["tokens"] for boundary in told["boundaries"]]
    assert 0 < tokens[0] < tokens[1] < tokens[2] < told["prompt_tokens"]
    assert len(bytes.fromhex(told["key"])) == 16


@pytest.mark.parametrize("engine", ["seamark", "untouched"])
def test_a_worker_begins_with_vllms_banner_and_is_warned_of_nothing_in_its_command_line(servers, engine):
    log = getattr(servers, engine).log.read_text(errors="replace")
    if engine == "untouched":  # of what vLLM alone does on a CPU the command itself warns
        warning, _, log = log.partition("\n")
        assert warning.startswith("seamark worker: SEAMARK_ENGINE=0 leaves"), warning
    assert " INFO " in log.partition("\n")[0], log.partition("\n")[0]
    for warning in ("DeprecationWarning", "duplicate keys", "`--model`"):
        assert warning not in log, next(line for line in log.splitlines() if warning in line)


def test_the_pools_that_are_reckoned_before_the_start_are_those_of_the_engines(servers):
    engines = [servers.seamark, servers.tight, servers.reference, servers.untouched]
    told = run_apart("measured_pools", json.dumps([engine.process.args[4:] for engine in engines]))
    said = [read_metrics(httpx.get(engine.url + "/metrics").content) for engine in engines]
    pools = [[each.block_size, 8192, round(each.blocks / each.at_once), each.blocks] for each in said]
    assert [reckoned for reckoned, *_ in told] == pools


def test_doctor_finds_a_patched_worker_well(servers):
    done = seamark("doctor", "--worker", servers.seamark.url)
    assert done.returncode == 0 and done.stdout.startswith(f"will hit: {servers.seamark.url} serves "), done.stdout
    assert "patches are live" in done.stdout and "0.32.0" in done.stdout
    assert "cache block 384 tokens, match unit 16 tokens" in done.stdout


def test_doctor_says_what_an_untouched_vllm_lacks_and_the_two_lines_that_cure_it(servers):
    urls = ("--worker", servers.untouched.url, "--gateway", servers.untouched_gateway.url)
    done = seamark("doctor", *urls, "--runs-as", "pip")
    assert done.stdout.startswith("cannot hit: patches are not live: the plugin is not in this vLLM")
    assert "vLLM alone caches whole blocks of 384 tokens" in done.stdout.splitlines()[0]
    assert done.returncode == 1
    assert re.search(r"^lost in [\d.]+ (?:hours|minutes), [\d,]+ requests judged:$", done.stdout, re.M)
    install, start = done.stdout.splitlines()[-2:]
    assert "pip install" in install and "seamark worker" in start


def test_bench_mine_measures_a_stack_with_seamark_beside_one_without(servers: SharedServers, capsys):
    arguments = ["--base-url", servers.gateway.url, "--against", servers.reference.url, "--json"]
    assert mine.main([*arguments, "--shapes", "system", "turns", "--tokens", "200"]) == 0
    ours, theirs = json.loads(capsys.readouterr().out)["stacks"]
    assert ours["model"] == theirs["model"] == MODEL_NAME

    def found(stack, shape):
        return [each["reply"]["cached_tokens"] for each in stack["requests"] if each["shape"] == shape]

    assert min(found(ours, "system")[1:]) >= 192 and not any(found(theirs, "system"))
    assert all(later > earlier for earlier, later in pairwise(found(ours, "turns")))  # each finds the one before it


@pytest.mark.thorough
def test_the_same_seed_makes_the_same_model(tmp_path, model):
    assert seamark("model", "--out", str(tmp_path / "again")).returncode == 0
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (model / name).read_bytes()
    texts = ((folder / "generation_config.json").read_text() for folder in (model, tmp_path / "again"))
    assert [len(json.loads(text)["eos_token_id"]) > 20 for text in texts] == [False, True]  # it ends its answers


@pytest.mark.thorough
def test_a_gated_delta_model_remembers_for_hundreds_of_tokens(tmp_path):
    """Otherwise a state that was lost or mixed up could not be told by the answers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "model", "qwen3_next"), dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    tail = torch.randint(3, 4096, (1, 400), generator=draw)
    states = []
    for _ in range(2):
        head = torch.randint(3, 4096, (1, 64), generator=draw)
        with torch.no_grad():
            cache = model(torch.cat([head, tail], dim=1), use_cache=True).past_key_values
        states.append(cache.layers[0].recurrent_states[0])  # the first layer sees tokens only, no attention over them
    assert (states[0] - states[1]).norm() > 0.05 * states[0].norm()
