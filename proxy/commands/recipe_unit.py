"""A unit of systemd with its drop-ins, read as systemd reads them (systemd.syntax): what it starts, and with which
variables.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from proxy.commands.recipe import Recipe, RecipeKind, of_text
from proxy.commands.recipe_text import read_text
from proxy.errors import SettingsError

USER_UNITS = "~/.config/systemd/user"
UNITS = (
    *("/etc/systemd/system", USER_UNITS, "/run/systemd/system"),
    *(f"{folder}/systemd/system" for folder in ("/usr/local/lib", "/usr/lib", "/lib")),
)
DROP_IN = "seamark.conf"

_STARTS = re.compile(r"vllm\s+serve\s|vllm\.entrypoints\.|\b(?:docker|podman)\s+(?:container\s+)?run\s")
_WORD = re.compile(r"(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^\s'\"\\])+", re.S)
_ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|[0-7]{3}|.)|['\"]", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "s": " "}


class Unit(NamedTuple):
    name: str  # such as vllm.service
    path: Path
    prefix: str  # of the command, such as `-`
    command: str  # as it is spelt
    kind: RecipeKind  # of what it starts
    script: str  # that it starts, as it is spelt; empty: a command
    script_path: Path
    user: str
    is_of_user: bool  # of a user's own manager
    known: Mapping[str, str]  # variables


def unit_file(given: str) -> Path | None:
    """The file of a unit that is given by a path, or by its name alone; that of an instance is its template's."""
    folders = [os.path.dirname(given) or "."] + ([] if "/" in given else [os.path.expanduser(each) for each in UNITS])
    names = (os.path.basename(given), re.sub(r"@[^@]*\.service$", "@.service", os.path.basename(given)))
    found = (Path(folder) / name for folder in folders for name in names)
    return next((path for path in found if given.endswith(".service") and path.is_file()), None)


def of_unit(path: Path, name: str) -> Recipe:
    """Of the unit of a name in a file. Raises `SettingsError`."""
    source = str(path)
    drop_ins = _drop_ins(path, name)
    if any(each.name == DROP_IN for each in drop_ins):
        raise SettingsError(f"{source} has Seamark's drop-in already; undo.sh takes it away")
    settings = _settings([path, *drop_ins])
    commands = settings.get("Service.ExecStart", [])
    if len(commands) != 1 or "@.service" in name:
        cure = f"give an instance: {name.replace('@.', '@NAME.')}" if "@.service" in name else "setup takes one"
        raise SettingsError(f"{source}: {len(commands)} commands in ExecStart=; {cure}")
    prefix, command = re.match(r"([@:+!|-]*)(.*)", commands[0], re.S).groups()  # type: ignore[union-attr]  # fits all
    user = (settings.get("Service.User") or [""])[-1]
    instance = name.partition("@")[2].removesuffix(".service")
    filled = {
        "%": "%",
        "n": name,
        "N": name.removesuffix(".service"),
        "i": instance,
        "I": instance,
        "u": user or "root",
    }
    filled |= {"p": re.split(r"@|\.service", name)[0], "h": os.path.expanduser(f"~{user or 'root'}")}

    def specified(text: str) -> str:
        return re.sub(r"%(.)", lambda found: filled.get(found[1], found[0]), text)

    known, missing = _variables(settings, specified)
    notes = [f"{each} cannot be read here, and what it sets is not seen" for each in missing]
    notes += [f"{each} is read with it" for each in drop_ins]
    outside = {**(os.environ if missing else {}), **known}
    text, script, path_of_it = specified(command).replace("$$", "$"), "", path
    if not _STARTS.search(f"{text} "):
        folder = specified((settings.get("Service.WorkingDirectory") or [""])[-1]).lstrip("-")
        script, command = _script(text, folder, source), specified(command)
        path_of_it = Path(folder, script).absolute()
        text = read_text(path_of_it)
    inner = of_text(text, source, path.stem, outside)
    if odd := re.search(r"%\w", inner.model):
        raise SettingsError(f"{source}: the model has systemd's {odd[0]}, which is not seen here; write it out")
    is_of_user = path.resolve().is_relative_to(os.path.expanduser(USER_UNITS))
    unit = Unit(name, path.resolve(), prefix, command, inner.kind, script, path_of_it, user, is_of_user, outside)
    own = {**known, **inner.environment} if inner.kind is RecipeKind.COMMAND else inner.environment
    program = re.sub(r"\S*/", "", inner.program)
    return replace(
        inner, kind=RecipeKind.UNIT, program=program, environment=own, document=unit, notes=[*inner.notes, *notes]
    )


def _drop_ins(path: Path, name: str) -> list[Path]:
    """Those beside it; of a unit that systemd finds, those of all places where it looks. The first of a name counts."""
    places = [Path(os.path.expanduser(each)) for each in UNITS]
    folders = [path.parent, *(places if path.parent.absolute() in places else ())]
    found: dict[str, Path] = {}
    for folder in (each / f"{of}.d" for of in dict.fromkeys((name, path.name)) for each in folders):
        for drop_in in folder.glob("*.conf"):
            found.setdefault(drop_in.name, drop_in)
    return [found[each] for each in sorted(found)]


def _settings(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Values by section and name; an empty one takes those before it away."""
    found: dict[str, list[str]] = {}
    for path in paths:
        section = ""
        for line in _lines(read_text(path)):
            if line.startswith("["):
                section = line.strip("[] ")
            name, equals, value = (each.strip() for each in line.partition("="))
            if equals:
                key = f"{section}.{name}"
                found[key] = [*found.get(key, ()), value] if value else []
    return found


def _lines(text: str) -> Iterator[str]:
    """Without comments, and with those that go on in one."""
    kept = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(("#", ";")))
    yield from (line.strip() for line in re.sub(r"[ \t]*\\\n[ \t]*", " ", kept).split("\n"))


def _variables(
    settings: Mapping[str, Sequence[str]], specified: Callable[[str], str]
) -> tuple[dict[str, str], list[str]]:
    """Those of the unit, and the files of which nothing is seen."""
    known: dict[str, str] = {}
    missing: list[str] = []
    for given in settings.get("Service.Environment", ()):
        words = (_ESCAPED.sub(_unescaped, word) for word in _WORD.findall(specified(given)))
        known |= dict(word.partition("=")[::2] for word in words)
    for given in settings.get("Service.EnvironmentFile", ()):
        pattern = specified(given).removeprefix("-")
        for path in sorted(glob.glob(pattern)) or [pattern]:
            try:
                lines = [*_lines(read_text(Path(path)))]
            except SettingsError:
                if os.path.exists(path) or not given.startswith("-"):
                    missing.append(path)
                continue
            pairs = (line.partition("=") for line in lines if "=" in line)
            known |= {name.strip(): _ESCAPED.sub(_unescaped, value.strip()) for name, _, value in pairs}
    return known, missing


def _unescaped(found: re.Match[str]) -> str:
    """A quote is no part of a word, and an escape is what it stands for."""
    code = found[1] or ""
    if len(code) > 1:
        return chr(int(code[1:], 16) if code.startswith("x") else int(code, 8))
    return _ESCAPES.get(code, code)


def _script(command: str, folder: str, source: str) -> str:
    """The script that is started. Raises `SettingsError` if it is not here."""
    if re.search(r"docker[ -]compose\s", command):
        where = f"cd {shlex.quote(folder)} && " if folder else ""
        raise SettingsError(f"{source}: it runs docker compose; give that: {where}seamark setup {shlex.quote(command)}")
    words: list[str] = []
    with suppress(ValueError):
        words = [word for word in shlex.split(command) if "/" in word and not re.search(r"/(?:ba|da)?sh$|/env$", word)]
    if not words or not os.path.isfile(os.path.join(folder, words[0])):
        raise SettingsError(f"{source}: it starts `{command[:64]}`, which is not here; give what that runs, the script")
    return words[0]
