"""How somebody runs vLLM, read from what they run it by: nothing that it says has to be asked, and none of it is lost.

A recipe of spark-vllm-docker, a compose file, vLLM's own configuration file, a script or a line with `vllm serve` or
`docker run`, or a container. Placeholders are filled to read a recipe, and left as they are where it is written again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from proxy.commands.recipe_text import (
    ServeLine,
    Word,
    fill_variables,
    word_at,
    words_of,
)
from proxy.commands.ways import DEFAULT_PORT
from proxy.errors import SettingsError
from proxy.http.json_body import loads

EVERYWHERE = "0.0.0.0"  # noqa: S104  # where vLLM listens unless it is told otherwise; nothing listens here

# In a line of a shell; the second is how vLLM was started before it had a command.
SERVE = re.compile(r"(?<![\w./-])(?:[\w./-]*/)?vllm\s+serve(?=\s)|-m\s+vllm\.entrypoints\.openai\.api_server(?=\s)")

DOCKER_RUN = re.compile(r"(?<![\w./-])(?:docker|podman)\s+(?:container\s+)?run(?=\s)")
LAUNCHER = "launch-cluster.sh"  # of spark-vllm-docker, which also starts a command that it is given

# Of `docker run`, those without a value; letters can stand together. All others take the next word.
_SWITCHES = (
    "--rm --init --detach --interactive --tty --privileged --read-only --publish-all --quiet --oom-kill-disable "
    "--no-healthcheck --sig-proxy --disable-content-trust --use-api-socket"
)
_LETTERS = "ditPq"

_SHORT = re.compile(f"-[{_LETTERS}]*([A-Za-z])(.*)", re.S)  # -p 80:80, -dp 80:80, -p80:80
_ASSIGNED = re.compile(r"(?:^|\s|;)([A-Z_][A-Z0-9_]*)=")


class RecipeKind(StrEnum):
    """What vLLM is run by, as a sentence says it."""

    SPARK = "a recipe of spark-vllm-docker"
    LAUNCHER = f"a command for spark-vllm-docker's {LAUNCHER}"
    COMPOSE = "a compose file"
    CONFIG = "a configuration file of vLLM"
    COMMAND = "a command of vLLM"
    DOCKER = "a command of Docker"
    CONTAINER = "a container"


@dataclass(frozen=True)
class Recipe:
    kind: RecipeKind
    source: str  # a path, a line, a container's name
    name: str  # of the recipe, the service or the container
    arguments: Sequence[str]  # of `vllm serve`, with all placeholders filled
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str = ""  # empty: none is named
    builds: Sequence[str] = ()  # flags of spark-vllm-docker's build script
    listens: tuple[str, int] | None = None  # address and port of this machine, if they are not vLLM's own
    document: Any = None  # what a file of YAML holds
    text: str = ""  # of a command or a script
    notes: Sequence[str] = ()  # what is not as it seems

    @property
    def model(self) -> str:
        """As vLLM is told it: a name or a folder."""
        first = self.arguments[0] if self.arguments and not self.arguments[0].startswith("-") else ""
        return first or self.value("--model")

    @property
    def host(self) -> str:
        """The address where clients find it."""
        return self.listens[0] if self.listens else self.value("--host") or EVERYWHERE

    @property
    def port(self) -> int:
        """The port where clients find it."""
        if self.listens:
            return self.listens[1]
        port = self.value("--port") or str(DEFAULT_PORT)
        if (number := port_in(port)) is None:
            raise SettingsError(f"{self.source}: --port {port[:64]} is no port")
        return number

    @property
    def python(self) -> str:
        """The interpreter that has the vLLM of a command, as far as it is named."""
        found = re.search(r"([\w./-]*/)vllm\s+serve\s|([\w./-]*python[\w.]*)\s+-m\s+vllm\.", self.text)
        return (found[2] or f"{found[1]}python") if found else "python3"

    @property
    def has_rust_frontend(self) -> bool:
        """Whether vLLM's HTTP server is the one in Rust, which takes no middleware."""
        return self.environment.get("VLLM_USE_RUST_FRONTEND", "").strip() == "1"

    @cached_property
    def flags(self) -> dict[str, str]:
        """What vLLM is given by the name of a flag, in one spelling; of a flag that is given twice the last."""
        config = self.document if self.kind is RecipeKind.CONFIG else {}
        found = {flag_name(f"--{name}"): _as_text(value) for name, value in config.items()}
        for argument, following in zip(self.arguments, [*self.arguments[1:], ""], strict=False):
            found.pop(flag_name(argument), None)  # so that the last one is behind all others
            found[flag_name(argument)] = argument.partition("=")[2] if "=" in argument else following
        return found

    def has(self, flag: str) -> bool:
        """Whether vLLM is given a flag, with or without a value."""
        return flag in self.flags

    def value(self, *names: str) -> str:
        """What vLLM is given for a flag of these names, the last one if it is given twice; empty without it."""
        return next((value for name, value in reversed(self.flags.items()) if name in names), "")

    def fields(self, *names: str) -> Mapping[str, Any]:
        """What vLLM is given as JSON, or field by field (`--speculative-config.method mtp`). Empty without the flag."""
        given = self.value(*names)
        try:
            told = loads(given.encode()) if given else {}
        except ValueError:
            raise SettingsError(f"{self.source}: {names[0]} is no JSON: {given[:64]}") from None
        told = told if isinstance(told, dict) else {}
        starts = tuple(f"{name}." for name in names)
        return told | {name.partition(".")[2]: self.flags[name] for name in self.flags if name.startswith(starts)}


def flag_name(argument: str) -> str:
    """The name of a flag as vLLM compares them: with dashes, but in that of a field, and without its value."""
    name, dot, field = argument.partition("=")[0].partition(".")
    return (name.replace("_", "-") if name.startswith("--") else name) + dot + field


def _as_text(value: Any) -> str:
    """A value of vLLM's own configuration as a command line has it."""
    if isinstance(value, dict):
        return json.dumps(value, default=str, skipkeys=True)
    return "" if value is None else str(value)


def with_address(recipe: Recipe, ports: Iterable[Any], known: Mapping[str, str], *, shares_network: bool) -> Recipe:
    """With the place where clients find it: at one of a container's `ports`, or else on this machine alone."""
    if shares_network:
        return recipe
    own = recipe.port
    published = (_published(port, own, known) for port in ports)
    return replace(recipe, listens=next(filter(None, published), ("127.0.0.1", own)))


def _published(port: Any, own: int, known: Mapping[str, str]) -> tuple[str, int] | None:
    """Address and port of this machine that lead to vLLM's `own`, in either of compose's spellings."""
    if isinstance(port, dict):
        address, published, inside = port.get("host_ip", EVERYWHERE), port.get("published"), port.get("target")
    else:
        *before, inside = fill_variables([str(port)], known, "ports")[0].split("/")[0].rsplit(":", 2)
        address, published = before[0].strip("[]") if len(before) > 1 else EVERYWHERE, before[-1] if before else None
    number = port_in(published)
    return (str(address), number) if str(inside) == str(own) and number is not None else None


def port_in(text: object) -> int | None:
    """The port that a text names; None for none."""
    digits = str(text)
    return int(digits) if re.fullmatch(r"\d{1,5}", digits, re.ASCII) and 0 < int(digits) < 65536 else None


def of_text(text: str, source: str, name: str) -> Recipe:
    if DOCKER_RUN.search(_without_comments(text)):
        run = docker_run(text, source)
        known = {**os.environ, **variables_of(text[: run.start])}
        image, *values = fill_variables([word.value for word in (run.image, *run.options)], known, source)
        environment = environment_of(options_of(values, ("-e", "--env")))
        arguments = inner_arguments(fill_variables([word.value for word in run.arguments], known, source), source)
        recipe = Recipe(RecipeKind.DOCKER, source, name, arguments, environment, image, text=text)
        shares_network = "host" in options_of(values, ("--network", "--net"))
        return with_address(recipe, options_of(values, ("-p", "--publish")), known, shares_network=shares_network)
    line = serve_line(text, source)
    before = text[: line.start]
    kind = RecipeKind.LAUNCHER if LAUNCHER in before.rpartition("\n\n")[2] else RecipeKind.COMMAND
    variables = variables_of(before)
    arguments = fill_variables([word.value for word in line.words], {**os.environ, **variables}, source)
    return Recipe(kind, source, name, arguments, variables, text=text)


def _without_comments(text: str) -> str:
    """A text of the same length without its comments, which may tell how vLLM is started, too."""
    return re.sub(r"(?m)^[ \t]*#.*$", lambda comment: " " * len(comment[0]), text)


def serves(text: str) -> bool:
    return bool(SERVE.search(f" {text} "))


def serve_line(text: str, source: str) -> ServeLine:
    """The arguments behind the one `vllm serve` of a text. Raises `SettingsError` without one."""
    found = list(SERVE.finditer(f"{_without_comments(text)}\n"))
    if len(found) != 1:
        raise SettingsError(f"{source}: {'no' if not found else 'more than one'} `vllm serve` in it; setup takes one")
    return words_of(text, found[0].end(), source)


class DockerRun(NamedTuple):
    program: str  # docker or podman
    options: Sequence[Word]
    image: Word
    arguments: Sequence[Word]  # behind the image
    start: int  # of the options
    end: int


def docker_run(text: str, source: str) -> DockerRun:
    """The one `docker run` of a text. Raises `SettingsError` without one, or if it names no image."""
    found = list(DOCKER_RUN.finditer(_without_comments(text)))
    if len(found) != 1:
        raise SettingsError(f"{source}: more than one `docker run` in it; setup takes one")
    line = words_of(text, found[0].end(), source)
    words, at = line.words, 0
    while at < len(words) and (option := words[at].value).startswith("-"):
        if option.startswith("--"):
            has_next = option not in _SWITCHES.split() and "=" not in option
        else:
            has_next = len(option[1:].lstrip(_LETTERS)) == 1
        at += 1 + has_next  # the next word is its value
    if at >= len(words):
        raise SettingsError(f"{source}: `docker run` names no image")
    return DockerRun(found[0][0].split()[0], words[:at], words[at], words[at + 1 :], line.start, line.end)


def inner_arguments(words: Sequence[str], source: str, *, by_image: bool = True) -> list[str]:
    """Those of `vllm serve` in a container's words; `by_image`: an entrypoint that is not among them may start vLLM."""
    if script := next(filter(serves, words), ""):
        return [word.value for word in serve_line(script, source).words]
    if start := behind_serve(words):
        return list(words[start:])
    if "engine_patches" in words:
        raise SettingsError(f"{source} has Seamark's plugin already; ask `seamark doctor --worker URL`")
    if not words or not by_image:
        raise SettingsError(f"{source}: nothing says which model vLLM serves; give the recipe or script that starts it")
    return list(words)


def behind_serve(words: Sequence[str], before: str = "") -> int:
    """Where vLLM's arguments begin in a command, which follows the word `before`; 0 if it does not start vLLM."""
    for number, word in enumerate(words):
        last = words[number - 1] if number else before
        if (word == "serve" and Path(last).name == "vllm") or word.startswith("vllm.entrypoints."):
            return number + 1
    return 0


def environment_of(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(name): "" if value is None else str(value) for name, value in given.items()}
    return dict(str(each).partition("=")[::2] for each in given or ())


def variables_of(text: str) -> dict[str, str]:
    """What a script sets before it starts vLLM."""
    found: dict[str, str] = {}
    at = 0
    with suppress(ValueError):  # a quote that is not closed: all behind it is in it
        while assigned := _ASSIGNED.search(text, at):
            found[assigned[1]], at = word_at(text, assigned.end())
    return found


def options_of(values: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """What `docker run` is given for an option."""
    for number, value in enumerate(values):
        if short := _SHORT.fullmatch(value):
            name, equals, behind = f"-{short[1]}", short[2], short[2].removeprefix("=")
        else:
            name, equals, behind = value.partition("=")
        if name in names:
            yield behind if equals else "".join(values[number + 1 : number + 2])
