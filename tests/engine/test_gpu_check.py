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
from typing import Any, ClassVar

import pytest

from engine_patches.gpu_check import command
from engine_patches.gpu_check.judge import OK
from engine_patches.gpu_check.lanes import DEFECTS, FAR, FIRST, RESEND, lanes_of
from engine_patches.gpu_check.runner import Engines, ProcessEnd

pytestmark = pytest.mark.thorough

LANE = "nemotron_h float32"

CHECKS = ("environment", f"exactness, {FIRST}", f"exactness, {RESEND}", "the check can see", "forward passes", "speed")


class Remembering(Engines):
    """Engines that are started once: the same questions have the same answers in the next run of the command."""

    outcomes: ClassVar[dict[str, ProcessEnd]] = {}

    def run(self, name: str, *args: Any) -> Iterator[ProcessEnd]:  # type: ignore[override]
        if name not in self.outcomes:
            *_, self.outcomes[name] = super().run(name, *args)
        yield self.outcomes[name]


def run(folder: Path) -> tuple[int, str, dict[str, Any], dict[str, dict[str, Any]]]:
    """Exit status, what was printed, the report, and its checks."""
    file, printed = folder / "report.json", io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "Engines", Remembering)
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(command, "lanes_of", lambda device, flags: lanes_of(device, flags)[:1])
        status = command.main(["--minutes", "15", "--report", str(file)])
    written = json.loads(file.read_text())
    (lane,) = written["results"]
    return status, printed.getvalue(), written, {c["name"].removesuffix(f", {LANE}"): c for c in lane["checks"]}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Any:
    return run(tmp_path_factory.mktemp("rehearsal"))


def test_two_engines_prove_a_lane_on_a_cpu_and_the_report_can_be_given_to_others(rehearsal):
    status, printed, written, checks = rehearsal
    assert status == written["exit"] == 0, printed
    assert {name: checks[name]["verdict"] for name in CHECKS} == dict.fromkeys(CHECKS, OK)
    assert list(Remembering.outcomes) == [f"{LANE} alone", f"{LANE} patched"]
    assert printed.rstrip().splitlines()[-1] == written["verdict"]
    assert "says nothing about a GPU's kernels" in written["verdict"]
    facts, exact = checks["environment"]["numbers"], checks[f"exactness, {FIRST}"]["numbers"]
    assert facts["device"] == "CPU" and facts["vllm"] == "0.32.0" and facts["runner"] == "V1"
    assert facts["patches_live"] and facts["writes_in_forward"] and facts["block"] == 384 and facts["match_unit"] == 16
    assert exact["from_cache"] > exact["seamark"]["answers"] / 2 and exact["seamark"]["error"] <= 1e-4
    text = json.dumps(written)
    assert platform.node() not in text and str(Path.home()) not in text and tempfile.gettempdir() not in text


def test_passes_and_seconds_stand_beside_those_of_vllm_alone(rehearsal):
    """Which one is faster, nobody can say here; what each found in its cache, and wrote, is certain."""
    passes, speed = (rehearsal[3][name]["numbers"] for name in ("forward passes", "speed"))
    assert [each["cached"] for each in passes["Seamark"]] == [0, 192, 0, 768]
    assert {each["passes"] for each in passes["Seamark"]} == {1} and len(passes["vLLM alone"]) == 4
    cold = [(each["tokens"], each["states"]) for each in speed["seamark"] if each["case"] == "cold"]
    assert cold == [(500, 0), (500, 1), (500, 3), (500, 8), (2000, 0), (2000, 1), (2000, 3), (2000, 8)]
    mine, alone = ({(e["case"], e["tokens"]): e["cached"] for e in speed[name]} for name in ("seamark", "alone"))
    assert mine["warm", 163] == 160 and mine["warm", 2000] == 2000 and alone.keys() == mine.keys()
    assert alone["warm", 163] == 0 and alone["warm", 2000] <= 1920
    assert speed["decode_ratio"] > 0 and speed["pace"]["floor"] > 0


@pytest.mark.parametrize("defect", DEFECTS)
def test_an_engine_with_a_planted_defect_is_found_wrong(rehearsal, monkeypatch, tmp_path, defect):
    """What the engine answered while it had the defect, taken for what it always answers; also far behind the state."""
    for name, end in Remembering.outcomes.items():
        asked, said = {FIRST: end.result.sections[defect]}, {FIRST: end.result.answers[defect]}
        sections, answers = {**end.result.sections, **asked}, {**end.result.answers, **said}
        spoiled = replace(end.result, sections=sections, answers=answers)
        monkeypatch.setitem(Remembering.outcomes, name, ProcessEnd(spoiled))
    status, _, written, checks = run(tmp_path)
    numbers = checks[f"exactness, {FIRST}"]["numbers"]
    assert status == 1 and written["verdict"].startswith(f"WRONG: {LANE}") and not numbers["wrong_hits"]
    assert len([words for words in numbers["wrong_answers"] if words.startswith(f"{FAR} tokens on")]) == 2
