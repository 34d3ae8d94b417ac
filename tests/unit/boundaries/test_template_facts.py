"""What is known of a template says no more than was learnt; a setting is made of short values alone."""

from __future__ import annotations

from proxy.boundaries.template_facts import GAP, MAX_SCALAR


def test_an_id_or_the_name_of_a_tool_fits_between_an_opener_and_its_text():
    assert (GAP, MAX_SCALAR) == (24, 64)
