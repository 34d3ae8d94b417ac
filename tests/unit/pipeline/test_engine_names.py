"""Each request under way has a name of its own at its engine."""

from __future__ import annotations

import pytest

from proxy.pipeline.engine_names import EngineNames


def test_a_name_that_is_taken_gets_longer_and_is_free_again_with_its_request():
    names = EngineNames()
    with names.hold() as first, names.hold() as second:
        assert first.take("r") == "r"
        longer = second.take("r")
        assert longer.startswith("r.") and len(longer) > 3
    with names.hold() as third:
        assert third.take("r") == "r"


def test_a_request_that_fails_before_it_has_a_name_frees_no_other_ones():
    names = EngineNames()
    with names.hold() as first:
        first.take("r")
        with pytest.raises(MemoryError), names.hold():
            raise MemoryError
        with names.hold() as second:
            assert second.take("r") != "r"


def test_another_name_takes_the_place_of_the_first():
    names = EngineNames()
    with names.hold() as first, names.hold() as second:
        first.take("header")
        assert first.take("body") == "body" and second.take("header") == "header"
