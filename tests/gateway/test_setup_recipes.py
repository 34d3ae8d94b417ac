"""What `seamark setup` and `doctor` write and say is taken by sh, loses no flag, and goes away."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from proxy.commands import doctor, setup
from proxy.commands.setup import gateway_toml
from tests.deploy.compose_files import DEPLOY
from tests.harness.waiting import wait_for

# In the shapes in which they are published: one small file each, in words of our own.
RECIPES = Path(__file__).parents[1] / "data" / "recipes"

# How the verdict on each begins as it is, and with what is written. What is said and written: tests/unit/commands.
HITS = {
    "qwen3.8-27b-dflash2.yaml": ("will hit from request 2 on if", 1),
    "glm-5.3-flash.yaml": ("no hits by Seamark", 1),
    "qwen3.6-35b-playbook.sh": ("no hits yet", 0),
    "qwen3.8-27b-compose.yaml": ("will hit from request 2 on:", 0),
    "granite-4-compose.yaml": ("will hit from request 2 on if", 1),
    "falcon-h1.sh": ("will hit from request 2 on:", 0),
}

# A `docker run` of a playbook, as Docker tells it of a container.
INSPECTED = {
    "Name": "/qwen36",
    "Config": {
        "Image": "vllm/vllm-openai:v0.33.0",
        "Entrypoint": ["vllm", "serve"],
        "Cmd": ["nvidia/Qwen3.6-35B-A3B-NVFP4", "--served-model-name", "it's $HOME; rm -rf /"],
        "Env": ["PATH=/bin", "HF_TOKEN=hf_secret"],
        "Labels": {},
    },
    "HostConfig": {
        "Binds": ["/home/me/models:/models"],
        "PortBindings": {"8000/tcp": [{"HostIp": "192.168.1.5", "HostPort": "8010"}]},
        "NetworkMode": "bridge",
        "IpcMode": "host",
        "ShmSize": 17179869184,
        "RestartPolicy": {"Name": "unless-stopped"},
        "DeviceRequests": [{"Capabilities": [["gpu"]], "DeviceIDs": None}],
    },
}

PROGRAM = """#!/bin/sh
{{ printf '%s' {name}; printf '\\t%s' "$@"; printf '\\036'; }} >> {log}
{more}
"""


class Machine:
    """A folder with a checkout of spark-vllm-docker, and programs that write down their arguments."""

    def __init__(self, root: Path) -> None:
        self.out, self.log = root / "my files", root / "log"
        self.spark, self.source, self.bin = root / "spark vllm", root / "seamark", root / "bin"
        for folder in (self.spark / "mods/theirs", self.spark / "recipes", self.bin, self.source / "engine_patches"):
            folder.mkdir(parents=True)
        self.program(self.spark / "run-recipe.sh", "run-recipe", 'grep -q "/mods/seamark$" "$1"')
        self.program(
            self.spark / "launch-cluster.sh", "launch-cluster", 'test "$1" = --apply-mod && test -f "$2/run.sh"'
        )
        for name in ("docker", "podman"):
            self.answer(name)
        shutil.copytree(DEPLOY / "spark-vllm-docker", self.source / "deploy/spark-vllm-docker")
        shutil.copy(DEPLOY / "compose.yaml", self.source / "deploy")
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            (self.source / name).touch()
        # In place of pip, whose wheel is a real one in tests/distribution.
        self.program(self.bin / "python3", "python3", 'date +%N > "$7/vllm_seamark-1-py3-none-any.whl"')

    def answer(self, name: str, **answers: str) -> None:
        """What Docker says, by the words that a question begins with."""
        ours = {"ps -q": "c0ffee", **answers}
        cases = " ".join(f"'{asked}'*) echo {shlex.quote(answer)} ;;" for asked, answer in ours.items() if answer)
        self.program(self.bin / name, name, f'case "$*" in {cases} esac')

    def program(self, path: Path, name: str, more: str) -> None:
        path.write_text(PROGRAM.format(name=name, log=shlex.quote(str(self.log)), more=more))
        path.chmod(0o755)

    def setup(self, given: str) -> int:
        folders = ("--out", str(self.out), "--source", str(self.source), "--spark", str(self.spark))
        return setup.main([given, *folders])

    def run(self, script: str, *arguments: str) -> list[list[str]]:
        """What the programs were given by a script that was written."""
        self.log.unlink(missing_ok=True)
        command = [str(self.out / script), *arguments]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        return self.logged()

    def logged(self) -> list[list[str]]:
        """Programs with their arguments, in order."""
        text = self.log.read_text() if self.log.exists() else ""
        return [each.split("\t") for each in text.split("\036") if each]

    def files(self) -> Mapping[str, bytes]:
        """Of the user's: all but what the programs were given."""
        return {
            str(path): path.read_bytes() if path.is_file() else b""
            for folder in (self.spark, self.out)
            for path in sorted([folder, *folder.rglob("*")])
            if path.exists()
        }


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    for name in ("HF_TOKEN", "MODEL", "BIND", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.mark.parametrize("name", HITS)
def test_what_a_recipe_will_do_is_said_and_all_that_was_written_is_undone(name, machine, capsys):
    path = RECIPES / name
    for each in ("mods/seamark/run.sh", f"recipes/seamark-{name}", "recipes/seamark-glm-5.3-flash.yaml"):
        (machine.spark / each).parent.mkdir(exist_ok=True)
        (machine.spark / each).write_text("the user's")
    before, (verdict, status) = machine.files(), HITS[name]
    assert doctor.main(["--recipe", str(path)]) == (0 if verdict.endswith(":") else 1)
    assert capsys.readouterr().out.startswith(verdict) and machine.files() == before
    assert machine.setup(str(path)) == status and (machine.out / "seamark.toml").exists()
    assert (machine.out / "run.sh").exists() == ("Seamark" not in verdict)
    for script in machine.out.glob("*.sh"):
        subprocess.run(["sh", "-n", str(script)], check=True)
    if (machine.out / "start.sh").exists():
        machine.run("start.sh")
    for each in ("notes", "seamark.toml"):  # one of them was made, and has changed
        (machine.out / each).write_text("the user's")
    asked = machine.run("undo.sh")
    assert {path.name for path in machine.out.iterdir()} == {"notes", "seamark.toml"}
    shutil.rmtree(machine.out)
    assert machine.files() == before
    if path.read_text().startswith(("docker", "podman")) or "compose" in name:
        assert any(each[1:4] == ["image", "rm", "-f"] for each in asked)
        assert any(each[1:] == ["rm", "-f", "c0ffee"] for each in asked)
        assert any("up" in each for each in asked) == ("compose" in name)  # what runs goes on without Seamark


def test_two_recipes_of_one_name_share_nothing_and_what_runs_goes_on_without_seamark(machine, tmp_path):
    named = []
    for number in (1, 2):
        machine.out = tmp_path / f"out {number}"
        assert machine.setup(str(RECIPES / "granite-4-compose.yaml")) == 1
        machine.run("start.sh")
        asked = machine.run("undo.sh")
        assert ["up", "-d"] in [each[4:6] for each in asked] and not machine.out.exists()
        named.append({word.rpartition("=")[2] for each in asked for word in each if "seamark-worker" in word})
    assert all(map(len, named)) and named[0].isdisjoint(named[1])


def test_a_container_is_run_again_as_docker_tells_it_and_what_it_says_is_no_shell(machine, capsys):
    machine.answer("docker", **{"inspect --format": "true", "inspect": json.dumps([INSPECTED])})
    assert machine.setup("qwen36") == 0, capsys.readouterr().err
    assert "docker for nvidia/qwen3.6-35b" in (out := capsys.readouterr().out.lower()) and "hf_secret" not in out
    assert (machine.out / "seamark.toml").read_text() == gateway_toml("http://192.168.1.5:8010", "192.168.1.5")
    assert (machine.out / "start.sh").stat().st_mode & 0o077 == 0  # it holds the token
    assert "docker stop qwen36" in out and "docker start qwen36" in out  # by the user, before and after
    run = machine.run("start.sh")[-1]
    name = run[2].rpartition("=")[2]
    image = run.index(name)
    kept = f"label=seamark.setup={name} env=HF_TOKEN=hf_secret volume=/home/me/models:/models ipc=host"
    kept += " shm-size=17179869184 publish=192.168.1.5:8010:8000/tcp restart=unless-stopped gpus=all"
    assert {f"--{each}" for each in kept.split()} | {"-d"} == set(run[2:image])
    model, *flags = INSPECTED["Config"]["Cmd"]
    assert run[image + 1 :] == [model, "--host", "0.0.0.0", *flags]  # noqa: S104
    assert machine.run("undo.sh") and not machine.out.exists()


@pytest.mark.parametrize("fails", [False, True])
def test_vllm_and_the_gateway_run_in_one_terminal_until_either_ends(machine, fails):
    """Interrupted by its user; or because vLLM has failed, with its status."""
    assert machine.setup(str(RECIPES / "qwen3.5-122b.yaml")) == 1
    noted = machine.log.with_name("log-gateway")
    if fails:
        wait = f"until grep -q start {shlex.quote(str(noted))}; do sleep .05; done; exit 7"
        machine.program(machine.spark / "run-recipe.sh", "run-recipe", wait)
    # In place of the gateway, what writes down its start and its end.
    stand_in = "trap 'echo end >> {0}; exit' TERM\necho start >> {0}\nwhile :; do sleep .05; done\n"
    (machine.out / "gateway.sh").write_text(stand_in.format(shlex.quote(str(noted))))
    command = ["sh", str(machine.out / "run.sh"), "-n", "a,b"]
    output = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **output) as process:
        if not fails:
            assert any(
                "gateway.log" in line for line in process.stdout
            )  # vLLM's script is done: it went to the background
            wait_for(noted.exists)
            recipe = str(machine.out / "seamark-qwen3.5-122b.yaml")
            assert machine.logged()[-1] == ["run-recipe", recipe, "-n", "a,b"]
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == (7 if fails else 130)
    assert noted.read_text() == "start\nend\n"


def test_names_in_a_recipe_reach_a_shell_only_quoted(machine, tmp_path):
    """A file's name, a service's and an image's may hold anything; what is theirs in a script is one word."""
    evil = "a; touch pwned $(touch pwned)\ntouch pwned"
    path = tmp_path / f"{evil}.yaml"
    path.write_text(yaml.safe_dump({"services": {evil: {"image": "vllm/vllm-openai", "command": "m"}}}))
    assert machine.setup(str(path)) == 1
    for script in ("start.sh", "undo.sh"):
        composed = [each for each in machine.run(script) if each[1] == "compose"]
        assert all(each[:4] == ["docker", "compose", "-f", str(path)] and each[-1] == evil for each in composed)
    assert not list(tmp_path.rglob("pwned")) and not Path("pwned").exists() and not machine.out.exists()


@pytest.mark.parametrize(
    "theirs", ["mods/seamark/run.sh", "mods/seamark/vllm_seamark-0.1.whl", "recipes/seamark-qwen3.5-122b.yaml"]
)
def test_a_checkout_gets_the_mod_unless_a_file_there_has_its_name_and_is_another(machine, theirs):
    make = [str(machine.source / "deploy/spark-vllm-docker/make-mod.sh"), str(machine.spark), "seamark-qwen3.5-122b"]
    before = machine.files()
    for _ in range(2):  # what it made itself, it makes anew
        subprocess.run(make, check=True, capture_output=True)
    (machine.spark / theirs).write_text("the user's")
    edited = machine.files()
    done = subprocess.run(make, capture_output=True, text=True)
    assert done.returncode == 1 and f"{theirs} is not as" in done.stderr and machine.files() == edited
    (machine.spark / theirs).unlink()
    takes_away = re.search(r"`(sha256sum -c .*)`", (DEPLOY / "README.md").read_text())[1]
    subprocess.run(["sh", "-c", takes_away], check=True, cwd=machine.spark, capture_output=True)
    assert machine.files() == before
