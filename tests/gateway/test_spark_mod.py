"""The mod for spark-vllm-docker in a container that stands for one: it asks the vLLM there, and stops nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.compose_files import DEPLOY

# pip installs; the plugin's answer about this vLLM is the case's; the last call prints a version.
PYTHON = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in
*"patches --check"*) echo "vLLM 0.30.0 is left untouched" >&2; exit $FITS ;;
esac
"""


@pytest.mark.parametrize(("fits", "said"), [(0, False), (1, True)])
def test_it_asks_the_vllm_of_the_container_and_a_no_is_said_but_stops_nothing(fits, said, tmp_path):
    mod = tmp_path / "mods/seamark"
    shutil.copytree(DEPLOY / "spark-vllm-docker/mods/seamark", mod)
    (mod / "vllm_seamark-1-py3-none-any.whl").touch()
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python3").write_text(PYTHON)
    (bin_folder / "python3").chmod(0o755)
    for name in ("bash", "dirname"):
        (bin_folder / name).symlink_to(shutil.which(name) or "")
    log = tmp_path / "log"
    environment = {"PATH": str(bin_folder), "LOG": str(log), "FITS": str(fits), "HOME": os.environ["HOME"]}
    done = subprocess.run(["bash", str(mod / "run.sh")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("[seamark] vLLM starts without Seamark" in done.stderr) == said
    calls = log.read_text().splitlines()
    assert "pip install" in calls[0] and "--no-deps" in calls[0] and calls[-1] == "-m engine_patches patches --check"
    assert Path(calls[0].split()[-1]).suffix == ".whl"
