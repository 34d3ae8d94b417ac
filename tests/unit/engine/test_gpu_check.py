"""`seamark gpu-check` with engines that answer as told: each way a lane can end, the word for it, the exit status."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.gpu_check import command, processes, report
from engine_patches.gpu_check.engine import CheckedAnswer, planted
from engine_patches.gpu_check.job import LaneJob, LaneResult
from engine_patches.gpu_check.judge import LEFT_OUT, NOT_RUN, OK, WRONG, Check
from engine_patches.gpu_check.lanes import Lane, lanes_of
from engine_patches.gpu_check.processes import Engines, ProcessEnd
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
from engine_patches.gpu_check.runner import RUNNER_VARIABLE, Runner
from engine_patches.gpu_check.speed import COLD, FAN_OUT, WARM, FirstTokens, LanePasses, MeasuredPace
from engine_patches.settings import FULL, OFF, REFERENCE

GEOMETRY = Geometry(block=384, alignment=16, budget=2048)

FACTS: dict[str, Any] = {
    **{"device": "NVIDIA GB10", "machine": "aarch64", "capability": "sm_121", "driver": "580.95", "cuda": "13.0"},
    **{"torch": "2.13.0", "vllm": "0.32.0", "compiled": "VLLM_COMPILE", "graphs": "FULL_AND_PIECEWISE"},
    **{"asynchronous": True, "dtype": "torch.bfloat16", "hints_refused": None, "recurrent": True},
    **{"backends": ["FLASH_ATTN"], "gdn_prefill": ["flashinfer"], "patches_live": True, "writes_in_forward": True},
    **{"block": 384, "match_unit": 16, "alignment": 16, "chunk": 64, "pages_at_one_address": []},
}

LANES = lanes_of("cuda", quick=False)
MAMBA, DELTA, RUNNER, COPY, FLASH_NEXT, KIMI, DELTA_DRAFTS, MAMBA_DRAFTS, RUNNER_DRAFTS = LANES


def right_answer(question: Question) -> CheckedAnswer:
    first = sum(question.tokens) % 1000
    tokens = [first + step for step in range(4)]
    return CheckedAnswer(tokens, [{token: -0.5, 5000: -2.0} for token in tokens], 0)


def with_other_tokens(answer: CheckedAnswer) -> CheckedAnswer:
    tokens = [token + 2000 for token in answer.tokens]
    return CheckedAnswer(tokens, [{token: -0.1} for token in tokens], answer.cached)


def honest_result(job: LaneJob, mode: str, runner: str, length: int) -> LaneResult:
    """What an engine without a defect says."""
    asked: Any = job.sections
    if asked is None:
        lengths = [shared for shared in SHARED_LENGTHS if shared + 96 <= length]
        asked = own_sections(GEOMETRY, lengths, TokenRange()) if job.own_model else sections(GEOMETRY, quick=True)
    drafting = "speculative_config" in job.arguments
    result = LaneResult({**FACTS, "runner": runner, "drafts": drafting, "longest": length}, asked)
    if drafting:
        result.verified = {(3, right): 100 for right in range(4)}
    for name, waves in asked.items():
        questions = [question for wave in waves for question in wave]
        rows = {(3, right): 1 for right in range(4)} if drafting else {}
        answers = [right_answer(question)._replace(verified=rows) for question in questions]
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
        result.passes = [LanePasses("cold", 100, 0, 1, 1), LanePasses("warm", 100, 64, 1, 1)]
    if job.timed:
        slow = 1.0 if mode == FULL else 2.0
        for shared in (shared for shared in SHARED_LENGTHS if shared + 64 <= length - 32):
            cases = ((COLD, 1.0, 0), (WARM, 0.1, shared), (FAN_OUT, 2.0, 3 * shared))
            result.first_tokens += [FirstTokens(case, shared, slow * took, hit, 1) for case, took, hit in cases]
        result.pace = MeasuredPace(decode=0.01, floor=0.02, token=0.001, state=0.001)
    return result


class ToldEngines:
    """Engines that answer rightly, but for those whose name has one of `faults` in it."""

    def __init__(
        self, faults: dict[str, Callable[[LaneResult], ProcessEnd] | ProcessEnd] | None = None, length: int = 4096
    ):
        self.faults, self.length = faults or {}, length
        self.started: list[tuple[str, LaneJob, str, Any]] = []

    def run(self, name: str, job: LaneJob, mode: str, changes: Any = None) -> ProcessEnd:
        self.started.append((name, job, mode, changes))
        runner = "V1" if (changes or {}).get(RUNNER_VARIABLE) == "0" else "V2"
        result = honest_result(job, mode, runner, self.length)
        fault = next((fault for part, fault in self.faults.items() if part in name), ProcessEnd(result))
        return fault if isinstance(fault, ProcessEnd) else fault(result)


def changed(change: Callable[[CheckedAnswer], CheckedAnswer]) -> Callable[[LaneResult], ProcessEnd]:
    """The fault of an engine whose answers, but those that have a planted defect, are other ones."""

    def fault(result: LaneResult) -> ProcessEnd:
        answers = {
            name: found if name in DEFECTS else list(map(change, found)) for name, found in result.answers.items()
        }
        return ProcessEnd(replace(result, answers=answers))

    return fault


def has(**changes: Any) -> Callable[[LaneResult], ProcessEnd]:
    """The fault of an engine whose result has these fields."""
    return lambda result: ProcessEnd(replace(result, **changes))


def fact(**changes: Any) -> Callable[[LaneResult], ProcessEnd]:
    """The fault of an engine that finds these facts."""
    return lambda result: ProcessEnd(replace(result, facts={**result.facts, **changes}))


def blind(result: LaneResult) -> ProcessEnd:
    honest = {name: [right_answer(q) for wave in result.sections[name] for q in wave] for name in DEFECTS}
    return ProcessEnd(replace(result, answers={**result.answers, **honest}))


DIED = ProcessEnd(None, "RuntimeError: no kernel image")
LATE = ProcessEnd(None, "the engine was ended after 60 s (more with --minutes)", from_outside=True)

other_tokens = changed(with_other_tokens)
other_logprobs = changed(
    lambda answer: answer._replace(top=[{t: v - 0.3 for t, v in each.items()} for each in answer.top])
)
a_unit_short = changed(lambda answer: answer._replace(cached=max(answer.cached - 16, 0)))
no_drafts_behind_hits = changed(lambda answer: answer._replace(verified={(3, 0): 4}) if answer.cached else answer)
a_pass_more = has(passes=[LanePasses("cold", 100, 0, 1, 1), LanePasses("warm", 100, 64, 2, 1)])


def checks_of(lane: Lane, engines: ToldEngines) -> list[Check]:
    """The lane's checks; the lane that another model runner is held to has run without a fault."""
    runner = Runner(engines)
    if lane.other_runner:
        faults, engines.faults = engines.faults, {}
        list(runner.run(MAMBA if lane is RUNNER else MAMBA_DRAFTS, Path("m")))
        engines.faults = faults
    return list(runner.run(lane, Path("m")))


PLAIN = (MAMBA, DELTA, COPY, FLASH_NEXT, KIMI)
DRAFTING = (DELTA_DRAFTS, MAMBA_DRAFTS, RUNNER_DRAFTS)

# The engine that has a fault and the fault; the verdict of the lane; the check that says so, and some of its words.
FAULTS: list[tuple[Sequence[Lane], dict[str, Any], str, str, str]] = [
    (LANES, {}, OK, "", ""),
    (LANES, {"patched": DIED}, WRONG, "exactness", "vLLM alone runs here, but the engine with the patches did not"),
    (LANES, {"patched": LATE}, NOT_RUN, "exactness", "ended after 60 s"),
    (LANES, {"patched": DIED, "brief": DIED}, NOT_RUN, "exactness", "vLLM alone does not run here like this"),
    (
        LANES,
        {"patched": lambda r: ProcessEnd(LaneResult(r.facts), "illegal access")},
        WRONG,
        "exactness",
        "illegal access",
    ),
    (LANES, {"patched": other_tokens}, WRONG, "exactness", "token 0 differs"),
    (LANES, {"patched": other_tokens}, WRONG, "chunk-aligned", "token 0 differs"),
    (LANES, {"patched": other_logprobs}, WRONG, "exactness", "logprobs off by 0.3"),
    (LANES, {"patched": a_unit_short}, WRONG, "exactness", "tokens from the cache instead of"),
    (
        LANES,
        {"patched": blind},
        WRONG,
        "the check can see",
        "planted defects not noticed: another prefix's state, a st",
    ),
    (LANES, {"patched": a_pass_more}, WRONG, "forward passes", "1 / 2 for 100 tokens"),
    (LANES, {"patched": has(passes=[])}, WRONG, "forward passes", ""),
    (LANES, {"patched": fact(patches_live=False)}, WRONG, "environment", "the patches are not live"),
    (LANES, {"patched": fact(writes_in_forward=False)}, WRONG, "environment", "each costs a pass of its own"),
    (LANES, {"patched": fact(recurrent=False)}, NOT_RUN, "exactness", "no recurrent layers"),
    (
        (*PLAIN, DELTA_DRAFTS, MAMBA_DRAFTS),
        {"reference": DIED},
        NOT_RUN,
        "exactness",
        "the reference engine did not finish",
    ),
    (
        (*PLAIN, DELTA_DRAFTS, MAMBA_DRAFTS),
        {"reference": LATE},
        NOT_RUN,
        "exactness",
        "the reference engine did not finish",
    ),
    ((MAMBA, DELTA, RUNNER, DELTA_DRAFTS), {"patched": fact(graphs="NONE")}, NOT_RUN, "exactness", "without CUDA"),
    (PLAIN, {"patched": fact(drafts=True)}, NOT_RUN, "exactness", "this is speculative decoding"),
    ((MAMBA, DELTA), {"alone": DIED}, NOT_RUN, "speed", "vLLM alone did not finish"),
    ((MAMBA, DELTA, DELTA_DRAFTS), {"patched": has(first_tokens=[])}, NOT_RUN, "speed", "no time was left"),
    ((RUNNER,), {"patched": fact(runner="V2")}, NOT_RUN, "exactness", "vLLM ran model runner V2 instead"),
    ((COPY,), {"block copy": DIED}, NOT_RUN, "block copy", "vLLM alone did not finish"),
    ((COPY,), {"block copy": other_tokens}, OK, "", ""),
    (DRAFTING, {"patched": fact(drafts=False)}, NOT_RUN, "exactness", "drafts no tokens"),
    (DRAFTING, {"patched": fact(hints_refused="x")}, NOT_RUN, "exactness", "hints are refused beside these drafts: x"),
    (DRAFTING, {"cache off": DIED}, NOT_RUN, "vLLM alone with drafts, cache off", "did not finish"),
    (DRAFTING, {"cache on": LATE}, NOT_RUN, "vLLM alone with drafts, cache on", "did not finish"),
    (
        DRAFTING,
        {"cache on": other_tokens},
        NOT_RUN,
        "vLLM alone with drafts, cache on",
        "vLLM itself answers otherwise",
    ),
    (DRAFTING, {"cache off": other_tokens, "oracle": other_tokens}, NOT_RUN, "vLLM alone with drafts", "vLLM itself"),
    (DRAFTING, {"oracle": DIED}, WRONG, "exactness", "RuntimeError"),
    (DRAFTING, {"oracle": other_tokens}, WRONG, "exactness", "token 0 differs"),
    (DRAFTING, {"oracle": a_unit_short}, WRONG, "exactness", "tokens from the cache instead of"),
    (
        DRAFTING,
        {"oracle": has(verified={(3, 0): 9, (3, 1): 1, (3, 2): 1, (3, 3): 1})},
        WRONG,
        "acceptance",
        "less often with hits",
    ),
    (DRAFTING, {"oracle": no_drafts_behind_hits}, WRONG, "acceptance", "less often behind hits"),
    (DRAFTING, {"oracle": has(verified={})}, NOT_RUN, "acceptance", "no row verified"),
    (DRAFTING, dict.fromkeys(("oracle", "cache"), has(verified={(3, 0): 50})), NOT_RUN, "acceptance", "1 or 2 or 3"),
]


@pytest.mark.parametrize(
    ("lane", "faults", "verdict", "check", "words"), [(lane, *row) for lanes, *row in FAULTS for lane in lanes]
)
def test_each_fault_of_an_engine_has_its_verdict_and_is_named(lane, faults, verdict, check, words):
    checks = checks_of(lane, ToldEngines(faults))
    assert LaneReport(lane.name, checks, 0.0).verdict == verdict, checks
    named = [each for each in checks if each.verdict == verdict and each.name.startswith(check)]
    assert any(words in each.says for each in named), checks


def test_the_lanes_come_in_the_order_of_their_value_and_ask_for_what_they_show():
    assert [lane.name for lane in LANES] == [
        "nemotron_h bfloat16 compiled",
        "qwen3_next bfloat16 compiled",
        "nemotron_h bfloat16 compiled, other model runner",
        "nemotron_h bfloat16 eager",
        "qwen4_exp bfloat16 compiled",
        "kimi_linear bfloat16 compiled",
        "qwen3_next bfloat16 compiled, drafts (mtp, 3)",
        "nemotron_h float32 eager, drafts (mtp, 3)",
        "nemotron_h float32 eager, other model runner, drafts (mtp, 3)",
    ]
    shown = {
        lane: [check.name.removesuffix(f", {lane.name}") for check in checks_of(lane, ToldEngines())] for lane in LANES
    }
    judged = ["exactness", "chunk-aligned", "the check can see"]
    assert shown[MAMBA] == shown[DELTA] == ["environment", *judged, "forward passes", "speed"]
    assert shown[RUNNER] == shown[FLASH_NEXT] == shown[KIMI] == ["environment", *judged, "forward passes"]
    assert shown[COPY] == ["environment", *judged, "forward passes", "block copy"]
    own = [f"{check}, {DELTA_DRAFTS.name}, the head's own drafts" for check in judged]
    alone = ["vLLM alone with drafts, cache off", "vLLM alone with drafts, cache on"]
    assert shown[DELTA_DRAFTS] == ["environment", *alone, *judged, *own, "acceptance", "forward passes", "speed"]
    assert [lane.name for lane in lanes_of("cuda", quick=True)] == [lane.name for lane in LANES[:2]]
    *on_cpu, flash_next, kimi = lanes_of("cpu", quick=False)
    assert {lane.family for lane in on_cpu} == {"nemotron_h", "qwen3_next"}
    for lane in (flash_next, kimi):
        (check,) = Runner(ToldEngines()).run(lane, Path("m"))
        assert check.verdict == NOT_RUN and "for a GPU alone" in check.says and lane.family in check.name


def test_the_families_without_weights_of_ours_are_written_as_configurations_that_vllm_fills(tmp_path):
    for lane in (FLASH_NEXT, KIMI):
        model = command._tiny_model(lane, tmp_path)
        assert [file.name for file in model.iterdir()] == ["config.json"]
        assert json.loads((model / "config.json").read_text())["model_type"].startswith(lane.family)
        assert lane.flags[:2] == ("--load-format", "dummy") and lanes_of("cuda", False, ("--seed", "1"))
    flags = [lane.flags for lane in lanes_of("cuda", quick=False, flags=("--seed", "1"))]
    assert all(of_lane[-2:] == ("--seed", "1") for of_lane in flags) and flags[4][:2] == ("--load-format", "dummy")


def test_another_runner_without_answers_to_compare_with_is_not_run():
    (check,) = Runner(ToldEngines()).run(RUNNER, Path("m"))
    assert check.verdict == NOT_RUN and f"{MAMBA.name} did not finish" in check.says


def test_a_lane_with_drafts_asks_vllm_alone_first_and_opts_in():
    engines = ToldEngines()
    checks_of(DELTA_DRAFTS, engines)
    asked = {name.removeprefix(DELTA_DRAFTS.name + " "): more for name, *more in engines.started}
    assert list(asked) == ["patched", "reference", "alone, cache off", "alone, cache on", "patched, oracle"]
    assert [mode for _, mode, _ in asked.values()] == [FULL, REFERENCE, OFF, OFF, FULL]
    for name, (job, _, changes) in asked.items():
        assert (changes == {"SEAMARK_DRAFTS": "1"}) == name.startswith("patched"), name
        assert ("speculative_config" in job.arguments) == (name != "reference"), name
        assert (job.oracle is not None) == (name not in ("patched", "reference")), name
        assert job.arguments["enable_prefix_caching"] == (name not in ("reference", "alone, cache off"))


def test_a_lane_with_drafts_on_the_other_runner_asks_all_of_its_engines_there():
    engines = ToldEngines()
    checks_of(RUNNER_DRAFTS, engines)
    asked = {name.removeprefix(RUNNER_DRAFTS.name + " "): more for name, *more in engines.started[-4:]}
    assert list(asked) == ["patched", "alone, cache off", "alone, cache on", "patched, oracle"]
    for name, (job, mode, changes) in asked.items():
        assert changes[RUNNER_VARIABLE] == "0" and "--no-async-scheduling" in job.flags
        assert ("SEAMARK_DRAFTS" in changes) == (mode == FULL), name


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


def broken(_: LaneResult) -> ProcessEnd:
    raise KeyError("backends")


@pytest.mark.parametrize(
    ("faults", "status", "counts", "last"),
    [
        ({}, 0, (9, 0, 0), "right: all 9 lanes ran and found exact answers on this GPU; hits save time"),
        ({f"{MAMBA.name} patched": other_tokens}, 1, (8, 1, 0), f"WRONG: {MAMBA.name}"),
        ({f"{COPY.name} patched": LATE}, 3, (8, 0, 1), f"not proven: {COPY.name} (the engine with the patches did not"),
        ({f"{MAMBA.name} patched": broken}, 3, (7, 0, 2), f"not proven: {MAMBA.name} (failed: KeyError"),
    ],
    ids=["right", "wrong", "late", "a fault of the check itself"],
)
def test_the_last_line_is_the_verdict_and_one_lane_hides_no_other(gpu_check, faults, status, counts, last):
    found, printed, written = gpu_check(ToldEngines(faults))
    assert found == written["exit"] == status, printed
    assert written["lanes"] == {**dict(zip((OK, WRONG, NOT_RUN), counts, strict=True)), "left out": []}
    final = printed.rstrip().splitlines()[-1]
    assert final == written["verdict"] and final.startswith(last)
    assert f"{DELTA.name}: ok" in printed and (status != 3 or f"{counts[0]} of 9 lanes are right" in final)


def test_each_lane_is_printed_and_written_before_the_next_one_starts(gpu_check, capsys, tmp_path):
    seen = []

    def watched(result: LaneResult) -> ProcessEnd:
        written = json.loads((tmp_path / "seamark-gpu-check.json").read_text())
        seen.append((capsys.readouterr().out, written["results"][0]["verdict"], written["exit"]))
        return ProcessEnd(result)

    assert gpu_check(ToldEngines({f"{DELTA.name} patched": watched}), "--quick")[0] == 0
    ((printed, verdict, status),) = seen
    assert f"lane 1 of 2: {MAMBA.name}: ok" in printed and verdict == "ok"
    assert status == 3  # a check that is killed now has proven nothing about the second lane


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_signal_leaves_what_is_known(gpu_check, number, wrong):
    def interrupting(result: LaneResult) -> ProcessEnd:
        os.kill(os.getpid(), number)
        return ProcessEnd(result)

    before = signal.getsignal(number)
    faults = {f"{DELTA.name} alone": interrupting} | ({f"{MAMBA.name} patched": other_tokens} if wrong else {})
    status, printed, written = gpu_check(ToldEngines(faults))
    assert status == written["exit"] == (1 if wrong else 128 + number)
    first, second, *others = written["results"]
    assert first["verdict"] == ("WRONG" if wrong else "ok") and {lane["verdict"] for lane in others} == {"not run"}
    # What the lane showed before the signal is there, and not called a pass.
    assert second["verdict"] == "not run" and f"exactness, {DELTA.name}" in json.dumps(second)
    assert f"unfinished lane: {DELTA.name}: not run" in printed
    assert signal.getsignal(number) is before


def test_speed_is_told_and_never_wrong(gpu_check):
    def slow(result: LaneResult) -> ProcessEnd:
        return ProcessEnd(
            replace(result, first_tokens=[each._replace(seconds=9 * each.seconds) for each in result.first_tokens])
        )

    status, printed, written = gpu_check(ToldEngines({"compiled patched": slow}), "--quick")
    assert status == 0 and "hits do not save time here" in printed.splitlines()[-1]
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


def out_of_time(result: LaneResult) -> ProcessEnd:
    half = {name: result.answers[name] for name in list(result.answers)[:2]}
    return ProcessEnd(
        replace(result, answers=half, first_tokens=[], passes=[], pace=None), LATE.fault, from_outside=True
    )


@pytest.mark.parametrize(
    ("fault", "status", "verdicts"),
    [
        (
            out_of_time,
            3,
            dict.fromkeys(("2,000 shared tokens", "8,000 shared tokens", "the check can see", "all of it"), NOT_RUN)
            | {"exactness": OK},
        ),
        (a_unit_short, 3, {"exactness": NOT_RUN}),
        (blind, 3, {"exactness": OK, "the check can see": NOT_RUN}),
        (has(passes=[]), 0, {"exactness": OK}),
        (fact(writes_in_forward=False), 0, {"environment": OK}),
        (lambda r: a_pass_more(replace(r, facts={**r.facts, "writes_in_forward": False})), 0, {"forward passes": OK}),
        (other_tokens, 1, {"exactness": WRONG}),
        (a_pass_more, 1, {"forward passes": WRONG}),
    ],
)
def test_on_an_own_model_only_other_answers_and_passes_are_wrong(gpu_check, fault, status, verdicts):
    found, _, written = gpu_check(ToldEngines({"patched": fault}, length=9000), *OWN)
    checks = {check["name"].removesuffix(", org/Some-Model"): check for check in written["results"][0]["checks"]}
    assert found == status and verdicts == {name: checks[name]["verdict"] for name in verdicts}


def test_an_own_model_with_a_draft_head_has_a_second_lane(tmp_path):
    def drafts(config: str, speculation: str | None = None) -> list[Any]:
        (tmp_path / "config.json").write_text(config)
        lanes = command.own_lanes(str(tmp_path), [], "cuda", False, speculation)
        return [lane.drafts and json.loads(lane.drafts) for lane in lanes]

    plain, headed = '{"model_type": "nemotron_h"}', '{"text_config": {"mtp_num_hidden_layers": 1}}'
    assert drafts(plain) == [None]
    assert drafts(headed) == [None, {"method": "mtp", "num_speculative_tokens": 3}]
    assert drafts(plain, '{"method": "ngram"}') == [None, {"method": "ngram"}]
    engines = ToldEngines()
    lane = command.own_lanes(str(tmp_path), [], "cuda", False, '{"method": "mtp"}')[1]
    assert {check.verdict for check in Runner(engines).run(lane, tmp_path)} <= {OK, LEFT_OUT}
    assert not any(name.endswith("oracle") for name, *_ in engines.started)  # its head speaks for itself


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "cuda"],
        ["--seconds", "10"],
        ["--attention-backend", "FLASHINFER"],
        ["--report", "nowhere/report.json"],
        ["--report", "."],
        ["--speculative-config", '{"method": "mtp"}'],
        ["--model", "m", "--speculative-config", "mtp"],
        ["--model", "m", "--speculative-config", "[3]"],
        ["--model", "m", "--", "--speculative-config", "{}"],
    ],
)
def test_wrong_usage_is_2_and_runs_nothing(monkeypatch, capsys, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "is_cpu_build", lambda: True)
    try:
        status = command.main(arguments)
    except SystemExit as error:
        status = error.code
    named = next(part for part in reversed(arguments) if part.startswith("--") and part != "--")
    assert status == 2 and named in capsys.readouterr().err


def test_flags_of_vllm_reach_every_engine(gpu_check):
    engines = ToldEngines()
    gpu_check(engines, "--", "--attention-backend", "FLASHINFER")
    assert {job.flags[-2:] for _, job, *_ in engines.started} == {("--attention-backend", "FLASHINFER")}


def test_without_a_gpu_one_sentence_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "is_cpu_build", lambda: False)
    monkeypatch.setattr(command, "_sees_gpu", lambda: False)
    assert command.main([]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "not proven" in line and "torch sees no GPU" in line


def test_the_report_names_no_folder_host_or_user(monkeypatch):
    monkeypatch.setattr(report.platform, "node", lambda: "spark-7f")
    monkeypatch.setattr(report, "_user", lambda: "ada")
    text = "OSError: /home/ada/models/tiny/config.json of ada on spark-7f, http://ada.example:8000/v1, 10.1.2.3:80"
    assert report.anonymous({"says": [text]}) == {"says": ["OSError: config.json of USER on HOST, URL, ADDRESS:80"]}
    kept = "12 ms / 13 ms, org/Some-Model, vLLM 0.32.0, driver 580.95.05, cold / warm: 1 / 1"
    assert report.anonymous(kept) == kept
    secrets, shown = "--api-key=x --hf-token y --dtype auto", "--api-key=... --hf-token ... --dtype auto"
    assert report.without_secrets(secrets.split()) == shown.split()


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


SAVE = """
import pathlib, pickle, sys
from engine_patches.gpu_check.job import LaneResult
pathlib.Path(sys.argv[2]).write_bytes(pickle.dumps(LaneResult({"vllm": "0.32.0"})))
"""

KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("code", "seconds", "facts", "words", "from_outside"),
    [
        (SAVE, 60.0, {"vllm": "0.32.0"}, None, False),
        (SAVE + "raise ValueError('no such layer')", 60.0, {"vllm": "0.32.0"}, "ValueError: no such layer", False),
        (KILL, 60.0, None, "SIGKILL", True),
        ("import signal; signal.pause()", 0.3, None, "was ended after", True),
        ("raise SystemExit('started')", 0.0, None, "no time was left", True),
    ],
    ids=["ends", "dies", "is killed", "never ends", "no time"],
)
def test_what_an_engine_saved_is_there_however_it_ends(
    monkeypatch, tmp_path, code, seconds, facts, words, from_outside
):
    monkeypatch.setattr(processes, "_command", lambda job, result: [sys.executable, "-c", code, str(job), str(result)])
    monkeypatch.setattr(processes, "MIN_SECONDS", 0.1)
    outcome = Engines(tmp_path, on_cpu=False, seconds=seconds).run("an engine", LaneJob({}), REFERENCE)
    assert outcome.result == (None if facts is None else LaneResult(facts)) and outcome.from_outside == from_outside
    assert outcome.fault == words if words is None else words in (outcome.fault or "")


def test_a_signal_to_the_check_ends_the_engine_that_runs(monkeypatch, tmp_path):
    code = f"import os, pathlib, signal; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
    code += f"os.kill({os.getpid()}, signal.SIGTERM); signal.pause()"
    monkeypatch.setattr(processes, "_command", lambda job, result: [sys.executable, "-c", code])
    with pytest.raises(command.Interrupted), command._signals_raise():
        Engines(tmp_path, on_cpu=False, seconds=60.0).run("an engine", LaneJob({}), REFERENCE)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
