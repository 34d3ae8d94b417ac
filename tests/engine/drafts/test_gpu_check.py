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
from engine_patches.gpu_check.questions import DEFECTS, EXACT
from engine_patches.gpu_check.runner import Runner
from proxy.bench.harness.servers import NEMOTRON_H, generated_model

pytestmark = pytest.mark.thorough

SECONDS = 900.0  # for all engines of the lane

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
    with pytest.MonkeyPatch.context() as patching:
        command = [sys.executable, "-m", "tests.harness.draft_job"]
        patching.setattr(processes, "_command", lambda job, result: [*command, str(job), str(result)])
        remembering = Remembering(Engines(tmp_path_factory.mktemp("drafts"), True, SECONDS))
        list(checks_of(remembering, model))
    return remembering


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


def test_without_stand_ins_vllm_itself_does_not_draft_on_a_cpu(model, tmp_path):
    checks = checks_of(Engines(tmp_path, True, SECONDS), model)
    assert checks[-1].verdict == NOT_RUN and WRONG not in {check.verdict for check in checks}
    assert "vLLM alone does not run here" in checks[-1].says or "vLLM itself" in checks[-1].says
