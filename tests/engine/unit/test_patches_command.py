"""`patches --check` on real versions of vLLM: what an image would answer, without loading a model or even torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.versions import source_of

CHECK = """
import sys
from engine_patches.__main__ import main
status = main(["patches", "--check", *sys.argv[1:]])
heavy = {"torch", "vllm", "numpy"} & sys.modules.keys()
assert not heavy, heavy
sys.exit(status)
"""


def checked(source: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = [str(each) for each in (source, os.getcwd()) if each is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", CHECK, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("version", "platform"), [("0.33.0", "gpu"), ("0.33.0", "cpu"), (None, "gpu"), (None, None)])
def test_a_supported_vllm_fits_on_either_platform_and_what_it_is_built_for_is_known(version, platform):
    done = checked(source_of(version) if version else None, *[platform] if platform else [])
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    shown = (platform or "cpu").upper()
    assert line.startswith(f"vLLM {version or ''}") and f"({shown}): all " in line and line.endswith("fit")
