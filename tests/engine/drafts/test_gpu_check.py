"""`seamark gpu-check`: its lane with drafts rehearsed on a CPU, with stand-ins for the kernels and without."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_patches.gpu_check import processes
from engine_patches.gpu_check.judge import NOT_RUN, OK, WRONG, Check
from engine_patches.gpu_check.lanes import lanes_of
from engine_patches.gpu_check.processes import Engines, ProcessEnd
from engine_patches.gpu_check.questions import DEFECTS, EXACT, ROW_DEFECTS
from engine_patches.gpu_check.runner import Runner
from proxy.bench.harness.servers import NEMOTRON_H, generated_model
from tests.harness.draft_defects import ROWS_NOT_KEPT

pytestmark = pytest.mark.thorough

SECONDS = 900.0  # for all engines of the lane

WINDOW = "100"  # tokens

LANE = next(lane for lane in lanes_of("cpu", quick=False) if lane.drafts is not None)


class Remembering:
    """Starts each engine once."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.outcomes: dict[str, ProcessEnd] = {}

    def run(self, name: str, *args: Any) -> ProcessEnd:
        if name not in self.outcomes:
            self.outcomes[name] = self._engines.run(name, *args)
        return self.outcomes[name]


@pytest.fixture(scope="module")
def model() -> Path:
    return generated_model(print, NEMOTRON_H, mtp=True)


@pytest.fixture(scope="module")
def engines(model, tmp_path_factory) -> Remembering:
    """The engines of the lane with stand-ins, after it has run once."""
    return run_once(Remembering(Engines(tmp_path_factory.mktemp("drafts"), True, SECONDS)), model)


@pytest.fixture(scope="module")
def windowed(model, tmp_path_factory) -> Remembering:
    """The same with a window on the head."""
    return run_once(Remembering(Engines(tmp_path_factory.mktemp("windows"), True, SECONDS)), model, WINDOW)


def run_once(engines: Remembering, model: Path, *more: str) -> Remembering:
    """Run the lane; `more`: arguments of `draft_job`."""
    with pytest.MonkeyPatch.context() as patching:
        command = [sys.executable, "-m", "tests.harness.draft_job"]
        patching.setattr(processes, "_command", lambda job, result: [*command, str(job), str(result), *more])
        checks_of(engines, model)
    return engines


def checks_of(engines: Any, model: Path) -> Sequence[Check]:
    return list(Runner(engines).run(LANE, model))


def named(checks: Sequence[Check], beginning: str) -> Check:
    return next(check for check in checks if check.name.startswith(beginning))


def test_with_stand_ins_all_is_right_and_drafts_as_often_with_hits_as_without(engines, model):
    checks = checks_of(engines, model)
    assert {check.verdict for check in checks} == {OK}, checks
    assert len(checks) == 1 + 2 + 2 * 3 + 2  # vLLM alone, twice; judged with the oracle's and the head's own drafts
    exact = named(checks, "exactness").numbers
    assert exact is not None and exact["from_cache"] > exact["answers"] / 2 and not exact["wrong_hits"]
    facts = checks[0].numbers
    assert facts is not None and facts["drafts"] and facts["ahead"] == 16 and facts["hints_refused"] is None
    shares = named(checks, "acceptance").numbers
    assert shares is not None and 0.4 < shares["Seamark"] == shares["vLLM alone without its cache"] < 0.7
    own, behind = shares["own drafts"], shares["behind hits"]
    assert own["equal"] == own["compared"] > 50 and behind["Seamark"] == behind["vLLM alone without its cache"] > 0.4
    right = {right for _, right in engines.outcomes[f"{LANE.name} patched, oracle"].result.verified}
    assert right == {0, 1, 2, 3}


@pytest.mark.parametrize("defect", DEFECTS)
def test_an_engine_with_a_planted_defect_is_found_wrong(engines, model, monkeypatch, defect):
    """What engines answered while they had the defect, taken for what they always answer."""
    for name, outcome in list(engines.outcomes.items()):
        result = outcome.result
        spoiled = {"sections": {**result.sections, EXACT: result.sections[defect]}}
        spoiled["answers"] = {**result.answers, EXACT: result.answers[defect]}
        monkeypatch.setitem(engines.outcomes, name, ProcessEnd(replace(result, **spoiled)))
    checks = checks_of(engines, model)
    assert named(checks, "exactness").verdict == WRONG
    assert {check.verdict for check in checks if check.name.startswith("vLLM alone")} == {OK}


def test_a_head_with_a_window_drafts_behind_hits_as_without_a_cache_and_lost_rows_would_show(windowed, model):
    checks = checks_of(windowed, model)
    assert {check.verdict for check in checks} == {OK}, checks
    numbers = named(checks, "acceptance").numbers
    assert numbers is not None and numbers["own drafts"]["equal"] == numbers["own drafts"]["compared"] > 50
    seen = named(checks, "the check can see rows of the draft head").numbers
    assert seen is not None and seen.keys() == set(ROW_DEFECTS)


def test_an_engine_that_keeps_no_rows_is_found_wrong_by_its_drafts_alone(windowed, model, tmp_path):
    others = {name: outcome for name, outcome in windowed.outcomes.items() if "patched" not in name}
    spoiled = Remembering(Engines(tmp_path, True, SECONDS))
    spoiled.outcomes = others
    checks = checks_of(run_once(spoiled, model, WINDOW, ROWS_NOT_KEPT), model)
    wrong = [check for check in checks if check.verdict == WRONG]
    assert [check.name for check in wrong] == [f"acceptance, {LANE.name}"] and "behind hits" in wrong[0].says


def test_without_stand_ins_vllm_itself_does_not_draft_on_a_cpu(model, tmp_path):
    checks = checks_of(Engines(tmp_path, True, SECONDS), model)
    assert checks[-1].verdict == NOT_RUN and WRONG not in {check.verdict for check in checks}
    assert "vLLM alone does not run here" in checks[-1].says or "vLLM itself" in checks[-1].says
