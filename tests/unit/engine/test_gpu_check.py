"""`seamark gpu-check` with engines that answer as told, and the lines of deploy/README.md that start it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_patches.gpu_check import command, judge, lanes, runner
from engine_patches.gpu_check.command import LaneReport
from engine_patches.gpu_check.engine import COLD, FAN_OUT, STATES, WARM, CheckedAnswer, FirstTokens, LaneJob, LaneResult
from engine_patches.gpu_check.judge import NOT_RUN, OK, WRONG, Check
from engine_patches.gpu_check.lanes import DEFECTS, FIRST, SHARED_LENGTHS, Lane, Question, lanes_of
from engine_patches.gpu_check.runner import RUNNER_VARIABLE, Engines, ProcessEnd, Runner
from engine_patches.settings import FULL, OFF, REFERENCE
from tests.deploy.compose_files import DEPLOY
from tests.harness.helm import complaints

FACTS: dict[str, Any] = {
    **{"device": "NVIDIA GB10", "machine": "aarch64", "capability": "sm_121", "driver": "580.95", "cuda": "13.0"},
    **{"torch": "2.13.0", "vllm": "0.32.0", "compiled": "VLLM_COMPILE", "graphs": "FULL_AND_PIECEWISE"},
    **{"asynchronous": True, "dtype": "torch.bfloat16", "exact": False, "hints_refused": None, "recurrent": True},
    **{"backends": ["FLASH_ATTN"], "patches_live": True, "writes_in_forward": True, "block": 384, "match_unit": 16},
    **{"alignment": 16, "budget": 2048, "ahead": 0, "windows": False, "chunk": 64},
}

LANES = lanes_of("cuda")
MAMBA, DELTA, TRITON, RUNNER, COPY, *_ = LANES
DRAFTS = Lane("own", own_model=True, drafts='{"method": "mtp", "num_speculative_tokens": 3}')


def right_answer(question: Question) -> CheckedAnswer:
    first = sum(question.tokens) % 1000
    tokens = [first + step for step in range(4)]
    return CheckedAnswer(tokens, [{token: -0.5, 5000: -2.0} for token in tokens], 0)


def with_other_tokens(answer: CheckedAnswer) -> CheckedAnswer:
    tokens = [token + 2000 for token in answer.tokens]
    return CheckedAnswer(tokens, [{token: -0.1} for token in tokens], answer.cached)


def honest_result(job: LaneJob, changes: Any, length: int) -> LaneResult:
    """What an engine without a defect says."""
    drafting, alone, asked = job.lane.drafts is not None, job.sections is None, job.sections
    lengths = [shared for shared in SHARED_LENGTHS if shared + 96 <= length]
    if asked is None:
        own = job.lane.own_model and lanes.own_sections(FACTS, lengths, lanes.TINY_IDS, defects=not drafting)
        asked = own or lanes.sections(FACTS, few=True)
    facts = {**FACTS, "runner": "V1" if changes.get(RUNNER_VARIABLE) == "0" else "V2", "longest": length}
    facts |= {"gdn_prefill": ["triton" if "triton" in str(job.lane.flags) else "flashinfer"], "drafts": drafting}
    result = LaneResult(facts, asked)
    for name, waves in asked.items():
        wanted = [question for wave in waves for question in wave]
        answers = [right_answer(question) for question in wanted]
        if alone and name not in DEFECTS:
            result.answers_again[name] = list(answers)
        if not alone:
            pairs = zip(answers, wanted, strict=True)
            answers = [answer._replace(cached=question.hit(facts) or 0) for answer, question in pairs]
            spoiled = len(waves[-1]) if name in DEFECTS else 0
            answers[len(answers) - spoiled :] = map(with_other_tokens, answers[len(answers) - spoiled :])
        result.answers[name] = answers
    if job.lane.block_copy and alone:
        result.from_cache = [answer._replace(cached=16) for answer in result.answers[name]]
    result.passes = [FirstTokens("cold", 100, 3, 0.1, 0, 1, 3), FirstTokens("warm", 100, 3, 0.1, 64, 1, 1)]
    if job.lane.timed:
        slow = 2.0 if alone else 1.0
        for states in STATES[:1] if alone else STATES:
            seconds = slow + states / 1000
            result.first_tokens.append(FirstTokens(COLD, 2000, states, seconds, 0, 1, 0 if alone else states))
        for shared in lengths:
            for case, took in ((WARM, 0.1), (FAN_OUT, 2.0)):
                result.first_tokens.append(FirstTokens(case, shared, 1, slow * took, shared, 1, 0))
        result.pace = {"decode": 0.01, "floor": 0.02, "token": 0.001}
    return result


Fault = Callable[[LaneResult], ProcessEnd] | ProcessEnd


class ToldEngines(Engines):
    """Engines that answer rightly, but for those whose name has one of `faults` in it."""

    def __init__(self, faults: dict[str, Fault] | None = None, length: int = 4096):
        self.faults, self.length = faults or {}, length
        self.started: list[tuple[str, Any]] = []

    def run(self, name: str, job: LaneJob, mode: str, changes: Any) -> Iterator[ProcessEnd]:
        self.started.append((mode, changes))
        result = honest_result(job, changes, self.length)
        fault = next((fault for part, fault in self.faults.items() if part in name), ProcessEnd(result))
        yield fault if isinstance(fault, ProcessEnd) else fault(result)


def changed(change: Callable[[CheckedAnswer], CheckedAnswer], *fields: str) -> Fault:
    """The fault of an engine whose answers, but those that have a planted defect, are other ones."""

    def fault(result: LaneResult) -> ProcessEnd:
        spoiled = {
            which: {name: found if name in DEFECTS else [*map(change, found)] for name, found in said.items()}
            for which in fields or ("answers",)
            for said in [getattr(result, which)]
        }
        return ProcessEnd(replace(result, **spoiled))

    return fault


def has(**changes: Any) -> Fault:
    """The fault of an engine whose result has these fields."""
    return lambda result: ProcessEnd(replace(result, **changes))


def fact(**changes: Any) -> Fault:
    """The fault of an engine that finds these facts."""
    return lambda result: ProcessEnd(replace(result, facts={**result.facts, **changes}))


def blind(result: LaneResult) -> ProcessEnd:
    honest = {name: [right_answer(q) for wave in result.sections[name] for q in wave] for name in DEFECTS}
    return ProcessEnd(replace(result, answers={**result.answers, **honest}))


def off_by(error: float) -> Callable[[CheckedAnswer], CheckedAnswer]:
    return lambda answer: answer._replace(top=[{t: v - error for t, v in each.items()} for each in answer.top])


DIED = ProcessEnd(None, "RuntimeError: no kernel image")
LATE = ProcessEnd(None, "the engine was ended after 60 s (more with --minutes)", from_outside=True)

other_tokens = changed(with_other_tokens)
scatters, differs = changed(off_by(0.4), "answers_again"), changed(with_other_tokens, "answers_again")
a_unit_short = changed(lambda answer: answer._replace(cached=max(answer.cached - 16, 0)))
a_pass_more = has(passes=[FirstTokens("cold", 100, 3, 0.1, 0, 1, 3), FirstTokens("warm", 100, 3, 0.1, 64, 2, 1)])


def checks_of(lane: Lane, engines: ToldEngines) -> list[Check]:
    """The lane's checks; the lane that says what vLLM chooses by itself has run without a fault."""
    runner = Runner(engines)
    if lane.other:
        faults, engines.faults = engines.faults, {}
        list(runner.run(DELTA if lane is TRITON else MAMBA, Path("m")))
        engines.faults = faults
    return list(runner.run(lane, Path("m")))


# The engine that has a fault and the fault; the verdict of the lane; the check that says so, and some of its words.
FAULTS: list[tuple[Sequence[Lane], dict[str, Any], str, str, str]] = [
    ([*LANES, DRAFTS], {}, OK, "", ""),
    ([*LANES, DRAFTS], {"patched": DIED}, WRONG, "all of it", "vLLM alone runs here, but the engine with the patches"),
    (LANES, {"patched": LATE}, NOT_RUN, "all of it", "ended after 60 s"),
    (LANES, {"patched": lambda r: ProcessEnd(LaneResult(r.facts), "illegal")}, WRONG, "all of it", "illegal"),
    ([*LANES, DRAFTS], {"patched": other_tokens}, WRONG, "exactness", "token 0, logprobs off by"),
    (LANES, {"patched": changed(off_by(0.6)), "alone": scatters}, NOT_RUN, "exactness", "itself so: 0 of"),
    (LANES, {"patched": other_tokens, "alone": differs}, NOT_RUN, "the check can see", "cannot see: not noticed"),
    (LANES, {"alone": fact(exact=True), "patched": changed(off_by(0.001))}, WRONG, "exactness", "off by 0.001"),
    (LANES, {"patched": a_unit_short}, WRONG, "exactness", "tokens from the cache instead of"),
    (LANES, {"patched": blind}, NOT_RUN, "the check can see", "not noticed: another prefix's state, a state one unit"),
    (LANES, {"patched": a_pass_more}, WRONG, "forward passes", "1 / 2 of 100 tokens"),
    (LANES, {"patched": fact(patches_live=False)}, WRONG, "environment", "the patches are not live"),
    (LANES, {"patched": fact(writes_in_forward=False)}, WRONG, "environment", "each costs a pass of its own"),
    (LANES, {"alone": lambda r: ProcessEnd(LaneResult({**r.facts, "recurrent": False}))}, NOT_RUN, "", "no recurrent"),
    ([MAMBA, DELTA, RUNNER], {"alone": fact(graphs="NONE")}, NOT_RUN, "exactness", "without CUDA graphs"),
    ([TRITON], {"alone": fact(gdn_prefill=["flashinfer"])}, NOT_RUN, "exactness", "instead of ['triton']"),
    (LANES, {"alone": has(left_out=[FIRST])}, NOT_RUN, FIRST, "no time was left"),
    ([COPY], {"alone": lambda r: ProcessEnd(replace(r, from_cache=[]))}, NOT_RUN, "block copy", "0 of 0 resent"),
    ([DRAFTS], {"alone": fact(drafts=False)}, NOT_RUN, "exactness", "does not draft"),
]


@pytest.mark.parametrize(
    ("lane", "faults", "verdict", "check", "words"), [(lane, *row) for lanes, *row in FAULTS for lane in lanes]
)
def test_each_fault_of_an_engine_has_its_verdict_and_is_named(lane, faults, verdict, check, words):
    checks = checks_of(lane, ToldEngines(faults))
    assert LaneReport(lane.name, checks, 0.0).verdict == verdict, checks
    named = [each for each in checks if each.verdict == verdict and each.name.startswith(check)]
    assert any(words in each.says for each in named), checks


def test_the_patches_are_compared_with_vllm_alone_which_runs_first():
    for lane, own in ((MAMBA, {}), (DRAFTS, {"SEAMARK_DRAFTS": "1"})):
        engines = ToldEngines()
        checks_of(lane, engines)
        assert engines.started == [(OFF, {}), (FULL, own)]


@pytest.fixture
def gpu_check(monkeypatch, tmp_path, capsys):
    """Runs the command on a machine with a GPU, as it seems, with these engines: exit status, output, report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "is_cpu_build", lambda: False)
    monkeypatch.setattr(command, "_sees_gpu", lambda: True)
    monkeypatch.setattr(command, "config_of", lambda model: {})  # nothing is looked up on the hub
    monkeypatch.setattr(command, "write_config", lambda folder, family: folder)

    def run(engines: Any, *arguments: str) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.setattr(command, "Engines", lambda *_, **__: engines)
        status = command.main(list(arguments))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return status, captured.out, json.loads((tmp_path / "seamark-gpu-check.json").read_text())

    return run


@pytest.mark.parametrize(
    ("faults", "status", "counts", "last"),
    [
        ({}, 0, (7, 0, 0), "right: all 7 lanes ran and found exact answers on this GPU; hits save time"),
        ({f"{MAMBA.name} patched": other_tokens}, 1, (6, 1, 0), f"WRONG: {MAMBA.name}"),
        ({f"{COPY.name} patched": LATE}, 3, (6, 0, 1), f"not proven: {COPY.name} (the engine was ended after 60 s"),
        ({f"{MAMBA.name} patched": lambda _: {}[0]}, 3, (6, 0, 1), f"not proven: {MAMBA.name} (failed: KeyError"),
    ],
    ids=["right", "wrong", "late", "a fault of the check itself"],
)
def test_the_last_line_is_the_verdict_and_one_lane_hides_no_other(gpu_check, faults, status, counts, last):
    found, printed, written = gpu_check(ToldEngines(faults))
    assert found == written["exit"] == status, printed
    assert tuple(written["lanes"][verdict] for verdict in (OK, WRONG, NOT_RUN)) == counts
    final = printed.rstrip().splitlines()[-1]
    assert final == written["verdict"] and final.startswith(last)
    assert f"{DELTA.name}: ok" in printed and (status != 3 or f"{counts[0]} of 7 lanes are right" in final)


@pytest.mark.parametrize(("number", "wrong"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_leaves_what_is_known(gpu_check, number, wrong):
    class Interrupting(ToldEngines):
        def run(self, name: str, *args: Any) -> Iterator[ProcessEnd]:
            yield from super().run(name, *args)
            if name == f"{DELTA.name} patched":
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    status, _, written = gpu_check(Interrupting({f"{MAMBA.name} patched": other_tokens} if wrong else {}))
    assert status == written["exit"] == (1 if wrong else 128 + number)
    first, second, *others = written["results"]
    assert first["verdict"] == ("WRONG" if wrong else "ok") and {lane["verdict"] for lane in others} == {"not run"}
    # What the lane showed before the signal is there, and not called a pass.
    assert second["verdict"] == "not run" and f"environment, {DELTA.name}" in json.dumps(second)
    assert signal.getsignal(number) is before


OWN = ("--model", "org/Some-Model", "--", "--max-model-len", "9000", "--hf-token", "hf_secret")


def test_a_users_own_model_is_checked_at_each_length_that_fits(gpu_check):
    status, printed, written = gpu_check(ToldEngines(length=9000), *OWN)
    assert status == 0, printed
    assert written["lanes"]["left out"] == ["32,000 shared tokens, org/Some-Model: the model's length is 9,000 tokens"]
    assert written["options"]["flags"] == ["--max-model-len", "9000", "--hf-token", "..."]
    for length in ("163", "2,000", "8,000"):
        name = f"exactness, {length} shared tokens, org/Some-Model"
        (exactness,) = (c for c in written["results"][0]["checks"] if c["name"] == name)
        assert exactness["numbers"]["seamark"]["answers"] == 4 and exactness["numbers"]["from_cache"] == 3
    assert "hf_secret" not in json.dumps(written) + printed


@pytest.mark.parametrize(
    ("fault", "status", "check", "verdict"),
    [
        (a_unit_short, 3, "exactness, 163 shared tokens", NOT_RUN),
        (blind, 3, "the check can see", NOT_RUN),
        (fact(writes_in_forward=False), 0, "environment", OK),
        (other_tokens, 1, "exactness, 163 shared tokens", WRONG),
    ],
)
def test_on_an_own_model_only_other_answers_and_passes_are_wrong(gpu_check, fault, status, check, verdict):
    found, _, written = gpu_check(ToldEngines({"patched": fault}, length=9000), *OWN)
    checks = {each["name"].removesuffix(", org/Some-Model"): each for each in written["results"][0]["checks"]}
    assert found == status and checks[check]["verdict"] == verdict


@pytest.mark.parametrize(
    "line", ["--device cuda", "--report nowhere/report.json", "--model m -- --speculative-config {}"]
)
def test_wrong_usage_is_2_and_runs_nothing(monkeypatch, capsys, tmp_path, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "is_cpu_build", lambda: True)
    try:
        status = command.main(line.split())
    except SystemExit as error:
        status = error.code
    named = [part for part in line.split() if part.startswith("--") and part != "--"][-1]
    assert status == 2 and named in capsys.readouterr().err


SAVE = """
import pathlib, pickle, sys
from engine_patches.gpu_check.engine import WARM, FirstTokens, LaneResult
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
        ("raise SystemExit('started')", -60.0, None, "no time was left", True),
    ],
    ids=["ends", "dies", "is killed", "never ends", "no time"],
)
def test_what_an_engine_saved_is_there_however_it_ends(
    monkeypatch, tmp_path, code, seconds, facts, words, from_outside
):
    monkeypatch.setattr(runner, "_command", lambda job, result: [sys.executable, "-c", code, str(job), str(result)])
    monkeypatch.setattr(runner, "MIN_SECONDS", -60.0)  # however long this machine takes
    engines = Engines(tmp_path, on_cpu=False, seconds=seconds)
    *grown, outcome = engines.run("an engine", LaneJob(MAMBA, "m"), REFERENCE, {})
    assert outcome.over and not any(each.over for each in grown)
    assert outcome.result == (None if facts is None else LaneResult(facts)) and outcome.from_outside == from_outside
    assert outcome.fault == words if words is None else words in (outcome.fault or "")


def test_a_signal_to_the_check_ends_the_engine_that_runs(monkeypatch, tmp_path):
    code = f"import os, pathlib, signal; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
    code += f"os.kill({os.getpid()}, signal.SIGTERM); signal.pause()"
    monkeypatch.setattr(runner, "_command", lambda job, result: [sys.executable, "-c", code])
    with pytest.raises(command.Interrupted), command._signals_raise():
        list(Engines(tmp_path, on_cpu=False, seconds=60.0).run("an engine", LaneJob(MAMBA, "m"), REFERENCE, {}))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("mine", "alone", "saves"),
    [
        ([(163, 9.0, 160), (2000, 1.0, 1984)], [(163, 9.0, 160), (2000, 1.2, 0)], True),
        ([(163, 9.0, 160), (2000, 1.0, 1984)], [(163, 9.0, 160), (2000, 1.01, 0)], False),
        ([(2000, 1.0, 0)], [(2000, 2.0, 0)], False),  # faster, but by no hit
    ],
)
def test_hits_save_time_only_if_the_longest_prefix_that_both_were_asked_for_is_clearly_sooner(mine, alone, saves):
    told = [[FirstTokens(WARM, shared, 1, took, cached, 1, 0) for shared, took, cached in of] for of in (mine, alone)]
    check = judge.speed("lane", *(LaneResult(first_tokens=each) for each in told))
    assert check.verdict == OK and check.numbers is not None and check.numbers["hits_save_time"] == saves


SECTION = (DEPLOY / "README.md").read_text().partition("### On a GPU, run this first")[2]

# By its first word.
LINES = {
    Path(words[0]).name: words
    for text in SECTION.partition("```sh\n")[2].partition("```")[0].split("\n\n")
    for words in [shlex.split(text.replace("\\\n", " "))]
}


def test_the_mod_is_given_to_the_launcher_before_the_command():
    words = LINES["launch-cluster.sh"]
    assert words[words.index("--apply-mod") + 1] == "mods/seamark" and words.index("exec") == 4
    assert words[5:7] == ["seamark", "gpu-check"]


def test_kubernetes_takes_the_pod_and_a_shell_its_command():
    (given,) = (word.partition("=")[2] for word in LINES["kubectl"] if word.startswith("--overrides="))
    pod = {"kind": "Pod", "metadata": {"name": "gpu-check"}, **json.loads(given)}
    assert complaints(pod) == []
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "gpu-check" and f"--image={container['image']}" in LINES["kubectl"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    shell, dash_c, script = container["command"]
    assert dash_c == "-c"
    # The check's own exit status is the pod's, whatever is printed behind it.
    within = script.replace("python3 -m engine_patches gpu-check", "sh -c 'echo told > /dev/null; exit 3'")
    assert subprocess.run([shell, "-c", within], capture_output=True).returncode == 3
