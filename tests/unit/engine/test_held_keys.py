"""What is known of the keys that a pool holds: who lost one, asked of no more than what the pool has removed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import HeldKeys, Watch, watch_removed_keys


class Pool:
    """A block pool, as far as it is asked which keys it holds."""

    def __init__(self, *keys: bytes) -> None:
        self.asked: list[bytes] = []
        self.hold(*keys)

    def hold(self, *keys: bytes) -> None:
        """Be emptied as a whole, then hold these."""
        self.keys = set(keys)
        self.cached_block_hash_to_block = SimpleNamespace(get_one_block=self._get)

    def _get(self, key: bytes) -> object | None:
        self.asked.append(key)
        return key if key in self.keys else None

    def remove(self, *keys: bytes) -> None:
        """Take keys off their blocks."""
        self.keys.difference_update(keys)
        watch_removed_keys(lambda *_: keys)(self, None)


@pytest.fixture
def pool() -> Pool:
    return Pool(b"a", b"b", b"c")


@pytest.fixture
def watch(pool) -> Watch:
    return HeldKeys(pool, Grid(16, 16), (), ()).watch()


def test_whatever_a_thing_needs_takes_it_along_once(pool, watch):
    watch.add(b"one", (b"a", b"b"))
    watch.add(b"other", (b"b", b"c"))
    pool.remove(b"a")
    assert watch.lost() == [b"one"] and watch.lost() == []
    pool.remove(b"b", b"c")
    assert watch.lost() == [b"other"] and len(watch) == 0


def test_a_key_that_another_block_carries_is_not_lost(pool, watch):
    watch.add(b"one", (b"a",))
    pool.remove(b"a")
    pool.keys.add(b"a")
    assert watch.lost() == [] and b"one" in watch


def test_only_keys_that_were_removed_and_are_needed_are_looked_at(pool, watch):
    watch.add(b"one", (b"a",))
    watch.add(b"other", (b"c",))
    pool.remove(b"b", b"c")
    assert watch.lost() == [b"other"] and pool.asked == [b"c"]
    assert watch.lost() == [] and pool.asked == [b"c"]


def test_each_watch_is_told_and_asks_for_itself(pool):
    keys = HeldKeys(pool, Grid(16, 16), (), ())
    first, second = keys.watch(), keys.watch()
    for watch in (first, second):
        watch.add(b"one", (b"a",))
    pool.remove(b"a")
    assert first.lost() == second.lost() == [b"one"]


def test_after_a_pool_is_emptied_as_a_whole_all_is_looked_at(pool, watch):
    watch.add(b"one", (b"a",))
    watch.add(b"other", (b"b",))
    assert not watch.emptied
    pool.hold(b"b")
    assert watch.emptied and watch.lost() == [b"one"] and not watch.emptied


def test_a_cleared_watch_needs_nothing(pool, watch):
    watch.add(b"one", (b"a",))
    pool.hold()
    watch.clear()
    assert not watch.emptied and watch.lost() == [] and len(watch) == 0


def test_the_oldest_is_given_up_where_there_are_too_many(pool, watch):
    for name, key in ((b"one", b"a"), (b"other", b"b")):
        watch.add(name, (key,))
        assert watch.remove_oldest(1) == (b"one" if name == b"other" else None)
    pool.remove(b"a", b"b")
    assert watch.lost() == [b"other"]
