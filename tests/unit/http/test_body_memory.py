"""All bodies share one bound, and no API key can take all of it."""

from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import suppress

import pytest

from proxy.errors import KeyBusy, Overloaded
from proxy.http import body_memory
from proxy.http.body_memory import (
    LEFT_BY_LARGE,
    SMALL_BYTES,
    TIMES_WHAT_IS_FREE,
    TRIM_AFTER_BYTES,
    BodyHold,
    BodyMemory,
)


def test_what_is_taken_is_given_back_whole_or_in_parts():
    memory = BodyMemory(100)
    hold = memory.of()
    hold.take(60)
    hold.take(40)
    assert (hold.size, memory.held) == (100, 100)
    with pytest.raises(Overloaded, match="max_bodies_bytes"):
        memory.of().take(1)
    hold.give_back(30)
    assert (hold.size, memory.held) == (70, 70)
    for _ in range(2):
        hold.give_back()
        assert (hold.size, memory.held) == (0, 0)


def test_a_refused_body_takes_nothing():
    memory = BodyMemory(100)
    for owner in (None, "ann"):
        hold = memory.of(owner)
        with pytest.raises((Overloaded, KeyBusy)):
            hold.take(101)
        assert (hold.size, memory.held) == (0, 0)


def test_large_bodies_leave_room_for_small_ones():
    most = 2**24
    memory = BodyMemory(most)
    large = memory.of()
    large.take(round(most * (1 - LEFT_BY_LARGE)))
    with pytest.raises(Overloaded):
        large.take(1)
    for _ in range(most // 2**16 // 16):
        memory.of().take(SMALL_BYTES)
    with pytest.raises(Overloaded):
        memory.of().take(1)


def check_refusal(refused: KeyBusy) -> None:
    assert refused.retry_after and refused.status == 429 and "max_bodies_bytes" in str(refused)


def fill(hold: BodyHold) -> int:
    """Take byte by byte until the key has its share; returns that."""
    for taken in range(10_000):
        try:
            hold.take(1)
        except KeyBusy as refused:
            check_refusal(refused)
            return taken
    raise AssertionError("the share has no end")


def test_one_key_leaves_room_for_others_and_they_for_more():
    most = 900
    memory = BodyMemory(most)
    taken = []
    for owner in ("greedy", "second", "third"):
        hold = memory.of(owner)
        taken.append(fill(hold))
    share = TIMES_WHAT_IS_FREE / (1 + TIMES_WHAT_IS_FREE)
    assert taken[0] == most * share
    assert taken[1] == pytest.approx((most - taken[0]) * share, abs=1) and taken[2] > 0
    assert memory.held == sum(taken)


def test_a_key_that_gave_its_memory_back_can_have_it_again():
    memory = BodyMemory(90)
    for _ in range(3):
        first, second = memory.of("ann"), memory.of("ann")
        first.take(30)
        second.take(30)
        with pytest.raises(KeyBusy):
            memory.of("ann").take(1)
        first.give_back()
        memory.of("ann").take(0)
        second.give_back()
        assert memory.held == 0 and not memory._of_owners


def test_a_body_of_the_smallest_large_size_leaves_its_part_and_the_largest_small_one_takes_it():
    most = 16 * SMALL_BYTES
    for size, fits in ((SMALL_BYTES, True), (SMALL_BYTES + 1, False)):
        memory = BodyMemory(most)
        memory.of().take(SMALL_BYTES)
        memory.grow(None, most - 2 * SMALL_BYTES - 1, 1)
        hold = memory.of()
        if fits:
            hold.take(size)
            assert memory.held == most - 1
        else:
            with pytest.raises(Overloaded):
                hold.take(size)
            assert (hold.size, memory.held) == (0, most - SMALL_BYTES - 1)


def test_what_one_key_holds_is_none_of_anothers_and_requests_without_keys_have_no_share():
    memory = BodyMemory(90)
    memory.of("ann").take(60)
    with pytest.raises(KeyBusy):
        memory.of("ann").take(1)
    memory.of("bob").take(20)
    memory.of().take(10)
    assert memory.held == 90
    with pytest.raises(Overloaded):
        memory.of("cleo").take(1)


def test_a_hold_is_given_back_when_its_context_ends_however_it_ends():
    memory = BodyMemory(100)
    with memory.of("ann") as hold:
        hold.take(40)
        hold.give_back(10)
        assert memory.held == 30
    assert (hold.size, memory.held) == (0, 0)
    with suppress(ValueError), memory.of() as hold:
        hold.take(40)
        raise ValueError("planned")
    assert memory.held == 0


def test_the_heap_is_given_back_once_for_so_many_bytes_that_were_freed(monkeypatch):
    trims: list[int] = []
    monkeypatch.setattr(body_memory, "_trim", trims.append)
    memory = BodyMemory(10 * TRIM_AFTER_BYTES)
    seen = []
    for size in (TRIM_AFTER_BYTES - 1, 1, TRIM_AFTER_BYTES - 1, TRIM_AFTER_BYTES, 1):
        memory.of().take(size)
        memory.shrink(None, size)
        seen.append(len(trims))
    assert seen == [0, 1, 1, 2, 2] and set(trims) == {0}
    monkeypatch.setattr(body_memory, "_trim", None)  # another libc
    memory.of().take(2 * TRIM_AFTER_BYTES)
    memory.shrink(None, 2 * TRIM_AFTER_BYTES)
    assert memory.held == 0


# Large blocks with small ones between them, as bodies come in beside other requests; then the large ones go.
BODIES_COME_AND_GO = """
from pathlib import Path
from proxy.http.body_memory import BodyMemory

memory = BodyMemory(2**30)
hold = memory.of()
bytes(2**24)  # from now on the allocator takes blocks of up to 16 MiB from its heap
large, small = [], []
for _ in range(600):
    large.append(b"x" * 200_000)
    small.append(b"x" * 20_000)  # more than fits into the holes that imports leave
hold.take(%d)
large.clear()
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1])
before = resident()
hold.give_back()
print(before - resident())
"""


@pytest.mark.parametrize(("size", "returns"), [(TRIM_AFTER_BYTES - 1, False), (TRIM_AFTER_BYTES, True)])
def test_what_large_bodies_took_goes_back_to_the_system(size, returns):
    script = BODIES_COME_AND_GO % size
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    returned = int(done.stdout) * resource.getpagesize()
    assert (returned > 50_000_000) is returns
