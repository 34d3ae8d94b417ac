"""How a vLLM is run, told from what a machine shows: processes, their control groups, Docker's word, the URL."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.commands import ways
from proxy.commands.ways import FoundWay, Surroundings, Way, find, surroundings

URL = "http://127.0.0.1:8000"

CONTAINER = "3f" * 32

DOCKER = f"0::/system.slice/docker-{CONTAINER}.scope\n"

USER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/terminal.scope\n"

SERVE = ("/opt/venv/bin/python3", "/opt/venv/bin/vllm", "serve", "m")


def container(image: str = "vllm/vllm-openai", name: str = "/llm", **labels: str) -> dict[str, Any]:
    return {"Name": name, "Config": {"Image": image, "Labels": labels}}


@pytest.fixture
def around(tmp_path) -> Callable[..., Surroundings]:
    """`around((arguments, control group), ...)`: a machine with these processes."""

    def around(
        *processes: tuple[tuple[str, ...], str],
        in_container: bool = False,
        inspected: Mapping[str, Any] | None = None,
        **environment: str,
    ) -> Surroundings:
        for number, (arguments, group) in enumerate(processes, 100):
            folder: Path = tmp_path / str(number)
            folder.mkdir()
            (folder / "cmdline").write_text("\0".join(arguments) + "\0")
            (folder / "cgroup").write_text(group)
        (tmp_path / "99").mkdir()  # a process that is not ours to look at
        return Surroundings(tmp_path, environment, in_container, lambda name: inspected if name == CONTAINER else None)

    return around


@pytest.mark.parametrize(
    ("arguments", "group", "inspected", "found"),
    [
        (SERVE, USER, None, FoundWay(Way.PIP)),
        (("python", "-m", "vllm.entrypoints.openai.api_server"), USER, None, FoundWay(Way.PIP)),
        (("/venv/bin/python", "/venv/bin/seamark", "worker", "--port", "8000"), USER, None, FoundWay(Way.PIP)),
        (SERVE, "0::/system.slice/llm.service\n", None, FoundWay(Way.SYSTEMD, "llm.service")),
        (SERVE, DOCKER, None, FoundWay(Way.DOCKER)),  # no docker to be asked
        (SERVE, DOCKER, {}, FoundWay(Way.DOCKER)),  # what docker says may lack anything
        (SERVE, DOCKER, container(), FoundWay(Way.DOCKER, "llm")),
        (SERVE, f"9:name=systemd:/docker/{CONTAINER}\n", container(), FoundWay(Way.DOCKER, "llm")),
        (SERVE, DOCKER, container(**{"com.docker.compose.service": "ai"}), FoundWay(Way.COMPOSE, "ai")),
        (SERVE, DOCKER, container("vllm-node:latest"), FoundWay(Way.SPARK)),
        (SERVE, DOCKER, container(name="/vllm_node"), FoundWay(Way.SPARK)),
        (SERVE, "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope\n", None, FoundWay(Way.KUBERNETES)),
        (SERVE, f"0::/machine.slice/libpod-{CONTAINER}.scope/container\n", container(), FoundWay(Way.DOCKER, "llm")),
        (SERVE, DOCKER, {"Name": "/a", "Config": {"Image": "i", "Labels": None}}, FoundWay(Way.DOCKER, "a")),
        (SERVE, DOCKER, container("my/vllm-node"), FoundWay(Way.DOCKER, "llm")),
        (("seamark", "serve"), USER, None, None),
        (("vim", "vllm", "notes"), USER, None, None),
    ],
)
def test_a_server_on_this_machine_is_known_by_its_control_group(around, arguments, group, inspected, found):
    assert find(URL, around((arguments, group), inspected=inspected)) == found


def test_of_several_servers_the_one_at_the_port_counts_and_mapped_ports_of_one_way_too(around):
    first, second = ((*SERVE, "--port", "8001"), USER), ((*SERVE, "--port=8002"), "0::/system.slice/b.service\n")
    machine = around(first, second)
    assert find("http://localhost:8001", machine) == FoundWay(Way.PIP)
    assert find("http://[::1]:8002", machine) == FoundWay(Way.SYSTEMD, "b.service")
    assert find("http://127.0.0.1:9000", machine) is None  # either


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://worker:8000", FoundWay(Way.COMPOSE, "worker")),
        ("http://host.docker.internal:8000", None),
        ("http://192.168.100.10:8000", None),
        ("http://worker-0.seamark-worker.seamark.svc:8000", FoundWay(Way.KUBERNETES)),
        (URL, None),  # a container does not see its own control group
    ],
)
def test_from_within_a_container_names_tell(around, url, found):
    assert find(url, around((SERVE, "0::/\n"), in_container=True)) == found


def test_from_a_pod_it_is_kubernetes(around):
    assert find("http://worker:8000", around(KUBERNETES_SERVICE_HOST="10.0.0.1")) == FoundWay(Way.KUBERNETES)


def test_a_machine_elsewhere_says_nothing(around):
    assert find("http://spark:8000", around((SERVE, USER))) is None


class Docker:
    """Programs that are run, and what they answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.answer: str | Exception = ""
        monkeypatch.setattr(ways.subprocess, "run", self.run)

    def run(self, command: tuple[str, ...], **given: Any) -> SimpleNamespace:
        assert given["capture_output"] and given["text"] and given["check"] and given["timeout"] > 0
        self.asked.append(command)
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(stdout=self.answer)


FAILURES = [OSError("no docker"), subprocess.CalledProcessError(1, "docker"), subprocess.TimeoutExpired("docker", 5)]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ('[{"Name": "/a"}]', {"Name": "/a"}),
        *((answer, None) for answer in ("[]", "[1]", "{}", "no JSON", *FAILURES)),
    ],
    ids=repr,
)
def test_docker_is_asked_what_a_container_is(answer, told, monkeypatch):
    docker = Docker(monkeypatch)
    docker.answer = answer
    assert surroundings().inspect("llm") == told and docker.asked == [("docker", "inspect", "llm")]
