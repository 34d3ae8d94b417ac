"""What the definitions of custom resources say of an object: types, patterns, ranges, and what is required.

They are those of npm packages, made from the Go types of the Gateway API and of the Prometheus operator: some 35 MB,
into .cache/ once. A field that they do not know passes there.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxy.bench.harness.servers import CACHE

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


def complaints(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each object, whose kind is one of `MODULES`, what is wrong with it; empty: nothing."""
    folder = _installed()
    asked = json.dumps([(MODULES[each["kind"]], each) for each in objects])
    command = ["node", "--input-type=module", "--eval", SCRIPT]
    done = subprocess.run(command, input=asked, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def _installed() -> Path:
    """A folder with the packages. Raises `RuntimeError` if npm cannot give them."""
    folder = CACHE / "custom-resources-2.0.0-6.0.0"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="custom-resources-") as incomplete:
            flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", incomplete]
            command = ["npm", "install", *flags, *PACKAGES]
            fetched = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if fetched.returncode:
                raise RuntimeError(f"npm cannot install {', '.join(PACKAGES)}:\n{fetched.stderr[-2000:]}")
            with contextlib.suppress(OSError):  # another process was faster
                Path(incomplete).rename(folder)
            Path(incomplete).mkdir(exist_ok=True)
    return folder
