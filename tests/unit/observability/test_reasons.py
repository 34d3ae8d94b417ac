"""What a request got beside what it could have got, and the one cause that is named for the difference."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.observability.reasons import (
    ENGINE_CAUSES,
    REASON_TEXT,
    Delivery,
    Expectation,
    reason_for,
)
from proxy.observability.request_diff import PrefixChange
from proxy.routing.prefix_index import Prefix

UNIT = 16

SENT = Prefix(400, 0)  # the deepest beginning that a worker was sent before; its length was told

GUESSED = Prefix(0, 400)

CHANGE = PrefixChange("message", 0, "system", 40, None, 0, 500)

SALT = CHANGE._replace(what="setting", role="cache_salt")

PROMPT = 1000


def expect(**changes: Any) -> Expectation:
    """Of a prompt that its worker was sent before and holds."""
    known = {"failure": None, "sent": SENT, "sent_here": True, "ever_sent": SENT, "held": 400, "predicted": 400}
    return Expectation(**{**known, "match_unit": UNIT, **changes})


NEW = {"sent": None, "sent_here": False, "ever_sent": None, "held": 0, "predicted": 0}

RESTARTED = {"sent": None, "sent_here": False, "held": 0, "predicted": 0}


@pytest.mark.parametrize(
    ("expected", "delivered", "change", "reason"),
    [
        # All of it came.
        (expect(), {"cached": 400}, None, "hit"),
        (expect(**NEW), {"cached": 160, "shared": 160}, None, "hit"),
        (expect(), {"cached": 400, "unchanged": 900}, CHANGE, "hit"),
        # Nobody began like it.
        (expect(**NEW), {"cached": 0, "shared": 0, "engine": "cold"}, None, "cold"),
        (expect(sent=GUESSED, held=0, predicted=0), {"cached": 0, "shared": 0}, None, "cold"),
        # Its head has changed.
        (expect(**NEW), {"cached": 0, "unchanged": 160}, CHANGE, "prefix_changed"),
        (expect(), {"cached": 0, "unchanged": 900, "shared": 0}, SALT, "salt"),
        (expect(), {"cached": 0, "unchanged": 480}, CHANGE, "evicted"),  # that cost less than what was evicted
        (expect(), {"cached": 0, "unchanged": 480, "engine": "cold"}, CHANGE, "prefix_changed"),  # no state was wanted
        # Too short.
        (expect(**NEW), {"cached": 0, "deepest": 15}, None, "below_unit"),
        (expect(**{**RESTARTED, "ever_sent": Prefix(15, 0)}), {"cached": 0}, None, "below_unit"),
        (expect(), {"cached": 0, "prompt": 16}, None, "below_unit"),  # its last token is always computed
        # The worker knows why.
        (expect(), {"cached": 0, "engine": "evicted"}, None, "evicted"),
        (expect(), {"cached": 0, "engine": "not_worth_it"}, None, "not_worth_it"),
        (expect(), {"cached": 0, "engine": "below_unit"}, None, "below_unit"),
        (expect(), {"cached": 0, "engine": "cold"}, None, "cold"),  # nobody had asked for it by a boundary
        (expect(**NEW), {"cached": 0, "engine": "hint_ignored"}, None, "hint_ignored"),
        (expect(**NEW), {"cached": 0, "shared": 192, "engine": "no_boundary"}, None, "no_boundary"),
        (expect(**NEW), {"cached": 192, "shared": 240, "engine": "hit"}, None, "hit"),  # states lie on multiples of 64
        (expect(**NEW), {"cached": 0, "shared": 192, "engine": "evicted"}, None, "evicted"),  # it had learnt it
        (expect(), {"cached": 0, "engine": "a word of a later version"}, None, "evicted"),
        (expect(), {"cached": 160, "shared": 400, "engine": "hit"}, None, "evicted"),
        (expect(held=0, predicted=0), {"cached": 0, "shared": 0}, None, "evicted"),  # it has forgotten all of it
        # Another worker, another boot.
        (expect(sent_here=False, predicted=0), {"cached": 0, "shared": 0}, None, "other_worker"),
        (expect(**RESTARTED), {"cached": 0}, None, "worker_restarted"),
        # No hint.
        (expect(failure="unpatched"), {"cached": 400}, None, "unpatched"),
        (expect(failure="hint_ignored"), {"cached": 400}, None, "hint_ignored"),
        (expect(failure="no_boundary"), {"cached": 0}, None, "no_boundary"),
        (expect(failure="no_facts"), {"cached": 0}, None, "no_facts"),
    ],
)
def test_the_reason_is_what_cost_most(expected, delivered, change, reason):
    delivery = Delivery.of(expected, delivered.pop("prompt", PROMPT), **delivered)
    assert reason_for(expected, delivery, change) == reason
    assert reason in REASON_TEXT


def test_every_reason_has_a_case_above():
    mark = next(mark for mark in test_the_reason_is_what_cost_most.pytestmark if mark.name == "parametrize")
    assert {case[-1] for case in mark.args[1]} == REASON_TEXT.keys() >= ENGINE_CAUSES


@pytest.mark.parametrize(
    ("boundary", "cached", "reason"),
    [(163, 144, "hit"), (163, 0, "evicted"), (31, 0, "below_unit")],
)
def test_beside_a_draft_head_a_hit_is_what_the_engine_can_deliver(boundary, cached, reason):
    sent = Prefix(boundary, 0)
    expected = expect(sent=sent, ever_sent=sent, held=cached, predicted=cached, ahead=16)
    delivery = Delivery.of(expected, 400, cached, shared=boundary // UNIT * UNIT)
    assert reason_for(expected, delivery) == reason and delivery.shareable == expected.deliverable(boundary)
