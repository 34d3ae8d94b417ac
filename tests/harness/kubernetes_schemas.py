"""What Kubernetes' API server would refuse of a manifest, by the schemas that come out of Kubernetes' own OpenAPI.

They lie in the wheel of kubernetes-validate (some 22 MB), which stays packed: unpacked it has 17,000 files. The package
index that pip is configured with gives it once, into .cache/.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from proxy.bench.harness.servers import CACHE

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
    with zipfile.ZipFile(_wheel()) as archive:
        return json.loads(archive.read(f"{folder}/{name}.json"))


def _wheel() -> Path:
    wheel = CACHE / NAME
    if not wheel.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="kubernetes-") as incomplete:
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
            wanted = ["--dest", incomplete, f"kubernetes-validate=={KUBERNETES}"]
            fetched = subprocess.run([*fetch, *wanted], capture_output=True, text=True)
            if fetched.returncode:
                raise RuntimeError(
                    f"Kubernetes' schemas could not be fetched. Give pip a package index that has kubernetes-validate "
                    f"{KUBERNETES}, or put its wheel into {CACHE.resolve()}:\n{fetched.stderr[-2000:]}"
                )
            with contextlib.suppress(OSError):  # another process was faster
                Path(incomplete, NAME).rename(wheel)
    return wheel
