"""Positions that were told are kept within a bound, and told on."""

from proxy.boundaries.positions import ENTRY_BYTES, PositionCache


def test_what_another_gateway_was_told_is_bounded_too():
    positions = PositionCache(2 * ENTRY_BYTES)
    for key in (b"a", b"b", b"a", b"c"):
        positions.put_remote(key, 5)
    assert [positions.get(key) for key in (b"a", b"b", b"c")] == [0, 5, 5]
