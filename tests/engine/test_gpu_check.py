"""`seamark gpu-check` rehearsed on a CPU: what it reports, and that it turns red when states are wrong."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine_patches.gpu_check import command
from engine_patches.gpu_check.processes import Engines, ProcessEnd
from engine_patches.gpu_check.questions import DEFECTS, EXACT

LANE = "nemotron_h float32"

CHECKS = ("environment", "exactness", "chunk-aligned", "the check can see", "forward passes", "speed")


class Report(NamedTuple):
    """What one run of the command left."""

    status: int
    printed: str
    written: dict[str, Any]

    @property
    def checks(self) -> dict[str, dict[str, Any]]:
        (lane,) = self.written["results"]
        return {check["name"].removesuffix(f", {LANE}"): check for check in lane["checks"]}


class Remembering(Engines):
    """Engines that are started once: the same questions have the same answers in the next run of the command."""

    outcomes: dict[str, ProcessEnd]

    def run(self, name: str, *args: Any) -> ProcessEnd:
        if name not in self.outcomes:
            self.outcomes[name] = super().run(name, *args)
        return self.outcomes[name]


@pytest.fixture(scope="module")
def engines() -> type[Remembering]:
    return type("Engines", (Remembering,), {"outcomes": {}})


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patching:
        yield patching


def run(folder: Path) -> Report:
    file, printed = folder / "report.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = command.main(["--quick", "--minutes", "15", "--report", str(file)])
    return Report(status, printed.getvalue(), json.loads(file.read_text()))


@pytest.fixture(scope="module")
def rehearsal(engines, patch, model, tmp_path_factory) -> Report:
    """The command as it is, with three engines; only the model is the one at hand."""
    patch.setattr(command, "Engines", engines)
    patch.setattr(command, "write_model", lambda *_, **__: model)
    patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))
    return run(tmp_path_factory.mktemp("rehearsal"))


@pytest.mark.thorough
def test_nothing_is_wrong_on_a_cpu_and_the_report_can_be_given_to_others(rehearsal):
    assert rehearsal.status == rehearsal.written["exit"] == 0, rehearsal.printed
    assert {name: check["verdict"] for name, check in rehearsal.checks.items()} == dict.fromkeys(CHECKS, "ok")
    assert rehearsal.written["lanes"] == {"ok": 1, "WRONG": 0, "not run": 0, "left out": []}
    assert rehearsal.printed.rstrip().splitlines()[-1] == rehearsal.written["verdict"]
    assert "says nothing about a GPU's kernels" in rehearsal.written["verdict"]
    facts = rehearsal.checks["environment"]["numbers"]
    assert facts["device"] == "CPU" and facts["vllm"] == "0.32.0" and facts["runner"] == "V1"
    assert facts["patches_live"] and facts["writes_in_forward"] and facts["block"] == 384 and facts["match_unit"] == 16
    text = json.dumps(rehearsal.written)
    assert platform.node() not in text and str(Path.home()) not in text and tempfile.gettempdir() not in text


@pytest.mark.thorough
def test_most_answers_come_from_the_cache_and_are_exact_in_one_pass(rehearsal):
    numbers = rehearsal.checks["exactness"]["numbers"]
    assert numbers["answers"] > 25 and numbers["from_cache"] > numbers["answers"] / 2
    assert numbers["other_tokens"] == 0 and numbers["largest_logprob_error"] <= 1e-4
    passes = rehearsal.checks["forward passes"]["numbers"]
    assert [each["passes"] for each in passes["Seamark"]] == [1, 1, 1, 1]
    assert [each["cached"] for each in passes["Seamark"]] == [0, 192, 0, 768]
    assert [each["passes"] for each in passes["without a cache"]] == [1, 1, 1, 1]
    assert len(passes["vLLM alone, its crash cured"]) == 4


@pytest.mark.thorough
def test_speed_stands_beside_that_of_vllm_alone(rehearsal):
    """Which one is faster, nobody can say here; what each found in its cache is certain."""
    numbers = rehearsal.checks["speed"]["numbers"]
    mine, alone = (
        {(each["case"], each["shared"]): each["cached"] for each in numbers[name]} for name in ("seamark", "alone")
    )
    assert mine["warm", 163] == 160 and mine["warm", 2000] == 2000 and mine["cold", 2000] == 0
    assert alone.keys() == mine.keys() and alone["warm", 163] == 0 and alone["warm", 2000] <= 1920
    assert all(ratio > 0 for ratio in [*numbers["ratios"].values(), numbers["decode_ratio"]])
    assert numbers["pace"]["floor"] > 0 and numbers["pace"]["token"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("defect", DEFECTS)
def test_an_engine_with_a_planted_defect_is_found_wrong(rehearsal, engines, monkeypatch, tmp_path, defect):
    """What the engine answered while it had the defect, taken for what it always answers."""
    for name in (f"{LANE} patched", f"{LANE} reference"):
        result = engines.outcomes[name].result
        asked, said = {EXACT: result.sections[defect]}, {EXACT: result.answers[defect]}
        spoiled = replace(result, sections={**result.sections, **asked}, answers={**result.answers, **said})
        monkeypatch.setitem(engines.outcomes, name, ProcessEnd(spoiled))
    report = run(tmp_path)
    numbers = report.checks["exactness"]["numbers"]
    assert report.status == 1 and report.checks["exactness"]["verdict"] == "WRONG"
    assert not numbers["wrong_hits"] and len(numbers["wrong_answers"]) == 2
    assert "2 wrong answers: warm: " in " ".join(report.printed.split())
    assert report.written["verdict"].startswith(f"WRONG: {LANE}")


def test_where_nothing_was_run_nothing_is_proven(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "Engines", Engines)
    monkeypatch.setattr(command, "write_model", lambda *_, **__: tmp_path)
    assert command.main(["--minutes", "0", "--report", str(tmp_path / "report.json")]) == 3
    printed = capsys.readouterr().out
    assert "no time was left" in printed and printed.splitlines()[-1].startswith("not proven: ")
