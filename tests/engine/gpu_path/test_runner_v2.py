"""A whole engine on model runner V2 with asynchronous scheduling, both of them a GPU's default, hits and is exact."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.bench.harness.servers import generated_model
from tests.harness.engine_v2 import DRAFTS, EDGE, OWED, PREFIXES
from tests.harness.versions import engine_of, interpreted

NEWEST = "0.33.0"

LOGPROB_BOUND = 1e-4  # as of all exactness checks in float32


@pytest.mark.thorough
@pytest.mark.parametrize("version", [None, pytest.param(NEWEST, marks=pytest.mark.on_request)])
def test_runner_v2_with_async_scheduler_hits_and_is_exact(model, version):
    source = engine_of(version) if version else None
    found = interpreted("engine_v2", str(model), "seamark", PREFIXES, source=source)
    right = interpreted("engine_v2", str(model), "reference", PREFIXES, source=source)
    assert found["scheduler"] == "AsyncScheduler" and found["writes_in_forward"]
    assert tuple(answer["cached"] for answer in found["answers"]) == OWED
    equal_on_another_runner(found, right)


@pytest.mark.on_request
@pytest.mark.parametrize(
    ("traffic", "owed"), [(PREFIXES, tuple(max(hit - 16, 0) for hit in OWED)), (EDGE, (0, 352))], ids=[PREFIXES, EDGE]
)
def test_runner_v2_with_async_scheduler_and_drafts_hits_and_is_exact(traffic, owed):
    """Its own kernels for counts of accepted drafts and for copies of states, in Triton's interpreter."""
    model = str(generated_model(print, mtp=True))
    right = interpreted("engine_v2", model, "reference", traffic)
    known = json.dumps([(answer["prompt"], answer["tokens"]) for answer in right["answers"]])
    found = interpreted("engine_v2", model, "seamark", traffic, known)
    assert found["scheduler"] == "AsyncScheduler" and found["writes_in_forward"]
    assert tuple(answer["cached"] for answer in found["answers"]) == owed
    assert sum(int(count) * rows for count, rows in found["accepted"].items()) > 10
    assert found["accepted"].keys() <= {str(count) for count in range(DRAFTS + 1)} and len(found["accepted"]) > 2
    equal_on_another_runner(found, right)


def equal_on_another_runner(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert "vllm.v1.worker.gpu.model_runner" in found["runner"]
    assert "vllm.v1.worker.gpu.model_runner" not in right["runner"]
    assert {answer["cached"] for answer in right["answers"]} == {0}
    for answer, wanted in zip(found["answers"], right["answers"], strict=True):
        assert answer["tokens"] == wanted["tokens"]
        assert answer["logprobs"] == pytest.approx(wanted["logprobs"], abs=LOGPROB_BOUND)
