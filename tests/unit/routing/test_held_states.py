"""The prefix index after each event that an engine can report of its states."""

from __future__ import annotations

import pytest

from proxy.boundaries.boundary import Boundary
from proxy.routing import held_states
from proxy.routing.held_states import HeldStates
from proxy.routing.prefix_index import PrefixIndex

BOOT = "w#1"

HEAD, SYSTEM, TURN = Boundary(12, "system", b"h"), Boundary(163, "system", b"s"), Boundary(400, "turn", b"t")


class Gateway:
    """A prefix index, and the states that one worker is believed to hold."""

    def __init__(self) -> None:
        self.prefix_index = PrefixIndex(10**6)
        self.held_states = HeldStates(self.prefix_index)

    def send(self, request_id: str, *boundaries: Boundary) -> None:
        self.held_states.sent(request_id, boundaries, BOOT)
        self.prefix_index.record(boundaries, BOOT)

    def tell(self, *states: list) -> None:
        self.held_states.apply(states, BOOT)

    def held(self, *keys: bytes) -> int:
        found = self.prefix_index.longest(keys, [BOOT])
        return found[BOOT].tokens if found else 0


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_what_goes_out_is_believed_until_the_engine_speaks(gateway):
    gateway.send("r", SYSTEM, TURN)
    assert gateway.held(b"s", b"t") == 400
    gateway.tell(["came", "r", 410, [[160, "a"], [400, ""]]])
    assert gateway.held(b"s", b"t") == 160  # the turn found no room: its prefix leads to the system prompt's state
    assert gateway.prefix_index.sent((b"s", b"t"), [BOOT]) == 400


def test_a_state_that_went_takes_all_its_prefixes_along_and_no_other(gateway):
    gateway.send("r", SYSTEM, TURN)
    gateway.send("q", Boundary(170, "history", b"q"))
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
    gateway.send("r", SYSTEM)
    gateway.held_states.left("r")
    assert gateway.held(b"s") == 0
    gateway.tell(["came", "r", 200, [[160, "a"]]])
    assert gateway.held(b"s") == 160


def test_everything_that_is_forgotten_is_told_on_in_lists(gateway):
    told = []
    gateway.prefix_index.on_forget = lambda keys, boot: told.append(sorted(keys[0 : len(keys)]))
    gateway.send("r", SYSTEM, TURN)
    gateway.tell(["came", "r", 410, [[160, "a"], [400, "b"]]], ["gone", "b"])
    gateway.send("q", HEAD)
    gateway.held_states.refused("q")
    gateway.tell(["cleared"])
    assert [keys for keys in told if keys] == [[b"t"], [b"h"], [b"s"]]


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
        gateway.send(f"r{number}", Boundary(163, "system", b"%d" % number))
    gateway.tell(["came", "r0", 200, [[160, "a0"]]])
    assert len(gateway.held_states._pending) == 10
    for number in range(30):
        gateway.send(f"r{number}", Boundary(163, "system", b"%d" % number))
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
