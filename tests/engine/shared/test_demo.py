"""The stories of `seamark bench demo` on the shared engines and one of vLLM alone, which has to have the cures.

The command itself: `tests/engine/test_demo.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.bench import demo, stories
from proxy.bench.harness.counters import PassCounter
from proxy.bench.harness.servers import Server, Servers
from proxy.bench.stories import Contender
from tests.harness.engines import SharedServers

SEED = 770_000  # prompts behind it are nobody else's

COLD_STARTS = 3  # the demo's own number is for the medians of its times


@pytest.fixture
def alone(model: Path, fleet: Servers) -> Server:
    started = fleet.engine("vllm-alone", model, "reference")
    started.wait_until_ready()
    return started


async def test_every_story_holds_and_is_reported(servers: SharedServers, alone: Server, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(stories, "cold_starts", lambda _: COLD_STARTS)
    monkeypatch.setattr(demo, "REPORTS", tmp_path / "reports")
    seamark = servers.seamark
    contenders = [
        Contender(demo.SEAMARK, servers.gateway.url, PassCounter(seamark.log), f"{seamark.url}/metrics"),
        Contender(demo.ALONE, alone.url, PassCounter(alone.log)),
    ]
    at = servers.reference.url, seamark.url, servers.planted
    played, defects = await demo.play(contenders, *at, (163,), print, SEED)
    held = demo.all_held(played, defects)
    report = json.loads(demo.write_report(played, defects, held, 1.0).read_text())
    assert report["held"] is True, demo.render(played, defects)
    system, *fan_outs, conversation, twice = report["stories"]
    assert len(fan_outs) == 3 and all(story["held"] for story in (system, *fan_outs, conversation, twice))
    assert [line["hit_second"] for line in system["lines"]] == [160, 0]
    assert all(line["exact"] for story in report["stories"] for line in story["lines"])
    assert [defect["caught"] for defect in report["planted_defects"]] == [False, True, True, True]
    assert "waited for the leader" in demo.render(played, defects)
    hits, seconds, exactness = demo.in_short(played, defects)
    assert hits.endswith("98% of it in the cache with Seamark, and 0% with vLLM alone.")
    assert " ms instead of " in seconds and "NOT" not in exactness
    # States cost no passes. Requests sent at the same time share passes as they happen to meet, so those say nothing.
    for story in (system, conversation, twice):
        ours, theirs = story["lines"]
        assert ours["passes_cold"] <= theirs["passes_cold"], story["title"]
