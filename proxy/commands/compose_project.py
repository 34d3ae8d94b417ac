"""A Compose project, read as Compose reads it: what its files say together, and with which variables.

Fields stay as they are spelt until they are filled, so that they can be written again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from proxy.commands.recipe_text import (
    MOST_FILLED,
    MOST_LEVELS,
    Tagged,
    TextLoader,
    Word,
    field_of,
    read_text,
    read_yaml,
)
from proxy.errors import SettingsError

MOST_FILES = 100  # of a project, those that it includes and extends among them
NAMES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
OVERRIDES = tuple(f"{name}.override.{end}" for name in ("compose", "docker-compose") for end in ("yml", "yaml"))
_WHOLE = ("command", "entrypoint")  # a later file replaces them; it adds to all others

_VARIABLE = re.compile(r"\$(?:(\$)|(?!\{|[A-Za-z_])|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?=\}|:?[-?+])(:?[-?+])?)", re.ASCII)
UNSET = re.compile("\ue000([^\ue001]*)\ue001")  # stands for a variable that is not set here
_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([\w.-]+)[ \t]*=[ \t]*(?:'([^']*)'|\"((?:[^\"\\]|\\[^\0])*)\"|(.*?)(?:[ \t]#.*)?$)", re.M
)
_BRACED = r"\$\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # a variable, and those in its default
_QUOTED = r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)"
_WORD = re.compile(rf"(?:{_BRACED}|{_QUOTED}|[^\s'\"\\;&|<>])+", re.S)
_UNQUOTED = re.compile(f"{_BRACED}|{_QUOTED}", re.S)


@dataclass
class Variables:
    """Fills in what is known, as Compose does. A name that is not known is kept, as `UNSET` finds it."""

    known: Mapping[str, str]
    source: str
    left: int = field(default=MOST_FILLED, init=False)

    def fill(self, value: Any) -> Any:
        """A value with all values in it."""
        if isinstance(value, dict):
            return {name: self.fill(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self.fill(each) for each in value]
        return self._text(value, MOST_LEVELS) if isinstance(value, str) else value

    def _text(self, text: str, levels: int) -> str:
        parts: list[str] = []
        at = 0
        while (dollar := text.find("$", at)) >= 0:
            found = _VARIABLE.match(text, dollar) if levels else None
            if found is None:
                spelt = text[dollar : dollar + 30]
                raise SettingsError(f"{self.source}: Compose refuses `{spelt}`: a $ that is the container's is $$")
            parts.append(text[at:dollar])
            at = found.end()
            if found[3]:
                end = _closing_brace(text, at)
                parts.append(self._value(found[3], found[4] or "", text[at:end], levels - 1))
                at = end + 1
            else:
                parts.append(self._value(found[2], "", "", levels) if found[2] else "$")
            self.left -= len(parts[-1])
            if self.left < 0:
                raise SettingsError(f"{self.source}: its variables stand for more than {MOST_FILLED:,} characters")
        return "".join([*parts, text[at:]])

    def _value(self, name: str, operator: str, behind: str, levels: int) -> str:
        value = self.known.get(name)
        is_given = bool(value) if operator.startswith(":") else value is not None
        if operator.endswith("+" if is_given else "-"):
            return self._text(behind, levels)
        return "" if operator.endswith("+") else (value or "") if is_given else f"\ue000{name}\ue001"


def _closing_brace(text: str, at: int) -> int:
    """Where the braces of a variable end whose inside begins there; at the end of the text if they do not."""
    depth = 1
    for found in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if found[0] == "{" else -1
        if not depth:
            return found.start()
    return len(text)


def spelt_again(value: Any) -> Any:
    """A value that is filled, as one that is to be filled."""
    if isinstance(value, dict):
        return {name: spelt_again(each) for name, each in value.items()}
    if isinstance(value, list):
        return [spelt_again(each) for each in value]
    return UNSET.sub(r"${\1}", value.replace("$", "$$")) if isinstance(value, str) else value


def words_in(text: str) -> list[Word]:
    """The words of a command, as Compose splits it: up to a pipe or the like, which is no part of it."""
    words: list[Word] = []
    end = 0
    while begin := re.compile(r"\S").search(text, end):
        if (found := _WORD.match(text, begin.start())) is None:
            if text[begin.start()] in ";&|<>":
                break
            raise SettingsError(f"a quote in the command `{text[:64]}` is not closed")
        words.append(Word(found[0], _UNQUOTED.sub(_without_quotes, found[0])))
        end = found.end()
    return words


def _without_quotes(found: re.Match[str]) -> str:
    if found.lastindex is None:
        return found[0]  # a variable
    return re.sub(r"\\(.)", r"\1", found[2], flags=re.S) if found[2] else found[1] or found[3] or ""


class _Place(NamedTuple):
    """Of a file."""

    path: Path
    folder: Path  # where its paths begin
    known: Mapping[str, str]

    def fill(self, value: Any) -> Any:
        return Variables(self.known, str(self.path)).fill(value)


class Project:
    """What several files say together."""

    def __init__(self, paths: Sequence[Path], env_files: Sequence[Path] = (), folder: Path | None = None) -> None:
        self._left = MOST_FILES
        folder = folder or paths[0].parent
        self.known = _known(folder, env_files, os.environ)
        self.paths = paths if len(paths) > 1 else _found_with(paths[0], self.known)
        self.services: Mapping[str, Any] = self._merged_files(self.paths, folder, self.known)

    def _merged_files(self, paths: Iterable[Path], folder: Path, known: Mapping[str, str]) -> dict[str, Any]:
        services: dict[str, Any] = {}
        for place in (_Place(path, folder, known) for path in paths):
            for document in self._documents(place.path):
                own = _services(document, place)
                extended = {name: self._extended(name, own, place) for name in own}
                included = self._included(field_of(document, "include", list, str(place.path)), place)
                services = _merged(services, {**included, **extended})
        return services

    def _documents(self, path: Path) -> list[dict[str, Any]]:
        self._left -= 1
        if self._left < 0:
            raise SettingsError(f"{path}: its project has more than {MOST_FILES} files")
        return read_yaml(read_text(path), str(path), TextLoader)

    def _included(self, entries: Sequence[Any], place: _Place) -> Mapping[str, Any]:
        """The services of other projects, whose variables have files of their own."""
        services: dict[str, Any] = {}
        for entry in place.fill(entries):
            given = entry if isinstance(entry, dict) else {"path": entry}
            paths, env_files = (_paths(given.get(name), place.folder) for name in ("path", "env_file"))
            folder = place.folder / str(given.get("project_directory") or paths[0].parent)
            known = _known(folder, env_files, place.known)
            services |= spelt_again(Variables(known, str(paths[0])).fill(self._merged_files(paths, folder, known)))
        return services

    def _extended(self, name: str, services: Mapping[str, Any], place: _Place, levels: int = 20) -> Any:
        """A service with what it is based on."""
        own = _canonical(services[name], place)
        if not isinstance(own, dict) or not (extends := own.pop("extends", None)):
            return own
        reference = place.fill(extends if isinstance(extends, dict) else {"service": extends})
        wanted = str(reference.get("service"))
        if file := reference.get("file"):
            path = place.folder / str(file)
            place, services = place._replace(path=path, folder=path.parent), {}
            for document in self._documents(path):
                services |= _services(document, place)
        if not levels or wanted not in services:
            why = "is not there" if levels else "extends itself"
            raise SettingsError(f"{place.path}: {name} extends {wanted}, which {why}")
        return _merged(_merged(None, self._extended(wanted, services, place, levels - 1)), own)


def _services(document: Mapping[str, Any], place: _Place) -> dict[str, Any]:
    return {str(name): each for name, each in field_of(document, "services", dict, str(place.path)).items()}


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


def _canonical(service: Any, place: _Place) -> Any:
    """A service whose fields of two spellings have one."""
    if not isinstance(service, dict):
        return service
    service = dict(service)
    if isinstance(given := service.get("environment"), list | dict):
        pairs = given.items() if isinstance(given, dict) else (str(each).partition("=")[::2] for each in given)
        bare = () if isinstance(given, dict) else given
        service["environment"] = {
            name: f"${{{name}-}}" if value is None or name in bare else value for name, value in pairs
        }
    if isinstance(given := service.get("env_file"), str | list):
        service["env_file"] = [str(path) for path in _paths(place.fill(given), place.folder)]
    return service


def _paths(given: Any, folder: Path) -> list[Path]:
    """Of a field that names one, several, or mappings of them."""
    entries = given if isinstance(given, list) else [given]
    return [folder / str(each.get("path") if isinstance(each, dict) else each) for each in entries if each]


def _known(folder: Path, env_files: Sequence[Path], known: Mapping[str, str]) -> dict[str, str]:
    """Variables of files, and those that win over them."""
    found: dict[str, str] = {}
    for path in env_files or [folder / ".env"]:
        found |= env_file(path, {**found, **known})
    return {**found, **known}


def env_file(path: Path, known: Mapping[str, str]) -> dict[str, str]:
    """The variables of an `.env`, of which one may stand in another; none without the file."""
    found: dict[str, str] = {}
    if path.is_file():
        for name, literal, quoted, plain in _ASSIGNED.findall(read_text(path, "replace")):
            text = re.sub(r"\\(.)", lambda escaped: {"n": "\n"}.get(escaped[1], escaped[1]), quoted) or plain.strip()
            found[name] = literal or UNSET.sub("", Variables({**known, **found}, str(path)).fill(text))
    return found


def _found_with(path: Path, known: Mapping[str, str]) -> list[Path]:
    """The files that Compose merges where it finds this one by itself."""
    separator = known.get("COMPOSE_PATH_SEPARATOR") or os.pathsep
    listed = [path.parent / each for each in known.get("COMPOSE_FILE", "").split(separator)]
    if path in listed:
        return listed
    beside = [each for name in OVERRIDES if (each := path.with_name(name)).is_file()]
    return [path, *(beside[:1] if path.name in NAMES else ())]
