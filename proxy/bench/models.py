"""The small random models that benchmarks and tests run on."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

CACHE = Path(".cache")
NEMOTRON_H, QWEN3_NEXT = "nemotron_h", "qwen3_next"
# Match unit (tokens) that the plugin chooses: a delta net's kernels scan in chunks of 64.
MATCH_UNITS: Mapping[str, int] = {NEMOTRON_H: 16, QWEN3_NEXT: 64}


def generated_model(say: Callable[[str], None], family: str = NEMOTRON_H) -> Path:
    """The generated model of `family`, made anew whenever its generator has changed."""
    source = importlib.util.find_spec("engine_patches.model")
    if source is None or source.origin is None:
        raise SystemExit("seamark bench: engine_patches is not installed here")
    version = hashlib.sha256(Path(source.origin).read_bytes()).hexdigest()[:12]
    folder = CACHE / f"{family}-{version}"
    if not folder.exists():
        say(f"generating a small {family} in {folder}")
        CACHE.mkdir(exist_ok=True)
        # Others may want it at the same time: whoever is first gives it its name.
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="model-") as being_made:
            command = [sys.executable, "-m", "engine_patches", "model", "--family", family, "--out", being_made + "/m"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"seamark bench: no model: {done.stderr.strip()}")
            with contextlib.suppress(OSError):
                Path(being_made, "m").rename(folder)
    return folder.resolve()
