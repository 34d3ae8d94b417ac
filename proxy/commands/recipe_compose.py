"""The one service of a Compose project that runs vLLM, read as Compose reads it.

Fields stay as they are spelt until they are filled, so that they can be written again. What files include or extend is
not read.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from proxy.commands.parser import Parser
from proxy.commands.recipe import Recipe, RecipeKind, docker_run, environment_of, of_text, starts_vllm
from proxy.commands.recipe_text import Tagged, TextLoader, field_of, fill_pattern, read_text, read_yaml
from proxy.errors import SettingsError

NAMES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
OVERRIDES = tuple(f"{name}.override.{end}" for name in ("compose", "docker-compose") for end in ("yml", "yaml"))
_WHOLE = ("entrypoint", "command")  # a later file replaces them; it adds to all others

UNSET = re.compile("\ue000([^\ue001]*)\ue001")  # stands for a variable that is not set here

_DEFAULT = r"[^{}]*+"
for _ in range(4):  # braces inside each other, of defaults or of JSON
    _DEFAULT = rf"(?:[^{{}}]|\{{{_DEFAULT}\}})*+"
_VARIABLE = re.compile(
    rf"\$(?:\$|([A-Za-z_]\w*)|\{{([A-Za-z_]\w*)(?:(:?[-?+])({_DEFAULT}))?\}}|\{{[^}}]{{0,28}})?", re.ASCII
)
_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([\w.-]+)[ \t]*=[ \t]*(?:'([^']*)'|\"((?:[^\"\\]|\\[^\0])*)\"|(.*?)(?:[ \t]#.*)?$)", re.M
)

FIELDS = ("image", "entrypoint", "command", "environment", "env_file", "ports", "network_mode")  # those that are filled
_CURE = "write it out: docker compose --profile '*' config > whole.yaml, and give that file"


class ComposeService(NamedTuple):
    command: Sequence[str]  # `docker compose`, its options, and the files of the project
    fields: Mapping[str, Any]  # as they are spelt


def of_compose_line(given: str) -> Recipe:
    """Of a line with `docker compose`, its options and the services behind its command. Raises `SettingsError`."""
    parser = Parser(prog="docker compose", add_help=False, allow_abbrev=False)
    for names in (("-f", "--file"), ("-p", "--project-name"), ("--profile",)):
        parser.add_argument(*names, action="append", default=[], dest=names[0])
    parsed, words = parser.parse_known_args(as_words(given.partition("compose")[2]))
    if words[:1] and words[0].startswith("-"):
        raise SettingsError(f"`{given[:64]}`: its {words[0]} is not read; {_CURE}")
    chosen = vars(parsed)
    paths = [Path(each).expanduser() for each in chosen.pop("-f")]
    paths = paths or [next((path for path in map(Path, NAMES) if path.is_file()), Path(NAMES[0]))]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise SettingsError(f"{', '.join(missing)}, which `{given[:64]}` takes, is not here")
    return of_compose(paths, words, [word for name, given in chosen.items() for each in given for word in (name, each)])


def of_compose(paths: Sequence[Path], wanted: Collection[str] = (), options: Sequence[str] = ()) -> Recipe:
    """`wanted`: services, or else all of them. `options`: of `docker compose`, but for its files."""
    known = {**env_file(paths[0].with_name(".env"), os.environ), **os.environ}
    paths = paths if len(paths) > 1 else _found_with(paths[0], known)
    services, source = _services(paths), " and ".join(map(str, paths))
    filled = {name: fill(_of_interest(each), known, source) for name, each in services.items()}
    asked = [name for name in filled if name in wanted]
    found = asked if len(asked) == 1 else [name for name in asked or filled if _runs_vllm(name, filled[name])]
    if len(found) > 1 and not asked:  # a plain `up` starts those without a profile
        found = [name for name in found if not services[name].get("profiles")] or found
    command = ["docker", "compose", *options, *(word for path in paths for word in ("-f", str(path.resolve())))]
    if len(found) != 1:
        some = f"{', '.join(found[:5])}{', ...' if found[5:] else ''}"
        several = f"{len(found)} services with vLLM ({some})" if found else "no service that runs vLLM"
        cure = f'; setup takes one: seamark setup "{shlex.join(command)} up NAME"'
        raise SettingsError(f"{source}: {several}{cure if found else ''}")
    (name,) = found
    service, where = filled[name], f"{source}: {name}"
    if not (image := field_of(service, "image", str, where)):
        raise SettingsError(f"{source}: the service {name} has no `image:` that Seamark's plugin could be put into")
    environment: dict[str, str] = {}
    for each in field_of(service, "env_file", list, where):
        named = str(each.get("path") if isinstance(each, dict) else each)
        environment |= env_file(paths[0].parent / named, known)
    environment |= environment_of(field_of(service, "environment", dict, where))
    environment = {each: UNSET.sub("", value) for each, value in environment.items()}  # empty there, as Compose has it
    options = [f"--env={each}={value}" for each, value in environment.items()]
    ports = [*map(as_port, field_of(service, "ports", list, where))]
    options += ["--network=host"] if service.get("network_mode") == "host" else [f"--publish={port}" for port in ports]
    words = (as_words(service.get(each)) for each in _WHOLE)
    recipe = of_text(docker_run(image, options, *words), where, name, {})
    deciding = [image, recipe.model, *map(recipe.value, ("--port", "--host"))]
    deciding += [*([] if recipe.is_published else ports), *(each for each in recipe.arguments if each.startswith("{"))]
    if unset := dict.fromkeys(UNSET.findall("\n".join(deciding))):
        line = " ".join([*(f"{each}=..." for each in unset), "seamark setup", shlex.quote(str(paths[0]))])
        raise SettingsError(f"{source}: what runs depends on {', '.join(unset)}, which is not set here; set it: {line}")
    unset = dict.fromkeys(UNSET.findall(recipe.text))
    notes = [f"{each} is not set here, and what is in it not seen" for each in unset]
    notes += [f"{path} is merged in, as Compose does" for path in paths[1:]]
    recipe = replace(recipe, kind=RecipeKind.COMPOSE, source=str(paths[0]), text="")
    return replace(recipe, notes=[*notes, *recipe.notes], document=ComposeService(command, services[name]))


def _of_interest(service: Any) -> dict[str, Any]:
    return {name: service[name] for name in FIELDS if name in service} if isinstance(service, dict) else {}


def _runs_vllm(name: str, service: Mapping[str, Any]) -> bool:
    image = str(service.get("image", ""))
    is_vllm = "vllm" in (name if UNSET.search(image) else image).lower()
    words = " ".join(word for each in _WHOLE for word in as_words(service.get(each)))
    return starts_vllm(words) or (is_vllm and bool(service.get("command")))


def as_words(given: Any) -> list[str]:
    if given is None or isinstance(given, list):
        return [*map(str, given or ())]
    try:
        return shlex.split(str(given))
    except ValueError:
        raise SettingsError(f"a quote in the command `{str(given)[:64]}` is not closed") from None


def _services(paths: Sequence[Path]) -> dict[str, Any]:
    """Of all files together. Raises `SettingsError`."""
    services: dict[str, Any] = {}
    for path in paths:
        for document in read_yaml(read_text(path), str(path), TextLoader):
            own = field_of(document, "services", dict, str(path))
            if "include" in document or any("extends" in each for each in own.values() if each):
                raise SettingsError(f"{path}: `include:` and `extends:` are not read; {_CURE}")
            services = _merged(services, {str(name): _canonical(each) for name, each in own.items()})
    return services


def fill(value: Any, known: Mapping[str, str], source: str) -> Any:
    """A value, all values in it with their variables filled in. One that is not set stays, as `UNSET` finds it."""

    def of(found: re.Match[str]) -> str:
        name, operator, behind = found[1] or found[2], found[3] or "", found[4] or ""
        if not name and found[0].startswith("${"):
            raise SettingsError(f"{source}: Compose refuses `{found[0]}`: a $ that is the container's is $$")
        if not name:
            return "$"
        told = known.get(name)
        is_given = bool(told) if operator.startswith(":") else told is not None
        if operator.endswith("+" if is_given else "-"):
            return str(fill(behind, known, source))
        return "" if operator.endswith("+") else (told or "") if is_given else f"\ue000{name}\ue001"

    if isinstance(value, dict):
        return {name: fill(inner, known, source) for name, inner in value.items()}
    if isinstance(value, list):
        return [fill(inner, known, source) for inner in value]
    return fill_pattern(_VARIABLE, of, value, source) if isinstance(value, str) else value


def env_file(path: Path, known: Mapping[str, str] | None) -> dict[str, str]:
    """The variables of a file; none without it. `known`: of those that may stand in one; None: a $ is a $."""
    found: dict[str, str] = {}
    if os.path.isfile(path):
        for name, literal, quoted, plain in _ASSIGNED.findall(read_text(path, "replace")):
            text = re.sub(r"\\(.)", lambda escaped: {"n": "\n"}.get(escaped[1], escaped[1]), quoted) or plain.strip()
            if known is not None:
                text = UNSET.sub("", fill(text, {**known, **found}, str(path)))
            found[name] = literal or text
    return found


def _merged(base: Any, over: Any) -> Any:
    """As Compose merges: mappings field by field, lists in a row."""
    if isinstance(over, Tagged):
        return None if over.tag == "!reset" else _merged(None, over.value)
    if isinstance(over, list):
        return [*(base if isinstance(base, list) else ()), *(_merged(None, each) for each in over)]
    if not isinstance(over, dict):
        return base if over is None else over
    merged = dict(base) if isinstance(base, dict) else {}
    for name, value in over.items():
        merged[name] = _merged(None if name in _WHOLE else merged.get(name), value)
    return {name: value for name, value in merged.items() if value is not None}


def _canonical(service: Any) -> Any:
    """A service whose fields of two spellings have one."""
    own, files = (service.get(name) for name in ("environment", "env_file")) if isinstance(service, dict) else (0, 0)
    if isinstance(own, list):
        service = {**service, "environment": environment_of(own)}
    return {**service, "env_file": [files]} if isinstance(files, str) else service


def as_port(port: Any) -> str:
    """In the short one of Compose's two spellings."""
    if not isinstance(port, Mapping):
        return str(port)
    address, outer, inner, protocol = (port.get(name) or "" for name in ("host_ip", "published", "target", "protocol"))
    return f"{address}:{outer}:{inner}/{protocol}"


def _found_with(path: Path, known: Mapping[str, str]) -> list[Path]:
    """The files that Compose merges where it finds this one by itself."""
    listed = [path.parent / each for each in known.get("COMPOSE_FILE", "").split(os.pathsep)]
    if path in listed:
        return listed
    beside = [each for name in OVERRIDES if (each := path.with_name(name)).is_file()]
    return [path, *(beside[:1] if path.name in NAMES else ())]
