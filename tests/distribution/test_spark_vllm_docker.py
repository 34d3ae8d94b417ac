"""The mod for spark-vllm-docker as its owner makes it and as the launcher applies it, in folders like its containers.

No network is there, and nothing stands for anything but the container: the wheel, pip, uv and vLLM's source are real.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from engine_patches.settings import IMAGE, SUPPORTED
from proxy.version import version
from tests.deploy.compose_files import DEPLOY
from tests.harness.versions import source_of, uv

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


# What scripts of mods start.
TOOLS = ("bash", "sh", "env", "chmod", "dirname", "sed", "rm")

NOWHERE = "http://127.0.0.1:9"


class SparkContainer:
    """As spark-vllm-docker's Dockerfile and launcher make them (looked at in autumn 2026): a distribution's Python with
    pip and a marker that says so, vLLM among that Python's packages, in most images uv, and mods in /workspace/mods.
    """

    def __init__(self, root: Path, vllm: str, *, with_uv: bool) -> None:
        """`vllm`: its version, as a GPU's image has it. Without uv: another image, which sets no variables for pip."""
        self.root = root
        self._with_uv = with_uv
        self.working_folder = root / "workspace" / "vllm"
        self.working_folder.mkdir(parents=True)
        (root / "home").mkdir()
        self._install_python()
        self.packages = Path(self.ask("import sysconfig; print(sysconfig.get_path('purelib'))"))
        self.packages.mkdir(parents=True, exist_ok=True)
        pip = Path(str(metadata.distribution("pip").locate_file("pip")))
        shutil.copytree(pip, self.packages / "pip", ignore=shutil.ignore_patterns("__pycache__"))
        self._install_vllm(vllm)
        if with_uv:
            (self.programs / "uv").symlink_to(uv())

    @property
    def programs(self) -> Path:
        return self.root / "usr" / "bin"

    def _install_python(self) -> None:
        """A copy of the interpreter finds what is beside it, so nothing of the environment of the tests is seen."""
        self.programs.mkdir(parents=True)
        shutil.copy(Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}"), self.programs / "python3")
        own = self.root / "usr" / "lib" / f"python{sysconfig.get_python_version()}"
        own.mkdir(parents=True)
        for each in Path(sysconfig.get_path("stdlib")).iterdir():
            if each.name not in ("site-packages", "dist-packages", "EXTERNALLY-MANAGED"):
                (own / each.name).symlink_to(each)
        (own / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=this Python is the distribution's\n")
        for tool in TOOLS:
            (self.programs / tool).symlink_to(shutil.which(tool) or "")

    def _install_vllm(self, version: str) -> None:
        shutil.copytree(source_of(version) / "vllm", self.packages / "vllm", copy_function=os.symlink)
        told = self.packages / f"vllm-{version}.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """As `docker exec CONTAINER bash -c COMMAND` does."""
        environment = {
            "PATH": f"{self.working_folder}:{self.programs}",
            "HOME": str(self.root / "home"),
            "UV_CACHE_DIR": str(self.root / "home/.cache/uv"),
            "PIP_CONFIG_FILE": os.devnull,
            "http_proxy": NOWHERE,
            "https_proxy": NOWHERE,
        }
        if self._with_uv:
            environment |= dict.fromkeys(("UV_SYSTEM_PYTHON", "UV_BREAK_SYSTEM_PACKAGES"), "1")
            environment |= {"UV_LINK_MODE": "copy", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
        return subprocess.run(
            [str(self.programs / "bash"), "-c", command],
            cwd=self.working_folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def ask(self, code: str) -> str:
        """What Python code prints there."""
        done = self.run(f"python3 -c {json.dumps(code)}")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def apply(self, mod: Path, *, to_other_spark: bool = False) -> subprocess.CompletedProcess[str]:
        """A mod, as the launcher applies it: its folder's content is copied, and then its script run.

        `to_other_spark`: by scp, which leaves away what begins with a dot and no mode that a script needs.
        """
        place = self.root / "workspace" / "mods" / mod.name
        place.mkdir(parents=True, exist_ok=True)
        for each in sorted(mod.glob("*") if to_other_spark else mod.iterdir()):
            shutil.copyfile(each, place / each.name)
        return self.run(f"export WORKSPACE_DIR=$PWD && cd {place} && chmod +x run.sh && ./run.sh")

    def files(self) -> dict[str, tuple[int, int]]:
        """All that is among Python's packages and programs, with its date and size, but for what running it leaves."""
        return {
            str(path.relative_to(self.root)): (path.lstat().st_mtime_ns, path.lstat().st_size)
            for folder in (self.packages, self.programs)
            for path in folder.rglob("*")
            if not path.is_dir() and path.suffix != ".pyc"
        }


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names that are in one of them alone, or lead to something else."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Of spark-vllm-docker, with the mod."""
    made = tmp_path_factory.mktemp("spark-vllm-docker")
    for name in ("mods", "recipes"):
        (made / name).mkdir()
    subprocess.run(["bash", str(MAKE_MOD), str(made), "seamark-qwen3.6-35b"], check=True)
    return made


@pytest.fixture
def mod(checkout) -> Path:
    return checkout / "mods" / "seamark"


def test_a_checkout_gets_one_folder_and_the_recipe_that_is_named_and_nothing_else(checkout):
    files = {str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file()}
    assert files == {
        "seamark.sha256",
        "mods/seamark/run.sh",
        f"mods/seamark/vllm_seamark-{version()}-py3-none-any.whl",
        "recipes/seamark-qwen3.6-35b.yaml",
    }


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
    other = tmp_path / "fix-qwen3-coder-next"
    other.mkdir()
    (other / "run.sh").write_text(OTHER_MOD.replace("PACKAGES", str(container.packages)))
    assert container.apply(other).returncode == 0
    asked = container.run("python3 -m engine_patches patches --check")
    assert asked.returncode == 1 and "fix-qwen3-coder-next" in asked.stderr
    done = container.apply(mod)  # before which the other one is, now
    assert done.returncode == 0
    said, without = done.stderr.splitlines()[-2:]
    assert "MambaManager.cache_blocks" in said and "fix-qwen3-coder-next" in said and without == WITHOUT
