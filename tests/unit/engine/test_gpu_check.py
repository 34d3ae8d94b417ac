"""`seamark gpu-check` with engines that answer as told: each way a lane can end, the word for it, the exit status."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.gpu_check import command, processes, report
from engine_patches.gpu_check.engine import Answer, planted
from engine_patches.gpu_check.job import Job, Result
from engine_patches.gpu_check.lanes import RUNNER_VARIABLE, Lane, Runner, lanes_of
from engine_patches.gpu_check.processes import Engines, Outcome
from engine_patches.gpu_check.questions import (
    DEFECTS,
    OTHER_STATE,
    SHARED_LENGTHS,
    Geometry,
    Question,
    TokenRange,
    own_sections,
    sections,
)
from engine_patches.gpu_check.report import LaneReport
from engine_patches.gpu_check.speed import COLD, FAN_OUT, WARM, FirstTokens, Pace, Passes
from engine_patches.gpu_check.verdicts import LEFT_OUT, NOT_RUN, OK, WRONG, Check
from engine_patches.settings import FULL, OFF, REFERENCE

GEOMETRY = Geometry(block=384, alignment=16, budget=2048)

DIED = Outcome(None, "RuntimeError: no kernel image")
LATE = Outcome(None, "the engine was ended after 60 s (more with --minutes)", from_outside=True)


def facts(job: Job, runner: str, length: int) -> dict[str, Any]:
    attention = job.arguments.get("attention_backend", "FLASH_ATTN")
    return {
        "device": "NVIDIA GB10",
        "machine": "aarch64",
        "capability": "sm_121",
        "driver": "580.95",
        "cuda": "13.0",
        "torch": "2.13.0",
        "vllm": "0.32.0",
        "runner": runner,
        "compiled": "VLLM_COMPILE",
        "graphs": "FULL_AND_PIECEWISE",
        "asynchronous": True,
        "dtype": "torch.bfloat16",
        "drafts": "speculative_config" in job.arguments,
        "hints_refused": None,
        "ahead": 16 if "speculative_config" in job.arguments else 0,
        "recurrent": True,
        "longest": length,
        "backends": [attention],
        "gdn_prefill": [job.arguments.get("gdn_prefill_backend", "flashinfer")],
        "patches_live": True,
        "writes_in_forward": True,
        "block": 384,
        "match_unit": 16,
        "alignment": 16,
        "chunk": 64,
        "pages_at_one_address": [],
    }


def right_answer(question: Question) -> Answer:
    first = sum(question.tokens) % 1000
    tokens = [first + step for step in range(4)]
    return Answer(tokens, [{token: -0.5, 5000: -2.0} for token in tokens], 0)


def with_other_tokens(answer: Answer) -> Answer:
    tokens = [token + 2000 for token in answer.tokens]
    return Answer(tokens, [{token: -0.1} for token in tokens], answer.cached)


def honest_result(job: Job, mode: str, runner: str, length: int) -> Result:
    """What an engine without a defect says."""
    asked: Any = job.sections
    if asked is None:
        lengths = [shared for shared in SHARED_LENGTHS if shared + 96 <= length]
        asked = own_sections(GEOMETRY, lengths, TokenRange()) if job.own_model else sections(GEOMETRY, quick=True)
    result = Result(facts(job, runner, length), asked)
    if "speculative_config" in job.arguments:
        drafts = job.arguments["speculative_config"]["num_speculative_tokens"]
        result.verified = {(drafts, right): 100 for right in range(drafts + 1)}
    for name, waves in asked.items():
        questions = [question for wave in waves for question in wave]
        answers = [right_answer(question) for question in questions]
        result.answers_again[name] = list(answers) if job.again else []
        if mode == FULL:
            pairs = zip(answers, questions, strict=True)
            answers = [answer._replace(cached=question.hit or 0) for answer, question in pairs]
            if name in DEFECTS:
                half = len(answers) // 2
                answers[half:] = map(with_other_tokens, answers[half:])
        elif mode == OFF:
            answers = [answer._replace(cached=16) for answer in answers]
        result.answers[name] = answers
    if job.passes:
        result.passes = [Passes("cold", 100, 0, 1, 1), Passes("warm", 100, 64, 1, 1)]
    if job.timed:
        slow = 1.0 if mode == FULL else 2.0
        for shared in (shared for shared in SHARED_LENGTHS if shared + 64 <= length - 32):
            cases = ((COLD, 1.0, 0), (WARM, 0.1, shared), (FAN_OUT, 2.0, 3 * shared))
            result.first_tokens += [FirstTokens(case, shared, slow * took, hit, 1) for case, took, hit in cases]
        result.pace = Pace(decode=0.01, floor=0.02, token=0.001, state=0.001)
    return result


class ToldEngines:
    """Engines that answer rightly, but for those whose name ends as one of `faults`."""

    def __init__(self, faults: dict[str, Callable[[Result], Outcome] | Outcome] | None = None, length: int = 4096):
        self.faults, self.length = faults or {}, length
        self.started: list[str] = []
        self.ended = False
        self._lock = threading.Lock()

    def end(self) -> None:
        self.ended = True

    def run(self, name: str, job: Job, mode: str, changes: Any = None) -> Outcome:
        with self._lock:
            self.started.append(name)
        runner = "V1" if (changes or {}).get(RUNNER_VARIABLE) == "0" else "V2"
        result = honest_result(job, mode, runner, self.length)
        for ending, fault in self.faults.items():
            if name.endswith(ending):
                return fault if isinstance(fault, Outcome) else fault(result)
        return Outcome(result)


@pytest.fixture
def gpu_check(monkeypatch, tmp_path, capsys):
    """Runs the command on a machine with a GPU, as it seems, with these engines: exit status, output, report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "is_cpu_build", lambda: False)
    monkeypatch.setattr(command, "_sees_gpu", lambda: True)
    monkeypatch.setattr(command, "config_of", lambda model: {})  # nothing is looked up on the hub
    monkeypatch.setattr(command, "write_model", lambda folder, family, mtp=False: folder)

    def run(engines: Any, *arguments: str) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.setattr(command, "Engines", lambda *_, **__: engines)
        status = command.main(list(arguments))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return status, captured.out, json.loads((tmp_path / "seamark-gpu-check.json").read_text())

    return run


def last_line(printed: str) -> str:
    return printed.rstrip().splitlines()[-1]


def test_when_all_lanes_are_right_the_last_line_says_so_and_the_status_is_0(gpu_check):
    engines = ToldEngines()
    status, printed, written = gpu_check(engines)
    assert status == 0 and written["exit"] == 0, printed
    assert last_line(printed) == written["verdict"]
    assert written["verdict"].startswith("right: all 16 lanes ran and found exact answers on this GPU; hits save time")
    assert written["lanes"] == {"ok": 16, "WRONG": 0, "not run": 0, "left out": []}
    first = written["results"][0]["arguments"]
    assert first["dtype"] == "bfloat16" and first["enforce_eager"] is False and first["model"] == "nemotron_h"
    assert engines.ended


def test_what_users_run_comes_first():
    names = [lane.name for lane in GPU_LANES]
    assert names[:2] == ["nemotron_h bfloat16 compiled", "qwen3_next bfloat16 compiled"]
    first = lanes_of("cuda", quick=False)[0].job("m", True)
    assert not first.arguments["enforce_eager"] and "attention_backend" not in first.arguments
    assert len(set(names)) == len(names) and [lane.name for lane in lanes_of("cuda", quick=True)] == names[:2]
    assert {lane.family for lane in lanes_of("cpu", quick=False)} == {"nemotron_h", "qwen3_next"}


def test_each_lane_is_printed_and_written_before_the_next_one_starts(gpu_check, capsys, tmp_path):
    seen = []

    class Watched(ToldEngines):
        def run(self, name: str, job: Job, mode: str, changes: Any = None) -> Outcome:
            if name == "qwen3_next bfloat16 compiled patched":
                written = json.loads((tmp_path / "seamark-gpu-check.json").read_text())
                seen.append((capsys.readouterr().out, written["results"][0]["verdict"], written["exit"]))
            return super().run(name, job, mode, changes)

    assert gpu_check(Watched(), "--quick")[0] == 0
    ((printed, verdict, status),) = seen
    assert "lane 1 of 2: nemotron_h bfloat16 compiled: ok" in printed and verdict == "ok"
    assert status == 3  # a check that is killed now has proven nothing about the second lane


GPU_LANES = lanes_of("cuda", quick=False)
DRAFTING = [lane for lane in GPU_LANES if lane.drafts is not None]
TIMED = [lane for lane in GPU_LANES if lane.timed and lane.drafts is None]
COPYING = [lane for lane in GPU_LANES if lane.block_copy]


def wrong_tokens(result: Result) -> Outcome:
    answers = {name: list(map(with_other_tokens, each)) for name, each in result.answers.items()}
    return Outcome(Result(**{**vars(result), "answers": answers}))


def verdict_of(lane: Lane, engines: ToldEngines) -> str:
    """With the lanes that it is held to run before."""
    runner = Runner(engines)
    if lane.other_runner:
        list(runner.run(next(each for each in TIMED if each.family == lane.family), Path("m")))
    return LaneReport(lane.name, list(runner.run(lane, Path("m"))), 0.0).verdict


@pytest.mark.parametrize("lane", GPU_LANES, ids=lambda lane: lane.name)
@pytest.mark.parametrize(
    ("fault", "verdict"), [(DIED, WRONG), (LATE, NOT_RUN), (wrong_tokens, WRONG)], ids=["dies", "late", "wrong tokens"]
)
def test_a_fault_of_the_patched_engine_shows_in_any_lane(lane, fault, verdict):
    if lane.other_runner and fault is DIED:
        verdict = NOT_RUN  # vLLM may not have this runner for the model, with or without patches
    assert verdict_of(lane, ToldEngines({f"{lane.name} patched": fault})) == verdict
    assert verdict_of(lane, ToldEngines()) == OK


@pytest.mark.parametrize("lane", [lane for lane in GPU_LANES if not lane.other_runner], ids=lambda lane: lane.name)
@pytest.mark.parametrize("fault", [DIED, LATE], ids=["dies", "late"])
def test_without_a_reference_no_lane_is_proven(lane, fault):
    assert verdict_of(lane, ToldEngines({f"{lane.name} reference": fault})) == NOT_RUN


@pytest.mark.parametrize("fault", [DIED, LATE], ids=["dies", "late"])
@pytest.mark.parametrize(
    ("lane", "engine"),
    [(lane, "alone") for lane in TIMED] + [(lane, "block copy") for lane in COPYING],
    ids=lambda value: value.name if isinstance(value, Lane) else value,
)
def test_what_vllm_alone_should_have_shown_is_missing_and_not_wrong(lane, engine, fault):
    assert verdict_of(lane, ToldEngines({f"{lane.name} {engine}": fault})) == NOT_RUN


def test_an_engine_that_dies_after_its_start_is_wrong():
    lane = GPU_LANES[0]
    dies = {f"{lane.name} patched": lambda result: Outcome(Result(result.facts), "RuntimeError: illegal access")}
    assert verdict_of(lane, ToldEngines(dies)) == WRONG


def test_an_engine_that_vllm_cannot_start_either_is_not_run():
    lane = GPU_LANES[0]
    engines = ToldEngines({f"{lane.name} patched": DIED, f"{lane.name} reference": DIED})
    (check,) = Runner(engines).run(lane, Path("m"))
    assert check.verdict == NOT_RUN and "with or without patches" in check.says


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"graphs": "NONE"}, "without CUDA graphs"),
        ({"recurrent": False}, "no recurrent layers"),
        ({"drafts": True}, "speculative decoding"),
    ],
)
def test_an_engine_that_is_not_what_the_lane_is_for_proves_nothing(change, words):
    lane = GPU_LANES[0]

    def other(result: Result) -> Outcome:
        return Outcome(Result(**{**vars(result), "facts": {**result.facts, **change}}))

    checks = list(Runner(ToldEngines({f"{lane.name} patched": other})).run(lane, Path("m")))
    assert checks[-1].verdict == NOT_RUN and words in checks[-1].says


def test_a_backend_or_runner_that_vllm_replaces_by_another_is_not_proven():
    def as_always(result: Result) -> Outcome:
        changes = {"backends": ["FLASH_ATTN"], "runner": "V2"}
        return Outcome(Result(**{**vars(result), "facts": {**result.facts, **changes}}))

    for lane in GPU_LANES:
        if lane.attention or lane.other_runner:
            assert verdict_of(lane, ToldEngines({f"{lane.name} patched": as_always})) == NOT_RUN, lane.name


def test_one_wrong_lane_makes_the_whole_wrong_and_the_others_run_on(gpu_check):
    engines = ToldEngines({"nemotron_h bfloat16 compiled patched": wrong_tokens})
    status, printed, written = gpu_check(engines)
    assert status == 1 and last_line(printed).startswith("WRONG: nemotron_h bfloat16 compiled")
    assert written["lanes"] == {"ok": 15, "WRONG": 1, "not run": 0, "left out": []}
    assert "qwen3_next bfloat16 compiled: ok" in printed


def test_a_lane_out_of_time_is_no_pass(gpu_check):
    engines = ToldEngines({"nemotron_h float32 eager patched": LATE})
    status, printed, written = gpu_check(engines)
    assert status == 3 and written["lanes"] == {"ok": 15, "WRONG": 0, "not run": 1, "left out": []}
    assert last_line(printed).startswith("not proven: nemotron_h float32 eager (the engine with the patches did not")
    assert "15 of 16 lanes are right" in last_line(printed)


def test_a_fault_of_the_check_itself_hides_no_other_lane(gpu_check):
    def broken(_: Result) -> Outcome:
        raise KeyError("backends")

    status, printed, _ = gpu_check(ToldEngines({"nemotron_h bfloat16 compiled patched": broken}), "--quick")
    assert status == 3 and "KeyError" in printed and "qwen3_next bfloat16 compiled: ok" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_engines_and_leaves_what_is_known(gpu_check, number):
    before = signal.getsignal(number)

    class Interrupting(ToldEngines):
        def run(self, name: str, job: Job, mode: str, changes: Any = None) -> Outcome:
            if name == "qwen3_next bfloat16 compiled alone":
                os.kill(os.getpid(), number)
            return super().run(name, job, mode, changes)

    engines = Interrupting()
    status, printed, written = gpu_check(engines)
    assert status == 128 + number and written["exit"] == status and engines.ended
    first, second, *others = written["results"]
    assert first["verdict"] == "ok" and {lane["verdict"] for lane in others} == {"not run"}
    # What the lane showed before the signal is there, and not called a pass.
    assert second["verdict"] == "not run" and "exactness, qwen3_next bfloat16 compiled" in json.dumps(second)
    assert "unfinished lane: qwen3_next bfloat16 compiled: not run" in printed
    assert last_line(printed).startswith("not proven: ") and signal.getsignal(number) is before


def test_what_was_wrong_before_the_signal_stays_wrong(gpu_check):
    def interrupted(result: Result) -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)
        return Outcome(result)

    faults = {"nemotron_h bfloat16 compiled patched": wrong_tokens, "qwen3_next bfloat16 compiled patched": interrupted}
    status, printed, _ = gpu_check(ToldEngines(faults))
    assert status == 1 and last_line(printed).startswith("WRONG: nemotron_h bfloat16 compiled")


@pytest.mark.parametrize(("more", "named"), [((), {}), ((512,), {}), ((), {"max_cache_hit_length": 512})])
def test_a_planted_defect_looks_up_as_the_scheduler_of_each_vllm_does(more, named):
    class Manager:
        def get_computed_blocks(self, *args, **kwargs):
            asked.append((args, kwargs))
            return "blocks", 0, 0

    asked: list[object] = []
    manager = Manager()
    with planted(SimpleNamespace(kv_cache_manager=manager, seamark=None), OTHER_STATE):
        assert manager.get_computed_blocks("request", *more, **named) == ("blocks", 0, 0)
    assert asked == [(("request", *more), named)]


def test_without_a_gpu_one_sentence_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "is_cpu_build", lambda: False)
    monkeypatch.setattr(command, "_sees_gpu", lambda: False)
    assert command.main([]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "not proven" in line and "torch sees no GPU" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "cuda"],
        ["--seconds", "10"],
        ["--", "--max-model-len", "100"],
        ["--report", "nowhere/report.json"],
        ["--report", "."],
        ["--model", "m", "--attention-backend", "FLASHINFER"],
        ["--speculative-config", '{"method": "mtp"}'],
        ["--model", "m", "--speculative-config", "mtp"],
        ["--model", "m", "--speculative-config", "[3]"],
    ],
)
def test_wrong_usage_is_2_and_runs_nothing(monkeypatch, capsys, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "is_cpu_build", lambda: True)
    try:
        status = command.main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2 and arguments[0].lstrip("-") in capsys.readouterr().err


def test_speed_is_told_and_never_wrong(gpu_check):
    def slow(result: Result) -> Outcome:
        slower = [each._replace(seconds=9 * each.seconds) for each in result.first_tokens]
        return Outcome(Result(**{**vars(result), "first_tokens": slower}))

    status, printed, written = gpu_check(ToldEngines({"compiled patched": slow}), "--quick")
    assert status == 0 and "hits do not save time here" in last_line(printed)
    numbers = next(c for c in written["results"][0]["checks"] if c["name"].startswith("speed"))["numbers"]
    assert numbers["warm_ratio"] == pytest.approx(2 / 9) and not numbers["hits_save_time"]
    assert numbers["decode_ratio"] == pytest.approx(1.0) and numbers["pace"]["token"] == 0.001


OWN = ("--model", "org/Some-Model", "--", "--max-model-len", "9000", "--hf-token", "hf_secret")


def test_a_users_own_model_is_checked_at_each_length_that_fits(gpu_check):
    status, printed, written = gpu_check(ToldEngines(length=9000), *OWN)
    assert status == 0, printed
    assert written["lanes"]["left out"] == ["32,000 shared tokens, org/Some-Model: the model's length is 9,000 tokens"]
    assert written["options"]["flags"] == ["--max-model-len", "9000", "--hf-token", "..."]
    exactness = next(c for c in written["results"][0]["checks"] if c["name"].startswith("exactness"))
    assert exactness["numbers"]["answers"] == 12 and exactness["numbers"]["from_cache"] == 9
    assert "8,000 shared tokens" in printed and "hf_secret" not in json.dumps(written) + printed


def test_lengths_of_an_own_model_for_which_no_time_was_left_are_named_and_not_proven(gpu_check):
    def cut(result: Result) -> Outcome:
        names = list(result.answers)[:2]
        half = {name: result.answers[name] for name in names}
        changes = {"answers": half, "first_tokens": [], "passes": [], "pace": None}
        return Outcome(Result(**{**vars(result), **changes}), LATE.fault, from_outside=True)

    status, _, written = gpu_check(ToldEngines({"patched": cut}, length=9000), *OWN)
    checks = {check["name"]: check for check in written["results"][0]["checks"]}
    assert status == 3 and checks["exactness, org/Some-Model"]["verdict"] == "ok"
    assert "neither compared nor timed" in checks["8,000 shared tokens, org/Some-Model"]["says"]
    assert checks["2,000 shared tokens, org/Some-Model"]["verdict"] == "not run"


def test_an_own_models_missing_hit_proves_nothing_and_a_wrong_answer_is_wrong(gpu_check):
    def misses(result: Result) -> Outcome:
        answers = {name: [each._replace(cached=0) for each in found] for name, found in result.answers.items()}
        return Outcome(Result(**{**vars(result), "answers": answers}))

    assert gpu_check(ToldEngines({"patched": misses}), *OWN)[0] == 3
    assert gpu_check(ToldEngines({"patched": wrong_tokens}), *OWN)[0] == 1


def test_the_report_names_no_folder_host_or_user(monkeypatch):
    monkeypatch.setattr(report.platform, "node", lambda: "spark-7f")
    monkeypatch.setattr(report, "_user", lambda: "ada")
    text = "OSError: /home/ada/models/tiny/config.json of ada on spark-7f, http://ada.example:8000/v1, 10.1.2.3:80"
    assert report.anonymous({"says": [text]}) == {"says": ["OSError: config.json of USER on HOST, URL, ADDRESS:80"]}
    kept = "12 ms / 13 ms, org/Some-Model, vLLM 0.32.0, driver 580.95.05, cold / warm: 1 / 1"
    assert report.anonymous(kept) == kept
    assert report.without_secrets(["--api-key=x", "--hf-token", "y", "--dtype", "auto"]) == [
        "--api-key=...",
        "--hf-token",
        "...",
        "--dtype",
        "auto",
    ]


@pytest.mark.parametrize(
    ("verdicts", "signal_number", "status"),
    [
        ([OK, OK], None, 0),
        ([OK, NOT_RUN], None, 3),
        ([LEFT_OUT], None, 3),
        ([], None, 3),
        ([WRONG, NOT_RUN], None, 1),
        ([OK, NOT_RUN], signal.SIGINT, 130),
        ([WRONG], signal.SIGTERM, 1),
    ],
)
def test_the_exit_status_is_that_of_the_worst_lane(verdicts, signal_number, status):
    lanes = [LaneReport(str(number), [Check("c", verdict, "s")], 1.0) for number, verdict in enumerate(verdicts)]
    assert report.exit_status(lanes, signal_number) == status


JUDGED = ("exactness", "chunk-aligned", "the check can see")


def test_drafts_are_checked_last_three_of_them_first():
    assert [lane.drafts for lane in GPU_LANES[:-6]] == [None] * 10
    numbers = [json.loads(lane.drafts or "{}")["num_speculative_tokens"] for lane in GPU_LANES[-6:]]
    assert numbers == [3, 3, 1, 1, 5, 5]
    assert [lane.timed for lane in DRAFTING] == [True, True, False, False, False, False]


def test_lanes_with_drafts_take_no_time_from_others(gpu_check):
    engines = ToldEngines()
    gpu_check(engines)
    with_drafts = ["drafts" in name for name in engines.started]
    assert with_drafts == sorted(with_drafts) and any(with_drafts)
    assert "drafts (mtp, 3)" in next(name for name in engines.started if "drafts" in name)


def test_a_lane_with_drafts_asks_vllm_alone_first_and_opts_in():
    lane, changed = DRAFTING[0], {}

    class Watched(ToldEngines):
        def run(self, name: str, job: Job, mode: str, changes: Any = None) -> Outcome:
            changed[name.removeprefix(lane.name + " ")] = (mode, changes, job)
            return super().run(name, job, mode, changes)

    checks = list(Runner(Watched()).run(lane, Path("m")))
    assert {check.verdict for check in checks} == {OK}, checks
    assert [check.name.removesuffix(f", {lane.name}") for check in checks] == [
        "environment",
        "vLLM alone with drafts, cache off",
        "vLLM alone with drafts, cache on",
        *JUDGED,
        *(f"{check}, {lane.name}, the head's own drafts" for check in JUDGED),
        "acceptance",
        "forward passes",
        "speed",
    ]
    assert list(changed) == ["patched", "reference", "alone, cache off", "alone, cache on", "patched, oracle"]
    assert [mode for mode, _, _ in changed.values()] == [FULL, REFERENCE, OFF, OFF, FULL]
    for name, (_, changes, job) in changed.items():
        assert (changes == {"SEAMARK_DRAFTS": "1"}) == name.startswith("patched"), name
        assert ("speculative_config" in job.arguments) == (name != "reference"), name
        assert (job.oracle is not None) == (name not in ("patched", "reference")), name
        assert job.arguments["enable_prefix_caching"] == (name not in ("reference", "alone, cache off"))


@pytest.mark.parametrize("which", ["cache off", "cache on"])
def test_where_vllm_itself_is_wrong_with_drafts_nothing_is_blamed_on_seamark(which):
    lane = DRAFTING[0]
    faults = {f"alone, {which}": wrong_tokens, "patched, oracle": wrong_tokens}
    checks = list(Runner(ToldEngines(faults)).run(lane, Path("m")))
    assert WRONG not in {check.verdict for check in checks}
    wrong = next(check for check in checks if check.name == f"vLLM alone with drafts, {which}, {lane.name}")
    assert wrong.verdict == NOT_RUN and wrong.says.startswith("vLLM itself answers otherwise with drafts here")
    assert LaneReport(lane.name, checks, 0.0).verdict == NOT_RUN


def misses_a_unit(result: Result) -> Outcome:
    answers = {
        name: [each._replace(cached=max(each.cached - 16, 0)) for each in found]
        for name, found in result.answers.items()
    }
    return Outcome(Result(**{**vars(result), "answers": answers}))


def drafts_worse(result: Result) -> Outcome:
    return Outcome(Result(**{**vars(result), "verified": {(3, 0): 100, (3, 1): 20, (3, 2): 20, (3, 3): 20}}))


@pytest.mark.parametrize(
    ("fault", "check"),
    [(wrong_tokens, "exactness"), (misses_a_unit, "exactness"), (drafts_worse, "acceptance"), (DIED, "exactness")],
    ids=["wrong tokens", "hits a unit short", "drafts less often right", "dies"],
)
def test_what_is_wrong_beside_drafts_is_named(fault, check):
    lane = DRAFTING[0]
    checks = list(Runner(ToldEngines({"patched, oracle": fault})).run(lane, Path("m")))
    wrong = [each.name.partition(",")[0] for each in checks if each.verdict == WRONG]
    assert [name for name in wrong if name != "chunk-aligned"] == [check]


@pytest.mark.parametrize(
    ("verified", "words"), [({}, "no row verified"), ({(3, 0): 50}, "1 or 2 or 3 right drafts")], ids=["none", "blind"]
)
def test_a_lane_that_saw_no_right_drafts_shows_nothing(verified, words):
    def other(result: Result) -> Outcome:
        return Outcome(Result(**{**vars(result), "verified": verified}))

    engines = ToldEngines(dict.fromkeys(("patched, oracle", "alone, cache off", "alone, cache on"), other))
    (unproven,) = (c for c in Runner(engines).run(DRAFTING[0], Path("m")) if c.verdict != OK)
    assert unproven.verdict == NOT_RUN and unproven.name.startswith("acceptance") and words in unproven.says


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hints_refused": "speculative"}, "hints are refused beside these drafts"),
        ({"drafts": False}, "drafts no tokens"),
        ({"recurrent": False}, "no recurrent layers"),
    ],
)
def test_an_engine_without_hints_beside_drafts_proves_nothing(change, words):
    def other(result: Result) -> Outcome:
        return Outcome(Result(**{**vars(result), "facts": {**result.facts, **change}}))

    checks = list(Runner(ToldEngines({"patched": other})).run(DRAFTING[0], Path("m")))
    assert checks[-1].verdict == NOT_RUN and words in checks[-1].says


@pytest.mark.parametrize(
    ("engine", "fault", "verdict"),
    [("patched", DIED, WRONG), ("patched", LATE, NOT_RUN)]
    + [(name, DIED, NOT_RUN) for name in ("reference", "alone, cache off", "alone, cache on")],
)
def test_a_lane_with_drafts_is_proven_by_all_of_its_engines(engine, fault, verdict):
    lane = DRAFTING[0]
    assert verdict_of(lane, ToldEngines({f"{lane.name} {engine}": fault})) == verdict


def test_where_vllm_cannot_draft_at_all_the_lane_is_not_run():
    faults = {"patched": DIED, "alone, brief": DIED}
    (check,) = Runner(ToldEngines(faults)).run(DRAFTING[0], Path("m"))
    assert check.verdict == NOT_RUN and "with drafts and its prefix cache here: RuntimeError" in check.says


def test_an_own_model_with_a_draft_head_has_a_second_lane(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "nemotron_h"}')
    assert [lane.drafts for lane in command.own_lanes(str(tmp_path), [], "cuda", False, None)] == [None]
    config.write_text('{"text_config": {"mtp_num_hidden_layers": 1}}')
    plain, drafting = command.own_lanes(str(tmp_path), [], "cuda", False, None)
    assert plain.drafts is None and json.loads(drafting.drafts or "") == {"method": "mtp", "num_speculative_tokens": 3}
    named = command.own_lanes(str(tmp_path), [], "cuda", False, '{"method": "ngram"}')
    assert [lane.drafts for lane in named] == [None, '{"method": "ngram"}']
    engines = ToldEngines()
    list(Runner(engines).run(drafting, tmp_path))
    assert not any(name.endswith("oracle") for name in engines.started)


JOB = Job({})


@pytest.fixture
def engine_process(monkeypatch, tmp_path):
    """Starts Python code in the place of an engine: what `Engines` makes of its end."""

    def run(code: str, seconds: float = 60.0, meanwhile: Callable[[Engines], None] | None = None) -> Outcome:
        def started(job: Path, result: Path) -> Sequence[str]:
            return [sys.executable, "-c", code, str(job), str(result)]

        monkeypatch.setattr(processes, "_command", started)
        engines = Engines(tmp_path, on_cpu=False, seconds=seconds)
        if meanwhile is not None:
            threading.Thread(target=meanwhile, args=(engines,)).start()
        return engines.run("an engine", JOB, REFERENCE)

    return run


SAVE = """
import pathlib, pickle, sys
from engine_patches.gpu_check.job import Result
pathlib.Path(sys.argv[2]).write_bytes(pickle.dumps(Result({"vllm": "0.32.0"})))
"""


def test_what_an_engine_saved_is_there_however_it_ends(engine_process):
    assert engine_process(SAVE) == Outcome(Result({"vllm": "0.32.0"}))
    died = engine_process(SAVE + "raise ValueError('no such layer')")
    assert died == Outcome(Result({"vllm": "0.32.0"}), "ValueError: no such layer")


def test_an_engine_that_is_killed_is_no_fault_of_what_it_ran(engine_process):
    outcome = engine_process("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert outcome.from_outside and outcome.fault is not None and "SIGKILL" in outcome.fault


def test_an_engine_that_never_ends_is_ended(engine_process, monkeypatch):
    monkeypatch.setattr(processes, "MIN_SECONDS", 0.0)
    outcome = engine_process("import signal; signal.pause()", seconds=0.3)
    assert outcome.from_outside and outcome.fault is not None and "--minutes" in outcome.fault


def test_without_time_no_engine_is_started(engine_process):
    outcome = engine_process("raise SystemExit('started')", seconds=1.0)
    assert outcome.from_outside and outcome.fault is not None and "no time was left" in outcome.fault


def test_engines_are_ended_from_another_thread_and_none_is_started_after(engine_process, tmp_path):
    mark = tmp_path / "runs"

    def end(engines: Engines) -> None:
        while not mark.exists():
            pass
        engines.end()
        assert engines.run("another", JOB, REFERENCE).from_outside

    code = f"import pathlib, signal; pathlib.Path({str(mark)!r}).touch(); signal.pause()"
    outcome = engine_process(code, meanwhile=end)
    assert outcome == Outcome(None, "the check was ended meanwhile", from_outside=True)
