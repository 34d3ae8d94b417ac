"""A folder laid out as spark-vllm-docker's containers are, for its mods: no container engine is needed.

As its Dockerfile and launcher make them (looked at in autumn 2026): a distribution's Python with pip and a marker that
says it is the distribution's, vLLM among that Python's packages, in most images uv, the working directory
/workspace/vllm, and mods in /workspace/mods. There is no network.
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

from tests.harness.versions import source_of, uv

# What scripts of mods start.
TOOLS = ("bash", "sh", "env", "chmod", "dirname", "sed", "rm")

NOWHERE = "http://127.0.0.1:9"


class SparkContainer:
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
