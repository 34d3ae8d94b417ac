"""What a recipe is, told from what is given, and read as such."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxy.commands.recipe import (
    DOCKER_RUN,
    EVERYWHERE,
    SERVE,
    Recipe,
    RecipeKind,
    environment_of,
    inner_arguments,
    of_text,
    port_in,
)
from proxy.commands.recipe_compose import of_compose, of_compose_line
from proxy.commands.recipe_line import serve_line
from proxy.commands.recipe_text import as_lines, field_of, fill_template, read_text, read_yaml
from proxy.commands.recipe_unit import of_unit, unit_file
from proxy.commands.ways import DEFAULT_PORT
from proxy.errors import SettingsError


def read_recipe(given: str, inspect: Callable[[str], Mapping[str, Any] | None]) -> Recipe:
    """A file, a line, or a container that Docker (`inspect`) knows. Raises `SettingsError` with what is missing."""
    if SERVE.search(f" {given} ") or DOCKER_RUN.search(given):
        return of_text(given, "the command", "")
    path = Path(os.path.expanduser(given))
    if not os.path.exists(path) and re.match(r"(?:sudo\s+)?(?:\S*/)?docker(?:-|\s+)compose(?:\s|$)", given):
        return of_compose_line(given)
    if os.path.isdir(path):  # which takes any name, as long ones
        raise SettingsError(f"{given} is a folder; give the recipe, the compose file or the script in it")
    if (unit := unit_file(str(path))) is not None:
        return of_unit(unit, path.name)
    if not os.path.isfile(path):
        return _of_container(given, inspect)
    text = read_text(path)
    if re.search(r"^\[Service\]\s", text, re.M) and not text.startswith("#!"):
        return of_unit(path, f"{path.stem}.service")
    if re.search(r"^\[Container\]\s", text, re.M):
        cure = "give what it runs in quotes: podman run IMAGE FLAGS"
        raise SettingsError(f"{given} is a Quadlet of Podman, which is not read; {cure}")
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
        return Recipe(RecipeKind.CONFIG, str(path), path.stem, (), document=document)
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
    line = serve_line(command, source, known)
    arguments, environment = [word.value for word in line.words], {**known, **line.variables}
    builds = tuple(map(str, field_of(document, "build_args", list, source)))
    image = document["container"]
    return Recipe(RecipeKind.SPARK, source, path.stem, arguments, environment, image, builds, document=document)


def _of_container(given: str, inspect: Callable[[str], Mapping[str, Any] | None]) -> Recipe:
    told = inspect(given) if re.fullmatch(r"[\w][\w.-]*", given) else None
    if told is None:
        raise SettingsError(f"{given} is no file, no command with `vllm serve`, and no container that Docker knows")
    try:
        config, host = told["Config"], told["HostConfig"]
        labels = config.get("Labels") or {}
        service, files = (labels.get(f"com.docker.compose.{name}") for name in ("service", "project.config_files"))
        if service and files:
            paths = [Path(each) for each in files.split(",")]
            if missing := [str(path) for path in paths if not os.path.isfile(path)]:
                there = ", ".join(missing)
                raise SettingsError(f"the container {given} is of {there}, which is not here; give the compose file")
            return of_compose(paths, [service])
        words = [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]
        environment = environment_of(config.get("Env"))
        name, image = str(told["Name"]).lstrip("/"), str(config["Image"])
        ports = host.get("PortBindings") or {}
    except (KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"what Docker says of {given} is not understood ({type(error).__name__})") from None
    arguments = inner_arguments(words, f"the container {given}", by_image=False)
    recipe = Recipe(RecipeKind.CONTAINER, given, name, arguments, environment, image, document=told)
    if host.get("NetworkMode") == "host":
        return recipe
    bound = ports.get(f"{recipe.value('--port') or DEFAULT_PORT}/tcp") or [{}]
    where = bound[0].get("HostIp") or EVERYWHERE, port_in(bound[0].get("HostPort")) or DEFAULT_PORT
    return replace(recipe, listens=where)
