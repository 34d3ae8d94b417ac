"""How a vLLM is run (pip, systemd, Docker, compose, spark-vllm-docker, Kubernetes), as far as it shows from here.

Nothing is asked but this machine's `/proc`, its environment, the URL, and `docker inspect` where there is a docker.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.config_files import LOOPBACK
from proxy.http.json_body import loads

DEFAULT_PORT = 8000  # vLLM's
DOCKER_SECONDS = 5.0
PROC, MARKS = Path("/proc"), ("/.dockerenv", "/run/.containerenv")  # the latter are in containers
_VLLM = re.compile(r"(?:^|[/\0])(?:vllm\0serve|seamark\0worker|engine_patches\0worker)\0|\0vllm\.entrypoints\.")
_PORT = re.compile(r"\0--port[=\0](\d{1,5})\0", re.ASCII)
_CONTAINER = re.compile(r"(?:docker|libpod)[-/]([0-9a-f]{64})")
_UNIT = re.compile(r"/system\.slice/([^/\n]+\.service)")


class Way(StrEnum):
    """A value of `--runs-as`."""

    PIP = "pip"
    SYSTEMD = "systemd"
    DOCKER = "docker"
    COMPOSE = "compose"
    SPARK = "spark-vllm-docker"
    KUBERNETES = "kubernetes"


class FoundWay(NamedTuple):
    """A way, and what it calls the vLLM: a unit, a compose service, a container; empty: not known."""

    way: Way
    name: str = ""
    image: str = ""


def find(url: str) -> FoundWay | None:
    """How the vLLM at `url` is run; None if it does not show, or not clearly."""
    host = urlsplit(url).hostname or ""
    if "KUBERNETES_SERVICE_HOST" in os.environ or host.endswith((".svc", ".cluster.local")):
        return FoundWay(Way.KUBERNETES)
    if host in LOOPBACK:
        return _among_processes(urlsplit(url).port or DEFAULT_PORT)
    # Containers call each other by the names of compose's services.
    return FoundWay(Way.COMPOSE, host) if _in_container() and re.fullmatch(r"[a-z][\w-]*", host) else None


def _among_processes(port: int) -> FoundWay | None:
    """The way of the vLLM servers that run here: of those at `port`, else, as containers map ports, of all."""
    found: list[tuple[int, FoundWay | None]] = []
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours to look at
            line = (folder / "cmdline").read_text(errors="replace")
            if _VLLM.search(line):
                given = _PORT.search(line)
                way = _by_control_group((folder / "cgroup").read_text())
                found.append((int(given[1]) if given else DEFAULT_PORT, way))
    ways = {way for at, way in found if at == port} or {way for _, way in found}
    return ways.pop() if len(ways) == 1 else None


def _by_control_group(groups: str) -> FoundWay | None:
    if "kubepods" in groups:
        return FoundWay(Way.KUBERNETES)
    if container := _CONTAINER.search(groups):
        return _in_docker(docker_inspect(container[1]) or {})
    if unit := _UNIT.search(groups):
        return FoundWay(Way.SYSTEMD, unit[1])
    return None if _in_container() else FoundWay(Way.PIP)  # a container does not see its own control group


def _in_container() -> bool:
    return any(map(os.path.exists, MARKS))


def _in_docker(told: Mapping[str, Any]) -> FoundWay:
    config = told.get("Config") or {}
    name, image = str(told.get("Name", "")).lstrip("/"), str(config.get("Image", ""))
    service = (config.get("Labels") or {}).get("com.docker.compose.service")
    if service:
        return FoundWay(Way.COMPOSE, str(service), image)
    # What its scripts call the image and the container unless they are told otherwise.
    if image.startswith("vllm-node") or name == "vllm_node":
        return FoundWay(Way.SPARK, image=image)
    return FoundWay(Way.DOCKER, name, image)


def image_version(image: str) -> str:
    """Of the vLLM in an image by its labels or variables, "" without; nothing in it is run, and nothing is fetched."""
    config = (docker_inspect(image, "image") or {}).get("Config") or {}
    labels = {name.rpartition(".")[2]: value for name, value in (config.get("Labels") or {}).items()}
    variables = dict(each.partition("=")[::2] for each in config.get("Env") or ())
    own = "vllm" in f"{labels.get('title')} {labels.get('source')}".lower()  # else it is that of what it is built on
    version = variables.get("VLLM_VERSION") or (labels.get("version", "") if own else "")
    found = re.fullmatch(r"v?(\d{1,6}\.\d{1,6}[\w.+]{0,32})", version, re.ASCII)
    return found[1] if found else ""


def environment_version(python: str) -> str:
    """Of the vLLM that an environment has, by its folders, "" without; nothing in it is run."""
    path = Path(os.path.expanduser(python))
    packages = "lib/python3*/site-packages/vllm-*.dist-info"
    found = list(path.parents[1].glob(packages)) if path.is_absolute() and len(path.parents) > 1 else []
    return found[0].name.removeprefix("vllm-").removesuffix(".dist-info") if len(found) == 1 else ""


def docker_inspect(name: str, *kind: str) -> Mapping[str, Any] | None:
    """What Docker says of a container, or of another `kind`; None: nothing."""
    command = ("docker", *kind, "inspect", "--", name)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCKER_SECONDS, check=True)
        told = loads(done.stdout.encode())[0]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        return None
    return told if isinstance(told, dict) else None
