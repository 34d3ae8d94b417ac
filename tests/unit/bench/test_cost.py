"""`seamark bench passes`, `cost` and `resume`: the arithmetic on recorded numbers, and what they say of it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import time

import pytest

from proxy.bench import cost, passes, resume
from proxy.bench.cost import KINDS, NO_HINTS, THREE_HINTS, CostOfPrompts
from proxy.bench.harness.client import fresh_tokens, three_boundaries
from proxy.bench.harness.counters import CpuTime, family
from proxy.bench.harness.ratios import Comparison, Pair, Spread, in_words, pooled, spread
from proxy.bench.passes import BASELINE, OURS, UNTOUCHED, PassPlan, Row, Table
from proxy.bench.resume import Resumed, Round, Sample

# CPU seconds of five pairs, 100 tokens, as measured.
PAIRS = tuple(
    Pair(*pair) for pair in ((0.0412, 0.0401), (0.0409, 0.0405), (0.0433, 0.0402), (0.0404, 0.0406), (0.0411, 0.0403))
)

BUSY = "import time\nwhile True:\n  time.process_time() > 0.3 and time.sleep(60)"


def test_quartiles_lie_between_the_numbers_and_one_number_is_all_three():
    assert spread([5, 1, 4, 2, 3]) == Spread(2, 3, 4)
    assert spread([0.5]) == Spread(0.5, 0.5, 0.5)


def test_a_comparison_is_judged_by_the_median_of_its_pairs_ratios():
    comparison = Comparison("any", PAIRS, 1.02)
    assert comparison.ratio.median == pytest.approx(0.0411 / 0.0403)
    assert comparison.extra.median == pytest.approx(0.0008)
    assert comparison.held
    assert not Comparison("any", PAIRS, 1.019).held
    assert in_words(comparison.ratio) == "1.020 (1.010..1.027)"
    assert comparison.calm == pytest.approx(0.0409 / 0.0402)


def test_pooled_comparisons_count_every_pair_alike():
    slow = Comparison("slow", (Pair(3, 1),) * 6, 1.02)
    both = pooled("both", [Comparison("any", PAIRS, 1.02), slow])
    assert len(both.pairs) == 11 and both.ratio.median == 3 and not both.held


def cost_of(hinted: float) -> CostOfPrompts:
    """A made-up cost: nothing without hints, a ratio of `hinted` with them, at one length of two."""

    def comparison(kind: str, ratio: float) -> Comparison:
        return Comparison(kind, tuple(Pair(pair.theirs * ratio, pair.theirs) for pair in PAIRS), cost.MOST)

    lengths = {100: hinted, 8000: 1.0}
    return CostOfPrompts(
        "nemotron_h",
        {
            length: {NO_HINTS: comparison(NO_HINTS, 1.0), THREE_HINTS: comparison(THREE_HINTS, ratio)}
            for length, ratio in lengths.items()
        },
    )


def test_the_cost_table_names_the_lengths_that_are_above_and_judges_over_all():
    text = cost.render(cost_of(1.05))
    above = [line.split()[4] for line in text.splitlines() if line.endswith("above")]
    assert above == ["100", "all"]
    assert "+2.02 (+2.01..+2.02)" in text
    assert "held: no hints, 1.000 over all" in text and "NOT HELD: three hints, never shared, 1.025 over all" in text


@pytest.mark.parametrize(("hinted", "status"), [(1.01, 0), (1.05, 1)])
def test_the_exit_status_of_cost_tells_whether_it_may_be_had(hinted, status, monkeypatch, capsys):
    async def made_up(name, pairs, say):
        assert pairs == 3
        return cost_of(hinted)

    monkeypatch.setattr(cost, "measure_family", made_up)
    monkeypatch.setattr(cost, "narrator", lambda: print)
    assert cost.main(["--pairs", "3", "--json"]) == status
    (report,) = json.loads(capsys.readouterr().out)
    assert report["held"] is not bool(status)
    assert set(report["over_all"]) == set(KINDS) and set(report["by_length"]) == {"100", "8000"}
    hundred = report["by_length"]["100"][THREE_HINTS]
    assert hundred["ratio"]["median"] == pytest.approx(hinted) and len(hundred["pairs"]) == len(PAIRS)


def test_the_pairs_of_cost_are_shared_by_several_starts_of_the_engines(monkeypatch):
    shares = []

    async def made_up(model, pairs, order, say):
        shares.append((pairs, order.random()))
        ratios = cost_of(1.0 + len(shares)).by_length[100]
        return dict.fromkeys(cost.BATCHES, ratios)

    monkeypatch.setattr(cost, "measure_start", made_up)
    monkeypatch.setattr(cost, "generated_model", lambda say, name: name)
    measured = asyncio.run(cost.measure_family("nemotron_h", cost.STARTS + 1, print))
    assert [pairs for pairs, _ in shares] == [2] + [1] * (cost.STARTS - 1)
    assert len({order for _, order in shares}) == cost.STARTS  # each in an order of its own
    for kinds in measured.by_length.values():
        ratios = [pair.ratio for pair in kinds[THREE_HINTS].pairs]
        assert ratios[:: len(PAIRS)] == pytest.approx([2.0 + start for start in range(cost.STARTS)])
    shares.clear()
    asyncio.run(cost.measure_family("nemotron_h", 1, print))
    assert [pairs for pairs, _ in shares] == [1]


def counted(ours: float, alone: float) -> Table:
    """A made-up table of two rows; only the first is short enough for the untouched engine."""
    short, long = Row("cold", True, 130, 120), Row("cold", True, 6000, 120)
    return Table(
        "nemotron_h", 384, {OURS: {short: 1, long: ours}, BASELINE: {short: 2, long: alone}, UNTOUCHED: {short: 1}}
    )


@pytest.mark.parametrize(("ours", "status"), [(2, 0), (3, 1)])
def test_every_row_of_passes_is_judged_by_the_best_engine_that_can_take_it(ours, status, monkeypatch, capsys):
    async def made_up(name, plan, say):
        return counted(ours, 2)

    monkeypatch.setattr(passes, "measure_family", made_up)
    monkeypatch.setattr(passes, "narrator", lambda: print)
    assert passes.main(["--family", "nemotron_h"]) == status
    text = capsys.readouterr().out
    assert ("MORE than vLLM alone" in text) is bool(status)
    assert f"Seamark <= vLLM alone in {2 - status} of 2 rows" in text and "carries the cures" in text
    assert passes.main(["--family", "nemotron_h", "--json"]) == status
    rows = json.loads(capsys.readouterr().out)[0]["rows"]
    assert [row["held"] for row in rows] == [True, not status]
    assert rows[1]["passes"] == {OURS: ours, BASELINE: 2}


def test_prompts_as_long_as_a_block_are_not_sent_to_an_engine_that_dies_of_them():
    short = PassPlan((130, 163, 384), (120, 500), 5, 6000).shorter_than(384)
    assert short == PassPlan((130, 163), (120,), 5, 0)
    assert PassPlan((384,), (500,), 5, 6000).shorter_than(384) == PassPlan((), (), 5, 0)


def resumed(engine: str, warm: float) -> Resumed:
    """Made-up rounds of an engine whose warm first token takes `warm` seconds."""
    rounds = [
        Round(Sample(1.2 + n / 100, 1.1, 0), Sample(warm, 0.21, 2688), Sample(0.2 + n / 1000, 0.2, 0)) for n in range(5)
    ]
    return Resumed(engine, tuple(rounds))


@pytest.mark.parametrize(("warm", "status"), [(0.22, 0), (0.25, 1)])
def test_resume_compares_warm_with_alone_and_cold_with_warm(warm, status, monkeypatch, capsys):
    async def made_up(name, pairs, say):
        return [resumed(OURS, warm), resumed(BASELINE, 0.3)]

    monkeypatch.setattr(resume, "measure_family", made_up)
    monkeypatch.setattr(resume, "narrator", lambda: print)
    assert resume.main([]) == status
    text = capsys.readouterr().out
    assert f"{'NOT HELD' if status else 'held'}: warm over alone {warm / 0.202:.3f}" in text
    assert f"cold over warm {1.22 / warm:.2f}" in text and f"  2688  1220.0   {1000 * warm:.1f}   202.0" in text
    assert resume.main(["--json"]) == status
    (report,) = json.loads(capsys.readouterr().out)
    ours = report["engines"][0]
    assert ours["cached_tokens"] == 2688 and ours["cpu_ratio"]["median"] == pytest.approx(1.05)
    assert report["held"] is not bool(status) and len(ours["rounds"]) == 5
    assert report["warm_over_vllm_warm"]["first_token"]["median"] == pytest.approx(warm / 0.3)


def test_boundaries_ascend_within_the_prompt():
    assert three_boundaries(163, 283) == [163, 203, 278]
    assert three_boundaries(163, 165) == [163]


def test_prompts_are_fresh_for_each_seed_and_the_same_for_the_same():
    assert fresh_tokens(50, "a", 1) == fresh_tokens(50, "a", 1) != fresh_tokens(50, "a", 2)
    assert len(fresh_tokens(50, "a")) == 50


async def test_cpu_time_counts_descendants_and_settles_when_they_rest():
    """A shell whose child computes for 0.3 s."""
    shell = subprocess.Popen(["sh", "-c", f"{shlex.quote(sys.executable)} -c '{BUSY}'; true"])
    try:
        deadline = time.monotonic() + 30
        while len(family(shell.pid)) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        cpu = CpuTime(shell.pid)
        await cpu.reaches(0.3)
        rest = await cpu.settled()
        assert rest == pytest.approx(0.3, abs=0.1) and cpu.seconds() - rest < 0.01
    finally:
        for process in family(shell.pid)[::-1]:
            os.kill(process, 9)
        shell.wait()


async def test_a_server_that_has_ended_is_no_longer_measured():
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    cpu = CpuTime(ended.pid)
    cpu.seconds()
    ended.communicate(b"\n")
    with pytest.raises(OSError, match="Invalid argument"):  # the clock of a process that is gone
        cpu.seconds()
