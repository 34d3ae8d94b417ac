"""What is known of the keys that a pool holds: who lost one, asked of no more than what the pool has removed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches.scheduler import held_keys
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


def manager(group: int, block_size: int, **more: bool) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_group_id=group, block_size=block_size, **more)


@pytest.fixture
def named(monkeypatch) -> SimpleNamespace:
    """A request whose keys say what they are of: tokens and group."""
    monkeypatch.setattr(held_keys, "key_at", lambda request, position, unit, group: b"%d in %d" % (position, group))
    return SimpleNamespace()


@pytest.mark.parametrize(
    ("grid", "position", "keys"),
    [
        (Grid(16, 16), 80, [b"80 in 4", b"80 in 2", b"64 in 1", b"80 in 1", b"32 in 3", b"64 in 3", b"80 in 3"]),
        (Grid(16, 16), 64, [b"64 in 4", b"64 in 2", b"64 in 1", b"32 in 3", b"64 in 3"]),
        (Grid(16, 16), 16, [b"16 in 4", b"16 in 2", b"16 in 1", b"16 in 3"]),
        # Where a draft head has rows, keys reach a unit further.
        (Grid(16, 16, 16, 16), 48, [b"48 in 4", b"48 in 2", b"64 in 1", b"32 in 3", b"48 in 3"]),
    ],
)
def test_a_state_needs_its_own_keys_in_all_groups_and_those_of_all_rows_before_it(named, grid, position, keys):
    pool = Pool(*keys)
    held = HeldKeys(pool, grid, [manager(4, 64), manager(2, 64)], [manager(1, 64), manager(3, 32, use_eagle=False)])
    assert list(held.keys_of(named, position)) == keys and held.found(named, position) == tuple(keys)
    assert held.state_key(named, position) == keys[0] and held.groups == {1, 2, 3, 4}
    assert held.name_of(named, position) == b"%d in 4" % (position + grid.drop)
    for missing in keys:
        pool.hold(*({*keys} - {missing}))
        assert held.found(named, position) == ()
        assert held.is_cached(named, position) is (missing not in keys[:2])


def test_without_attention_a_state_is_all_that_it_needs(named):
    held = HeldKeys(Pool(b"80 in 0"), Grid(16, 16), [manager(0, 64)], [])
    assert held.drop == 0 and held.found(named, 80) == (b"80 in 0",) == (held.name_of(named, 80),)


def test_a_key_that_nobody_needs_any_more_is_not_looked_at(pool, watch):
    watch.add(b"one", (b"a", b"b"))
    watch.add(b"other", (b"b",))
    watch.remove(b"one")
    pool.remove(b"a")
    assert watch.lost() == [] and pool.asked == [] and b"one" not in watch
    pool.remove(b"b")
    assert watch.lost() == [b"other"]


def test_a_name_that_was_removed_after_its_key_is_not_lost_twice(pool, watch):
    watch.add(b"one", (b"a",))
    pool.remove(b"a")
    watch.remove(b"one")
    watch.add(b"other", (b"c",))
    assert watch.lost() == [] and pool.asked == []


def test_what_a_pool_removes_is_what_it_returns(pool):
    pool.seamark_watches = []
    assert watch_removed_keys(lambda self, block: (block,))(pool, b"a") == (b"a",)
    assert watch_removed_keys(lambda self, block: None)(SimpleNamespace(), b"a") is None
    assert watch_removed_keys(lambda self, block: (block,))(SimpleNamespace(), b"a") == (b"a",)  # nobody watches


def test_a_cleared_watch_starts_anew_with_the_pool_of_now(pool, watch):
    watch.add(b"one", (b"a",))
    pool.remove(b"a")
    watch.clear()
    watch.add(b"two", (b"b",))
    assert watch.lost() == [] and pool.asked == []
