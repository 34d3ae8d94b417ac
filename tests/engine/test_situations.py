"""What the scheduler does in each situation is what the table of situations says."""

from __future__ import annotations

import pytest

from tests.harness.scheduler_process import run_forked
from tests.harness.situation_table import EXPECTED


@pytest.fixture(scope="module")
def shown(model):
    return run_forked("scheduler_situations", str(model))


def test_all_situations_were_run(shown):
    assert shown.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_situation(shown, name):
    assert shown[name]["errors"] == []
    assert {key: value for key, value in shown[name].items() if key != "errors"} == EXPECTED[name]


def test_the_audit_notices_rows_that_are_copied_before_they_are_written(model):
    found = run_forked("scheduler_situations", str(model), "written-rows")
    assert {name for name, scene in found.items() if scene["errors"]} == {
        "the same prompt twice in one step",
        "rows evicted and their state kept",
        "rows of the second attention group evicted",
        "a connector looks up in its own way",
    }
