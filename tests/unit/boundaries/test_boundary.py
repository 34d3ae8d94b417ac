"""A hint holds what each boundary is said to be, once, and no guess."""

import pytest

from proxy.boundaries.boundary import Boundary, Found, Place, distinct_entries, resolved_positions
from proxy.boundaries.layout import layout_of
from proxy.chat.reader import chat_request


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


def test_an_engine_takes_sixteen_entries():
    assert distinct_entries([None, *range(1, 40), 1]) == tuple(range(1, 17))


def test_what_an_engine_resolved_is_known_by_entry_without_what_was_not_there():
    assert resolved_positions(("first:1", -5, "last:2"), (40, 90, 0)) == {"first:1": 40, -5: 90}
    assert resolved_positions(("first:1", -5), (40,)) == {"first:1": 40}  # of an engine that says less
    assert resolved_positions((), (40,)) == {}


@pytest.mark.parametrize(
    ("boundaries", "shared"),
    [
        ((), 0),
        ((Boundary("system", b"a", None),), 0),
        ((Boundary("system", b"a", None, estimate=40),), 40),
        ((Boundary("system", b"a", None, tokens=50, estimate=400),), 50),
        ((Boundary("learned", b"a", None, 30), Boundary("system", b"b", None, 20)), 30),
        (tuple(Boundary(kind, b"a", None, 90, 90) for kind in ("history", "turn", "explicit")), 0),
    ],
)
def test_the_longest_beginning_that_other_conversations_have_is_shared(boundaries, shared):
    assert found(*boundaries).shared == shared


def test_what_is_kept_for_long_holds_nothing_of_the_request():
    layout = layout_of(chat_request({"messages": [{"role": "user", "content": "Tide?"}]}), b"r")
    place = Place(b"k", 0)
    whole = Found((Boundary("turn", b"t", -5),), (b"p",), "learnt", "why", layout, b"r", 5, (place,), place)
    assert whole.turn_key == layout.turn_key is not None
    kept = whole.without_request()
    assert (kept.prefixes, kept.layout, kept.unplaced, kept.dated, kept.turn_key) == ((), None, (), None, None)
    assert kept[0] == whole[0] and (kept.result, kept.failure, kept.renderer_id, kept.end) == ("learnt", "why", b"r", 5)


def test_nothing_was_found_until_something_is():
    nothing = Found()
    assert nothing.entries() == () and nothing.turn_key is None
    assert (nothing.result, nothing.failure, nothing.end, nothing.shared) == ("none", None, None, 0)
    assert Boundary("turn", b"t", None) == Boundary("turn", b"t", None, 0, 0)
