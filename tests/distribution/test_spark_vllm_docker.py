"""The mod for spark-vllm-docker as its owner makes it and as the launcher applies it, in folders like its containers.

No network is there, and nothing stands for anything but the container: the wheel, pip, uv and vLLM's source are real.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine_patches.settings import IMAGE, SUPPORTED
from proxy.version import version
from tests.deploy.compose_files import DEPLOY
from tests.harness.spark_container import SparkContainer, differing

MAKE_MOD = DEPLOY / "spark-vllm-docker" / "make-mod.sh"

FITS = "vLLM 0.33.0 (GPU): all "

IN_PLACE = f"[seamark] {version()} is in place"

WITHOUT = "[seamark] vLLM starts without Seamark"

PLUGINS = "from importlib.metadata import entry_points as e; print([x.value for x in e(group='vllm.general_plugins')])"

# Edits MambaManager.cache_blocks, as fix-qwen3-coder-next did.
OTHER_MOD = """#!/bin/bash
set -e
sed -i 's/if block.is_null or block.block_hash is None:/if block is None:/' \\
    PACKAGES/vllm/v1/core/single_type_kv_cache_manager.py
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Of spark-vllm-docker, with the mod."""
    made = tmp_path_factory.mktemp("spark-vllm-docker")
    for name in ("mods", "recipes"):
        (made / name).mkdir()
    subprocess.run(["bash", str(MAKE_MOD), str(made)], check=True)
    return made


@pytest.fixture
def mod(checkout) -> Path:
    return checkout / "mods" / "seamark"


def other_mod(folder: Path, container: SparkContainer) -> Path:
    made = folder / "fix-qwen3-coder-next"
    made.mkdir()
    (made / "run.sh").write_text(OTHER_MOD.replace("PACKAGES", str(container.packages)))
    return made


def test_a_checkout_gets_one_folder_and_recipes_and_nothing_else(checkout):
    files = {str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file()}
    recipes = {f"recipes/{path.name}" for path in (DEPLOY / "spark-vllm-docker/recipes").iterdir()}
    assert files == {"mods/seamark/run.sh", f"mods/seamark/vllm_seamark-{version()}-py3-none-any.whl", *recipes}


@pytest.mark.parametrize(("with_uv", "to_other_spark"), [(True, True), (False, False)])
def test_it_puts_the_plugin_into_either_spark_twice_and_leaves_no_trace(mod, tmp_path, with_uv, to_other_spark):
    container = SparkContainer(tmp_path, "0.33.0", with_uv=with_uv)
    before = container.files()
    for _ in range(2):  # a container that ran already, in which the mod is applied again
        done = container.apply(mod, to_other_spark=to_other_spark)
        assert done.returncode == 0, done.stderr
        place, fits = done.stdout.splitlines()[-2:]
        assert place == IN_PLACE and fits.startswith(FITS) and fits.endswith(" patches fit")
        assert WITHOUT not in done.stderr
    assert container.ask(PLUGINS) == "['engine_patches.plugin:register']"
    assert container.run("seamark --version").stdout.startswith(f"seamark {version()} ")
    changed = differing(before, container.files())
    assert changed and not before.keys() & changed  # vLLM and the rest are as they were
    gone = container.run("PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip uninstall -y vllm-seamark")
    assert gone.returncode == 0 and differing(before, container.files()) == [], gone.stderr
    assert container.ask(PLUGINS) == "[]"


def test_a_vllm_that_is_too_old_gets_its_image_named_and_starts_all_the_same(mod, tmp_path):
    done = SparkContainer(tmp_path, "0.30.0", with_uv=True).apply(mod)
    assert done.returncode == 0  # a mod that fails ends the launcher, and so vLLM
    said, without = done.stderr.splitlines()[-2:]
    assert said.startswith("vLLM 0.30.0 (GPU) is left untouched") and SUPPORTED in said and IMAGE in said
    assert without == WITHOUT and IN_PLACE in done.stdout


def test_a_mod_that_edits_what_it_patches_is_named_and_behind_it_by_vllms_log_alone(mod, tmp_path):
    container = SparkContainer(tmp_path / "container", "0.33.0", with_uv=True)
    assert FITS in container.apply(mod).stdout
    assert container.apply(other_mod(tmp_path, container)).returncode == 0
    asked = container.run("python3 -m engine_patches patches --check")
    assert asked.returncode == 1 and "fix-qwen3-coder-next" in asked.stderr
    done = container.apply(mod)  # before which the other one is, now
    assert done.returncode == 0
    said, without = done.stderr.splitlines()[-2:]
    assert "MambaManager.cache_blocks" in said and "fix-qwen3-coder-next" in said and without == WITHOUT
