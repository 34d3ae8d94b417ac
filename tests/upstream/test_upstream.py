"""Every defect that is worked around is still there, and gone with the cures.

The first time that an untouched vLLM or uvicorn passes, its cure and its report can go.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE.parents[1]),
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

# Of SEAMARK_ENGINE, with the cures: of vLLM's own defects alone, or of the whole plugin.
UNTOUCHED = "0"
CURED = {
    "block_copy": "reference",
    "cpu_checkpoint_export": "reference",
    "cpu_block_size": "reference",
    "block_edge_stop": "reference",
    "lora_same_path": "reference",
    "other_prompts_blocks": "1",
}

# Schedulers without an engine: what its workers would have told.
TOLD = """
import runpy, sys, vllm.config
from engine_patches.forward.loaded_weights import Weights
vllm.config.VllmConfig.seamark_weights = Weights("loaded", "", "whole")
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upstream") / "model"
    subprocess.run([sys.executable, str(HERE / "tiny_hybrid.py"), str(folder)], check=True, timeout=300)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("script", CURED)
@pytest.mark.parametrize("is_cured", [False, True])
def test_an_untouched_vllm_has_the_defect_and_the_cures_repair_it(model: Path, script, is_cured):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SEAMARK_", "VLLM_"))}
    environment = {**inherited, **ENVIRONMENT, "SEAMARK_ENGINE": CURED[script] if is_cured else UNTOUCHED}
    command = [sys.executable, "-c", TOLD, str(HERE / f"{script}.py"), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    said = done.stdout.splitlines()[-1:]
    wanted = (["no defect"], 0) if is_cured else (["defect present"], 1)
    assert (said, done.returncode) == wanted, done.stdout + done.stderr[-3000:]


def test_uvicorn_still_reads_the_body_of_an_offered_upgrade_as_a_request():
    done = subprocess.run([sys.executable, HERE / "upgrade_body.py"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "defect present"), done.stdout + done.stderr
    assert "h11: two requests sent, expected ['/asked', '/last'], saw ['/asked', '/last']" in done.stdout
