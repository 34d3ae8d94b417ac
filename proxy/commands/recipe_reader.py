"""What a recipe is, told from what is given, and read as such."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxy.commands.recipe import Recipe, RecipeKind, docker_run, environment_of, of_text, starts_vllm
from proxy.commands.recipe_compose import of_compose, of_compose_line
from proxy.commands.recipe_text import as_lines, field_of, fill_template, read_text, read_yaml
from proxy.commands.recipe_unit import of_unit, unit_file
from proxy.errors import SettingsError


def read_recipe(given: str, inspect: Callable[[str], Mapping[str, Any] | None]) -> Recipe:
    """A file, a line, or a container that Docker (`inspect`) knows. Raises `SettingsError` with what is missing."""
    try:
        return _read(given, inspect)
    except RecursionError:
        raise SettingsError(f"{given[:256]}: its brackets and quotes are too many inside each other") from None


def _read(given: str, inspect: Callable[[str], Mapping[str, Any] | None]) -> Recipe:
    if starts_vllm(given):
        return of_text(given, "the command", "")
    path = Path(os.path.expanduser(given))
    if not os.path.exists(path) and re.match(r"(?:sudo\s+)?(?:\S*/)?docker(?:-|\s+)compose(?:\s|$)", given):
        return of_compose_line(given)
    if os.path.isdir(path):  # which takes any name, as long ones
        raise SettingsError(f"{given} is a folder; give the recipe, the compose file or the script in it")
    if (unit := unit_file(path)) is not None:
        return of_unit(unit, path.name)
    if not os.path.isfile(path):
        return _of_container(given, inspect)
    text = read_text(path)
    if re.search(r"^ExecStart=", text, re.M) and not text.startswith("#!"):
        return of_unit(path, f"{path.stem}.service")
    if path.suffix not in (".yaml", ".yml"):
        return of_text(text, str(path), path.stem)
    documents = read_yaml(text, given)
    if any("services" in each or "include" in each for each in documents):
        return of_compose([path])
    if manifests := [str(each.get("kind")) for each in documents if "apiVersion" in each]:
        cure = (
            'the chart in deploy/helm runs vLLM there with Seamark; or give its `args:` as a line, "vllm serve MODEL"'
        )
        raise SettingsError(f"{given} is a manifest of Kubernetes ({', '.join(manifests)}): {cure}")
    if len(documents) > 1:
        raise SettingsError(f"{given} has {len(documents)} documents of YAML, none with `services:`; give one of them")
    (document,) = documents
    if "command" in document:
        return _of_spark(document, path)
    if field_of(document, "model", str, given):
        line, fields = f"vllm serve --config {shlex.quote(str(path.absolute()))}", document.items()
        told = {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in fields}
        flags = [f"--{name}={value}" for name, value in told.items() if value != "null"]
        return Recipe(RecipeKind.CONFIG, str(path), path.stem, flags, document=document, text=line)
    kinds = "`command:` (a recipe of spark-vllm-docker), no `services:` (compose) and no `model:` (vLLM's own"
    raise SettingsError(f"{given} has no {kinds} configuration)")


def _of_spark(document: Mapping[str, Any], path: Path) -> Recipe:
    missing = [name for name in ("name", "container", "command") if not isinstance(document.get(name), str)]
    if missing:
        raise SettingsError(f"{path}: a recipe of spark-vllm-docker has a text for {', '.join(missing)}")
    source = str(path)
    command = fill_template(as_lines(document["command"]), field_of(document, "defaults", dict, source), source)
    field_of(document, "mods", list, source)
    known = environment_of(field_of(document, "env", dict, source))
    recipe = of_text(command, source, path.stem, known)
    environment, builds = {**known, **recipe.environment}, [*map(str, field_of(document, "build_args", list, source))]
    if as_lines(document["command"]) != document["command"]:
        note = "a line that begins with - is read as more of the one before, and written so: no backslash says it"
        recipe = replace(recipe, notes=[note, *recipe.notes])
    recipe = replace(recipe, kind=RecipeKind.SPARK, environment=environment, image=document["container"])
    return replace(recipe, builds=builds, document=document, text="", python="python3")


def _of_container(given: str, inspect: Callable[[str], Mapping[str, Any] | None]) -> Recipe:
    told = inspect(given) if re.fullmatch(r"[\w][\w.-]*", given) else None
    if told is None:
        raise SettingsError(f"{given} is no file, no command with `vllm serve`, and no container that Docker knows")
    try:
        config = told["Config"]
        labels = config.get("Labels") or {}
        service, files = (labels.get(f"com.docker.compose.{name}") for name in ("service", "project.config_files"))
        if service and files:
            return of_compose([Path(each) for each in files.split(",")], [service])
        name, line = str(told["Name"]).lstrip("/"), _line(config, told["HostConfig"])
    except (KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"what Docker says of {given} is not understood ({type(error).__name__})") from None
    recipe = of_text(line, f"the container {given}", name)
    return replace(recipe, notes=[*recipe.notes, f"docker stop {name} ends it, docker start {name} brings it back"])


# Of `docker run`: flags, and what Docker calls them; and what it says without them.
_FLAGS = (
    "volume=Binds network=NetworkMode ipc=IpcMode runtime=Runtime shm-size=ShmSize memory=Memory ulimit=Ulimits "
    "device=Devices cap-add=CapAdd restart=Restart"
)
_DEFAULTS = ("default", "bridge", "private", "shareable", "runc", 67108864, "no")


def _line(config: Mapping[str, Any], host: Mapping[str, Any]) -> str:
    """The line by which a container was started, as far as `docker run` has a flag for it."""
    options = [f"--env={each}" for each in config.get("Env") or () if not each.startswith("PATH=")]
    for inside, places in (host.get("PortBindings") or {}).items():
        for each in places or ():
            address = f"{each['HostIp']}:" if each.get("HostIp") else ""
            options.append(f"--publish={address}{each.get('HostPort', '')}:{inside}")
    told = {**host, "Restart": (host.get("RestartPolicy") or {}).get("Name")}
    told["Devices"] = [each["PathOnHost"] for each in host.get("Devices") or ()]
    told["Ulimits"] = [f"{each['Name']}={each['Soft']}:{each['Hard']}" for each in host.get("Ulimits") or ()]
    for flag, _, key in (each.partition("=") for each in _FLAGS.split()):
        values = value if isinstance(value := told.get(key), list) else [value]
        options += [f"--{flag}={each}" for each in values if each and each not in _DEFAULTS]
    options += ["--privileged"] if host.get("Privileged") else []
    for request in host.get("DeviceRequests") or ():
        if any("gpu" in names for names in request.get("Capabilities") or ()):
            ids = request.get("DeviceIDs")
            options.append(f'--gpus="device={",".join(ids)}"' if ids else "--gpus=all")
    return docker_run(str(config["Image"]), options, config.get("Entrypoint") or (), config.get("Cmd") or ())
