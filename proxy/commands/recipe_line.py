"""The command of a script that starts vLLM: `vllm serve`, or the `docker run` of an image that does.

What may hide the image or the model is refused, with what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from proxy.commands.shell import Command, Script, Word
from proxy.errors import SettingsError

LAUNCHER = "launch-cluster.sh"  # of spark-vllm-docker, which also starts a command that it is given

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash", "su", "sg", "script")  # which take a script behind -c
_GIVEN_SCRIPTS = ("eval", "tmux", "screen")
_SAYING = ("echo", "printf", "grep", "pgrep", "pkill", "which", "type", "man", "alias", "set")
_PROGRAMS = ("docker", "podman")

# What starts a command where this machine's files and environments do not count.
_ELSEWHERE = re.compile(
    r"docker|podman|nerdctl|kubectl|oc|ssh|apptainer|singularity|enroot|lxc|incus|wsl|distrobox|toolbox"
)

# Of `docker run`, those without a value; letters can stand together. All others take the next word.
_SWITCHES = re.compile(
    "--(rm|init|detach|interactive|tty|privileged|read-only|publish-all|quiet|oom-kill-disable|no-healthcheck|sig-proxy"
    "|disable-content-trust|use-api-socket|replace|rmi|env-host|no-hosts|no-hostname|unsetenv-all)"
)
_LETTERS = "ditPq"
_SHORT = re.compile(f"-[{_LETTERS}]*([A-Za-z])(.*)", re.S)  # -p 80:80, -dp 80:80, -p80:80

# Why nothing is found in a text, by what it holds.
_NOT_OF_A_SHELL = {
    r"docker[ -]compose": "no `vllm serve` in it, but docker compose: give the compose file",
    r"\b(ssh|kubectl|srun)\b": "no `vllm serve` that runs here; give what starts it on the machine where it does",
    r"^FROM\s": "no `vllm serve` that runs: an image is made by it; give the `docker run` of that, in quotes",
}

_IMAGE = re.compile(r"vllm|\$.*(?:image|img|container)|[^/]:[\w.-]+$|@sha256:", re.I)
_NAMED = re.compile(r"\$\{?([A-Za-z_]\w*)")


class Start(NamedTuple):
    """A command that starts vLLM, or a container."""

    words: Sequence[Word]
    behind: int  # where the arguments begin
    outer: Command  # of the script itself, in whose quotes it may stand
    is_quoted: bool
    is_container: bool
    variables: Mapping[str, str]  # that are set before it, and for it
    python: str  # how Python is called in its environment
    script: Script

    @property
    def arguments(self) -> Sequence[Word]:
        return self.words[self.behind :]


class ServeLine(NamedTuple):
    start: Start
    words: Sequence[Word]  # vLLM's arguments


class DockerRun(NamedTuple):
    start: Start
    program: str  # docker or podman, with what stands before it
    options: Sequence[Word]
    image: Word
    arguments: Sequence[Word]  # behind the image
    serve: ServeLine
    skipped: int  # so many of the arguments come before vLLM's own
    is_shell: bool  # vLLM is started by a shell in the container

    def given(self, *names: str) -> list[str]:
        """What is given for an option."""
        return [*options_of([word.value for word in self.options], names)]


def start_of(text: str, known: Mapping[str, str], source: str) -> ServeLine | DockerRun:
    """The one that starts vLLM. Raises `SettingsError` without one, or for what hides."""
    starts = [*_starts(Script(text, known, source), known)]
    containers = [each for each in starts if each.is_container]
    served = [each for each in starts if not each.is_container]
    if len(containers) > 1 or served:
        containers = [each for each in containers if _is_of_vllm(each, known, source)]
    if len(containers) > 1:
        raise SettingsError(f"{source}: more than one `docker run` in it; setup takes one: give that line in quotes")
    if containers:
        return _docker_run(containers[0], known, source)
    return _serve_line(served, text, source, is_seen=True)


def serve_line(text: str, source: str, known: Mapping[str, str] | None = None) -> ServeLine:
    """The one `vllm serve` of a text. Raises `SettingsError` without one. `known` is None: no variable is filled in."""
    starts = _starts(Script(text, known, source), known or {})
    return _serve_line([each for each in starts if not each.is_container], text, source, is_seen=known is not None)


def _serve_line(starts: Sequence[Start], text: str, source: str, *, is_seen: bool) -> ServeLine:
    if len(starts) != 1:
        why = next((words for pattern, words in _NOT_OF_A_SHELL.items() if re.search(pattern, text, re.M)), "")
        none = "no `vllm serve` among its commands, and no `docker run`"
        many = "more than one `vllm serve` in it; setup takes one: give that line in quotes"
        raise SettingsError(f"{source}: {many if starts else why or none}")
    start = starts[0]
    names = [Path(word.value).name for word in start.words[: start.behind]]
    if found := next((name for name in names if _ELSEWHERE.fullmatch(name)), ""):
        cure = "where setup puts nothing; give what starts that, or run setup there"
        raise SettingsError(f"{source}: {found} starts vLLM somewhere else, {cure}")
    if is_seen:
        _check_model(start, start.arguments, source)
    return ServeLine(start, start.arguments)


def _starts(
    script: Script, known: Mapping[str, str], outer: Command | None = None, python: str = "python3"
) -> Iterator[Start]:
    for command in script.commands():
        values = [word.value for word in command.words]
        names = [Path(value).name for value in values]
        if names[0] in ("source", "."):
            is_activated = names[-1] == "activate"
            python = f"{values[-1].removesuffix('activate')}python" if is_activated else python
            script.sourced += values[1:2] if not is_activated else []
        elif values[1:2] == ["activate"]:
            python = f"{values[0]} run -n {values[-1]} python"
        behind = _behind_run(names) or behind_serve(values)
        variables = {**script.variables, **command.variables}
        if names[0] in _SAYING:
            continue
        if behind:
            is_container = names[behind - 1] == "run"
            own = python if is_container else _python(values[:behind], python)
            yield Start(
                command.words, behind, outer or command, outer is not None, is_container, variables, own, script
            )
        for number in _scripts_in(values) if not behind else ():
            yield from _starts(
                script.within(command.words[number], {**known, **variables}), known, outer or command, python
            )


def _behind_run(names: Sequence[str]) -> int:
    """Behind `docker run`; 0 without it."""
    for number, name in enumerate(names):
        if name in _PROGRAMS:
            behind = number + 1 + (names[number + 1 : number + 2] == ["container"])
            return behind + 1 if names[behind : behind + 1] == ["run"] else 0
    return 0


def behind_serve(words: Sequence[str], before: str = "") -> int:
    """Where vLLM's arguments begin in a command, which follows the word `before`; 0 if it does not start vLLM."""
    for number, word in enumerate(words):
        last = words[number - 1] if number else before
        if word == "serve" and (Path(last).name == "vllm" or last == "vllm.entrypoints.cli.main"):
            return number + 1
        if word in ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"):
            return number + 1
    return 0


def _scripts_in(values: Sequence[str]) -> Iterator[int]:
    """Which words of a command a shell runs."""
    if Path(values[0]).name in _GIVEN_SCRIPTS:
        yield from (number for number, value in enumerate(values) if number and " " in value)
        return
    for number, value in enumerate(values):
        if Path(value).name in _SHELLS:
            flags = range(number + 1, len(values) - 1)
            yield from [flag + 1 for flag in flags if re.fullmatch(r"-[a-z]*c", values[flag])][:1]
            return


def _python(words: Sequence[str], activated: str) -> str:
    """How Python is called where a command runs that starts vLLM."""
    names = [Path(word).name for word in words]
    if "uvx" in names or ("uv" in names and ("--with" in words or "tool" in words)):
        return "uvx --with vllm python"
    if "uv" in names:
        return "uv run python"
    if "-n" in words and names[words.index("-n") - 1] == "run":
        return f"{' '.join(words[: words.index('-n') + 2])} python"
    if "-m" in words:
        return words[words.index("-m") - 1]
    return f"{words[-2].removesuffix('vllm')}python" if "/" in words[-2] else activated


def _is_of_vllm(start: Start, known: Mapping[str, str], source: str) -> bool:
    try:
        run = _docker_run(start, known, source)
    except SettingsError:
        return any("vllm" in word.value.lower() for word in start.arguments)
    return any("vllm" in word.value.lower() for word in (run.image, *run.arguments))


def _docker_run(start: Start, known: Mapping[str, str], source: str) -> DockerRun:
    words, at = start.arguments, 0
    hiding = ""
    while at < len(words):
        option = words[at].value
        if words[at].several and not _IMAGE.search(option):
            hiding = hiding or option
            at += 1
        elif not option.startswith("-"):
            break
        elif option.startswith("--"):
            at += 1 + ("=" not in option and not _SWITCHES.fullmatch(option))  # the next word is its value
        else:
            at += 1 + (len(option[1:].lstrip(_LETTERS)) == 1)
    left = words[at + 1 :]
    if hiding and (at >= len(words) or not (_IMAGE.search(words[at].value) or behind_serve([w.value for w in left]))):
        raise SettingsError(
            f"{source}: the image may be in {hiding}, which is not seen here; write it as a word of its own: "
            "docker run ... vllm/vllm-openai:v0.33.0 ..."
        )
    if at >= len(words):
        cut = "; a comment between its lines ends it: take that out" if start.outer.is_cut else ""
        raise SettingsError(f"{source}: `docker run` names no image{cut}")
    options = words[:at]
    values = [word.value for word in options]
    serve, skipped, is_shell = _served(start, values, left, known, source)
    program = " ".join(word.value for word in start.words[: start.behind - 1] if word.value != "container")
    sudo = re.search(r"(?:sudo (?:-\S+ )*)?\S+$", program)
    return DockerRun(start, sudo[0] if sudo else program, options, words[at], left, serve, skipped, is_shell)


def _served(
    start: Start, options: Sequence[str], words: Sequence[Word], known: Mapping[str, str], source: str
) -> tuple[ServeLine, int, bool]:
    """What vLLM is given in a container, how many words come before, and whether a shell starts it there."""
    entrypoint = ["", *options_of(options, ("--entrypoint",))][-1]
    values = [word.value for word in words]
    for number in _scripts_in([entrypoint, *values]):
        told = dict(each.partition("=")[::2] for each in options_of(options, ("-e", "--env")) if "=" in each)
        inner = _starts(start.script.within(words[number - 1], told), told, start.outer)
        return _serve_line([*inner], values[number - 1], source, is_seen=True), 0, True
    skipped = behind_serve(values, entrypoint) or (values[:1] == ["serve"] and not entrypoint)
    name = Path(entrypoint or "".join(values[:1])).name
    if "engine_patches" in values:
        raise SettingsError(f"{source} has Seamark's plugin already; ask `seamark doctor --worker URL`")
    if not skipped and (entrypoint or name in _SHELLS or name.startswith("python") or not values):
        which = f"what {name} starts is not seen here" if name else "nothing says which model vLLM serves"
        raise SettingsError(f"{source}: {which}; write `vllm serve MODEL` and its flags behind the image")
    _check_model(start, words[skipped:], source)
    return ServeLine(start, words[skipped:]), int(skipped), False


def _check_model(start: Start, words: Sequence[Word], source: str) -> None:
    """Raises `SettingsError` if the model is not seen, or may be in what is not."""
    named = [word for flag, word in pairwise(words) if flag.value == "--model"]
    named += [word for word in words if word.value.startswith("--model=")] + [*words[:1]] * (not named)
    hiding = next((each for word in words if word.several for each in word.unseen), "")
    word = named[0] if named and (not named[0].value.startswith("-") or "=" in named[0].value) else None
    last = word.value.rstrip("/").rpartition("=")[2].rpartition("/")[2] if word else ""
    if word is None or not last:
        if not hiding:
            raise SettingsError(f"{source}: nothing says which model vLLM serves; write it behind `vllm serve`")
    else:
        hiding = next((each for each in word.unseen if each.rpartition("/")[2] in last), "")
    if hiding:
        cure = how_to_say(hiding, source, start.script.names)
        raise SettingsError(f"{source}: the model may be in {hiding}, which is not seen here; {cure}")


def how_to_say(unseen: str, source: str, own: Container[str] = ()) -> str:
    """The cure for an expansion that has to be seen. `own`: names that the script sets itself."""
    name = _NAMED.search(unseen)
    if name and name[1] not in own and "[" not in unseen and source != "the command":
        return f"set it for this command, too: {name[1]}=... seamark setup {source}"
    return 'write it out, or give the line that starts vLLM: seamark setup "vllm serve MODEL FLAGS"'


def options_of(values: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """What `docker run` is given for an option."""
    for number, value in enumerate(values):
        if short := _SHORT.fullmatch(value):
            name, equals, behind = f"-{short[1]}", short[2], short[2].removeprefix("=")
        else:
            name, equals, behind = value.partition("=")
        if name in names:
            yield behind if equals else "".join(values[number + 1 : number + 2])
