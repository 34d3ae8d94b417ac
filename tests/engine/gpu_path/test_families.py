"""Flash-Next, KDA and OLMo on the newest vLLM: hits between blocks at no pass, and answers as without a cache.

vLLM's own layers, their Triton kernels in the interpreter.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness.family_engines import (
    ACCEPTED,
    ANSWER,
    CHANNEL,
    COLUMN,
    DRAFTS,
    KDA,
    OLMO,
    QWEN4,
    QWEN4_RINGS,
    STALE,
    WINDOW,
)
from tests.harness.versions import engine_of, interpreted

NEWEST = "0.33.0"

UNIT = 64  # tokens, of gated delta nets and KDA

SECONDS = 3600.0  # that an engine may take, on a busy machine

IN_FLOAT32 = 1e-4

# In bfloat16 what stands beside a row changes its last bits.
LOGPROB_BOUND = {KDA: IN_FLOAT32, QWEN4: 0.0, QWEN4_RINGS: 0.0, OLMO: 0.0}


class Asked(NamedTuple):
    ids: list[int]
    hint: list[int]
    owed: int = 0  # tokens that it finds in the cache
    salt: str = ""


Wave = list[Asked]


def drawing(seed: int = 5) -> Callable[[int], list[int]]:
    draw = random.Random(seed)
    return lambda length: [draw.randrange(100, 4000) for _ in range(length)]


def short() -> list[Wave]:
    """Two states in one prompt, both found by the next ones, two of them in one step."""
    drawn = drawing()
    one = drawn(150)
    return [
        [Asked(one, [64, 128])],
        [Asked([*one[:100], *drawn(14)], [64], 64)],
        [Asked([*one[:140], *drawn(13)], [128], 128), Asked([*one[:66], *drawn(20)], [64], 64)],
    ]


def long() -> list[Wave]:
    """A state at every multiple of the unit, each found at request 2; states between them, and two rows in a step."""
    drawn = drawing()
    one, two = drawn(200), drawn(150)
    multiples = range(UNIT, 193, UNIT)
    return [
        [Asked(one, list(multiples))],
        *([Asked([*one[: each + 5], *drawn(20)], [], each)] for each in multiples),
        [Asked(two, [70, 133])],
        [Asked([*two[:130], *drawn(20)], [128], 128), Asked([*one[:66], *drawn(20)], [64], 64)],
    ]


def run(folder: Path, family: str, waves: list[Wave], mode: str = "1", **more: Any) -> dict[str, Any]:
    asked = [[(each.ids, each.hint if mode == "1" else [], each.salt) for each in wave] for wave in waves]
    file = folder / f"wanted-{mode}.json"
    file.write_text(json.dumps({"mode": mode, "waves": asked, **more}))
    found: dict[str, Any] = interpreted("family_engines", family, str(file), source=engine_of(NEWEST), seconds=SECONDS)
    assert found["refused"] is None and found["writes_in_forward"] is (mode == "1")
    assert found["preempted"] is ("preempt" in more)
    return found


def equal(found: dict[str, Any], right: dict[str, Any], bound: float) -> bool:
    return all(
        mine["tokens"] == theirs["tokens"] and mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=bound)
        for mine, theirs in zip(found["answers"], right["answers"], strict=True)
    )


def alone(waves: list[Wave]) -> list[Wave]:
    """The same prompts one at a time, each under a salt of its own, so that it finds nothing."""
    prompts = [each for wave in waves for each in wave]
    return [[each._replace(hint=[], owed=0, salt=f"alone {number}")] for number, each in enumerate(prompts)]


def check_hits(found: dict[str, Any], waves: list[Wave]) -> None:
    assert [each["cached"] for each in found["answers"]] == [each.owed for wave in waves for each in wave]


@pytest.mark.parametrize("family", [QWEN4, pytest.param(KDA, marks=pytest.mark.thorough)])
def test_request_2_hits_at_no_pass_and_is_answered_as_without_the_cache(tmp_path, family):
    drawn = drawing()
    one = drawn(140)
    two = [*one[:131], *drawn(8)]
    waves = [[Asked(one, [64, 128])], [Asked(two, [], 128)], [Asked(two, [], 0, "alone")]]
    found = run(tmp_path, family, waves, tokens=2)
    check_hits(found, waves)
    assert found["unit"] == UNIT and set(found["passes"]) == {2}  # of a prompt one
    _, second, right = found["answers"]
    assert equal({"answers": [second]}, {"answers": [right]}, LOGPROB_BOUND[family])


@pytest.mark.on_request
@pytest.mark.parametrize("family", [KDA, QWEN4, QWEN4_RINGS, OLMO])
def test_each_multiple_of_the_unit_is_found_and_answers_are_those_of_an_engine_without_a_cache(tmp_path, family):
    waves = long()
    found, right = run(tmp_path, family, waves), run(tmp_path, family, waves, "reference")
    check_hits(found, waves)
    assert found["passes"] == right["passes"] == [ANSWER] * len(waves)
    # Two prompts in one step are shorter by what they have found: in bfloat16 that alone changes their last bits.
    last = len(waves[-1]) if family != KDA else 0
    for each in (found, right):
        each["answers"] = each["answers"][: len(each["answers"]) - last]
    assert equal(found, right, LOGPROB_BOUND[family])


@pytest.mark.on_request
@pytest.mark.parametrize("family", [KDA, QWEN4])
@pytest.mark.parametrize("more", [{"budget": 128}, {"budget": 128, "preempt": 1}], ids=["later chunks", "preempted"])
def test_states_in_later_chunks_and_after_a_preemption_are_right(tmp_path, family, more):
    """The first prompt is computed in two steps; its second state is written in the later one, or both once more."""
    waves = [wave[:1] for wave in short()]
    found, right = run(tmp_path, family, waves, **more), run(tmp_path, family, waves, "reference", **more)
    check_hits(found, waves)
    assert equal(found, right, LOGPROB_BOUND[family])


@pytest.mark.on_request
@pytest.mark.parametrize(
    ("family", "defect"), [(KDA, CHANNEL), (KDA, STALE), (QWEN4, CHANNEL), (QWEN4, WINDOW), (QWEN4, STALE)]
)
def test_planted_defects_are_seen(tmp_path, family, defect):
    waves = short()[:2]
    found = run(tmp_path, family, [*waves, *alone(waves)], defect=defect)
    first, then = found["answers"][: len(waves)], found["answers"][len(waves) :]
    assert first[1]["cached"] == UNIT and not equal({"answers": first}, {"answers": then}, LOGPROB_BOUND[family])


@pytest.mark.on_request
def test_beside_a_ring_states_have_names_at_any_depth(tmp_path):
    """Also behind the ring's width. To 5,000 tokens, evicted and pinned, on the scheduler (`test_scheduler.py`)."""
    drawn = drawing()
    depths = [128, 640, 832]
    one = drawn(900)
    waves = [[Asked(one, depths)], *([Asked([*one[: each + 8], *drawn(9)], [], each)] for each in depths)]
    found = run(tmp_path, QWEN4_RINGS, waves, blocks=40)
    check_hits(found, waves)
    assert "CircularBufferSpec" in found["groups"] and found["unit"] == UNIT
    assert "CircularBufferSpec" not in {found["groups"][group] for group in found["attention"]}
    announced = {tuple(state) for states in found["announced"] for state in states}
    names = dict(announced)
    assert len(names) == len(announced) and names.keys() >= set(depths) and all(names.values())


# In float32 no answer depends on how many tokens a step has.
BESIDE = {"budget": 128, "tokens": 8, "dtype": "float32", "kernels": True}


def beside() -> list[Wave]:
    """Prompts are computed in steps in which the ones before them verify drafts, and fill those steps.

    Before the third prompt some drafts were accepted; two of its states are written in a later chunk. Then states are
    found, alone and beside a request that generates.
    """
    drawn = drawing()
    one, two, three, four = drawn(128), drawn(124), drawn(220), drawn(128)
    found_beside = [*two[:70], *drawn(80)]
    return [
        [Asked(one, []), Asked(two, [66]), Asked(three, [66, 130, 194])],
        [Asked([*three[:200], *drawn(12)], [], 192)],
        [Asked(four, []), Asked(found_beside, [130], 64)],
        [Asked([*found_beside[:135], *drawn(20)], [], 128)],
    ]


def drafted(waves: list[Wave], answered: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """What an oracle knows of these prompts."""
    prompts = [each.ids for wave in waves for each in wave]
    return [(ids, answer["tokens"]) for ids, answer in zip(prompts, answered["answers"], strict=True)]


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory):
    """What an engine without drafts and without a cache answers, by family."""

    @functools.cache
    def answered(family: str) -> dict[str, Any]:
        return run(tmp_path_factory.mktemp("undrafted"), family, beside(), "reference", **BESIDE)

    return answered


@pytest.mark.on_request
@pytest.mark.parametrize("family", [KDA, QWEN4])
def test_states_are_written_beside_rows_that_verify_drafts_which_keep_theirs(tmp_path, undrafted, family):
    """Flash-Next drafts with its own head."""
    waves, right = beside(), undrafted(family)
    found = run(tmp_path, family, waves, right=drafted(waves, right), **BESIDE)
    assert found["accepted"].keys() == {str(count) for count in range(DRAFTS + 1)} and found["beside"] >= 3
    check_hits(found, waves)
    assert equal(found, right, bound=IN_FLOAT32)


@pytest.mark.on_request
@pytest.mark.parametrize(("family", "defect"), [(KDA, ACCEPTED), (KDA, COLUMN), (QWEN4, WINDOW)])
def test_planted_defects_beside_drafts_are_seen(tmp_path, undrafted, family, defect):
    waves, right = beside(), undrafted(family)
    found = run(tmp_path, family, waves, right=drafted(waves, right), defect=defect, **BESIDE)
    assert not equal(found, right, bound=IN_FLOAT32)


@pytest.mark.on_request
def test_a_preempted_request_that_drafts_is_computed_again_as_ever(tmp_path, undrafted):
    waves, right = beside(), undrafted(KDA)
    found = run(tmp_path, KDA, waves, right=drafted(waves, right), preempt=4, **BESIDE)
    assert equal(found, right, bound=IN_FLOAT32)
