"""A script of the user's with what hits need put in: all else stays as it is spelt, where it is spelt."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from proxy.commands.cures import EVENTS_FLAG, NEEDED
from proxy.commands.outlook import DROPPED, SWITCHES
from proxy.commands.recipe import EVERYWHERE, Recipe, flag_name
from proxy.commands.recipe_line import LAUNCHER, Start, start_of
from proxy.commands.shell import ShellCommand, Word
from proxy.errors import SettingsError

# In place of what is another file's name now, where that is asked for its folder; a $0 of awk is none.
OWN_NAME = "SEAMARK_OF"
_OWN_NAME = re.compile(r"""\$(\{?)(?:BASH_SOURCE(?:\[0\])?|(?<=\{)0|(?<="\$)0(?=")|(?<=(?:name|path) \$)0)""")

# Names of files by the folder that a script is run in, but in a comment.
HERE = re.compile(r"^(?!\s*#).*(?:(?<![^\s\"'=:])\.{1,2}/|\$\{?PWD\b|\$\(pwd\)|build\s.*\s\.(?:\s|$))", re.M)


class Edits:
    """Of a script's text, by places in it."""

    def __init__(self, text: str, source: str) -> None:
        self._text, self._source = text, source
        self._edits: set[tuple[int, int, str]] = set()

    def put(self, at: int, text: str) -> None:
        self._edits.add((at, at, text))

    def replace(self, start: int, end: int, text: str) -> None:
        self._edits.add((start, end, text))

    def cut_flags(self, words: Sequence[Word], names: Collection[str] = DROPPED.keys()) -> None:
        """With their values."""
        taken: set[int] = set()
        for number, word in enumerate(words):
            if number not in taken and (name := flag_name(word.value)) in names:
                taken |= {number} if name in SWITCHES or "=" in word.value else {number, number + 1}
        self.cut([word for number, word in enumerate(words) if number in taken])

    def cut(self, words: Sequence[Word]) -> None:
        """Raises `SettingsError` for a flag that something else than the script says."""
        for word in words:
            start, end = word.place
            spelt = self._text[start:end]
            if not word.is_whole or (word.value.startswith("-") and spelt.lstrip("'\"").startswith("$")):
                raise SettingsError(f"{self._source}: {word.value[:64]} comes from {spelt[:64]}; take it out there")
            blank = re.search(r"(?:[ \t]|\\\n)*$", self._text[:start])
            start -= len(blank[0]) if blank else 0
            self.replace(start, end, "")

    def done(self) -> str:
        text, parts = self._text, []
        for start, end, new in sorted(self._edits, reverse=True):
            parts += [text[end:], new]
            text = text[:start]
        return text + "".join(reversed(parts))


def with_flags(text: str, recipe: Recipe, known: Mapping[str, str] | None = None, mod: str = "") -> str:
    """A text with its one `vllm serve`, which gets what is needed; `mod`: which spark-vllm-docker is to apply."""
    edits = Edits(text, recipe.source)
    line = start_of(text, known, recipe.source)
    _give(edits, line, recipe)
    for word in line.command[: line.behind] if mod else ():
        if word.value.endswith(LAUNCHER):
            edits.put(word.place[1], f" --apply-mod {mod}")
    return edits.done()


def _give(edits: Edits, line: Start, recipe: Recipe) -> None:
    """What is needed goes behind the last word, and what was taken away, out."""
    has_events = recipe.has_rust_frontend or EVENTS_FLAG.split()[1] in recipe.arguments
    added = [flag for flag in NEEDED if not (has_events if flag == EVENTS_FLAG else recipe.has(flag))]
    edits.cut_flags(line.words)
    end = line.command[-1].place[1]
    is_plain = not line.is_quoted and line.outer.place[0] <= end <= line.outer.place[1]
    edits.put(end, "".join(f" \\\n    {flag}" if is_plain else f" {flag}" for flag in added))


def with_image(recipe: Recipe, image: str, options: Sequence[str], build: str, instead: str) -> str:
    """A script whose `docker run` has the image that `build` makes of the one it had, or of `instead`, just before."""
    text = recipe.text
    serve = start_of(text, recipe.outside, recipe.source)
    run = serve.run
    assert run is not None  # noqa: S101  # as its recipe says
    edits = Edits(text, recipe.source)
    options = [*options, *([] if recipe.is_published else [f"--publish 127.0.0.1:{recipe.port}:{recipe.port}"])]
    edits.cut_flags(run.options, ("--pull",))
    if run.is_shell:
        _give(edits, serve, recipe)
        if not run.given("--entrypoint"):
            options.append(f"--entrypoint {run.arguments[0].value}")
            edits.cut(run.arguments[:1])
    else:
        edits.cut_flags(run.options, ("--entrypoint",))
        edits.cut(run.arguments[: serve.behind])
        edits.cut_flags(serve.words)
        if not recipe.has("--host"):  # vLLM alone listens to everybody, and the worker's command to its own machine
            first, host = serve.words[0], f"--host {EVERYWHERE}"
            is_flag = first.value.startswith("-")
            edits.put(first.place[0] if is_flag else first.place[1], f"{host} " if is_flag else f" {host}")
    edits.put(run.start.command[run.start.behind - 1].place[1], "".join(f" {option}" for option in options))
    base = instead or text[slice(*run.image.place)]
    if not run.image.is_whole:
        raise SettingsError(f"{recipe.source}: the image is part of {base}; write it behind `docker run` itself")
    edits.replace(*run.image.place, image)
    if run.start.is_quoted and base != run.image.value:
        base = '"{}"'.format(re.sub(r"[\\\"']", "", base))
    _before(edits, run.start.outer, build.format(base), text)
    return edits.done()


def _before(edits: Edits, command: ShellCommand, build: str, text: str) -> None:
    """What comes before a command, and has to have worked."""
    start, end = command.place
    if command.before in ("&&", "||", "|", "|&", "!", "time"):
        edits.put(start, f"{{ {build} && ")
        edits.put(end, "; }")
    else:
        line = text[text.rfind("\n", 0, start) + 1 : start]
        edits.put(start, f"{build} || exit\n{line if not line.strip() else ''}")


def elsewhere(text: str) -> str:
    """A script that is run from another file, before which OWN_NAME is set to its own."""
    return _OWN_NAME.sub(lambda found: f"${{{OWN_NAME}{'' if found[1] else '}'}", text)


def shell_of(text: str) -> str:
    """The first line of a script that has none: what is not every shell's wants Bash."""
    wants_bash = re.search(r"=\(|\[\[|\bBASH_|^\s*source |pipefail|^\s*function |<<<|&>|\w\+=|\$'", text, re.M)
    return "#!/usr/bin/env bash" if wants_bash else "#!/bin/sh"
