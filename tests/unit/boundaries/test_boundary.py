"""A hint holds what each boundary is said to be, once, and no guess."""

from proxy.boundaries.boundary import Boundary, Found, distinct_entries


def found(*boundaries: Boundary) -> Found:
    return Found(boundaries)


def test_an_engine_takes_sixteen_entries_and_the_deepest_positions_save_the_most():
    assert distinct_entries([None, *range(1, 40), 1]) == tuple(range(1, 17))
    many = found(*(Boundary("explicit", b"%d" % number, number, number) for number in range(1, 40)))
    assert many.entries(by_template=False) == tuple(range(24, 40))
