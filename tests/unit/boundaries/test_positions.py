"""Positions that were told are kept within a bound, and told on."""

from proxy.boundaries.positions import ENTRY_BYTES, PositionCache


def test_memory_is_bounded_and_forgets_the_least_recently_used():
    positions = PositionCache(2 * ENTRY_BYTES)
    positions.put(b"a", 1)
    positions.put(b"b", 2)
    assert positions.get(b"a") == 1
    positions.put(b"c", 3)
    assert [positions.get(key) for key in (b"a", b"b", b"c")] == [1, 0, 3] and len(positions) == 2


def test_a_position_that_is_put_again_is_in_use_and_told_on_once():
    positions, told = PositionCache(2 * ENTRY_BYTES), []
    positions.on_put = lambda key, tokens: told.append((key, tokens))
    for key, tokens in ((b"a", 1), (b"b", 2), (b"a", 1), (b"c", 3), (b"a", 5)):
        positions.put(key, tokens)
    assert [positions.get(key) for key in (b"a", b"b", b"c")] == [5, 0, 3]
    assert told == [(b"a", 1), (b"b", 2), (b"c", 3), (b"a", 5)]


def test_what_another_gateway_was_told_is_not_told_on_and_replaces_nothing():
    positions, told = PositionCache(10**6), []
    positions.on_put = lambda key, tokens: told.append((key, tokens))
    positions.put(b"a", 1)
    positions.put_remote(b"a", 9)
    positions.put_remote(b"b", 2)
    assert [positions.get(b"a"), positions.get(b"b")] == [1, 2] and told == [(b"a", 1)]


def test_some_position_is_kept_however_small_the_bound():
    for size in (0, 1, ENTRY_BYTES, 2 * ENTRY_BYTES - 1):
        positions = PositionCache(size)
        positions.put(b"a", 1)
        positions.put(b"b", 2)
        assert [positions.get(key) for key in (b"a", b"b")] == [0, 2] and len(positions) == 1


def test_whatever_is_put_is_the_most_recently_used():
    for again in (1, 9):  # the same position, or another one
        positions = PositionCache(2 * ENTRY_BYTES)
        for key, tokens in ((b"a", 1), (b"b", 2), (b"a", again), (b"c", 3)):
            positions.put(key, tokens)
        assert [positions.get(key) for key in (b"a", b"b", b"c")] == [again, 0, 3]


def test_what_another_gateway_was_told_is_bounded_too():
    positions = PositionCache(2 * ENTRY_BYTES)
    for key in (b"a", b"b", b"a", b"c"):
        positions.put_remote(key, 5)
    assert [positions.get(key) for key in (b"a", b"b", b"c")] == [0, 5, 5]
