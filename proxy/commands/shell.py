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

Span = tuple[int, int]  # of the script's characters

_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)*+")
_ENDS = " \t\r\n;&|<>()"  # of a word
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=")
_REDIRECTION = re.compile(r"(?:\d+|&)?(<<<|<<-?|<>|>>|>\||[<>]&?)")
_OPERATOR = re.compile(r"\n|;;?&?|&&?|\|[|&]?|[()]")
_OPENING, _CLOSING = ("if", "while", "until", "for", "select", "case"), ("fi", "done", "esac")
_KEYWORD = re.compile(rf"({'|'.join((*_OPENING, *_CLOSING))}|then|elif|else|do|time|function|[!{{}}])(?=[\s;&|)]|$)")
_DECLARING = ("export", "local", "declare", "typeset", "readonly")
_READING = ("read", "mapfile", "readarray")
_EXPANSION = re.compile(rf"\$(?:{_NAME}|[\d@*#?$!-]|[{{(])|`")
_PARAMETER = re.compile(
    rf"\$(?:({_NAME}|\d|[@*])|\{{({_NAME}|\d+|[@*])(\[[@*]\])?(?:(:?)([-=?+])(.*))?\}})", re.S | re.ASCII
)


class Word(NamedTuple):
    value: str  # without quotes, and with what its expansions hold
    spans: Sequence[Span]  # of each character: where that is written
    place: Span  # of the word itself, with its quotes
    edit: Span | None  # what holds it and nothing else, which may be where a variable is set
    unseen: Sequence[str] = ()  # expansions in it of which nothing is known
    several: bool = False  # because of those it may be several words, or none


class Command(NamedTuple):
    words: Sequence[Word]
    variables: Mapping[str, str]  # for it alone
    before: str  # the operator or keyword in front of it
    place: Span
    is_cut: bool  # by a comment, between lines that are to be one


class _Piece(NamedTuple):
    """A character of a word, or an expansion in it."""

    text: str
    start: int
    end: int
    is_quoted: bool
    expands: bool = False


class _Variable(NamedTuple):
    words: Sequence[Word] | None  # None: not seen
    is_array: bool
    is_conditional: bool = False


class Script:
    """`known`: variables that are set outside; None: none is expanded. `spans`: of a text within a script."""

    def __init__(
        self,
        text: str,
        known: Mapping[str, str] | None,
        source: str,
        spans: Sequence[Span] | None = None,
        level: int = 0,
    ) -> None:
        self._text, self._known, self._source, self._spans, self._level = text, known, source, spans, level
        self._variables: dict[str, _Variable] = {}
        self._left, self._depth = MOST_FILLED, 0
        self._inside: list[Command] = []  # of substitutions
        self.ambiguous: dict[str, None] = {}  # variables that may hold something else, by a condition
        self.sourced: list[str] = []  # files of which nothing is seen

    @property
    def variables(self) -> dict[str, str]:
        """What is set so far."""
        scalars = {
            name: each.words[0].value for name, each in self._variables.items() if each.words and not each.is_array
        }
        return {name: value for name, value in scalars.items() if name != "@"}

    @property
    def names(self) -> set[str]:
        """What it sets, seen or not."""
        return {*self._variables}

    def within(self, word: Word, known: Mapping[str, str]) -> Script:
        """The script that a word holds, for another shell."""
        expanded = None if self._known is None else {**known}
        return Script(word.value, expanded, self._source, word.spans, self._level + 1)

    def commands(self, at: int = 0, stop: int | None = None) -> Iterator[Command]:
        """In their order. What is set when one comes is what is set before it. Raises `SettingsError`."""
        if self._level > MOST_LEVELS:
            raise SettingsError(f"{self._source}: its quotes are too many inside each other")
        text, stop, before = self._text, len(self._text) if stop is None else stop, "\n"
        documents: list[str] = []
        while (at := self._blank(at)) < stop:
            if text[at] == "#":
                at = self._line_end(at)
            elif (operator := _OPERATOR.match(text, at)) and not text.startswith("&>", at):
                before, at = operator[0], operator.end()
                while before == "\n" and documents and at < stop:
                    end = self._line_end(at)
                    if text[at:end].strip() == documents[0]:
                        del documents[0]
                    at = min(end + 1, stop)
            elif keyword := _KEYWORD.match(text, at):
                before, at = keyword[1], keyword.end()
                self._depth += (before in _OPENING) - (before in _CLOSING)
            else:
                command, at = self._command(at, stop, before, documents)
                inside, self._inside = self._inside, []
                yield from inside
                if command.words and before not in ("for", "select", "case"):
                    yield command
                before = ""

    def _command(self, at: int, stop: int, before: str, documents: list[str]) -> tuple[Command, int]:
        text, start, end = self._text, at, at
        words: list[Word] = []
        assigned: list[tuple[str, bool, Sequence[Word], bool]] = []
        is_cut = False
        while (at := self._blank(at)) < stop and (text[at] not in "\n;|()&" or text.startswith("&>", at)):
            if text[at] == "#" and at > end:
                is_cut = "\\\n" in text[end:at]
                break
            if redirection := _REDIRECTION.match(text, at):
                at = begin = self._blank(redirection.end())
                if text.startswith("(", at):
                    at = self._behind(at + 1, ")", begin)
                pieces, at = self._pieces(at, _ENDS, stop)
                if redirection[1] in ("<<", "<<-"):
                    documents.append("".join(piece.text for piece in pieces))
            elif (not words or words[0].value in _DECLARING) and (name := _ASSIGNMENT.match(text, at)):
                value, is_array, at = self._assigned(name.end(), stop)
                assigned.append((name[1], bool(name[2]), value, is_array))
            else:
                begin = at
                pieces, at = self._pieces(at, _ENDS, stop)
                words += self._words(pieces, begin, at)
            end = at
        self._conditional = self._depth > 0 or before in ("&&", "||")
        own = {name: value[0].value for name, _, value, _ in assigned if value}
        if not words or words[0].value in _DECLARING:
            for name, is_added, value, is_array in assigned:
                self._set(name, value, is_array, is_added)
        elif before in ("for", "select"):
            each = words[2:] if len(words) > 1 and words[1].value == "in" else []
            self._variables[words[0].value] = _Variable(each if len(each) == 1 else None, False)
        elif words[0].value in _READING:
            self._variables.update(
                {word.value: _Variable(None, False) for word in words[1:] if word.value.isidentifier()}
            )
        elif [word.value for word in words[:2]] == ["set", "--"]:
            self._variables["@"] = _Variable(words[2:], True)
        return Command(words, own, before, self._span(start, end), is_cut), at

    def _assigned(self, at: int, stop: int) -> tuple[Sequence[Word], bool, int]:
        """The value that begins there, whether it is an array, and where it ends."""
        start = at
        if not self._text.startswith("(", at):
            pieces, at = self._pieces(at, _ENDS, stop)
            return [self._one(pieces, self._span(start, at))], False, at
        words: list[Word] = []
        at += 1
        while (at := self._blank(at)) < stop and self._text[at] != ")":
            if self._text[at] == "#":
                at = self._line_end(at)
            elif self._text[at] in _ENDS:
                at += 1
            else:
                begin = at
                pieces, at = self._pieces(at, _ENDS, stop)
                words += self._words(pieces, begin, at)
        if at >= stop:
            raise self._open(start)
        return words, True, at + 1

    def _set(self, name: str, value: Sequence[Word], is_array: bool, is_added: bool) -> None:
        before, conditional = self._variables.get(name), self._conditional
        if is_added:
            old = self._value_of(name)
            if conditional:
                self.ambiguous[name] = None
            if old is None and (before is not None or name in (self._known or {})):
                return
            if is_array:
                value = [*(old or ()), *value]
            else:
                texts = [*(old or ()), *value]
                value = [_joined(texts, "", texts[-1].place)]
        elif conditional and (before is not None or name in (self._known or {})):
            same = before is not None and before.words is not None
            if same and [word.value for word in before.words or ()] == [word.value for word in value]:
                return
            self.ambiguous[name] = None
            if before is not None and before.is_conditional:
                self._variables[name] = _Variable(None, is_array)
            return
        self._variables[name] = _Variable(
            value, is_array or (is_added and before is not None and before.is_array), conditional
        )

    def _words(self, pieces: Sequence[_Piece], start: int, end: int) -> list[Word]:
        """What a word as it is spelt becomes: one, or several, or none."""
        place = self._span(start, end)
        parts = [piece for piece in pieces if piece.text]
        if len(parts) != 1 or not parts[0].expands:
            return [self._one(pieces, place)] if pieces else []
        (piece,) = parts
        is_array = re.match(r"\$[@*]|\$\{[@*]|\$\{\w+\[[@*]\]", piece.text)
        if (found := self._value(piece)) is None:
            text, several = _spelt(piece), bool(is_array) or not piece.is_quoted
            return [Word(text, [place] * len(text), place, self._edit(start, end), (text,), several)]
        if is_array:
            return [*found]
        whole = _joined(found, " ", place)
        if piece.is_quoted:
            return [whole._replace(edit=self._edit(start, end))]
        words = [self._part(whole, *each.span()) for each in re.finditer(r"\S+", whole.value)]
        return words if len(words) != 1 else [words[0]._replace(place=place)]

    def _part(self, whole: Word, start: int, end: int) -> Word:
        """A word of those that a variable holds."""
        value, spans = whole.value[start:end], whole.spans[start:end]
        is_cut = start > 0 and whole.spans[start - 1] == spans[0]
        is_cut = is_cut or (end < len(whole.value) and whole.spans[end] == spans[-1])
        edit = None if is_cut else (spans[0][0], spans[-1][1])
        unseen = [each for each in whole.unseen if each in value]
        return Word(value, spans, edit or whole.place, edit, unseen, bool(unseen))

    def _one(self, pieces: Sequence[_Piece], place: Span) -> Word:
        """A word that stays one, whatever it holds."""
        parts = [piece for piece in pieces if piece.text]
        words: list[Word] = []
        for piece in parts:
            span = self._span(piece.start, piece.end)
            if not piece.expands:
                words.append(Word(piece.text, [span], span, None))
            elif (found := self._value(piece)) is None:
                text = _spelt(piece)
                words.append(Word(text, [span] * len(text), span, None, (text,)))
            else:
                whole = _joined(found, " ", span)
                words.append(whole if len(parts) == 1 else whole._replace(spans=[span] * len(whole.value)))
        edit = self._edit(pieces[0].start, pieces[-1].end) and place if pieces else None
        return _joined(words, "", place)._replace(edit=edit)

    def _value(self, piece: _Piece) -> Sequence[Word] | None:
        """What an expansion holds; None: that is not seen."""
        text, span = piece.text, self._span(piece.start, piece.end)
        if text.startswith(("$(", "`")):
            if re.match(r"`\s*#", text):
                return []  # a comment between lines that are one
            if not text.startswith("$(("):
                self._level += 1
                self._inside = [*self.commands(piece.start + (2 if text[0] == "$" else 1), piece.end - 1)]
                self._level -= 1
            return None
        if (found := _PARAMETER.fullmatch(text)) is None or self._known is None:
            return None
        name, operator = found[1] or found[2], found[5]
        words = self._value_of(name, span)
        if words is None and (name in self._variables or not operator or operator == "?"):
            return None
        is_set = words is not None and (not found[4] or any(word.value for word in words))
        if operator and is_set == (operator == "+"):
            pieces, _ = self._pieces(piece.start + found.start(6), "", piece.end - 1)
            words = [self._one(pieces, span)]
            if operator == "=":
                self._variables[name] = _Variable(words, False)
        self._left -= sum(len(word.value) for word in words or ())
        if self._left < 0:
            raise SettingsError(f"{self._source}: what it is filled with has more than {MOST_FILLED:,} characters")
        return words or []

    def _value_of(self, name: str, span: Span = (0, 0)) -> Sequence[Word] | None:
        if name in self._variables:
            words = self._variables[name].words
            return None if words and [word.value for word in words] == [*words[0].unseen] else words
        value = (self._known or {}).get(name)
        return None if value is None else [Word(value, [span] * len(value), span, None)]

    def _pieces(self, at: int, ends: str, stop: int) -> tuple[list[_Piece], int]:
        """Those of the word that begins there, and where it ends."""
        text, start, is_quoted = self._text, at, False
        pieces: list[_Piece] = []
        while at < stop and (is_quoted or text[at] not in ends):
            char, end, expands = text[at], at + 1, False
            if char == '"':
                is_quoted, char = not is_quoted, ""
            elif char == "\\":
                char = text[at + 1 : at + 2]
                end = at + 1 + len(char)
                if char == "\n":
                    char = ""
                    if not is_quoted:
                        at = end
                        continue
                elif is_quoted and char not in ('"', "\\", "$", "`"):
                    char, end = "\\", at + 1
            elif char == "'" and not is_quoted:
                if (close := text.find("'", at + 1, stop)) < 0:
                    raise self._open(start)
                pieces += [_Piece("", at, at, True)]
                pieces += [_Piece(text[place], place, place + 1, True) for place in range(at + 1, close)]
                char, at, end = "", close, close + 1
            elif expansion := _EXPANSION.match(text, at):
                end, expands = expansion.end(), True
                if expansion[0][-1] in "{(`":
                    end = self._behind(end, {"{": "}", "(": ")"}.get(expansion[0][-1], "`"), start, is_quoted)
                char = text[at:end]
            elif char == "$" and text[end : end + 1] in ("'", '"') and not is_quoted:
                at = end
                continue
            pieces.append(_Piece(char, at, end, is_quoted, expands))
            at = end
        if is_quoted:
            raise self._open(start)
        return pieces, at

    def _behind(self, at: int, close: str, start: int, is_quoted: bool = False, level: int = 0) -> int:
        """Where what a bracket or a quote has opened is closed again."""
        text = self._text
        if level > MOST_LEVELS:
            raise SettingsError(f"{self._source}: its brackets are too many inside each other")
        while at < len(text):
            char = text[at]
            if char == close:
                return at + 1
            if char == "\\":
                at += 2
            elif char == "'" and not is_quoted and close != '"':
                at = text.find("'", at + 1) + 1 or len(text)
            elif char == "#" and close == ")" and text[at - 1] in _ENDS:
                at = self._line_end(at)
            elif text.startswith(("$(", "${"), at):
                at = self._behind(
                    at + 2, ")" if text[at + 1] == "(" else "}", start, text[at + 1] == "{" and is_quoted, level + 1
                )
            elif char in '"`' or (char == "(" and close == ")"):
                at = self._behind(at + 1, ")" if char == "(" else char, start, char == '"', level + 1)
            else:
                at += 1
        raise self._open(start)

    def _open(self, at: int) -> SettingsError:
        return SettingsError(f"{self._source}: a quote behind `{self._text[at : at + 30]}` is not closed")

    def _blank(self, at: int) -> int:
        return _BLANK.match(self._text, at).end()  # type: ignore[union-attr]  # it fits nothing, too

    def _line_end(self, at: int) -> int:
        return end if (end := self._text.find("\n", at)) >= 0 else len(self._text)

    def _span(self, start: int, end: int) -> Span:
        """In the script, of a place in this text."""
        if self._spans is None:
            return start, end
        if start >= len(self._spans):
            return (self._spans[-1][1],) * 2 if self._spans else (0, 0)
        return self._spans[start][0], self._spans[max(start, end - 1)][1]

    def _edit(self, start: int, end: int) -> Span | None:
        spans = self._spans
        if spans is not None and start < end:
            if start and spans[start - 1] == spans[start]:
                return None
            if end < len(spans) and spans[end - 1] == spans[end]:
                return None
        return self._span(start, end)


def _spelt(piece: _Piece) -> str:
    """An expansion that is not seen, as one word."""
    return re.sub(r"\s.*(?=.$)", "...", piece.text, flags=re.S)


def _joined(words: Sequence[Word], between: str, place: Span) -> Word:
    spans: list[Span] = []
    for number, word in enumerate(words):
        spans += [word.place] * len(between if number else "")
        spans += word.spans
    unseen = [each for word in words for each in word.unseen]
    return Word(between.join(word.value for word in words), spans, place, None, unseen)
