"""`patches --check` on real versions of vLLM: what an image would answer, without loading a model or even torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_patches.settings import IMAGE, SUPPORTED
from tests.harness.versions import source_of

CHECK = """
import sys
from engine_patches.__main__ import main
status = main(["patches", "--check", *sys.argv[1:]])
heavy = {"torch", "vllm", "numpy"} & sys.modules.keys()
assert not heavy, heavy
sys.exit(status)
"""

# As the mod fix-qwen3-coder-next may leave it behind: no word of what the patch of this function looks for.
MANAGERS = Path("vllm/v1/core/single_type_kv_cache_manager.py")

OLD_LINE = "if block.is_null or block.block_hash is None:"


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


def test_one_function_that_differs_is_named_with_the_mod_that_edits_it_and_the_image_to_take(tmp_path):
    (tmp_path / "vllm").mkdir()
    source = source_of("0.33.0")
    edited = tmp_path / MANAGERS
    # The whole of that vLLM by links, but for one file.
    for folder in [Path("vllm"), Path("vllm/v1"), Path("vllm/v1/core")]:
        (tmp_path / folder).mkdir(exist_ok=True)
        for each in (source / folder).iterdir():
            if tmp_path / folder / each.name not in [edited, *edited.parents]:
                (tmp_path / folder / each.name).symlink_to(each)
    (tmp_path / "vllm-0.33.0.dist-info").symlink_to(source / "vllm-0.33.0.dist-info")
    text = (source / MANAGERS).read_text()
    assert text.count(OLD_LINE) == 1
    edited.write_text(text.replace(OLD_LINE, "if block is None:"))
    done = checked(tmp_path, "gpu")
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("vLLM 0.33.0+cpu (GPU) is left untouched, no checkpoints: 1 of ")
    assert "true-states" in line and "MambaManager.cache_blocks no longer mentions" in line
    assert "fix-qwen3-coder-next" in line and SUPPORTED in line and IMAGE in line
