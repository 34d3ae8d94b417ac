"""Each folder of `tests/data/setup`: what is said, written and run for it is what its `expected` has.

`SEAMARK_GOLDEN=1 pytest tests/unit/commands/test_setup_cases.py` writes all anew, to be read as a diff.
"""

from __future__ import annotations

import os

import pytest

from tests.harness.setup_cases import CASES, outcome


@pytest.mark.parametrize("case", sorted(each.name for each in CASES.iterdir()))
def test_how_somebody_runs_vllm_is_read_and_written_as_expected(case, tmp_path):
    told, expected = outcome(CASES / case, tmp_path / "my home"), CASES / case / "expected"
    if not expected.exists() or os.environ.get("SEAMARK_GOLDEN"):
        expected.write_text(told)
        assert os.environ.get("SEAMARK_GOLDEN"), f"{case} had nothing that is expected; read what is there now"
    assert told == expected.read_text()
