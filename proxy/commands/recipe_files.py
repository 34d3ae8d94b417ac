"""The files that make a recipe hit: the recipe as it is, with the plugin and the flags that hits are seen by.

Nothing of the user's is edited, and nothing is written outside of one folder. `LIST` there has a digest of each file,
from when it was made: `undo.sh` removes what is still so, and takes back what was built. Images and containers carry
a name of that folder alone.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from proxy.commands import recipe as reading
from proxy.commands.cures import EVENTS_FLAG, NEEDED
from proxy.commands.outlook import CACHING, DROPPED, NO_CACHING, SWITCHES
from proxy.commands.recipe import EVERYWHERE, LAUNCHER, Recipe, RecipeKind, flag_name
from proxy.commands.recipe_compose import as_list
from proxy.commands.recipe_text import Word
from proxy.errors import SettingsError

LIST = "seamark.sha256"  # as sha256sum writes and checks it
RAN = "# ran before"  # a line of it: vLLM did, without Seamark
MOD = "mods/seamark"  # as make-mod.sh calls it
IMAGE = "seamark-worker"  # ends in the service's or container's name, and what tells its folder from others
LABEL = "seamark.setup"  # of containers that were started from it
WORKER = ["python3", "-m", "engine_patches", "worker"]  # the entrypoint of deploy/worker.Dockerfile

# Not to be given to what serves in their place, which has them by itself or has no use for them.
_TAKEN_AWAY = (*DROPPED, NO_CACHING)


class RecipeFiles(NamedTuple):
    """Texts of files by their names, and what the user does with them."""

    files: Mapping[str, str]  # the last one starts vLLM
    undo: Sequence[str] = ()  # commands that take back what the files do elsewhere
    notes: Sequence[str] = ()


class Places(NamedTuple):
    """Folders, absolute."""

    out: Path
    source: Path  # a checkout of Seamark
    spark: Path  # a checkout of spark-vllm-docker
    image: str = ""  # for the plugin, in place of the recipe's


def files_of(recipe: Recipe, places: Places) -> RecipeFiles:
    """What starts this recipe's vLLM with the plugin. Raises `SettingsError` for a folder that is none."""
    return _WRITERS[recipe.kind](recipe, places)


def spark_checkout(*folders: Path) -> Path:
    """The first that has what make-mod.sh fills. Raises `SettingsError` if none does."""
    for folder in folders:
        if (folder / "mods").is_dir() and (folder / "recipes").is_dir():
            return folder
    raise SettingsError(f"--spark: {folders[-1]} is no checkout of spark-vllm-docker: it has no mods/ and recipes/")


def without_flags(words: Sequence[Word], taken_away: Sequence[str] = _TAKEN_AWAY) -> list[Word]:
    """Without the flags that are taken away, and their values."""
    left: list[Word] = []
    skip = False
    for word in words:
        is_taken = not skip and (name := flag_name(word.value)) in taken_away
        if not skip and not is_taken:
            left.append(word)
        skip = is_taken and name not in SWITCHES and "=" not in word.value
    return left


def _edited(text: str, recipe: Recipe) -> str:
    """A text with its one `vllm serve`, which gets what is needed; all before and behind it stays as it is spelt."""
    line = reading.serve_line(text, recipe.source)
    has_events = recipe.has_rust_frontend or EVENTS_FLAG.split()[1] in recipe.arguments
    added = [flag for flag in NEEDED if not (has_events if flag == EVENTS_FLAG else recipe.has(flag))]
    words = _in_lines([word.raw for word in without_flags(line.words)], added)
    return f"{text[: line.start]} {words}{text[line.end :]}"


def _in_lines(words: Sequence[str], added: Sequence[str] = ()) -> str:
    """A flag and its value to a line."""
    lines: list[str] = []
    for word in words:
        if not lines or word.startswith("-") or lines[-1].count(" ") or not lines[-1].startswith("-"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n    ".join([*lines, *added])


def _spark(recipe: Recipe, places: Places) -> RecipeFiles:
    own = Path(recipe.source).resolve()
    target = spark_checkout(*own.parents, places.spark)
    name = "seamark-" + _safe(recipe.name)
    document = copy.deepcopy(recipe.document)
    document["name"] = f"Seamark {document['name']}"
    document["container"] = places.image or document["container"]
    document["mods"] = [*(mod for mod in document.get("mods") or () if mod != MOD), str(places.out / MOD)]
    # The template, whose braces are not filled here.
    document["command"] = "\n".join(map(str.rstrip, _edited(document["command"], recipe).splitlines())) + "\n"
    text = f"# {_safe_line(str(own))} with Seamark's plugin.\n" + _yaml(document)
    solo = " --solo" if document.get("solo_only") else ""
    start = script(
        "Makes the mod with Seamark's plugin, and has spark-vllm-docker start the recipe beside this script with it.",
        f"# Behind this script's name: the flags that you give {_safe_line(own.name)}, such as --solo or -n.",
        make_mod(places.source, places.out),
        f"cd {shlex.quote(str(target))}",
        f'exec ./run-recipe.sh {shlex.quote(str(places.out / name))}.yaml{solo} "$@"',
    )
    return RecipeFiles({f"{name}.yaml": text, "start.sh": start})


def make_mod(source: Path, folder: Path) -> str:
    """A command that makes the mod in a folder."""
    return f"{shlex.quote(str(source / 'deploy/spark-vllm-docker/make-mod.sh'))} --alone {shlex.quote(str(folder))}"


def _launcher(recipe: Recipe, places: Places) -> RecipeFiles:
    target = spark_checkout(places.spark)
    before, launcher, behind = _edited(recipe.text, recipe).partition(LAUNCHER)
    start = script(
        "Makes the mod with Seamark's plugin, and runs the command of spark-vllm-docker with it.",
        f"{make_mod(places.source, places.out)} || exit",
        f"cd {shlex.quote(str(target))} || exit",
        text=f"{before}{launcher} --apply-mod {shlex.quote(str(places.out / MOD))}{behind}",
    )
    return RecipeFiles({"start.sh": start})


def _compose(recipe: Recipe, places: Places) -> RecipeFiles:
    own = Path(recipe.source).resolve()
    document = recipe.document["services"][recipe.name]
    image = image_of(recipe, places)
    entrypoint, command = _in_container(recipe, as_list(document.get("entrypoint")), as_list(document.get("command")))
    build = {
        "context": str(places.source).replace("$", "$$"),
        "dockerfile": "deploy/worker.Dockerfile",
        "args": {"VLLM_IMAGE": places.image or document["image"]},
    }
    service: dict[str, Any] = {"image": image, "build": build, "command": command, "labels": {LABEL: image}}
    if entrypoint or document.get("entrypoint"):
        service["entrypoint"] = entrypoint or WORKER
    if document.get("network_mode") != "host" and not document.get("ports"):
        service["ports"] = [f"127.0.0.1:{recipe.port}:{recipe.port}"]
    overlay = f"# {_safe_line(str(own))} with Seamark's plugin: an overlay.\n"
    overlay += _yaml({"services": {recipe.name: service}})
    base = f"docker compose -f {shlex.quote(str(own))}"
    name = shlex.quote(recipe.name)
    start = script(
        "Builds the image of your compose file with Seamark's plugin in it, and starts the service from that.",
        "# Your file stays as it is; undo.sh starts the service from it alone again, if that is what runs now.",
        _if_it_runs(places, f'[ -z "$({_containers(image)})" ] && [ -n "$({base} ps -q --status running {name})" ]'),
        f'exec {base} -f {shlex.quote(str(places.out / "compose.seamark.yaml"))} up --build -d "$@" {name}',
    )
    return _of_image({"compose.seamark.yaml": overlay, "start.sh": start}, image, again=f"{base} up -d {name}")


def _docker(recipe: Recipe, places: Places) -> RecipeFiles:
    run = reading.docker_run(recipe.text, recipe.source)
    image = image_of(recipe, places)
    entrypoints = [*reading.options_of([word.value for word in run.options], ("--entrypoint",))][-1:]
    entrypoint, command = _in_container(recipe, entrypoints, [word.value for word in run.arguments])
    options = [f"--label={LABEL}={image}", *(word.raw for word in without_flags(run.options, ("--entrypoint",)))]
    if entrypoint:  # of a shell, whose text is edited as one word
        options.append(f"--entrypoint {shlex.quote(entrypoint[0])}")
        words = [*map(shlex.quote, command)]
    else:
        words = [*(word.raw for word in without_flags(_behind_serve(run.arguments, entrypoints))), *_host_of(recipe)]
    line = f"{_in_lines(options)} \\\n    {image} \\\n    {_in_lines(words)}"
    start = script(
        "Builds the image of your command with Seamark's plugin in it, and runs the command with that.",
        f"{_build(places, run.image.raw, image, run.program)} || exit",
        text=f"{recipe.text[: run.start]} {line}{recipe.text[run.end :]}",
    )
    notes = ["end the container that runs now first: both want its name and its port"]
    return _of_image({"start.sh": start}, image, run.program, notes=notes)


def _container(recipe: Recipe, places: Places) -> RecipeFiles:
    told = recipe.document
    config, host = told["Config"], told["HostConfig"]
    image, theirs = image_of(recipe, places), shlex.quote(recipe.name)
    entrypoint, command = _in_container(recipe, config.get("Entrypoint") or [], config.get("Cmd") or [])
    options = [f"--name={image}", f"--label={LABEL}={image}", *_container_options(config, host)]
    if entrypoint:
        options.append(f"--entrypoint={entrypoint[0]}")
        command = [*entrypoint[1:], *command]
    words = [*map(shlex.quote, options), image, *map(shlex.quote, command)]
    start = script(
        "Builds the image of your container with Seamark's plugin in it, and runs it in the container's place.",
        _build(places, shlex.quote(recipe.image), image),
        _if_it_runs(places, f'[ "$(docker inspect --format "{{{{.State.Running}}}}" {theirs})" = true ]'),
        f"{_containers(image)} | xargs -r docker rm -f",
        f"docker stop {theirs}",
        "exec docker run -d \\\n    " + " \\\n    ".join(words),
    )
    return _of_image({"start.sh": start}, image, again=f"docker start {theirs}")


def _container_options(config: Mapping[str, Any], host: Mapping[str, Any]) -> list[str]:
    """What a container was started with, as far as `docker run` has a flag for it."""
    options = [f"--env={each}" for each in config.get("Env") or () if not each.startswith("PATH=")]
    options += [f"--volume={each}" for each in host.get("Binds") or ()]
    for inside, places in (host.get("PortBindings") or {}).items():
        for each in places or ():
            address = f"{each['HostIp']}:" if each.get("HostIp") else ""
            options.append(f"--publish={address}{each.get('HostPort', '')}:{inside}")
    for flag, key, default in (
        ("network", "NetworkMode", ("", "default", "bridge")),
        ("ipc", "IpcMode", ("", "private", "shareable")),
        ("runtime", "Runtime", ("", "runc")),
        ("shm-size", "ShmSize", ("", 0, 67108864)),
        ("memory", "Memory", ("", 0)),
    ):
        if (value := host.get(key, "")) not in default and value is not None:
            options.append(f"--{flag}={value}")
    options += [f"--ulimit={each['Name']}={each['Soft']}:{each['Hard']}" for each in host.get("Ulimits") or ()]
    options += [f"--device={each['PathOnHost']}" for each in host.get("Devices") or ()]
    options += [f"--cap-add={each}" for each in host.get("CapAdd") or ()]
    if host.get("Privileged"):
        options.append("--privileged")
    if (policy := (host.get("RestartPolicy") or {}).get("Name")) not in (None, "", "no"):
        options.append(f"--restart={policy}")
    for request in host.get("DeviceRequests") or ():
        if any("gpu" in names for names in request.get("Capabilities") or ()):
            ids = request.get("DeviceIDs")
            options.append(f'--gpus="device={",".join(ids)}"' if ids else "--gpus=all")
    return options


def _command(recipe: Recipe, places: Places) -> RecipeFiles:
    purpose = f"{_safe_line(recipe.source)} with what hits are seen by. Seamark's plugin has to be there, once:"
    return _in_environment(places, {}, purpose, text=_edited(recipe.text, recipe))


def _config(recipe: Recipe, places: Places) -> RecipeFiles:
    taken = (*_TAKEN_AWAY, CACHING)
    left = {name: value for name, value in recipe.document.items() if flag_name(f"--{name}") not in taken}
    # `seamark worker` gives what is needed, and listens to this machine alone unless it is told otherwise.
    listens = {} if recipe.has("--host") else {"host": EVERYWHERE}
    text = f"# {_safe_line(recipe.source)} without what vLLM dropped.\n" + _yaml({**left, **listens})
    start = f'exec python3 -m engine_patches worker --config {shlex.quote(str(places.out / "model.yaml"))} "$@"'
    purpose = "vLLM with Seamark's plugin, which has to be in vLLM's environment, once:"
    return _in_environment(places, {"model.yaml": text}, purpose, start)


def _in_environment(places: Places, files: Mapping[str, str], purpose: str, *lines: str, text: str = "") -> RecipeFiles:
    """Of a vLLM that the user's own environment has, where the plugin is installed by hand."""
    install = f"pip install --no-deps {shlex.quote(str(places.source))}"
    undo = 'echo "in vLLM\'s environment, if nothing else there needs it: pip uninstall vllm-seamark"'
    files = {**files, "worker.sh": script(purpose, f"#   {install}", *lines, text=text)}
    return RecipeFiles(files, [undo], [f"once, in vLLM's environment: {install}"])


def _in_container(recipe: Recipe, entrypoint: list[str], command: list[str]) -> tuple[list[str], list[str]]:
    """Entrypoint and command of a container whose image has the worker's entrypoint, which gives what is needed.

    An empty entrypoint is that one. A command that is a shell's text keeps its shell, and is given the flags itself.
    """
    words, split = [*entrypoint, *command], len(entrypoint) or 1
    for number, word in enumerate(words):
        if number and reading.serves(word):
            words[number] = _edited(word, recipe)
            return words[:split], words[split:]
    left = without_flags(_behind_serve([Word(word, word) for word in command], entrypoint))
    return [], [*(word.value for word in left), *_host_of(recipe)]


def _behind_serve(command: Sequence[Word], entrypoint: Sequence[str]) -> Sequence[Word]:
    """vLLM's arguments in a container's command; `vllm serve` may stand in either, or in neither."""
    return command[reading.behind_serve([word.value for word in command], "".join(entrypoint[-1:])) :]


def _host_of(recipe: Recipe) -> list[str]:
    """vLLM alone listens to everybody, and the worker's command to its own machine."""
    return [] if recipe.has("--host") else ["--host", EVERYWHERE]


def image_of(recipe: Recipe, places: Places) -> str:
    """No other folder's: services and scripts of several recipes may have one name."""
    folder = hashlib.sha256(os.fsencode(places.out)).hexdigest()[:8]
    return f"{IMAGE}-{_safe(recipe.name) or 'run'}-{folder}"


def _containers(image: str, program: str = "docker") -> str:
    return f"{program} ps -aq --filter label={LABEL}={image}"


def _of_image(
    files: Mapping[str, str], image: str, program: str = "docker", again: str = "", notes: Sequence[str] = ()
) -> RecipeFiles:
    """Takes back the image that was built and what was started from it; `again`: starts what ran before."""
    undo = [f"{_containers(image, program)} | xargs -r {program} rm -f", f"{program} image rm -f {image}"]
    if again:
        undo.append(f"if grep -qx '{RAN}' {LIST}; then {again} || true; fi")
    check = f"docker run --rm --entrypoint sh {image} -c 'python3 -m engine_patches patches --check'"
    return RecipeFiles(files, undo, [*notes, f"whether the plugin knows its vLLM: {check}"])


def _if_it_runs(places: Places, runs: str) -> str:
    """Notes that vLLM runs without Seamark, for `undo.sh`."""
    return f"if {runs}; then echo '{RAN}' >> {shlex.quote(str(places.out / LIST))}; fi"


def _build(places: Places, base: str, image: str, program: str = "docker") -> str:
    root, base = shlex.quote(str(places.source)), places.image or base
    return f"{program} build -f {root}/deploy/worker.Dockerfile --build-arg VLLM_IMAGE={base} -t {image} {root}"


def script(purpose: str, *lines: str, text: str = "") -> str:
    """A `text` of the user's at its end runs in the shell that it names, and is not made stricter than it was."""
    shebang, _, body = text.partition("\n") if text.startswith("#!") else ("#!/bin/sh", "", text)
    comments = [line.replace("\n", " ") for line in lines[:1] if line.startswith("#")]
    end = [body.strip()] if text else []
    strict = [] if text else ["set -eu"]
    return "\n".join([shebang, f"# {purpose}", *comments, *strict, *lines[len(comments) :], *end, ""])


def _safe(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def _safe_line(text: str) -> str:
    """For a comment: no line of it may become one of the script."""
    return " ".join(text.split())


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML comes without types
    """A text of several lines stays one."""

    def represent_str(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _yaml(document: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return text


_WRITERS = {
    RecipeKind.SPARK: _spark,
    RecipeKind.LAUNCHER: _launcher,
    RecipeKind.COMPOSE: _compose,
    RecipeKind.CONFIG: _config,
    RecipeKind.COMMAND: _command,
    RecipeKind.DOCKER: _docker,
    RecipeKind.CONTAINER: _container,
}
