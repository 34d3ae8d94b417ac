"""Flash-Next, KDA and OLMo on the newest vLLM: hits between blocks at no pass, and answers as without a cache.

vLLM's own layers, their Triton kernels in the interpreter.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness.family_engines import ANSWER, CHANNEL, KDA, OLMO, QWEN4, STALE, WINDOW
from tests.harness.versions import engine_of, interpreted

NEWEST = "0.33.0"

UNIT = 64  # tokens, of gated delta nets and KDA

SECONDS = 3600.0  # that an engine may take, on a busy machine

# In bfloat16 what stands beside a row changes its last bits.
LOGPROB_BOUND = {KDA: 1e-4, QWEN4: 0.0, OLMO: 0.0}


class Asked(NamedTuple):
    ids: list[int]
    hint: list[int]
    owed: int = 0  # tokens that it finds in the cache
    salt: str = ""


Wave = list[Asked]


def drawing(seed: int = 5) -> Callable[[int], list[int]]:
    draw = random.Random(seed)
    return lambda length: [draw.randrange(100, 4000) for _ in range(length)]


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


@pytest.mark.thorough
@pytest.mark.parametrize("family", [QWEN4, KDA])
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
@pytest.mark.parametrize("family", [KDA, QWEN4, OLMO])
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
@pytest.mark.parametrize(
    ("family", "defect"),
    [(KDA, CHANNEL), (KDA, STALE), (QWEN4, CHANNEL), (QWEN4, WINDOW), (QWEN4, STALE)],
)
def test_planted_defects_are_seen(tmp_path, family, defect):
    drawn = drawing()
    one = drawn(150)
    waves = [[Asked(one, [64, 128])], [Asked([*one[:100], *drawn(14)], [64], 64)]]
    found = run(tmp_path, family, [*waves, *alone(waves)], defect=defect)
    first, then = found["answers"][: len(waves)], found["answers"][len(waves) :]
    assert first[1]["cached"] == UNIT and not equal({"answers": first}, {"answers": then}, LOGPROB_BOUND[family])
