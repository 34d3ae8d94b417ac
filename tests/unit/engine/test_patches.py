"""Which patches are meant for a vLLM, by what its source has: the table is asked about versions that are not here."""

from __future__ import annotations

from engine_patches import kv_connectors
from engine_patches.patches import PATCHES

OF_TRANSFERS = {"prefill-end", "load-end", "sent-content", "late-reads"}


def test_what_concerns_transfers_is_meant_for_a_nixl_that_hands_prefills_over_as_expected():
    found = {patch.name for patch in PATCHES if patch.applies is kv_connectors.hands_over}
    assert found == OF_TRANSFERS


def test_names_are_unique():
    names = [patch.name for patch in PATCHES]
    assert len(set(names)) == len(names)
