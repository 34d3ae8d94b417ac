"""On vLLM's own schedulers, beside its KV connectors: who writes states inside a pass, and that it is right there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.scheduler_process import TRAFFIC, audit

ROOM: dict[str, Any] = {"blocks": 120}

TIGHT: dict[str, Any] = {"blocks": 40, "budget": 128, "running": 4}

# So few blocks that what a state has held is soon what a prefill is loaded into.
TIGHTEST: dict[str, Any] = {"blocks": 20, "budget": 256, "running": 6, "overlap": True}


@pytest.mark.parametrize(
    ("cores", "seeds"),
    [
        ([ROOM, TIGHT, {**TIGHT, "multi": True}], range(7)),
        ([{**ROOM, "overlap": True}, {**TIGHT, "overlap": True}, TIGHTEST], (9, 7, 8, 10, 11, 12, 13)),
        ([{**TIGHT, "failing": 0.3}, {**TIGHTEST, "failing": 0.3}], range(14, 20)),
    ],
    ids=["one step after the other", "the next step planned ahead", "loads that fail"],
)
@TRAFFIC
def test_prefill_and_decode_apart_find_no_wrong_state_and_read_no_wrong_block(model: Path, cores, seeds, share):
    seeds = seeds[share]
    for found in audit("transfer", model, seeds=list(seeds), chats=60, cores=cores):
        print(found)
        assert found["errors"] == [] and found["inside_pass"] and found["resets"]
        each = len(seeds)
        assert found["read"] > 25 * each and found["hit_tokens"] > 200 * each and found["written"] > 20 * each


def test_a_block_is_loaded_into_before_its_last_state_is_written_if_it_is_free_at_once(model: Path):
    (found,) = audit("transfer", model, seeds=[8], chats=60, cores=[TIGHTEST], planted=["at once"])
    assert any("wrong state" in error or "someone else's keys" in error for error in found["errors"])


def test_without_a_look_at_its_contents_a_prefill_of_another_prompt_is_loaded(model: Path):
    (found,) = audit("transfer", model, seeds=[2], chats=60, cores=[ROOM], planted=["content"])
    assert found["errors"]


def test_a_prefill_is_loaded_only_if_it_is_known_to_be_of_the_same_weights(model: Path):
    """Of both workers: the name of what was loaded, why there is none, how it is cut, and samples of files."""
    loaded = {
        "the same": [["a", "", "one", "s"], ["a", "", "one", ""]],
        "cut otherwise": [["a", "", "one", "s"], ["b", "", "two", "s"]],
        "experts spread over ranks": [["", "?", "", "s"], ["", "?", "", "s"]],
    }
    computed = {
        "others, in files that are as before where samples look": [["a", "", "one", "s"], ["b", "", "one", "s"]],
        "others, cut otherwise": [["a", "", "one", "s"], ["a", "", "two", "t"]],
        "cut otherwise, and not in files": [["a", "", "one", ""], ["b", "", "two", ""]],
        "unknown here": [["a", "", "one", "s"], ["", "?", "", ""]],
        "unknown there": [["", "?", "", ""], ["a", "", "one", "s"]],
    }
    cores = [{**ROOM, "weights": weights} for weights in (loaded | computed).values()]
    found = audit("transfer", model, seeds=[2], chats=30, cores=cores)
    assert [each["errors"] for each in found] == [[]] * len(cores)
    read = {name: each["read"] > 0 for name, each in zip(loaded | computed, found, strict=True)}
    assert read == dict.fromkeys(loaded, True) | dict.fromkeys(computed, False)


def connector(name: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", **more}


def several(*names: str) -> dict[str, Any]:
    children = {"connectors": [connector(name) for name in names]}
    return connector("MultiConnector", kv_connector_extra_config=children)


def starts(model: Path, connectors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return audit("transfer", model, cores=[{"connector": each} for each in connectors])


OWN = connector("OwnConnector", kv_connector_module_path="tests.harness.transfer_audit")


def test_a_scheduler_says_how_states_are_kept_beside_its_connector(model: Path):
    inside = [connector("NixlConnector"), connector("NixlPullConnector"), several("NixlConnector")]
    cut = [connector("NixlPushConnector"), OWN, several("NixlConnector", "NixlPushConnector")]
    pulls, named = starts(model, inside), starts(model, cut)
    for found in pulls:
        (line,) = found["played"]["start"]
        assert found["inside_pass"] and not found["ignored"]
        assert "inside the pass" in line and "KV connector Nixl" in line
    for found, name in zip(named, ("NixlPushConnector", "OwnConnector", "NixlPushConnector"), strict=True):
        (line,) = found["played"]["start"]
        assert not found["inside_pass"] and not found["ignored"]
        assert "one pass each" in line and f": {name} is not known to leave alone the blocks" in line


def test_hints_are_refused_and_counted_beside_values_that_nobody_has_computed(model: Path):
    for found in starts(model, [connector("DecodeBenchConnector"), several("DecodeBenchConnector")]):
        (line,) = found["played"]["start"]
        assert not found["inside_pass"] and found["ignored"] == {"connector": 1}
        assert "hints are refused" in line and "DecodeBenchConnector puts values into the cache" in line
