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

# Boundaries that only the engine can place.
BEHIND_SYSTEM = Boundary("system", b"s", "first:1", estimate=150)
BEHIND_TURN = Boundary("turn", b"t", -5, estimate=390)


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


def test_a_state_that_a_shorter_beginning_cannot_use_is_not_held_of_it(gateway):
    near = told(b"n", 150)
    gateway.held_states.sent("r", (near, SYSTEM), (150, 163), BOOT, ahead=16)
    gateway.prefix_index.record((near, SYSTEM), BOOT, (150, 163))
    gateway.tell(["came", "r", 400, [[128, "a"], [144, "b"]]])
    assert gateway.held(b"n") == 128 and gateway.held(b"n", b"s") == 144


# Boundaries that the engine resolves.


def test_a_boundary_is_a_guess_until_the_engine_has_resolved_it(gateway):
    gateway.send("r", BEHIND_SYSTEM, BEHIND_TURN)
    assert not gateway.prefix_index.longest((b"s", b"t"), [BOOT])[BOOT].is_told and not gateway.learnt
    gateway.held_states.resolved("r", (163, 400))
    held = gateway.prefix_index.longest((b"s", b"t"), [BOOT])[BOOT]
    assert (held.tokens, held.is_told) == (400, True)
    assert gateway.learnt == [(b"s", 163), (b"t", 400)]
    gateway.tell(["came", "r", 410, [[160, "a"], [384, "b"]]])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (160, 384)


def test_positions_come_in_the_order_of_the_hint(gateway):
    gateway.send("r", BEHIND_SYSTEM, BEHIND_TURN, hint=(-5, "first:1"))
    gateway.held_states.resolved("r", (400, 163))
    assert dict(gateway.learnt) == {b"s": 163, b"t": 400}


def test_what_is_not_in_the_prompt_is_not_held(gateway):
    gateway.send("r", BEHIND_SYSTEM, BEHIND_TURN)
    gateway.held_states.resolved("r", (0, 400))
    assert (gateway.held(b"s"), gateway.held(b"t")) == (0, 400) and gateway.learnt == [(b"t", 400)]
    gateway.tell(["came", "r", 410, [[160, "a"], [400, "b"]]])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (0, 400)


def test_a_boundary_that_is_not_there_leaves_the_state_that_another_request_tied(gateway):
    gateway.send("r", BEHIND_SYSTEM)
    gateway.held_states.resolved("r", (163,))
    gateway.tell(["came", "r", 200, [[160, "a"]]])
    gateway.send("q", BEHIND_SYSTEM)
    gateway.held_states.resolved("q", (0,))
    assert gateway.held(b"s") == 160


def test_two_boundaries_of_one_entry_have_one_position(gateway):
    gateway.send("r", BEHIND_SYSTEM, Boundary("explicit", b"e", "first:1"), BEHIND_TURN, hint=("first:1", -5))
    gateway.held_states.resolved("r", (163, 400))
    assert gateway.learnt == [(b"s", 163), (b"e", 163), (b"t", 400)]


def test_an_outcome_that_is_lost_leaves_only_what_was_known_before(gateway):
    """The state that the engine reports could be that of any boundary."""
    gateway.send("r", BEHIND_SYSTEM, TURN)
    gateway.tell(["came", "r", 410, [[160, "a"], [400, "b"]]])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (0, 400) and not gateway.learnt
    gateway.held_states.resolved("r", (163, 400))  # too late: the request is done
    assert (gateway.held(b"s"), gateway.held(b"t")) == (0, 400)


def test_positions_that_come_between_two_parts_of_a_prompt_tie_the_states_of_both(gateway):
    gateway.send("r", BEHIND_SYSTEM, TURN)
    gateway.tell(["came", "r", 160, [[160, "a"]]])
    gateway.held_states.resolved("r", (163, 400))
    gateway.tell(["came", "r", 410, [[400, "b"]]])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (160, 400)


def test_several_answers_to_one_request_are_reported_one_by_one(gateway):
    """With `n` above 1, an engine has a request for each answer; the gateway's request has the name of all."""
    gateway.send("r", BEHIND_SYSTEM, BEHIND_TURN)
    for _ in range(3):
        gateway.held_states.resolved("r", (163, 400))
        gateway.tell(["came", "r", 410, [[160, "a"], [400, "b"]]])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (160, 400)
    assert gateway.learnt == [(b"s", 163), (b"t", 400)]


def test_a_second_answer_that_starts_before_the_first_has_ended_changes_nothing(gateway):
    gateway.send("r", BEHIND_SYSTEM, BEHIND_TURN)
    gateway.held_states.resolved("r", (163, 400))
    gateway.tell(["came", "r", 200, [[160, "a"]]])
    gateway.held_states.resolved("r", (163, 400))
    gateway.tell(["came", "r", 410, [[400, "b"]]])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (160, 400)


def test_an_engine_that_says_less_than_it_was_asked_ties_what_it_says(gateway):
    gateway.send("r", BEHIND_SYSTEM, BEHIND_TURN)
    gateway.held_states.resolved("r", (163,))
    gateway.tell(["came", "r", 410, [[160, "a"], [400, "b"]]])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (160, 0)


def test_a_boundary_that_was_not_sent_is_placed_where_it_is_known_to_be(gateway):
    """An older engine is sent positions, and says nothing of them."""
    gateway.send("r", told(b"s", 163, "first:1"), BEHIND_TURN, hint=(163,))
    gateway.tell(["came", "r", 410, [[160, "a"]]])
    assert (gateway.held(b"s"), gateway.held(b"t")) == (160, 0)


def test_a_request_without_a_hint_ties_nothing(gateway):
    gateway.send("r", BEHIND_SYSTEM, hint=())
    gateway.held_states.resolved("r", (163,))
    gateway.tell(["came", "r", 200, [[160, "a"]]])
    assert not gateway.learnt and not gateway.held_states._pending and gateway.held(b"s") == 0


def test_nobody_has_sent_what_the_engine_resolved(gateway):
    gateway.held_states.resolved("another gateway's", (163,))
    assert not gateway.learnt


# States that the engine holds.


def test_what_goes_out_is_believed_until_the_engine_speaks(gateway):
    gateway.send("r", SYSTEM, TURN)
    assert gateway.held(b"s", b"t") == 400
    gateway.tell(["came", "r", 410, [[160, "a"], [400, ""]]])
    assert gateway.held(b"s", b"t") == 160  # the turn found no room: its prefix leads to the system prompt's state
    assert gateway.prefix_index.sent((b"s", b"t"), [BOOT]).tokens == 400


def test_a_state_that_went_takes_all_its_prefixes_along_and_no_other(gateway):
    gateway.send("r", SYSTEM, TURN)
    gateway.send("q", told(b"q", 170))
    gateway.tell(["came", "r", 410, [[160, "a"], [400, "b"]]], ["came", "q", 180, [[160, "a"]]])
    gateway.tell(["gone", "a"], ["gone", "never heard of"])
    assert [gateway.held(key) for key in (b"s", b"q", b"t")] == [0, 0, 400]


def test_a_state_that_comes_back_is_believed_again(gateway):
    gateway.send("r", SYSTEM)
    gateway.tell(["came", "r", 200, [[160, "a"]]], ["gone", "a"])
    gateway.send("r2", SYSTEM)
    gateway.tell(["came", "r2", 200, [[160, "a"]]])
    assert gateway.held(b"s") == 160
    gateway.tell(["gone", "a"])
    assert gateway.held(b"s") == 0


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


def test_an_emptied_cache_holds_nothing(gateway):
    gateway.send("r", SYSTEM)
    gateway.send("never told of", TURN)
    gateway.tell(["came", "r", 200, [[160, "a"]]], ["cleared"])
    assert gateway.held(b"s", b"t") == 0
    gateway.tell(["gone", "a"])


def test_a_request_that_was_refused_left_nothing_new(gateway):
    gateway.send("r", SYSTEM)
    gateway.tell(["came", "r", 200, [[160, "a"]]])
    gateway.send("bad", SYSTEM, TURN)
    gateway.held_states.refused("bad")
    assert gateway.held(b"s", b"t") == 160


def test_a_refusal_takes_nothing_from_what_was_there_before(gateway):
    """Of an engine that tells no states, too."""
    gateway.send("r", SYSTEM)
    gateway.send("too long", SYSTEM, TURN)
    gateway.held_states.refused("too long")
    assert gateway.held(b"s", b"t") == 163


def test_what_a_client_did_not_wait_for_is_believed_once_the_engine_tells_of_it(gateway):
    gateway.send("r", BEHIND_SYSTEM)
    gateway.held_states.left("r")
    assert gateway.held(b"s") == 0
    gateway.held_states.resolved("r", (163,))
    gateway.tell(["came", "r", 200, [[160, "a"]]])
    assert gateway.held(b"s") == 160


def test_everything_that_is_forgotten_is_told_on_in_lists(gateway):
    forgotten = []
    gateway.prefix_index.on_forget = lambda keys, boot: forgotten.append(sorted(keys[0 : len(keys)]))
    gateway.send("r", SYSTEM, TURN)
    gateway.tell(["came", "r", 410, [[160, "a"], [400, "b"]]], ["gone", "b"])
    gateway.send("q", HEAD)
    gateway.held_states.refused("q")
    gateway.tell(["cleared"])
    assert [keys for keys in forgotten if keys] == [[b"t"], [b"h"], [b"s"]]


def test_what_was_not_found_is_not_there_but_for_what_the_request_left_and_the_engine_vouches_for(gateway):
    gateway.send("old", HEAD, SYSTEM, TURN)
    gateway.held_states.fell_short((b"h", b"s", b"t"), [b"t"], 0, 16, BOOT)
    assert [gateway.held(key) for key in (b"h", b"s", b"t")] == [12, 0, 400]  # 12 tokens are never found
    gateway.send("r", SYSTEM)
    gateway.tell(["came", "r", 200, [[160, "a"]]])
    gateway.held_states.fell_short((b"s", b"t"), [], 0, 16, BOOT)
    assert gateway.held(b"s", b"t") == 160


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


@pytest.mark.parametrize("end", ["refused", "left"])
def test_a_prefix_that_another_worker_holds_is_new_to_this_one(gateway, end):
    gateway.prefix_index.record([SYSTEM], "another#1")
    gateway.send("r", SYSTEM)
    assert gateway.held(b"s") == 163
    getattr(gateway.held_states, end)("r")
    assert gateway.held(b"s") == 0
    assert gateway.prefix_index.longest([b"s"], ["another#1"])["another#1"].tokens == 163


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


def test_events_of_kinds_that_are_not_known_say_nothing(gateway):
    gateway.send("r", SYSTEM)
    gateway.tell(["later", 1, 2, 3], ["came", "r", 200, [[160, "a"], [176, ""]]], ["adapter", "x"])
    assert gateway.held(b"s") == 160


@pytest.mark.parametrize(
    ("unit", "tokens", "held"), [(16, 400, 407), (16, 399, 163), (1, 407, 407), (1, 406, 163), (16, 500, 407)]
)
def test_what_falls_short_by_less_than_a_unit_does_not(gateway, unit, tokens, held):
    gateway.send("r", SYSTEM, told(b"t", 407))
    gateway.held_states.fell_short([b"s", b"t"], [b"s"], tokens, unit, BOOT)
    assert gateway.held(b"s", b"t") == held
