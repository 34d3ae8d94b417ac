"""The prefix index after each event that an engine can report of a request's boundaries and of its states."""

from __future__ import annotations

import pytest

from proxy.boundaries.boundary import Boundary
from proxy.boundaries.resolve import Entry
from proxy.routing import held_states
from proxy.routing.held_states import HeldStates
from proxy.routing.prefix_index import PrefixIndex

BOOT = "w#1"


def told(key: bytes, tokens: int, entry: Entry | None = None) -> Boundary:
    """A boundary whose position is known."""
    return Boundary("explicit", key, entry if entry is not None else tokens, tokens, tokens)


HEAD, SYSTEM, TURN = told(b"h", 12), told(b"s", 163), told(b"t", 400)


class Gateway:
    """A prefix index, and the states that one worker is believed to hold."""

    def __init__(self) -> None:
        self.prefix_index = PrefixIndex(10**6)
        self.learnt: list[tuple[bytes, int]] = []
        self.held_states = HeldStates(self.prefix_index, lambda key, tokens: self.learnt.append((key, tokens)))

    def send(self, request_id: str, *boundaries: Boundary, hint: tuple[Entry, ...] | None = None) -> None:
        if hint is None:
            hint = tuple(boundary.entry for boundary in boundaries if boundary.entry is not None)
        self.held_states.sent(request_id, boundaries, hint, BOOT)
        self.prefix_index.record(boundaries, BOOT, hint)

    def tell(self, *states: list) -> None:
        self.held_states.apply(states, BOOT)

    def held(self, *keys: bytes) -> int:
        found = self.prefix_index.longest(keys, [BOOT])
        return found[BOOT].tokens if found else 0


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


# Boundaries that the engine resolves.


# States that the engine holds.


def test_a_prompt_in_several_steps_is_told_of_in_parts(gateway):
    gateway.send("r", SYSTEM, TURN)
    gateway.tell(["came", "r", 160, [[160, "a"]]])  # not yet past the boundary at 163
    gateway.tell(["came", "r", 320, []])
    assert gateway.held(b"s") == 160 and gateway.held(b"t") == 400
    gateway.tell(["came", "r", 410, [[400, "b"]]], ["gone", "a"])
    assert gateway.held(b"s") == 0 and gateway.held(b"t") == 400


def test_a_boundary_that_was_not_asked_for_keeps_the_state_another_request_left(gateway):
    gateway.send("r", SYSTEM, TURN)
    gateway.tell(["came", "r", 410, [[160, "a"], [400, "b"]]])
    gateway.send("r2", SYSTEM, TURN)
    gateway.tell(["came", "r2", 500, [[160, "a"]]])
    assert gateway.held(b"t") == 400


def test_the_deepest_state_of_a_prefix_is_the_one_that_it_leads_to(gateway):
    """The first request found no room for a state at its turn's end; the next one did."""
    gateway.send("r", SYSTEM, TURN)
    gateway.tell(["came", "r", 410, [[160, "a"], [400, ""]]])
    assert gateway.held(b"t") == 160
    gateway.send("q", TURN)
    gateway.tell(["came", "q", 410, [[384, "b"]]])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (160, 384)
    gateway.tell(["gone", "a"])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (0, 384)
    gateway.tell(["gone", "b"])
    assert gateway.held(b"t") == 0


@pytest.mark.parametrize("positions", [[160], [160, 240]])
def test_a_shallower_state_takes_nothing_from_a_deeper_one(gateway, positions):
    gateway.send("r", TURN)
    gateway.tell(["came", "r", 410, [[384, "b"]]])
    gateway.send("q", TURN)
    gateway.tell(["came", "q", 410, [[position, f"a{position}"] for position in positions]])
    assert gateway.held(b"t") == 384


def test_all_that_is_remembered_is_bounded(gateway, monkeypatch):
    monkeypatch.setattr(held_states, "MAX_PENDING", 10)
    monkeypatch.setattr(held_states, "MAX_TIED", 10)
    for number in range(30):
        gateway.send(f"r{number}", told(b"%d" % number, 163))
    gateway.tell(["came", "r0", 200, [[160, "a0"]]])
    assert len(gateway.held_states._pending) == 10
    for number in range(30):
        gateway.send(f"r{number}", told(b"%d" % number, 163))
        gateway.tell(["came", f"r{number}", 200, [[160, f"a{number}"]]])
    assert len(gateway.held_states._tied) == len(gateway.held_states._states) == 10
    assert [gateway.held(b"%d" % number) for number in (0, 19, 20, 29)] == [0, 0, 160, 160]


def test_the_engine_tells_how_far_a_prompt_is_computed_and_when_its_last_boundary_is_behind_it():
    computed = []
    states = HeldStates(PrefixIndex(10**6), lambda *_: None, lambda *told: computed.append(told))
    states.sent("r", (SYSTEM, TURN), (163, 400), BOOT)
    states.apply([["came", "r", 200, [[160, "a"]]], ["came", "r", 400, []], ["came", "another", 9, []]], BOOT)
    assert computed == [("r", 200, False), ("r", 400, True)]


def test_of_requests_that_are_never_reported_the_oldest_counts_as_not_computed(gateway, monkeypatch):
    monkeypatch.setattr(held_states, "MAX_PENDING", 2)
    for name in ("first", "second", "first", "third"):  # a client may use a name again
        gateway.send(name, told(name.encode(), 163))
    assert [gateway.held(name) for name in (b"first", b"second", b"third")] == [163, 0, 163]


def test_what_an_older_state_was_tied_to_is_taken_over_by_that_of_another_boot(gateway):
    gateway.send("r", SYSTEM)
    gateway.tell(["came", "r", 200, [[160, "a"]]])
    states = gateway.held_states
    states.sent("q", (SYSTEM,), (163,), "w#2")
    gateway.prefix_index.record((SYSTEM,), "w#2", (163,))
    states.apply([["came", "q", 200, [[144, "b"]]]], "w#2")
    assert gateway.prefix_index.holds(b"s", "w#2") == 144
    gateway.tell(["gone", "a"])  # nothing is tied to it any more
    assert gateway.prefix_index.holds(b"s", "w#2") == 144 and gateway.held(b"s") == 160
    states.forget_all("w#1")
    assert (gateway.prefix_index.holds(b"s", "w#2"), gateway.held(b"s")) == (0, 0)


@pytest.mark.parametrize(
    ("states", "error"),
    [
        ([["came", "r"]], ValueError),
        ([["came", "r", -1, []]], ValueError),
        ([["came", "r", 9, [[-1, "a"]]]], ValueError),
        ([["came", "r", 9, [[16, 5]]]], ValueError),
        ([["came", "r", 9, 5]], TypeError),
        ([["gone"]], TypeError),
    ],
)
def test_what_makes_no_sense_is_an_error(gateway, states, error):
    gateway.send("r", SYSTEM)
    with pytest.raises(error):
        gateway.tell(*states)


@pytest.mark.parametrize(
    ("unit", "tokens", "held"), [(16, 400, 407), (16, 399, 163), (1, 407, 407), (1, 406, 163), (16, 500, 407)]
)
def test_what_falls_short_by_less_than_a_unit_does_not(gateway, unit, tokens, held):
    gateway.send("r", SYSTEM, told(b"t", 407))
    gateway.held_states.fell_short([b"s", b"t"], [b"s"], tokens, unit, BOOT)
    assert gateway.held(b"s", b"t") == held
