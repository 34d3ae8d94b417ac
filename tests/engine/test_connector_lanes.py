"""Each kind of KV connector beside hints: the engine starts, no answer differs, and states are kept as its lane says.

`make test-nixl` runs it: NIXL is not in the lock.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_patches.disk.flags import transfer_flags
from proxy.bench.harness.servers import NEMOTRON_H, generated_model
from tests.harness.transfer_engine import (
    BOTH,
    TransferEngine,
    cached,
    differing,
    nixl_transfer,
    prompts_of,
    two_round_chats,
)

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(900)]

PUSH, UNKNOWN = nixl_transfer(BOTH, "NixlPushConnector"), nixl_transfer(BOTH, "OwnConnector")


def checkpoints_in(folder: Path) -> dict[str, Any]:
    """`seamark worker --checkpoint-dir`, as vLLM gets to know of it."""
    _, transfer = transfer_flags(str(folder / "states"))
    found: dict[str, Any] = json.loads(transfer)
    return found


def both(folder: Path) -> dict[str, Any]:
    """NIXL first: vLLM takes the first that has anything of a prompt."""
    children = [nixl_transfer(BOTH), checkpoints_in(folder)]
    return {"kv_connector": "MultiConnector", "kv_role": BOTH, "kv_connector_extra_config": {"connectors": children}}


# Connectors as vLLM is told of them, and the name in the line that the engine logs if it keeps states at chunks' ends.
CASES = {
    "none": (lambda _: {}, ""),
    "NIXL pull": (lambda _: nixl_transfer(BOTH), ""),
    "NIXL push": (lambda _: PUSH, "NixlPushConnector"),
    "Seamark": (checkpoints_in, ""),
    "NIXL pull and Seamark": (both, ""),
    "unknown": (lambda _: UNKNOWN | {"kv_connector_module_path": "tests.harness.transfer_audit"}, "OwnConnector"),
}


@pytest.mark.parametrize("case", CASES)
def test_beside_each_connector_nothing_differs_and_states_are_kept_as_its_lane_says(
    case, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")  # NIXL wants it; vLLM sets it only for NIXL's own name
    configuration, named = CASES[case]
    rounds = [prompts_of(tokenizer, chats) for chats in two_round_chats()]
    hits, passes = [], []
    with TransferEngine(tmp_path, generated_model(print, NEMOTRON_H), configuration(tmp_path), "engine") as engine:
        inside = engine.call("says")["inside_pass"]
        for prompts in (*rounds, rounds[1]):
            engine.call("taken_passes")
            answers = engine.call("ask", prompts=prompts)
            passes.append(engine.call("taken_passes"))
            hits.append(cached(answers))
            anew = [{"ids": prompt["ids"], "anew": True} for prompt in prompts]
            assert not differing(answers, engine.call("ask", prompts=anew))
        log = engine.log.read_text(errors="replace")
    print(f"{case}: hits {hits}, passes {passes}")
    assert inside == (not named)
    assert (f"{named} is not known to leave alone the blocks" in log) == bool(named)
    assert hits[2] >= 16_500  # of 17,017
    if inside:
        assert hits[0] >= 7_900 and hits[1] >= 13_456
        assert max(passes) <= 166  # five waves of 32 tokens are 160
