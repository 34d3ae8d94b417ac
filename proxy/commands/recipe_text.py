"""The text of a recipe, read within bounds, whoever wrote it.

A file's bytes, the values of YAML with each alias written out, and what placeholders and variables fill in have a
bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from proxy.config_files import read_file
from proxy.errors import SettingsError

MOST_BYTES = 2**17  # of a file; one that people run has some 2,000
MOST_FILLED = 2**20  # characters that what is in such a file may stand for
VALUE_COST = 50  # what a value of YAML counts beside its characters

# Of Python's format, which also takes widths of any size.
_PLACEHOLDER = re.compile(r"(\{\{|\}\})|\{([^{}]{0,200})\}|[{}]")


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
    """Takes no document that is too much, an alias (`*name`) being as long as what it stands for."""

    def compose_document(self) -> yaml.Node:
        node = super().compose_document()
        if _size(node, {}) > MOST_FILLED:
            raise SettingsError("its values are too many, each alias written out")
        return node


def _size(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    if node not in sizes:
        sizes[node] = MOST_FILLED  # what is a part of itself has no end
        inner = [*chain(*node.value)] if isinstance(node, yaml.MappingNode) else node.value
        own = [_size(each, sizes) for each in inner] if isinstance(node, yaml.CollectionNode) else [len(inner)]
        sizes[node] = VALUE_COST + sum(own)
    return sizes[node]


class Tagged(NamedTuple):
    """A value that has one of Compose's tags."""

    tag: str  # such as !reset
    value: Any


def _tagged(loader: _Loader, name: str, node: yaml.Node) -> Any:
    plain = type(node)(loader.resolve(type(node), node.value, (True, False)), node.value)
    value = loader.construct_object(plain, deep=True)
    return Tagged(f"!{name}", value) if name in ("reset", "override") else value


_Loader.add_multi_constructor("!", _tagged)


class TextLoader(_Loader):
    """Takes each value as the text that it is spelt with, but nothing for nothing."""


TextLoader.yaml_implicit_resolvers = {
    first: [(tag, spelt) for tag, spelt in found if tag.endswith((":null", ":merge"))]
    for first, found in _Loader.yaml_implicit_resolvers.items()
}


def read_yaml(text: str, source: str, loader: type[_Loader] = _Loader) -> list[dict[str, Any]]:
    """Documents of fields, one at least. Raises `SettingsError` for others, or for too many values."""
    try:
        documents = [each for each in yaml.load_all(text, loader) if each is not None]  # a safe one
        json.dumps(documents, default=str, skipkeys=True, ensure_ascii=False).encode()
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise SettingsError(f"{source} is no YAML" + (f": line {where.line + 1}" if where else "")) from None
    except Exception as error:  # such as a date that is none, or a number of more digits than Python reads
        why = error if isinstance(error, SettingsError) else type(error).__name__
        raise SettingsError(f"{source} cannot be read as YAML ({why})") from None
    if not documents or not all(isinstance(each, dict) for each in documents):
        raise SettingsError(f"{source} says nothing of how vLLM is run")
    return documents


def field_of(document: Mapping[str, Any], name: str, kind: type, source: str) -> Any:
    """A field that has to be of a kind; one that is not there is an empty one. Raises `SettingsError`."""
    value = document.get(name)
    if value is not None and not isinstance(value, kind):
        words = {"dict": "a mapping (NAME: VALUE)", "list": "a list (- VALUE)", "str": "a text"}
        raise SettingsError(f"{source}: `{name}:` has to be {words[kind.__name__]}")
    return kind() if value is None else value


def as_lines(command: str) -> str:
    """A command of spark-vllm-docker whose lines of flags go on where no backslash says so."""
    return re.sub(r"(?<!\\)[ \t]*\n(?=[ \t]*-)", r" \\\n", command)


def fill_template(template: str, values: Mapping[str, Any], source: str) -> str:
    """`{name}` filled in a command of spark-vllm-docker."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return found[1][0]
        if not re.fullmatch(r"[\w-]*[^\W\d][\w-]*", found[2] or ""):
            raise SettingsError(f"{source}: `command:` is no template: {found[0]} is no name in braces")
        if found[2] not in values:
            raise SettingsError(f"{source}: `command:` wants {found[0]}, which `defaults:` has not")
        return str(values[found[2]])

    return fill_pattern(_PLACEHOLDER, value, template, source)


def fill_pattern(what: re.Pattern[str], value: Callable[[re.Match[str]], str], text: str, source: str) -> str:
    """A text with each match filled. Raises `SettingsError` where that is too much."""
    left = MOST_FILLED

    def bounded(found: re.Match[str]) -> str:
        nonlocal left
        told = value(found)
        left -= len(told)
        if left < 0:
            raise SettingsError(f"{source}: what it is filled with has more than {MOST_FILLED:,} characters")
        return told

    return what.sub(bounded, text)
