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


def test_the_oldest_is_given_up_where_there_are_too_many(pool, watch):
    for name, key in ((b"one", b"a"), (b"other", b"b")):
        watch.add(name, (key,))
        assert watch.remove_oldest(1) == (b"one" if name == b"other" else None)
    pool.remove(b"a", b"b")
    assert watch.lost() == [b"other"]
