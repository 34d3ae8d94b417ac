"""A state that came from another worker is kept only from a block that holds it when vLLM's copies of a step run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.transfers import keep_loaded_state

BLOCK, UNIT, LOADED = 64, 16, 144  # tokens

KEPT = (70, 71)  # blocks that are reserved for what is kept


def block(number: int) -> SimpleNamespace:
    return SimpleNamespace(block_id=number, is_null=number == 0)


class Scheduler:
    """With two recurrent cache groups, and a request that was loaded up to `LOADED` into a block of each."""

    def __init__(self, first: int, second: int) -> None:
        tables = [[block(1), block(2), block(number)] for number in (first, second)]
        managers = [SimpleNamespace(block_size=BLOCK, req_to_blocks={"r": table}) for table in tables]
        self.kv_cache_manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
        self.reserved: list[Any] = []
        state = SimpleNamespace(loaded=LOADED, wish=SimpleNamespace(hinted_positions=(LOADED,)))
        keys = SimpleNamespace(recurrent={0: BLOCK, 1: BLOCK}, is_cached=lambda request, position: False)
        self.seamark = SimpleNamespace(
            states=SimpleNamespace(keys=keys),
            state_of=lambda request: state,
            grid=Grid(UNIT, UNIT),
            reserve=self._reserve,
        )

    def _reserve(self, request: Any, target: Any) -> list[SimpleNamespace]:
        self.reserved.append(target.position)
        return [block(number) for number in KEPT]


def kept(scheduler: Scheduler, copies: list[KVCacheBlockCopy] | None = None) -> tuple[bool, list[tuple[int, int]]]:
    """Whether the state is kept, and the step's copies then."""
    output = SimpleNamespace(kv_cache_block_copies=copies)
    found = keep_loaded_state(scheduler, SimpleNamespace(request_id="r"), LOADED, output)
    return found, [(copy.src_block_id, copy.dst_block_id) for copy in output.kv_cache_block_copies or ()]


@pytest.mark.parametrize("others", [[], [KVCacheBlockCopy(40, 41)]])
def test_a_loaded_state_is_copied_before_the_request_goes_on_in_its_block(others):
    scheduler = Scheduler(8, 9)
    before = [(copy.src_block_id, copy.dst_block_id) for copy in others]
    assert kept(scheduler, others or None) == (True, [*before, (8, 70), (9, 71)]) and scheduler.reserved == [LOADED]


@pytest.mark.parametrize(("first", "second"), [(0, 9), (8, 0), (0, 0)])
def test_nothing_is_kept_from_a_null_block(first, second):
    scheduler = Scheduler(first, second)
    assert kept(scheduler) == (False, []) and not scheduler.reserved


@pytest.mark.parametrize("written", [8, 9])
def test_nothing_is_kept_from_a_block_that_this_step_overwrites_first(written):
    scheduler = Scheduler(8, 9)
    assert kept(scheduler, [KVCacheBlockCopy(50, written)]) == (False, [(50, written)]) and not scheduler.reserved
