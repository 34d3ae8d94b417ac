"""Which patches are meant for a vLLM, by what its source has: the table is asked about versions that are not here."""

from __future__ import annotations

import pytest

from engine_patches import kv_connectors, patches
from engine_patches.families import (
    GLM_KDA,
    K3_KDA,
    KIMI_KDA,
    LING_KDA,
    OLMO_GDN,
    QWEN_NGRAM,
    SHORT_CONVOLUTION,
)
from engine_patches.patches import GDN, KV_CACHE_MANAGER, MAMBA2, MAMBA2_BUILDER, PATCHES, SCHEDULER

# What a patch needs vLLM to have besides its own target; any other patch is for every version.
NEEDED: dict[str, set[str]] = {
    "cpu-checkpoint-store": {f"{MAMBA2}.get_kv_cache_spec"},
    "cpu-block-size": {patches.RESETS_BLOCK_SIZE.target},
    "adapter-lookup-connector": {f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector"},
    "written-rows-connector": {f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector"},
    "draft-windows": {patches.LEFT_OUT_OF_LOOKUPS.target},
    "reports-found": {f"{SCHEDULER}.get_kv_event_publisher_config"},
    "mamba2-promise": {f"{MAMBA2}.get_kv_cache_spec"},
    "gdn-promise": {f"{GDN}.get_kv_cache_spec"},
    "olmo-core": {OLMO_GDN.path},
    "kimi-core": {KIMI_KDA.path},
    "k3-core": {K3_KDA.path},
    "k3-states": {K3_KDA.path},
    "glm-core": {GLM_KDA.path},
    "ling-core": {LING_KDA.path},
    "ngram-states": {QWEN_NGRAM.path},
    "ngram-core": {QWEN_NGRAM.path},
    "short-conv-states": {SHORT_CONVOLUTION.path},
    "short-conv-states-of-group": {SHORT_CONVOLUTION.path, f"{MAMBA2_BUILDER}.update_block_table"},
    "short-conv-core": {SHORT_CONVOLUTION.path},
    "short-conv-core-cpu": {SHORT_CONVOLUTION.path},
    "short-conv-inputs": {SHORT_CONVOLUTION.path},
    "short-conv-inputs-cpu": {SHORT_CONVOLUTION.path},
}

OF_TRANSFERS = {"prefill-end", "load-end", "sent-content", "late-reads"}


def applied(monkeypatch: pytest.MonkeyPatch, there: set[str]) -> set[str]:
    """Names of the patches that are meant for a vLLM that has these functions and classes."""
    monkeypatch.setattr(patches, "exists", lambda path: path in there)
    monkeypatch.setattr(patches, "holds", lambda shape: shape.target in there)
    return {patch.name for patch in PATCHES if patch.name not in OF_TRANSFERS and patch.applies()}


def test_each_patch_is_meant_for_the_versions_that_have_what_it_is_about(monkeypatch):
    in_every_version = {patch.name for patch in PATCHES} - NEEDED.keys() - OF_TRANSFERS
    everything = set().union(*NEEDED.values())
    assert applied(monkeypatch, set()) == in_every_version
    assert applied(monkeypatch, everything) == in_every_version | NEEDED.keys()
    for missing in everything:
        of_others = {name for name, needed in NEEDED.items() if missing not in needed}
        assert applied(monkeypatch, everything - {missing}) == in_every_version | of_others, missing


def test_what_concerns_transfers_is_meant_for_a_nixl_that_hands_prefills_over_as_expected():
    found = {patch.name for patch in PATCHES if patch.applies is kv_connectors.hands_over}
    assert found == OF_TRANSFERS


def test_names_are_unique():
    names = [patch.name for patch in PATCHES]
    assert len(set(names)) == len(names)
