"""What benchmarks say of what they measured: which answers are exact, what the demo and the soak find wrong."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from proxy.bench import menu, stories
from proxy.bench.demo import ALONE, LEGEND, SEAMARK, TUNED, in_short, render
from proxy.bench.harness.client import COMPLETION, TimedAnswer
from proxy.bench.harness.exact import compare
from proxy.bench.harness.servers import Server, Servers
from proxy.bench.stories import Line, Planted, Story
from proxy.fleet.answer_compare import ContinuedToken
from tests.bench.soak import Driven, Outcome, judge
from tests.bench.traffic import Request

RANKED = {"a": -0.5, "b": -1.5, "c": -2.0, "d": -2.5, "e": -3.0}


def answer(*tops: dict[str, float], chosen: str = "") -> TimedAnswer:
    """An answer of the likeliest token of each step, or of `chosen`."""
    steps = tuple(ContinuedToken(chosen or max(top, key=lambda token: top[token]), top) for top in tops)
    return TimedAnswer(steps, 100, 0, 0.0, 0.1, 0.2)


CLOSE, FAR = ({**RANKED, "c": -2.0 + error} for error in (0.9e-4, 1.1e-4))

TIED = {**RANKED, "b": RANKED["a"] - 0.5e-5}

OTHER_SIDE = {**TIED, "b": RANKED["a"] + 0.5e-5}

SIXTH = {token: value for token, value in RANKED.items() if token != "e"} | {"f": -3.00005}

TWO_OTHERS = {"a": -0.5, "b": -1.5, "c": -2.0, "f": -2.5, "g": -3.0}


@pytest.mark.parametrize(
    ("ours", "reference", "exact"),
    [
        (CLOSE, RANKED, True),
        (FAR, RANKED, False),
        (OTHER_SIDE, TIED, True),  # another token at a tie of the reference's two best
        ({**RANKED, "b": -0.4}, RANKED, False),
        (SIXTH, RANKED, True),  # the fifth and the sixth best have changed places
        ({**SIXTH, "f": -2.9}, RANKED, False),  # too likely: the reference has it behind e, at -3.0 at most
        (TWO_OTHERS, RANKED, False),
    ],
)
def test_an_answer_is_exact_within_the_bound_and_at_ties_alone(ours, reference, exact):
    assert compare(answer(ours), answer(reference)).exact is exact


def test_a_difference_says_where_and_how_much():
    found = compare(answer({**RANKED, "b": -0.4}), answer(RANKED))
    assert (found.position, found.gap) == (0, pytest.approx(1.0))
    assert compare(answer(RANKED, RANKED), answer(RANKED)).position == 1  # behind the reference's end
    assert compare(answer({**SIXTH, "f": -2.9}), answer(RANKED)).largest_error == pytest.approx(0.1)
    assert compare(answer(TWO_OTHERS), answer(RANKED)).largest_error == math.inf


def test_a_sampled_token_that_the_engine_names_beside_the_likeliest_is_no_rank():
    assert compare(*(answer({**top, "z": -12.0}, chosen="z") for top in (SIXTH, RANKED))).exact


def story(shared: int, hit: int, error: float = 0.0) -> Story:
    ours = Line(SEAMARK, hit, ttfts_cold=[0.5, 0.9], ttfts_warm=[0.1], compared=2, largest_error=error)
    others = [Line(name, hit // 2, ttfts_cold=[0.4], ttfts_warm=[0.45]) for name in (ALONE, TUNED)]
    return Story(stories.SYSTEM_PROMPT, shared, hit, [ours, *others], True, "")


def planted(*, caught: bool) -> list[Planted]:
    return [Planted("none", False, 0.0, None), Planted("a state one token early", caught, 1.0, 3)]


def test_the_demo_says_in_five_lines_what_was_asked_found_saved_and_equal_and_what_it_cost():
    asked, found, saved, equal, cost = in_short([story(900, 900), story(100, 90)], planted(caught=True), 40, 1600)
    assert asked.startswith("asked  40 requests") and "1,600" in asked
    assert "100 to 900 tokens: 100% with Seamark, 50% with vLLM alone, 50% with vLLM tuned" in found
    assert "behind 900 tokens came after 100 ms with Seamark, 450 ms with vLLM alone" in saved
    assert "all 4 compared answers are those of" in equal and equal.endswith("noticed 1 of 1 planted defects")
    assert "500 ms instead of 400 behind 100 tokens" in cost and cost.endswith("+0 forward passes")
    wrong = in_short([story(100, 90, error=0.5)], planted(caught=False), 40, 1600)[3]
    assert "NOT all 2 compared answers" in wrong and wrong.endswith("noticed 0 of 1 planted defects")


def test_the_demos_table_has_no_word_that_the_legend_leaves_unexplained():
    said = render([story(100, 90)], planted(caught=True))
    assert "100 tokens shared, a perfect cache hits 90" in said and "oracle" not in said
    for column in ("hit at 2", "hit after", "passes", "first token", "exact"):
        assert column in LEGEND


def test_a_server_that_ends_is_told_with_the_end_of_its_log_and_no_traceback(tmp_path, monkeypatch, capsys):
    def benchmark(argv: list[str]) -> int:
        log = tmp_path / "engine.log"
        log.write_text("ValueError: no such model\n")
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
        process.wait()
        Server("seamark", "http://127.0.0.1:9", log, process).wait_until_ready()
        return 0

    module = SimpleNamespace(main=benchmark)
    monkeypatch.setattr(menu, "importlib", SimpleNamespace(import_module=lambda name: module))
    assert menu.main(["demo"]) == 1
    assert capsys.readouterr().err == "seamark bench: seamark ended with 7:\nValueError: no such model\n"


def test_where_the_gateway_lacks_a_library_none_is_started(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "proxy.server.uvicorn_server", None)
    with Servers(tmp_path) as servers:
        with pytest.raises(ModuleNotFoundError):
            servers.gateway()
        assert not servers.started


RIGHT = answer(RANKED)

ASKED = Request("salts", COMPLETION, {"prompt": [1] * 100}, judged=True)

WELL = Driven("room", 60.0, (Outcome(ASKED, RIGHT),), {}, {}, ())


def test_of_many_answers_only_a_share_may_take_the_other_side_of_a_tie():
    tied = replace(ASKED, body={"prompt": [2] * 100})
    rights = {ASKED.question: RIGHT, tied.question: answer(TIED)}
    for same, wrong in ((99, False), (98, True)):
        outcomes = [Outcome(tied, answer(OTHER_SIDE)), *[Outcome(ASKED, RIGHT)] * same]
        assert bool(judge(replace(WELL, outcomes=outcomes), rights).complaints) == wrong


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (replace(WELL, outcomes=(Outcome(ASKED, RIGHT), Outcome(ASKED, failure="500"))), "1 requests failed"),
        (replace(WELL, outcomes=(Outcome(ASKED, answer(FAR)),)), "1 answers differ"),
        (replace(WELL, outcomes=(Outcome(ASKED, answer()),)), "1 answers differ"),
        (
            replace(WELL, outcomes=(Outcome(replace(ASKED, must_miss=True), RIGHT._replace(cached_tokens=16)),)),
            "1 requests with a salt",
        ),
        (replace(WELL, log_lines=["room: ERROR"]), "1 lines of the logs"),
        (replace(WELL, leftovers={"vllm:num_requests_running": None}), "1 gauges"),
        (replace(WELL, outcomes=()), "no answer was judged"),
    ],
)
def test_the_soak_tells_each_thing_that_is_wrong(run, complaint):
    assert judge(WELL, {ASKED.question: RIGHT}).complaints == []
    found = judge(run, {ASKED.question: RIGHT}).complaints
    assert len([line for line in found if complaint in line]) == 1
