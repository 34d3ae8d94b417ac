"""The text of a recipe, read within bounds, whoever wrote it.

A file's bytes, the values of YAML with each alias written out, and what placeholders and variables fill in have a
bound; words are split in one pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import yaml

from proxy.config_files import read_file
from proxy.errors import SettingsError

MOST_BYTES = 2**17  # of a file; one that people run has some 2,000

MOST_VALUES, MOST_LEVELS = 20_000, 100  # of YAML

MOST_FILLED = 2**20  # characters and values that a text of such a file may stand for

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]{0,2000}))?\}|(\w+))")

_ENDS = " \t\r\n;&|<>()"  # of a word

_PLAIN = re.compile(rf"[^{re.escape(_ENDS)}'\"\\$]+")

_QUOTED = re.compile(r'"((?:[^"\\]+|\\.)*+)"', re.S)

_PLACEHOLDER = re.compile(r"(?!\d+$)[^.\[\]]+")


class Word(NamedTuple):
    """One word of a shell's line."""

    raw: str  # as it is spelt
    value: str  # without quotes; variables as they are


class ServeLine(NamedTuple):
    """A command in a text: its words lie in text[start:end]."""

    words: Sequence[Word]
    start: int
    end: int


def read_text(path: Path, errors: str = "strict") -> str:
    """A file's content. Raises `SettingsError` for one that is too large, or no text."""
    content = read_file("recipe", path)
    if len(content) > MOST_BYTES:
        raise SettingsError(f"{path} has more than {MOST_BYTES:,} bytes; give the part of it that starts vLLM")
    try:
        return content.decode("utf-8-sig", errors).replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is no text in UTF-8") from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML comes without types
    """Reads no further once there are too many values, or too many inside each other."""

    values = levels = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        self.values += 1
        self.levels += 1
        if self.values > MOST_VALUES or self.levels > MOST_LEVELS:
            raise SettingsError(f"{self.name} has more than {MOST_VALUES:,} values, or {MOST_LEVELS} inside each other")
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """A document of fields. Raises `SettingsError` for another one, or for too many values."""
    try:
        loader = _Loader(text)
        loader.name = source
        node = loader.get_single_node()
        _check_values(node, source)
        document = loader.construct_document(node) if node else None
    except SettingsError:
        raise
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise SettingsError(f"{source} is no YAML" + (f": line {where.line + 1}" if where else "")) from None
    except Exception as error:  # such as a date that is none, or a number of more digits than Python reads
        raise SettingsError(f"{source} is no YAML that can be read ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise SettingsError(f"{source} says nothing of how vLLM is run")
    return document


def _check_values(root: yaml.Node | None, source: str) -> None:
    """An alias costs nothing until its values are written out, which may be many times, or for ever."""
    left, nodes = MOST_FILLED, [root] if root else []
    while nodes:
        node = nodes.pop()
        left -= 1 + len(node.value)
        if left < 0:
            raise SettingsError(f"{source}: with its aliases (`*name`) written out it is too long, or has no end")
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # half of a character can be written nowhere
        else:
            nodes += (
                (each for pair in node.value for each in pair) if isinstance(node, yaml.MappingNode) else node.value
            )


def field_of(document: Mapping[str, Any], name: str, kind: type, source: str) -> Any:
    """A field that has to be of a kind; one that is not there is an empty one. Raises `SettingsError`."""
    value = document.get(name)
    if value is not None and not isinstance(value, kind):
        words = {dict: "a mapping (NAME: VALUE)", list: "a list (- VALUE)", str: "a text"}
        raise SettingsError(f"{source}: `{name}:` has to be {words[kind]}")
    return kind() if value is None else value


def fill_template(template: str, values: Mapping[str, Any], source: str) -> str:
    """A text with `{name}` filled, and no more of Python's format, which may ask for any width."""
    filled: list[str] = []
    left = MOST_FILLED
    try:
        for text, name, spec, conversion in Formatter().parse(template):
            filled.append(text)
            if name is None:
                continue
            if spec or conversion or not _PLACEHOLDER.fullmatch(name):
                raise ValueError(f"{{{name[:64]}}} with what stands beside it is no plain {{name}}")
            filled.append(str(values[name]))
            left -= len(filled[-1])
            if left < 0:
                raise ValueError(f"filled, it has more than {MOST_FILLED:,} characters")
    except KeyError as error:
        raise SettingsError(f"{source}: `command:` wants {{{error.args[0]}}}, which `defaults:` has not") from None
    except ValueError as error:
        raise SettingsError(f"{source}: `command:` is no template: {error}") from None
    return "".join(filled)


def fill_variables(texts: Iterable[str], known: Mapping[str, str], source: str) -> list[str]:
    """With the variables that are known here, or their defaults."""
    left = MOST_FILLED

    def value(found: re.Match[str]) -> str:
        nonlocal left
        told = known.get(found[1] or found[3]) or found[2] or ""
        left -= len(told)
        if left < 0:
            raise SettingsError(f"{source}: its variables stand for more than {MOST_FILLED:,} characters")
        return told

    return [_VARIABLE.sub(value, text) for text in texts]


def words_of(text: str, start: int, source: str) -> ServeLine:
    """The words of a shell's command from a place in a text to its end. Raises `SettingsError` for an open quote."""
    words: list[Word] = []
    at, end = start, start
    while True:
        while at < len(text) and (text[at] in " \t" or text.startswith(("\\\n", "\\\r\n"), at)):
            at += 1 if text[at] in " \t" else text.index("\n", at) + 1 - at
        if at >= len(text) or text[at] in "\r\n;&|<>()#":
            break
        begin = at
        try:
            value, at = word_at(text, at)
        except ValueError:
            raise SettingsError(f"{source}: a quote behind `{text[begin : begin + 30]}` is not closed") from None
        if text[at : at + 1] in ("<", ">") and value.isdecimal():
            break  # the number of what is redirected
        words.append(Word(text[begin:at], value))
        end = at
    return ServeLine(words, start, end)


def word_at(text: str, at: int) -> tuple[str, int]:
    """The word that begins there, and where it ends. Raises `ValueError` for a quote that is not closed."""
    parts: list[str] = []
    while at < len(text) and text[at] not in _ENDS:
        begin = at
        if plain := _PLAIN.match(text, at):
            at = plain.end()
            parts.append(plain[0])
        elif text[at] == "'":
            at = text.index("'", begin + 1) + 1
            parts.append(text[begin + 1 : at - 1])
        elif text[at] == '"':
            if (quoted := _QUOTED.match(text, at)) is None:
                raise ValueError
            at = quoted.end()
            parts.append(re.sub(r'\\([\\"$`\n])', r"\1", quoted[1]))
        elif text[at] == "\\":
            if text.startswith(("\\\n", "\\\r\n"), at):
                break
            at += 2
            parts.append(text[begin + 1 : at])
        else:
            close = {"{": "}", "(": ")"}.get(text[at + 1 : at + 2])
            at = text.index(close, at) + 1 if close else at + 1
            parts.append(text[begin:at])
    return "".join(parts), at
