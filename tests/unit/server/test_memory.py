"""Bounds of memory fit into what the process may have."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from proxy.server import memory
from proxy.server.memory import BOUNDS, SHARE, fitted, room
from proxy.settings import Settings

MIB = 2**20


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Sets the limits of a process of 300 MiB, 60 of them resident; in MiB, None for no limit."""

    def set_to(address_space: int | None, group: int | str | None, reserved: int = 0, loaded: int = 0) -> None:
        pages = MIB // resource.getpagesize()
        for name, content in (("statm", f"{300 * pages} {60 * pages} 1 1 0 1 0"), ("group", f"{group}")):
            (tmp_path / name).write_text(content)
        if isinstance(group, int):
            (tmp_path / "group").write_text(f"{group * MIB}\n")
        monkeypatch.setattr(memory, "RESERVED_BYTES", reserved * MIB)
        monkeypatch.setattr(memory, "LOADED_BYTES", loaded * MIB)
        monkeypatch.setattr(memory, "PROCESS", tmp_path / "statm")
        monkeypatch.setattr(memory, "GROUP_LIMITS", (tmp_path / "group", tmp_path / "none"))
        soft = resource.RLIM_INFINITY if address_space is None else address_space * MIB
        monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (soft, soft))

    return set_to


@pytest.mark.parametrize(
    ("address_space", "group", "left"),
    [(None, "max", None), (512, "max", 212), (None, 512, 452), (512, 512, 212), (1024, 512, 452), (200, "max", 0)],
)
def test_what_is_left_is_the_least_that_any_limit_leaves(limits, address_space, group, left):
    limits(address_space, group)
    assert room() == (left if left is None else left * MIB)


def test_bounds_are_made_smaller_in_proportion(limits):
    limits(512, "max")
    settings = Settings(max_bodies_bytes=600 * MIB, memory_bytes=300 * MIB, text_bytes=100 * MIB)
    found = fitted(settings)
    assert sum(getattr(found, name) for name in BOUNDS) == pytest.approx(212 * MIB * SHARE, rel=0.01)
    assert found.max_bodies_bytes == pytest.approx(2 * found.memory_bytes, rel=0.01)
    assert found.max_body_bytes == found.max_bodies_bytes and found.max_connections == 212


def test_without_a_way_to_know_nothing_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "PROCESS", tmp_path / "none")
    assert room() is None


def test_where_nothing_is_left_each_bound_is_the_least_that_there_is(limits):
    limits(200, "max")
    found = fitted(Settings())
    assert [getattr(found, name) for name in BOUNDS] == [1, 1, 1]
    assert (found.max_body_bytes, found.max_connections) == (1, 1)
    assert fitted(Settings(text_bytes=0)).text_bytes == 0


def test_bounds_that_fit_exactly_are_left_alone(limits):
    limits(340, "max")  # 40 MiB are left, and bounds get a quarter
    exactly = Settings(max_bodies_bytes=5 * MIB, memory_bytes=4 * MIB, text_bytes=MIB, max_body_bytes=MIB)
    assert fitted(exactly) is exactly
    more = exactly.model_copy(update={"text_bytes": MIB + 100})
    found = fitted(more)
    assert found is not more and found.max_body_bytes == MIB and found.max_connections == 40


def test_large_blocks_are_asked_to_be_given_back_where_the_allocator_can(monkeypatch):
    asked = []

    class Libc:
        def __init__(self, name: None) -> None:
            pass

        def mallopt(self, what: int, size: int) -> None:
            asked.append((what, size))

    monkeypatch.setattr(memory.ctypes, "CDLL", Libc)
    memory.give_large_blocks_back()
    assert asked == [(-3, MIB)]  # M_MMAP_THRESHOLD
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    memory.give_large_blocks_back()
    assert len(asked) == 1
