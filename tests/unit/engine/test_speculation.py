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


def test_nothing_is_refused_without_drafts(monkeypatch):
    monkeypatch.delenv("SEAMARK_DRAFTS")
    assert speculation.refusal(config(speculative_config=None, num_speculative_tokens=0)) is None
    assert not speculation.drops(config(speculative_config=None))


@pytest.mark.parametrize("admitted", [*map(config, speculation.METHODS), config(overlap=True, v2=True)])
def test_what_is_known_to_be_right_is_not_refused(admitted):
    assert speculation.refusal(admitted) is None


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


def test_a_unit_is_taken_off_only_if_no_hash_covers_what_the_head_reads():
    assert speculation.drops(config("mtp")) and not speculation.drops(config("ngram"))
    assert not speculation.drops(config("mtp", num_hash_lookahead_tokens=1))
