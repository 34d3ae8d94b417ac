"""How somebody runs vLLM, read from what they run it by: nothing that it says has to be asked, and none of it is lost.

A recipe of spark-vllm-docker, a compose file, a systemd unit, vLLM's own configuration file, a script or a line with
`vllm serve` or `docker run`, or a container. Placeholders are filled to read a recipe, and left as they are where it is
written again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import count
from typing import Any

from proxy.commands.recipe_line import LAUNCHER, Start, how_to_say, start_of
from proxy.commands.shell import Word
from proxy.commands.ways import DEFAULT_PORT
from proxy.errors import SettingsError
from proxy.http.json_body import loads

GATEWAY_PORT = 8080  # unless the recipe takes it
EVERYWHERE = "0.0.0.0"  # noqa: S104  # where vLLM listens unless it is told otherwise; nothing listens here

# In a line of a shell; the last is how vLLM was started before it had a command.
STARTS = re.compile(
    r"(?<![\w./-])(?:[\w./-]*/)?(?:vllm\s+serve|(?:docker|podman)\s+(?:container\s+)?run)(?=\s)"
    r"|-m\s+vllm\.entrypoints\.(?:openai\.)?api_server(?=\s)"
)


class RecipeKind(StrEnum):
    """What vLLM is run by, as a sentence says it."""

    SPARK = "a recipe of spark-vllm-docker"
    LAUNCHER = f"a command for spark-vllm-docker's {LAUNCHER}"
    COMPOSE = "a compose file"
    CONFIG = "a configuration file of vLLM"
    COMMAND = "a command of vLLM"
    DOCKER = "a command of Docker"
    UNIT = "a systemd unit"


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
    outside: Mapping[str, str] | None = None  # variables that the text is given; None: it is read without
    python: str = "python3"  # how it is called in vLLM's environment
    program: str = "docker"  # and Docker, or what stands for it
    is_published: bool = True  # at a port of this machine, by the recipe itself
    unseen_port: str = ""  # why that port is not known
    notes: Sequence[str] = ()  # what was read besides, and what is not seen here

    @property
    def model(self) -> str:
        """As vLLM is told it: a name or a folder."""
        first = self.arguments[0] if self.arguments and not self.arguments[0].startswith("-") else ""
        return first or self.value("--model")

    @property
    def host(self) -> str:
        return self.listens[0] if self.listens else self.value("--host") or EVERYWHERE

    @property
    def port(self) -> int:
        if self.listens:
            return self.listens[1]
        if self.unseen_port:
            raise SettingsError(self.unseen_port)
        port = self.value("--port") or str(DEFAULT_PORT)
        if (number := port_in(port)) is None:
            why = f"is not seen here; {how_to_say(port, self.source)}" if "$" in port else "is no port"
            raise SettingsError(f"{self.source}: --port {port[:64]} {why}")
        return number

    @property
    def gateway_port(self) -> int:
        """Where the gateway listens: the first port from 8080 on that the recipe does not name."""
        says = f"{self.port} {self.text or json.dumps(self.document, default=str, skipkeys=True)}"
        return next(port for port in count(GATEWAY_PORT) if not re.search(rf"(?<!\d){port}(?!\d)", says))

    @property
    def has_rust_frontend(self) -> bool:
        """Whether vLLM's HTTP server is the one in Rust, which takes no middleware."""
        return self.environment.get("VLLM_USE_RUST_FRONTEND", "").strip() == "1"

    @cached_property
    def flags(self) -> dict[str, str]:
        """What vLLM is given by the name of a flag, in one spelling; of a flag that is given twice the last."""
        found: dict[str, str] = {}
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
            if "$" not in given:
                raise SettingsError(f"{self.source}: {names[0]} is no JSON: {given[:64]}") from None
            told = {}  # not seen here
        told = told if isinstance(told, dict) else {}
        starts = tuple(f"{name}." for name in names)
        return told | {name.partition(".")[2]: self.flags[name] for name in self.flags if name.startswith(starts)}


def flag_name(argument: str) -> str:
    """The name of a flag as vLLM compares them: with dashes, but in that of a field, and without its value."""
    name, dot, field = argument.partition("=")[0].partition(".")
    return (name.replace("_", "-") if name.startswith("--") else name) + dot + field


def published(port: str, own: int) -> tuple[str, int] | None:
    """Address and port of this machine that lead to a container's `own`, as `docker run -p` spells it."""
    spelt, _, protocol = port.partition("/")
    address, outer, inner = ["", "", *spelt.rsplit(":", 2)][-3:]
    inside, outside = _ports(inner), _ports(outer)
    if protocol not in ("", "tcp") or own not in inside or len(inside) != len(outside):
        return None  # of several, Docker takes one that is free
    return address.strip("[]") or EVERYWHERE, outside[inside.index(own)]


def _ports(text: str) -> range:
    """Those of `8000` or `8000-8005`."""
    first, last = (port_in(each) for each in (text.partition("-")[0], text.rpartition("-")[2]))
    return range(first, last + 1) if first and last else range(0)


def port_in(text: object) -> int | None:
    """The port that a text names; None for none."""
    digits = str(text)
    return int(digits) if re.fullmatch(r"\d{1,5}", digits, re.ASCII) and 0 < int(digits) < 65536 else None


def of_text(text: str, source: str, name: str, known: Mapping[str, str] = os.environ) -> Recipe:
    """A script, or a line of one. `known`: the variables that it is given."""
    found = start_of(text, known, source)
    run, arguments = found.run, [word.value for word in found.words]
    if run is None:
        is_launched = any(word.value.endswith(LAUNCHER) for word in found.command[: found.behind])
        kind, notes = RecipeKind.LAUNCHER if is_launched else RecipeKind.COMMAND, [*_not_seen(found, found.words, text)]
        recipe = Recipe(kind, source, name, arguments, found.variables, text=text, outside=known)
        return replace(recipe, python=found.python, notes=notes)
    outside = {**known, **run.start.variables}
    pairs = [each.partition("=") for each in run.given("-e", "--env")]
    environment = {name: value if is_set else outside.get(name, "") for name, is_set, value in pairs}
    image, notes = run.image.value, [*_not_seen(run.start, [*run.options, *found.words], text)]
    if run.image.unseen:
        notes.append(f"the image is {image}, which is not seen here; the plugin is put into what that is then")
        image = ""
    recipe = Recipe(RecipeKind.DOCKER, source, name, arguments, environment, image, text=text, outside=known)
    recipe, networks = replace(recipe, program=run.program, notes=notes), run.given("--network", "--net")
    if "host" in networks:
        return recipe
    ports, own = run.given("-p", "--publish"), port_in(recipe.value("--port") or DEFAULT_PORT)
    listens = next(filter(None, (published(port, own) for port in ports if own)), None)
    hiding = [f"-p {port}" for port in ports if "$" in port] + [f"--network {each}" for each in networks]
    hiding += [word.value for word in run.options if word.several or word.value in ("-P", "--publish-all")]
    if hiding and not listens:
        cure = how_to_say(where, source) if "$" in (where := ", ".join(hiding)) else "write it as -p 8000:8000"
        return replace(recipe, unseen_port=f"{source}: the port it publishes is not seen here ({where}); {cure}")
    if own is None or listens:
        return replace(recipe, listens=listens)
    notes.append(f"it publishes no port of vLLM's own {own}; these files do, at 127.0.0.1 for the gateway")
    return replace(recipe, listens=("127.0.0.1", own), is_published=False)


def docker_run(image: str, options: Sequence[str], entrypoint: Sequence[str], command: Sequence[str]) -> str:
    given = [*options, *(f"--entrypoint={each}" for each in entrypoint[:1])]
    return shlex.join(["docker", "run", "-d", *given, image, *entrypoint[1:], *command])


def _not_seen(start: Start, words: Sequence[Word], text: str) -> Iterator[str]:
    """What of the words is not seen here, and what depends on more than is read."""
    if unseen := dict.fromkeys(word.value for word in words if word.several):
        yield f"not seen here, and kept as it is: {', '.join(unseen)}"
    if start.script.sourced:
        yield f"{', '.join(start.script.sourced)} is read by it, and what that sets is not seen here"
    line = text[slice(*start.outer.place)]
    for name in start.script.ambiguous:
        is_named = any(name in each for each in unseen)
        if start.script.names[name] and not is_named and re.search(rf"\$\{{?{name}\b", line):
            yield f"{name} depends on a condition in the script; what is said here is for the value that was read"


def starts_vllm(text: str) -> bool:
    return bool(STARTS.search(f" {text} "))


def environment_of(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(name): "" if value is None else str(value) for name, value in given.items()}
    return dict(str(each).partition("=")[::2] for each in given or ())
