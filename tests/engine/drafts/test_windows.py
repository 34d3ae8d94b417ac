"""Draft heads with sliding windows, as engines: hits as without drafts, and a head that drafts behind them as before.

Model runner V2 with the asynchronous scheduler and heads of `draft_heads`, vLLM's kernels in Triton's interpreter; and
runner V1 with a window on an MTP head. All of a cache is NaN before the first request, so that a row that is neither
written nor zeroed shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest

from tests.harness import draft_heads
from tests.harness.draft_answers import differences, hits, owed
from tests.harness.draft_defects import ROWS_NOT_KEPT
from tests.harness.draft_engines import MTP, Engine, wanted
from tests.harness.draft_heads import DFLASH, DFLASH2, DSPARK, EAGLE3, MIXED, WINDOW, mtp_model
from tests.harness.scheduler_process import run_apart
from tests.harness.versions import engine_of, interpreted

NEWEST = "0.33.0"

UNIT = 16  # tokens

READS_ON = (EAGLE3, "mtp")  # heads whose rows are made with the next token, too

WORSE = 0.95  # of the drafts that are right without a cache: fewer behind hits are a loss

WIDE = 500  # tokens of a window; blocks have 384

# vLLM's class for each kind of head.
SPECULATORS = {
    **dict.fromkeys((DFLASH, MIXED), "DFlashSpeculator"),
    DFLASH2: "DFlash2Speculator",
    DSPARK: "DSparkSpeculator",
    EAGLE3: "EagleSpeculator",
}

SMALL = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024}


class Head(NamedTuple):
    """A draft head on an engine."""

    kind: str  # of `draft_heads.KINDS`, on model runner V2; "mtp": with a window, on V1
    version: str | None = None  # of vLLM; None: the installed one
    window: int = WINDOW  # tokens

    @property
    def v2(self) -> bool:
        return self.kind != "mtp"

    @property
    def traffic(self) -> str:
        return "heads" if self.v2 else "pairs"

    @property
    def ahead(self) -> int:
        """Tokens past a state that a prefix has to share: vLLM 0.32 drops a unit, 0.33 covers what a head reads."""
        return UNIT if self.version is None else int(self.kind in READS_ON)


@cache
def run(head: Head) -> Mapping[str, Any]:
    """What these engines answer: without drafts; without a cache; with hits; with hits that leave the head no rows."""
    common: dict[str, Any] = {"traffic": head.traffic}
    speculation: dict[str, Any] = {"speculation": MTP, "window": head.window}
    if head.v2:
        common |= {"answer": 10, "flags": SMALL}
        speculation = {"speculation": draft_heads.speculation(head.kind, head.window), "v2": True}
    nothing = {**common, "mode": "reference", "caching": False, "hints": False}
    drafting = {**speculation, "oracle": "right"}
    hitting = {**common, **drafting, "cold": "cold", "poisoned": True}
    engines = (
        Engine("right", **nothing),
        Engine("cold", **nothing, **drafting),
        Engine("hits", **hitting),
        Engine("lost", **hitting, planted=ROWS_NOT_KEPT),
    )
    source = engine_of(head.version) if head.version else None
    start = interpreted if head.v2 else run_apart
    found = start("draft_engines", str(mtp_model()), wanted(*engines), source=source)
    return {engine.name: each for engine, each in zip(engines, found, strict=True)}


HEADS = {
    **dict.fromkeys((Head(DFLASH), Head("mtp")), pytest.mark.thorough),
    **dict.fromkeys(
        (Head("mtp", NEWEST, WIDE), *(Head(kind, NEWEST) for kind in (DFLASH, MIXED, DFLASH2, DSPARK, EAGLE3))),
        pytest.mark.on_request,
    ),
}

DRAFT_HEADS = pytest.mark.parametrize(
    "head", [pytest.param(head, id=str(head), marks=marks) for head, marks in HEADS.items()]
)


def accepted_behind_hits(found: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Right drafts of a row that verified some, of an engine's prompts that hit: without a cache, and there."""
    behind = [index for index, hit in enumerate(hits(found[name])) if hit]
    before, after = (
        [right for index in behind for right in found[each]["answers"][index]["accepted"]] for each in ("cold", name)
    )
    return sum(before) / len(before), sum(after) / len(after)


@DRAFT_HEADS
def test_answers_are_exact_and_hit_as_without_drafts(head):
    found = run(head)
    assert not differences(found["cold"], found["right"])
    assert not differences(found["hits"], found["right"])
    assert hits(found["hits"]) == owed(head.traffic, head.ahead)
    asked = found["hits"]
    assert asked["ahead"] == head.ahead and asked["writes_in_forward"] and not asked["held"]
    assert "SlidingWindowSpec" in dict(found["cold"]["groups"]) and "DraftWindowSpec" in dict(asked["groups"])
    assert asked["scheduler"] == ("AsyncScheduler" if head.v2 else "Scheduler")
    assert asked["speculator"] == SPECULATORS.get(head.kind, "NoneType")


@DRAFT_HEADS
def test_behind_a_hit_a_head_drafts_as_without_a_cache(head):
    found = run(head)
    own, cold = found["hits"]["proposed"], found["cold"]["proposed"]
    assert own.keys() == cold.keys() and len(own) > 40
    equal = sum(own[place] == cold[place] for place in own)
    before, after = accepted_behind_hits(found, "hits")
    print(f"{head}: {equal} of {len(own)} drafts as cold; tokens a step {1 + before:.3f} cold, {1 + after:.3f} on hits")
    assert equal == len(own)
    assert after >= WORSE * before


@DRAFT_HEADS
def test_without_its_rows_a_head_drafts_worse_and_no_answer_changes(head):
    """Zeros, which is what vLLM gives in their place: seen in the drafts, and in nothing else."""
    found = run(head)
    own, cold = found["lost"]["proposed"], found["cold"]["proposed"]
    both = own.keys() & cold.keys()
    equal = sum(own[place] == cold[place] for place in both)
    assert not differences(found["lost"], found["right"])
    assert hits(found["lost"]) == hits(found["hits"])
    before, after = accepted_behind_hits(found, "lost")
    print(f"{head}: without its rows {equal} of {len(both)} as cold, tokens a step {1 + after:.3f}, {1 + before:.3f}")
    assert equal < WORSE * len(both)
    assert after < before
