"""A hint holds what each boundary is said to be, once, and no guess."""

from proxy.boundaries.boundary import distinct_entries


def test_an_engine_takes_sixteen_entries():
    assert distinct_entries([None, *range(1, 40), 1]) == tuple(range(1, 17))
