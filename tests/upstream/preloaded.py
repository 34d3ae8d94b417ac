"""Runs every reproduction twice, untouched and with Seamark's cures, in forks of one process that has imported vLLM.

Importing vLLM takes longer than what the scripts do with it.
Usage: python preloaded.py FOLDER, which gets the model and the logs. Prints one line of JSON per run.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

from engine_patches.forward.loaded_weights import Weights

HERE = Path(__file__).parent

UNTOUCHED = "0"  # of SEAMARK_ENGINE

# The value with the cures: of vLLM's own defects alone, or of the whole plugin.
CURED = {
    "block_copy": "reference",
    "cpu_checkpoint_export": "reference",
    "cpu_block_size": "reference",
    "block_edge_stop": "reference",
    "lora_same_path": "reference",
    "other_prompts_blocks": "1",
}

IMPORTED = ("vllm.entrypoints.llm", "vllm.sampling_params", "vllm.v1.worker.cpu_worker")

SECONDS = 300  # per run


def run(script: str, argument: Path, mode: str, log: Path) -> tuple[int | None, float]:
    """Exit code (`None`: still running after `SECONDS`, and ended) and seconds."""
    started = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_run, args=(script, argument, mode, log))
    process.start()
    process.join(SECONDS)
    code = process.exitcode
    process.kill()
    return code, time.monotonic() - started


def _run(script: str, argument: Path, mode: str, log: Path) -> None:
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ["SEAMARK_ENGINE"] = mode
    # Schedulers without an engine: what its workers would have told.
    importlib.import_module("vllm.config").VllmConfig.seamark_weights = Weights("loaded", "", "whole")
    sys.argv, sys.path = [script, str(argument)], [str(HERE), *sys.path]
    try:
        runpy.run_path(str(HERE / f"{script}.py"), run_name="__main__")
    finally:
        sys.stdout.flush()


def main(folder: Path) -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # every engine collects garbage several times, among all that was imported
    run("tiny_hybrid", folder / "model", UNTOUCHED, folder / "tiny_hybrid.log")
    for script, cured in CURED.items():
        for mode in (UNTOUCHED, cured):
            log = folder / f"{script}-{mode}.log"
            code, seconds = run(script, folder / "model", mode, log)
            result = {"script": script, "mode": mode, "code": code, "seconds": seconds}
            print(json.dumps({**result, "log": log.read_text(errors="replace")}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
