"""Workers that sleep, are paused, or keep nothing: each row of the gateway's README, wherever a user would read it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from proxy.commands import doctor
from tests.harness.gateways import chat
from tests.harness.recording_worker import recording_worker
from tests.harness.waiting import until

README = (Path(__file__).parents[2] / "proxy" / "README.md").read_text()

WINDOW = "a layer has a sliding window, and vLLM finds whole blocks only"

STATES = {
    "`/sleep?level=0`": {"sleeps": (0,)},
    "`/sleep?level=1`": {"sleeps": (1,)},
    "`/sleep?level=2`": {"sleeps": (2,)},
    "one of two engines sleeps": {"sleeps": (None, 1)},
    "`/pause`": {"paused": True},
    "its plugin keeps no state for any hint": {"refused": WINDOW},
}


def rows() -> dict[str, list[str]]:
    """The cells behind the first, by the first."""
    _, table = README.split("### What a worker says of itself")
    lines = [line for line in table.split("###")[0].splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_the_readme_has_each_state_and_no_other():
    assert rows().keys() == STATES.keys()


@pytest.mark.parametrize("state", STATES)
async def test_a_workers_state_is_said_in_the_same_words_wherever_it_matters(in_memory, capsys, caplog, state):
    caplog.set_level(logging.INFO)
    said, ready, answer, reason = rows()[state]
    words = said if answer == "503" else WINDOW
    with recording_worker() as worker:  # which the doctor asks, too
        gateway = await in_memory(worker, health_interval=0.1)

        async def is_hinted() -> bool:
            return "x-seamark-boundary" in (await gateway.post(chat("Tide?"))).headers

        for name, value in STATES[state].items():
            setattr(worker, name, value)
        await until(lambda: words in caplog.text)
        asked = await gateway.get("/ready")
        answered = await gateway.post(chat("Tide?"))
        assert (asked.status_code, answered.status_code) == (int(ready), int(answer[:3]))
        if answer == "503":
            assert words in asked.json()["error"]["message"] and words in answered.json()["error"]["message"]
            assert not worker.requests
        else:
            assert "x-seamark-boundary" not in answered.headers and b"seamark" not in worker.requests[0].body
            assert f"`{answered.headers['x-seamark-reason']}`" == reason
        live = (await gateway.get("/seamark/live")).json()
        assert words in " ".join(live["alarms"] + live["warnings"])
        (shown,) = (await gateway.get("/seamark/status")).json()["workers"]
        assert words in (shown["why_down"] if answer == "503" else shown["refused"])
        assert await asyncio.to_thread(doctor.main, ["--worker", worker.url]) == 1
        verdict, *_ = capsys.readouterr().out.splitlines()
        assert verdict.startswith("cannot hit: ") and verdict.endswith(words)
        worker.sleeps, worker.paused, worker.refused = (None,), False, ""
        await until(is_hinted)
        assert words not in str((await gateway.get("/seamark/live")).json()["alarms"])
