"""`seamark gpu-check` rehearsed on a CPU: what it reports, and that it turns red when states are wrong."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine_patches.gpu_check import command
from engine_patches.gpu_check.engine import Answer, Passes, Result
from engine_patches.gpu_check.lanes import OTHER_RUNNER, UNTOUCHED, Engines, Lane, Outcome, run_lane
from engine_patches.gpu_check.questions import ALIGNED, DEFECTS, EXACT, RESEND, Geometry, Question, sections
from engine_patches.gpu_check.verdicts import (
    NOT_RUN,
    OK,
    STRICT,
    WRONG,
    Difference,
    Rule,
    compare,
    judge_answers,
    judge_passes,
    rule_from,
)

LANE = "nemotron_h float32"

NAMES = [
    f"{check}, {LANE}"
    for check in (
        "environment",
        "exactness",
        "chunk-aligned",
        "the check can see",
        "block copy",
        "forward passes",
        "timing",
    )
]


class Report(NamedTuple):
    """What one run of the command left."""

    status: int
    printed: str
    written: dict[str, Any]

    def check(self, name: str) -> dict[str, Any]:
        return next(check for check in self.written["checks"] if check["name"] == name)


class Remembering(Engines):
    """Engines that are started once: the same questions have the same answers in the next run of the command."""

    outcomes: dict[str, Outcome]

    def run(self, name: str, *args: Any) -> Outcome:
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
        status = command.main(["--quick", "--seconds", "900", "--json", str(file)])
    return Report(status, printed.getvalue(), json.loads(file.read_text()))


@pytest.fixture(scope="module")
def rehearsal(engines, patch, model, tmp_path_factory) -> Report:
    """The command as it is, with three engines; only the model is the one at hand."""
    patch.setattr(command, "Engines", engines)
    patch.setattr(command, "write_model", lambda *_: model)
    patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))
    return run(tmp_path_factory.mktemp("rehearsal"))


def test_nothing_is_wrong_on_a_cpu(rehearsal):
    assert rehearsal.status == 0, rehearsal.printed
    assert {check["name"]: check["verdict"] for check in rehearsal.written["checks"]} == {
        **dict.fromkeys(NAMES, "ok"),
        "model runner V2": "not run",
    }
    assert all(name in rehearsal.printed for name in NAMES)
    assert rehearsal.written["device"] == "cpu" and rehearsal.written["wrong"] == 0


def test_the_environment_names_what_runs(rehearsal):
    facts = rehearsal.check(NAMES[0])["numbers"]
    assert facts["device"] == "CPU" and facts["vllm"] == "0.32.0" and facts["runner"] == "V1"
    assert facts["patches_live"] and facts["writes_in_forward"] and facts["block"] == 384 and facts["match_unit"] == 16


def test_most_answers_come_from_the_cache_and_are_exact(rehearsal):
    numbers = rehearsal.check(f"exactness, {LANE}")["numbers"]
    assert numbers["answers"] > 25 and numbers["from_cache"] > numbers["answers"] / 2
    assert numbers["other_tokens"] == 0 and numbers["largest_logprob_error"] <= 1e-4


def test_a_prompt_takes_one_pass_cold_and_warm(rehearsal):
    passes = rehearsal.check(f"forward passes, {LANE}")["numbers"]
    assert [each["passes"] for each in passes["Seamark"]] == [1, 1, 1, 1]
    assert [each["cached"] for each in passes["Seamark"]] == [0, 192, 0, 768]
    assert [each["passes"] for each in passes["without a cache"]] == [1, 1, 1, 1]
    assert [each["passes"] for each in passes[UNTOUCHED]] == [2, 2]


def test_the_block_copy_defect_bites_untouched_vllm_on_a_cpu(rehearsal):
    """Layers of one address with different pages, and wrong answers to prompts that are sent again."""
    numbers = rehearsal.check(f"block copy, {LANE}")["numbers"]
    assert numbers["untouched_wrong"] == numbers["resent"] == 2
    assert len(numbers["pages_at_one_address"]) == 2 and numbers["cured"]


@pytest.mark.parametrize("defect", DEFECTS)
def test_an_engine_with_a_planted_defect_is_found_wrong(rehearsal, engines, monkeypatch, tmp_path, defect):
    """What the engine answered while it had the defect, taken for what it always answers."""
    for name in (f"{LANE} patched", f"{LANE} reference"):
        result = engines.outcomes[name].result
        asked, said = {EXACT: result.sections[defect]}, {EXACT: result.answers[defect]}
        spoiled = replace(result, sections={**result.sections, **asked}, answers={**result.answers, **said})
        monkeypatch.setitem(engines.outcomes, name, Outcome(spoiled))
    report = run(tmp_path)
    assert report.status == 1
    assert report.check(f"exactness, {LANE}")["verdict"] == "WRONG"
    numbers = report.check(f"exactness, {LANE}")["numbers"]
    assert not numbers["wrong_hits"] and len(numbers["wrong_answers"]) == 2
    assert "2 wrong answers: warm: " in " ".join(report.printed.split()) and "the engines' logs" in report.printed


def test_without_vllm_the_command_says_so(monkeypatch, capsys):
    def absent() -> bool:
        raise ModuleNotFoundError("No module named 'vllm'", name="vLLM")

    monkeypatch.setattr(command, "is_cpu_build", absent)
    assert command.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "vLLM is not installed" in line and "pip install --no-deps vllm-seamark" in line


def test_a_gpu_cannot_be_asked_for_where_vllm_has_none(capsys):
    with pytest.raises(SystemExit) as error:
        command.main(["--device", "cuda"])
    assert error.value.code == 2 and "--device cuda" in capsys.readouterr().err


def test_where_nothing_was_run_nothing_is_right(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "Engines", Engines)
    monkeypatch.setattr(command, "write_model", lambda *_: tmp_path)
    assert command.main(["--seconds", "0"]) == 1
    assert "no time was left" in capsys.readouterr().out


GEOMETRY = Geometry(block=384, alignment=16, budget=2048)


def test_questions_are_the_same_each_time_and_owe_hits_on_the_alignment():
    asked = sections(GEOMETRY, quick=False)
    assert asked == sections(GEOMETRY, quick=False)
    questions = [question for waves in asked.values() for wave in waves for question in wave]
    assert len(questions) > 100
    assert all(question.hit % 16 == 0 and question.hit < len(question.tokens) for question in questions if question.hit)


def answer(*tokens: int, second: int = 9, gap: float = 0.5, cached: int = 0) -> Answer:
    """Greedy tokens, each followed by `second` as the next best."""
    return Answer(tokens, [{token: -1.0, second: -1.0 - gap} for token in tokens], cached)


def test_answers_are_compared_up_to_the_first_other_token():
    assert compare(answer(1, 2, 3), answer(1, 2, 3)) == Difference(None, 0.0, 0.0)
    assert compare(answer(1, 9, 3, second=2), answer(1, 2, 3)) == Difference(1, 0.5, 0.5)
    close = compare(answer(1, 9, second=2, gap=0.05), answer(1, 2, gap=0.05))
    assert (close.token, round(close.tie, 6), round(close.error, 6)) == (1, 0.05, 0.05)


def test_another_token_is_let_pass_only_at_a_tie_and_in_few_answers():
    loose = Rule(error=0.1, tie=0.1, share=0.01)
    same, tied, other = Difference(None, 0, 0.02), Difference(3, 0.05, 0.05), Difference(3, 0.3, 0.05)
    assert loose.accepts_all([same] * 99 + [tied])
    assert not loose.accepts_all([same] * 98 + [tied] * 2)
    assert not loose.accepts_all([same] * 99 + [other])
    assert not STRICT.accepts_all([same])


def test_the_references_own_scatter_sets_the_rule():
    steady = Result(answers={EXACT: [answer(1, 2)]}, answers_again={EXACT: [answer(1, 2)]})
    assert rule_from(steady) == Rule(error=0.1, tie=0.1, share=0.01)
    unsteady = Result(answers={EXACT: [answer(1, 2)]}, answers_again={EXACT: [answer(1, 9, second=2)]})
    assert rule_from(unsteady) == Rule(error=1.0, tie=1.0, share=1.0)


def results(warm: Answer, spoiled: Answer) -> tuple[Result, Result]:
    """A patched engine that resumed with `warm`, and `spoiled` with a planted defect; and a reference."""
    cold, right = Question("cold", [1], [], 0), answer(1, 2, 3)
    asked = {name: [[cold], [Question("warm", [1], [], 16)]] for name in (EXACT, ALIGNED, RESEND, *DEFECTS)}
    answers = {name: [right, spoiled if name in DEFECTS else warm] for name in asked}
    return Result(sections=asked, answers=answers), Result(answers={name: [right, right] for name in asked})


def test_a_right_engine_is_found_right():
    patched, reference = results(answer(1, 2, 3, cached=16), answer(9, 9, 9, second=1))
    assert [check.verdict for check in judge_answers("lane", patched, reference, STRICT)] == [OK, OK, OK]


def test_missing_hits_wrong_tokens_and_blindness_are_found_wrong():
    spoiled = answer(9, 9, 9, second=1)
    missed, reference = results(answer(1, 2, 3, cached=0), spoiled)
    assert [check.verdict for check in judge_answers("lane", missed, reference, STRICT)] == [WRONG, WRONG, OK]
    other, reference = results(answer(1, 9, 3, second=2, cached=16), spoiled)
    assert [check.verdict for check in judge_answers("lane", other, reference, STRICT)] == [WRONG, WRONG, OK]
    blind, reference = results(answer(1, 2, 3, cached=16), answer(1, 2, 3))
    assert [check.verdict for check in judge_answers("lane", blind, reference, STRICT)] == [OK, OK, WRONG]


def test_a_second_pass_is_wrong():
    once, twice = Passes("cold", 100, 0, 1), Passes("warm", 100, 64, 2)
    assert judge_passes("lane", {"Seamark": Result(passes=[once, once])}).verdict == OK
    assert judge_passes("lane", {"Seamark": Result(passes=[once, twice])}).verdict == WRONG
    assert judge_passes("lane", {"Seamark": Result()}).verdict == WRONG


class CannedEngines:
    """Outcomes by name, for engines that cannot run here."""

    def __init__(self, outcomes: dict[str, Outcome]) -> None:
        self._outcomes = outcomes

    def run(self, name: str, *_: Any) -> Outcome:
        return self._outcomes[name]


def verdicts(lane: Lane, outcomes: dict[str, Outcome]) -> dict[str, str]:
    return {check.name: check.verdict for check in run_lane(lane, CannedEngines(outcomes), Path("model"))}


def test_an_engine_that_only_the_patches_keep_from_starting_is_wrong():
    lane, dead, alive = Lane("m", "d"), Outcome(None, "RuntimeError: no kernel"), Outcome(Result())
    assert verdicts(lane, {"m d patched": dead, "m d reference": alive}) == {"exactness, m d": WRONG}
    assert verdicts(lane, {"m d patched": dead, "m d reference": dead}) == {"exactness, m d": NOT_RUN}
    assert verdicts(lane, {"m d patched": Outcome(None, "no time", late=True)}) == {"exactness, m d": NOT_RUN}


@pytest.fixture
def patched(rehearsal, engines) -> Result:
    return engines.outcomes[f"{LANE} patched"].result


def test_a_model_runner_that_vllm_does_not_start_is_not_run(patched, engines):
    lane = Lane("m", "d", (OTHER_RUNNER,), strict=True)
    reference = engines.outcomes[f"{LANE} reference"]
    outcomes = {"m d patched": Outcome(patched), "m d reference": reference}
    found = verdicts(lane, outcomes | {"m d runner V2": Outcome(None, "ValueError: not supported")})
    assert found["exactness, m d runner V2"] == NOT_RUN
    found = verdicts(lane, outcomes | {"m d runner V2": Outcome(patched)})
    assert found["exactness, m d runner V2"] == NOT_RUN  # vLLM took the same one again
