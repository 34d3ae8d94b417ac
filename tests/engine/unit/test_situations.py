"""What the scheduler does in each situation is what the table of situations says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.patched_vllm import patched_vllm
from tests.harness.scheduler_situations import results
from tests.harness.situation_table import EXPECTED


@pytest.fixture(scope="module", params=[0, 16], ids=["two kinds of groups", "beside an index, its ring and n-grams"])
def shown(model: Path, request: pytest.FixtureRequest):
    with patched_vllm():
        return results(str(model), request.param)


def test_all_situations_were_run(shown):
    assert shown.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_situation(shown, name):
    assert shown[name]["errors"] == []
    assert {key: value for key, value in shown[name].items() if key != "errors"} == EXPECTED[name]


def test_the_audit_notices_rows_that_are_copied_before_they_are_written(model: Path):
    with patched_vllm("written-rows"):
        found = results(str(model))
    assert {name for name, scene in found.items() if scene["errors"]} == {
        "the same prompt twice in one step",
        "rows evicted and their state kept",
        "rows of the second attention group evicted",
        "a connector looks up in its own way",
    }
