"""A compose file, read as Compose reads it: its one service that runs vLLM."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.commands.recipe import Recipe, RecipeKind, environment_of, inner_arguments, serves, with_address
from proxy.commands.recipe_text import field_of, fill_variables, read_text
from proxy.errors import SettingsError


def of_compose(document: Mapping[str, Any], path: Path, wanted: str) -> Recipe:
    source = str(path)
    services = {str(name): each for name, each in field_of(document, "services", dict, source).items()}
    known = {**_env_file(path.parent / ".env"), **os.environ}
    mappings = {name: service for name, service in services.items() if isinstance(service, dict)}
    found = [name for name in mappings if (name == wanted if wanted else _runs_vllm(mappings[name]))]
    if len(found) != 1:
        several = f"{len(found)} services with vLLM ({', '.join(found)})" if found else "no service that runs vLLM"
        raise SettingsError(f"{source}: {several}; setup takes one")
    name, service = found[0], mappings[found[0]]
    where = f"{source}: {name}"
    arguments = fill_variables(inner_arguments(_words_of_service(service), source), known, source)
    kind = list if isinstance(service.get("environment"), list) else dict
    variables = environment_of(field_of(service, "environment", kind, where))
    environment = dict(zip(variables, fill_variables(variables.values(), known, source), strict=True))
    (image,) = fill_variables([field_of(service, "image", str, where)], known, source)
    if not image:
        raise SettingsError(f"{source}: the service {name} has no `image:` that Seamark's plugin could be put into")
    recipe = Recipe(RecipeKind.COMPOSE, source, name, arguments, environment, image, document={"services": services})
    ports = field_of(service, "ports", list, where)
    return with_address(recipe, ports, known, shares_network=service.get("network_mode") == "host")


def _words_of_service(service: Mapping[str, Any]) -> list[str]:
    return [*as_list(service.get("entrypoint")), *as_list(service.get("command"))]


def _runs_vllm(service: Mapping[str, Any]) -> bool:
    is_vllm = "vllm" in str(service.get("image", "")).lower()
    return serves(" ".join(_words_of_service(service))) or (is_vllm and bool(service.get("command")))


def as_list(given: Any) -> list[str]:
    """A command of compose, which is a text or a list."""
    if given is None:
        return []
    try:
        return list(map(str, given)) if isinstance(given, list) else shlex.split(str(given))
    except ValueError:
        raise SettingsError(f"a quote in the command `{str(given)[:64]}` is not closed") from None


def _env_file(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    pairs = (line.strip().partition("=") for line in read_text(path, "replace").splitlines())
    return {name: value.strip("'\"") for name, _, value in pairs}
