"""Texts that commands say and conversions make, whole, kept in folders `golden` to be read as a diff."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


AS = "~~~ as "


def as_another(name: str, whole: str, text: str) -> str:
    """What differs from the text `name`: lines in place of others (`!`), further ones (`+`), and those gone (`-`)."""
    old, new = whole.splitlines(), text.splitlines()
    lines = []
    for kind, start, end, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            both = min(end - start, last - first)
            lines += [f"! {line}" for line in new[first : first + both]]
            lines += [f"+ {line}" for line in new[first + both : last]]
            lines += [f"- {line}" for line in old[start + both : end]]
    return "".join(f"{line}\n" for line in [f"{AS}{name}", *lines])


@pytest.fixture
def expect_golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`expect_golden(name, case, text)`: the text has to be the part `case` of `golden/NAME.txt`.

    A part may be said as another one: `as_another`. Where there is none it is written, and the test fails.
    SEAMARK_GOLDEN=1 writes all anew. More arguments: what differs from one run or machine to the next, by the word that
    stands for it.
    """

    def expect_golden(name: str, case: str, text: str, **called: Path | str) -> None:
        for word, place in {**called, "PYTHON": sys.executable, "SOURCE": ROOT}.items():
            text = text.replace(str(place), f"<{word}>")
        path = request.path.parent / "golden" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        parts = re.split(r"^=== (.*)\n", path.read_text() if path.exists() else "", flags=re.M)[1:]
        kept = dict(zip(parts[::2], parts[1::2], strict=True))
        given, known = text.rstrip("\n") + "\n", kept.get(case, "")
        base = known.partition("\n")[0].removeprefix(AS) if known.startswith(AS) else ""
        said = as_another(base, kept[base], given) if base else given
        if said != known and (not known or os.environ.get("SEAMARK_GOLDEN")):
            others = [(name, whole) for name, whole in kept.items() if name != case and not whole.startswith(AS)]
            new = min([given, *(as_another(*other, given) for other in others)], key=lambda each: each.count("\n"))
            path.write_text("".join(f"=== {each}\n{part}" for each, part in {**kept, case: new}.items()))
            assert os.environ.get("SEAMARK_GOLDEN"), f"{path.name} had no part {case!r}; read what is there now"
        else:
            assert said == known

    return expect_golden
