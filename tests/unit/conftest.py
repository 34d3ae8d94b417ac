"""Texts that commands say and conversions make, whole, kept in folders `golden` to be read as a diff."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.version import version

ROOT = Path(__file__).parents[2]


AS = " ~~~ as "  # behind the name of a part, and before that of another one


def as_another(whole: str, text: str) -> str:
    """What differs from another text, as `diff -U0` says it."""
    lines = list(difflib.unified_diff(whole.splitlines(), text.splitlines(), n=0, lineterm=""))
    return "".join(f"{line}\n" for line in lines[2:])  # behind the names of two files


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
        text = text.replace(version(), "<VERSION>").replace(version().partition("+")[0], "<VERSION>")
        path = request.path.parent / "golden" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        parts = re.split(r"^=== (.*)\n", path.read_text() if path.exists() else "", flags=re.M)[1:]
        kept = {}
        for header, part in zip(parts[::2], parts[1::2], strict=True):
            each, _, base = header.partition(AS)
            kept[each] = base, part
        given = text.rstrip("\n") + "\n"
        base, known = kept.get(case, ("", ""))
        said = as_another(kept[base][1], given) if base else given
        if said != known and (case not in kept or os.environ.get("SEAMARK_GOLDEN")):
            is_base = any(base == case for base, _ in kept.values())  # and so is kept whole
            others = {each: whole for each, (base, whole) in kept.items() if each != case and not base and not is_base}
            new = [(each, as_another(whole, given)) for each, whole in others.items()]
            new = [part for part in new if 3 * part[1].count("\n") < 2 * given.count("\n")]
            kept[case] = min(new, key=lambda part: part[1].count("\n"), default=("", given))
            headers = {each: f"{each}{AS}{base}" if base else each for each, (base, _) in kept.items()}
            path.write_text("".join(f"=== {headers[each]}\n{part}" for each, (_, part) in kept.items()))
            assert os.environ.get("SEAMARK_GOLDEN"), f"{path.name} had no part {case!r}; read what is there now"
        else:
            assert said == known

    return expect_golden
