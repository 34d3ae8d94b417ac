"""What is written for a recipe: all of it but what vLLM dropped, and the plugin and the flags that hits need.

Where the scripts are run: `tests/gateway/test_setup_recipes.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.commands.cures import EVENTS_FLAG, NEEDED
from proxy.commands.outlook import IMAGE, NO_CACHING
from proxy.commands.recipe import EVERYWHERE, Recipe, RecipeKind, Word, read_recipe
from proxy.commands.recipe_files import (
    Places,
    RecipeFiles,
    added_flags,
    files_of,
    gateway_host,
    gateway_worker,
    is_spark_checkout,
    kept,
    run_script,
    spark_checkout,
    undo_script,
)
from proxy.errors import SettingsError

ADDED = list(NEEDED)

# What vLLM dropped, as it may be spelt, before and behind what stays.
DROPPED = "--mamba-cache-mode align --a 1 --no-enable-prefix-caching --mamba_cache_mode=align --b"

KEPT = ["--a", "1", "--b"]

HOST = ["--host", EVERYWHERE]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Folders with a blank in their names, and what is read of them."""
    made = Places(tmp_path / "my out", tmp_path / "sea mark", tmp_path / "spark vllm")
    shipped = made.source / "deploy/spark-vllm-docker/recipes"
    for folder in (shipped, made.spark / "mods", made.spark / "recipes"):
        folder.mkdir(parents=True)
    for name in ("seamark-b.yaml", "seamark-a.yaml", "notes.md"):
        (shipped / name).write_text("")
    return made


def quoted(*path: Path | str) -> str:
    return shlex.quote(str(Path(*path)))


def read(given: str | Path) -> Recipe:
    return read_recipe(str(given), lambda name: None)


def line(*arguments: str, **more: Any) -> Recipe:
    return Recipe(RecipeKind.COMMAND, "a line", "", arguments, **more)


def words(text: str) -> list[str]:
    """Of a shell's text, its lines joined."""
    return shlex.split(text.replace("\\\n", " "), comments=True)


def commands(script: str) -> list[str]:
    return [each for each in script.replace("\\\n    ", "").splitlines() if each and not each.startswith("#")]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["m", "--mamba-cache-mode", "align", "--a", "1"], ["m", "--a", "1"]),
        (["--mamba-cache-mode=align", "x"], ["x"]),
        (["--mamba_cache_mode", "align"], []),
        ([NO_CACHING, "x", "--no_enable_prefix_caching"], ["x"]),
        (["--mamba-cache-modes", "x"], ["--mamba-cache-modes", "x"]),
        (["a", "--mamba-cache-mode", "--b", "c"], ["a", "c"]),
        (["a"], ["a"]),
        ([], []),
    ],
)
def test_what_vllm_dropped_goes_with_its_value(given, left):
    assert [word.value for word in kept([Word(each, each) for each in given])] == left


@pytest.mark.parametrize(
    ("recipe", "added"),
    [
        (line("m"), ADDED),
        (line("m", "--enable_scale_out"), [each for each in ADDED if each != "--enable-scale-out"]),
        (line("m", *shlex.split(EVENTS_FLAG)), ADDED[:-1]),
        (line("m", "--middleware", "mine"), ADDED),
        (line("m", environment={"VLLM_USE_RUST_FRONTEND": "1"}), ADDED[:-1]),
        (line("m", *shlex.split(" ".join(ADDED))), []),
    ],
)
def test_flags_that_hits_need_are_added_unless_they_are_there(recipe, added):
    assert added_flags(recipe) == added


@pytest.mark.parametrize(
    ("recipe", "host", "worker"),
    [
        (line("m"), EVERYWHERE, "http://127.0.0.1:8000"),
        (line("m", "--host", "127.0.0.1"), "127.0.0.1", "http://127.0.0.1:8000"),
        (line("m", "--host", "localhost", "--port", "8001"), "127.0.0.1", "http://127.0.0.1:8001"),
        (line("m", "--host", "::"), "::", "http://127.0.0.1:8000"),
        (line("m", "--host", "10.0.0.7"), "10.0.0.7", "http://10.0.0.7:8000"),
        (line("m", "--host", "fd00::7"), "fd00::7", "http://[fd00::7]:8000"),
        (line("m", listens=("127.0.0.1", 9000)), "127.0.0.1", "http://127.0.0.1:9000"),
    ],
)
def test_the_gateway_listens_where_vllm_did_and_finds_it_there(recipe, host, worker):
    assert (gateway_host(recipe), gateway_worker(recipe)) == (host, worker)


@pytest.mark.parametrize("missing", ["mods", "recipes", "both"])
def test_a_checkout_of_spark_vllm_docker_has_two_folders(missing, places):
    assert is_spark_checkout(places.spark) and spark_checkout(places.spark) == places.spark
    for name in ("mods", "recipes"):
        if missing in (name, "both"):
            (places.spark / name).rmdir()
    assert not is_spark_checkout(places.spark)
    with pytest.raises(SettingsError, match=r"--spark: .* is no checkout of spark-vllm-docker"):
        spark_checkout(places.spark)


SPARK = {
    "name": "mine",
    "container": "vllm-node",
    "mods": ["mods/seamark", "mods/theirs"],
    "defaults": {"port": 8000},
    "command": f"echo {{port}}\nvllm serve 'm m' {DROPPED} --port {{port}}   \n# end",
}


def spark(places: Places, folder: Path, **more: Any) -> tuple[Recipe, RecipeFiles, dict[str, Any]]:
    path = folder / "My Recipe.yaml"
    path.write_text(yaml.safe_dump({**SPARK, **more}))
    recipe = read(path)
    made = files_of(recipe, places)
    return recipe, made, yaml.safe_load(made.files["seamark-my-recipe.yaml"])


def test_a_recipe_of_spark_vllm_docker_keeps_all_but_name_mods_and_command(places, tmp_path):
    recipe, made, document = spark(places, tmp_path, extra=1)
    assert list(made.files) == ["seamark-my-recipe.yaml", "start.sh"]
    assert document["name"] == "Seamark mine" and document["mods"] == ["mods/theirs", "mods/seamark"]
    changed = {"name", "mods", "command"}
    assert {k: v for k, v in document.items() if k not in changed} == {
        k: v for k, v in recipe.document.items() if k not in changed
    }
    assert recipe.document["mods"] == SPARK["mods"]  # the recipe that was read is left alone
    first, *_, last = document["command"].splitlines()
    assert (first, last) == ("echo {port}", "# end") and "{port}" in document["command"]
    serve = words(document["command"].partition("vllm serve")[2].partition("\n#")[0])
    assert serve == ["m m", *KEPT, "--port", "{port}", *words(" ".join(ADDED))]
    assert not any(each != each.rstrip() for each in document["command"].splitlines())
    assert "command: |" in made.files["seamark-my-recipe.yaml"]


@pytest.mark.parametrize(("solo_only", "solo"), [(True, " --solo"), (False, ""), (None, "")])
def test_its_script_makes_the_mod_copies_the_recipe_and_runs_it(solo_only, solo, places, tmp_path):
    more = {} if solo_only is None else {"solo_only": solo_only}
    _, made, _ = spark(places, tmp_path, **more)
    assert commands(made.files["start.sh"]) == [
        "set -eu",
        f"target={quoted(places.spark)}",
        f'{quoted(places.source, "deploy/spark-vllm-docker/make-mod.sh")} "$target"',
        f'cp {quoted(places.out, "seamark-my-recipe")}.yaml "$target/recipes/"',
        'cd "$target"',
        f'exec ./run-recipe.sh seamark-my-recipe{solo} "$@"',
    ]
    assert made.start == f"sh {quoted(places.out, 'start.sh')}"
    copied = [quoted(places.spark, "recipes", f"seamark-{name}.yaml") for name in ("a", "b", "my-recipe")]
    assert made.undo == [f"rm -rf {quoted(places.spark, 'mods/seamark')}", f"rm -f {' '.join(copied)}"]
    assert not made.notes


def test_a_recipe_in_a_checkout_is_run_there_and_another_one_wants_a_checkout(places, tmp_path):
    _, made, _ = spark(places._replace(spark=tmp_path / "none"), places.spark / "recipes")
    assert f"target={quoted(places.spark)}\n" in made.files["start.sh"]
    with pytest.raises(SettingsError, match="--spark: "):
        spark(places._replace(spark=tmp_path / "none"), tmp_path)


def test_a_command_for_the_launcher_gets_the_mod_and_the_flags(places, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("#!/usr/bin/env bash\necho a\n./launch-cluster.sh -t x exec vllm serve m --a 1\necho b\n")
    made = files_of(read(path), places)
    script = made.files["start.sh"]
    assert script.startswith("#!/usr/bin/env bash\n# Gives") and "set -eu" not in script
    make_mod, folder, before, *launched, behind = commands(script)
    assert make_mod == f"{quoted(places.source, 'deploy/spark-vllm-docker/make-mod.sh')} {quoted(places.spark)} || exit"
    assert folder == f"cd {quoted(places.spark)} || exit" and (before, behind) == ("echo a", "echo b")
    given = words(" ".join(launched))
    assert given[:5] == ["./launch-cluster.sh", "--apply-mod", "mods/seamark", "-t", "x"]
    assert given[given.index("serve") + 1 :] == ["m", "--a", "1", *words(" ".join(ADDED))]
    assert made.start == quoted(places.out, "start.sh")  # a script of another shell runs as a program
    assert made.undo[0].endswith("mods/seamark'") and "my-recipe" not in made.undo[1]


def compose(places: Places, **service: Any) -> tuple[RecipeFiles, Mapping[str, Any]]:
    path = places.source / "compose.yaml"
    whole = {"image": "vllm/vllm-openai:v0.33.0", "command": f"m --port 8001 {DROPPED}", **service}
    path.write_text(yaml.safe_dump({"services": {"my llm": whole}}))
    made = files_of(read(path), places)
    assert list(made.files) == ["compose.seamark.yaml", "start.sh"]
    ((name, overlay),) = yaml.safe_load(made.files["compose.seamark.yaml"])["services"].items()
    assert name == "my llm" and made.files["compose.seamark.yaml"].startswith(f"# {path} with Seamark's plugin")
    return made, overlay


def test_a_service_of_compose_is_built_on_its_image_and_given_what_it_was_given(places):
    made, overlay = compose(places)
    assert overlay == {
        "image": "seamark-worker-my-llm",
        "build": {
            "context": str(places.source),
            "dockerfile": "deploy/worker.Dockerfile",
            "args": {"VLLM_IMAGE": "vllm/vllm-openai:v0.33.0"},
        },
        "command": ["m", "--port", "8001", *KEPT, *HOST],
        "ports": ["127.0.0.1:8001:8001"],
    }
    base = f"docker compose -f {quoted(places.source, 'compose.yaml')}"
    _, start = commands(made.files["start.sh"])
    both = f"{base} -f {quoted(places.out, 'compose.seamark.yaml')}"
    assert start == f"exec {both} up --build -d \"$@\" 'my llm'"
    image = "seamark-worker-my-llm"
    assert made.undo == [
        f"{base} up -d 'my llm'",
        f"docker ps -aq --filter ancestor={image} | xargs -r docker rm -f",
        f"docker image rm -f {image}",
    ]
    (note,) = made.notes
    assert f"--entrypoint sh {image} -c 'python3 -m engine_patches patches --check'" in note


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        ({"ports": ["9000:8001"]}, {"ports": None}),
        ({"network_mode": "host"}, {"ports": None}),
        ({"command": "m --host 10.0.0.7"}, {"command": ["m", "--host", "10.0.0.7"]}),
        ({"command": ["vllm", "serve", "m"]}, {"command": ["m", *HOST], "entrypoint": None}),
        (
            {"entrypoint": ["vllm", "serve"], "command": ["m"]},
            {"command": ["m", *HOST], "entrypoint": ["python3", "-m", "engine_patches", "worker"]},
        ),
        (
            {"entrypoint": "vllm", "command": "serve m"},
            {"command": ["m", *HOST], "entrypoint": ["python3", "-m", "engine_patches", "worker"]},
        ),
    ],
)
def test_what_else_a_service_says_stays_or_is_said_anew(service, expected, places):
    _, overlay = compose(places, **service)
    assert {key: overlay.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("service", "entrypoint", "before"),
    [
        ({"entrypoint": ["bash", "-c"], "command": ["ulimit; vllm serve m"]}, ["bash", "-c"], []),
        ({"command": ["bash", "-c", "ulimit; vllm serve m"]}, ["bash"], ["-c"]),
    ],
)
def test_a_shell_that_starts_vllm_stays_and_is_given_the_flags(service, entrypoint, before, places):
    _, overlay = compose(places, **service)
    *words_before, text = overlay["command"]
    assert (overlay["entrypoint"], words_before) == (entrypoint, before)
    assert text.startswith("ulimit; vllm serve m") and words(text.partition("serve")[2]) == [
        "m",
        *words(" ".join(ADDED)),
    ]


def test_another_image_takes_the_place_of_one_that_does_not_fit(places):
    _, overlay = compose(places._replace(image=IMAGE))
    assert overlay["build"]["args"] == {"VLLM_IMAGE": IMAGE}


def docker(places: Places, text: str) -> tuple[RecipeFiles, list[str]]:
    path = places.source / "My Run.sh"
    path.write_text(text)
    made = files_of(read(path), places)
    return made, commands(made.files["start.sh"])


def test_a_docker_run_keeps_its_options_and_gets_the_image_with_the_plugin(places):
    text = f"#!/bin/bash\necho a\ndocker run --rm --entrypoint vllm -p 8000:8000 -e 'A=b c' i:1 serve m {DROPPED}\nb\n"
    made, (build, before, run, behind) = docker(places, text)
    image, root = "seamark-worker-my-run", quoted(places.source)
    arguments = f"--build-arg VLLM_IMAGE=i:1 -t {image} {root}"
    assert build == f"docker build -f {root}/deploy/worker.Dockerfile {arguments} || exit"
    assert (before, behind) == ("echo a", "b")
    assert words(run) == words(f"docker run --rm -p 8000:8000 -e 'A=b c' {image} m {' '.join([*KEPT, *HOST])}")
    assert made.start == quoted(places.out, "start.sh") and len(made.undo) == len(made.notes) == 2
    assert made.undo[-1] == f"docker image rm -f {image}" and "set -eu" not in made.files["start.sh"]


def test_a_podman_run_of_a_shell_keeps_shell_and_program(places):
    text = "podman run --entrypoint=a --entrypoint=bash --name=x i -c 'pip install a && vllm serve m --host 1.2.3.4'"
    made, (build, run) = docker(places, text)
    assert build.startswith("podman build ") and made.start == f"sh {quoted(places.out, 'start.sh')}"
    *given, shell = words(run)
    assert given == ["podman", "run", "--name=x", "--entrypoint", "bash", "seamark-worker-my-run", "-c"]
    assert shell.startswith("pip install a && vllm serve m")
    assert words(shell.partition("serve")[2]) == ["m", "--host", "1.2.3.4", *words(" ".join(ADDED))]
    assert made.undo == [
        "podman ps -aq --filter ancestor=seamark-worker-my-run | xargs -r podman rm -f",
        "podman image rm -f seamark-worker-my-run",
    ]


def test_a_line_of_docker_has_an_image_of_its_own_and_what_replaces_its_image(places):
    made = files_of(read("docker run vllm/vllm-openai:v0.28.0 m"), places._replace(image=IMAGE))
    build, run = commands(made.files["start.sh"])
    assert f"VLLM_IMAGE={IMAGE} -t seamark-worker-run " in build and "seamark-worker-run" in run


CONFIG: Mapping[str, Any] = {
    "Image": "vllm/vllm-openai:v0.33.0",
    "Entrypoint": ["vllm", "serve"],
    "Cmd": ["m", "--x", "it's $HOME"],
    "Env": ["PATH=/bin", "A=b c"],
}


def container(
    places: Places, config: Mapping[str, Any] | None = None, **host: Any
) -> tuple[RecipeFiles, list[str], list[str]]:
    """The files, the options of its `docker run`, and what stands behind the image."""
    told = {"Name": "/llm", "Config": {**CONFIG, **(config or {})}, "HostConfig": host}
    made = files_of(read_recipe("llm", lambda name: told), places)
    strict, build, stop, run = commands(made.files["start.sh"])
    assert strict == "set -eu" and stop == "docker stop llm" and " VLLM_IMAGE=vllm/vllm-openai:v0.33.0 " in build
    given = words(run)
    assert given[:4] == ["exec", "docker", "run", "-d"]
    at = given.index("seamark-worker-llm")
    return made, given[4:at], given[at + 1 :]


def test_a_container_is_run_again_in_its_place(places):
    made, options, arguments = container(places)
    assert options == ["--name=llm-seamark", "--env=A=b c"]
    assert arguments == ["m", "--x", "it's $HOME", *HOST]
    assert made.start == f"sh {quoted(places.out, 'start.sh')}"
    assert (made.undo[0], made.undo[-1]) == ("docker rm -f llm-seamark", "docker start llm") and len(made.undo) == 4


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ({"Binds": ["/a:/b", "/c:/d:ro"]}, ["--volume=/a:/b", "--volume=/c:/d:ro"]),
        (
            {"PortBindings": {"8000/tcp": [{"HostIp": "10.0.0.7", "HostPort": "1"}, {"HostPort": "2"}], "9/udp": None}},
            ["--publish=10.0.0.7:1:8000/tcp", "--publish=2:8000/tcp"],
        ),
        ({"PortBindings": {"8000/tcp": [{"HostIp": ""}]}}, ["--publish=:8000/tcp"]),
        ({"NetworkMode": "host"}, ["--network=host"]),
        *(({"NetworkMode": each}, []) for each in ("", "default", "bridge", None)),
        ({"IpcMode": "host"}, ["--ipc=host"]),
        *(({"IpcMode": each}, []) for each in ("", "private", "shareable", None)),
        ({"Runtime": "nvidia"}, ["--runtime=nvidia"]),
        *(({"Runtime": each}, []) for each in ("", "runc")),
        ({"ShmSize": 1 << 30}, ["--shm-size=1073741824"]),
        *(({"ShmSize": each}, []) for each in (0, 67108864, None)),
        ({"Memory": 1 << 30}, ["--memory=1073741824"]),
        ({"Memory": 0}, []),
        ({"Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": 7}]}, ["--ulimit=memlock=-1:7"]),
        ({"Devices": [{"PathOnHost": "/dev/x"}], "CapAdd": ["SYS_NICE"]}, ["--device=/dev/x", "--cap-add=SYS_NICE"]),
        ({"Privileged": True}, ["--privileged"]),
        ({"Privileged": False}, []),
        ({"RestartPolicy": {"Name": "always"}}, ["--restart=always"]),
        *(({"RestartPolicy": {"Name": each}}, []) for each in (None, "", "no")),
        ({"RestartPolicy": None}, []),
        ({"DeviceRequests": [{"Capabilities": [["gpu"]], "DeviceIDs": None}]}, ["--gpus=all"]),
        ({"DeviceRequests": [{"Capabilities": [["gpu"]], "DeviceIDs": ["0", "2"]}]}, ['--gpus="device=0,2"']),
        ({"DeviceRequests": [{"Capabilities": [["tpu"], ["gpu", "x"]]}]}, ["--gpus=all"]),
        ({"DeviceRequests": [{"Capabilities": [["tpu"]]}, {"Capabilities": None}]}, []),
    ],
)
def test_a_container_is_started_with_what_it_was_started_with(host, options, places):
    _, given, _ = container(places, {"Env": None}, **host)
    assert given == ["--name=llm-seamark", *options]


def test_a_container_of_a_shell_keeps_it(places):
    _, options, (letter, text) = container(places, {"Entrypoint": ["bash", "-c"], "Cmd": ["vllm serve m"], "Env": []})
    assert options == ["--name=llm-seamark", "--entrypoint=bash"] and letter == "-c"
    assert words(text) == words(f"vllm serve m {' '.join(ADDED)}")


def test_a_script_starts_vllm_with_its_own_flags_and_what_it_does_besides(places, tmp_path):
    path = tmp_path / "mine.sh"
    path.write_text(f"#!/bin/bash\nsource a/b\nvllm serve m {DROPPED} 2>&1 | tee log\nend\n")
    made = files_of(read(path), places)
    script = made.files["worker.sh"]
    assert script.startswith(f"#!/bin/bash\n# {path} with what hits are seen by.")
    assert f"\n#   pip install --no-deps {quoted(places.source)}\n" in script and "set -eu" not in script
    before, *serve, end = [each for each in script.replace("\\\n", "").splitlines() if not each.startswith("#")]
    assert (before, end) == ("source a/b", "end") and serve[0].endswith(" 2>&1 | tee log")
    given = words(serve[0].removesuffix(" 2>&1 | tee log"))
    assert given == ["vllm", "serve", "m", *KEPT, *words(" ".join(ADDED))]
    assert made.start == quoted(places.out, "worker.sh") and list(made.files) == ["worker.sh"]
    assert "pip uninstall vllm-seamark" in made.undo[0] and "pip install --no-deps" in made.notes[0]


def test_a_flag_and_its_value_share_a_line(places):
    made = files_of(read("vllm serve m a --b 1 2 --c --d=1 x -e y"), places)
    lines = ["vllm serve m", "a", "--b 1", "2", "--c", "--d=1 x", "-e y", *ADDED]
    assert made.files["worker.sh"].endswith("\n" + " \\\n    ".join(lines) + "\n")


@pytest.mark.parametrize(
    ("document", "written"),
    [
        ({"model": "m", "port": 8001}, {"model": "m", "port": 8001, "host": EVERYWHERE}),
        ({"model": "m", "host": "10.0.0.7"}, {"model": "m", "host": "10.0.0.7"}),
        (
            {
                "model": "m",
                "mamba_cache_mode": "align",
                "no-enable-prefix-caching": True,
                "enable-prefix-caching": True,
            },
            {"model": "m", "host": EVERYWHERE},
        ),
        ({"model": "m", "text": "a\nb\n"}, {"model": "m", "text": "a\nb\n", "host": EVERYWHERE}),
    ],
)
def test_a_configuration_of_vllm_goes_to_the_worker(document, written, places, tmp_path):
    path = tmp_path / "my vllm.yaml"
    path.write_text(yaml.safe_dump(document))
    made = files_of(read(path), places)
    assert yaml.safe_load(made.files["model.yaml"]) == written and made.files["model.yaml"].startswith(f"# {path} ")
    strict, worker = commands(made.files["worker.sh"])
    config = quoted(places.out, "model.yaml")
    assert (strict, worker) == ("set -eu", f'exec python3 -m engine_patches worker --config {config} "$@"')
    assert f"\n#   pip install --no-deps {quoted(places.source)}\n" in made.files["worker.sh"]
    assert made.start == f"sh {quoted(places.out, 'worker.sh')}" and len(made.undo) == len(made.notes) == 1


def test_vllm_and_the_gateway_run_in_one_terminal(places):
    script = run_script(places, "sh start.sh")
    assert script.startswith("#!/bin/sh\n# vLLM, and the gateway beside it")
    log = quoted(places.out, "gateway.log")
    strict, *traps, gateway, start, told, wait = commands(script)
    assert (strict, gateway) == ("set -eu", f"sh {quoted(places.out, 'gateway.sh')} > {log} 2>&1 &")
    assert (start, wait) == ('sh start.sh "$@"', 'wait "$!"')
    assert [each.rpartition(" ")[2] for each in traps] == ["EXIT", "INT", "TERM"] and told.endswith(log)


def test_undoing_lets_docker_fail_and_removes_what_was_written_and_an_empty_folder(places):
    script = undo_script(places, ["a.yaml", "models/b"], ["docker x", "podman y", "rm z"])
    files = [quoted(places.out, name) for name in ("a.yaml", "models/b", "gateway.log", "undo.sh")]
    assert commands(script) == [
        "set -eu",
        "docker x || true",
        "podman y || true",
        "rm z",
        f"rm -f {' '.join(files)}",
        f"rmdir {quoted(places.out)} 2>/dev/null || true",
    ]


@pytest.mark.parametrize(
    ("stem", "image"),
    [
        ("My Run_2.x", "seamark-worker-my-run-2.x"),
        ("--a--", "seamark-worker-a"),
        ("a;$(b)", "seamark-worker-a-b"),
        ("ä", "seamark-worker-run"),
    ],
)
def test_an_image_is_called_as_its_file_in_plain_letters(stem, image, places, tmp_path):
    path = tmp_path / f"{stem}.sh"
    path.write_text("docker run i m")
    assert f" -t {image} " in files_of(read(path), places).files["start.sh"]


def test_no_name_of_a_file_makes_a_line_of_a_script(places, tmp_path):
    path = tmp_path / "a\ntouch b.sh"
    path.write_text("vllm serve m\n")
    written = files_of(read(path), places).files["worker.sh"]
    assert not any(each.startswith("touch") for each in written.splitlines())
