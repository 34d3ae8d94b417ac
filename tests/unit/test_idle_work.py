"""Work beside requests: step by step, in lulls, and whatever it holds, the loop turns to others between two steps."""

from __future__ import annotations

import asyncio

import pytest

from proxy.idle_work import LULL_SECONDS, IdleWork, Steps, within
from tests.harness.steps import finished
from tests.harness.virtual_time import on_virtual_time


@pytest.fixture
def idle() -> IdleWork:
    """By the loop's own clock, which is virtual; a slice is one step."""
    return IdleWork(now=lambda: asyncio.get_running_loop().time(), slice_seconds=0.0)


def noting(seen: list[str], *words: str) -> Steps[str]:
    for word in words:
        seen.append(word)
        yield
    return "done"


@on_virtual_time
async def test_a_failure_is_told_by_its_kind_and_the_next_job_goes_on(idle, caplog):
    def failing() -> Steps[None]:
        yield
        raise ValueError("secret")

    seen: list[str] = []
    idle.add(failing())
    idle.add(noting(seen, "a"))
    idle.add(failing())
    await idle.caught_up()
    await asyncio.sleep(1)
    assert seen == ["a"] and caplog.text.count("ValueError") == 2 and "secret" not in caplog.text
    assert idle.waiting == 0


@on_virtual_time
async def test_between_two_steps_the_loop_turns_to_everything_else(idle):
    seen: list[str] = []
    idle.add(noting(seen, *"abc"))
    asking = asyncio.create_task(idle.caught_up())
    while not asking.done():
        seen.append("-")
        await asyncio.sleep(0)
    assert "".join(seen).strip("-").replace("--", "-") == "a-b-c"


@on_virtual_time
async def test_what_somebody_waits_for_is_done_now_and_still_in_steps(idle):
    seen: list[str] = []
    idle.put_off()
    other = asyncio.create_task(idle.finish(noting(seen, "x", "y")))
    assert await idle.finish(noting(seen, "a", "b")) == "done" == await other
    assert sorted(seen[:2]) == ["a", "x"] and sorted(seen[2:]) == ["b", "y"]


@on_virtual_time
async def test_a_request_that_comes_between_two_steps_goes_first(idle):
    seen: list[str] = []

    def steps() -> Steps[None]:
        seen.append("first")
        idle.put_off()
        yield
        seen.append("second")

    idle.add(steps())
    await asyncio.sleep(LULL_SECONDS * 1.5)
    assert seen == ["first"]
    await asyncio.sleep(LULL_SECONDS)
    assert seen == ["first", "second"]


@on_virtual_time
async def test_who_stops_asking_hurries_nobody(idle):
    seen: list[str] = []
    idle.add(noting(seen, *"abc"))
    idle.put_off()
    asking = asyncio.create_task(idle.caught_up())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    steps = len(seen)
    await asyncio.sleep(0)
    assert len(seen) == steps < 3
    await asyncio.sleep(LULL_SECONDS * 2)
    assert len(seen) == 3


def test_what_takes_too_long_is_given_up():
    seen: list[str] = []
    assert finished(within(30.0, noting(seen, *"ab"))) == "done"
    with pytest.raises(TimeoutError):
        finished(within(0.0, noting(seen, *"cd")))
    assert seen == ["a", "b", "c"]
