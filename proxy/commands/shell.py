"""A script of a shell, as far as it can be read without running it: its commands, and where each of their words stands.

Variables and arrays that are set in it are expanded where they are used. An expansion that is not seen here stays as it
is spelt, and is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from proxy.commands.recipe_text import MOST_FILLED, MOST_LEVELS
from proxy.errors import SettingsError

Range = tuple[int, int]  # of the script's characters

_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)*+")
_ENDS = " \t\r\n;&|<>()"  # of a word
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=")
_REDIRECTION = re.compile(r"(?:\d+|&)?(<<<|<<-?|<>|>>|>\||[<>]&?)")
_OPERATOR = re.compile(r"\n|;;?&?|&&?(?!>)|\|[|&]?|[()]")
_OPENING, _CLOSING = ("if", "while", "until", "for", "select", "case"), ("fi", "done", "esac")
_KEYWORD = re.compile(rf"({'|'.join((*_OPENING, *_CLOSING))}|then|elif|else|do|time|function|[!{{}}])(?=[\s;&|)]|$)")
_DECLARING, _READING = ("export", "local", "declare", "typeset", "readonly"), ("read", "mapfile", "readarray")
_PARAMETER = re.compile(rf"\$(?:({_NAME}|[\d@*#?$!-])|\{{([#!]?)({_NAME}|\d+|[@*])(\[[^\]]*\])?(?:(:?)([-=?+]))?)")
_OPAQUE = re.compile(r"`(?:[^`\\]|\\.)*`|\$\(\((?:[^()]|\([^()]*\))*\)\)", re.S)  # substitutions, arithmetic


class Word(NamedTuple):
    value: str  # without quotes, and with what its expansions hold
    spans: Sequence[Range]  # of each character: where that is written
    place: Range  # of the word itself, with its quotes
    edit: Range | None = None  # what holds it and nothing else, which may be where a variable is set
    unseen: Sequence[str] = ()  # expansions in it of which nothing is known
    several: bool = False  # because of those it may be several words, or none


class ShellCommand(NamedTuple):
    words: Sequence[Word]
    variables: Mapping[str, str]  # for it alone
    before: str  # the operator or keyword in front of it
    place: Range
    is_cut: bool  # by a comment, between lines that are to be one


class _Expansion(NamedTuple):
    words: Sequence[Word] | None  # that it holds; None: not seen
    is_array: bool
    is_quoted: bool


class Script:
    """`known`: variables that are set outside; None: none is expanded. `spans`: of a text within a script."""

    def __init__(
        self,
        text: str,
        known: Mapping[str, str] | None,
        source: str,
        spans: Sequence[Range] | None = None,
        level: int = 0,
    ) -> None:
        self._text, self.known, self.source, self._spans, self._level = text, known, source, spans, level
        self._at = self._start = self._depth = 0
        self._left = MOST_FILLED
        self._documents: list[str] = []  # by what ends them, from the next line on
        self._inside: list[ShellCommand] = []  # of substitutions
        self._conditional: set[str] = set()  # variables that are set by a condition alone
        self.names: dict[str, Sequence[Word] | None] = {}  # variables and arrays that are set so far; None: not seen
        self.ambiguous: dict[str, None] = {}  # those that may hold something else, by a condition
        self.own_names: list[int] = []  # where it names itself, by which it finds files beside it
        self.sourced: list[str] = []  # files of which nothing is seen

    @property
    def variables(self) -> dict[str, str]:
        """What is set so far."""
        return {name: words[0].value for name, words in self.names.items() if words and name != "@"}

    def within(self, word: Word, known: Mapping[str, str]) -> Script:
        """The script that a word holds, for another shell."""
        expanded = None if self.known is None else known
        return Script(word.value, expanded, self.source, word.spans, self._level + 1)

    def commands(self, close: str = "") -> Iterator[ShellCommand]:
        """In their order, with those of substitutions before. Raises `SettingsError` for what is not closed."""
        self._go_deeper()
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
        self._level -= 1

    def _go_deeper(self) -> None:
        self._level += 1
        if self._level > MOST_LEVELS:
            raise SettingsError(f"{self.source}: its brackets and quotes are too many inside each other")

    def _command(self, before: str) -> ShellCommand:
        text, start = self._text, self._at
        end, is_cut = start, False
        words: list[Word] = []
        assigned: list[tuple[str, str, bool, list[Word]]] = []
        while (char := self._next()) not in ("", *"\n;|()&") or text.startswith("&>", self._at):
            if char == "#" and self._at > end:
                is_cut = "\\\n" in text[end : self._at]
                break
            if redirection := _REDIRECTION.match(text, self._at):
                self._at = redirection.end()
                if self._next() == "(":
                    self._at += 1
                    self._inside = [*self.commands(")")]
                    self._close(")")
                target = self._one(_ENDS)
                self._documents += [target.value] if redirection[1] in ("<<", "<<-") else []
            elif (not words or words[0].value in _DECLARING) and (name := _ASSIGNMENT.match(text, self._at)):
                self._at = name.end()
                is_array = text.startswith("(", self._at)
                assigned.append((name[1], name[2], is_array, self._array() if is_array else [self._one(_ENDS)]))
            else:
                words += self._words()
            end = self._at
        if not words or words[0].value in _DECLARING:
            for each in assigned:
                self._set(*each, is_conditional=self._depth > 0 or before in ("&&", "||"))
        elif before in ("for", "select"):
            self.names[words[0].value] = None
        elif words[0].value in _READING:
            self.names |= dict.fromkeys((word.value for word in words[1:]), None)
        elif [word.value for word in words[:2]] == ["set", "--"]:
            self.names["@"] = words[2:]
        own = {name: value[0].value for name, _, _, value in assigned if value}
        return ShellCommand(words, own, before, self._span(start, end), is_cut)

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

    def _set(self, name: str, plus: str, is_array: bool, value: list[Word], *, is_conditional: bool) -> None:
        is_known = name in self.names or name in (self.known or {})
        old = self._held(name)
        if (
            is_conditional
            and is_known
            and (plus or [word.value for word in old or ()] != [word.value for word in value])
        ):
            self.ambiguous[name] = None
        if plus and (old or not is_known):
            self.names[name] = (
                [*(old or ()), *value] if is_array else [_joined([*(old or ()), *value], value[-1].place)]
            )
        elif not plus and not (is_conditional and is_known):
            self.names[name] = value
            self._conditional |= {name} if is_conditional else set()
        elif name in self._conditional and name in self.ambiguous:
            self.names[name] = None

    def _words(self) -> list[Word]:
        """What the word that begins here becomes: one, or several, or none."""
        self._start = start = self._at
        parts, expansions, is_quoted = self._read(_ENDS)
        place, edit = self._span(start, self._at), self._edit(start, self._at)
        if len(parts) == 1 and expansions:
            (whole,), (expansion,) = parts, expansions
            if expansion.words is None:
                several = expansion.is_array or not expansion.is_quoted
                return [whole._replace(place=place, edit=edit, several=several)]
            if expansion.is_array:
                return [*expansion.words]
            if not expansion.is_quoted:
                words = [_part(whole, *each.span()) for each in re.finditer(r"\S+", whole.value)]
                return words if len(words) != 1 else [words[0]._replace(place=place)]
        word = _joined(parts, place)._replace(edit=edit)
        return [word] if word.value or is_quoted else []

    def _one(self, ends: str, is_quoted: bool = False) -> Word:
        """The word that begins here, which stays one whatever it holds."""
        self._start = start = self._at
        parts, _, _ = self._read(ends, is_quoted)
        place = self._span(start, self._at)
        return parts[0] if len(parts) == 1 else _joined(parts, place)._replace(edit=self._edit(start, self._at))

    def _read(self, ends: str, within_quotes: bool = False) -> tuple[list[Word], list[_Expansion], bool]:
        """The parts of a word, those of them that are expansions, and whether it has quotes."""
        text, parts, expansions = self._text, [], []
        is_open = has_quotes = False
        while self._at < len(text) and (is_open or text[self._at] not in ends):
            at, is_quoted = self._at, is_open or within_quotes
            char, end = text[at], at + 1
            if char == '"':
                is_open, has_quotes, char = not is_open, True, ""
            elif char == "\\":
                char, end = text[end : end + 1], at + 2
                if char == "\n":
                    char = ""
                elif is_quoted and char not in ('"', "\\", "$", "`"):
                    char, end = "\\", at + 1
            elif char == "'" and not is_quoted:
                if (end := text.find("'", end)) < 0:
                    raise self._not_closed()
                parts += [self._character(place, place + 1, text[place]) for place in range(at + 1, end)]
                has_quotes, char, end = True, "", end + 1
            elif char == "$" and text[end : end + 1] in ("'", '"') and not is_quoted:
                char = ""
            elif char == "`" or text.startswith("$(", at) or _PARAMETER.match(text, at):
                found = self._expand(is_quoted)
                expansions.append(found)
                spelt = re.sub(r"\s.*(?=.$)", "...", text[at : self._at], flags=re.S)
                span = self._span(at, self._at)
                unseen = Word(spelt, [span] * len(spelt), span, None, (spelt,))
                parts.append(unseen if found.words is None else _joined(found.words, span, " "))
                continue
            parts += [self._character(at, end, char)] if char else []
            self._at = end
        if is_open:
            raise self._not_closed()
        if len(parts) > 1:  # what an expansion holds is written elsewhere
            parts = [each._replace(spans=[each.place] * len(each.value)) for each in parts]
        return parts, expansions, has_quotes

    def _expand(self, is_quoted: bool) -> _Expansion:
        """What the expansion that begins here holds."""
        text, start = self._text, self._at
        if opaque := _OPAQUE.match(text, start):
            self._at = opaque.end()
            is_comment = re.match(r"`\s*#", opaque[0])  # between lines that are one
            return _Expansion([] if is_comment else None, False, is_quoted)
        if (found := _PARAMETER.match(text, start)) is None:
            self._at += 1
            self._close("(")
            self._inside = [*self.commands(")")]
            self._close(")")
            return _Expansion(None, False, is_quoted)
        self._at = found.end()
        name, operator, other = found[1] or found[3], found[6], None
        self.own_names += [start] if name in ("0", "BASH_SOURCE") and not found[2] else []
        is_array = name in ("@", "*") or found[4] in ("[@]", "[*]")
        if found[3]:
            self._go_deeper()
            begin, other = self._start, self._one("}", is_quoted)
            self._close("}")
            self._level -= 1
            self._start = begin
            if found[2] or (other.value and not operator) or (found[4] and not is_array):
                return _Expansion(None, is_array, is_quoted)
        words = self._held(name, self._span(start, self._at)) if self.known is not None else None
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

    def _held(self, name: str, span: Range = (0, 0)) -> Sequence[Word] | None:
        """What a variable holds; None: that is not seen, or it is not set."""
        if name in self.names:
            words = self.names[name]
            return None if words and [word.value for word in words] == [*words[0].unseen] else words
        value = (self.known or {}).get(name)
        return None if value is None else [Word(value, [span] * len(value), span)]

    def _character(self, start: int, end: int, char: str) -> Word:
        span = self._span(start, end)
        return Word(char, [span], span)

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

    def _span(self, start: int, end: int) -> Range:
        """In the script, of a place in this text."""
        if not self._spans:
            return start, end
        last = len(self._spans) - 1
        return self._spans[min(start, last)][0], self._spans[min(max(start, end - 1), last)][1]

    def _edit(self, start: int, end: int) -> Range | None:
        """The same, unless what is written there holds more."""
        spans = self._spans or ()
        is_cut = any(0 < at < len(spans) and spans[at - 1] == spans[at] for at in (start, end))
        return None if is_cut else self._span(start, end)


def _joined(words: Sequence[Word], place: Range, between: str = "") -> Word:
    spans: list[Range] = []
    for number, word in enumerate(words):
        spans += [word.place] * len(between if number else "")
        spans += word.spans
    unseen = [each for word in words for each in word.unseen]
    return Word(between.join(word.value for word in words), spans, place, None, unseen)


def _part(whole: Word, start: int, end: int) -> Word:
    """A word of those that a variable holds."""
    value, spans, around = whole.value[start:end], whole.spans[start:end], whole.spans
    is_cut = any(0 < at < len(around) and around[at - 1] == around[at] for at in (start, end))
    edit = None if is_cut else (spans[0][0], spans[-1][1])
    unseen = [each for each in whole.unseen if each in value]
    return Word(value, spans, edit or whole.place, edit, unseen, bool(unseen))
