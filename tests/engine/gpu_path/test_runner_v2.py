"""A whole engine on model runner V2 with asynchronous scheduling, both of them a GPU's default, hits and is exact."""

from __future__ import annotations

import pytest

from tests.harness.engine_v2 import OWED
from tests.harness.versions import engine_of, interpreted

NEWEST = "0.33.0"

LOGPROB_BOUND = 1e-4  # as of all exactness checks in float32


@pytest.mark.parametrize("version", [None, pytest.param(NEWEST, marks=pytest.mark.on_request)])
def test_runner_v2_with_async_scheduler_hits_and_is_exact(model, version):
    source = engine_of(version) if version else None
    found = interpreted("engine_v2", str(model), "seamark", source=source)
    right = interpreted("engine_v2", str(model), "reference", source=source)
    assert "vllm.v1.worker.gpu.model_runner" in found["runner"]
    assert "vllm.v1.worker.gpu.model_runner" not in right["runner"]
    assert found["scheduler"] == "AsyncScheduler" and found["writes_in_forward"]
    assert tuple(answer["cached"] for answer in found["answers"]) == OWED
    assert {answer["cached"] for answer in right["answers"]} == {0}
    for answer, wanted in zip(found["answers"], right["answers"], strict=True):
        assert answer["tokens"] == wanted["tokens"]
        assert answer["logprobs"] == pytest.approx(wanted["logprobs"], abs=LOGPROB_BOUND)
