"""A hint holds what each boundary is said to be, once, and no guess."""

from proxy.boundaries.boundary import Boundary, Found, distinct_entries, resolved_positions


def found(*boundaries: Boundary) -> Found:
    return Found(boundaries)


def test_each_entry_is_sent_once_in_the_order_of_the_boundaries():
    known = found(
        Boundary("system", b"s", "first:1", tokens=40),
        Boundary("learned", b"l", None, tokens=50),
        Boundary("history", b"h", "last:2", estimate=60),
        Boundary("explicit", b"e", "last:2", estimate=60),
        Boundary("turn", b"t", -5, estimate=99),
    )
    assert known.entries() == ("first:1", "last:2", -5)
    assert known.entries(by_template=False) == (40, 50)


def test_an_engine_takes_sixteen_entries_and_the_deepest_positions_save_the_most():
    assert distinct_entries([None, *range(1, 40), 1]) == tuple(range(1, 17))
    many = found(*(Boundary("explicit", b"%d" % number, number, number) for number in range(1, 40)))
    assert many.entries(by_template=False) == tuple(range(24, 40))


def test_what_an_engine_resolved_is_known_by_entry_without_what_was_not_there():
    assert resolved_positions(("first:1", -5, "last:2"), (40, 90, 0)) == {"first:1": 40, -5: 90}
    assert resolved_positions(("first:1", -5), (40,)) == {"first:1": 40}  # of an engine that says less
    assert resolved_positions((), (40,)) == {}
