"""The units that make a systemd unit hit, a drop-in and the gateway's own, and the commands that install them.

The user's unit stays as it is; `undo.sh` takes away what was put beside it.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import sys
from pathlib import Path

from proxy.commands.recipe_unit import DROP_IN, UNITS, Unit

GATEWAY_UNIT, SCRIPT = "seamark-gateway.service", "seamark.sh"
NOT_INSTALLED, HAS_PLUGIN = "# unit was not installed", "# plugin was installed"  # lines of the list of files

_HIDDEN = "\ue002"  # a dollar that is none of systemd's variables
_HARDENED = re.compile(r"(?s)\n# No home.*?\n\n")  # what a user's own manager cannot do


def command_line(unit: Unit) -> str:
    """Its command as a line that a shell takes for the same, to be edited."""
    return unit.command.replace("$$", _HIDDEN)


def drop_in(unit: Unit, line: str) -> str:
    """Starts a line in place of the unit's command; an empty one: `SCRIPT` in place of the unit's script."""
    folder = "%h/.config/systemd/user" if unit.is_of_user else UNITS[0]
    line = line.replace(_HIDDEN, "$$") or unit.command.replace(
        unit.script or unit.command, f"{folder}/{unit.name}.d/{SCRIPT}"
    )
    return f"# In place of the command of {unit.name}.\n[Service]\nExecStart=\nExecStart={unit.prefix}{line}\n"


def gateway_unit(product: str, unit: Unit, settings: Path) -> str:
    """`product`: the unit that Seamark comes with. It starts and is wanted where vLLM's unit is."""
    text = product[product.index("[Unit]") :]
    user, place = gateway_user(unit), str(settings).replace("%", "%%")
    config = _spelt(str(settings)) if unit.is_of_user else f"${{CREDENTIALS_DIRECTORY}}/{settings.name}"
    own = {
        "After": f"network-online.target {unit.name}",
        "ExecStart": f"{_spelt(sys.executable)} -m proxy.cli serve --config {config}",
        "DynamicUser": f"no\nUser={user}" if user else "yes",
        "ProtectHome": "read-only",
        "WantedBy": unit.name,
    }
    if unit.is_of_user:
        text = _HARDENED.sub("\n", text)
    for name, value in own.items():
        text = re.sub(rf"(?m)^{name}=.*$", lambda found: f"{found[0].partition('=')[0]}={value}", text)  # noqa: B023
    kept = [line for line in text.splitlines() if not re.match(r"#|Environment|Documentation", line)]
    credential = [] if unit.is_of_user else [f"LoadCredential={settings.name}:{place}"]  # which its user need not read
    kept[kept.index("[Service]") + 1 : 0] = credential
    return "\n".join([f"# The gateway before {unit.name}.", *kept, ""])


def gateway_user(unit: Unit) -> str:
    """The unit's user if Seamark is where others may read it, else who has it; empty: none that is there."""
    paths = [Path(each).absolute() for each in (sys.executable, __file__)]
    folders = {folder for path in paths for each in (path, path.resolve()) for folder in each.parents}
    are_open = all(folder.stat().st_mode & 0o005 == 0o005 for folder in folders)
    return "" if unit.is_of_user else unit.user if are_open else pwd.getpwuid(os.getuid()).pw_name


def plugin_lines(python: str, install: str, listed: str) -> list[str]:
    """What puts the plugin into the environment of an interpreter, if it is not there."""
    return [
        f"if [ -x {python} ] && ! {python} -c 'import engine_patches' 2> /dev/null; then",
        f"    $sudo {install} || {{ echo 'install it in another way, then go on here' >&2; exit 1; }}",
        f"    echo '{HAS_PLUGIN}' >> {listed}",
        "fi",
    ]


def undo_plugin_lines(python: str, listed: str) -> list[str]:
    uninstall = f"{python} -m pip uninstall -y vllm-seamark"
    return [f"if grep -qx '{HAS_PLUGIN}' {listed}; then $sudo {uninstall} || true; fi"]


def install_lines(unit: Unit, listed: str, ran: str, *, has_script: bool) -> list[str]:
    """In a folder with the list of files `listed`; `ran`: a line of that if the unit did before."""
    name, journal = shlex.quote(unit.name), _systemctl(unit).replace("systemctl", "journalctl")
    place = f'"$units"/{name}.d/{SCRIPT}'
    script = [f"$sudo install -D -m 755 {SCRIPT} {place}"] if has_script else []
    if unit.script:  # whose owner and mode it gets
        script += [f"$sudo cp -p {shlex.quote(str(unit.script_path))} {place}", f"$sudo cp {SCRIPT} {place}"]
    return [
        f'if [ -e "$units"/{GATEWAY_UNIT} ] && ! cmp -s {GATEWAY_UNIT} "$units"/{GATEWAY_UNIT}; then',
        f'    echo "$units/{GATEWAY_UNIT} is another gateway\'s; take that away first" >&2',
        "    exit 1",
        "fi",
        f'if [ ! -e "$units"/{name}.d/{DROP_IN} ] && $systemctl is-active --quiet {name}; then',
        f"    echo '{ran}' >> {listed}",
        "fi",
        f"if ! $systemctl cat {name} > /dev/null 2>&1; then",
        f'    $sudo install -D -m 644 {shlex.quote(str(unit.path))} "$units"/{name}',
        f"    echo '{NOT_INSTALLED}' >> {listed}",
        "fi",
        *script,
        f'$sudo install -D -m 644 {DROP_IN} "$units"/{name}.d/{DROP_IN}',
        f'$sudo install -m 644 {GATEWAY_UNIT} "$units"/{GATEWAY_UNIT}',
        "$sudo $systemctl daemon-reload",
        f"$sudo $systemctl enable {GATEWAY_UNIT}",
        f"$sudo $systemctl restart {name} {GATEWAY_UNIT}",
        f"echo 'what they say: {journal} -f -u {unit.name} -u {GATEWAY_UNIT}'",
    ]


def undo_lines(unit: Unit, listed: str, ran: str) -> list[str]:
    """What takes back `install_lines`, if they were run."""
    name = shlex.quote(unit.name)
    return [
        f'if [ -e "$units"/{name}.d/{DROP_IN} ]; then',
        f"    $sudo $systemctl disable --now {GATEWAY_UNIT} || true",
        f'    $sudo rm -f "$units"/{GATEWAY_UNIT} "$units"/{name}.d/{DROP_IN} "$units"/{name}.d/{SCRIPT}',
        f'    $sudo rmdir "$units"/{name}.d 2> /dev/null || true',
        f"    if grep -qx '{ran}' {listed}; then again=restart; else again=stop; fi",
        f"    if grep -qx '{NOT_INSTALLED}' {listed}; then",
        f'        $sudo $systemctl stop {name}; $sudo rm -f "$units"/{name}',
        "    fi",
        "    $sudo $systemctl daemon-reload",
        f"    $sudo $systemctl $again {name} || true",
        "fi",
    ]


def places(unit: Unit) -> list[str]:
    """Variables of the lines of this module."""
    units = '"$HOME"/.config/systemd/user' if unit.is_of_user else UNITS[0]
    root = "sudo=" if unit.is_of_user else 'if [ "$(id -u)" = 0 ]; then sudo=; else sudo=sudo; fi'
    return [f"units=${{SEAMARK_UNITS:-{units}}}", root, f"systemctl='{_systemctl(unit)}'"]


def _systemctl(unit: Unit) -> str:
    return "systemctl --user" if unit.is_of_user else "systemctl"


def _spelt(path: str) -> str:
    """As a word of systemd's."""
    text = path.replace("%", "%%").replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    return text if re.fullmatch(r"[\w./+@%:-]+", text) else f'"{text}"'
