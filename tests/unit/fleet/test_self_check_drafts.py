"""The self-check of an engine that drafts, and of one that rounds at random."""

from __future__ import annotations

import json
import random

from proxy.boundaries.boundary import Boundary, Found
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT
from proxy.chat.responses import StoredResponses
from proxy.fleet import self_check
from proxy.fleet.hot_prefixes import WarmupRequest, WarmupSet
from proxy.fleet.self_check import WITHOUT_DRAFTS, SelfCheck
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.settings import Settings
from tests.harness.drafting_engine import BLOCK, UNIT, DraftingEngine, DraftingUpstream
from tests.harness.probed import probed


def checked(engine: DraftingEngine, seed: int = 0, length: int = 200) -> tuple[SelfCheck, Worker, WarmupRequest]:
    """A check of a worker, and a prompt of its own for each seed."""
    draw = random.Random(seed)
    ids = [draw.randrange(1000, 4000) for _ in range(length)]

    async def render(body, path=CHAT):
        return TokenIds.of(ids)

    info = EngineInfo("0.3.0", "0", match_unit=UNIT, block_size=BLOCK, ahead=1, drafts=engine.state)
    worker = Worker("http://w", renderer=render, probed=probed("w#1", info, "m"), up=True)
    worker.renderer_ids["m"] = b"renderer"
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Tide?"}]}).encode()
    found = Found((Boundary("turn", b"turn", 180),), renderer_id=b"renderer")
    request = WarmupRequest(CHAT, raw, ("model", "messages"), {"cache_salt": f"salt {seed}"}, found, "m")
    upstream = DraftingUpstream(engine)
    stored, idle = StoredResponses(10**6), IdleWork()
    check = SelfCheck(Settings(), _Pool(worker), WarmupSet(10**6), stored, upstream, Metrics(), idle, lambda _: None)
    return check, worker, request


class _Pool:
    def __init__(self, *workers: Worker) -> None:
        self.workers = list(workers)


async def test_more_prompts_are_recomputed_before_a_random_engine_is_called_wrong_and_none_of_an_exact_one():
    asked = {}
    for noise in (0.0, 0.004):
        engine = DraftingEngine(state="on", noise=noise, hits_off=0.25, draw=random.Random(7))
        check, worker, request = checked(engine)
        await check._judge(worker, request, self_check._Watched())
        asked[noise] = {len(each["prompt"]) for each in engine.asked}
    assert asked[0.0] == {200} and len(asked[0.004]) == 2


async def test_every_eighth_check_asks_what_the_engine_says_without_drafts():
    engine = DraftingEngine(state="open")
    check, worker, request = checked(engine)
    watched = self_check._Watched()
    for checks in range(2 * WITHOUT_DRAFTS):
        watched.checks = checks
        await check._judge(worker, request, watched)
    assert sum("prompt_logprobs" in each for each in engine.asked) == 2


async def test_an_engine_that_answers_otherwise_with_drafts_gets_no_more_hints_and_keeps_its_cache(monkeypatch):
    monkeypatch.setattr("tests.harness.drafting_engine.DECODED", 8)  # a check's answer is short
    engine = DraftingEngine(state="open", drafts_off=0.25)
    check, worker, request = checked(engine)
    watched = self_check._Watched(checks=WITHOUT_DRAFTS - 1)
    await check._judge(worker, request, watched)
    assert check.gates.wants(worker)
    assert sum("prompt_logprobs" in each for each in engine.asked) == 2, "it is looked at twice"

    async def clients():
        return ()

    await check.gates.step(worker, clients)
    assert engine.state == "closed" and "vLLM itself answers otherwise" in engine.why
    assert worker.draft_state == "closed" and not worker.takes_hints and worker.cache.cache_allowed
