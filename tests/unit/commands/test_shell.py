"""Words of a script are read as a shell makes them, and what is written into it stands where it is meant to."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.commands.shell import Script
from proxy.errors import SettingsError

NAMES = ("A", "B", "L")
LITERALS = ["a", "-b", "'c d'", '"e\\"f\\\\ \\g"', "''", '""', "\\ ", "\\$A", "h=i", '"$"', "$'j'", "é#"]
QUOTED = [
    '"$A"',
    '"${B}"',
    '"${B:-k}"',
    '"${Z:-l  m}"',
    '"${Z:-${A}}"',
    '"${A:+n}"',
    '"${Z+o}"',
    '"p $A q"',
    '"${L[*]}"',
]
SPLIT = ["$A", "${B}", "${L[@]}", '"${L[@]}"', "${Z:-r s}", '${Z:-"t u"}', "${Z}", "${A:+v w}", "`# no $word`"]
ENDS = [
    "",
    "\nx",
    "; x",
    " # x",
    " & x",
    " && x",
    " || x",
    " | cat",
    " > /dev/null",
    " 2>&1",
    " < /dev/null",
    " <<'E'\nx\nE",
]

compound = st.lists(st.sampled_from(LITERALS + QUOTED), min_size=1, max_size=3).map("".join)
words = st.lists(st.one_of(compound, st.sampled_from(SPLIT)), max_size=4).map(" ".join)
statements = st.one_of(
    st.builds("{}{}={}".format, st.sampled_from(NAMES[:2]), st.sampled_from(["", "+"]), compound),
    st.builds("L{}=({})".format, st.sampled_from(["", "+"]), words),
    st.builds('export {0}="$A {1}"'.format, st.sampled_from(NAMES[:2]), st.sampled_from(["x y", "z"])),
    st.builds(": ${{Y:={}}}; set -- {}".format, st.sampled_from("ab"), words),
    st.just('for x in 1; do echo "vllm ${x}" >&2; done # it\'s'),
)


def read(text: str) -> list[list[str]]:
    commands = Script(f"A=1 B='2  3' L=() Z=; {text}", {}, "a script").commands()
    return [[word.value for word in each.words] for each in commands]


@given(st.lists(statements, max_size=4), words, st.sampled_from([" ", "\t", " \\\n  "]), st.sampled_from(ENDS))
def test_words_are_those_that_a_shell_makes(before, spelt, space, end):
    text = "\n".join([*before, f"vllm{space}serve{space}{spelt}{end}"])
    prelude = "vllm() { printf '%s\\0' \"$@\" >&3; }; x() { :; }; set -f; A=1; B='2  3'; L=(); Z=\n"
    run = ["bash", "-c", f"exec 3>&1 >/dev/null; {prelude}{text}\nwait"]
    made = subprocess.run(run, capture_output=True, check=False, stdin=subprocess.DEVNULL).stdout.decode()
    assert [each for each in read(text) if each[:1] == ["vllm"]] == [["vllm", *made.split("\0")[:-1]]]


@pytest.mark.parametrize(
    ("text", "value", "unseen", "several"),
    [
        *((text, text, (text,), True) for text in ("$X", "${X}", "$@", "$*", "$1", "${X%.*}", "${#X}", "${!X}")),
        *((f'"{text}"', text, (text,), False) for text in ("$X", "${X[0]}", "$((1+2))", "${X:?no}")),
        *(('"$@"', "$@", ("$@",), True), ('"${X[@]}"', "${X[@]}", ("${X[@]}",), True)),
        *(("$(a b)", "$(a...)", ("$(a...)",), True), ("`a b`", "`a...`", ("`a...`",), True)),
        *(("-p $(a)/$X", "$(a)/$X", ("$(a)", "$X"), False), ("--a=$X", "--a=$X", ("$X",), False)),
        *(("$S", "$S", ("$S",), True), ('"$S-1"', "$S-1", ("$S",), False)),  # which is set to what is not seen
    ],
)
def test_what_is_not_seen_stays_as_it_is_spelt_and_is_named(text, value, unseen, several):
    *_, command = Script(f"S=$(s); read -r X; vllm serve {text}", {"X": "theirs"}, "a script").commands()
    word = command.words[-1]
    assert (word.value, tuple(word.unseen), word.several) == (value, unseen, several)


@pytest.mark.parametrize("end", ["'x", '"x', '"x\\"', '"x\\', "${x", "$(x", "y'x", "A=(x", "`x"])
def test_what_is_not_closed_is_said_with_where_it_begins(end):
    with pytest.raises(SettingsError, match=r"run.sh: a quote behind `.*` is not closed"):
        [*Script(f"a {end}", {}, "run.sh").commands()]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("if x; then A=a; fi", "a"),
        ("[ x ] && A=a", "a"),
        ("A=a\nif x; then A=b; fi", "a"),  # and it is said that it depends on that
        ("if x; then A=a; else A=b; fi", "$A"),
        ("if x; then A=a; else A=a; fi", "a"),
        ("A=a; A=b", "b"),
        ("A=a\n[ x ] && A+=b", "ab"),
        ("for A in a b; do", "$A"),
        ("f() { local A=a", "a"),
        ("cat <<-E\n\tA=b\n\tE\nA=a", "a"),
        ("E=1 A=a x", "$A"),
    ],
)
def test_a_variable_that_may_hold_several_things_is_seen_only_if_one_of_them_is_its_usual_value(text, value):
    *_, command = Script(f"{text}\nvllm $A", {}, "a script").commands()
    assert command.words[-1].value == value
