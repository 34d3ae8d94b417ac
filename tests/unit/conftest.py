"""Texts that commands say and conversions make, whole, kept in folders `golden` to be read as a diff."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def expect_golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`expect_golden(name, case, text)`: the text has to be the part `case` of `golden/NAME.txt`.

    Where there is none it is written, and the test fails. SEAMARK_GOLDEN=1 writes all anew. More arguments: what
    differs from one run or machine to the next, by the word that stands for it.
    """

    def expect_golden(name: str, case: str, text: str, **called: Path | str) -> None:
        for word, place in {**called, "PYTHON": sys.executable, "SOURCE": ROOT}.items():
            text = text.replace(str(place), f"<{word}>")
        path = request.path.parent / "golden" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        parts = re.split(r"^=== (.*)\n", path.read_text() if path.exists() else "", flags=re.M)[1:]
        kept = dict(zip(parts[::2], parts[1::2], strict=True))
        given = text.rstrip("\n") + "\n"
        known = kept.get(case)
        if known != given and (known is None or os.environ.get("SEAMARK_GOLDEN")):
            path.write_text("".join(f"=== {each}\n{said}" for each, said in {**kept, case: given}.items()))
            assert os.environ.get("SEAMARK_GOLDEN"), f"{path.name} had no part {case!r}; read what is there now"
        else:
            assert given == known

    return expect_golden
