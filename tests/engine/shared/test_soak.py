"""`python -m tests.bench.soak`: some traffic on real engines, and its complaints when something is wrong."""

from __future__ import annotations

import math

import pytest

from proxy.bench.harness import planted
from tests.bench import soak
from tests.bench.soak import Subject, drive_all, judge_all
from tests.bench.traffic import Traffic
from tests.harness.engines import SharedServers

# By number, so that a busy machine sends no less. `make soak` goes on for as long as one likes.
EVENTS = 120

DEFECTIVE_EVENTS = 80


@pytest.mark.thorough
async def test_random_traffic_leaves_nothing_behind(servers: SharedServers):
    subjects = [
        Subject("room", servers.seamark, servers.gateway),
        Subject("tight", servers.tight, servers.tight_gateway),
    ]
    soaks = await judge_all(await drive_all(subjects, Traffic(seed=1), math.inf, EVENTS), servers.reference.url)
    print("\n\n".join(map(soak.render, soaks)))
    assert [soak.complaints for soak in soaks] == [[], []]
    for each in soaks:
        assert {line.kind for line in each.lines} == set(Traffic(0).kinds)
        assert sum(line.judged for line in each.lines) > 20
        assert sum(line.left_early for line in each.lines) and sum(line.left_later for line in each.lines)
        assert each.driven.counted["states written"] and each.driven.counted["resumed from a state"]


@pytest.mark.thorough
async def test_the_soak_notices_wrong_states(servers: SharedServers):
    subject = Subject("defective", servers.seamark, servers.gateway)
    with planted.planted(servers.planted, planted.OTHER_STATE):
        driven = await drive_all([subject], Traffic(seed=2), math.inf, DEFECTIVE_EVENTS)
    (result,) = await judge_all(driven, servers.reference.url)
    assert "answers differ from the reference engine's" in "\n".join(result.complaints)
