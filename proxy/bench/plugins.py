"""vLLM plugins for test engines only: none is an entry point of this distribution."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def environment(folder: Path, plugins: Mapping[str, str]) -> Mapping[str, str]:
    """Environment of an engine that loads `plugins`, names to `module:function`; `folder` holds their metadata."""
    metadata = folder / "seamark_test_plugins-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: seamark-test-plugins\nVersion: 0\n")
    points = [f"{name} = {target}" for name, target in plugins.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *points, ""]))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
