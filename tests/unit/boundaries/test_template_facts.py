"""What is known of a template says no more than was learnt; a setting is made of short values alone."""

from __future__ import annotations

import pytest

from proxy.boundaries.template_facts import DEFAULT, GAP, MAX_SCALAR, Opener, TemplateFacts, Turn, setting_of

OPENER = Opener((1,))


def test_nothing_is_known_of_a_template_at_first():
    facts = TemplateFacts()
    assert facts.end("user") is None and facts.opener("user", tools=False) is None and facts.is_own
    assert facts.turn_holds("user", later=True, system=True, tools=True)
    assert Opener((1,), None, True, False, False) == OPENER


def test_each_fact_is_told_of_its_own_place_alone():
    facts = TemplateFacts({"user": 0, "tool": 7}, {("user", True): OPENER})
    assert [facts.end(role) for role in ("user", "tool", "system", "assistant")] == [0, 7, None, None]
    assert facts.opener("user", tools=True) is OPENER
    assert facts.opener("user", tools=False) is facts.opener("alone", tools=True) is None


def test_a_turn_holds_unless_it_is_this_very_kind_that_does_not():
    facts = TemplateFacts(broken=frozenset({Turn("user", later=True, system=False, tools=True)}))
    kinds = [
        (role, later, system, tools)
        for role in ("user", "tool")
        for later in (False, True)
        for system in (False, True)
        for tools in (False, True)
    ]
    broken = [kind for kind in kinds if not facts.turn_holds(kind[0], later=kind[1], system=kind[2], tools=kind[3])]
    assert broken == [("user", True, False, True)]


def test_what_is_borrowed_has_other_ends_and_is_told_from_what_is_own():
    facts = TemplateFacts({"user": 1}, {("user", True): OPENER}, frozenset({Turn("user", True, True, True)}))
    borrowed = facts.borrowed({"user": 9})
    assert (borrowed.end("user"), borrowed.is_own, facts.end("user"), facts.is_own) == (9, False, 1, True)
    assert (borrowed.openers, borrowed.broken) == (facts.openers, facts.broken)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"reasoning_effort": "x" * MAX_SCALAR}, {"reasoning_effort": "x" * MAX_SCALAR}),
        ({"reasoning_effort": "x" * (MAX_SCALAR + 1)}, {}),
        ({"reasoning_effort": "", "add_special_tokens": False}, {"reasoning_effort": "", "add_special_tokens": False}),
        (
            {"chat_template_kwargs": {"b": 0, "a": 1.5, "c": None, "d": []}},
            {"chat_template_kwargs": {"a": 1.5, "b": 0}},
        ),
        (
            {"chat_template_kwargs": {"a": "x" * MAX_SCALAR, "b": "x" * (MAX_SCALAR + 1)}},
            {"chat_template_kwargs": {"a": "x" * MAX_SCALAR}},
        ),
        ({"chat_template": ""}, {"chat_template": ""}),
        ({"chat_template": 7, "temperature": 1}, {}),
    ],
)
def test_short_words_numbers_and_flags_make_a_setting(body, fields):
    setting = setting_of(body)
    assert setting.fields == fields and setting.is_default is (not fields)
    assert setting.template is ("chat_template" in fields)
    assert (setting.size > 0) is bool(fields) and (setting.key == b"") is (not fields)
    if "chat_template_kwargs" in fields:
        assert list(setting.fields["chat_template_kwargs"]) == sorted(fields["chat_template_kwargs"])


def test_the_default_setting_takes_nothing():
    assert (DEFAULT.key, DEFAULT.template, DEFAULT.size, DEFAULT.is_default) == (b"", False, 0, True)
    assert setting_of({"reasoning_effort": "low"}).size == len(b'{"reasoning_effort":"low"}')


def test_an_id_or_the_name_of_a_tool_fits_between_an_opener_and_its_text():
    assert (GAP, MAX_SCALAR) == (24, 64)
