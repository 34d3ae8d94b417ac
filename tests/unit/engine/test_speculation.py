"""With which drafts hints are given, and what is said where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import speculation


def config(method: str = "mtp", modules: int = 1, **changes: Any) -> SimpleNamespace:
    """What is read of vLLM's configuration."""
    drafts = SimpleNamespace(
        method=method,
        use_multi_module_mtp=lambda: modules > 1,
        use_eagle_block_drop=lambda: method in ("mtp", "eagle3"),
        num_speculative_tokens_per_batch_size=changes.pop("by_batch", None),
        enable_adaptive_verification=changes.pop("by_confidence", False),
    )
    plain = dict(
        speculative_config=drafts,
        num_speculative_tokens=3,
        parallel_config=SimpleNamespace(pipeline_parallel_size=changes.pop("stages", 1)),
        kv_transfer_config=changes.pop("connector", None),
        scheduler_config=SimpleNamespace(async_scheduling=changes.pop("overlap", False)),
        use_v2_model_runner=changes.pop("v2", False),
    )
    return SimpleNamespace(**{**plain, **changes})


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAMARK_DRAFTS", "1")


@pytest.mark.parametrize(
    ("value", "refused"), [(None, False), ("", False), ("auto", False), ("yes", False), ("1", False), ("0", True)]
)
def test_hints_beside_drafts_are_refused_only_if_nobody_wants_them(monkeypatch, value, refused):
    monkeypatch.delenv("SEAMARK_DRAFTS")
    if value is not None:
        monkeypatch.setenv("SEAMARK_DRAFTS", value)
    refusal = speculation.refusal(config())
    assert (refusal is not None) == refused
    assert refusal is None or "SEAMARK_DRAFTS=0; auto" in refusal


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (config("medusa"), "medusa"),
        (config("draft_model"), "draft_model"),
        (config(modules=2), "several modules"),
        (config(by_batch=[1, 2]), "num_speculative_tokens_per_batch_size"),
        (config("dspark", by_confidence=True), "enable_adaptive_verification"),
        (config(stages=2), "pipeline"),
        (config(connector=object()), "connector"),
        (config(overlap=True), "--no-async-scheduling"),
    ],
)
def test_a_refusal_says_what_to_change(refused, told):
    refusal = speculation.refusal(refused)
    assert refusal is not None and told in refusal


@pytest.mark.parametrize(
    ("drafts", "unit", "ahead"),
    [
        ({}, 16, 16),  # of a head that drops a unit
        ({"method": "ngram"}, 16, 0),
        ({"num_hash_lookahead_tokens": 1}, 16, 1),
        ({"num_hash_lookahead_tokens": None}, 16, 16),
        ({"num_hash_lookahead_tokens": 0}, 32, 32),
        ({"speculative_config": None, "num_hash_lookahead_tokens": 1}, 16, 0),
        ({"method": "medusa"}, 16, 0),  # refused
    ],
)
def test_a_prefix_has_to_be_shared_as_far_ahead_as_the_engine_looks(drafts, unit, ahead):
    assert speculation.ahead(config(**drafts), unit) == ahead


def test_beside_drafts_that_are_switched_off_nothing_is_looked_ahead(monkeypatch):
    monkeypatch.setenv("SEAMARK_DRAFTS", "0")
    assert speculation.ahead(config(), 16) == 0
    assert speculation.switched_off(config()) is not None and speculation.unsupported(config()) is None
