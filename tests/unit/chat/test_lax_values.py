"""Flags and numbers in the spellings that pydantic takes, and no others."""

from __future__ import annotations

import pytest

from proxy.chat.lax_values import flag, number


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        *((value, True) for value in (True, 1, 1.0, "1", "true", "True", "yes", "on", "t", "y")),
        *((value, False) for value in (False, None, 0, 0.0, "0", "false", "no", "off")),
        *((value, None) for value in (2, -1, 0.5, "", "maybe", [], {}, [True])),
    ],
)
def test_a_flag_is_what_the_worker_reads(value, wanted):
    assert flag(value) is wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        *((value, value) for value in (0, 7, -7)),
        *(("2", 2), (2.0, 2), (" 2 ", 2), (True, 1), (False, 0)),
        *((value, None) for value in (None, "", "two", 2.5, [], {})),
    ],
)
def test_a_number_is_what_the_worker_reads(value, wanted):
    found = number(value)
    assert found == wanted and type(found) is type(wanted)
