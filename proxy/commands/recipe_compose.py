"""The one service of a Compose project that runs vLLM."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from proxy.commands.compose_project import NAMES, UNSET, Project, Variables, env_file, words_in
from proxy.commands.recipe import Recipe, RecipeKind, environment_of, inner_arguments, published, serves
from proxy.commands.recipe_text import Word, field_of
from proxy.errors import SettingsError

_SWITCHES = ("--all-resources", "--compatibility", "--dry-run")
_PATHS = ("--env-file", "--project-directory")
FIELDS = ("image", "entrypoint", "command", "environment", "env_file", "ports", "network_mode")  # those that are filled


class ComposeService(NamedTuple):
    """Where a recipe stands in its project."""

    command: Sequence[str]  # `docker compose`, its options, and the files of the project
    fields: Mapping[str, Any]  # as they are spelt
    is_published: bool  # at a port of this machine that is known


def of_compose_line(given: str) -> Recipe:
    """Of a line with `docker compose`, its options and the services behind its command. Raises `SettingsError`."""
    try:
        words = shlex.split(given)
    except ValueError:
        raise SettingsError(f"a quote in `{given[:64]}` is not closed") from None
    at = 1 + next(number for number, word in enumerate(words) if word.endswith("compose"))
    options: list[str] = []
    paths: list[Path] = []
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and name not in _SWITCHES:
            value = "".join(words[at : at + 1])
            at += 1
        if name in ("-f", "--file"):
            paths.append(Path(value).expanduser())
        else:
            options += [name, str(Path(value).resolve()) if name in _PATHS else value][: 1 + bool(value)]
    folders = [Path.cwd(), *Path.cwd().parents]
    found = (folder / name for folder in folders for name in NAMES if (folder / name).is_file())
    paths = paths or [*islice(found, 1)]
    if missing := [str(path) for path in paths if not path.is_file()] if paths else ["compose.yaml"]:
        raise SettingsError(f"{', '.join(missing)}, which `{given[:64]}` takes, is not here")
    return of_compose(paths, words[at:], options)


def of_compose(paths: Sequence[Path], wanted: Collection[str] = (), options: Sequence[str] = ()) -> Recipe:
    """`wanted`: services, or else all of them. `options`: of `docker compose`, but for its files."""
    env_files, folders = ([Path(value) for name, value in pairwise(options) if name == each] for each in _PATHS)
    project = Project(paths, env_files, *folders)
    source = " and ".join(map(str, project.paths))
    command = ["docker", "compose", *options, *(word for path in project.paths for word in ("-f", str(path.resolve())))]
    variables = Variables(project.known, source)
    filled = {name: variables.fill(_of_interest(each)) for name, each in project.services.items()}
    asked = [name for name in filled if name in wanted]
    found = asked if len(asked) == 1 else [name for name in asked or filled if _runs_vllm(name, filled[name])]
    if len(found) != 1:
        several = f"{len(found)} services with vLLM ({', '.join(found)})" if found else "no service that runs vLLM"
        cure = f'; setup takes one: seamark setup "{shlex.join(command)} up NAME"'
        raise SettingsError(f"{source}: {several}{cure if found else ''}")
    name, service = found[0], filled[found[0]]
    where = f"{source}: {name}"
    if not (image := field_of(service, "image", str, where)):
        raise SettingsError(f"{source}: the service {name} has no `image:` that Seamark's plugin could be put into")
    environment = _environment(service, project.known, where)
    arguments = inner_arguments([word.value for word in words_of_service(service)], where)
    recipe = Recipe(RecipeKind.COMPOSE, str(project.paths[0]), name, arguments, environment, image)
    deciding = [image, recipe.model, recipe.value("--port"), *(each for each in arguments if each.startswith("{"))]
    shares_network, listens = service.get("network_mode") == "host", None
    if shares_network:
        deciding.append(recipe.value("--host"))
    elif not UNSET.search(deciding[2]):
        ports = field_of(service, "ports", list, where)
        listens = next(filter(None, (published(port, recipe.port) for port in ports)), None)
        deciding += [] if listens else map(str, ports)
    if unset := dict.fromkeys(UNSET.findall("\n".join(deciding))):
        line = " ".join([*(f"{each}=..." for each in unset), "seamark setup", shlex.quote(recipe.source)])
        raise SettingsError(f"{source}: what is in {', '.join(unset)} is not set here: {line}")
    own = None if shares_network else listens or ("127.0.0.1", recipe.port)
    unset = dict.fromkeys(UNSET.findall("\n".join(arguments)))
    notes = [f"{each} is not set here, and what is in it not seen" for each in unset]
    notes += [f"{', '.join(map(str, project.paths[1:]))} is merged in, as Compose does"] if project.paths[1:] else []
    service = ComposeService(command, project.services[name], shares_network or listens is not None)
    return replace(recipe, listens=own, notes=notes, document=service)


def _of_interest(service: Any) -> dict[str, Any]:
    return {name: service[name] for name in FIELDS if name in service} if isinstance(service, dict) else {}


def _runs_vllm(name: str, service: Mapping[str, Any]) -> bool:
    image = str(service.get("image", ""))
    is_vllm = "vllm" in (name if UNSET.search(image) else image).lower()
    return serves(" ".join(word.value for word in words_of_service(service))) or (
        is_vllm and bool(service.get("command"))
    )


def _environment(service: Mapping[str, Any], known: Mapping[str, str], where: str) -> dict[str, str]:
    """That of the container; what is not set is empty there, as Compose has it."""
    environment: dict[str, str] = {}
    for path in service.get("env_file") or ():
        environment |= env_file(Path(path), known)
    own = field_of(service, "environment", dict, where)
    environment |= environment_of(own)
    return {name: UNSET.sub("", value) for name, value in environment.items()}


def words_of_service(service: Mapping[str, Any]) -> list[Word]:
    return [*words_of_field(service.get("entrypoint")), *words_of_field(service.get("command"))]


def words_of_field(given: Any) -> list[Word]:
    """A command of Compose, which is a list or a text with a shell's quotes."""
    if given is None or isinstance(given, list):
        return [Word(shlex.quote(each), each) for each in map(str, given or ())]
    return words_in(str(given))
