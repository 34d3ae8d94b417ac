"""The command of a script that starts vLLM: `vllm serve`, or the `docker run` of an image that does.

What may hide the image or the model is refused, with what to write instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from proxy.commands.shell import Script, ShellCommand, Word
from proxy.errors import SettingsError

LAUNCHER = "launch-cluster.sh"  # of spark-vllm-docker, which also starts a command that it is given

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash", "su", "sg", "script")  # which take a script behind -c
_GIVEN_SCRIPTS = ("eval", "tmux", "screen")
_SAYING = ("echo", "printf", "grep", "pgrep", "pkill", "which", "type", "man", "alias", "set")

# What starts a command where this machine's files and environments do not count.
_ELSEWHERE = re.compile(
    r"docker|podman|nerdctl|kubectl|oc|ssh|apptainer|singularity|enroot|lxc|incus|wsl|distrobox|toolbox|uvx|tool"
)

# Of `docker run`, those without a value; letters can stand together. All others take the next word.
_LETTERS = "ditPq"
_SWITCHES = re.compile(
    "--(rm|init|detach|interactive|tty|privileged|read-only|publish-all|quiet|oom-kill-disable|no-healthcheck|sig-proxy"
    f"|disable-content-trust|use-api-socket|replace|rmi|env-host|no-hosts|no-hostname|unsetenv-all)|-[{_LETTERS}]?"
)
_SHORT = re.compile(f"-[{_LETTERS}]*([A-Za-z])=?(.*)", re.S)  # -p 80:80, -dp 80:80, -p80:80

# What starts something else in a container than the image's own entrypoint does.
_PROGRAM = re.compile(r"(?:^|/)(?:(?:ba|da|z|k|a)?sh|python[\d.]*)$|\.(?:sh|py)$")

_IMAGE = re.compile(r"vllm|\$.*(?:image|img|container)|[^/]:[\w.-]+$|@sha256:", re.I)
_NAMED = re.compile(r"\$\{?([A-Za-z_]\w*)")

# Why nothing is found in a text, by what it holds.
_INSTEAD = {
    r"docker[ -]compose": "no `vllm serve` in it, but docker compose: give the compose file",
    r"\b(ssh|kubectl|srun)\b": "no `vllm serve` that runs here; give what starts it on the machine where it does",
    "": "no `vllm serve` among its commands, and no `docker run`",
}
_INSTEAD_OF = {"compose": "the compose file", "vllm": "`vllm serve` of an environment that stays"}
_NO_SHELL = re.compile(r"\.(ps1|bat|cmd|fish|py|json|toml|container)$|(Docker|Container|Make|just)file[^/]*$")


class Start(NamedTuple):
    """A command that starts vLLM, or a container with it."""

    command: Sequence[Word]
    behind: int  # where the arguments begin
    outer: ShellCommand  # of the script itself, in whose quotes it may stand
    is_quoted: bool
    variables: Mapping[str, str]  # that are set before it, and for it
    python: str  # how Python is called in its environment
    script: Script
    is_container: bool
    run: DockerRun | None = None  # of the container that it is in

    @property
    def words(self) -> Sequence[Word]:
        return self.command[self.behind :]


class DockerRun(NamedTuple):
    start: Start
    options: Sequence[Word]
    values: Sequence[tuple[str, str]]  # of options, by their names
    image: Word
    arguments: Sequence[Word]  # behind the image
    is_shell: bool = False  # which starts vLLM there

    @property
    def program(self) -> str:
        """Docker or podman, with what it is run by."""
        before = [word.value for word in self.start.command[: self.start.behind - 1]]
        words = " ".join(before).removesuffix(" container")
        found = re.search(r"(?:sudo (?:-\S+ )*)?\S+$", words)
        return found[0] if found else words

    def given(self, *names: str) -> list[str]:
        return [value for name, value in self.values if name in names]


def start_of(text: str, known: Mapping[str, str] | None, source: str) -> Start:
    """The one that starts vLLM. `known` is None: no variable is filled in. Raises `SettingsError`, also if it hides."""
    if _NO_SHELL.search(source) or re.match(r"#!.*(?:python|perl|node|fish|pwsh)", text):
        raise SettingsError(f"{source} is no script of a shell; give the line that starts vLLM, in quotes")
    starts = [*_starts(Script(text, known, source))]
    containers = [each for each in starts if each.is_container]
    if len(starts) > 1:
        of_vllm = [each for each in containers if _is_of_vllm(each)]
        containers = of_vllm if of_vllm or len(containers) < len(starts) else containers
    if len(containers) > 1:
        raise SettingsError(f"{source}: more than one `docker run` in it; setup takes one: give a copy that has one")
    return _served(_docker_run(containers[0])) if containers else _the_one(starts, text, source)


def _the_one(starts: Sequence[Start], text: str, source: str) -> Start:
    served = [each for each in starts if not each.is_container]
    if len(served) != 1:
        instead = next(words for pattern, words in _INSTEAD.items() if re.search(pattern, text))
        many = "more than one `vllm serve` in it; setup takes one: give a copy that has one"
        raise SettingsError(f"{source}: {many if served else instead}")
    (start,) = served
    for word, following in pairwise(start.command[: start.behind]):
        if _ELSEWHERE.fullmatch(name := Path(word.value).name):
            cure = _INSTEAD_OF.get(following.value, "what makes the container, or run setup there")
            raise SettingsError(f"{source}: `{name} {following.value}` starts vLLM, which is not read; give {cure}")
    return _with_a_model(start)


def _starts(script: Script, outer: ShellCommand | None = None, python: str = "python3") -> Iterator[Start]:
    for command in script.commands():
        values = [word.value for word in command.words]
        names = [Path(value).name for value in values]
        is_read = values[0] in ("source", ".")
        if is_read and names[-1] == "activate":
            python = f"{values[-1].removesuffix('activate')}python"
        elif is_read:
            script.sourced += values[1:2]
        elif values[1:2] == ["activate"]:
            python = f"{values[0]} run -n {values[-1]} python"
        if names[0] in _SAYING:
            continue
        variables = {**script.variables, **command.variables}
        at = next((number for number, name in enumerate(names) if name in ("docker", "podman")), len(names)) + 1
        at += names[at : at + 1] == ["container"]
        run = at + 1 if names[at : at + 1] == ["run"] else 0
        if behind := run or behind_serve(values):
            own, is_quoted = _python(values[:behind], python), outer is not None
            yield Start(command.words, behind, outer or command, is_quoted, variables, own, script, run > 0)
        for number in [] if behind else _scripts_in(values):
            word, *given = command.words[number:]
            inner = script.within(word, {**(script.known or {}), **variables}, given)
            yield from _starts(inner, outer or command, python)


def behind_serve(words: Sequence[str], before: str = "") -> int:
    """Where vLLM's arguments begin in a command, which follows the word `before`; 0 if it does not start vLLM."""
    for number, (last, word) in enumerate(pairwise([before, *words])):
        if word == "serve" and (Path(last).name == "vllm" or last == "vllm.entrypoints.cli.main"):
            return number + 1
        if word in ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"):
            return number + 1
    return 0


def _scripts_in(values: Sequence[str]) -> list[int]:
    if Path(values[0]).name in _GIVEN_SCRIPTS:
        return [number for number, value in enumerate(values) if number and " " in value]
    shell = next((number for number, value in enumerate(values) if Path(value).name in _SHELLS), len(values))
    flags = range(shell + 1, len(values) - 1)
    return [flag + 1 for flag in flags if re.fullmatch(r"-[a-z]*c", values[flag])][:1]


def _python(words: Sequence[str], activated: str) -> str:
    """How Python is called where a command runs that begins with these words."""
    if "uv" in [Path(word).name for word in words]:
        return "uv run python"
    if "-m" in words:
        return words[words.index("-m") - 1]
    if "run" in words and {"-n", "-p"} & {*words}:  # conda's
        return f"{' '.join(words[:-2])} python"
    program = "".join(words[-2:-1])
    return f"{program.removesuffix('vllm')}python" if "/" in program else activated


def _is_of_vllm(start: Start) -> bool:
    words = start.words
    with suppress(SettingsError):  # which is said if it is the one
        run = _docker_run(start)
        words = [run.image, *run.arguments]
    return any("vllm" in word.value.lower() for word in words)


def _docker_run(start: Start) -> DockerRun:
    words, at, hiding, source = start.words, 0, "", start.script.source
    given: list[tuple[str, str]] = []
    while at < len(words):
        option, following = words[at].value, [word.value for word in words[at + 1 : at + 2]]
        if words[at].several and not _IMAGE.search(option):
            hiding = hiding or option
        elif not option.startswith("-"):
            break
        else:
            short = _SHORT.fullmatch(option)
            name, is_set, value = (f"-{short[1]}", short[2], short[2]) if short else option.partition("=")
            takes_next = not is_set and not _SWITCHES.fullmatch(name)
            given.append((name, "".join(following) if takes_next else value))
            at += takes_next
        at += 1
    options, left = words[:at], words[at + 1 :]
    if hiding and not (words[at:] and (_IMAGE.search(words[at].value) or behind_serve([word.value for word in left]))):
        cure = "write it as a word of its own: docker run ... vllm/vllm-openai:v0.33.0 ..."
        raise SettingsError(f"{source}: the image may be in {hiding}, which is not seen here; {cure}")
    if at >= len(words):
        raise SettingsError(f"{source}: `docker run` names no image; a comment between its lines would end it")
    return DockerRun(start, options, given, words[at], left)


def _served(run: DockerRun) -> Start:
    script, words, values = run.start.script, run.arguments, [word.value for word in run.arguments]
    entrypoint = ["", *run.given("--entrypoint")][-1]
    for number in _scripts_in([entrypoint, *values]):
        told = dict(each.partition("=")[::2] for each in run.given("-e", "--env") if "=" in each)
        starts = [*_starts(script.within(words[number - 1], told, words[number:]), run.start.outer)]
        return _the_one(starts, values[number - 1], script.source)._replace(run=run._replace(is_shell=True))
    skipped = behind_serve(values, entrypoint) or int(values[:1] == ["serve"] and not entrypoint)
    program = entrypoint or "".join(values[:1])
    if "engine_patches" in values:
        raise SettingsError(f"{script.source} has Seamark's plugin already; ask `seamark doctor --worker URL`")
    if not skipped and (entrypoint or _PROGRAM.search(program) or not values):
        what = f"what {program} starts is not seen here" if program else "nothing says which model vLLM serves"
        raise SettingsError(f"{script.source}: {what}; write `vllm serve MODEL` and its flags")
    return _with_a_model(run.start._replace(command=words, behind=skipped, is_container=False, run=run))


def _with_a_model(start: Start) -> Start:
    """Raises `SettingsError` if the model is not seen, or may be in what is not."""
    if start.script.known is None:
        return start
    words, source = start.words, start.script.source
    named = [word for flag, word in pairwise(words) if flag.value == "--model"]
    named += [word for word in words if word.value.startswith("--model=")]
    named += [word for word in words[:1] if not named and not word.value.startswith("-")]
    last = named[0].value.rstrip("/").rpartition("=")[2].rpartition("/")[2] if named else ""
    if named and not last:
        raise SettingsError(f"{source}: the model is empty as it is read here; {how_to_say('', source)}")
    if last:
        own = last if "$" in last else ""  # which nobody fills in
        hiding = next((each for each in named[0].unseen if each.rpartition("/")[2] in last), own)
    else:
        hiding = next((each for word in words if word.several for each in word.unseen), "")
    if hiding:
        cure = how_to_say(hiding, source, start.script.names)
        raise SettingsError(f"{source}: the model may be in {hiding}, which is not seen here; {cure}")
    if not last:
        raise SettingsError(f"{source}: nothing says which model vLLM serves; write it behind `vllm serve`")
    return start


def how_to_say(unseen: str, source: str, own: Container[str] = ()) -> str:
    """The cure for an expansion that has to be seen. `own`: names that the script sets itself."""
    name = _NAMED.search(unseen)
    if name and name[1] not in own and "[" not in unseen and os.path.isfile(source):
        return f"set it for this command, too: {name[1]}=... seamark setup {source}"
    if name and source == "the command":
        return f"write it out, or set it before: export {name[1]}=..."
    return "write it out in a copy, as a default (${1:-VALUE}) or a word, and give that to seamark setup"
