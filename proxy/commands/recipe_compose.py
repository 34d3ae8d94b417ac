"""The one service of a Compose project that runs vLLM."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from proxy.commands.compose_project import NAMES, UNSET, Project, env_file, fill
from proxy.commands.parser import Parser
from proxy.commands.recipe import Recipe, RecipeKind, environment_of, inner_arguments, port_in, published, serves
from proxy.commands.recipe_text import field_of
from proxy.commands.ways import DEFAULT_PORT
from proxy.errors import SettingsError

FIELDS = ("image", "entrypoint", "command", "environment", "env_file", "ports", "network_mode")  # those that are filled
_ENV_FILE, _FOLDER = "--env-file", "--project-directory"


class ComposeService(NamedTuple):
    """Where a recipe stands in its project."""

    command: Sequence[str]  # `docker compose`, its options, and the files of the project
    fields: Mapping[str, Any]  # as they are spelt
    is_published: bool  # at a port of this machine that is known


def of_compose_line(given: str) -> Recipe:
    """Of a line with `docker compose`, its options and the services behind its command. Raises `SettingsError`."""
    parser = Parser(prog="docker compose", add_help=False, allow_abbrev=False)
    for names in (("-f", "--file"), ("-p", "--project-name"), ("--profile",), (_ENV_FILE,), (_FOLDER,)):
        parser.add_argument(*names, action="append", default=[], dest=names[0])
    parsed, words = parser.parse_known_args(as_words(given.partition("compose")[2]))
    chosen = vars(parsed)
    folders = [Path.cwd(), *Path.cwd().parents]
    found = [folder / name for folder in folders for name in NAMES if (folder / name).is_file()]
    paths = [Path(each).expanduser() for each in chosen.pop("-f")] or found[:1]
    if missing := [str(path) for path in paths if not path.is_file()] if paths else ["compose.yaml"]:
        raise SettingsError(f"{', '.join(missing)}, which `{given[:64]}` takes, is not here")
    chosen |= {name: [str(Path(each).resolve()) for each in chosen[name]] for name in (_ENV_FILE, _FOLDER)}
    return of_compose(paths, words, [word for name, given in chosen.items() for each in given for word in (name, each)])


def of_compose(paths: Sequence[Path], wanted: Collection[str] = (), options: Sequence[str] = ()) -> Recipe:
    """`wanted`: services, or else all of them. `options`: of `docker compose`, but for its files."""
    pairs = [*pairwise(options)]
    env_files, folders = ([Path(value) for name, value in pairs if name == option] for option in (_ENV_FILE, _FOLDER))
    project = Project(paths, env_files, *folders[-1:])
    source = " and ".join(map(str, project.paths))
    filled = {name: fill(_of_interest(each), project.known, source) for name, each in project.services.items()}
    asked = [name for name in filled if name in wanted]
    found = asked if len(asked) == 1 else [name for name in asked or filled if _runs_vllm(name, filled[name])]
    if len(found) > 1 and not asked:  # a plain `up` starts those without a profile
        found = [name for name in found if not project.services[name].get("profiles")] or found
    command = ["docker", "compose", *options, *(word for path in project.paths for word in ("-f", str(path.resolve())))]
    if len(found) != 1:
        some = f"{', '.join(found[:5])}{', ...' if found[5:] else ''}"
        several = f"{len(found)} services with vLLM ({some})" if found else "no service that runs vLLM"
        cure = f'; setup takes one: seamark setup "{shlex.join(command)} up NAME"'
        raise SettingsError(f"{source}: {several}{cure if found else ''}")
    (name,) = found
    service, where = filled[name], f"{source}: {name}"
    if not (image := field_of(service, "image", str, where)):
        raise SettingsError(f"{source}: the service {name} has no `image:` that Seamark's plugin could be put into")
    environment = _environment(service, project.known, where)
    arguments = _arguments(service, environment, where)
    recipe = Recipe(RecipeKind.COMPOSE, str(project.paths[0]), name, arguments, environment, image)
    shares_network, own = service.get("network_mode") == "host", port_in(recipe.value("--port") or DEFAULT_PORT)
    ports = field_of(service, "ports", list, where)
    listens = next(filter(None, (published(port, own) for port in ports if own and not shares_network)), None)
    deciding = [image, recipe.model, *map(recipe.value, ("--port", "--host")), *(() if listens else map(str, ports))]
    deciding += [each for each in arguments if each.startswith("{")]
    if unset := dict.fromkeys(UNSET.findall("\n".join(deciding))):
        line = " ".join([*(f"{each}=..." for each in unset), "seamark setup", shlex.quote(recipe.source)])
        raise SettingsError(f"{source}: what runs depends on {', '.join(unset)}, which is not set here; set it: {line}")
    unset = dict.fromkeys(UNSET.findall("\n".join(arguments)))
    notes = [f"{each} is not set here, and what is in it not seen" for each in unset]
    notes += [f"{path} is merged in, as Compose does" for path in project.paths[1:]]
    if not (listens or shares_network):
        notes.append(f"it publishes no port of vLLM's own {recipe.port}; these files do, at 127.0.0.1 for the gateway")
    place = ComposeService(command, project.services[name], shares_network or listens is not None)
    own_place = None if shares_network else listens or ("127.0.0.1", recipe.port)
    return replace(recipe, listens=own_place, notes=notes, document=place)


def _arguments(service: Mapping[str, Any], environment: Mapping[str, str], where: str) -> list[str]:
    """Those of `vllm serve`, with the container's variables, as far as they are seen."""
    words = words_of_service(service)
    arguments = inner_arguments(words, where, environment)
    is_program = re.search(r"(?:^|/)(?:ba|da)?sh$|\.(?:sh|py)$", "".join(words[:1])) or service.get("entrypoint")
    if arguments == words and is_program:
        raise SettingsError(f"{where}: what {words[0]} starts is not seen here; write `vllm serve MODEL` and its flags")
    with suppress(SettingsError):  # for what only a shell knows
        arguments = [
            each if UNSET.search(each) else UNSET.sub(r"${\1}", fill(each, environment, where)) for each in arguments
        ]
    model = Recipe(RecipeKind.COMPOSE, where, "", arguments).model
    if not model:
        raise SettingsError(f"{where}: nothing says which model vLLM serves; write it in `command:`")
    if "$" in model:
        cure = "write it out, or under `environment:`"
        raise SettingsError(f"{where}: the model is the container's {model}, which is not seen here; {cure}")
    return arguments


def _of_interest(service: Any) -> dict[str, Any]:
    return {name: service[name] for name in FIELDS if name in service} if isinstance(service, dict) else {}


def _runs_vllm(name: str, service: Mapping[str, Any]) -> bool:
    image = str(service.get("image", ""))
    is_vllm = "vllm" in (name if UNSET.search(image) else image).lower()
    return serves(" ".join(words_of_service(service))) or (is_vllm and bool(service.get("command")))


def _environment(service: Mapping[str, Any], known: Mapping[str, str], where: str) -> dict[str, str]:
    """That of the container; what is not set is empty there, as Compose has it."""
    environment: dict[str, str] = {}
    for path in service.get("env_file") or ():
        environment |= env_file(Path(path), known)
    own = field_of(service, "environment", dict, where)
    environment |= environment_of(own)
    return {name: UNSET.sub("", value) for name, value in environment.items()}


def words_of_service(service: Mapping[str, Any]) -> list[str]:
    return [*as_words(service.get("entrypoint")), *as_words(service.get("command"))]


def as_words(given: Any) -> list[str]:
    """A command of Compose, which is a text or a list."""
    if given is None or isinstance(given, list):
        return [*map(str, given or ())]
    try:
        words = shlex.split(str(given))
    except ValueError:
        raise SettingsError(f"a quote in the command `{str(given)[:64]}` is not closed") from None
    if cut := next((word for word in words if re.fullmatch(r"[;|&]+|\d?[<>]\S*", word)), ""):
        raise SettingsError(
            f"Compose takes nothing from `{cut}` on in the command `{str(given)[:64]}`: it is no shell's"
        )
    return words
