"""A unit of systemd with its drop-ins, read as systemd reads them (systemd.syntax), and the two that make it hit.

The user's unit stays as it is: a drop-in and the gateway's own unit are put beside it, and `undo.sh` takes them away.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from proxy.commands.recipe import Recipe, RecipeKind, of_text, starts_vllm
from proxy.commands.recipe_compose import env_file
from proxy.commands.recipe_text import read_text
from proxy.errors import SettingsError

SYSTEM_UNITS, USER_UNITS = "/etc/systemd/system", "~/.config/systemd/user"
DROP_IN, SCRIPT = "seamark.conf", "seamark.sh"
ROOT = 'if [ "$(id -u)" = 0 ]; then sudo=; else sudo=sudo; fi'  # for the lines of this module

_CHANGED = re.compile(r"(?m)^(?:#|Environment|Documentation|ExecStart|DynamicUser|ProtectHome|WantedBy).*\n")


class Unit(NamedTuple):
    name: str  # such as vllm.service
    prefix: str  # of the command, such as `-`
    command: str  # as it is spelt
    kind: RecipeKind  # of what it starts
    script: str  # that it starts, as it is spelt; empty: a command
    script_path: Path


def unit_file(path: Path) -> Path | None:
    """The file of a unit that is given by a path, or by its name alone; that of an instance is its template's."""
    elsewhere = (SYSTEM_UNITS, "/usr/lib/systemd/system", os.path.expanduser(USER_UNITS))
    folders = [path.parent, *(map(Path, elsewhere) if path == Path(path.name) else ())]
    template = re.sub(r"@[^@]*\.service$", "@.service", path.name)
    found = (folder / name for folder in folders for name in (path.name, template) if path.suffix == ".service")
    return next(filter(os.path.isfile, found), None)


def of_unit(path: Path, name: str) -> Recipe:
    """Of the unit of a name in a file. Raises `SettingsError`."""
    source = str(path)
    if path.resolve().is_relative_to(os.path.expanduser(USER_UNITS)):
        cure = "give what its ExecStart= runs, in quotes"
        raise SettingsError(f"{source} is of systemctl --user, for which nothing is written; {cure}")
    folders = [folder / f"{of}.d" for of in (path.name, name) for folder in (Path(SYSTEM_UNITS), path.parent)]
    by_name = {each.name: each for folder in folders for each in folder.glob("*.conf")}  # the last one of a name counts
    drop_ins = [by_name[each] for each in sorted(by_name)]
    if DROP_IN in by_name:
        raise SettingsError(f"{source} has Seamark's drop-in already; undo.sh takes it away")
    settings = _settings([path, *drop_ins])
    commands = settings.get("ExecStart", [])
    if len(commands) != 1 or "@.service" in name:
        cure = f"give an instance: {name.replace('@.', '@NAME.')}" if "@.service" in name else "setup takes one"
        raise SettingsError(f"{source}: {len(commands)} commands in ExecStart=; {cure}")
    prefix, command = re.match(r"([@:+!|-]*)(.*)", commands[0], re.S).groups()  # type: ignore[union-attr]  # fits all
    whole = name.removesuffix(".service")
    first, _, instance = whole.partition("@")
    filled = {"%": "%", "n": name, "N": whole, "p": first, "i": instance, "I": instance, "u": "root", "h": "/root"}

    def specified(text: str) -> str:
        return re.sub(r"%(.)", lambda found: filled.get(found[1], found[0]), text)

    known: dict[str, str] = {}
    missing: list[Path] = []
    for given in settings.get("Environment", ()):
        with suppress(ValueError):  # a quote that is not closed, for which systemd ignores it
            known |= dict(word.partition("=")[::2] for word in shlex.split(specified(given)))
    for given in settings.get("EnvironmentFile", ()):
        file = Path(specified(given).removeprefix("-"))
        if os.access(file, os.R_OK):
            known |= env_file(file, None)
        elif os.path.exists(file) or not given.startswith("-"):
            missing.append(file)
    notes = [f"{each} cannot be read here, and what it sets is not seen" for each in missing]
    notes += [f"{each} is read with it" for each in drop_ins]
    outside = {**(os.environ if missing else {}), **known}
    text, script, script_path = specified(command).replace("$$", "$"), "", path
    if not starts_vllm(text):
        folder = specified("".join(settings.get("WorkingDirectory", [])[-1:])).lstrip("-")
        script, command = _script(text, folder, source), specified(command)
        script_path = Path(folder, script).absolute()
        text = read_text(script_path)
    inner = of_text(text, source, path.stem, outside)
    unit = Unit(name, prefix, command, inner.kind, script, script_path)
    own = {**known, **inner.environment} if inner.kind is RecipeKind.COMMAND else inner.environment
    program, notes = inner.program.rpartition("/")[2], [*inner.notes, *notes]
    return replace(inner, kind=RecipeKind.UNIT, program=program, environment=own, document=unit, notes=notes)


def _settings(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Values of [Service] by name; an empty one takes those before it away."""
    found: dict[str, list[str]] = {}
    for path in paths:
        section = ""
        text = re.sub(r"(?m)^[ \t]*[#;].*\n?", "", read_text(path))
        for line in re.sub(r"[ \t]*\\\n[ \t]*", " ", text).split("\n"):
            name, equals, value = (each.strip() for each in line.partition("="))
            section = name if name.startswith("[") else section
            if equals and section == "[Service]":
                found[name] = [*found.get(name, ()), value] if value else []
    return found


def _script(command: str, folder: str, source: str) -> str:
    """The script that is started. Raises `SettingsError` if it is not here."""
    if re.search(r"docker[ -]compose\s", command):
        where = f"cd {shlex.quote(folder)} && " if folder else ""
        raise SettingsError(f"{source}: it runs docker compose; give that: {where}seamark setup {shlex.quote(command)}")
    words = [word for word in re.split(r"[\s'\"]+", command) if re.search(r"/(?!(?:(?:ba|da)?sh|env)$)[^/]*$", word)]
    if not words or not os.path.isfile(os.path.join(folder, words[0])):
        raise SettingsError(f"{source}: it starts `{command[:64]}`, which is not here; give what that runs, the script")
    return words[0]


def drop_in(unit: Unit, line: str) -> str:
    """Starts a line in place of the unit's command; an empty one: `SCRIPT` in place of the unit's script."""
    line = line or unit.command.replace(unit.script or unit.command, _beside(unit, SCRIPT))
    return f"# In place of the command of {unit.name}.\n[Service]\nExecStart=\nExecStart={unit.prefix}{line}\n"


def gateway_name(unit: Unit) -> str:
    return f"seamark-{unit.name}"


def gateway_unit(product: str, unit: Unit, settings: Path) -> str:
    """`product`: the unit that Seamark comes with. This one starts and is wanted where vLLM's unit is."""
    python = sys.executable.replace("%", "%%").replace("$", "$$")
    return f"""\
# The gateway before {unit.name}, as who has Seamark; it need not read its settings' file itself.
{_CHANGED.sub("", product).strip()}
WantedBy={unit.name}

[Unit]
After={unit.name}

[Service]
LoadCredential={settings.name}:{str(settings).replace("%", "%%")}
ExecStart="{python}" -m proxy.cli serve --config ${{CREDENTIALS_DIRECTORY}}/{settings.name}
User={os.stat(sys.prefix).st_uid}
ProtectHome=read-only
"""


def install_lines(unit: Unit, *, has_script: bool) -> list[str]:
    name, gateway = shlex.quote(unit.name), shlex.quote(gateway_name(unit))
    script, conf = (shlex.quote(_beside(unit, each)) for each in (SCRIPT, DROP_IN))
    first = [f"$sudo install -D -m 755 {SCRIPT} {script}"] if has_script else []
    if unit.script:  # whose owner and mode it gets
        first += [f"$sudo cp -p {shlex.quote(str(unit.script_path))} {script}", f"$sudo cp {SCRIPT} {script}"]
    return [
        f"systemctl cat {name} > /dev/null",
        *first,
        f"$sudo install -D -m 644 {DROP_IN} {conf}",
        f"$sudo install -m 644 {gateway} {shlex.quote(SYSTEM_UNITS)}",
        "$sudo systemctl daemon-reload",
        f"$sudo systemctl enable {gateway}",
        f"$sudo systemctl restart {name} {gateway}",
        f"echo 'what they say: journalctl -f -u {unit.name} -u {gateway_name(unit)}'",
    ]


def undo_lines(unit: Unit) -> list[str]:
    """What takes back `install_lines`, if they were run."""
    name, gateway = shlex.quote(unit.name), shlex.quote(gateway_name(unit))
    ours = [f"{SYSTEM_UNITS}/{gateway_name(unit)}", _beside(unit, SCRIPT), _beside(unit, DROP_IN)]
    return [
        f"if [ -e {shlex.quote(ours[-1])} ]; then",
        f"    $sudo systemctl disable --now {gateway} || true",
        f"    $sudo rm -f {shlex.join(ours)}",
        f"    $sudo rmdir {shlex.quote(_beside(unit))} 2> /dev/null || true",
        "    $sudo systemctl daemon-reload",
        f"    $sudo systemctl try-restart {name} || true",
        "fi",
    ]


def _beside(unit: Unit, name: str = "") -> str:
    return f"{SYSTEM_UNITS}/{unit.name}.d/{name}"
