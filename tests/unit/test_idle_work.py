"""Work beside requests: step by step, in lulls, and whatever it holds, the loop turns to others between two steps."""

from __future__ import annotations

import asyncio

import pytest

from proxy.idle_work import (
    LULL_SECONDS,
    MAX_WAITING,
    PATIENCE_SECONDS,
    SHORT_PATIENCE_SECONDS,
    SLICE_SECONDS,
    IdleWork,
    Steps,
    batched,
    within,
)
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
async def test_nothing_begins_before_a_lull(idle):
    seen: list[str] = []
    idle.put_off()
    idle.add(noting(seen, "a"))
    for _ in range(4):
        await asyncio.sleep(LULL_SECONDS * 0.75)
        assert seen == []
        idle.put_off()
    await asyncio.sleep(LULL_SECONDS * 2)
    assert seen == ["a"] and idle.waiting == 0


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
async def test_without_a_lull_the_gateway_falls_behind_and_goes_on_step_by_step(idle):
    seen: list[str] = []
    idle.add(noting(seen, *"ab"))
    for _ in range(int(PATIENCE_SECONDS / LULL_SECONDS)):
        idle.put_off()
        await asyncio.sleep(LULL_SECONDS / 2)
    assert seen == [] and not idle.is_behind
    while not seen:
        idle.put_off()
        await asyncio.sleep(LULL_SECONDS / 2)
    assert asyncio.get_running_loop().time() < 2 * PATIENCE_SECONDS


@on_virtual_time
async def test_with_too_many_jobs_it_is_behind(idle):
    for _ in range(MAX_WAITING):
        idle.add(noting([]))
    assert not idle.is_behind
    idle.add(noting([]))
    assert idle.is_behind


@on_virtual_time
async def test_a_failure_is_told_by_its_kind_and_the_next_job_goes_on(idle, caplog):
    def failing() -> Steps[None]:
        yield
        raise ValueError("secret")

    seen: list[str] = []
    idle.add(failing())
    idle.add(noting(seen, "a"))
    await idle.caught_up()
    assert seen == ["a"] and "ValueError" in caplog.text and "secret" not in caplog.text


@on_virtual_time
async def test_who_asks_waits_for_what_was_added_before_and_for_no_lull(idle):
    seen: list[str] = []
    idle.add(noting(seen, *"abc"))
    idle.put_off()
    began = asyncio.get_running_loop().time()
    await idle.caught_up()
    assert seen == ["a", "b", "c"] and asyncio.get_running_loop().time() == began
    await idle.caught_up()  # nothing waits


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


@on_virtual_time
async def test_what_somebody_waits_for_is_done_now_and_still_in_steps(idle):
    seen: list[str] = []
    idle.put_off()
    other = asyncio.create_task(idle.finish(noting(seen, "x", "y")))
    assert await idle.finish(noting(seen, "a", "b")) == "done" == await other
    assert sorted(seen[:2]) == ["a", "x"] and sorted(seen[2:]) == ["b", "y"]


@pytest.mark.parametrize("patience", [0.02, PATIENCE_SECONDS])
@on_virtual_time
async def test_a_task_waits_for_a_lull_within_its_patience(idle, patience):
    async def requests() -> None:
        while True:
            idle.put_off()
            await asyncio.sleep(LULL_SECONDS / 2)

    busy = asyncio.create_task(requests())
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    await idle.lull(patience)
    assert asyncio.get_running_loop().time() - began == pytest.approx(patience)
    busy.cancel()
    await idle.lull(patience)
    assert asyncio.get_running_loop().time() - began == pytest.approx(patience + LULL_SECONDS, abs=LULL_SECONDS)


@on_virtual_time
async def test_a_slice_has_several_short_steps():
    seen: list[str] = []
    others = asyncio.create_task(asyncio.sleep(0))
    assert await IdleWork(slice_seconds=30.0).finish(noting(seen, *"abc")) == "done"
    assert not others.done()


def test_what_takes_too_long_is_given_up():
    seen: list[str] = []
    assert finished(within(30.0, noting(seen, *"ab"))) == "done"
    with pytest.raises(TimeoutError):
        finished(within(0.0, noting(seen, *"cd")))
    assert seen == ["a", "b", "c"]


def test_steps_can_be_done_in_one_go_and_values_come_in_groups():
    assert finished(noting([], *"abc")) == "done"
    assert list(batched("abcde", 2)) == [("a", "b"), ("c", "d"), ("e",)] and list(batched("", 2)) == []


@on_virtual_time
async def test_with_nothing_to_do_nothing_is_behind(idle):
    assert idle.waiting == 0 and not idle.is_behind
    idle.add(noting([]))
    assert idle.waiting == 1 and not idle.is_behind


@on_virtual_time
async def test_what_has_waited_as_long_as_patience_is_not_behind_yet(idle):
    idle.add(noting([]))
    idle.put_off()
    now = asyncio.get_running_loop().time()
    idle._now = lambda: now + PATIENCE_SECONDS
    assert not idle.is_behind
    idle._now = lambda: now + PATIENCE_SECONDS * 1.001
    assert idle.is_behind


@on_virtual_time
async def test_jobs_are_done_one_after_the_other_however_often_somebody_asks(idle):
    seen: list[str] = []
    idle.add(noting(seen, *"ab"))
    first = asyncio.create_task(idle.caught_up())
    await asyncio.sleep(0)
    idle.add(noting(seen, *"cd"))
    second = asyncio.create_task(idle.caught_up())
    await first
    assert "".join(seen).startswith("ab") and idle.waiting
    await second
    assert seen == [*"abcd"]
    await asyncio.sleep(1)
    assert seen == [*"abcd"] and idle.waiting == 0  # no step is left over
    idle.add(noting(seen, "e"))
    await asyncio.sleep(LULL_SECONDS * 2)
    assert seen == [*"abcde"]


@on_virtual_time
async def test_once_nobody_asks_any_more_lulls_are_waited_for_again(idle):
    seen: list[str] = []
    idle.add(noting(seen, "a"))
    await idle.caught_up()
    idle.put_off()
    idle.add(noting(seen, "b"))
    began = asyncio.get_running_loop().time()
    while "b" not in seen:
        assert asyncio.get_running_loop().time() - began < 2 * LULL_SECONDS, "it begins in the next lull"
        idle_until = asyncio.get_running_loop().time() - began
        await asyncio.sleep(LULL_SECONDS / 8)
    assert idle_until >= LULL_SECONDS / 2


@on_virtual_time
async def test_in_a_lull_nobody_waits_and_the_loop_turns_once(idle):
    seen: list[str] = []
    other = asyncio.create_task(idle.finish(noting(seen, "a")))
    began = asyncio.get_running_loop().time()
    await idle.lull()
    assert seen == ["a"] and asyncio.get_running_loop().time() == began
    await other


@on_virtual_time
async def test_a_lull_begins_a_moment_after_the_last_request(idle):
    idle.put_off()
    began = asyncio.get_running_loop().time()
    await idle.lull()
    assert asyncio.get_running_loop().time() - began == pytest.approx(LULL_SECONDS)


@on_virtual_time
async def test_a_failure_is_told_to_who_waits_for_the_result(idle):
    def failing() -> Steps[None]:
        yield
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        await idle.finish(failing())


@on_virtual_time
async def test_a_failure_of_the_last_job_leaves_nothing(idle, caplog):
    def failing() -> Steps[None]:
        yield
        raise ValueError

    idle.add(failing())
    await asyncio.sleep(1)
    assert idle.waiting == 0 and caplog.text.count("ValueError") == 1


def test_work_that_others_build_on_waits_longer_than_a_lull_and_not_as_long_as_the_rest():
    assert LULL_SECONDS < SHORT_PATIENCE_SECONDS < PATIENCE_SECONDS
    assert SLICE_SECONDS < LULL_SECONDS


def test_work_within_a_time_takes_its_steps_one_by_one():
    steps = within(30.0, noting(seen := [], *"ab"))
    next(steps)
    assert seen == ["a"]
    next(steps)
    assert seen == ["a", "b"]
    with pytest.raises(StopIteration) as done:
        next(steps)
    assert done.value.value == "done"
