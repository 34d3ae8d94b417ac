"""A script of a shell, as far as it can be read without running it: its commands, and where each of their words stands.

Variables and arrays that are set in it are expanded where they are used. An expansion that is not seen here stays as it
is spelt, and is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from proxy.commands.recipe_text import MOST_FILLED
from proxy.errors import SettingsError

_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)*+")
_ENDS = " \t\r\n;&|<>()"  # of a word
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=")
_REDIRECTION = re.compile(r"(?:\d+|&)?(<<<|<<-?|<>|>>|>\||[<>]&?)")
_OPERATOR = re.compile(r"\n|;;?&?|&&?(?!>)|\|[|&]?|[()]")
_OPENING, _CLOSING = ("if", "while", "until", "for", "select", "case"), ("fi", "done", "esac")
_KEYWORD = re.compile(rf"({'|'.join((*_OPENING, *_CLOSING))}|then|elif|else|do|time|function|[!{{}}])(?=[\s;&|)]|$)")
_DECLARING = ("export", "local", "declare", "typeset", "readonly")
_PARAMETER = re.compile(rf"\$(?:({_NAME}|[\d@*#?$!-])|\{{([#!]?)({_NAME}|\d+|[@*])(\[[^\]]*\])?(?:(:?)([-=?+]))?)")
_OPAQUE = re.compile(r"`(?:[^`\\]|\\.)*`|\$\(\((?:[^()]|\([^()]*\))*\)\)", re.S)  # substitutions, arithmetic


class Word(NamedTuple):
    value: str  # without quotes, and with what its expansions hold
    at: Sequence[int]  # where in the script each character is written, and where the last one ends
    place: tuple[int, int]  # of the word itself, with its quotes
    unseen: Sequence[str] = ()  # expansions in it of which nothing is known
    several: bool = False  # because of those it may be several words, or none
    is_whole: bool = True  # its place holds nothing else


class ShellCommand(NamedTuple):
    words: Sequence[Word]
    variables: Mapping[str, str]  # for it alone
    before: str  # the operator or keyword in front of it
    place: tuple[int, int]


class _Expansion(NamedTuple):
    words: Sequence[Word] | None  # that it holds; None: not seen
    is_array: bool
    is_quoted: bool


class Script:
    """`known`: variables that are set outside; None: none is expanded. `at`: of a text within a script."""

    def __init__(self, text: str, known: Mapping[str, str] | None, source: str, at: Sequence[int] = ()) -> None:
        self._text, self.known, self.source = text, known, source
        self._places = at or range(len(text) + 1)
        self._at = self._start = self._depth = 0
        self._left = MOST_FILLED
        self._documents: list[str] = []  # by what ends them, from the next line on
        self._inside: list[ShellCommand] = []  # of substitutions
        self._conditional: set[str] = set()  # variables that are set by a condition alone
        self.names: dict[str, Sequence[Word] | None] = {}  # variables and arrays that are set so far; None: not seen
        self.ambiguous: dict[str, None] = {}  # those that may hold something else, by a condition
        self.sourced: list[str] = []  # files of which nothing is seen

    @property
    def variables(self) -> dict[str, str]:
        return {name: words[0].value for name, words in self.names.items() if words and name != "@"}

    def within(self, word: Word, known: Mapping[str, str], given: Sequence[Word]) -> Script:
        """The script that a word holds, for another shell. `given`: behind it, its name and its arguments."""
        script = Script(word.value, None if self.known is None else known, self.source, word.at)
        script.names["@"] = given[1:]
        return script

    def commands(self, close: str = "") -> Iterator[ShellCommand]:
        """In their order, with those of substitutions before. Raises `SettingsError` for what is not closed."""
        text, before = self._text, "\n"
        while self._next() not in ("", close):
            if text[self._at] == "#":
                self._at = self._line_end()
            elif operator := _OPERATOR.match(text, self._at):
                before, self._at = operator[0], operator.end()
                if before == "(":
                    yield from self.commands(")")
                    self._close(")")
                while before == "\n" and self._documents and self._at < len(text):
                    end = self._line_end()
                    del self._documents[: text[self._at : end].strip() == self._documents[0]]
                    self._at = min(end + 1, len(text))
            elif keyword := _KEYWORD.match(text, self._at):
                before, self._at = keyword[1], keyword.end()
                self._depth += (before in _OPENING) - (before in _CLOSING)
            else:
                command = self._command(before)
                inside, self._inside = self._inside, []
                yield from inside
                if command.words and before not in ("for", "select", "case"):
                    yield command
                before = ""

    def _substitution(self) -> None:
        self._close("(")
        self._inside = [*self.commands(")")]
        self._close(")")

    def _command(self, before: str) -> ShellCommand:
        text, start, end = self._text, self._at, self._at
        words: list[Word] = []
        assigned: list[tuple[str, bool, bool, list[Word]]] = []
        while (char := self._next()) not in ("", *"\n;|()&") or text.startswith("&>", self._at):
            if char == "#" and self._at > end:
                break
            if redirection := _REDIRECTION.match(text, self._at):
                self._at = redirection.end()
                if self._next() == "(":
                    self._substitution()
                target = self._read(_ENDS)[0].value
                self._documents += [target] if redirection[1] in ("<<", "<<-") else []
            elif (not words or words[0].value in _DECLARING) and (name := _ASSIGNMENT.match(text, self._at)):
                self._at = name.end()
                is_array = text.startswith("(", self._at)
                value = self._array() if is_array else [self._read(_ENDS)[0]]
                assigned.append((name[1], bool(name[2]), is_array, value))
            else:
                words += self._words()
            end = self._at
        if not words or words[0].value in _DECLARING:
            for each in assigned:
                self._set(*each, is_conditional=self._depth > 0 or before in ("&&", "||"))
        elif before in ("for", "select"):
            self.names[words[0].value] = None
        elif words[0].value in ("read", "mapfile", "readarray"):
            self.names |= dict.fromkeys((word.value for word in words[1:]), None)
        elif [word.value for word in words[:2]] == ["set", "--"]:
            self.names["@"] = words[2:]
        own = {name: value[0].value for name, _, _, value in assigned if value}
        return ShellCommand(words, own, before, (self._places[start], self._places[end]))

    def _array(self) -> list[Word]:
        words: list[Word] = []
        self._start, self._at = self._at, self._at + 1
        while (char := self._next()) not in ("", ")"):
            if char == "#":
                self._at = self._line_end()
            elif char in _ENDS:
                self._at += 1
            else:
                words += self._words()
        self._close(")")
        return words

    def _set(self, name: str, is_more: bool, is_array: bool, value: list[Word], *, is_conditional: bool) -> None:
        is_known, old = name in self.names or name in (self.known or {}), self._held(name)
        if is_more and old and is_array:
            value = [*old, *value]
        elif is_more and old:
            first, more = old[0], value[0]
            at, unseen = [*first.at[:-1], *more.at], [*first.unseen, *more.unseen]
            value = [more._replace(value=first.value + more.value, at=at, unseen=unseen)]
        is_other = is_known and [word.value for word in old or ()] != [word.value for word in value]
        if is_conditional and is_other:
            self.ambiguous[name] = None
        if is_more or not (is_conditional and is_known):
            self.names[name] = None if is_more and is_known and old is None else value
            self._conditional |= {name} if is_conditional and not is_known else set()
        elif name in self._conditional and is_other:
            self.names[name] = None

    def _words(self) -> list[Word]:
        """What the word that begins here becomes: one, or several, or none."""
        word, expansion, has_quotes = self._read(_ENDS)
        if expansion and expansion.words is None:
            return [word._replace(several=expansion.is_array or not expansion.is_quoted)]
        if expansion and expansion.words is not None and expansion.is_array:
            return [*expansion.words]
        if expansion and not expansion.is_quoted:
            words = [_part(word, *each.span()) for each in re.finditer(r"\S+", word.value)]
            return words if len(words) != 1 else [words[0]._replace(place=word.place, is_whole=word.is_whole)]
        return [word] if word.value or has_quotes else []

    def _read(self, ends: str, within_quotes: bool = False) -> tuple[Word, _Expansion | None, bool]:
        """The word that begins here, the expansion that it is if it is one alone, and whether it has quotes."""
        text, places, first = self._text, self._places, self._at
        self._start = first
        parts: list[str] = []
        at: list[int] = []
        unseen: list[str] = []
        expansion, is_open, has_quotes = None, False, False
        while self._at < len(text) and (is_open or text[self._at] not in ends):
            start, is_quoted = self._at, is_open or within_quotes
            char, end = text[start], start + 1
            if char == '"':
                is_open, has_quotes, char = not is_open, True, ""
            elif char == "\\":
                char, end = text[end : end + 1], start + 2
                if char == "\n":
                    char = ""
                elif is_quoted and char not in ('"', "\\", "$", "`"):
                    char, end = "\\", start + 1
            elif char == "'" and not is_quoted:
                if (end := text.find("'", end)) < 0:
                    raise self._not_closed()
                start, has_quotes = start + 1, True
                char, end = text[start:end], end + 1
            elif char == "$" and text[end : end + 1] in ("'", '"') and not is_quoted:
                char = ""
            elif char == "`" or text.startswith("$(", start) or _PARAMETER.match(text, start):
                expansion = self._expand(is_quoted)
                spelt = re.sub(r"\s.*(?=.$)", "...", text[start : self._at], flags=re.S)
                held = expansion.words
                parts.append(spelt if held is None else " ".join(word.value for word in held))
                at += [places[start]] * len(parts[-1])
                unseen += [spelt] if held is None else [each for word in held for each in word.unseen]
                continue
            parts += [char] if char else []
            at += places[start : start + len(char)]
            self._at = end
        if is_open:
            raise self._not_closed()
        alone = expansion if len(parts) == 1 else None
        at.append(places[self._at - (text[self._at - 1 : self._at] in ("'", '"'))])
        if alone and alone.words and len(alone.words) == 1:
            at = [*alone.words[0].at]
        place, is_whole = (places[first], places[self._at]), _is_whole(places, first, self._at)
        word = Word("".join(parts), at, place, unseen, is_whole=is_whole)
        return word, alone, has_quotes

    def _expand(self, is_quoted: bool) -> _Expansion:
        """What the expansion that begins here holds."""
        text, start = self._text, self._at
        if opaque := _OPAQUE.match(text, start):
            self._at = opaque.end()
            is_comment = re.match(r"`\s*#", opaque[0])  # between lines that are one
            return _Expansion([] if is_comment else None, False, is_quoted)
        if (found := _PARAMETER.match(text, start)) is None:
            self._at += 1
            self._substitution()
            return _Expansion(None, False, is_quoted)
        self._at = found.end()
        name, operator, other = found[1] or found[3], found[6], None
        is_array = name in ("@", "*") or found[4] in ("[@]", "[*]")
        if found[3]:
            begin = self._start
            other = self._read("}", is_quoted)[0]
            self._close("}")
            self._start = begin
            if found[2] or (other.value and not operator) or (found[4] and not is_array):
                return _Expansion(None, is_array, is_quoted)
        words = self._held(name, (self._places[start], self._places[self._at])) if self.known is not None else None
        is_seen = self.known is not None and (words is not None or name not in self.names)
        if operator in ("-", "=", "+") and is_seen:
            is_set = bool(words) and (not found[5] or any(word.value for word in words or ()))
            if other and is_set == (operator == "+"):
                words, is_quoted = [other], is_quoted or bool({*"'\""} & {*text[found.end() : self._at]})
            elif operator == "+":
                words = []
            if operator == "=":
                self.names[name] = words
        self._left -= sum(len(word.value) for word in words or ())
        if self._left < 0:
            raise SettingsError(f"{self.source}: what it is filled with has more than {MOST_FILLED:,} characters")
        return _Expansion(words, is_array, is_quoted)

    def _held(self, name: str, place: tuple[int, int] = (0, 0)) -> Sequence[Word] | None:
        """What a variable holds; None: that is not seen, or it is not set."""
        if name in self.names:
            words = self.names[name]
            return None if words and [word.value for word in words] == [*words[0].unseen] else words
        value = (self.known or {}).get(name)
        return None if value is None else [Word(value, [place[0]] * (len(value) + 1), place)]

    def _next(self) -> str:
        """The character behind blanks; empty at the end."""
        self._at = _BLANK.match(self._text, self._at).end()  # type: ignore[union-attr]  # it fits nothing, too
        return self._text[self._at : self._at + 1]

    def _close(self, bracket: str) -> None:
        if not self._text.startswith(bracket, self._at):
            raise self._not_closed()
        self._at += 1

    def _not_closed(self) -> SettingsError:
        start = self._start
        return SettingsError(f"{self.source}: a quote behind `{self._text[start : start + 30]}` is not closed")

    def _line_end(self) -> int:
        return end if (end := self._text.find("\n", self._at)) >= 0 else len(self._text)


def _is_whole(at: Sequence[int], start: int, end: int) -> bool:
    """Whether a place in a text begins and ends where something is written, and not within what an expansion holds."""
    return all(at[each - 1] != at[each] for each in (start, end) if each)


def _part(whole: Word, start: int, end: int) -> Word:
    """A word of those that a variable holds."""
    value, at = whole.value[start:end], whole.at[start : end + 1]
    is_whole = _is_whole(whole.at, start, end)
    unseen = [each for each in whole.unseen if each in value]
    return Word(value, at, (at[0], at[-1]) if is_whole else whole.place, unseen, bool(unseen), is_whole)
