"""SECURITY.md: each test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROWS = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if "`tests/" in line]


@pytest.mark.parametrize("row", ROWS)
def test_each_defence_has_the_tests_that_are_named(row):
    named = re.findall(r"`(tests/\S+\.py)`((?:,? `[tT]est_?\w+`)+)", row)
    assert named
    for file, tests in named:
        source = (ROOT / file).read_text()
        for test in re.findall(r"\w+", tests):  # a function, or a machine's class
            assert re.search(rf"^(?:(?:async )?def {test}\(|{test} = )", source, re.M), f"{file} has no {test}"


def test_the_table_is_read():
    assert len(ROWS) > 15
