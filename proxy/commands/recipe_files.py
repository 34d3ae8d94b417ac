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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from proxy.commands import recipe as reading
from proxy.commands import unit_files
from proxy.commands.outlook import CACHING, DROPPED
from proxy.commands.recipe import EVERYWHERE, Recipe, RecipeKind, environment_of, flag_name
from proxy.commands.recipe_compose import ComposeService, as_words
from proxy.commands.recipe_text import Tagged, as_lines
from proxy.commands.recipe_unit import DROP_IN, Unit
from proxy.commands.script_edits import (
    HERE,
    OWN_NAME,
    TAKEN_AWAY,
    elsewhere,
    shell_of,
    with_flags,
    with_image,
)
from proxy.errors import SettingsError

LIST = "seamark.sha256"  # as sha256sum writes and checks it
RAN = "# ran before"  # a line of it: vLLM did, without Seamark
MOD = "mods/seamark"  # as make-mod.sh calls it
IMAGE = "seamark-worker"  # ends in the service's or container's name, and what tells its folder from others
LABEL = "seamark.setup"  # of containers that were started from it
WORKER = ["python3", "-m", "engine_patches", "worker"]  # the entrypoint of deploy/worker.Dockerfile

# The same in a text; and a shell's command.
_WITHOUT = re.compile(
    "|".join(
        rf"\s+{flag.replace('-', '[-_]')}(?:[= ]\S+)?" if flag in DROPPED else rf"\s+{flag}" for flag in TAKEN_AWAY
    )
)
_SHELL = re.compile(r"\s*(?:\S*/)?(?:ba|da|z)?sh\s(?:-\w+\s+)*-\w*c\s")


class RecipeFiles(NamedTuple):
    """Texts of files by their names, and what the user does with them."""

    files: Mapping[str, str]  # the last one starts vLLM, unless `run` does
    undo: Sequence[str] = ()  # commands that take back what the files do elsewhere
    notes: Sequence[str] = ()
    run: str = ""  # a script in place of the one that runs vLLM and the gateway in a terminal


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


def _spark(recipe: Recipe, places: Places) -> RecipeFiles:
    own = Path(recipe.source).resolve()
    target = spark_checkout(*own.parents, places.spark)
    name = "seamark-" + _safe(recipe.name)
    document = copy.deepcopy(recipe.document)
    document["name"] = f"Seamark {document['name']}"
    document["container"] = places.image or document["container"]
    document["mods"] = [*(mod for mod in document.get("mods") or () if mod != MOD), str(places.out / MOD)]
    # The template, whose braces are not filled here.
    command = with_flags(as_lines(document["command"]), recipe, environment_of(document.get("env")))
    document["command"] = "\n".join(map(str.rstrip, command.splitlines())) + "\n"
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
    text = with_flags(recipe.text, recipe, os.environ, mod=shlex.quote(str(places.out / MOD)))
    start = script(
        "Makes the mod with Seamark's plugin, and runs the command of spark-vllm-docker with it.",
        f"{make_mod(places.source, places.out)} || exit",
        f"cd {shlex.quote(str(target))} || exit",
        *_own_name(recipe, text),
        text=elsewhere(text),
    )
    return RecipeFiles({"start.sh": start})


def _compose(recipe: Recipe, places: Places) -> RecipeFiles:
    project: ComposeService = recipe.document
    image = image_of(recipe, places)
    build = {
        "context": str(places.source).replace("$", "$$"),
        "dockerfile": "deploy/worker.Dockerfile",
        "args": {"VLLM_IMAGE": places.image or project.fields["image"]},
    }
    service: dict[str, Any] = {"image": image, "build": build, **_command_of_service(recipe), "labels": {LABEL: image}}
    if not project.is_published:
        service["ports"] = [f"127.0.0.1:{recipe.port}:{recipe.port}"]
    if "pull_policy" in project.fields:
        service["pull_policy"] = "build"
    base, name = shlex.join(project.command), shlex.quote(recipe.name)
    first = []
    if "build" in project.fields:  # of their own image, into which the plugin goes
        service["build"] = Tagged("!override", build)
        first = [f"{base} build {name}"]
    overlay = f"# {_safe_line(recipe.source)} with Seamark's plugin: an overlay.\n"
    overlay += _yaml({"services": {recipe.name: service}})
    start = script(
        "Builds the image of your compose file with Seamark's plugin in it, and starts the service from that.",
        "# Your file stays as it is; undo.sh starts the service from it alone again, if that is what runs now.",
        _if_it_runs(places, f'[ -z "$({_containers(image)})" ] && [ -n "$({base} ps -q --status running {name})" ]'),
        *first,
        f'exec {base} -f {shlex.quote(str(places.out / "compose.seamark.yaml"))} up --build -d "$@" {name}',
    )
    return _of_image({"compose.seamark.yaml": overlay, "start.sh": start}, image, again=f"{base} up -d {name}")


def _command_of_service(recipe: Recipe) -> dict[str, Any]:
    """Entrypoint and command as the user has spelt them, for an image whose entrypoint gives what is needed.

    A command that is a shell's text keeps its shell, and is given the flags itself.
    """
    given = {name: recipe.document.fields.get(name) for name in ("entrypoint", "command")}
    for name, each in given.items():
        if isinstance(each, list) and any(reading.serves(str(text)) for text in each):
            words = [with_flags(str(text), recipe) if reading.serves(str(text)) else text for text in each]
            return {name: words} if given["entrypoint"] else {"entrypoint": words[:1], "command": words[1:]}
        if isinstance(each, str) and _SHELL.match(each):
            shell, text = with_flags(each, recipe).split(maxsplit=1)
            return {name: f"{shell} {text}"} if given["entrypoint"] else {"entrypoint": shell, "command": text}
    texts = [each if isinstance(each, str) else shlex.join(as_words(each)) for each in given.values() if each]
    whole = f" {' '.join(texts)} "
    found = reading.SERVE.search(whole) or re.match(r"\s+serve(?=\s)", whole)
    text = _WITHOUT.sub("", whole[found.end() if found else 0 :]).strip()
    if hidden := next((flag for flag in TAKEN_AWAY if recipe.has(flag) and not _WITHOUT.search(whole)), ""):
        raise SettingsError(f"{recipe.source}: {hidden} stands in a variable; take it out there")
    text = " ".join([text, *_host_of(recipe)])
    command = text if any(isinstance(each, str) for each in given.values()) else shlex.split(text)
    return {"entrypoint": WORKER, "command": command} if given["entrypoint"] else {"command": command}


def _docker(recipe: Recipe, places: Places) -> RecipeFiles:
    image = image_of(recipe, places)
    build = _build(places, image, recipe.program)
    if is_unit := isinstance(recipe.document, Unit):  # for which it is built before
        build = f'[ -n "$({recipe.program} images -q {image})" ] || {build}'
    text = with_image(recipe, _outside(recipe), image, [f"--label={LABEL}={image}"], build, places.image)
    purpose = "Runs your command with an image that has Seamark's plugin in it, and is built just before."
    start = script(purpose, *_own_name(recipe, text), text=elsewhere(text))
    ended = [] if is_unit else ["end the container that runs now first: both want its name and its port"]
    if re.search(r"\b(?:docker|podman)\s+(?:container\s+)?(?:rm|stop|kill)\b", recipe.text):
        ended.append("the image is built behind the line that ends the container: some minutes, at the first start")
    notes = [*ended, *_folder(recipe)]
    return _of_image({"start.sh": start}, image, recipe.program, notes=notes)


def _container(recipe: Recipe, places: Places) -> RecipeFiles:
    image, theirs = image_of(recipe, places), shlex.quote(recipe.name)
    text = with_image(
        recipe, {}, image, [f"--name={image}", f"--label={LABEL}={image}"], _build(places, image), places.image
    )
    build, _, run = text.partition("\n")
    start = script(
        "Builds the image of your container with Seamark's plugin in it, and runs it in the container's place.",
        build,
        _if_it_runs(places, f'[ "$(docker inspect --format "{{{{.State.Running}}}}" {theirs})" = true ]'),
        f"{_containers(image)} | xargs -r docker rm -f",
        f"docker stop {theirs}",
        f"exec {run}",
    )
    return _of_image({"start.sh": start}, image, again=f"docker start {theirs}")


def _command(recipe: Recipe, places: Places) -> RecipeFiles:
    text = with_flags(recipe.text, recipe, _outside(recipe))
    purpose = f"{_safe_line(recipe.source)} with what hits are seen by. Seamark's plugin has to be there, once:"
    made = _in_environment(places, {}, purpose, *_own_name(recipe, text), text=elsewhere(text), python=recipe.python)
    return made._replace(notes=[*made.notes, *_folder(recipe)])


def _unit(recipe: Recipe, places: Places) -> RecipeFiles:
    """A drop-in with the command that hits, or with a script where it is one, or a container that has to be built."""
    unit: Unit = recipe.document
    inner = replace(recipe, kind=unit.kind, source=str(unit.script_path))
    made = _WRITERS[unit.kind](inner, places)
    is_plain = unit.kind is RecipeKind.COMMAND and not unit.script
    line = with_flags(unit_files.command_line(unit), recipe) if is_plain else ""
    gateway = (places.source / "deploy/systemd/seamark-gateway.service").read_text()
    files = {} if is_plain else {unit_files.SCRIPT: [*made.files.values()][-1]}
    files |= {DROP_IN: unit_files.drop_in(unit, line)}
    files |= {unit_files.GATEWAY_UNIT: unit_files.gateway_unit(gateway, unit, places.out / "seamark.toml")}
    install, notes, undo = pip_install(recipe.python, places.source), made.notes, unit_files.undo_lines(unit, LIST, RAN)
    first = [*unit_files.places(unit), f"cd {shlex.quote(str(places.out))}"]
    if unit.kind is RecipeKind.DOCKER:
        build = _build(places, image_of(recipe, places), recipe.program)
        first += [f"$sudo {build.format(base)}" for base in (places.image or recipe.image,) if base]
        undo = [*undo, *made.undo]
    elif recipe.python.startswith("/"):
        first += unit_files.plugin_lines(recipe.python, install, LIST)
        notes = [f"run.sh puts the plugin into vLLM's environment, if it is not there: {install}"]
        undo = [*unit_files.undo_plugin_lines(recipe.python, LIST), *undo]
    if (user := unit_files.gateway_user(unit)) != unit.user and not unit.is_of_user:
        notes = [*notes, f"the gateway runs as {user}, since Seamark lies where others may not read it"]
    run = script(
        f"Puts a drop-in beside {unit.name}, and the gateway's unit; then restarts the one and starts the other.",
        *first,
        *unit_files.install_lines(unit, LIST, RAN, has_script=not is_plain),
    )
    return RecipeFiles(files, [*unit_files.places(unit), *undo], notes, run)


def _outside(recipe: Recipe) -> Mapping[str, str]:
    """The variables that its text is given."""
    return recipe.document.known if isinstance(recipe.document, Unit) else os.environ


def _own_name(recipe: Recipe, text: str) -> list[str]:
    return [f"{OWN_NAME}={shlex.quote(os.path.abspath(recipe.source))}"] if elsewhere(text) != text else []


def _folder(recipe: Recipe) -> list[str]:
    looks_around = recipe.source != "the command" and HERE.search(recipe.text)
    return ["run it from the folder that you run yours from: it names files by that"] if looks_around else []


def _config(recipe: Recipe, places: Places) -> RecipeFiles:
    taken = (*TAKEN_AWAY, CACHING)
    left = {name: value for name, value in recipe.document.items() if flag_name(f"--{name}") not in taken}
    # `seamark worker` gives what is needed, and listens to this machine alone unless it is told otherwise.
    listens = {} if recipe.has("--host") else {"host": EVERYWHERE}
    text = f"# {_safe_line(recipe.source)} without what vLLM dropped.\n" + _yaml({**left, **listens})
    start = f'exec python3 -m engine_patches worker --config {shlex.quote(str(places.out / "model.yaml"))} "$@"'
    purpose = "vLLM with Seamark's plugin, which has to be in vLLM's environment, once:"
    return _in_environment(places, {"model.yaml": text}, purpose, start)


def pip_install(python: str, folder: Path) -> str:
    """What is typed to put the plugin into vLLM's environment."""
    what = shlex.quote(str(folder))
    if python.startswith("uvx"):
        return f"uvx makes it anew each time, so put --with {what} behind uvx, or behind uv run, in worker.sh"
    return f"{'uv pip' if python.startswith('uv ') else f'{python} -m pip'} install --no-deps {what}"


def _in_environment(
    places: Places, files: Mapping[str, str], purpose: str, *lines: str, text: str = "", python: str = "python3"
) -> RecipeFiles:
    """Of a vLLM that the user's own environment has, where the plugin is installed by hand."""
    install = pip_install(python, places.source)
    uninstall = (
        "pip uninstall vllm-seamark"
        if "pip" not in install
        else install.partition(" install")[0] + " uninstall vllm-seamark"
    )
    undo = f'echo "in vLLM\'s environment, if nothing else there needs it: {uninstall}"'
    files = {**files, "worker.sh": script(purpose, f"#   {install}", *lines, text=text)}
    return RecipeFiles(files, [undo], [f"once, in vLLM's environment: {install}"])


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
    check = f"{program} run --rm --entrypoint sh {image} -c 'python3 -m engine_patches patches --check'"
    return RecipeFiles(files, undo, [*notes, f"whether the plugin knows its vLLM: {check}"])


def _if_it_runs(places: Places, runs: str) -> str:
    """Notes that vLLM runs without Seamark, for `undo.sh`."""
    return f"if {runs}; then echo '{RAN}' >> {shlex.quote(str(places.out / LIST))}; fi"


def _build(places: Places, image: str, program: str = "docker") -> str:
    """Of the image that `{}` stands for."""
    root = shlex.quote(str(places.source)).replace("{", "{{").replace("}", "}}")
    return f"{program} build -f {root}/deploy/worker.Dockerfile --build-arg VLLM_IMAGE={{}} -t {image} {root} >&2"


def script(purpose: str, *lines: str, text: str = "") -> str:
    """A `text` of the user's at its end runs in the shell that it names, and is not made stricter than it was."""
    shebang, _, body = text.partition("\n") if text.startswith("#!") else (shell_of(text), "", text)
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

    def represent_tagged(self, value: Tagged) -> yaml.Node:
        node = self.represent_data(value.value)
        node.tag = value.tag
        return node


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(Tagged, _Dumper.represent_tagged)


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
    RecipeKind.UNIT: _unit,
}
