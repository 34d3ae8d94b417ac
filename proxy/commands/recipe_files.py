"""The files that make a recipe hit: the recipe as it is, with the plugin and the flags that hits are seen by.

A script of the user's is written again with what hits need put in; all else in it stays as it is spelt. Nothing of the
user's is edited, and nothing is written outside of one folder. `LIST` there has a digest of each file, from when it was
made: `undo.sh` removes what is still so, and takes back what was built. Images and containers carry a name of that
folder alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from proxy.commands import recipe_unit as systemd
from proxy.commands.cures import EVENTS_FLAG, NEEDED
from proxy.commands.outlook import DROPPED, SWITCHES
from proxy.commands.recipe import EVERYWHERE, STARTS, Recipe, RecipeKind, environment_of, flag_name, starts_vllm
from proxy.commands.recipe_compose import ComposeService, as_words
from proxy.commands.recipe_line import LAUNCHER, Start, start_of
from proxy.commands.recipe_text import Tagged, as_lines
from proxy.commands.recipe_unit import Unit
from proxy.commands.shell import ShellCommand, Word
from proxy.errors import SettingsError

LIST = "seamark.sha256"  # as sha256sum writes and checks it
MOD = "mods/seamark"  # as make-mod.sh calls it
IMAGE = "seamark-worker"  # ends in the service's or container's name, and what tells its folder from others
LABEL = "seamark.setup"  # of containers that were started from it
WORKER = ["python3", "-m", "engine_patches", "worker"]  # the entrypoint of deploy/worker.Dockerfile

# Those in a text.
_TAKEN = (flag.replace("-", "[-_]") + r"(?![\w-])" + r"(?:[= ]\S+)?" * (flag not in SWITCHES) for flag in DROPPED)
_WITHOUT = re.compile(rf"\s+(?:{'|'.join(_TAKEN)})")

# In place of what is another file's name now, where that is asked for its folder; a $0 of awk is none.
OWN_NAME = "SEAMARK_OF"
_OWN_NAME = re.compile(r"""\$(\{?)(?:BASH_SOURCE(?:\[0\])?|(?<=\{)0|(?<="\$)0(?=")|(?<=(?:name|path) \$)0)""")

# Names of files by the folder that a script is run in, but in a comment.
HERE = re.compile(r"^(?!\s*#).*(?:(?<![^\s\"'=:])\.{1,2}/|\$\{?PWD\b|\$\(pwd\)|build\s.*\s\.(?:\s|$))", re.M)


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
    # The template, whose braces are not filled here.
    command = with_flags(as_lines(recipe.document["command"]), recipe, environment_of(recipe.document.get("env")))
    document = {
        **recipe.document,
        "name": f"Seamark {recipe.document['name']}",
        "container": places.image or recipe.document["container"],
        "mods": [*(mod for mod in recipe.document.get("mods") or () if mod != MOD), str(places.out / MOD)],
        "command": "\n".join(map(str.rstrip, command.splitlines())) + "\n",
    }
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
    return f"{shlex.quote(str(source / 'deploy/spark-vllm-docker/make-mod.sh'))} --alone {shlex.quote(str(folder))}"


def _launcher(recipe: Recipe, places: Places) -> RecipeFiles:
    target = spark_checkout(places.spark)
    text = with_flags(recipe.text, recipe, recipe.outside, mod=shlex.quote(str(places.out / MOD)))
    make, enter = make_mod(places.source, places.out), f"cd {shlex.quote(str(target))}"
    purpose = "Makes the mod with Seamark's plugin, and runs the command of spark-vllm-docker with it."
    start = _theirs(recipe, text, purpose, f"{make} || exit", f"{enter} || exit")
    return RecipeFiles({"start.sh": start})


def _compose(recipe: Recipe, places: Places) -> RecipeFiles:
    project: ComposeService = recipe.document
    image = _image_of(recipe, places)
    service: dict[str, Any] = {"image": image, **_command_of_service(recipe), "labels": {LABEL: image}}
    if not recipe.is_published:
        service["ports"] = [f"127.0.0.1:{recipe.port}:{recipe.port}"]
    if "pull_policy" in project.fields:
        service["pull_policy"] = "never"
    base, name = shlex.join(project.command), shlex.quote(recipe.name)
    overlay = f"# {_safe_line(recipe.source)} with Seamark's plugin: an overlay.\n"
    overlay += _yaml({"services": {recipe.name: service}})
    start = script(
        "Builds the image of your compose file with Seamark's plugin in it, and starts the service from that.",
        "# Your file stays as it is; undo.sh starts the service from it alone again, if it runs then.",
        *([f"{base} build {name}"] if "build" in project.fields else ()),
        _build(places, image).format(shlex.quote(places.image or recipe.image)),
        f'exec {base} -f {shlex.quote(str(places.out / "compose.seamark.yaml"))} up -d "$@" {name}',
    )
    return _of_image({"compose.seamark.yaml": overlay, "start.sh": start}, image, again=f"{base} up -d {name}")


def _command_of_service(recipe: Recipe) -> dict[str, Any]:
    """Entrypoint and command as the user has spelt them, for an image whose entrypoint gives what is needed.

    A command that is a shell's text keeps its shell, and is given the flags itself.
    """
    given = {name: recipe.document.fields.get(name) for name in ("entrypoint", "command")}
    for name, each in given.items():
        words = as_words(each)
        if any(map(starts_vllm, words)):
            words = [with_flags(word, recipe) if starts_vllm(word) else word for word in words]
            return {name: words} if given["entrypoint"] else {"entrypoint": words[:1], "command": words[1:]}
    texts = [each if isinstance(each, str) else shlex.join(as_words(each)) for each in given.values() if each]
    whole = f" {' '.join(texts)} "
    found = STARTS.search(whole) or re.match(r"\s+serve(?=\s)", whole)
    text = _WITHOUT.sub("", whole[found.end() if found else 0 :]).strip()
    if hidden := next((flag for flag in DROPPED if recipe.has(flag) and not _WITHOUT.search(whole)), ""):
        raise SettingsError(f"{recipe.source}: {hidden} stands in a variable; take it out there")
    if not recipe.has("--host"):  # vLLM alone listens to everybody, and the worker's command to its own machine
        text = f"{text} --host {EVERYWHERE}".strip()
    command = text if any(isinstance(each, str) for each in given.values()) else shlex.split(text)
    return {"entrypoint": WORKER, "command": command} if given["entrypoint"] else {"command": command}


def _docker(recipe: Recipe, places: Places) -> RecipeFiles:
    image = _image_of(recipe, places)
    build = _build(places, image, recipe.program)
    if is_unit := isinstance(recipe.document, Unit):  # for which it is built before
        build = f'[ -n "$({recipe.program} images -q {image})" ] || {build}'
    text = with_image(recipe, image, [f"--label={LABEL}={image}"], build, places.image)
    purpose = "Runs your command with an image that has Seamark's plugin in it, and is built just before."
    start = _theirs(recipe, text, purpose)
    ended = [] if is_unit else ["end the container that runs now first: both want its name and its port"]
    return _of_image({"start.sh": start}, image, recipe.program, notes=[*ended, *_folder(recipe)])


def _command(recipe: Recipe, places: Places) -> RecipeFiles:
    """Of a vLLM that the user's own environment has, where the plugin is installed by hand."""
    if recipe.kind is RecipeKind.CONFIG and (taken := [flag for flag in DROPPED if recipe.has(flag)]):
        raise SettingsError(f"{recipe.source}: take {', '.join(taken)} out of it first: nothing hits with them")
    text = with_flags(recipe.text, recipe, recipe.outside)
    pip = "uv pip" if recipe.python.startswith("uv ") else f"{recipe.python} -m pip"
    install = f"{pip} install --no-deps {shlex.quote(str(places.source))}"
    purpose = f"{_safe_line(recipe.source)} with what hits are seen by. Seamark's plugin has to be there, once:"
    start = _theirs(recipe, text, purpose, f"#   {install}")
    undo = [f'echo "in vLLM\'s environment, if nothing else there needs it: {pip} uninstall vllm-seamark"']
    notes = [f"once, in vLLM's environment: {install}", *_folder(recipe)]
    return RecipeFiles({"worker.sh": start}, undo, notes)


def _unit(recipe: Recipe, places: Places) -> RecipeFiles:
    """A drop-in with the command that hits, or with a script where it is one, or a container that has to be built."""
    unit: Unit = recipe.document
    made = _WRITERS[unit.kind](replace(recipe, kind=unit.kind, source=str(unit.script_path)), places)
    is_plain = unit.kind is RecipeKind.COMMAND and not unit.script
    line = with_flags(unit.command, recipe) if is_plain else ""
    gateway = (places.source / "deploy/systemd/seamark-gateway.service").read_text()
    files = {} if is_plain else {systemd.SCRIPT: [*made.files.values()][-1]}
    files |= {systemd.DROP_IN: systemd.drop_in(unit, line)}
    files |= {systemd.gateway_name(unit): systemd.gateway_unit(gateway, unit, places.out / "seamark.toml")}
    first = [systemd.ROOT, f"cd {shlex.quote(str(places.out))}"]
    if unit.kind is RecipeKind.DOCKER:
        build = _build(places, _image_of(recipe, places), recipe.program)
        first += [f"$sudo {build.format(base)}" for base in (places.image or recipe.image,) if base]
    elif unit.kind is RecipeKind.COMMAND and (python := recipe.python).startswith("/"):
        is_there = f"[ ! -x {python.split()[0]} ] || {python} -c 'import engine_patches' 2> /dev/null"
        first.append(f"{is_there} || {{ echo {shlex.quote(made.notes[0])} >&2; exit 1; }}")
    run = script(
        f"Puts a drop-in beside {unit.name}, and the gateway's unit; then restarts the one and starts the other.",
        *first,
        *systemd.install_lines(unit, has_script=not is_plain),
    )
    return RecipeFiles(files, [systemd.ROOT, *systemd.undo_lines(unit), *made.undo], made.notes, run)


def _theirs(recipe: Recipe, text: str, purpose: str, *lines: str) -> str:
    """A script that ends in the user's `text`, which finds what lies beside the user's own."""
    own = [f"{OWN_NAME}={shlex.quote(os.path.abspath(recipe.source))}"] if elsewhere(text) != text else []
    return script(purpose, *lines, *own, text=elsewhere(text))


def _folder(recipe: Recipe) -> list[str]:
    looks_around = recipe.source != "the command" and HERE.search(recipe.text)
    return ["run it from the folder that you run yours from: it names files by that"] if looks_around else []


def _image_of(recipe: Recipe, places: Places) -> str:
    """No other folder's: services and scripts of several recipes may have one name."""
    folder = hashlib.sha256(os.fsencode(places.out)).hexdigest()[:8]
    return f"{IMAGE}-{_safe(recipe.name) or 'run'}-{folder}"


def _of_image(
    files: Mapping[str, str], image: str, program: str = "docker", again: str = "", notes: Sequence[str] = ()
) -> RecipeFiles:
    """Takes back the image that was built and what was started from it; `again`: goes on without Seamark."""
    ours = f"{program} ps -q --filter label={LABEL}={image}"
    undo = [f"{ours} -a | xargs -r {program} rm -f", f"{program} image rm -f {image}"]
    if again:
        undo = [f"runs=$({ours} || true)", *undo, f'[ -z "$runs" ] || {again} || true']
    return RecipeFiles(files, undo, notes)


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


class Edits:
    """Of a script's text, by places in it."""

    def __init__(self, text: str, source: str) -> None:
        self._text, self._source = text, source
        self._edits: set[tuple[int, int, str]] = set()

    def put(self, at: int, text: str) -> None:
        self._edits.add((at, at, text))

    def replace(self, start: int, end: int, text: str) -> None:
        self._edits.add((start, end, text))

    def cut_flags(self, words: Sequence[Word], names: Collection[str] = DROPPED.keys()) -> None:
        """With their values."""
        taken: set[int] = set()
        for number, word in enumerate(words):
            if number not in taken and (name := flag_name(word.value)) in names:
                taken |= {number} if name in SWITCHES or "=" in word.value else {number, number + 1}
        self.cut([word for number, word in enumerate(words) if number in taken])

    def cut(self, words: Sequence[Word]) -> None:
        """Raises `SettingsError` for a flag that something else than the script says."""
        for word in words:
            start, end = word.place
            spelt = self._text[start:end]
            if not word.is_whole or (word.value.startswith("-") and spelt.lstrip("'\"").startswith("$")):
                raise SettingsError(f"{self._source}: {word.value[:64]} comes from {spelt[:64]}; take it out there")
            blank = re.search(r"(?:[ \t]|\\\n)*$", self._text[:start])
            start -= len(blank[0]) if blank else 0
            self.replace(start, end, "")

    def done(self) -> str:
        text, parts = self._text, []
        for start, end, new in sorted(self._edits, reverse=True):
            parts += [text[end:], new]
            text = text[:start]
        return text + "".join(reversed(parts))


def with_flags(text: str, recipe: Recipe, known: Mapping[str, str] | None = None, mod: str = "") -> str:
    """A text with its one `vllm serve`, which gets what is needed; `mod`: which spark-vllm-docker is to apply."""
    edits = Edits(text, recipe.source)
    line = start_of(text, known, recipe.source)
    _give(edits, line, recipe)
    for word in line.command[: line.behind] if mod else ():
        if word.value.endswith(LAUNCHER):
            edits.put(word.place[1], f" --apply-mod {mod}")
    return edits.done()


def _give(edits: Edits, line: Start, recipe: Recipe) -> None:
    """What is needed goes behind the last word, and what was taken away, out."""
    has_events = recipe.has_rust_frontend or EVENTS_FLAG.split()[1] in recipe.arguments
    added = [flag for flag in NEEDED if not (has_events if flag == EVENTS_FLAG else recipe.has(flag))]
    edits.cut_flags(line.words)
    end = line.command[-1].place[1]
    is_plain = not line.is_quoted and line.outer.place[0] <= end <= line.outer.place[1]
    edits.put(end, "".join(f" \\\n    {flag}" if is_plain else f" {flag}" for flag in added))


def with_image(recipe: Recipe, image: str, options: Sequence[str], build: str, instead: str) -> str:
    """A script whose `docker run` has the image that `build` makes of the one it had, or of `instead`, just before."""
    text = recipe.text
    serve = start_of(text, recipe.outside, recipe.source)
    run = serve.run
    assert run is not None  # noqa: S101  # as its recipe says
    edits = Edits(text, recipe.source)
    options = [*options, *([] if recipe.is_published else [f"--publish 127.0.0.1:{recipe.port}:{recipe.port}"])]
    edits.cut_flags(run.options, ("--pull",))
    if run.is_shell:
        _give(edits, serve, recipe)
        if not run.given("--entrypoint"):
            options.append(f"--entrypoint {run.arguments[0].value}")
            edits.cut(run.arguments[:1])
    else:
        edits.cut_flags(run.options, ("--entrypoint",))
        edits.cut(run.arguments[: serve.behind])
        edits.cut_flags(serve.words)
        if not recipe.has("--host"):  # vLLM alone listens to everybody, and the worker's command to its own machine
            first, host = serve.words[0], f"--host {EVERYWHERE}"
            is_flag = first.value.startswith("-")
            edits.put(first.place[0] if is_flag else first.place[1], f"{host} " if is_flag else f" {host}")
    edits.put(run.start.command[run.start.behind - 1].place[1], "".join(f" {option}" for option in options))
    base = instead or text[slice(*run.image.place)]
    if not run.image.is_whole:
        raise SettingsError(f"{recipe.source}: the image is part of {base}; write it behind `docker run` itself")
    edits.replace(*run.image.place, image)
    if run.start.is_quoted and base != run.image.value:
        base = '"{}"'.format(re.sub(r"[\\\"']", "", base))
    _before(edits, run.start.outer, build.format(base), text)
    return edits.done()


def _before(edits: Edits, command: ShellCommand, build: str, text: str) -> None:
    """What comes before a command, and has to have worked."""
    start, end = command.place
    if command.before in ("&&", "||", "|", "|&", "!", "time"):
        edits.put(start, f"{{ {build} && ")
        edits.put(end, "; }")
    else:
        line = text[text.rfind("\n", 0, start) + 1 : start]
        edits.put(start, f"{build} || exit\n{line if not line.strip() else ''}")


def elsewhere(text: str) -> str:
    """A script that is run from another file, before which OWN_NAME is set to its own."""
    return _OWN_NAME.sub(lambda found: f"${{{OWN_NAME}{'' if found[1] else '}'}", text)


def shell_of(text: str) -> str:
    """The first line of a script that has none: what is not every shell's wants Bash."""
    wants_bash = re.search(r"=\(|\[\[|\bBASH_|^\s*source |pipefail|^\s*function |<<<|&>|\w\+=|\$'", text, re.M)
    return "#!/usr/bin/env bash" if wants_bash else "#!/bin/sh"


def _safe(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def _safe_line(text: str) -> str:
    """For a comment: no line of it may become one of the script."""
    return " ".join(text.split())


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML comes without types
    """A text of several lines stays one."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
_Dumper.add_representer(Tagged, lambda dumper, tagged: dumper.represent_data(tagged.value))


def _yaml(document: Mapping[str, Any]) -> str:
    return str(yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True))


_WRITERS = {
    RecipeKind.SPARK: _spark,
    RecipeKind.LAUNCHER: _launcher,
    RecipeKind.COMPOSE: _compose,
    RecipeKind.CONFIG: _command,
    RecipeKind.COMMAND: _command,
    RecipeKind.DOCKER: _docker,
    RecipeKind.UNIT: _unit,
}
