"""How a vLLM is run (pip, systemd, Docker, compose, spark-vllm-docker, Kubernetes), as far as it shows from here.

Nothing is asked but this machine's `/proc`, its environment, the URL, and `docker inspect` where there is a docker.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.config_files import LOOPBACK
from proxy.http.json_body import loads

DEFAULT_PORT = 8000  # vLLM's
DOCKER_SECONDS = 5.0
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


class Surroundings(NamedTuple):
    """What is looked at; tests give their own."""

    proc: Path
    environment: Mapping[str, str]
    in_container: bool
    inspect: Callable[[str], Mapping[str, Any] | None]  # a container's id: what Docker says of it


def surroundings() -> Surroundings:
    in_container = any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
    return Surroundings(Path("/proc"), os.environ, in_container, partial(_docker_inspect, "inspect"))


def find(url: str, around: Surroundings) -> FoundWay | None:
    """How the vLLM at `url` is run; None if it does not show, or not clearly."""
    host = urlsplit(url).hostname or ""
    if "KUBERNETES_SERVICE_HOST" in around.environment or host.endswith((".svc", ".cluster.local")):
        return FoundWay(Way.KUBERNETES)
    if host in LOOPBACK:
        return _among_processes(urlsplit(url).port or DEFAULT_PORT, around)
    # Containers call each other by the names of compose's services.
    return FoundWay(Way.COMPOSE, host) if around.in_container and re.fullmatch(r"[a-z][\w-]*", host) else None


def _among_processes(port: int, around: Surroundings) -> FoundWay | None:
    """The way of the vLLM servers that run here: of those at `port`, else, as containers map ports, of all."""
    found: list[tuple[int, FoundWay | None]] = []
    for folder in around.proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours to look at
            arguments = (folder / "cmdline").read_text(errors="replace").split("\0")
            if _is_vllm(arguments):
                given = re.search(r"--port[= ](\d{1,5})(?!\d)", " ".join(arguments), re.ASCII)
                way = _by_control_group((folder / "cgroup").read_text(), around)
                found.append((int(given[1]) if given else DEFAULT_PORT, way))
    ways = {way for at, way in found if at == port} or {way for _, way in found}
    return ways.pop() if len(ways) == 1 else None


def _is_vllm(arguments: Sequence[str]) -> bool:
    names = [Path(argument).name for argument in arguments[:3]]
    return (
        ("vllm" in names and "serve" in arguments)
        or any(argument.startswith("vllm.entrypoints.") for argument in arguments)
        or ("worker" in arguments and ("seamark" in names or "engine_patches" in arguments))
    )


def _by_control_group(groups: str, around: Surroundings) -> FoundWay | None:
    if "kubepods" in groups:
        return FoundWay(Way.KUBERNETES)
    if container := _CONTAINER.search(groups):
        return _in_docker(around.inspect(container[1]))
    if unit := _UNIT.search(groups):
        return FoundWay(Way.SYSTEMD, unit[1])
    return None if around.in_container else FoundWay(Way.PIP)  # a container does not see its own control group


def _in_docker(told: Any) -> FoundWay:
    """By what Docker says of the container, None if it says nothing."""
    try:
        name, image = str(told["Name"]).lstrip("/"), str(told["Config"]["Image"])
        service = (told["Config"].get("Labels") or {}).get("com.docker.compose.service")
    except (KeyError, TypeError, AttributeError):
        return FoundWay(Way.DOCKER)
    if service:
        return FoundWay(Way.COMPOSE, str(service), image)
    # What its scripts call the image and the container unless they are told otherwise.
    if image.startswith("vllm-node") or name == "vllm_node":
        return FoundWay(Way.SPARK, image=image)
    return FoundWay(Way.DOCKER, name, image)


def image_version(image: str) -> str:
    """Of the vLLM in an image by its labels or variables, "" without; nothing in it is run, and nothing is fetched."""
    told = _docker_inspect("image", "inspect", "--", image)
    try:
        config = (told or {})["Config"]
        labels = {str(name).rpartition(".")[2]: str(value) for name, value in (config.get("Labels") or {}).items()}
        variables = dict(str(each).partition("=")[::2] for each in config.get("Env") or ())
    except (KeyError, TypeError, AttributeError):
        return ""
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


def _docker_inspect(*asked: str) -> Mapping[str, Any] | None:
    command = ("docker", *asked)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCKER_SECONDS, check=True)
        told = loads(done.stdout.encode())[0]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        return None
    return told if isinstance(told, dict) else None
