"""`python -m tests.bench.soak`: two minutes of traffic on real engines, and its complaints when something is wrong."""

from __future__ import annotations

from dataclasses import replace

from proxy.bench.harness import planted
from proxy.bench.harness.client import COMPLETION, Answer
from proxy.fleet.answer_compare import Step
from tests.bench import soak
from tests.bench.soak import Driven, Memory, Outcome, Subject, drive_all, judge_all
from tests.bench.traffic import Request, Traffic
from tests.harness.engines import SharedServers

SECONDS = 120.0

DEFECTIVE_SECONDS = 15.0


async def test_two_minutes_of_random_traffic_leave_nothing_behind(servers: SharedServers):
    subjects = [
        Subject("room", servers.seamark, servers.gateway),
        Subject("tight", servers.tight, servers.tight_gateway),
    ]
    soaks = await judge_all(await drive_all(subjects, Traffic(seed=1), SECONDS), servers.reference.url)
    print("\n\n".join(map(soak.render, soaks)))
    assert [soak.complaints for soak in soaks] == [[], []]
    for each in soaks:
        assert {line.kind for line in each.lines} == set(Traffic(0).kinds)
        assert sum(line.judged for line in each.lines) > 20
        assert sum(line.left_early for line in each.lines) and sum(line.left_later for line in each.lines)
        assert each.driven.counted["states written"] and each.driven.counted["resumed from a state"]


async def test_the_soak_notices_wrong_states(servers: SharedServers):
    subject = Subject("defective", servers.seamark, servers.gateway)
    with planted.planted(servers.planted, planted.OTHER_STATE):
        driven = await drive_all([subject], Traffic(seed=2), DEFECTIVE_SECONDS)
    (result,) = await judge_all(driven, servers.reference.url)
    assert "answers differ from the reference engine's" in "\n".join(result.complaints)


TOP = {"token_id:1": -0.5, "token_id:2": -0.9}

RIGHT = Answer((Step("token_id:1", TOP),), 100, 0, 0.0, 0.1, 0.2)

REQUEST = Request("salts", COMPLETION, {"prompt": [1] * 100}, judged=True)


def driven(*outcomes: Outcome, **fields) -> Driven:
    """A made-up run in which all is well but what the arguments say."""
    well = Driven("room", 60.0, (Outcome(REQUEST, RIGHT), *outcomes), Memory(2.0**30, 2.0**30), {}, {}, ())
    return replace(well, **fields)
