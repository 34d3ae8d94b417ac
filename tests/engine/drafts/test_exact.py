"""Engines that draft tokens, on both families: every answer as without drafts and cache, every hit as owed.

The drafts are right as often as an oracle says. What is compared: vLLM without drafts and without a cache; vLLM with
the same drafts and without a cache; and Seamark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT
from tests.harness.draft_answers import differences, hits, owed
from tests.harness.draft_defects import A_UNIT_EARLY, ACCEPTED_IGNORED, NO_COPY
from tests.harness.draft_engines import DRAFTS, MTP, NGRAM, Engine, wanted
from tests.harness.draft_heads import mtp_model
from tests.harness.scheduler_process import run_apart
from tests.harness.versions import engine_of

UNIT = 16  # tokens

# On what multiples (tokens) states lie.
ALIGNMENT = {NEMOTRON_H: UNIT, QWEN3_NEXT: 64}

RIGHT = Engine("right", mode="reference", caching=False, hints=False)

UNCACHED = Engine("uncached", mode="reference", caching=False, hints=False, speculation=MTP, oracle="right")

SEAMARK = Engine("seamark", speculation=MTP, oracle="right")

WITH_NGRAM = Engine("ngram", speculation=NGRAM, oracle="right")

PAIRS = (RIGHT, UNCACHED, SEAMARK)

OTHER_DRAFTS = (
    RIGHT,
    SEAMARK,
    Engine("always right", speculation=MTP, oracle="right", probability=1.0),
    Engine("never right", speculation=MTP, oracle="right", probability=0.0),
    WITH_NGRAM,
    Engine("refused", opted_in=False, speculation=MTP, oracle="right"),
)

# A row whose drafts are all right may end at the edge of a block, where its state has to move.
PLANTED = tuple(
    Engine(defect, speculation=MTP, traffic="edges", oracle="right", planted=defect, probability=probability)
    for defect, probability in ((A_UNIT_EARLY, 0.7), (ACCEPTED_IGNORED, 0.7), (NO_COPY, 1.0))
)

EDGES = (
    Engine("right", mode="reference", caching=False, hints=False, traffic="edges"),
    Engine("seamark", speculation=MTP, traffic="edges", oracle="right"),
    Engine("always right", speculation=MTP, traffic="edges", oracle="right", probability=1.0),
    *PLANTED,
)

NEWEST = "0.33.0"

FAMILIES = pytest.mark.parametrize("family", [NEMOTRON_H, pytest.param(QWEN3_NEXT, marks=pytest.mark.on_request)])


@cache
def run(family: str, engines: Sequence[Engine], version: str | None = None) -> Mapping[str, Any]:
    """What these engines answer, by name; `version`: of another vLLM than the installed one."""
    source = engine_of(version) if version else None
    found = run_apart("draft_engines", str(mtp_model(family)), wanted(*engines), source=source)
    return {engine.name: each for engine, each in zip(engines, found, strict=True)}


@FAMILIES
@pytest.mark.parametrize(
    ("engines", "ahead"),
    [
        pytest.param(PAIRS, {"seamark": UNIT}, id="some right"),
        pytest.param(
            OTHER_DRAFTS,
            {"always right": UNIT, "never right": UNIT, "ngram": 0},
            id="others",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_answers_are_exact_and_hit_as_owed_however_often_drafts_are_right(family, engines, ahead):
    found = run(family, engines)
    for name, tokens in ahead.items():
        assert not differences(found[name], found["right"]), name
        assert hits(found[name]) == owed("pairs", tokens, ALIGNMENT[family]), name
        assert found[name]["ahead"] == tokens and found[name]["writes_in_forward"] and not found[name]["held"]
    assert not differences(found.get("uncached", found["right"]), found["right"])
    accepted = {name: set(each.get("accepted", ())) for name, each in found.items()}
    assert accepted["seamark"] == {str(count) for count in range(DRAFTS + 1)}
    assert accepted.get("always right", {str(DRAFTS)}) == {str(DRAFTS)}
    assert accepted.get("never right", {"0"}) == {"0"}


@pytest.mark.on_request
def test_the_newest_vllm_has_hashes_that_cover_what_a_head_reads():
    found = run(NEMOTRON_H, (RIGHT, SEAMARK, WITH_NGRAM), NEWEST)
    for name, ahead in (("seamark", 1), ("ngram", 0)):
        assert not differences(found[name], found["right"]), name
        assert hits(found[name]) == owed("pairs", ahead), name
        assert found[name]["ahead"] == ahead and found[name]["writes_in_forward"] and not found[name]["held"]


@FAMILIES
def test_a_prompt_takes_no_more_passes_than_without_a_cache_and_a_hit_leaves_the_heads_own_drafts_as_they_are(family):
    found = run(family, PAIRS)
    passes = {name: sum(answer["passes"] for answer in each["answers"]) for name, each in found.items()}
    assert passes["seamark"] <= passes["uncached"] == len(found["uncached"]["answers"])
    assert len(found["seamark"]["proposed"]) > 100
    assert found["seamark"]["proposed"] == found["uncached"]["proposed"]


@pytest.mark.thorough
@FAMILIES
def test_answers_that_cross_a_blocks_edge_are_exact_and_their_next_turns_hit(family):
    found = run(family, EDGES)
    for name in ("seamark", "always right"):
        assert not differences(found[name], found["right"]), name
        assert sum(hits(found[name])) > 5000 and not found[name]["held"]


@pytest.mark.thorough
def test_without_the_switch_hints_are_refused_and_vllm_caches_whole_blocks_as_it_does_alone():
    found = run(NEMOTRON_H, OTHER_DRAFTS)
    asked = found["refused"]
    assert not differences(asked, found["right"]) and {tokens % 384 for tokens in hits(asked)} == {0}
    assert asked["refused"] == "speculative" and not asked["writes_in_forward"] and not asked["held"]
    assert asked["ignored"] == {"speculative": len(asked["answers"])}
    (line,) = asked["said"]
    assert "hints are refused" in line and "SEAMARK_DRAFTS=0" in line


@pytest.mark.thorough
@FAMILIES
@pytest.mark.parametrize("defect", [engine.name for engine in PLANTED])
def test_each_defect_is_seen(family, defect):
    found = run(family, EDGES)
    assert "error" not in found[defect], found[defect]
    assert differences(found[defect], found["right"])
