"""`seamark setup`: what is asked, looked for and refused; what is written and printed, whole (`golden/setup.txt`).

What is written for a recipe: all of it but what vLLM dropped, and the plugin and the flags that hits need. Where the
scripts are run: `tests/gateway/test_setup_recipes.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import yaml

from proxy.commands import setup
from proxy.commands.cures import EVENTS_FLAG, NEEDED
from proxy.commands.outlook import IMAGE
from proxy.commands.recipe import EVERYWHERE, read_recipe
from proxy.commands.recipe_files import (
    Places,
    RecipeFiles,
    files_of,
    gateway_host,
    gateway_worker,
    run_script,
    undo_script,
)
from proxy.commands.setup import RunningVllm, running, source_folder
from proxy.commands.setup_files import SetupWay
from proxy.errors import SettingsError
from tests.deploy.compose_files import DEPLOY, OF_THE_USER
from tests.harness.setup_answers import ANSWERS, RECIPES, SECOND, SPARK, WORKER, written

SOURCE = DEPLOY.parent

# What would be more than a name in a script, or in a file of settings.
INTO_SHELLS = ["x; id", "$(id)", "`id`", "x\nid", "x'", 'x"', "x y", "x&id", "x|id", "$HOME", "x\\", "x\x1b[2J"]


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[RunningVllm]:
    """What answers on the ports that are looked at: nothing at first. There is a checkout of spark-vllm-docker."""
    found: list[RunningVllm] = []

    def running(ports: range) -> list[RunningVllm]:
        assert list(ports) == [8000, 8001, 8002, 8003]
        return found

    monkeypatch.setattr(setup, "running", running)
    monkeypatch.setattr(setup, "image_version", lambda image: "")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: object() if name == "vllm" else real(name, *more)
    )
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("mods", "recipes"):
        (home / SPARK / name).mkdir(parents=True)
    return found


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`terminal(*answers)`: somebody who answers so; the questions that were asked."""

    def terminal(*answers: str) -> list[str]:
        left, asked = iter(answers), []

        def said(prompt: str) -> str:
            asked.append(prompt)
            return next(left)

        monkeypatch.setattr("builtins.input", said)
        for stream in ("stdin", "stdout"):
            monkeypatch.setattr(getattr(setup.sys, stream), "isatty", lambda: True, raising=False)
        return asked

    return terminal


def everything(out: Path) -> str:
    """All that was written, and which of it is a script."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    modes = {path: "script " if os.access(path, os.X_OK) else "" for path in files}
    return "\n".join(f"--- {modes[path]}{path.relative_to(out)}\n{path.read_text()}" for path in files)


@pytest.mark.parametrize("case", ANSWERS)
def test_what_is_written_and_said_for_the_flags(case, tmp_path, capsys, expect_golden):
    out = tmp_path / "my files"
    flags, files = ANSWERS[case]
    assert setup.main([*flags, "--out", str(out)]) == 0, capsys.readouterr().err
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == files
    text = capsys.readouterr().out + everything(out)
    expect_golden("setup", case, text, OUT=out, HOME=Path.home())


@pytest.mark.parametrize("name", ["a\nb", "file/out"])
def test_a_folder_that_a_script_cannot_name_or_nobody_can_write_is_said_in_one_line(name, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert setup.main(["--way", "pip", *WORKER, "--out", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("--out: a folder whose name can be written into a script" in line) == ("\n" in name)


def test_nothing_is_overwritten_unless_that_is_said(tmp_path, capsys):
    out = written(tmp_path, "pip, vLLM runs")
    (out / "gateway.sh").unlink()
    (out / "seamark.toml").write_text("mine")
    capsys.readouterr()
    flags = [*ANSWERS["pip, vLLM runs"][0], "--out", str(out)]
    assert setup.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "seamark.toml" in line and "--force" in line and "gateway.sh" not in line
    assert (out / "seamark.toml").read_text() == "mine" and not (out / "gateway.sh").exists()
    assert setup.main([*flags, "--force"]) == 0
    assert (out / "seamark.toml").read_text() != "mine" and (out / "gateway.sh").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--way: how do you run vLLM?"),
        (["--way", "compose"], "--model"),
        (["--way", "compose-beside"], "--worker"),
        (["--way", "systemd", "--worker", "localhost:8000"], "begins with http://"),
        (["--way", "pip", "--worker", "http://me:secret@a:1"], "no password"),
        (["--way", "pip", "--workers", "1", *WORKER, *SECOND, "--model", "\n"], "--model"),
        (["--way", "kubernetes", "--workers", "1", *SECOND, "--worker", "http://a"], "name all 1"),
        (["--way", "pip", "--workers", "0", *WORKER], "less than one"),
        (["--way", "compose", "--model", "m", "--workers", "3"], "--way compose-beside"),
        (["--way", "compose", "--model", "m", "--workers", "2"], "second machine"),
        (["--way", "compose", "--model", "m", "--worker", "http://spark-2:8000"], "IP address"),
        (["--way", "kubernetes", *WORKER], "the pod itself"),
        (["--way", "compose", "--model", "m\nx: y"], "--model"),
        (["--way", "spark-vllm-docker", "--model", "m", "--spark", "/nowhere"], "--spark: /nowhere is no checkout"),
        (["--way", "pip", "--model", str(RECIPES / "nemotron-3-ultra.yaml")], "a recipe and no model: seamark setup"),
        (["--way", "pip", str(RECIPES / "nemotron-3-ultra.yaml")], "--way: the recipe says it"),
        *(
            ([*flag, "vllm serve m"], f"{flag[0]}: the recipe says it")
            for flag in (["--model", "m"], ["--cpu"], WORKER)
        ),
        (["--workers", "1", "vllm serve m"], "--workers: the recipe says it"),
        *((["--way", "kubernetes", "--model", "m", "--registry", each], "--registry") for each in INTO_SHELLS),
        *((["--way", "pip", "--worker", f"http://a:1/{each}"], "--worker") for each in INTO_SHELLS),
        (["--way", "compose-beside", "--worker", "http://a:1,http://evil:1"], "--worker"),
        (["--way", "compose", "--model", "m", "--worker", "http://[fe80::1%25$(id)]:8000"], "--worker"),
        (["--way", "pip", *WORKER, "--source", "/a\nb"], "--source"),
        (["--way", "spark-vllm-docker", "--model", "m", "--spark", "/a\nb"], "--spark"),
        (["vllm serve m", "--source", "/nowhere"], "--source: /nowhere is no checkout"),
    ],
)
def test_what_is_missing_or_cannot_be_is_said_in_one_line(flags, said, tmp_path, capsys):
    out = tmp_path / "out"
    assert setup.main([*flags, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark setup: ")
    assert said in line and "secret" not in line and not out.exists()


@pytest.mark.parametrize(
    ("answers", "flags"),
    [
        (("slurm", SetupWay.SPARK, "a/B"), ("--way", "spark-vllm-docker", "--model", "a/B")),
        ((SetupWay.COMPOSE, "a/B", OF_THE_USER["SECOND_SPARK"]), ("--way", "compose", "--model", "a/B", *SECOND)),
        ((SetupWay.COMPOSE, "a/B", ""), ("--way", "compose", "--model", "a/B", "--workers", "1")),
        ((SetupWay.KUBERNETES, "a/B", "3"), ("--way", "kubernetes", "--model", "a/B", "--workers", "3")),
        (("", "  a/B "), ("--way", "pip", "--model", "a/B")),  # the first way is the default
        ((SetupWay.SYSTEMD, ""), ("--way", "systemd", "--worker", "http://127.0.0.1:8000")),
        ((SetupWay.BESIDE, "http://a:1/v1"), ("--way", "compose-beside", "--worker", "http://a:1")),
    ],
)
def test_a_terminal_is_asked_for_what_the_flags_leave_open(answers, flags, terminal, tmp_path, capsys, expect_golden):
    out = tmp_path / "out"
    asked = terminal(*answers, str(out))
    assert setup.main([]) == 0
    said = capsys.readouterr().out + everything(out)
    assert setup.main([*flags, "--out", str(out), "--force"]) == 0
    same = capsys.readouterr().out + everything(out)
    assert said.endswith(same)
    lines = [*asked, said.removesuffix(same)]
    expect_golden("setup", f"asked, answered {', '.join(answers)}", "\n".join(lines), OUT=out, HOME=Path.home())


@pytest.mark.parametrize("answer", ["two", "10000", "-1", "٣"])
def test_a_number_of_servers_that_is_none_is_refused(answer, terminal, capsys):
    terminal(answer)
    assert setup.main(["--way", "kubernetes", "--model", "m"]) == 2
    assert "--workers: " in capsys.readouterr().err


def test_who_leaves_before_the_end_is_told_that_nothing_was_written(monkeypatch, terminal, capsys):
    terminal()

    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))
    assert setup.main([]) == 2
    assert capsys.readouterr().err == "\nseamark setup: nothing was written\n"


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_where_one_end_is_no_terminal_nobody_is_asked(stream, monkeypatch, terminal, capsys):
    asked = terminal()
    monkeypatch.setattr(getattr(setup.sys, stream), "isatty", lambda: False, raising=False)
    assert setup.main([]) == 2 and not asked and "--way" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["pip", "pip --model n", "compose-beside"])
def test_what_answers_on_this_machine_is_named_and_taken_where_it_has_the_model(
    flags, answering, tmp_path, capsys, expect_golden
):
    answering += [RunningVllm("http://127.0.0.1:8000", ("m",)), RunningVllm("http://127.0.0.1:8001", ())]
    assert setup.main(["--way", *flags.split(), "--out", str(tmp_path / "out")]) == 0
    settings = next(tmp_path.rglob("seamark.*")).read_text()
    expect_golden("setup", f"vLLM runs, {flags}", capsys.readouterr().out + settings, OUT=tmp_path / "out")


@pytest.mark.parametrize("source", [SOURCE, None])
def test_without_vllm_here_the_worker_is_started_in_the_environment_that_is_active(
    source, monkeypatch, tmp_path, capsys, expect_golden
):
    monkeypatch.setattr(setup, "source_folder", lambda: source)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert setup.main(["--way", "pip", "--model", "a/B c", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out + (tmp_path / "out/worker.sh").read_text()
    expect_golden("setup", f"no vLLM here, {'a' if source else 'no'} checkout", text, OUT=tmp_path / "out")


def test_servers_are_known_by_their_models(monkeypatch):
    answers = {
        8000: httpx.Response(200, json={"data": [{"id": "m"}, {"id": "n"}]}),
        8001: httpx.Response(401),
        8002: httpx.Response(200, json=[]),
        8003: httpx.Response(404, json={"data": [{"id": "m"}]}),
    }

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/models"
        if request.url.port not in answers:
            raise httpx.ConnectError("refused")
        return answers[request.url.port]

    real = httpx.Client

    def client(**given: Any) -> httpx.Client:
        assert given == {"timeout": 1.0, "trust_env": False}  # no proxy lies between this machine and itself
        return real(transport=httpx.MockTransport(answer), **given)

    monkeypatch.setattr(setup.httpx, "Client", client)
    assert running([8004, *answers]) == [
        RunningVllm("http://127.0.0.1:8000", ("m", "n")),
        RunningVllm("http://127.0.0.1:8001", ()),
    ]


def test_the_source_is_the_checkout_that_this_runs_in_else_the_one_that_pip_has_noted_if_it_is_there(
    monkeypatch, tmp_path
):
    def installed(what: str | None) -> None:
        monkeypatch.setattr(setup.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: what))

    monkeypatch.setattr(setup.metadata, "distribution", Mock(side_effect=setup.metadata.PackageNotFoundError))
    assert source_folder() == SOURCE
    monkeypatch.setattr(setup, "__file__", str(tmp_path / "a/b/c.py"))
    assert source_folder() is None
    for what in (None, "{}", "no JSON"):  # from a package index: pip notes no URL
        installed(what)
        assert source_folder() is None
    installed(json.dumps({"url": f"file://{tmp_path}/my%20seamark"}))
    assert source_folder() is None
    (tmp_path / "my seamark/deploy").mkdir(parents=True)
    (tmp_path / "my seamark/deploy/compose.yaml").write_text("")
    assert source_folder() == tmp_path / "my seamark"


@pytest.mark.parametrize(
    "given", ["--way compose --model m", "--way compose-beside", "--way systemd", "--way kubernetes", "RECIPE"]
)
def test_without_a_checkout_what_needs_one_is_not_set_up(given, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(setup, "source_folder", lambda: None)
    flags = ["vllm serve m"] if given == "RECIPE" else [*given.split(), *(SECOND if "m" not in given[-1] else ())]
    assert setup.main([*flags, "--out", str(tmp_path / "b")]) == 2
    assert "--source: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        *("vllm serve m --host 10.0.0.7", "docker run vllm/vllm-openai:v0.28.0 Qwen3.6-27B"),
        "VLLM_USE_RUST_FRONTEND=1 vllm serve Qwen3.6-27B --host localhost --api-key k",
        "vllm serve 'Qwen3.6\x1b[2J\n'",
    ],
    ids=ascii,
)
def test_of_a_recipe_it_is_said_what_will_hit_what_to_change_and_how_to_go_on(line, tmp_path, capsys, expect_golden):
    assert setup.main([line, "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o600, 0o700}  # what vLLM is started with may hold keys
    text += (tmp_path / "out/seamark.toml").read_text() + (tmp_path / "out/gateway.sh").read_text()
    expect_golden("setup", ascii(line), anywhere(text), OUT=tmp_path / "out")


# What vLLM dropped, as it may be spelt, before and behind what stays.
DROPPED = "--mamba-cache-mode align --a 1 --no-enable-prefix-caching --mamba_cache_mode=align --b"

MINE = {"name": "mine", "container": "vllm-node", "mods": ["mods/seamark", "mods/theirs"], "defaults": {"port": 8000}}
MINE |= {"command": f"echo {{port}}\nvllm serve 'm m' {DROPPED} --port {{port}}   \n# end", "extra": 1}


def compose(**service: Any) -> dict[str, Any]:
    usual = {"image": "vllm/vllm-openai:v0.33.0", "command": f"m --port 8001 {DROPPED}"}
    return {"services": {"my llm": {**usual, **service}}}


# A file's name and what is in it, as a text or YAML; without a name, a line.
WRITTEN: dict[str, tuple[str, Any]] = {
    "a line": ("", "vllm serve m a --b 1 2 --c --d=1 x -e y"),
    "a line with all flags": ("", f"vllm serve m {' '.join(NEEDED)}"),
    "a line with some flags": ("", f"vllm serve m --enable_scale_out {EVENTS_FLAG} --middleware mine"),
    "a line, Rust": ("", "VLLM_USE_RUST_FRONTEND=1 vllm serve m"),
    "a script": ("mine.sh", f"#!/bin/bash\nsource a/b\nvllm serve m {DROPPED} 2>&1 | tee log\nend\n"),
    "a script with a line in its name": ("a\ntouch b.sh", "vllm serve m\n"),
    "the launcher": ("run.sh", "#!/usr/bin/env bash\na\n./launch-cluster.sh -t x exec vllm serve m --a 1\nb\n"),
    "spark": ("My Recipe.yaml", MINE),
    "spark, alone": ("solo.yaml", {**MINE, "solo_only": True}),
    "compose": ("compose.yaml", compose()),
    "compose, ports and host": ("compose.yaml", compose(ports=["9000:8001"], command="m --host 10.0.0.7")),
    "compose, all words": ("compose.yaml", compose(command=["vllm", "serve", "m"])),
    "compose, an entrypoint": ("compose.yaml", compose(entrypoint="vllm", command="serve m")),
    "compose, a shell": ("compose.yaml", compose(entrypoint=["bash", "-c"], command=["ulimit; vllm serve m"])),
    "compose, a shell's words": ("compose.yaml", compose(command=["bash", "-c", "ulimit; vllm serve m"])),
    "docker": (
        "My Run_2.x.sh",
        f"#!/bin/bash\necho a\ndocker run --rm --entrypoint vllm -p 80:8000 -e 'A=b c' i:1 serve m {DROPPED}\nb\n",
    ),
    "podman, a shell": (
        "ä.sh",
        "podman run --entrypoint=a --entrypoint=bash --name=x i -c 'pip install a && vllm serve m --host 1.2.3.4'",
    ),
    "config": (
        "my vllm.yaml",
        {"model": "m", "mamba_cache_mode": "align", "no-enable-prefix-caching": True, "text": "a\nb\n"},
    ),
    "config with a host": ("my vllm.yaml", {"model": "m", "host": "10.0.0.7"}),
}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Folders with a blank in their names, and what is read of them."""
    made = Places(tmp_path / "my out", tmp_path / "sea mark", tmp_path / "spark vllm")
    for folder in (made.source, made.spark / "mods", made.spark / "recipes"):
        folder.mkdir(parents=True)
    return made


def shown(made: RecipeFiles) -> str:
    files = "".join(f"--- {name}\n{text}" for name, text in made.files.items())
    return anywhere("\n".join([files, *(f"undo: {each}" for each in made.undo), *made.notes]))


def anywhere(text: str) -> str:
    """Without what tells one folder's images from another's."""
    return re.sub(r"(seamark-worker-[a-z0-9.-]*-)[0-9a-f]{8}\b", r"\1<FOLDER'S>", text)


def write(places: Places, name: str, what: Any) -> RecipeFiles:
    path = places.source / name
    if name:
        path.write_text(what if isinstance(what, str) else yaml.safe_dump(what))
    return files_of(read_recipe(str(path) if name else what, lambda name: None), places)


@pytest.mark.parametrize("case", WRITTEN)
def test_a_recipe_stays_but_for_what_vllm_dropped_and_gets_what_hits_need(case, places, expect_golden):
    made = write(places, *WRITTEN[case])
    expect_golden("recipe_files", case, shown(made), FOLDER=places.out.parent)


def test_another_image_takes_the_place_of_one_that_does_not_fit(places):
    instead = places._replace(image=IMAGE)
    for what in (("c.yaml", compose()), ("", "docker run vllm/vllm-openai:v0.28.0 m")):
        text = "".join(write(instead, *what).files.values())
        assert IMAGE in text and "vllm/vllm-openai:v0" not in text.replace(IMAGE, "")


def test_a_recipe_in_a_checkout_is_run_there_and_another_one_wants_a_checkout(places, tmp_path):
    nowhere = places._replace(spark=tmp_path / "none")
    made = write(nowhere._replace(source=places.spark / "recipes"), "a.yaml", MINE)
    assert f"cd '{places.spark}'\n" in made.files["start.sh"]
    for missing in ("none", "mods", "recipes"):
        if missing != "none":
            shutil.rmtree(places.spark / missing)
            nowhere = places
        with pytest.raises(SettingsError, match=r"--spark: .* is no checkout of spark-vllm-docker"):
            write(nowhere, "b.yaml", MINE)


CONFIG: Mapping[str, Any] = {
    "Image": "vllm/vllm-openai:v0.33.0",
    "Entrypoint": ["vllm", "serve"],
    "Cmd": ["m", "--x", "it's $HOME"],
    "Env": ["PATH=/bin", "A=b c"],
}


def container(places: Places, config: Mapping[str, Any] | None = None, **host: Any) -> RecipeFiles:
    told = {"Name": "/llm", "Config": {**CONFIG, **(config or {})}, "HostConfig": host}
    return files_of(read_recipe("llm", lambda name: told), places)


def test_a_container_is_run_again_in_its_place_and_a_shell_in_it_stays(places, expect_golden):
    shell = {"Entrypoint": ["bash", "-c"], "Cmd": ["vllm serve m"], "Env": []}
    for case, config in {"a container": None, "a container of a shell": shell}.items():
        expect_golden("recipe_files", case, shown(container(places, config)), FOLDER=places.out.parent)


BOUND = {"8000/tcp": [{"HostIp": "10.0.0.7", "HostPort": "1"}, {"HostPort": "2"}], "9/udp": None}

# What Docker says that a container was started with.
HOSTS: list[dict[str, Any]] = [
    {"Binds": ["/a:/b", "/c:/d:ro"], "PortBindings": BOUND, "ShmSize": 1 << 30, "Memory": 1 << 30, "Privileged": True},
    {"NetworkMode": "host", "IpcMode": "host", "Runtime": "nvidia", "RestartPolicy": {"Name": "always"}},
    {"Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": 7}], "Devices": [{"PathOnHost": "/dev/x"}], "CapAdd": ["X"]},
    {"NetworkMode": "", "IpcMode": None, "Runtime": "runc"},
    *({"NetworkMode": network, "IpcMode": ipc} for network, ipc in (("default", "private"), ("bridge", "shareable"))),
    *({"ShmSize": size, "Memory": 0, "Privileged": False} for size in (0, 67108864, None)),
    *({"RestartPolicy": each} for each in (None, {"Name": ""}, {"Name": "no"})),
    {"PortBindings": {"8000/tcp": [{"HostIp": ""}]}},
    *(
        {"DeviceRequests": requests}
        for requests in (
            [{"Capabilities": [["gpu"]], "DeviceIDs": None}],
            [{"Capabilities": [["gpu"]], "DeviceIDs": ["0", "2"]}],
            [{"Capabilities": [["tpu"], ["gpu", "x"]]}],
            [{"Capabilities": [["tpu"]]}, {"Capabilities": None}],
        )
    ),
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_container_is_started_with_what_it_was_started_with(host, places, expect_golden):
    run = shown(container(places, {"Env": None}, **host)).partition("docker run")[2].partition("\nundo:")[0]
    expect_golden("recipe_files", f"a container with {host}", f"docker run{run}", FOLDER=places.out.parent)


def test_vllm_and_the_gateway_run_in_one_terminal_and_all_is_undone(places, expect_golden):
    undo = undo_script(places, ["docker x", "podman y", "rm z"])
    scripts = [run_script(places, "start.sh"), undo]
    expect_golden("recipe_files", "run and undo", "\n".join(scripts), FOLDER=places.out.parent)


@pytest.mark.parametrize(
    ("flags", "host", "worker"),
    [
        ("", EVERYWHERE, "http://127.0.0.1:8000"),
        ("--host localhost --port 8001", "127.0.0.1", "http://127.0.0.1:8001"),
        ("--host ::", "::", "http://127.0.0.1:8000"),
        ("--host fd00::7", "fd00::7", "http://[fd00::7]:8000"),
    ],
)
def test_the_gateway_listens_where_vllm_did_and_finds_it_there(flags, host, worker):
    recipe = read_recipe(f"vllm serve m {flags}", lambda name: None)
    assert (gateway_host(recipe), gateway_worker(recipe)) == (host, worker)
