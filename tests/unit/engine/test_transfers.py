"""Whose a prefill of another worker is. What is loaded and kept of it: tests/engine/test_transfer.py."""

from __future__ import annotations

from types import SimpleNamespace

from engine_patches.scheduler.transfers import TAKEN, Transfers

OFFER = {
    "remote_block_ids": [[1]],
    "remote_engine_id": "p",
    "remote_request_id": "cmpl-1",
    "remote_host": "h",
    "remote_port": 1,
}


def test_a_transfer_is_anothers_only_once_another_has_taken_it():
    """Whoever leaves before it was looked at has that worker told, which would hold its blocks in vain."""
    checkpoints = SimpleNamespace(state_of=lambda request: request)
    transfers = Transfers(checkpoints, SimpleNamespace())
    first, second = SimpleNamespace(loaded=0), SimpleNamespace(loaded=0)
    assert not transfers.is_anothers(first, OFFER)
    transfers.look_at(first, OFFER)
    assert transfers.is_anothers(second, OFFER) and transfers.look_at(second, OFFER) == TAKEN
    assert not transfers.is_anothers(second, {**OFFER, "remote_request_id": "cmpl-2"})
