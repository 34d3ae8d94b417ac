"""A Compose project, read as Compose reads it: what its files say together, and with which variables.

Fields stay as they are spelt until they are filled, so that they can be written again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proxy.commands.recipe_text import MOST_LEVELS, Tagged, TextLoader, field_of, fill_pattern, read_text, read_yaml
from proxy.errors import SettingsError

MOST_FILES = 100  # of a project, those that it includes and extends among them
NAMES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
OVERRIDES = tuple(f"{name}.override.{end}" for name in ("compose", "docker-compose") for end in ("yml", "yaml"))
_WHOLE = ("command", "entrypoint")  # a later file replaces them; it adds to all others

UNSET = re.compile("\ue000([^\ue001]*)\ue001")  # stands for a variable that is not set here
_LITERAL = re.compile(r"\$(?:\$|(?![A-Za-z_{]))")
_HIDDEN: dict[str, str | int | None] = {"$": "\ue002", "{": "\ue003", "}": "\ue004"}  # in what is filled in
_SHOWN = str.maketrans({str(hidden): shown for shown, hidden in _HIDDEN.items()})

# With no other one inside.
_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?[-?+])((?:[^${}]|\{(?:[^${}]|\{[^${}]*\})*\})*))?\})", re.ASCII
)
_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([\w.-]+)[ \t]*=[ \t]*(?:'([^']*)'|\"((?:[^\"\\]|\\[^\0])*)\"|(.*?)(?:[ \t]#.*)?$)", re.M
)


def fill(value: Any, known: Mapping[str, str], source: str) -> Any:
    """A value, all values in it with their variables filled in. One that is not set stays, as `UNSET` finds it."""

    def of(found: re.Match[str]) -> str:
        name, operator, behind = found[1] or found[2], found[3] or "", found[4] or ""
        told = known.get(name)
        is_given = bool(told) if operator.startswith(":") else told is not None
        if operator.endswith("+" if is_given else "-"):
            return behind
        text = "" if operator.endswith("+") else (told or "") if is_given else f"\ue000{name}\ue001"
        return text.translate(str.maketrans(_HIDDEN))

    def filled(text: str) -> str:
        spelt = _LITERAL.sub("\ue002", text)
        for _ in range(MOST_LEVELS):
            before, (spelt,) = spelt, fill_pattern(_VARIABLE, of, [spelt], source)
            if spelt == before:
                break
        if "$" in spelt:
            odd = spelt[spelt.index("$") :][:30].translate(_SHOWN)
            raise SettingsError(f"{source}: Compose refuses `{odd}`: a $ that is the container's is $$")
        return spelt.translate(_SHOWN)

    return _each(value, filled)


def _spelt_again(value: Any) -> Any:
    """A value that is filled, as one that is to be filled."""
    return _each(value, lambda text: UNSET.sub(r"${\1}", text.replace("$", "$$")))


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """A value with all texts in it changed."""
    if isinstance(value, dict):
        return {name: _each(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_each(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


class _ComposeFile(NamedTuple):
    """Of a file."""

    path: Path
    folder: Path  # where its paths begin
    known: Mapping[str, str]

    def fill(self, value: Any) -> Any:
        return fill(value, self.known, str(self.path))

    def services(self, document: Mapping[str, Any]) -> dict[str, Any]:
        return {str(name): each for name, each in field_of(document, "services", dict, str(self.path)).items()}


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
        for place in (_ComposeFile(path, folder, known) for path in paths):
            for document in self._documents(place.path):
                own = place.services(document)
                extended = {name: self._extended(name, own, place) for name in own}
                included = self._included(field_of(document, "include", list, str(place.path)), place)
                services = _merged(services, {**included, **extended})
        return services

    def _documents(self, path: Path) -> list[dict[str, Any]]:
        self._left -= 1
        if self._left < 0:
            raise SettingsError(f"{path}: its project has more than {MOST_FILES} files")
        return read_yaml(read_text(path), str(path), TextLoader)

    def _included(self, entries: Sequence[Any], place: _ComposeFile) -> Mapping[str, Any]:
        """The services of other projects, whose variables have files of their own."""
        services: dict[str, Any] = {}
        for entry in place.fill(entries):
            given = entry if isinstance(entry, dict) else {"path": entry}
            paths, env_files = (_paths(given.get(name), place.folder) for name in ("path", "env_file"))
            if not paths:
                raise SettingsError(f"{place.path}: `include:` names no path")
            folder = place.folder / str(given.get("project_directory") or paths[0].parent)
            known = _known(folder, env_files, place.known)
            services |= _spelt_again(fill(self._merged_files(paths, folder, known), known, str(place.path)))
        return services

    def _extended(self, name: str, services: Mapping[str, Any], place: _ComposeFile, levels: int = 20) -> Any:
        """A service with what it is based on."""
        own = _canonical(services[name], place)
        if not isinstance(own, dict) or not (extends := own.pop("extends", None)):
            return own
        reference = place.fill(extends if isinstance(extends, dict) else {"service": extends})
        wanted = str(reference.get("service"))
        if file := reference.get("file"):
            path = place.folder / str(file)
            place = place._replace(path=path, folder=path.parent)
            services = {
                each: said for document in self._documents(path) for each, said in place.services(document).items()
            }
        if not levels or wanted not in services:
            why = "is not there" if levels else "extends itself"
            raise SettingsError(f"{place.path}: {name} extends {wanted}, which {why}")
        return _merged(_merged(None, self._extended(wanted, services, place, levels - 1)), own)


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


def _canonical(service: Any, place: _ComposeFile) -> Any:
    """A service whose fields of two spellings have one."""
    if not isinstance(service, dict):
        return service
    own, files = service.get("environment"), service.get("env_file")
    if isinstance(own, list):
        own = {name: value if equals else None for name, equals, value in (str(each).partition("=") for each in own)}
    if isinstance(own, dict):  # a name alone is that of a variable here
        own = {name: f"${{{name}-}}" if value is None else value for name, value in own.items()}
    if isinstance(files, str | list):
        files = [str(path) for path in _paths(place.fill(files), place.folder)]
    return {**service, "environment": own, "env_file": files}


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
            found[name] = literal or UNSET.sub("", fill(text, {**known, **found}, str(path)))
    return found


def _found_with(path: Path, known: Mapping[str, str]) -> list[Path]:
    """The files that Compose merges where it finds this one by itself."""
    separator = known.get("COMPOSE_PATH_SEPARATOR") or os.pathsep
    listed = [path.parent / each for each in known.get("COMPOSE_FILE", "").split(separator)]
    if path in listed:
        return listed
    beside = [each for name in OVERRIDES if (each := path.with_name(name)).is_file()]
    return [path, *(beside[:1] if path.name in NAMES else ())]
