"""A whole engine on model runner V2 with asynchronous scheduling, both of them a GPU's default, hits and is exact."""

from __future__ import annotations

import pytest

from tests.harness.draft_answers import differences, hits, owed
from tests.harness.draft_engines import Engine, wanted
from tests.harness.versions import engine_of, interpreted

NEWEST = "0.33.0"

V2 = "vllm.v1.worker.gpu.model_runner"

USUAL = {"traffic": "heads", "answer": 6, "flags": {"max_model_len": 1024, "max_num_seqs": 4}}

ENGINES = (
    Engine("right", mode="reference", caching=False, hints=False, **USUAL),
    Engine("seamark", v2=True, **USUAL),
)


@pytest.mark.parametrize("version", [None, pytest.param(NEWEST, marks=pytest.mark.on_request)])
def test_runner_v2_with_async_scheduler_hits_and_is_exact(model, version):
    source = engine_of(version) if version else None
    right, found = interpreted("draft_engines", str(model), wanted(*ENGINES), source=source)
    assert not differences(found, right)
    assert hits(found) == owed("heads", 0)
    assert found["scheduler"] == "AsyncScheduler" and found["writes_in_forward"]
    assert V2 in found["runner"] and V2 not in right["runner"]
