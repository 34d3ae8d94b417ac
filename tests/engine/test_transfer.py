"""On vLLM's own schedulers, beside its KV connectors: who writes states inside a pass, and that it is right there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.scheduler_process import audit


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
    cores = [{"blocks": 120, "weights": weights} for weights in (loaded | computed).values()]
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
