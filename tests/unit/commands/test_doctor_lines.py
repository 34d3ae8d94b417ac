"""What the doctor makes of one fact; what it says of servers stands in `tests/gateway/test_doctor.py`."""

from __future__ import annotations

import pytest

from proxy.commands.cures import Cures
from proxy.commands.doctor import _engine
from proxy.commands.ways import FoundWay, Way
from proxy.fleet.worker_metrics import EngineInfo, EngineSetup


@pytest.mark.parametrize(("unit", "fine"), [(16, True), (64, True), (65, False), (384, False)])
def test_a_match_unit_is_called_coarse_past_that_of_a_delta_net(unit, fine):
    info, setup = EngineInfo("0.3.0", "0.32.0", unit, 384), EngineSetup(True, 384, False, False)
    last = _engine(info, setup, Cures(FoundWay(Way.PIP), "m", 8000, True))[-1]
    assert (last.fine, last.cure is None) == (fine, fine) and f"match unit {unit} tokens" in last.text
