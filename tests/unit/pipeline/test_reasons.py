"""Reasons that a real engine takes too long to show, and those of gateway and engine together."""

from __future__ import annotations

from tests.harness.gateways import chat


async def test_no_facts(in_memory, worker):
    worker.hang_renders, worker.cached = True, 0
    gateway = await in_memory(worker, render_timeout=0.2)
    answer = await gateway.post(chat("Tide?"))
    assert answer.status_code == 200 and answer.headers["x-seamark-reason"] == "no_facts"
    explained = await gateway.explained(answer)
    assert explained["reason"] == "no_facts" and explained["lookup"] == "none"
