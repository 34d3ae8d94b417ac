"""All bodies share one bound, and no API key can take all of it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from proxy.errors import KeyBusy, Overloaded
from proxy.http import body_memory
from proxy.http.body_memory import (
    TRIM_AFTER_BYTES,
    BodyMemory,
)


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
