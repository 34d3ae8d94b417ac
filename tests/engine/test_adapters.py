"""LoRA adapters that change under their names: no request finds what other weights have computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.scheduler_process import audit

CORES = [{}, {"room": 1}, {"blocks": 40, "running": 2, "budget": 100}, {"overlap": True, "room": 1}]


def audited(model: Path, **options: object) -> list[dict]:
    asked = {"seeds": [1, 2], "operations": 150, "cores": CORES, **options}
    return audit("adapter", model, **asked)


def test_nothing_of_other_weights_is_found_however_an_adapter_changes(model: Path):
    for found in audited(model):
        assert found["errors"] == []
        assert found["adapter_hit_tokens"] > 5000


@pytest.mark.parametrize("without", ["adapter-", "adapter-lookup"])
def test_the_audit_notices_states_of_old_weights(model: Path, without):
    """vLLM's own hashes, or none of a request's hashes looked at again when its turn comes."""
    assert any(found["errors"] for found in audited(model, without=[without], cores=CORES[1:3]))
