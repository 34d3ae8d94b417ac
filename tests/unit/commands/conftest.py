"""What commands that ask a server find."""

from __future__ import annotations

import pytest

from proxy.commands import boundary, doctor
from tests.harness.in_memory_gateway import Reachable


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> Reachable:
    """Nobody at first."""
    found = Reachable()
    found.serve(monkeypatch, boundary, doctor)
    return found
